"""Static int8: the parts behind capture, prepare and convert that are no front door themselves."""

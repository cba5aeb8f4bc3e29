"""What fusion decides about values: which stay float, and which range the inputs of a concatenation have."""

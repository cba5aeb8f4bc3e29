"""Calibrated ranges: what was seen, and fake quantisation of it."""

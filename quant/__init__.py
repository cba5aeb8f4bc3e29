"""Octet: int8 for PyTorch models on the CPUs people really have."""

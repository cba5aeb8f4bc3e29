"""Driving data through an observed model."""

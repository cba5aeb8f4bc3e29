"""Octet: int8 for PyTorch models on the CPUs people really have."""

from quant.dynamic import NothingQuantized, quantize_dynamic
from quant.recipe import QConfig, Recipe, RecipeError
from quant.report import Report, summary

__all__ = ["NothingQuantized", "QConfig", "Recipe", "RecipeError", "Report", "quantize_dynamic", "summary"]

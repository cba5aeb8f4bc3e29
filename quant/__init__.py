"""Octet: int8 for PyTorch models on the CPUs people really have."""

from quant.artefact import ArtefactError, load, save
from quant.dynamic import NothingQuantized, quantize_dynamic
from quant.recipe import QConfig, Recipe, RecipeError
from quant.report import Report, summary

__all__ = [
    "ArtefactError",
    "NothingQuantized",
    "QConfig",
    "Recipe",
    "RecipeError",
    "Report",
    "load",
    "quantize_dynamic",
    "save",
    "summary",
]

"""Octet: int8 for PyTorch models on the CPUs people really have."""

from quant import calibrate, kernels, observers, types
from quant.artefact import ArtefactError, load, save
from quant.compare import compare
from quant.convert import NotCalibrated, convert
from quant.dynamic import quantize_dynamic
from quant.dynamic_decisions import NothingQuantized
from quant.equalize import equalize
from quant.leaves import register_leaf
from quant.page import report_html
from quant.parity import parity
from quant.post_training import quantize_static
from quant.prepare import prepare
from quant.qat import QATSchedule, check_optimizer, distill_loss, prepare_qat
from quant.recipe import QConfig, Recipe, RecipeError
from quant.report import Report, summary

__all__ = [
    "ArtefactError",
    "NotCalibrated",
    "NothingQuantized",
    "QATSchedule",
    "QConfig",
    "Recipe",
    "RecipeError",
    "Report",
    "calibrate",
    "check_optimizer",
    "compare",
    "convert",
    "distill_loss",
    "equalize",
    "kernels",
    "load",
    "observers",
    "parity",
    "prepare",
    "prepare_qat",
    "quantize_dynamic",
    "quantize_static",
    "register_leaf",
    "report_html",
    "save",
    "summary",
    "types",
]

__version__ = "0.1.0.dev0"

"""Octet: int8 for PyTorch models on the CPUs people really have."""

from __future__ import annotations

import importlib
import sys
import types as _types
from typing import TYPE_CHECKING, Any

from quant import kernels

if TYPE_CHECKING:
    from quant import calibrate, observers, types
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

_DOORS = {
    "ArtefactError": "artefact",
    "NotCalibrated": "convert",
    "NothingQuantized": "dynamic_decisions",
    "QATSchedule": "qat",
    "QConfig": "recipe",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "Report": "report",
    "check_optimizer": "qat",
    "compare": "compare",
    "convert": "convert",
    "distill_loss": "qat",
    "equalize": "equalize",
    "load": "artefact",
    "parity": "parity",
    "prepare": "prepare",
    "prepare_qat": "qat",
    "quantize_dynamic": "dynamic",
    "quantize_static": "post_training",
    "register_leaf": "leaves",
    "report_html": "page",
    "save": "artefact",
    "summary": "report",
}
"""Public name -> the module that has it, which is imported when the name is first used.

A process that loads and runs a converted model imports nothing of what makes one.
"""


class _Package(_types.ModuleType):
    """This package; a public function of a module of the same name, as `quant.convert`, stands before that module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module 'quant' has no attribute {name!r}")
        if name in _DOORS:
            public = getattr(importlib.import_module(f"quant.{_DOORS[name]}"), name)
            super().__setattr__(name, public)
            return public
        try:
            return importlib.import_module(f"quant.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"quant.{name}":
                raise
            raise AttributeError(f"module 'quant' has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _DOORS or not isinstance(value, _types.ModuleType):  # which Python sets when it imports one
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package

"""Octet: int8 for PyTorch models on the CPUs people really have.

A name is imported when it is first asked for: a process that runs a converted model imports no capture and no
conversion. The kernels come at once, since scripted and exported models call their operators by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("quant.kernels") is None:
    # Found in a checkout's root, where `python -m` and a Python prompt look first: the other packages lie beside this
    # folder.
    __path__.append(str(Path(__file__).resolve().parent.parent))

from quant import kernels

if TYPE_CHECKING:
    from quant import calibrate, observers, types
    from quant.artefact import ArtefactError, load, save
    from quant.autoquant import autoquant
    from quant.benchmark import benchmark
    from quant.compare import compare
    from quant.convert import NotCalibrated, convert
    from quant.dynamic import quantize_dynamic
    from quant.dynamic_decisions import NothingQuantized
    from quant.equalize import equalize
    from quant.export.executorch import export_executorch
    from quant.export.qdq import to_qdq
    from quant.leaves import register_leaf
    from quant.migrate import from_torch_ao
    from quant.onnx import export_onnx, load_onnx
    from quant.page import report_html
    from quant.parity import parity
    from quant.post_training import quantize_static
    from quant.prepare import prepare
    from quant.qat import QATSchedule, check_optimizer, distill_loss, prepare_qat
    from quant.recipe import QConfig, Recipe, RecipeError
    from quant.reconstruction import learn_rounding
    from quant.report import Report, summary
    from quant.sensitivity import sensitivity
    from quant.shards import load_quantized

__all__ = [
    "ArtefactError",
    "NotCalibrated",
    "NothingQuantized",
    "QATSchedule",
    "QConfig",
    "Recipe",
    "RecipeError",
    "Report",
    "autoquant",
    "benchmark",
    "calibrate",
    "check_optimizer",
    "compare",
    "convert",
    "distill_loss",
    "equalize",
    "export_executorch",
    "export_onnx",
    "from_torch_ao",
    "kernels",
    "learn_rounding",
    "load",
    "load_onnx",
    "load_quantized",
    "observers",
    "parity",
    "prepare",
    "prepare_qat",
    "quantize_dynamic",
    "quantize_static",
    "register_leaf",
    "report_html",
    "save",
    "sensitivity",
    "summary",
    "to_qdq",
    "types",
]

__version__ = "0.1.0"

_MODULES = {
    "artefact": ("ArtefactError", "load", "save"),
    "autoquant": ("autoquant",),
    "benchmark": ("benchmark",),
    "compare": ("compare",),
    "convert": ("NotCalibrated", "convert"),
    "dynamic": ("quantize_dynamic",),
    "dynamic_decisions": ("NothingQuantized",),
    "equalize": ("equalize",),
    "export.executorch": ("export_executorch",),
    "export.qdq": ("to_qdq",),
    "leaves": ("register_leaf",),
    "migrate": ("from_torch_ao",),
    "onnx": ("export_onnx", "load_onnx"),
    "page": ("report_html",),
    "parity": ("parity",),
    "post_training": ("quantize_static",),
    "prepare": ("prepare",),
    "qat": ("QATSchedule", "check_optimizer", "distill_loss", "prepare_qat"),
    "recipe": ("QConfig", "Recipe", "RecipeError"),
    "reconstruction": ("learn_rounding",),
    "report": ("Report", "summary"),
    "sensitivity": ("sensitivity",),
    "shards": ("load_quantized",),
}
"""Where the names above stand that are no modules."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"quant.{_MODULE_OF[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"quant.{name}") is not None:
        value = importlib.import_module(f"quant.{name}")
    else:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = {name for name, value in globals().items() if getattr(value, "__name__", "").startswith(f"{__name__}.")}
    return sorted({*own, *__all__, *(name for name in globals() if name.startswith("__"))})


class _Package(ModuleType):
    """This package, in which a verb is not hidden by the module of the same name when that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _MODULE_OF):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

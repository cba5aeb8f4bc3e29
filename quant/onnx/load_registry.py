"""The operators that `load_onnx` reads: a function for each, by its name in ONNX."""

from __future__ import annotations

from collections.abc import Callable

from quant.onnx.load_plan import Translate

OPERATORS: dict[str, Translate] = {}


def translates(*names: str) -> Callable[[Translate], Translate]:
    """Register a function for operators of ONNX."""

    def add(function: Translate) -> Translate:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return add

"""The lines of a plan that compute an int8 layer at one of its sites, as `Int8Layer.compute` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.chained_lines import BEFORE, Lines, chained
from quant.runtime.instructions import LayerCall
from quant.runtime.int8_layer import Int8Layer

Name = Callable[[Tensor], Constant]
"""Names a tensor in the text."""


def layer_lines(call: LayerCall, layer: Int8Layer, known: Any, spare: int, constant: Name) -> list[Line]:
    """The lines of a call; the last gives its value.

    Args:
        known: the derived numbers of the site.
        spare: the first of the registers that nothing else uses, one for each line but the last.
        constant: names a tensor in the text.
    """
    x, clamp = Register(call.source), layer.clamps[call.site]
    operations: Lines = []
    if known.low is None:
        moves = _add_product(operations, x, known, _weight_of(known, layer, constant), constant)
        if known.limits is None and clamp is not None:
            operations.append(("clamp", {"x": BEFORE, "low": clamp[0], "high": clamp[1]}))
        _add_moves(operations, moves, spare)
        return chained(operations, call.out, spare)
    return chained(_two_products(x, known, clamp, _weight_of(known, layer, constant), spare, constant), call.out, spare)


def _two_products(
    x: Register, known: Any, clamp: tuple[float, float] | None, weight: Constant, spare: int, constant: Name
) -> Lines:
    """The lines for 16-bit activations: two bytes of float32, and the sum of their products."""
    high = {"scale": known.input_scale, "zero_point": known.input_zero_point}
    low = {"scale": known.low.input_scale, "zero_point": known.low.input_zero_point}
    operations: Lines = [
        ("quantize", {"x": x, **high}),
        ("dequantize", {"q": BEFORE, **high}),
        ("binary_f32", {"a": x, "b": BEFORE, "by": "sub"}),
        ("quantize", {"x": BEFORE, **low}),
    ]
    sums = []
    for byte, numbers in ((0, known), (3, known.low)):
        _add_moves(operations, _add_product(operations, Register(spare + byte), numbers, weight, constant), spare)
        sums.append(Register(spare + len(operations) - 1))
    operations.append(("add_f32", {"a": sums[0], "b": sums[1]}))
    if clamp is not None:
        operations.append(("clamp", {"x": BEFORE, "low": clamp[0], "high": clamp[1]}))
    if known.output_scale:
        numbers = {"scale": known.output_scale, "zero_point": known.output_zero_point}
        operations.append(("quantize", {"x": BEFORE, **numbers}))
    return operations


def _weight_of(known: Any, layer: Int8Layer, constant: Name) -> Constant:
    return constant(layer.q_weight if known.phases is None else known.phases.q_weight)


def _add_product(operations: Lines, x: Register, known: Any, weight: Constant, constant: Name) -> Any:
    """Add the product with some bytes; returns what has its outputs in other places than the layer's, or None."""
    if known.pad is not None:
        widths, mode, fill = known.pad
        operations.append(("pad", {"q": x, "widths": tuple(widths), "mode": mode, "fill": fill}))
        x = BEFORE
    how = known if known.phases is None else known.phases
    settings: dict[str, Any] = {"q_x": x, "zero_point": known.input_zero_point, "q_weight": weight}
    settings["q_bias"] = None if how.q_bias is None else constant(how.q_bias)
    settings.update(how.product.settings)
    settings["multiplier"] = constant(how.multiplier)
    if known.limits is not None:
        low, high = known.limits
        settings.update(output_zero_point=known.output_zero_point, quant_min=low, quant_max=high)
    operations.append((how.product.reals if known.limits is None else how.product.integers, settings))
    return known.phases


def _add_moves(operations: Lines, phases: Any, spare: int) -> None:
    """Put the outputs of phases in the layer's order."""
    if phases is not None:
        y = Register(spare + len(operations) - 1)
        operations += [(name, {"x": BEFORE, **move}) for name, move in phases.moves(y)]

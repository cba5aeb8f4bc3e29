"""The lines of a plan that compute an int8 layer at one of its sites, as `Int8Layer.compute` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.chained_lines import BEFORE, Lines, chained
from quant.runtime.instructions import LayerCall
from quant.runtime.int8_layer import Int8Layer


def layer_lines(
    call: LayerCall, layer: Int8Layer, known: Any, spare: int, constant: Callable[[Tensor], Constant]
) -> list[Line]:
    """The lines of a call; the last gives its value.

    Args:
        known: the derived numbers of the site.
        spare: the first of the registers that nothing else uses, one for each line but the last.
        constant: names a tensor in the text.
    """
    operations: Lines = []
    x = Register(call.source)
    if known.pad is not None:
        widths, mode, fill = known.pad
        operations.append(("pad", {"q": x, "widths": tuple(widths), "mode": mode, "fill": fill}))
        x = BEFORE
    how, weight = (known, layer.q_weight) if known.phases is None else (known.phases, known.phases.q_weight)
    settings: dict[str, Any] = {"q_x": x, "zero_point": known.input_zero_point, "q_weight": constant(weight)}
    settings["q_bias"] = None if how.q_bias is None else constant(how.q_bias)
    settings.update(how.product.settings)
    settings["multiplier"] = constant(how.multiplier)
    if known.limits is not None:
        low, high = known.limits
        settings.update(output_zero_point=known.output_zero_point, quant_min=low, quant_max=high)
    operations.append((how.product.reals if known.limits is None else how.product.integers, settings))
    clamp = layer.clamps[call.site]
    if known.limits is None and clamp is not None:
        operations.append(("clamp", {"x": BEFORE, "low": clamp[0], "high": clamp[1]}))
    if known.phases is not None:
        phases = Register(spare + len(operations) - 1)
        operations += [(name, {"x": BEFORE, **move}) for name, move in known.phases.moves(phases)]
    return chained(operations, call.out, spare)

"""Finds sizes that differ between calls although the recordings of a capture agreed on them.

A capture's other recordings have sizes one larger, and a stride may swallow that: a convolution of stride 2 has 8 rows
of 15 and of 16. A module reads such a size anew in each call; a file would keep it, and be wrong for other inputs.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from quant.onnx.verify import drawn, held_values
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.values import Size

FURTHER = (64, 16, 4)
"""By how much sizes are moved, until the model takes them: beyond the strides of most networks at first."""

FURTHER_BATCH = 2
"""By how much the first size of an input is moved."""


def varying_sizes(runner: ProgramRunner) -> set[tuple[int, int]]:
    """Register and axis of each size that is no symbol of the program, and another one in a larger call."""
    program = runner.program
    if not program.sizes or any(getattr(one, "writes", None) for one in program.instructions):
        return set()
    for further in FURTHER:
        with contextlib.suppress(Exception):  # the model has no such call
            held = held_values(runner, drawn(program, _moved(program, further)))
            return {
                (value.id, axis)
                for value in program.values
                if value.shape is not None and isinstance(tensor := held.of(value), Tensor)
                for axis, (size, seen) in enumerate(zip(value.shape, tensor.shape, strict=True))
                if isinstance(size, int) and size != seen
            }
    return set()


def _moved(program: Program, further: int) -> dict[str, int]:
    """Other sizes for the symbols."""
    shapes = [program.values[register].shape or () for register in program.inputs]
    first = {shape[0].symbol for shape in shapes if shape and isinstance(shape[0], Size)}
    return {symbol: size + (FURTHER_BATCH if symbol in first else further) for symbol, size in program.sizes.items()}

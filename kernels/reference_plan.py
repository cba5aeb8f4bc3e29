"""The text of a planned run and its oracle: a region of a converted model as data, interpreted operator by operator.

A text is one operation a line, over registers (%n) and constant tensors ($n); names and values of settings are those of
the operators in `reference_ops`:

    octet-plan 1
    inputs %0
    %1 = quantize x=%0 scale=0.02 zero_point=128
    %3 = conv_u8s8_u8 q_x=%1 zero_point=128 q_weight=$0 q_bias=- stride=1,1 ...
    outputs %3

The extension runs the same text as one call in csrc/plan*.cpp, and gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quant.kernels.reference_ops import OPS, OpTable, rescale
from quant.kernels.reference_reals import REALS
from torch import Tensor

HEADER = "octet-plan 1"


@dataclass(frozen=True)
class Register:
    """The value of register `index`; with a dimension, its size there."""

    index: int
    dim: int | None = None

    def __str__(self) -> str:
        return f"%{self.index}" if self.dim is None else f"%{self.index}.{self.dim}"


@dataclass(frozen=True)
class Constant:
    """The constant tensor `index`."""

    index: int

    def __str__(self) -> str:
        return f"${self.index}"


@dataclass(frozen=True)
class Line:
    """%out = op with settings."""

    out: int
    op: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        settings = "".join(f" {name}={format_value(value)}" for name, value in self.settings.items())
        return f"%{self.out} = {self.op}{settings}"


@dataclass(frozen=True)
class PlanText:
    """Lines in order, with the registers that are given and those that are given back."""

    inputs: tuple[int, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(
            [
                HEADER,
                " ".join(["inputs", *(f"%{index}" for index in self.inputs)]),
                *map(str, self.lines),
                " ".join(["outputs", *(f"%{index}" for index in self.outputs)]),
            ]
        )


def format_value(value: Any) -> str:
    """A setting as text; lists end with a comma where they hold one value, so that they stay lists."""
    if value is None:
        return "-"
    if isinstance(value, (tuple, list)):
        return ",".join(map(format_value, value)) + ("," if len(value) < 2 else "")
    return str(value)


@functools.lru_cache(64)
def parse(text: str) -> PlanText:
    """The inverse of str(PlanText).

    Raises:
        ValueError: the text is none, or of another version.
    """
    rows = text.split("\n")
    if rows[0] != HEADER:
        raise ValueError(f"expected {HEADER!r}, got {rows[0]!r}: the plan was written by another version")
    registers = {"inputs": (), "outputs": ()}  # type: dict[str, tuple[int, ...]]
    lines = []
    for row in rows[1:]:
        first, *rest = row.split(" ")
        if first in registers:
            registers[first] = tuple(int(word[1:]) for word in rest)
        else:
            pairs = (word.split("=", 1) for word in rest[2:])
            lines.append(Line(int(first[1:]), rest[1], {name: _value(value) for name, value in pairs}))
    return PlanText(registers["inputs"], tuple(lines), registers["outputs"])


def _value(word: str) -> Any:
    if "," in word:
        return tuple(_value(part) for part in word.split(",") if part)
    if word in _WORDS:
        return _WORDS[word]
    if word[0] == "%":
        index, _, dim = word[1:].partition(".")
        return Register(int(index), int(dim) if dim else None)
    if word[0] == "$":
        return Constant(int(word[1:]))
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


_WORDS = {"-": None, "True": True, "False": False}


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def _slice(x: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _cat(
    tensors: Sequence[Tensor],
    dim: int,
    zero_points: Sequence[int] | None = None,
    multipliers: Sequence[float] | None = None,
    output_zero_point: int = 0,
) -> Tensor:
    """Joined as they are or, with multipliers, each by `rescale`; 1.0 and the output's zero point change nothing."""
    if zero_points is None or multipliers is None:
        return torch.cat(list(tensors), dim)
    numbers = zip(tensors, zero_points, multipliers, strict=True)
    return torch.cat([rescale(q, zero, multiplier, output_zero_point) for q, zero, multiplier in numbers], dim)


MOVES: dict[str, Callable[..., Tensor]] = {
    "clamp": _clamp,
    "cat": _cat,
    "reshape": lambda x, shape: x.reshape(shape),
    "flatten": lambda x, start, end: x.flatten(start, end),
    "permute": lambda x, dims: x.permute(dims),
    "transpose": lambda x, dim0, dim1: x.transpose(dim0, dim1),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "squeeze": lambda x, dim: x.squeeze(dim),
    "slice": _slice,
    "select": lambda x, dim, index: x.select(dim, index),
    "chunk": lambda x, chunks, dim, index: x.chunk(chunks, dim)[index],
    "same": lambda x: x,
}
"""Operations of a text that are not in `reference_ops.OPS`: moves, and the clamp of a layer with float output."""


def run_plan(
    inputs: Sequence[Tensor], constants: Sequence[Tensor], program: str, *, table: OpTable = OPS
) -> list[Tensor]:
    """Run a text.

    Args:
        inputs: float32 or uint8, one per register of the text's `inputs`.
        constants: what $n names: int8 weights, int32 biases, float32 multipliers and norms, uint8 look-up tables.
        table: the operators, with the arguments of their references.

    Returns:
        One tensor per register of the text's `outputs`. Float32 is contiguous; uint8 of four or more dimensions has the
        channels innermost, else it is contiguous too. None shares memory with an input.
    """
    plan = parse(program)
    if len(inputs) != len(plan.inputs):
        raise ValueError(f"the plan has {len(plan.inputs)} inputs, got {len(inputs)}")
    registers = dict(zip(plan.inputs, inputs, strict=True))

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(filled, value))
        if isinstance(value, Register):
            found = registers[value.index]
            return found if value.dim is None else found.shape[value.dim]
        return constants[value.index] if isinstance(value, Constant) else value

    for line in plan.lines:
        operator = MOVES.get(line.op) or REALS.get(line.op) or table[line.op]
        registers[line.out] = operator(**{name: filled(value) for name, value in line.settings.items()})
    return [_as_promised(registers[index]) for index in plan.outputs]


def _as_promised(value: Tensor) -> Tensor:
    """A copy in the memory format of run_plan's outputs."""
    if value.dtype == torch.float32 or value.dim() < 4:
        return value.clone(memory_format=torch.contiguous_format)
    return value.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)

"""The text of a plan, and its oracle: a region of a converted model as data, interpreted operator by operator.

A text is one operation a line, over registers (%n) and constant tensors ($n); names and values of settings are those of
the operators in `reference_ops`:

    octet-plan 1
    inputs %0
    %1 = quantize x=%0 scale=0.02 zero_point=128
    %3 = conv_u8s8_u8 q_x=%1 zero_point=128 q_weight=$0 q_bias=- stride=1,1 ...
    outputs %3

The extension runs the same text as one call in csrc/core/plan/, and gives the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quant.kernels import plan_check, plan_shapes, plan_sizes, reference
from quant.kernels.plan_sizes import Arithmetic
from quant.kernels.reference_indices import INDICES
from quant.kernels.reference_layers import LAYERS, RECURRENT, OutOfTable, States, rnn_static
from quant.kernels.reference_ops import OPS, OpTable, rescale
from quant.kernels.reference_reals import REALS
from torch import Tensor

HEADER = "octet-plan 1"


@dataclass(frozen=True)
class Register:
    """The value of register `index`; or, with a dimension, its size in that dimension."""

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
        settings = "".join([f" {name}={format_value(value)}" for name, value in self.settings.items()])
        return f"%{self.out} = {self.op}{settings}"


@dataclass(frozen=True)
class PlanText:
    """Lines in order, with the registers of the inputs and outputs."""

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
        return ",".join([format_value(one) for one in value]) + ("," if len(value) < 2 else "")
    return str(value)


@functools.lru_cache(64)
def parse(text: str) -> PlanText:
    """The inverse of str(PlanText), with all checks that need no shapes (`plan_check`).

    Raises:
        ValueError: the text is not a plan, or of another version; the message quotes the line.
    """
    rows = text.split("\n")
    if rows[0] != HEADER:
        raise ValueError(f"expected {HEADER!r}, got {rows[0]!r}: the plan was written by another version")
    if len(rows) < 3:
        raise ValueError(f"plan: expected {HEADER!r}, inputs, operations and outputs")
    inputs, outputs = _registers(rows[1], "inputs"), _registers(rows[-1], "outputs")
    written = set(inputs)
    if len(written) < len(inputs):
        raise ValueError(f"plan line {rows[1]!r}: names an input twice")
    lines = []
    for row in rows[2:-1]:
        with _named(row):
            line, read = parse_line(row)
            for index in read:
                if index not in written:
                    raise ValueError(f"%{index} is not there yet")
            if line.out in written:
                raise ValueError(f"%{line.out} is there already")
            written.add(line.out)
            lines.append(line)
    for index in outputs:
        if index not in written:
            raise ValueError(f"the plan gives out %{index}, which it does not make")
    return PlanText(inputs, tuple(lines), outputs)


@contextlib.contextmanager
def _named(row: str) -> Iterator[None]:
    """Errors quote the line, as the extension's do."""
    try:
        yield
    except OutOfTable as error:
        raise IndexError(f"plan line '{row}': {error}") from error
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, IndexError, RuntimeError):
            raise  # of torch's own machinery
        raise ValueError(f"plan line '{row}': {error}") from error


def _registers(row: str, word: str) -> tuple[int, ...]:
    first, *rest = row.split(" ")
    with _named(row):
        if first != word:
            raise ValueError(f"expected '{word} ...'")
        return tuple(plan_check.index(one, "%") for one in rest)


def parse_line(row: str) -> tuple[Line, list[int]]:
    """Parse a line; also returns the registers that it reads.

    Raises:
        ValueError: the text is not a line, or does not fit the table of settings.
    """
    words = row.split(" ")
    if "" in words:
        raise ValueError("expected words with one space between them")
    if len(words) < 3 or words[1] != "=":
        raise ValueError("expected '%register = operation name=value ...'")
    fields: dict[str, str] = {}
    for word in words[3:]:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"expected name=value, got '{word}'")
        if name in fields:
            raise ValueError(f"has {name} twice")
        fields[name] = value
    plan_check.check(words[2], fields)
    read = [int(index) for value in fields.values() for index in re.findall("%([0-9]+)", value)]
    settings = {name: _value(value) for name, value in fields.items()}
    return Line(plan_check.index(words[0], "%"), words[2], settings), read


def _value(word: str) -> Any:
    if "," in word:
        return tuple(_value(part) for part in word.split(",") if part)
    if word in _WORDS:
        return _WORDS[word]
    if word[0] == "(" or (word[0] == "%" and "." in word):
        return plan_sizes.parse(word, Register)
    if word[0] == "%":
        return Register(int(word[1:]))
    if word[0] == "$":
        return Constant(int(word[1:]))
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


_WORDS = {"-": None, "True": True, "False": False}


def _check_tensors(op: str, settings: Mapping[str, Any]) -> None:
    """What torch would take, or take otherwise, and the kernels do not."""
    first: Tensor | None = None
    for name, setting in plan_check.table()[op].items():
        kind, value = setting.kind.removeprefix("$"), settings.get(name)
        for one in value if isinstance(value, tuple) else (value,):
            if not isinstance(one, Tensor):
                continue
            wanted = DTYPES.get(kind)
            if wanted is not None and one.dtype != wanted:
                raise ValueError(f"{name} is {one.dtype}, expected {wanted}")
            first = one if first is None else first
            reference.check_device(first, one, name)
    if op in plan_shapes.CHECKS:
        plan_shapes.CHECKS[op](settings)


INPUTS = (torch.float32, torch.uint8, torch.int64)
CONSTANTS = (torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32)
DTYPES = {"u8": torch.uint8, "u8s": torch.uint8, "f32": torch.float32, "f32s": torch.float32, "int8": torch.int8,
          "i64": torch.int64, "int32": torch.int32, "float32": torch.float32, "uint8": torch.uint8}  # fmt: skip
"""Of the kinds of registers and constants in the table of settings."""


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def _slice(x: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _holds(x: Tensor, size: int, equals: int) -> Tensor:
    if size != equals:
        raise ValueError(f"is {size}, expected {equals}")
    return x


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
    "expand": lambda x, shape: x.expand(shape),
    "holds": _holds,
    "select": lambda x, dim, index: x.select(dim, index),
    "chunk": lambda x, chunks, dim, index: x.chunk(chunks, dim)[index],
    "same": lambda x: x,
}
"""Operations of a text that are not in `reference_ops.OPS`: moves, and the clamp of a layer with float output."""


def operation_of(row: str) -> str:
    """The operation of a line that was checked."""
    return row.split(" ", 3)[2]


_OWN: dict[str, Callable[..., Tensor]] = {**MOVES, **REALS, **LAYERS, **INDICES}
"""All of them."""

CHECKS_OF_SIZES = frozenset({"holds"})
"""Operations that compute nothing and refuse sizes that a text does not stand for."""

READS_OF_BYTES = frozenset({"dequantize"})
"""Operations by which a plan makes float32 of bytes."""


def run_plan(
    inputs: Sequence[Tensor], constants: Sequence[Tensor], program: str, *, table: OpTable = OPS
) -> list[Tensor]:
    """Run a text.

    Args:
        inputs: float32, uint8 or, of indices, int64, one per register of the text's `inputs`.
        constants: what $n names: int8 weights, int32 biases, float32 multipliers, norms and embeddings, uint8 tables
            and weights of few bits, whose scales by group are float16 or float32.
        table: the operators, with the arguments of their references.

    Returns:
        One tensor per register of the text's `outputs`. Float32 is contiguous; uint8 of four or more dimensions has the
        channels innermost, else it is contiguous too. None shares memory with an input.
    """
    plan = parse(program)
    if len(inputs) != len(plan.inputs):
        raise ValueError(f"the plan has {len(plan.inputs)} inputs, got {len(inputs)}")
    for kind, values, dtypes in (("an input", inputs, INPUTS), ("a constant", constants, CONSTANTS)):
        for one in values:
            if one.dtype not in dtypes:
                raise TypeError(f"{kind} is {one.dtype}, expected one of {', '.join(map(str, dtypes))}")
    registers = dict(zip(plan.inputs, inputs, strict=True))
    states: dict[int, States] = {}

    def size(register: Register) -> int:
        assert register.dim is not None
        return registers[register.index].shape[register.dim]

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(filled, value))
        if isinstance(value, Register):
            return registers[value.index] if value.dim is None else size(value)
        if isinstance(value, Arithmetic):
            return plan_sizes.number_of(value, size)
        if not isinstance(value, Constant):
            return value
        if value.index >= len(constants):
            raise ValueError(f"there are {len(constants)} constants")
        return constants[value.index]

    for line in plan.lines:
        with _named(str(line)):
            if line.op == "final_state":
                registers[line.out] = _final_state(states, line)
                continue
            settings = {name: filled(value) for name, value in line.settings.items()}
            _check_tensors(line.op, settings)
            if line.op in RECURRENT:
                layer: Callable[..., States] = table.get(line.op) or RECURRENT[line.op]  # type: ignore[assignment]
                states[line.out] = layer(**settings)
                registers[line.out] = states[line.out][0]
                continue
            operator = _OWN.get(line.op) or table[line.op]
            registers[line.out] = operator(**settings)
    if any(registers[index].dtype is torch.int64 for index in plan.outputs):
        raise ValueError("the plan gives out int64, expected float32 or uint8")
    return [_as_promised(registers[index]) for index in plan.outputs]


def _final_state(states: Mapping[int, States], line: Line) -> Tensor:
    known = states.get(line.settings["y"].index)
    if known is None:
        raise ValueError("what it reads is no recurrent layer")
    if line.settings["of"] == "c" and known[2].dim() != 2:
        raise ValueError("the recurrent layer's kind has no c")
    return known[1 if line.settings["of"] == "h" else 2]


class _NotFinite(Exception):
    """A value that is to be quantised is NaN or inf."""


def _recurrent_finite(h: Tensor | None, c: Tensor | None, **settings: Any) -> States:
    if any(one is not None and not bool(torch.isfinite(one).all()) for one in (h, c)):
        raise _NotFinite
    return rnn_static(h=h, c=c, **settings)


def _of_finite(table: OpTable) -> dict[str, Callable[..., Any]]:
    """The operators of a table; those that round raise where a value is not finite."""

    def quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
        if not bool(torch.isfinite(x).all()):
            raise _NotFinite
        return table["quantize"](x, scale, zero_point)

    return {**table, "quantize": quantize, "rnn_static": _recurrent_finite}


def run_plan_of_finite(
    inputs: Sequence[Tensor], constants: Sequence[Tensor], program: str, *, table: OpTable = OPS
) -> list[Tensor]:
    """`run_plan`, or an empty list where a value to be quantised is NaN or inf, which no integer represents.

    A later line that does not fit is an error all the same, as it is of the kernels, which run to the end.
    """
    try:
        return run_plan(inputs, constants, program, table=_of_finite(table))
    except _NotFinite:
        run_plan(inputs, constants, program, table=table)
        return []


def _as_promised(value: Tensor) -> Tensor:
    """A copy in the memory format of run_plan's outputs."""
    if value.dtype == torch.float32 or value.dim() < 4:
        return value.clone(memory_format=torch.contiguous_format)
    return value.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)

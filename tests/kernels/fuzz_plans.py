"""`make fuzz-plans`: random programs for `run_plan`: the kernels give the interpreter's bits, or both refuse.

A program is drawn line by line from the table of operations, each of which has a generator here: over registers that
others have made, views of them, the same one twice, inputs that are one tensor, empty batches and constants; any
registers are outputs. Then it runs again on inputs of other sizes. What reals agree on within rounding alone
(`plan_mutations.INEXACT`) is given out, moved or compared, and never rounded to integers.

    python tests/kernels/fuzz_plans.py --seconds 600 --seed 1000
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from quant.kernels import ops, reference_plan, tables
from quant.kernels.recurrent.kind import kinds
from quant.kernels.reference_layers import RECURRENT
from quant.kernels.reference_ops import OPS
from quant.kernels.reference_plan import Constant, Line, PlanText, Register

from tests.kernels import fuzzing, random_calls
from tests.kernels.fuzzing import Draws, Fuzzer, Wrong
from tests.kernels.random_calls import byte, integer_weight, operand, ordered, real_values, size

PATH = "tests/kernels/fuzz_plans.py"
MOST_VALUES = 1 << 14
INEXACT = frozenset(
    (*("layer_norm", "group_norm", "rms_norm", "instance_norm", "attention", "softmax", "silu", "reduce_f32"),
     *("linear_dynamic", "embedding_table", "rnn_static", "rnn_dynamic", "final_state"))
)  # fmt: skip
EXACT_FUNCTIONS = ("neg", "abs")


class NoPlace(Exception):
    """The values that there are do not suit an operation."""


@dataclass
class Program:
    """A program that grows, with the values of its registers."""

    draws: Draws
    values: dict[int, Tensor] = field(default_factory=dict)
    inexact: set[int] = field(default_factory=set)
    inputs: list[int] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    moving: bool = False

    def add(self, value: Tensor) -> int:
        index = len(self.values)
        self.values[index] = value
        return index

    def new_input(self, value: Tensor) -> Register:
        """An input, or one that is there and is the same in shape: two inputs may be one tensor."""
        index = self.add(operand(self.draws, value))
        self.inputs.append(index)
        return Register(index)

    def constant(self, value: Tensor) -> Constant:
        self.constants.append(operand(self.draws, value, whole=True))
        return Constant(len(self.constants) - 1)

    def __getitem__(self, register: Register) -> Tensor:
        return self.values[register.index]

    def pick(self, dtype: torch.dtype, ranks: Sequence[int] = (0, 1, 2, 3, 4, 5)) -> Register:
        """A register of a dtype and rank; a new input where there is none, and now and then."""
        known = [
            index
            for index, value in self.values.items()
            if value.dtype == dtype and value.dim() in ranks and (self.moving or index not in self.inexact)
        ]
        if known and not self.draws.one_in(6):
            return Register(known[-1 - self.draws.below(len(known))])
        if self.lines and self.draws.below(3) == 0 and not known:
            raise NoPlace
        return self.new_input(self.random(dtype, self.shape(ranks)))

    def shape(self, ranks: Sequence[int]) -> list[int]:
        """Small: programs are many, and a plan does not look at how much."""
        usual = [one for one in (4, 2, 3, 1, 5, 0) if one in ranks]
        sizes = [size(self.draws, 9) for _ in range(self.draws.choice(usual))]
        if sizes and self.draws.one_in(12):
            sizes[-1] = size(self.draws, 65)
        return sizes

    def random(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        if dtype == torch.float32:
            return real_values(self.draws, shape)
        if dtype == torch.int64:
            return torch.randint(0, 4, tuple(shape), generator=self.draws.generator())
        return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=self.draws.generator())

    def beside(self, register: Register, dtype: torch.dtype | None = None) -> Register:
        """What broadcasts with a register: itself, another one that does, or a new input."""
        wanted, value = dtype or self[register].dtype, self[register]
        how = self.draws.below(3)
        if how == 0 and wanted == value.dtype:
            return register
        if how == 1:
            for index in reversed(self.values):
                other = self.values[index]
                if other.dtype == wanted and (self.moving or index not in self.inexact) and broadcasts(value, other):
                    return Register(index)
        shape = [1 if self.draws.below(3) == 2 else one for one in value.shape]
        return self.new_input(
            self.random(wanted, shape[self.draws.below(len(shape) + 1) if self.draws.below(2) else 0 :])
        )

    def dim(self, rank: int) -> int:
        """A dimension, counted from either end."""
        if rank == 0:
            raise NoPlace
        return self.draws.below(rank) - (rank if self.draws.below(2) else 0)

    def line(self, op: str, settings: dict[str, Any]) -> None:
        """Compute a line and append it."""
        reads = [one for value in settings.values() for one in (value if isinstance(value, tuple) else (value,))]
        registers = [one.index for one in reads if isinstance(one, Register)]
        filled = {name: self._filled(value) for name, value in settings.items()}
        if op == "final_state":
            value = reference_plan._final_state(self.states, Line(0, op, settings))
        elif op in RECURRENT:
            reference_plan._check_tensors(op, filled)
            states = RECURRENT[op](**filled)
            value = states[0]
        else:
            reference_plan._check_tensors(op, filled)
            value = (reference_plan._OWN.get(op) or OPS[op])(**filled)
        if value.numel() > MOST_VALUES:
            raise NoPlace
        index = self.add(value)
        if op in RECURRENT:
            self.states[index] = states
        by = settings.get("by")
        if op in INEXACT or (op == "unary_f32" and by not in EXACT_FUNCTIONS) or self.inexact.intersection(registers):
            self.inexact.add(index)
        self.lines.append(Line(index, op, settings))

    def _filled(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._filled, value))
        if isinstance(value, Register):
            return self[value] if value.dim is None else self.values[value.index].shape[value.dim]
        return self.constants[value.index] if isinstance(value, Constant) else value

    def text(self, outputs: Sequence[int]) -> PlanText:
        """Lines name registers that no input has; numbers are kept."""
        return PlanText(tuple(self.inputs), tuple(self.lines), tuple(outputs))


def broadcasts(a: Tensor, b: Tensor) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(a.shape, b.shape)) <= MOST_VALUES
    except RuntimeError:
        return False


U8, F32, I64 = torch.uint8, torch.float32, torch.int64
IMAGES, ANY = (3, 4, 5), (0, 1, 2, 3, 4, 5)


def real(p: Program) -> float:
    return p.draws.choice((0.7, 1.0, -0.31, 0.5, 2.5, 1e-20, 1e20, 0.0, -1.0))


def scale_of(p: Program) -> float:
    return p.draws.choice((0.02, 1.0, 0.1, 1e-20, 1e20, 0.5))


def limits(p: Program) -> dict[str, int]:
    low, high = ordered(p.draws)
    return {"output_zero_point": byte(p.draws), "quant_min": low, "quant_max": high}


def rescaled(p: Program) -> dict[str, Any]:
    return {"multiplier": real(p), "output_zero_point": byte(p.draws)}


def listed(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values)


def output_of(p: Program, outputs: int, quantized: bool) -> dict[str, Any]:
    g = p.draws.generator()
    bias = torch.randint(-9999, 9999, (outputs,), generator=g).to(torch.int32) if p.draws.below(2) else None
    settings: dict[str, Any] = {
        "q_bias": None if bias is None else p.constant(bias),
        "multiplier": p.constant(torch.rand(outputs, generator=g) / 500),
    }
    return settings | (limits(p) if quantized else {})


def wide_image(draws: Draws) -> list[int]:
    """Of so many channels and pixels that transforms pay, and still few values."""
    return [1, 32, *([1 + draws.below(2)] if draws.below(2) else []), 12 + draws.below(4), 14 + draws.below(4)]


def padded(p: Program, q: Register, fill: int) -> Register:
    """An image behind a pad along its spatial dimensions, as a convolution may take for its own."""
    widths = [p.draws.choice((0, 0, 1, 2)) for _ in range(2 * (p[q].dim() - 2))]
    p.line("pad", {"q": q, "widths": listed(widths), "mode": "constant", "fill": fill})
    return Register(len(p.values) - 1)


def conv(quantized: bool) -> Callable[[Program], dict[str, Any]]:
    def made(p: Program) -> dict[str, Any]:
        wide = p.draws.one_in(12)
        q_x = p.new_input(p.random(U8, wide_image(p.draws))) if wide else p.pick(U8, IMAGES)
        zero_point = byte(p.draws)
        if p.draws.one_in(4):
            q_x = padded(p, q_x, zero_point)
        dims, channels = p[q_x].dim() - 2, p[q_x].shape[1]
        divisors = [one for one in range(1, channels + 1) if channels % one == 0] or [1]
        groups = p.draws.choice([1, 1, *divisors, channels or 1])
        depthwise = groups == channels and p.draws.below(2)
        outputs = channels if depthwise else groups * max(1, size(p.draws, 9)) + 32 * (wide and groups == 1)
        kernel = [p.draws.choice((1, 3, 2, 5)) for _ in range(dims)]
        weight = p.constant(integer_weight(p.draws, (max(outputs, 1), channels // groups, *kernel)))
        padding = [p.draws.choice((0, 1, 2)) for _ in range(dims)]
        stride, dilation = ([1 + p.draws.below(2) for _ in range(dims)] for _ in range(2))
        settings = {"q_x": q_x, "zero_point": zero_point, "q_weight": weight, "q_bias": None}
        settings |= {
            "stride": listed(stride),
            "padding": listed(padding),
            "dilation": listed(dilation),
            "groups": groups,
        }
        return settings | output_of(p, max(outputs, 1), quantized)

    return made


def linear(quantized: bool) -> Callable[[Program], dict[str, Any]]:
    def made(p: Program) -> dict[str, Any]:
        q_x = p.pick(U8, (2, 3, 1, 4))
        weight = random_calls.linear_weight(p.draws, max(1, size(p.draws, 17)), p[q_x].shape[-1])
        settings = {"q_x": q_x, "zero_point": byte(p.draws), "q_weight": p.constant(weight)}
        return settings | output_of(p, weight.shape[0], quantized)

    return made


def add(p: Program) -> dict[str, Any]:
    a = p.pick(U8)
    settings = {"q_a": a, "a_zero_point": byte(p.draws), "a_multiplier": real(p), "q_b": p.beside(a)}
    return settings | {"b_zero_point": byte(p.draws), "b_multiplier": real(p)} | limits(p)


def mul(p: Program) -> dict[str, Any]:
    a = p.pick(U8)
    settings = {"q_a": a, "a_zero_point": byte(p.draws), "q_b": p.beside(a), "b_zero_point": byte(p.draws)}
    return settings | {"multiplier": real(p)} | limits(p)


def lookup(p: Program) -> dict[str, Any]:
    q = p.pick(U8)
    axis, rank = 1, p[q].dim()
    rows: tuple[int, ...] = ()
    if rank and p.draws.below(2):
        axis = p.dim(rank)
        rows = (p[q].shape[axis],)
    return {"q": q, "table": p.constant(p.random(U8, (*rows, 256))), "axis": axis}


def window(p: Program) -> tuple[Register, list[int]]:
    q = p.pick(U8, (4, 3, 5, 2))
    dims = max(1, min(3, p[q].dim() - 2 + p.draws.below(2)))
    return q, [p.draws.choice((2, 3, 1, 4)) for _ in range(dims)]


def each_or_one(p: Program, dims: int, options: Sequence[int]) -> Any:
    return p.draws.choice(options) if p.draws.below(2) else listed([p.draws.choice(options) for _ in range(dims)])


def max_pool(p: Program) -> dict[str, Any]:
    q, kernel = window(p)
    settings = {
        "q": q,
        "kernel": listed(kernel),
        "stride": None if p.draws.below(2) else each_or_one(p, len(kernel), (1, 2)),
    }
    settings |= {"padding": each_or_one(p, len(kernel), (0, 1)), "dilation": each_or_one(p, len(kernel), (1, 2))}
    return settings | {"ceil_mode": bool(p.draws.below(2))}


def avg_pool(p: Program) -> dict[str, Any]:
    q, kernel = window(p)
    settings = {"q": q, "zero_point": byte(p.draws), "kernel": listed(kernel), **rescaled(p)}
    settings |= {"stride": None if p.draws.below(2) else each_or_one(p, len(kernel), (1, 2))}
    settings |= {"padding": each_or_one(p, len(kernel), (0, 1)), "ceil_mode": bool(p.draws.below(2))}
    settings |= {"count_include_pad": bool(p.draws.below(2))}
    return settings | ({"divisor_override": p.draws.choice((None, 4))} if len(kernel) > 1 else {})


def adaptive(p: Program) -> tuple[Register, tuple[Any, ...]]:
    q, kernel = window(p)
    return q, listed([p.draws.choice((1, 2, None, 3)) for _ in kernel])


def adaptive_avg_pool(p: Program) -> dict[str, Any]:
    q, sizes = adaptive(p)
    return {"q": q, "zero_point": byte(p.draws), "size": sizes, **rescaled(p)}


def adaptive_max_pool(p: Program) -> dict[str, Any]:
    q, sizes = adaptive(p)
    return {"q": q, "size": sizes}


def some_dims(p: Program, rank: int) -> tuple[int, ...]:
    if rank == 0:
        raise NoPlace
    chosen = [dim for dim in range(rank) if p.draws.below(2)] or [p.draws.below(rank)]
    return listed([dim - rank if p.draws.below(2) else dim for dim in chosen])


def mean(p: Program) -> dict[str, Any]:
    q = p.pick(U8)
    settings = {"q": q, "zero_point": byte(p.draws), "dim": some_dims(p, p[q].dim())}
    return settings | {"keepdim": bool(p.draws.below(2))} | rescaled(p)


def interpolate(p: Program) -> dict[str, Any]:
    q = p.pick(U8, (4, 3))
    dims = p[q].dim() - 2
    mode = p.draws.choice(("nearest", "bilinear" if dims == 2 else "linear", "nearest-exact"))
    settings: dict[str, Any] = {"q": q, "zero_point": byte(p.draws), **rescaled(p), "mode": mode}
    if p.draws.below(2):
        settings["size"] = each_or_one(p, dims, (3, 1, 7, 12))
    else:
        factors = (2, 0.6, 1.7, 1.0, 3, 1.3, 2.1)
        settings["scale_factor"] = each_or_one(p, dims, factors)  # type: ignore[arg-type]
        settings["recompute_scale_factor"] = p.draws.choice((None, True, False))
    if mode.endswith("linear"):
        settings["align_corners"] = p.draws.choice((None, False, True))
    return settings


def pad(p: Program) -> dict[str, Any]:
    p.moving = True
    q = p.pick(p.draws.choice((U8, F32)), (4, 3, 2, 1, 5))
    mode = p.draws.choice(("constant", "reflect", "replicate", "circular"))
    pairs = 1 + p.draws.below(p[q].dim()) if mode == "constant" else max(1, min(3, p[q].dim() - 1 - p.draws.below(2)))
    widths = [p.draws.choice((1, 0, 2, -1 if mode == "constant" else 1)) for _ in range(2 * pairs)]
    fill = byte(p.draws) if p[q].dtype == U8 else 0
    return {"q": q, "widths": listed(widths), "mode": mode, "fill": fill}


def tensors(p: Program, dtype: torch.dtype) -> tuple[tuple[Register, ...], int]:
    first = p.pick(dtype, (4, 2, 3, 1))
    dim = p.dim(p[first].dim())
    joined = [first]
    for _ in range(p.draws.below(3)):
        if p.draws.below(2):
            joined.append(first)
            continue
        shape = list(p[first].shape)
        shape[dim] = size(p.draws, 9)
        joined.append(p.new_input(p.random(dtype, shape)))
    return tuple(joined), dim


def cat(p: Program) -> dict[str, Any]:
    joined, dim = tensors(p, U8)
    settings: dict[str, Any] = {"tensors": joined, "dim": dim}
    if p.draws.below(2):
        settings["zero_points"] = listed([byte(p.draws) for _ in joined])
        settings["multipliers"] = listed([p.draws.choice((0.37, 1.0, 1.9, 1e-20, 1e30)) for _ in joined])
        settings["output_zero_point"] = byte(p.draws)
    return settings


def cat_f32(p: Program) -> dict[str, Any]:
    p.moving = True
    joined, dim = tensors(p, F32)
    return {"tensors": joined, "dim": dim}


def moved(p: Program, ranks: Sequence[int] = ANY) -> Register:
    p.moving = True
    return p.pick(p.draws.choice((U8, F32)), ranks)


def reshape(p: Program) -> dict[str, Any]:
    x = moved(p)
    count, how = p[x].numel(), p.draws.below(4)
    if how == 0 or count == 0:
        shape: list[Any] = list(p[x].shape)
        if len(shape) > 1:
            place = p.draws.below(len(shape) - 1)
            shape[place : place + 2] = [shape[place] * shape[place + 1]]
    elif how == 1 and p[x].dim():
        shape = [Register(x.index, 0), -1]
    elif how == 2:
        divisor = p.draws.choice([one for one in range(1, min(count, 64) + 1) if count % one == 0])
        shape = [divisor, -1]
    else:
        shape = [-1]
    return {"x": x, "shape": listed(shape)}


def flatten(p: Program) -> dict[str, Any]:
    x = moved(p, (4, 3, 2, 5, 1))
    start = p.draws.below(p[x].dim())
    return {"x": x, "start": start, "end": p.draws.choice((-1, start, p[x].dim() - 1))}


def permute(p: Program) -> dict[str, Any]:
    x = moved(p, (3, 4, 2, 5, 1))
    left, order = list(range(p[x].dim())), []
    while left:
        order.append(left.pop(p.draws.below(len(left))))
    return {"x": x, "dims": listed(order)}


def transpose(p: Program) -> dict[str, Any]:
    x = moved(p, (3, 4, 2, 5, 1))
    return {"x": x, "dim0": p.dim(p[x].dim()), "dim1": p.dim(p[x].dim())}


def unsqueeze(p: Program) -> dict[str, Any]:
    x = moved(p, (3, 2, 1, 0, 4))
    return {"x": x, "dim": p.draws.below(p[x].dim() + 1) - (p[x].dim() + 1 if p.draws.below(2) else 0)}


def squeeze(p: Program) -> dict[str, Any]:
    x = moved(p, (4, 3, 2, 1, 5))
    return {"x": x, "dim": p.dim(p[x].dim())}


def slice_(p: Program) -> dict[str, Any]:
    x = moved(p, (4, 3, 2, 1, 5))
    start, end = p.draws.choice((0, 1, None, -2, 5)), p.draws.choice((None, -1, 3, 100, 1))
    return {"x": x, "dim": p.dim(p[x].dim()), "start": start, "end": end, "step": p.draws.choice((1, 2, 3))}


def expand(p: Program) -> dict[str, Any]:
    x = moved(p, (2, 3, 1, 0, 4))
    kept = [p.draws.choice((-1, 3)) if one == 1 else p.draws.choice((-1, one)) for one in p[x].shape]
    return {"x": x, "shape": listed([*([2] if p.draws.below(2) else []), *kept])}


def holds(p: Program) -> dict[str, Any]:
    x = moved(p, (4, 3, 2, 1, 5))
    dim = p.draws.below(p[x].dim())
    return {"x": x, "size": Register(x.index, dim), "equals": p[x].shape[dim]}


def select(p: Program) -> dict[str, Any]:
    x = moved(p, (3, 2, 4, 1, 5))
    return {"x": x, "dim": p.dim(p[x].dim()), "index": p.draws.choice((0, -1, 1))}


def chunk(p: Program) -> dict[str, Any]:
    x = moved(p, (3, 2, 4, 1, 5))
    return {
        "x": x,
        "chunks": p.draws.choice((2, 1, 3, 4)),
        "dim": p.dim(p[x].dim()),
        "index": p.draws.choice((0, -1, 1)),
    }


def same(p: Program) -> dict[str, Any]:
    return {"x": moved(p)}


def add_f32(p: Program) -> dict[str, Any]:
    a = p.pick(F32)
    return {"a": a, "b": p.beside(a)}


def binary_f32(p: Program) -> dict[str, Any]:
    return {**add_f32(p), "by": p.draws.choice(("sub", "mul", "div"))}


def number_f32(p: Program) -> dict[str, Any]:
    by = p.draws.choice(("add", "sub", "sub_from", "mul", "div"))
    return {"x": p.pick(F32), "by": by, "number": p.draws.choice((0.3, 1.0, -2.5, 1e20, 0.0))}


def where_f32(p: Program) -> dict[str, Any]:
    a = p.pick(F32)
    return {"mask": p.beside(a, U8), "a": a, "b": p.beside(a)}


def channels(p: Program, count: int) -> Constant | None:
    return p.constant(torch.randn(count, generator=p.draws.generator())) if p.draws.below(2) else None


def finite_reals(p: Program, ranks: Sequence[int], last: bool = False) -> Register:
    """Norms and sums of reals: values that rounding does not make another of."""
    shape = [max(1, one) for one in p.shape(ranks)]
    return p.new_input(torch.randn(shape, generator=p.draws.generator()))


def layer_norm(p: Program) -> dict[str, Any]:
    x = finite_reals(p, (3, 2, 1, 4))
    count = p[x].shape[-1]
    settings = {"x": x, "weight": channels(p, count), "bias": channels(p, count), "eps": 1e-05}
    return settings | ({"size": count} if p.draws.below(2) else {})


def rms_norm(p: Program) -> dict[str, Any]:
    x = finite_reals(p, (3, 2, 1, 4))
    count = p[x].shape[-1]
    return {"x": x, "weight": channels(p, count), "eps": 1e-05, "size": count}


def instance_norm(p: Program) -> dict[str, Any]:
    x = finite_reals(p, (4, 3, 5))
    count = p[x].shape[1]
    return {"x": x, "weight": channels(p, count), "bias": channels(p, count), "eps": 1e-05}


def group_norm(p: Program) -> dict[str, Any]:
    x = finite_reals(p, (4, 3, 2))
    count = p[x].shape[1]
    groups = p.draws.choice([one for one in range(1, count + 1) if count % one == 0])
    return {"x": x, "groups": groups, "weight": channels(p, count), "bias": channels(p, count), "eps": 1e-05}


def silu(p: Program) -> dict[str, Any]:
    return {"x": finite_reals(p, (2, 4, 1, 0))}


def softmax(p: Program) -> dict[str, Any]:
    return {"x": finite_reals(p, (3, 2, 1, 4)), "logarithm": bool(p.draws.below(2))}


def unary_f32(p: Program) -> dict[str, Any]:
    by = p.draws.choice(("neg", "abs", "sqrt", "rsqrt", "exp", "sigmoid", "tanh", "cos", "sin", "gelu"))
    return {"x": p.pick(F32) if by in EXACT_FUNCTIONS else finite_reals(p, (3, 1, 4, 0)), "by": by}


def reduce_f32(p: Program) -> dict[str, Any]:
    x = finite_reals(p, (3, 2, 4, 1, 5))
    settings = {"x": x, "by": p.draws.choice(("sum", "mean")), "dim": some_dims(p, p[x].dim())}
    return settings | {"keepdim": bool(p.draws.below(2))}


def attention(p: Program) -> dict[str, Any]:
    q = finite_reals(p, (3, 4))
    batch, (rows, width) = p[q].shape[:-2], p[q].shape[-2:]
    keys = rows if p.draws.below(2) else max(1, size(p.draws, 9))
    g = p.draws.generator()
    k = q if keys == rows and p.draws.below(2) else p.new_input(torch.randn(*batch, keys, width, generator=g))
    v = k if p.draws.below(2) else p.new_input(torch.randn(*batch, keys, max(1, size(p.draws, 9)), generator=g))
    settings = {"q": q, "k": k, "v": v, "scale": p.draws.choice((None, 0.3))}
    causal = bool(p.draws.below(2))
    if causal or p.draws.below(2):
        return settings | {"causal": causal}
    return settings | {"causal": False, "mask": p.new_input(torch.randn(rows, keys, generator=g))}


def constant(p: Program) -> dict[str, Any]:
    return {"value": p.constant(p.random(F32, p.shape((2, 1, 0, 3))))}


def matmul_operands(p: Program) -> dict[str, Any]:
    a = p.pick(U8, (2, 3, 4))
    shape = [*p[a].shape[:-2], p[a].shape[-1], size(p.draws, 17)]
    known = [index for index, value in p.values.items() if value.dtype == U8 and value.dim() > 1]
    fits = [
        index for index in known if p.values[index].shape[-2] == p[a].shape[-1] and p.values[index].dim() == p[a].dim()
    ]
    b = Register(p.draws.choice(fits)) if fits and p.draws.below(2) else p.new_input(p.random(U8, shape))
    settings = {"q_a": a, "a_zero_point": byte(p.draws), "q_b": b, "b_zero_point": byte(p.draws)}
    return settings | {"multiplier": p.draws.choice((0.0004, 1.0, 1e-9, -0.01))}


def matmul(p: Program) -> dict[str, Any]:
    return matmul_operands(p) | limits(p)


def linear_dynamic(p: Program) -> dict[str, Any]:
    x = finite_reals(p, (2, 3, 1))
    columns = p[x].shape[-1]
    weight, by = random_calls.dynamic_operands(p.draws, max(1, size(p.draws, 17)), columns)
    outputs = weight.shape[0]
    settings = {"x": x, "q_weight": p.constant(weight), "scale": p.constant(by), "bias": channels(p, outputs)}
    return settings | {
        "columns": channels(p, columns),
        "bits": p.draws.choice((8, 16)),
        "per_row": bool(p.draws.below(2)),
    }


def indices(p: Program, shape: Sequence[int], count: int, negative: bool = False) -> Register:
    if count == 0:
        raise NoPlace
    low = -count if negative else 0
    return p.new_input(torch.randint(low, count, tuple(shape), generator=p.draws.generator()))


def embedding(p: Program) -> dict[str, Any]:
    table = torch.randn(max(1, size(p.draws, 9)), size(p.draws, 17), generator=p.draws.generator())
    return {"x": indices(p, p.shape((2, 1, 0)), table.shape[0]), "weight": p.constant(table)}


def embedding_table(p: Program) -> dict[str, Any]:
    bits, dim = p.draws.choice(tables.TABLE_BITS), max(1, size(p.draws, 33))
    table = tables.pack_table(torch.randn(max(1, size(p.draws, 9)), dim, generator=p.draws.generator()), bits)
    x = indices(p, p.shape((2, 1, 0)), table.shape[0])
    return {"x": x, "rows": p.constant(table), "bits": bits, "dim": dim}


def index_select(p: Program) -> dict[str, Any]:
    x = moved(p, (3, 2, 1, 4))
    dim, negative = p.dim(p[x].dim()), bool(p.draws.below(2))
    return {
        "x": x,
        "dim": dim,
        "index": indices(p, p.shape((1, 2, 0)), p[x].shape[dim], negative),
        "negative": negative,
    }


def index_add(p: Program) -> dict[str, Any]:
    x = p.pick(F32, (2, 3, 1))
    dim, count = p.dim(p[x].dim()), size(p.draws, 9)
    shape = list(p[x].shape)
    shape[dim] = count
    index = indices(p, [count], p[x].shape[dim])
    return {"x": x, "dim": dim, "index": index, "source": p.new_input(p.random(F32, shape))}


def scatter_add(p: Program) -> dict[str, Any]:
    x = p.pick(F32, (2, 3, 1))
    dim = p.dim(p[x].dim())
    shape = [max(0, one - p.draws.below(2)) for one in p[x].shape]
    index = indices(p, shape, p[x].shape[dim])
    return {"x": x, "dim": dim, "index": index, "source": p.new_input(p.random(F32, p[x].shape))}


def recurrent(static: bool) -> Callable[[Program], dict[str, Any]]:
    def made(p: Program) -> dict[str, Any]:
        kind = p.draws.choice([one for one in kinds() if one.native])
        g = p.draws.generator()
        shape = [max(1, one) for one in p.shape((3,))]
        if static:
            x = p.pick(U8, (3,))
            shape = list(p[x].shape)
        else:
            x = p.new_input(torch.randn(shape, generator=g))
        hidden = max(1, size(p.draws, 9))
        state = max(1, size(p.draws, hidden)) if kind.projects and p.draws.below(3) == 2 else hidden
        width = kind.gates * hidden

        def weight(n: int, k: int) -> tuple[Constant, Constant]:
            by = torch.rand(n, generator=g) / (127 * k) + 1e-5
            return p.constant(integer_weight(p.draws, (n, k))), p.constant(by)

        ih, hh = weight(width, max(shape[2], 1)), weight(width, state)
        hr = weight(state, hidden) if state != hidden else (None, None)

        def first(count: int) -> Register | None:
            return None if p.draws.below(2) else p.new_input(torch.rand(shape[1], count, generator=g) * 2 - 1)

        states = {"h": first(state), "c": first(hidden) if kind.has_cell else None}
        biases = {"bias_ih": channels(p, width), "bias_hh": channels(p, width)}
        weights = {"q_weight_ih": ih[0], "scale_ih": ih[1]}
        recurring = {"q_weight_hh": hh[0], "scale_hh": hh[1]}
        projection = {"q_weight_hr": hr[0], "scale_hr": hr[1]}
        last = {"mode": kind.name, "reverse": bool(p.draws.below(2))}
        if not static:
            how = {"columns_ih": None, "bits": p.draws.choice((8, 16)), "per_row": bool(p.draws.below(2))}
            return {"x": x, **states, **weights, **how, **recurring, **biases, **projection, **last}
        head = {"q_x": x, "x_scale": 0.02, "x_zero_point": byte(p.draws)}
        ranges = {"h_scale": 1 / 127, "h_zero_point": 128, **projection, "m_scale": 1 / 127, "m_zero_point": 128}
        return {**head, **states, **weights, **recurring, **biases, **ranges, **last, "quantized": False}

    return made


def final_state(p: Program) -> dict[str, Any]:
    if not p.states:
        raise NoPlace
    y = p.draws.choice(list(p.states))
    return {"y": Register(y), "of": p.draws.choice(("h", "c" if p.states[y][2].dim() == 2 else "h"))}


GENERATORS: dict[str, Callable[[Program], dict[str, Any]]] = {
    "quantize": lambda p: {"x": p.pick(F32), "scale": scale_of(p), "zero_point": byte(p.draws)},
    "dequantize": lambda p: {"q": p.pick(U8), "scale": real(p), "zero_point": byte(p.draws)},
    "clamp": lambda p: {
        "x": p.pick(F32),
        "low": p.draws.choice((-0.5, 0.0, -math.inf)),
        "high": p.draws.choice((math.inf, 6.0)),
    },
    "lookup": lookup,
    "add": add,
    "mul": mul,
    "conv_u8s8_u8": conv(True),
    "conv_u8s8_f32": conv(False),
    "linear_u8s8_u8": linear(True),
    "linear_u8s8_f32": linear(False),
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "adaptive_avg_pool": adaptive_avg_pool,
    "adaptive_max_pool": adaptive_max_pool,
    "mean": mean,
    "interpolate": interpolate,
    "pad": pad,
    "cat": cat,
    "reshape": reshape,
    "flatten": flatten,
    "permute": permute,
    "transpose": transpose,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "slice": slice_,
    "expand": expand,
    "holds": holds,
    "select": select,
    "chunk": chunk,
    "same": same,
    "add_f32": add_f32,
    "layer_norm": layer_norm,
    "instance_norm": instance_norm,
    "rms_norm": rms_norm,
    "silu": silu,
    "group_norm": group_norm,
    "attention": attention,
    "constant": constant,
    "number_f32": number_f32,
    "binary_f32": binary_f32,
    "cat_f32": cat_f32,
    "softmax": softmax,
    "unary_f32": unary_f32,
    "reduce_f32": reduce_f32,
    "where_f32": where_f32,
    "matmul": matmul,
    "matmul_f32": matmul_operands,
    "linear_dynamic": linear_dynamic,
    "embedding": embedding,
    "index_select": index_select,
    "index_add": index_add,
    "scatter_add": scatter_add,
    "embedding_table": embedding_table,
    "rnn_static": recurrent(True),
    "rnn_dynamic": recurrent(False),
    "final_state": final_state,
}
"""Operation -> its settings over a program's registers; raises NoPlace."""


def program(kind: str, draws: Draws) -> Program:
    """A program that has an operation of this kind, where its values allow one."""
    p = Program(draws)
    names = sorted(GENERATORS)
    for turn in range(1 + draws.below(8)):
        name = kind if turn == 0 or draws.one_in(6) else draws.choice(names)
        p.moving = False
        try:
            p.line(name, GENERATORS[name](p))
        except (NoPlace, ValueError, TypeError, IndexError, RuntimeError):  # it does not suit what is there
            continue
    return p


def differs(found: Any, expected: Any, exact: Sequence[bool]) -> str:
    if isinstance(found, Exception) or isinstance(expected, Exception):
        if isinstance(found, Exception) and isinstance(expected, Exception):
            return ""
        return f"kernels: {told(found)}; interpreter: {told(expected)}"
    if len(found) != len(expected):
        return f"{len(found)} outputs, expected {len(expected)}"
    for place, (one, other, bits) in enumerate(
        zip(found, expected, exact, strict=False)
    ):  # or none, of what is not finite
        if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
            shapes = [f"{random_calls.words(value)} of strides {value.stride()}" for value in (one, other)]
            return f"output {place} is {shapes[0]}, expected {shapes[1]}"
        near = torch.equal(one, other) or torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
        if bits and one.is_floating_point():
            near = near and torch.equal(one.isnan(), other.isnan())
        if not bits and not near:
            allowed = 1e-4 + 1e-3 * float(other.nan_to_num(0, 0, 0).abs().max())
            near = torch.allclose(one, other, 1e-3, allowed, equal_nan=True)
        if not near:
            far = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
            worst = torch.unravel_index(torch.where(one == other, -1.0, far).argmax(), one.shape)
            wrong = [int(index) for index in worst]
            return f"output {place}, at {wrong} {one[tuple(wrong)]}, expected {other[tuple(wrong)]}"
    return ""


def told(outcome: Any) -> str:
    return f"{type(outcome).__name__}: {str(outcome)[:300]}" if isinstance(outcome, Exception) else "outputs"


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        return error


class _Last:
    call: tuple[list[Tensor], list[Tensor], str] | None = None

    @classmethod
    def words(cls) -> str:
        if cls.call is None:
            return ""
        inputs, constants, text = cls.call
        return f"{text}\ninputs {random_calls.words(inputs)}\nconstants {random_calls.words(constants)}"


def other_inputs(p: Program, draws: Draws) -> list[Tensor]:
    """Inputs of another batch, or of other sizes."""
    dim, by = draws.below(2) * draws.below(4), draws.choice((2, 0, 1))
    inputs = []
    for index in p.inputs:
        value = p.values[index]
        if dim < value.dim():
            value = value.repeat_interleave(by, dim) if by != 1 else value.narrow(dim, 0, min(1, value.shape[dim]))
        inputs.append(operand(draws, value))
    return inputs


def check(kind: str, draws: Draws, drawn: Callable[[], None] = lambda: None) -> str:
    """One program, twice."""
    random_calls.MEMORY.free()
    torch.set_num_threads(1)
    p = program(kind, draws)
    if not p.lines:
        return "no line"
    outputs = [index for index in p.values if index >= len(p.values) - 2 or draws.below(3) == 0]
    outputs = [index for index in outputs if p.values[index].dtype != I64] or [p.lines[-1].out]
    if draws.one_in(5):
        outputs.append(outputs[0])
    text, exact = str(p.text(outputs)), [index not in p.inexact for index in outputs]
    backend = draws.choice(ops.LIBRARIES)
    if ops.extension_problem() or torch.ops.octet_native.why_not(backend):
        backend = ""
    finite = draws.one_in(4)
    name = "run_plan_of_finite" if finite else "run_plan"
    run, interpret = getattr(torch.ops.octet, name), getattr(reference_plan, name)
    for inputs in ([p.values[index] for index in p.inputs], other_inputs(p, draws)):
        _Last.call = inputs, p.constants, text
        drawn()
        expected = outcome(interpret, inputs, p.constants, text)
        found = outcome(run, inputs, p.constants, text, backend)
        if said := differs(found, expected, exact):
            raise Wrong(f"{name} by {backend or 'the default'}: {said}")
    return "ran" if not isinstance(expected, Exception) else "ran, and other sizes were refused"


def fuzzer() -> Fuzzer:
    return Fuzzer(PATH, sorted(GENERATORS), check, fuzzing.usable_isas(), _Last.words)


if __name__ == "__main__":
    fuzzing.perturbed()
    sys.exit(fuzzing.main(fuzzer(), __doc__))

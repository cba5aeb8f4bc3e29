"""From the steps of a plan to the calls of integer operators: which, with which numbers.

Registers: value v of the graph in float is register 2 * v, in uint8 register 2 * v + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.fuse import Plan, Step
from quant.graph import Graph, Ref, evaluate, map_leaves
from quant.kernels import QParams
from quant.static.folding import parameter
from quant.static.layers import clamp_limits


@dataclass
class Instruction:
    """One operator call of a converted graph.

    Attributes:
        op: a name in the table of operators; "layer" calls an int8 layer; "recurrent" one with states, and "first"
            takes the sequence of what it gave; "call" evaluates a captured call in float, "move" one that only moves
            values, on integers.
        target: of a layer its key, of "call" and "move" the node's index.
        args: Ref to registers, or constants.
        kwargs: likewise; of a "move" that joins values of several ranges, by register how each becomes one of the
            result's (`_cat`).
        out: the register it fills.
        step: name of the step it belongs to, for errors and comparisons.
    """

    op: str
    args: tuple[Any, ...]
    out: int
    target: Any = None
    kwargs: dict[Any, Any] = field(default_factory=dict)
    step: str = ""


@dataclass
class Context:
    """What lowering a step needs to know of the whole."""

    plan: Plan
    root: nn.Module
    qparams: dict[str, QParams]
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Look-up tables that are known, by step; the others are computed from the step's own function."""

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self.plan.graph

    def range_of(self, value: int) -> QParams:
        """The parameters of a value that is uint8."""
        return self.qparams[self.plan.slot_of[value]]

    def scale(self, value: int) -> float:
        """Of a value that is uint8."""
        return float(self.range_of(value).scale)

    def zero_point(self, value: int) -> int:
        """Of a value that is uint8."""
        return int(self.range_of(value).zero_point)

    def ratio(self, step: Step) -> float:
        """s_x / s_y in float32."""
        return float(self.range_of(step.inputs[0]).scale / self.range_of(step.output).scale)


def lower(step: Step, context: Context) -> Instruction:
    """The operator call of an integer step that has no weight."""
    op, args, kwargs = LOWERINGS[step.op](step, context)
    out = 2 * step.output + context.plan.emits_integers(step)
    return Instruction(op, args, out, step.output, kwargs, step.name)


Lowered = tuple[str, tuple[Any, ...], dict[Any, Any]]


def q(value: int) -> Ref:
    """The register of a value in uint8."""
    return Ref(2 * value + 1)


def sizes(tree: Any) -> Any:
    """Settings of which some were computed from sizes, with the registers that hold those."""
    return map_leaves(lambda leaf: Ref(2 * leaf.index) if isinstance(leaf, Ref) else leaf, tree)


def _lookup(step: Step, context: Context) -> Lowered:
    known = context.tables.get(step.name)
    return "lookup", (q(step.inputs[0]), lookup_table(step, context) if known is None else known), {}


def lookup_table(step: Step, context: Context) -> Tensor:
    """The uint8 answer to each of the 256 inputs, (256,) or (channels, 256): the step's own float function, rounded."""
    source, target = context.range_of(step.inputs[0]), context.range_of(step.output)
    x = source.dequantize(torch.arange(256, dtype=torch.uint8))
    meta = context.graph.nodes[step.inputs[0]].meta
    assert meta is not None
    channels = meta.shape[1] if step.attrs["channels"] else None
    if channels is not None:
        x = x.reshape(256, *[1] * (len(meta.shape) - 1)).expand(256, channels, *[1] * (len(meta.shape) - 2)).clone()
    with torch.no_grad():
        own: dict[int, Any] = {step.inputs[0]: x}
        for index in step.nodes:
            own[index] = evaluate(
                context.graph.nodes[index],
                context.root,
                lambda i: own[i] if i in own else parameter(Ref(i), context.graph, context.root),
            )
    y = target.quantize(own[step.output])
    return y if channels is None else y.reshape(256, channels).t().contiguous()


def _limits(step: Step, context: Context) -> tuple[int, int, int]:
    output = step.output
    limits = clamp_limits(step.attrs.get("clamp"), context.scale(output), context.zero_point(output))
    return (context.zero_point(output), *limits)


def _add(step: Step, context: Context) -> Lowered:
    a, b = step.inputs
    output = context.range_of(step.output).scale
    multipliers = [float(context.range_of(value).scale / output) for value in (a, b)]
    args = (
        q(a),
        context.zero_point(a),
        multipliers[0],
        q(b),
        context.zero_point(b),
        step.attrs["sign"] * multipliers[1],
    )
    return "add", (*args, *_limits(step, context)), {}


def _mul(step: Step, context: Context) -> Lowered:
    return "mul", (*_factors(step, context, context.range_of(step.output).scale), *_limits(step, context)), {}


def _matmul(step: Step, context: Context) -> Lowered:
    if not context.plan.emits_integers(step):
        return "matmul_f32", _factors(step, context, torch.ones(())), {}
    return "matmul", (*_factors(step, context, context.range_of(step.output).scale), *_limits(step, context)), {}


def _factors(step: Step, context: Context, output_scale: Tensor) -> tuple[Any, ...]:
    a, b = step.inputs
    multiplier = context.range_of(a).scale * context.range_of(b).scale / output_scale
    return q(a), context.zero_point(a), q(b), context.zero_point(b), float(multiplier)


def _move(step: Step, context: Context) -> Lowered:
    return "move", (), {}


def _cat(step: Step, context: Context) -> Lowered:
    """A move; of the inputs with another range, by register, the numbers that `reference_ops.rescale` takes."""
    scale, zero_point = context.range_of(step.output).scale, context.zero_point(step.output)
    rescaled = {
        2 * value + 1: (context.zero_point(value), float(context.range_of(value).scale / scale), zero_point)
        for value in dict.fromkeys(step.inputs)
        if (context.scale(value), context.zero_point(value)) != (float(scale), zero_point)
    }
    return "move", (), rescaled


def _pad(step: Step, context: Context) -> Lowered:
    value = step.inputs[0]
    return "pad", (q(value), sizes(step.attrs["widths"]), step.attrs["mode"], context.zero_point(value)), {}


def _max_pool(step: Step, context: Context) -> Lowered:
    attrs = dict(step.attrs)
    return "max_pool", (q(step.inputs[0]), attrs.pop("kernel")), attrs


def _adaptive_max_pool(step: Step, context: Context) -> Lowered:
    return "adaptive_max_pool", (q(step.inputs[0]), step.attrs["size"]), {}


def _rescaled(op: str, *names: str) -> Callable[[Step, Context], Lowered]:
    """An operator that takes the settings called `names`, then s_x / s_y and z_y, and the rest by name."""

    def handler(step: Step, context: Context) -> Lowered:
        value, attrs = step.inputs[0], dict(step.attrs)
        first = [attrs.pop(name) for name in names]
        rest = attrs.pop("options", attrs)
        tail = (context.ratio(step), context.zero_point(step.output))
        return op, (q(value), context.zero_point(value), *first, *tail), sizes(rest)

    return handler


LOWERINGS: dict[str, Callable[[Step, Context], Lowered]] = {
    "lookup": _lookup,
    "add": _add,
    "mul": _mul,
    "matmul": _matmul,
    "cat": _cat,
    "pass": _move,
    "pad": _pad,
    "max_pool": _max_pool,
    "adaptive_max_pool": _adaptive_max_pool,
    "avg_pool": _rescaled("avg_pool", "kernel"),
    "adaptive_avg_pool": _rescaled("adaptive_avg_pool", "size"),
    "mean": _rescaled("mean", "dim", "keepdim"),
    "interpolate": _rescaled("interpolate"),
}
"""Operators without weights, by the names that `recognise` gives them."""

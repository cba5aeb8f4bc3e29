"""How many dimensions a register has, as far as a file says: then its shape is a list of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quant.kernels.reference_plan import Register

Rank = int | None
"""None where it is not known."""


def rank_of_line(op: str, settings: Mapping[str, Any], ranks: Sequence[Rank], constants: Sequence[Tensor]) -> Rank:
    """The rank of what a line gives.

    Args:
        ranks: of the registers so far.
        constants: what $0, $1, ... are.
    """
    if op == "constant":
        value: Tensor = constants[settings["value"].index]
        return value.dim()
    if op in ("reshape", "expand"):
        sizes: tuple[Any, ...] = settings["shape"]
        return len(sizes)
    operands = [one for one in settings.values() if isinstance(one, Register) and one.dim is None]
    known = [ranks[one.index] for one in operands]
    if isinstance(settings.get("tensors"), tuple):
        known = [ranks[settings["tensors"][0].index]]
    if op in ("add", "mul", "add_f32", "binary_f32", "matmul", "matmul_f32"):
        return highest(known)
    before = known[0] if known else None
    if op in ("conv_u8s8_u8", "conv_u8s8_f32"):
        before = constants[settings["q_weight"].index].dim()
    if op == "flatten" and before is not None:
        return before - int(settings["end"] % before - settings["start"] % before)
    return None if before is None else before + _change(op, settings)


def _change(op: str, settings: Mapping[str, Any]) -> int:
    """By how many dimensions a line's value has more than what it reads."""
    if op == "unsqueeze":
        return 1
    if op in ("squeeze", "select"):
        return -1
    return -len(settings["dim"]) if op in ("mean", "reduce_f32") and not settings["keepdim"] else 0


def highest(ranks: Sequence[Rank]) -> Rank:
    """Of values that broadcast."""
    return None if None in ranks or not ranks else max(one for one in ranks if one is not None)


def rank_of_step(op: str, attributes: Mapping[str, Any], ranks: Sequence[Rank], operands: Sequence[Any]) -> Rank:
    """The rank of what torch computes for a node.

    Args:
        ranks: of the inputs.
        operands: the inputs; tensors where they are constant.
    """
    if op in BROADCAST:
        return highest(ranks)
    if op in ("Shape", "Range"):
        return 1
    if not ranks or ranks[0] is None:
        return None
    if op in SAME:
        return ranks[0]
    if op == "Gather" and ranks[1] is not None:
        return ranks[0] + ranks[1] - 1
    if op in ("Unsqueeze", "Squeeze"):
        count = _count(attributes.get("axes") if len(operands) < 2 else operands[1])
        return None if count is None else ranks[0] + (count if op == "Unsqueeze" else -count)
    return None


def _count(axes: Any) -> int | None:
    if isinstance(axes, Tensor):
        return axes.numel()
    return len(axes) if isinstance(axes, (list, tuple)) else None


BROADCAST = frozenset({
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Equal", "Greater", "Less", "GreaterOrEqual",
    "LessOrEqual", "And", "Or", "Xor", "Where", "MatMul",
})  # fmt: skip
"""Operators of values that broadcast to each other."""

SAME = frozenset({
    "Abs", "AveragePool", "BatchNormalization", "Cast", "Clip", "Conv", "Dropout", "Elu", "Erf", "Exp", "Gelu",
    "GlobalAveragePool", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "LayerNormalization",
    "LeakyRelu", "Log", "LogSoftmax", "MaxPool", "Neg", "Not", "Pad", "Reciprocal", "Relu", "Sigmoid", "Slice",
    "Softmax", "Softplus", "Split", "Sqrt", "Tanh", "Tile", "Transpose", "Trilu",
})  # fmt: skip
"""Operators whose result has as many dimensions as their first input."""

"""Varies a recorded call's values, sizes and numbers, for the second recording."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quant.capture.range_steps import FARTHEST
from quant.capture.recorder import Recorder
from quant.capture.scalars import NUMBER, Limit, with_numbers
from quant.runtime.arguments import Arguments, rebuilt

Variation = Callable[[Tensor, int], Tensor]
"""(tensor of a call, its index among them) -> the tensor for another call."""

LARGER, SMALLER, TWICE_AND_ONE, TWICE, HALF = "larger", "smaller", "twice and one", "twice", "half"
VARY = (LARGER, SMALLER)
"""Changes of sizes and numbers, tried in order until the module accepts one; SMALLER is for sizes at an upper bound."""

FAR, FARTHER = "far", "farther"
UNCOVER = (HALF, TWICE_AND_ONE, TWICE, FAR, FARTHER)
"""Changes for quotients, remainders and sizes behind strides that VARY leaves the same, the cheapest first; the last
two leave what a forward may branch on: whether a size is even, or divisible by other small numbers."""


class NoOther(Exception):
    """A size or number cannot be changed by this step."""


def groups_of(recorder: Recorder) -> list[list[Limit]]:
    """Groups of sizes that probably change together: the first of all inputs, equal ones of others; and each number."""
    shapes = [() if tensor.is_nested else tuple(tensor.shape) for tensor in recorder.tensors]
    first = shapes[0][0] if shapes and shapes[0] else None
    batch = [Limit(place, 0) for place, shape in enumerate(shapes) if shape and shape[0] == first]
    rest: dict[int, list[Limit]] = {}
    for place, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if Limit(place, dim) not in batch:
                rest.setdefault(size, []).append(Limit(place, dim))
    numbers = [[Limit(place, NUMBER)] for place in range(len(recorder.numbers))]
    return [group for group in [batch, *rest.values(), *numbers] if group]


def parts_of(group: list[Limit]) -> list[list[Limit]]:
    """A group by dimension, or one of a single dimension by tensor; nothing where it is one size."""
    dims: dict[int, list[Limit]] = {}
    for limit in group:
        dims.setdefault(limit.dim, []).append(limit)
    parts = [*dims.values()] if len(dims) > 1 else [[limit] for limit in group]
    return parts if len(parts) > 1 else []


def is_width(limit: Limit, recorder: Recorder) -> bool:
    """Whether a size is probably fixed by a layer: channels of images and signals, else features."""
    if limit.dim < 0:
        return False
    dims = recorder.tensors[limit.place].dim()
    return dims > 1 and limit.dim == (1 if dims > 3 else dims - 1)


def varied(module: nn.Module, call: Arguments, values: Variation, limits: list[Limit], step: str) -> Arguments:
    """A call with other values, and with other sizes and numbers where `limits` names them.

    Raises:
        NoOther: a size or number cannot be changed by this step.
    """
    wanted = {(one.place, one.dim) for one in limits}
    numbers, tensors = itertools.count(), itertools.count()

    def number(name: str, value: int | float) -> int | float:
        return _other_number(value, step) if (next(numbers), NUMBER) in wanted else value

    def change(tensor: Tensor) -> Tensor:
        place = next(tensors)
        changed = tensor.detach().clone()
        if tensor.layout != torch.strided or tensor.is_nested:
            return changed
        for dim, size in enumerate(tensor.shape):
            if (place, dim) in wanted and size:
                changed = changed.index_select(dim, _places(size, _other_size(size, dim, step), tensor))
        return values(changed, place)

    args, kwargs = with_numbers(module, call, number)
    return rebuilt(args, change), rebuilt(kwargs, change)


def _places(size: int, other: int, tensor: Tensor) -> Tensor:
    return torch.arange(other, device=tensor.device) % size


def _other_size(size: int, dim: int, step: str) -> int:
    # A model probably accepts a size that is divisible by the same power of 2, up to 32, as one it accepts.
    unit = 1 if dim == 0 else math.gcd(size, 32)
    near = 4 if dim == 0 else 32
    half = size // 2 if size > 3 else 2 * size + 1  # of a few, half would be one or none
    other = {LARGER: size + unit, SMALLER: size - unit, TWICE_AND_ONE: 2 * size + 1, TWICE: 2 * size, HALF: half,
             FAR: size + near * -(-size // near), FARTHER: size + FARTHEST * -(-size // FARTHEST)}  # fmt: skip
    if not other[step]:
        raise NoOther
    return other[step]


def _other_number(value: int | float, step: str) -> int | float:
    if isinstance(value, float):
        return {LARGER: value * 0.75 + 0.125, SMALLER: value * 0.5}.get(step, value * 2.0 + 1.0)
    if value <= 0 and step in UNCOVER:
        step = LARGER
    if value <= 0 and step != LARGER:
        raise NoOther
    return _other_size(value, 0, step) if value > 1 or step != SMALLER else 0


def other_floats(tensor: Tensor, place: int) -> Tensor:
    """Other values for a float tensor; integers may be indices and stay."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return tensor
    return tensor.roll(1) * 0.75


def other_values(tensor: Tensor, place: int) -> Tensor:
    """Other values; integers in another order."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 0:
        return other_floats(tensor, place)
    return tensor.roll(1, -1) if tensor.dim() else tensor


def same_values(tensor: Tensor, place: int) -> Tensor:
    """The tensor itself."""
    return tensor

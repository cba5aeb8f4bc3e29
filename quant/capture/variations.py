"""Varies a recorded call's values, sizes and numbers, for the second recording."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from quant.capture.range_steps import FARTHEST
from quant.capture.recorder import Recorder
from quant.capture.scalars import NUMBER, Limit, with_numbers
from quant.runtime.arguments import Arguments, rebuilt

Variation = Callable[[Tensor, int], Tensor]
"""(tensor of a call, its index among them) -> the tensor for another call."""

LARGER, SMALLER, TWICE_AND_ONE, TWICE, HALF = "larger", "smaller", "twice and one", "twice", "half"
VARY = (LARGER, SMALLER)
"""Changes of sizes and numbers, tried in order until the module accepts one; SMALLER is for sizes at an upper bound."""

ONE, FEW, FAR, FARTHER = "one", "few", "far", "farther"
UNCOVER = (ONE, FEW, HALF, TWICE_AND_ONE, TWICE, FAR, FARTHER)
"""Changes that show what VARY leaves the same, the cheapest first. ONE and FEW are for lists that are shorter than a
size; they and HALF make more of a size that is as small. The others are for quotients, remainders and sizes behind
strides; the last two leave what a forward may branch on: whether a size is even, or divisible by other small
numbers."""

ENOUGH = 5
"""A size that shows what smaller ones do not: every second, third or fourth place, by whatever a forward picks them."""

DIVIDED = 12
"""FARTHER moves a batch by multiples of this: by little more than the largest step in which a forward counts."""

MOST_GROWTH = 16
"""Sizes that would together make a tensor of the call more than this many times as large are varied one group after the
other, so that the recordings cost the sum of what they grow by and not the product."""


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


def affordable(recorder: Recorder, limits: list[Limit], step: str) -> list[list[Limit]]:
    """The sizes and numbers that a step varies at once: all of them, or each group where all would cost too much."""
    if _growth(recorder, limits, step) <= MOST_GROWTH:
        return [limits]
    changing = {limit for limit in limits if limit.dim == NUMBER or _size(recorder, limit)}
    apart = ([limit for limit in group if limit in changing] for group in groups_of(recorder))
    return [group for group in apart if group]


def _growth(recorder: Recorder, limits: list[Limit], step: str) -> float:
    """The most by which a step multiplies the values of a tensor of the recorded call."""
    factors: dict[int, float] = {}
    for limit in limits:
        size = _size(recorder, limit)
        if size:
            other = _other_size(size, limit.dim, step, _beyond(recorder))
            factors[limit.place] = factors.get(limit.place, 1.0) * other / size
    return max(factors.values(), default=1.0)


def _size(recorder: Recorder, limit: Limit) -> int:
    return 0 if limit.dim == NUMBER else recorder.tensors[limit.place].shape[limit.dim]


def is_width(limit: Limit, recorder: Recorder) -> bool:
    """Whether a size is probably fixed by a layer: channels of images and signals, else features."""
    if limit.dim < 0:
        return False
    dims = recorder.tensors[limit.place].dim()
    return dims > 1 and limit.dim == (1 if dims > 3 else dims - 1)


def varied(
    recorder: Recorder, call: Arguments, values: Variation, limits: list[Limit], step: str, *, alike: bool = False
) -> Arguments:
    """A recorded call with other values, and with other sizes and numbers where `limits` names them.

    Args:
        alike: add to each of these sizes what the step adds to the smallest, so that their differences stay.

    Raises:
        NoOther: a size or number cannot be changed by this step, or none is by it.
    """
    wanted = {(one.place, one.dim) for one in limits}
    beyond = _beyond(recorder)
    smallest = min(filter(None, (_size(recorder, one) for one in limits)), default=0) if alike else 0
    numbers, tensors = itertools.count(), itertools.count()
    is_other = not limits

    def number(name: str, value: int | float) -> int | float:
        nonlocal is_other
        other = _other_number(value, step, beyond) if (next(numbers), NUMBER) in wanted else value
        is_other = is_other or other != value
        return other

    def change(tensor: Tensor) -> Tensor:
        nonlocal is_other
        place = next(tensors)
        changed = tensor.detach().clone()
        if tensor.layout != torch.strided or tensor.is_nested:
            return changed
        for dim, size in enumerate(tensor.shape):
            if (place, dim) in wanted and size:
                known = smallest or size
                other = size - known + _other_size(known, dim, step, beyond)
                is_other = is_other or other != size
                changed = changed.index_select(dim, _places(size, other, tensor))
        return values(changed, place)

    args, kwargs = with_numbers(recorder.root, call, number)
    args, kwargs = rebuilt(args, change), rebuilt(kwargs, change)
    if not is_other:
        raise NoOther
    return args, kwargs


def _beyond(recorder: Recorder) -> int:
    """What FARTHER moves a batch by multiples of."""
    return DIVIDED * -(-int(recorder.largest_step) // DIVIDED) or DIVIDED


def _places(size: int, other: int, tensor: Tensor) -> Tensor:
    """Where a dimension of another size takes its values: the first ones, and all again where there are more.

    Of a mask fewer places are spread over all, the last among them: without padding forwards branch otherwise.
    """
    places = torch.arange(other, device=tensor.device)
    return (places + 1) * size // other - 1 if other < size and _is_mask(tensor) else places % size


def _is_mask(tensor: Tensor) -> bool:
    """Whether all values are 0 or 1, of another type than reals; indices may be too large for fewer places."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return False
    return tensor.dtype == torch.bool or (int(tensor.min()) >= 0 and int(tensor.max()) <= 1)


def _other_size(size: int, dim: int, step: str, beyond: int) -> int:
    # A model probably accepts a size that is divisible by the same power of 2, up to 32, as one it accepts.
    unit = 1 if dim == 0 else math.gcd(size, 32)
    near = 4 if dim == 0 else 32
    farther = beyond if dim == 0 else FARTHEST  # a batch costs more than it is divided
    one = 1 if size > 1 else ENOUGH
    few = one if dim == 0 or size == 1 else min(size, max(2, unit))
    half = size // 2 if size > 3 else size + ENOUGH - 1  # of a few, half would be one or none
    other = {LARGER: size + unit, SMALLER: size - unit, ONE: one, FEW: few, HALF: half, TWICE: 2 * size,
             TWICE_AND_ONE: max(2 * size + 1, ENOUGH), FAR: size + near * -(-size // near),
             FARTHER: size + farther * -(-size // farther)}  # fmt: skip
    if not other[step]:
        raise NoOther
    return other[step]


def _other_number(value: int | float, step: str, beyond: int) -> int | float:
    if isinstance(value, float):
        nearer = value * 0.75 + (0.125 if value != 0.5 else 0.25)  # 0.5 would stay
        return {LARGER: nearer, SMALLER: value * 0.5}.get(step, value * 2.0 + 1.0)
    if value <= 0 and step in UNCOVER:
        step = LARGER
    if value <= 0 and step != LARGER:
        raise NoOther
    return _other_size(value, 0, step, beyond) if value > 1 or step != SMALLER else 0


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

"""Outputs of any type: their tensors by path, their structure, and how two of them differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

EXACT = 100.0
"""dB of equal tensors."""


def walk(value: Any, path: str = "", inside: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf and every node of a tree with its path: containers of any class, and the attributes of other objects.

    A node comes as the name of its class with the number of its children, before these.
    """
    if (
        isinstance(value, Tensor)
        or value is None
        or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))
    ):
        yield path, value
        return
    if id(value) in inside or isinstance(value, (nn.Module, type, torch.device)) or callable(value):
        yield path, _name(value)
        return
    children = list(_children(value))
    yield path, f"{_name(value)} of {len(children)}"
    for name, child in children:
        yield from walk(child, f"{path}{name}", (*inside, id(value)))


def _name(value: Any) -> str:
    return type(value).__qualname__


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"[{index}]", child) for index, child in enumerate(sorted(value, key=repr)))
    else:
        slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        names = [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]
        yield from ((f".{name}", getattr(value, name)) for name in names)


def tensors_of(value: Any) -> dict[str, Tensor]:
    return {path: leaf for path, leaf in walk(value) if isinstance(leaf, Tensor)}


def difference(expected: Any, found: Any, *, lengths: bool = True) -> str:
    """The first place where two trees have another structure, shape, dtype or constant; '' where they agree.

    Args:
        lengths: compare the first dimension of tensors too; detectors decide it by the values.
    """
    for (path, one), (other_path, other) in zip(walk(expected), walk(found), strict=False):
        if path != other_path:
            return f"{other_path} where float has {path}"
        problem = _leaf_difference(one, other, lengths)
        if problem:
            return f"output{path}: {problem}"
    ones, others = (sum(1 for _ in walk(tree)) for tree in (expected, found))
    return "" if ones == others else f"{others} values where float has {ones}"


def _leaf_difference(one: Any, other: Any, lengths: bool) -> str:
    if isinstance(one, Tensor) != isinstance(other, Tensor) or type(one) is not type(other):
        return f"{_name(other)} where float has {_name(one)}"
    if isinstance(one, Tensor):
        start = 0 if lengths else 1
        if one.shape[start:] != other.shape[start:] or one.ndim != other.ndim:
            return f"shape {tuple(other.shape)} where float has {tuple(one.shape)}"
        if one.dtype != other.dtype:
            return f"{other.dtype} where float has {one.dtype}"
        if lengths and one.is_floating_point() and not torch.equal(one.isfinite(), other.isfinite()):
            return (
                f"{int((~other.isfinite()).sum())} values are NaN or inf where float has {int((~one.isfinite()).sum())}"
            )
        return ""
    if isinstance(one, float):
        return ""  # a value that was computed
    return "" if one == other else f"{other!r} where float has {one!r}"


def sqnr(expected: Tensor, found: Tensor) -> float:
    """Signal to quantisation noise in dB, of the values that float has finite; EXACT at most."""
    return _decibels(*_power_and_error(expected, found))


def _power_and_error(expected: Tensor, found: Tensor) -> tuple[float, float]:
    keep = expected.isfinite()
    if not found[keep].isfinite().all():
        return 0.0, math.inf
    signal, noise = expected[keep], found[keep] - expected[keep]
    if signal.is_complex():
        signal, noise = torch.view_as_real(signal), torch.view_as_real(noise)
    power, error = (float(t.double().square().sum()) for t in (signal, noise))
    return power, error


def _decibels(power: float, error: float) -> float:
    if error == 0:
        return EXACT
    return min(EXACT, 10 * math.log10(power / error)) if power and math.isfinite(error) else -EXACT


@dataclass
class Likeness:
    """How near two trees of one structure are.

    Attributes:
        decibels: SQNR of each real or complex tensor, by its path.
        equal: share of equal values in each tensor of integers or booleans.
    """

    decibels: dict[str, float]
    equal: dict[str, float]

    @property
    def first(self) -> float:
        """Of the first real tensor."""
        return next(iter(self.decibels.values()), EXACT)


def likeness(expected: Any, found: Any, kinds: int = 0) -> Likeness:
    """How near one tree is to another.

    Args:
        kinds: how many kinds of batches take turns in a list of outputs; those of one kind count as one output.
    """
    sums: dict[str, list[float]] = {}
    equal: dict[str, list[float]] = {}
    others = tensors_of(found)
    for path, tensor in tensors_of(expected).items():
        other = others.get(path)
        if other is None or other.shape != tensor.shape or not tensor.numel():
            continue
        index, bracket, rest = path.partition("]")
        place = f"[{int(index[1:]) % kinds}{bracket}{rest}" if kinds else path
        if tensor.is_floating_point() or tensor.is_complex():
            total = sums.setdefault(place, [0.0, 0.0])
            for i, value in enumerate(_power_and_error(tensor, other)):
                total[i] += value
        else:
            equal.setdefault(place, []).append(float((tensor == other).double().mean()))
    means = {path: sum(shares) / len(shares) for path, shares in equal.items()}
    return Likeness({path: _decibels(*total) for path, total in sums.items()}, means)


def matched_boxes(expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> float:
    """How well each box of a detector is found again, whatever its place in the list: the mean over all boxes of the
    largest intersection over union with one of the other's."""
    best = []
    for one, other in zip(expected, found, strict=True):
        a, b = one["boxes"][:, None], other["boxes"][None]
        low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
        shared = (high - low).clamp(min=0).prod(dim=-1)
        area = [(boxes[..., 2:] - boxes[..., :2]).prod(dim=-1) for boxes in (a, b)]
        overlap = shared / (area[0] + area[1] - shared).clamp(min=1e-9)
        best.append(overlap.max(dim=1).values if len(other["boxes"]) else torch.zeros(len(a)))
    return float(torch.cat(best).mean()) if sum(len(b) for b in best) else float("nan")

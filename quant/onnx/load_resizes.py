"""ONNX's Resize, whose sizes and places are those of ONNX Runtime: float32 numbers of float32 factors.

torch multiplies a size by the factor in float64, and a place by the factor's inverse. For a factor such as 1.7 that is
another size or another pixel now and then, so that plans, which have torch's numbers, compute only factors for which
both are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quant.kernels.reference_plan import Register
from quant.onnx.file import Node
from quant.onnx.load_plan import NotTranslated, PlanWriter
from quant.onnx.load_registry import translates
from quant.onnx.load_values import UNKNOWN, ChannelRange, Dequantized, Integers, Range, Real, Value, Waiting

LONGEST = 2**20
"""The sizes and places up to which torch's numbers are compared with ONNX Runtime's."""

MODES = {
    ("nearest", "asymmetric"),
    ("linear", "half_pixel"),
    ("linear", "align_corners"),
    ("linear", "pytorch_half_pixel"),
}  # fmt: skip
"""The modes that are known, with the coordinates that each has there."""


@translates("Resize")
def _resize(plan: PlanWriter, node: Node) -> Value:
    value, factors, at = plan.value(node, 0), plan.array(node, 2), node.attributes
    own = plan.integer_form(value, node)
    mode, places = at.get("mode", b"nearest").decode(), at.get("coordinate_transformation_mode", b"half_pixel").decode()
    floors = mode != "nearest" or at.get("nearest_mode") == b"floor"
    if any(at.get(name) for name in ("antialias", "axes", "exclude_outside")):
        raise NotTranslated(f"{node}: resizes with antialias, along axes, or without what is outside")
    if factors is None or (mode, places) not in MODES or not floors or factors.numel() < 3 or own.range == UNKNOWN:
        raise NotTranslated(f"{node}: resizes in the mode {mode} with {places}, or to sizes: expected what torch has")
    spatial = factors.reshape(-1)[2:].tolist()
    if factors.reshape(-1)[:2].tolist() != [1.0, 1.0]:
        raise NotTranslated(f"{node}: resizes batches or channels")
    if min(spatial) <= 0 or not all(map(math.isfinite, spatial)):
        raise NotTranslated(f"{node}: resizes by {spatial}, expected positive factors")
    if places == "pytorch_half_pixel" and min(spatial) < 1:  # a result of size 1 reads another place there
        raise NotTranslated(f"{node}: makes images smaller with {places}, expected half_pixel")
    name = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(spatial)] if mode == "linear" else mode
    aligned = None if mode == "nearest" else places == "align_corners"
    settings: dict[str, Any] = {"scale_factor": tuple(spatial), "mode": name, "align_corners": aligned}
    in_lines = all(has_numbers_of_torch(factor) for factor in spatial)
    source, before = Register(own.register), own.range
    resized = functools.partial(nearest if mode == "nearest" else linear, tuple(spatial), bool(aligned))

    def in_float(low: float, high: float) -> int:
        reals = plan.real(Dequantized(own), node)
        out = plan.step(str(node), resized, (reals,), plan.ranks[reals])
        return out if (low, high) == (-math.inf, math.inf) else plan.emit("clamp", x=Register(out), low=low, high=high)

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        if not isinstance(to, Range):
            return in_float(low, high)
        if not in_lines or (low, high) != (-math.inf, math.inf):
            return plan.round(Real(in_float(low, high)), to, node).register
        return integers(to)

    def integers(after: Range) -> int:
        multiplier = float(torch.tensor(before.scale) / torch.tensor(after.scale))
        return plan.emit("interpolate", q=source, zero_point=before.zero_point, multiplier=multiplier,
                         output_zero_point=after.zero_point, **settings)  # fmt: skip

    if mode == "nearest":
        rank = plan.ranks[own.register]
        register = integers(before) if in_lines else plan.step(str(node), resized, (own.register,), rank)
        done = replace(own, register=register)
        return done if isinstance(value, Integers) else Dequantized(done)
    if isinstance(value, Integers):
        raise NotTranslated(f"{node}: interpolates integers, which runtimes round otherwise")
    return Waiting(finish)


@functools.lru_cache(maxsize=256)
def has_numbers_of_torch(factor: float) -> bool:
    """Whether torch gives results of the same size, and reads the same places, for all sizes up to LONGEST.

    ONNX Runtime returns an image whose size stays as it is, whatever the factor.
    """
    if factor == 1:
        return True
    numbers = torch.arange(1, LONGEST + 1, dtype=torch.float32)
    sizes = (numbers * factor).to(torch.int64)
    # Images that stay as they are, or become twice as large, have places of their own in torch.
    by_sizes = (sizes == numbers) | ((sizes == 2 * numbers) & (factor != 2))
    if not torch.equal(sizes, (numbers.double() * factor).to(torch.int64)) or by_sizes[1:].any():
        return False
    inverse = torch.tensor(1 / factor, dtype=torch.float32)
    return torch.equal((numbers * inverse).floor(), (numbers / factor).floor())


def nearest(factors: Sequence[float], _aligned: bool, x: Tensor) -> Tensor:
    """Resized to the values at the places before."""
    sizes = _sizes(factors, x)
    if sizes == list(x.shape[2:]):
        return x
    for dim, (factor, size) in enumerate(zip(factors, sizes, strict=True), 2):
        places = _numbers(size) / factor
        x = x.index_select(dim, places.to(torch.int64).clamp(max=x.shape[dim] - 1).to(x.device))
    return x


def linear(factors: Sequence[float], aligned: bool, x: Tensor) -> Tensor:
    """Resized to values between the two places around."""
    sizes = _sizes(factors, x)
    if sizes == list(x.shape[2:]):
        return x
    for dim, (factor, size) in enumerate(zip(factors, sizes, strict=True), 2):
        if factor == 1:
            continue
        last, places = x.shape[dim] - 1, _numbers(size)
        places = places * last / max(size - 1, 1) if aligned else (places + 0.5) / factor - 0.5
        places = places.clamp(0, last)
        one = places.to(torch.int64)
        part = (places - one).reshape(-1, *[1] * (x.dim() - dim - 1)).to(x.device)
        before, after = (x.index_select(dim, at.clamp(max=last).to(x.device)) for at in (one, one + 1))
        x = before * (1 - part) + after * part
    return x


def _sizes(factors: Sequence[float], x: Tensor) -> list[int]:
    """The sizes after it, rounded down in float32."""
    if x.dim() != len(factors) + 2:
        raise ValueError(f"resizes an input of shape {list(x.shape)} by {len(factors) + 2} factors")
    sizes = (torch.tensor(x.shape[2:], dtype=torch.float32) * torch.tensor(factors)).to(torch.int64).tolist()
    if 0 in sizes or 0 in x.shape[1:]:
        raise ValueError(f"makes an input of shape {list(x.shape)} empty")
    return sizes


def _numbers(count: int) -> Tensor:
    """On the CPU, since GPUs divide by a number in two steps."""
    return torch.arange(count, dtype=torch.float32)

"""Shuffles of pixels and channels, which plans make up of reshapes and permutations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quant.kernels.plan_sizes import Arithmetic
from quant.kernels.reference_plan import Register
from quant.ops.call import Call
from quant.ops.planning import BEFORE, Lines, PlanCall, Unplanned, integer
from quant.ops.registry import Recognised, recognises
from quant.ops.views import View, view_of


@dataclass(frozen=True)
class Rearrangement(View):
    """All values in another order."""

    planned_in_reals: ClassVar[bool] = True


@dataclass(frozen=True)
class PixelShuffle(Rearrangement):
    """Channels as the pixels of blocks of `factor` by `factor`."""

    factor: Any = 1

    def plan(self, call: PlanCall) -> Lines:
        """Channels stay last while pixels take their places."""
        x, factor = call.tensor(), integer("upscale_factor", self.factor)
        if len(call.values.shape(x)) != 4:
            raise Unplanned("a pixel shuffle without one batch dimension has no plan")
        batch, channels, height, width = (Register(x.index, dim) for dim in range(4))
        outputs = Arithmetic("//", channels, factor * factor)
        return [
            ("reshape", {"x": x, "shape": (batch, outputs, factor, factor, height, width)}),
            ("permute", {"x": BEFORE, "dims": (0, 4, 2, 5, 3, 1)}),
            ("flatten", {"x": BEFORE, "start": 1, "end": 2}),
            ("flatten", {"x": BEFORE, "start": 2, "end": 3}),
            ("permute", {"x": BEFORE, "dims": (0, 3, 1, 2)}),
        ]


@dataclass(frozen=True)
class PixelUnshuffle(Rearrangement):
    """The pixels of blocks of `factor` by `factor` as channels."""

    factor: Any = 1

    def plan(self, call: PlanCall) -> Lines:
        x, factor = call.tensor(), integer("downscale_factor", self.factor)
        if len(call.values.shape(x)) != 4:
            raise Unplanned("a pixel unshuffle without one batch dimension has no plan")
        batch, channels, *sides = (Register(x.index, dim) for dim in range(4))
        height, width = (Arithmetic("//", side, factor) for side in sides)
        return [
            ("reshape", {"x": x, "shape": (batch, channels, height, factor, width, factor)}),
            ("permute", {"x": BEFORE, "dims": (0, 1, 3, 5, 2, 4)}),
            ("flatten", {"x": BEFORE, "start": 1, "end": 3}),
        ]


@dataclass(frozen=True)
class ChannelShuffle(Rearrangement):
    """The channels of groups in turns."""

    groups: Any = 1

    def plan(self, call: PlanCall) -> Lines:
        x, groups = call.tensor(), integer("groups", self.groups)
        batch, channels, *rest = (Register(x.index, dim) for dim in range(len(call.values.shape(x))))
        return [
            ("reshape", {"x": x, "shape": (batch, groups, Arithmetic("//", channels, groups), *rest)}),
            ("transpose", {"x": BEFORE, "dim0": 1, "dim1": 2}),
            ("flatten", {"x": BEFORE, "start": 1, "end": 2}),
        ]


@recognises(nn.PixelShuffle, F.pixel_shuffle)
def pixel_shuffle(call: Call) -> Recognised:
    """Channels as pixels."""
    return view_of(PixelShuffle(_setting(call, "upscale_factor")), call)


@recognises(nn.PixelUnshuffle, F.pixel_unshuffle)
def pixel_unshuffle(call: Call) -> Recognised:
    """Pixels as channels."""
    return view_of(PixelUnshuffle(_setting(call, "downscale_factor")), call)


@recognises(nn.ChannelShuffle, torch.channel_shuffle)
def channel_shuffle(call: Call) -> Recognised:
    """Channels in turns."""
    return view_of(ChannelShuffle(_setting(call, "groups")), call)


def _setting(call: Call, name: str) -> Any:
    """The one setting of a layer or function."""
    return call.get(1, name) if call.module is None else getattr(call.module, name)

"""oneDNN, through the operators that torch exports for it (the wheel exports none of oneDNN's own symbols).

`torch.ops.onednn.qlinear_pointwise` takes plain tensors and hands the sums back as float32, exact up to 2**24, so K is
cut into panels whose sums cannot exceed that. Each weight is packed for this one use: torch crashes when one packed
weight serves static and dynamic calls. Without VNNI oneDNN's kernels add pairs of products in int16 and saturate
(oneDNN's int8 notes); whether they do here is probed once with the worst case, and where they do a weight is split in
two that cannot overflow.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from quant.kernels import narrow
from quant.kernels.backend import Backend
from quant.kernels.per_weight import PerWeight
from torch import Tensor

PANEL = 2**24 // (255 * 128)
"""Largest K whose sums are exact in float32, even for weights of -128."""


@dataclass(frozen=True)
class _Panel:
    """Columns [first, last) of a weight, packed."""

    first: int
    last: int
    packed: Tensor


class OneDnnBackend(Backend):
    """Exact products from oneDNN's packed linear."""

    name = "onednn"

    def __init__(self) -> None:
        self._packed: PerWeight[list[_Panel]] = PerWeight()

    def why_not(self) -> str:
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
            return "this torch does not export oneDNN's quantised linear"
        return _probe()

    def route(self, q_weight: Tensor) -> str:
        if narrow.is_narrow(q_weight):
            return "unpacked"
        return "split" if self._splits(q_weight) else "pairwise" if saturates() else "vnni"

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        sums = torch.zeros(q_x.shape[0], q_weight.shape[0], dtype=torch.int32)
        if sums.numel() == 0:
            return sums
        for panel in self._packed.get(q_weight, lambda: self._pack(q_weight)):
            part = _multiply(q_x[:, panel.first : panel.last].contiguous(), panel.packed, q_weight.shape[0])
            sums += part.to(torch.int32)
        return sums

    def _pack(self, q_weight: Tensor) -> list[_Panel]:
        parts = [q_weight]
        if self._splits(q_weight):
            clamped = q_weight.clamp(-64, 64)
            parts = [clamped, q_weight - clamped]
        columns = q_weight.shape[1]
        return [
            _Panel(first, min(first + PANEL, columns), _prepack(part[:, first : first + PANEL]))
            for part in parts
            for first in range(0, columns, PANEL)
        ]

    def _splits(self, q_weight: Tensor) -> bool:
        return saturates() and not pairs_fit_int16(q_weight)


def pairs_fit_int16(q_weight: Tensor) -> bool:
    """Whether no adjacent pair of a row can overflow int16 in u8 * s8 + u8 * s8: each sign sums to at most 128."""
    wide = q_weight.to(torch.int32)
    if wide.shape[1] % 2:
        wide = torch.cat([wide, wide.new_zeros(wide.shape[0], 1)], dim=1)
    pairs = wide.reshape(wide.shape[0], -1, 2)
    worst = torch.maximum(pairs.clamp(min=0).sum(dim=2), (-pairs).clamp(min=0).sum(dim=2))
    return int(worst.max()) <= 32767 // 255 if worst.numel() else True


def _prepack(q_weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(q_weight.contiguous(), None)
    return packed


def _multiply(q_x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        q_x,
        1.0,
        0,
        packed,
        torch.ones(outputs),
        torch.zeros(outputs, dtype=torch.int64),
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return sums


def _worst_case() -> float:
    # In a thread of its own: a mode of this one, as torch.export's fake tensors, would answer in oneDNN's place, and
    # the answer is kept for good.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure_worst_case).result()


def _measure_worst_case() -> float:
    q_x = torch.full((1, 64), 255, dtype=torch.uint8)
    return float(_multiply(q_x, _prepack(torch.full((16, 64), 127, dtype=torch.int8)), 16)[0, 0])


@functools.cache
def _probe() -> str:
    try:
        _worst_case()
    except RuntimeError as error:
        return f"oneDNN's quantised linear does not run on this CPU: {str(error).splitlines()[0]}"
    return ""


@functools.cache
def saturates() -> bool:
    """Whether oneDNN's kernels on this CPU lose products to int16, measured on the worst case."""
    return _worst_case() != 255 * 127 * 64

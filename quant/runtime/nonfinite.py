"""NaN and inf in a static model: no integer says them, so the samples that hold one are made NaN at the end.

Where reals become integers, `note` looks whether all are finite. Where they are not, their samples, along dimension 0,
are kept with the registers of the call, and the call's outputs are NaN there (`spoiled`), as a float model's would be.
Every other sample keeps its bits. A planned region only says that it met one; its steps then run one by one and say in
which samples (`Region.run`).

A graph that torch.compile or torch.export makes cannot branch on values: there the look is part of the graph.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import ops
from quant.runtime.trees import leaves, map_leaves

LOST = -1
"""The register that holds what was noted: a list of `Lost`."""


@dataclass(frozen=True)
class Lost:
    """Which samples of a tensor are not finite.

    Attributes:
        rows: bool, True along dimension 0.
        columns: bool, likewise along dimension 1; None where there is none but that of features.
        across: rows are steps of a recurrent layer, and the samples are the columns.
    """

    rows: Tensor
    columns: Tensor | None
    across: bool = False


def in_a_graph() -> bool:
    """Whether this call is being recorded, so that values cannot be branched on."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def note(x: Any, registers: dict[int, Any]) -> None:
    """Look at reals that become integers.

    Args:
        x: float32, samples along dimension 0. Anything else is no fault of its values.
        registers: of the running call.
    """
    if not isinstance(x, Tensor) or x.is_meta or x.dtype != torch.float32:
        return
    if in_a_graph() or not all_finite(x):
        lost = torch.isfinite(x).logical_not()
        rows = Lost(_along(lost, 0), _along(lost, 1) if x.dim() > 2 else None)
        registers[LOST] = [*registers.get(LOST, ()), rows]


def note_inputs(inputs: list[Tensor], quantized: set[int], registers: dict[int, Any]) -> None:
    """In a graph, what a planned region cannot say: its float inputs.

    Args:
        inputs: of the region.
        quantized: places among them that are made integers as they come. Of the others, which may be masks, inf is no
            fault.
    """
    for place, x in enumerate(inputs):
        note(x if place in quantized or x.dtype != torch.float32 else torch.where(torch.isinf(x), 0.0, x), registers)


def note_recurrent(layer: nn.Module, x: Any, states: Any, registers: dict[int, Any]) -> None:
    """Before a recurrent layer or cell runs: what is lost at one step is lost at all that follow.

    Args:
        x: its input, (batch, steps, features) with `batch_first`; (steps, batch, features), (steps, features) or a
            PackedSequence, of which dimension 0 is no sample; of a cell (batch, features).
        states: what it is given besides, nested: samples along dimension 1, of a cell along dimension 0.
    """
    own = layer.__dict__
    by_rows = "batch_first" not in own or (own["batch_first"] and isinstance(x, Tensor) and x.dim() == 3)
    for state in leaves(states) if states is not None else ():
        batched = isinstance(state, Tensor) and state.dim() == 3
        note(state.movedim(1, 0) if by_rows and batched else state, registers)
    if not by_rows and LOST in registers:
        registers[LOST] = [_across(lost, x) for lost in registers[LOST]]


def _across(lost: Lost, x: Any) -> Lost:
    """The same where steps come before samples, as in x."""
    steps, batch = x.shape[:2] if isinstance(x, Tensor) and x.dim() == 3 else (0, 0)
    rows, columns = lost.rows.numel(), None if lost.columns is None else lost.columns.numel()
    if lost.across or (columns == batch and rows != batch) or (rows, columns) == (steps, batch):
        return replace(lost, across=True)
    return Lost(lost.rows, lost.rows if rows == batch else None, across=True)


def spoiled(output: Any, registers: dict[int, Any]) -> Any:
    """A call's output, nested, with NaN in the noted samples: rows of an output that has as many, all of another."""
    noted: list[Lost] | None = registers.get(LOST)
    if noted is None:
        return output
    if torch.compiler.is_compiling() or not torch._C._is_tracing():
        return map_leaves(lambda leaf: _spoiled(leaf, noted), output)
    with warnings.catch_warnings():  # which rows are whose is decided by the traced sizes, as all else in such a graph
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return map_leaves(lambda leaf: _spoiled(leaf, noted), output)


def _spoiled(leaf: Any, noted: list[Lost]) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    counts = [lost.rows.numel() for lost in noted]
    for lost in noted:
        leaf = torch.where(_place(lost, leaf, counts), torch.nan, leaf)
    return leaf


def _place(lost: Lost, leaf: Tensor, counts: list[int]) -> Tensor:
    """Where a sample is in an output, to be broadcast to it."""
    if lost.across:
        samples = lost.columns
        if samples is not None and leaf.dim() > 1 and leaf.shape[1] == samples.numel():
            return _shaped(samples, leaf, 1)
        if samples is not None and leaf.dim() and leaf.shape[0] == samples.numel():
            return _shaped(samples, leaf, 0)
        return lost.rows.any()
    if leaf.dim():
        rows, count = leaf.shape[0], lost.rows.numel()
        if rows == count:
            return _shaped(lost.rows, leaf, 0)
        # Windows or steps that were folded into dimension 0: a whole number for each row of another tensor of the call.
        if any(rows == other for other in counts) and count % rows == 0:
            return _shaped(lost.rows.reshape(rows, -1).any(1), leaf, 0)
    return lost.rows.any()


def _shaped(samples: Tensor, leaf: Tensor, dim: int) -> Tensor:
    return samples.reshape([-1 if d == dim else 1 for d in range(leaf.dim())])


def _along(lost: Tensor, dim: int) -> Tensor:
    """Whether anything is lost, per index of a dimension."""
    return lost.movedim(dim, 0).flatten(1).any(1) if lost.dim() > 1 else lost.reshape(-1)


def all_finite(x: Tensor) -> bool:
    """Whether no value of x, float32, is NaN or inf."""
    if ops.extension_problem():
        return bool(torch.isfinite(x).all())
    return bool(torch.ops.octet_native.all_finite(x))

"""NaN and inf in a static model: no integer represents them, so the outputs of samples that hold one become NaN.

Where float values are quantised, `note` checks that all are finite. If not, it records their samples, along
dimension 0, with the registers of the call, and `spoiled` sets the call's outputs of these samples to NaN, as a float
model would. The other samples keep their bits. A planned region reports only that it met such a value; its steps then
run one by one and record the samples (`Region.run`).

A graph of torch.compile or torch.export cannot branch on values, so there the check is part of the graph.
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
"""The register with the samples recorded by `note`: a list of `Lost`."""


@dataclass(frozen=True)
class Lost:
    """Which samples of a tensor are not finite.

    Attributes:
        rows: bool, True along dimension 0.
        columns: bool, likewise along dimension 1; None where there is none but that of features.
        across: whether rows are time steps of a recurrent layer, so that samples are columns.
    """

    rows: Tensor
    columns: Tensor | None
    across: bool = False


def in_a_graph() -> bool:
    """Whether torch compiles or traces this call, so that it cannot branch on values."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def note(x: Any, registers: dict[int, Any]) -> None:
    """Record the samples of a tensor that are not finite, before it is quantised.

    Args:
        x: float32, samples along dimension 0. Any other value is ignored.
        registers: those of the running call.
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
    """Record samples before a recurrent layer or cell runs: NaN at one time step reaches all later ones.

    Args:
        x: its input, (batch, steps, features) with `batch_first`; (steps, batch, features), (steps, features) or a
            PackedSequence, of which dimension 0 is no sample; of a cell (batch, features).
        states: its initial states, nested: samples along dimension 1, for a cell along dimension 0.
    """
    own = layer.__dict__
    by_rows = "batch_first" not in own or (own["batch_first"] and isinstance(x, Tensor) and x.dim() == 3)
    for state in leaves(states) if states is not None else ():
        batched = isinstance(state, Tensor) and state.dim() == 3
        note(state.movedim(1, 0) if by_rows and batched else state, registers)
    if not by_rows and LOST in registers:
        registers[LOST] = [_across(lost, x) for lost in registers[LOST]]


def _across(lost: Lost, x: Any) -> Lost:
    """`lost` for a tensor whose time steps come before its samples, as in x."""
    steps, batch = x.shape[:2] if isinstance(x, Tensor) and x.dim() == 3 else (0, 0)
    rows, columns = lost.rows.numel(), None if lost.columns is None else lost.columns.numel()
    if lost.across or (columns == batch and rows != batch) or (rows, columns) == (steps, batch):
        return replace(lost, across=True)
    return Lost(lost.rows, lost.rows if rows == batch else None, across=True)


def spoiled(output: Any, registers: dict[int, Any]) -> Any:
    """Set the recorded samples of a call's outputs to NaN.

    Args:
        output: nested. A tensor with as many rows as there are samples gets NaN in those rows, any other everywhere.
        registers: those of the call.
    """
    noted: list[Lost] | None = registers.get(LOST)
    if noted is None:
        return output
    if torch.compiler.is_compiling() or not torch._C._is_tracing():
        return map_leaves(lambda leaf: _spoiled(leaf, noted), output)
    with warnings.catch_warnings():  # the traced sizes decide which rows are samples, as all else in such a graph
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
    """A mask of the lost samples that broadcasts to an output."""
    if lost.across:
        samples = lost.columns
        if samples is not None and leaf.dim() > 1 and _sure(leaf.shape[1] == samples.numel()):
            return _shaped(samples, leaf, 1)
        if samples is not None and leaf.dim() and _sure(leaf.shape[0] == samples.numel()):
            return _shaped(samples, leaf, 0)
        return lost.rows.any()
    if leaf.dim():
        rows, count = leaf.shape[0], lost.rows.numel()
        if _sure(rows == count):
            return _shaped(lost.rows, leaf, 0)
        # Windows or steps that were folded into dimension 0: a whole number for each row of another tensor of the call.
        if any(_sure(rows == other) for other in counts) and _sure(count % rows == 0):
            return _shaped(lost.rows.reshape(rows, -1).any(1), leaf, 0)
    return lost.rows.any()


def _sure(holds: bool | torch.SymBool | Tensor) -> bool:
    """A comparison of sizes; of sizes that may vary in a graph of torch.export, whether it holds for all of them.

    `torch.jit.trace` has tensors for sizes, of the call that it traces.
    """
    if isinstance(holds, (bool, Tensor)):
        return bool(holds)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(holds)


def _shaped(samples: Tensor, leaf: Tensor, dim: int) -> Tensor:
    return samples.reshape([-1 if d == dim else 1 for d in range(leaf.dim())])


def _along(lost: Tensor, dim: int) -> Tensor:
    """Whether any value is lost, for each index of a dimension."""
    return lost.movedim(dim, 0).flatten(1).any(1) if lost.dim() > 1 else lost.reshape(-1)


def all_finite(x: Tensor) -> bool:
    """Whether all values of x, float32, are finite."""
    if ops.extension_problem():
        return bool(torch.isfinite(x).all())
    return bool(torch.ops.octet_native.all_finite(x))

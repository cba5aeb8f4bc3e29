"""A recurrent int8 layer against its simulation, one time step at a time, each from the int8 layer's states.

Whole sequences cannot be compared: a state that is rounded to the other of two integers is fed back, and the difference
grows although every step is right. So each time step starts from the int8 layer's own input and state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quant.kernels import QParams
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.layers.recurrent_walk import Run, run_cell, run_layers


@dataclass(frozen=True)
class TimeSteps:
    """All time steps of one layer and direction; a row is one sample at one time step.

    Attributes:
        layer: which.
        q_states: uint8 (rows, S), the states as the int8 layer rounds them, of the whole sequence in one call.
        states, expected: float32 (rows, S), the same before rounding, by single time steps; and as simulated.
        cells, expected_cells: float32 (rows, H), the cell states of a kind that has them; of shape (0,) otherwise.
    """

    layer: int
    q_states: Tensor
    states: Tensor
    expected: Tensor
    cells: Tensor
    expected_cells: Tensor


def time_steps(
    layer: StaticRecurrent | StaticCell, input: Any, hx: Any, simulate: Run, reads: Sequence[QParams]
) -> tuple[list[TimeSteps], Any]:
    """Compute every time step of an int8 layer twice.

    Args:
        input: uint8, in any form of torch's call; hx is float32, or None.
        simulate: one layer and direction in float (`simulate.simulated_layer`); called for all rows as one time step.
        reads: by layer, the range of the integers that it reads.

    Returns:
        (one for each layer and direction, all that the int8 layer gives, put together from single time steps and y in
        float32).
    """
    steps: list[TimeSteps] = []
    last = layer.num_layers - 1 if isinstance(layer, StaticRecurrent) else 0

    def run(
        index: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = partial(layer.call, _direction(layer, index, reverse), index)
        q_y = call(x, batch_sizes, h, c, True)[0]
        walk = _walk(call, x, batch_sizes, h, c, reverse)
        x_real = reads[index].dequantize(x.reshape(1, -1, x.shape[-1]))
        _, expected, expected_cells = simulate(index, reverse, x_real, None, walk.h_before, walk.c_before)
        q_states = q_y.reshape(walk.h_after.shape)
        steps.append(TimeSteps(index, q_states, walk.h_after, expected, walk.c_after, expected_cells))
        return q_y if index < last else walk.h_after.reshape(q_y.shape), walk.h, walk.c

    if isinstance(layer, StaticCell):
        return steps, run_cell(layer._kind, layer.input_size, layer.hidden_size, input, hx, run)
    return steps, run_layers(layer._kind, layer, input, hx, run)


def _direction(layer: StaticRecurrent | StaticCell, index: int, reverse: bool) -> Any:
    if isinstance(layer, StaticCell):
        return layer.direction
    return layer.directions[index * layer.num_directions + reverse]


@dataclass(frozen=True)
class _Walk:
    """A sequence, step by step; rows in the order of time, whatever the direction.

    Attributes:
        h_before, c_before: float32 (rows, S) and (rows, H), the state that each row starts from; c None without one.
        h_after, c_after: the state after; c of shape (0,) where there is none.
        h, c: float32 (B, S) and (B, H), the last state.
    """

    h_before: Tensor
    c_before: Tensor | None
    h_after: Tensor
    c_after: Tensor
    h: Tensor
    c: Tensor


def _walk(
    call: Callable[..., Any], x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None, reverse: bool
) -> _Walk:
    """Call the int8 operator with one time step after the other."""
    sizes: list[int] = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    steps = x.reshape(-1, x.shape[-1]).split(sizes)
    cell = h.new_empty(0) if c is None else c
    before: dict[int, tuple[Tensor, Tensor]] = {}
    after: dict[int, tuple[Tensor, Tensor]] = {}
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        size = sizes[t]
        before[t] = h[:size], cell[:size]
        _, *after[t] = call(steps[t][None], None, h[:size], None if c is None else cell[:size], False)
        h, cell = torch.cat([after[t][0], h[size:]]), torch.cat([after[t][1], cell[size:]])

    def joined(states: dict[int, tuple[Tensor, Tensor]], place: int) -> Tensor:
        return torch.cat([states[t][place] for t in range(len(sizes))])

    c_before = None if c is None else joined(before, 1)
    return _Walk(joined(before, 0), c_before, joined(after, 0), joined(after, 1), h, cell)

"""The walk over the layers and directions of a recurrent network of any kind, shared by all phases.

`run_layers` and `run_cell` take an input in any of torch's forms (batch first, unbatched, packed, with or without a
state) and call `run` once per layer and direction. In calibration `run` shows each layer's states to observers, in
simulation and training it rounds them in float (`recurrent_float.py`), and in the int8 layer (`recurrent.py`) it calls
the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant.kernels.recurrent.kind import RecurrentKind

Run = Callable[[int, bool, Tensor, Tensor | None, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""(layer, reverse, x, batch_sizes, h, c) -> (y, h, c), as `reference_rnn.rnn_layer`; x is time-major."""


@dataclass(frozen=True)
class Sizes:
    """The sizes and options of a sequence, named as torch names them; a cell has the first two."""

    input_size: int
    hidden_size: int
    num_layers: int = 1
    batch_first: bool = False
    bidirectional: bool = False
    proj_size: int = 0
    dropout: float = 0.0

    @property
    def directions(self) -> tuple[bool, ...]:
        """Whether each direction of a layer is reversed."""
        return (False, True) if self.bidirectional else (False,)


class Shape(Protocol):
    """The sizes of a recurrent layer, as `Sizes` and int8 layers have them."""

    @property
    def input_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def batch_first(self) -> bool: ...
    @property
    def bidirectional(self) -> bool: ...
    @property
    def proj_size(self) -> int: ...


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The input and the state of a call of a recurrent layer."""
    input = args[0] if args else kwargs["input"]
    return input, args[1] if len(args) > 1 else kwargs.get("hx")


def run_layers(kind: RecurrentKind, shape: Shape, input: Any, hx: Any, run: Run, *, dropout: float = 0.0) -> Any:
    """The forward of a recurrent network; `run` computes each layer and direction.

    Args:
        kind: the kind of cell.
        shape: the network's sizes.
        input, hx: as of torch's layer.
        run: computes one layer and direction.
        dropout: probability between layers, in training.

    Raises:
        ValueError: a size of the input or state does not fit; the message says which was expected.
    """
    if isinstance(input, PackedSequence):
        data, batch_sizes, order, back = input
        _check_input(shape, data, 2)
        h, c = _states(kind, shape, hx, int(batch_sizes[0]), data.device, order)
        y, h, c = _stack(shape, data, batch_sizes, h, c, run, dropout)
        if back is not None:
            h, c = h.index_select(1, back), None if c is None else c.index_select(1, back)
        return PackedSequence(y, batch_sizes, order, back), h if c is None else (h, c)
    batched = input.dim() == 3
    x = input if batched else input.unsqueeze(1)
    x = x.transpose(0, 1) if batched and shape.batch_first else x
    _check_input(shape, x, 3)
    if hx is not None and not batched:
        hx = tuple(one.unsqueeze(1) for one in hx) if kind.has_cell else hx.unsqueeze(1)
    h, c = _states(kind, shape, hx, x.size(1), x.device, None)
    y, h, c = _stack(shape, x, None, h, c, run, dropout)
    if not batched:
        y, h, c = y.squeeze(1), h.squeeze(1), None if c is None else c.squeeze(1)
    elif shape.batch_first:
        y = y.transpose(0, 1)
    return y, h if c is None else (h, c)


def _stack(
    shape: Shape, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None, run: Run, dropout: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every layer over a time-major input; h and c are (layers * directions, batch, size)."""
    ways = (False, True) if shape.bidirectional else (False,)
    finals: list[Tensor] = []
    cells: list[Tensor] = []
    for layer in range(shape.num_layers):
        outputs = []
        for reverse in ways:
            place = len(finals)
            y, h_final, c_final = run(layer, reverse, x, batch_sizes, h[place], None if c is None else c[place])
            outputs.append(y)
            finals.append(h_final)
            cells.append(c_final)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if dropout and layer + 1 < shape.num_layers:
            x = F.dropout(x, dropout)
    return x, _stacked(finals), None if c is None else _stacked(cells)


def _stacked(states: list[Tensor]) -> Tensor:
    """`torch.stack`; of a single one a view, which takes a quarter of the time."""
    return states[0].unsqueeze(0) if len(states) == 1 else torch.stack(states)


def _check_input(shape: Shape, x: Tensor, dims: int) -> None:
    if x.dim() != dims or x.size(-1) != shape.input_size:
        raise ValueError(
            f"input has shape {list(x.shape)}, expected {dims} dimensions (2 for an unbatched input), the last of "
            f"{shape.input_size} (input_size)"
        )


def _states(
    kind: RecurrentKind, shape: Shape, hx: Any, batch: int, device: torch.device, order: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """h and c, (layers * directions, batch, size), in the order of the batch; zeros where none are given."""
    count = shape.num_layers * (2 if shape.bidirectional else 1)
    sizes = {"h_0": shape.proj_size or shape.hidden_size}
    if kind.has_cell:
        sizes["c_0"] = shape.hidden_size
    if hx is None:
        states = [torch.zeros(count, batch, size, device=device) for size in sizes.values()]
    else:
        states = list(hx) if kind.has_cell else [hx]
    for (name, size), state in zip(sizes.items(), states, strict=True):
        if list(state.shape) != [count, batch, size]:
            raise ValueError(
                f"{name} has shape {list(state.shape)}, expected {[count, batch, size]} (layers * directions, batch, "
                "size)"
            )
    if order is not None and hx is not None:
        states = [state.index_select(1, order) for state in states]
    return states[0], states[1] if len(states) > 1 else None


def run_cell(kind: RecurrentKind, input_size: int, hidden_size: int, input: Tensor, hx: Any, run: Run) -> Any:
    """The forward of a cell: a sequence of one step.

    Raises:
        ValueError: a size of the input or state does not fit; the message says which was expected.
    """
    if input.dim() not in (1, 2) or input.size(-1) != input_size:
        raise ValueError(f"input has shape {list(input.shape)}, expected (batch, {input_size}) or ({input_size},)")
    batched = input.dim() == 2
    x = input if batched else input.unsqueeze(0)
    states = [None, None] if hx is None else list(hx) if kind.has_cell else [hx]
    checked = [_cell_state(state, x, hidden_size, batched) for state in states]
    _, h, c = run(0, False, x.unsqueeze(0), None, checked[0], checked[1] if kind.has_cell else None)
    h, c = (h, c) if batched else (h.squeeze(0), c.squeeze(0))
    return (h, c) if kind.has_cell else h


def _cell_state(state: Tensor | None, x: Tensor, size: int, batched: bool) -> Tensor:
    if state is None:
        return torch.zeros(x.size(0), size, device=x.device)
    rows = state if batched else state.unsqueeze(0)
    if list(rows.shape) != [x.size(0), size]:
        raise ValueError(
            f"the state has shape {list(state.shape)}, expected {[x.size(0), size] if batched else [size]}"
        )
    return rows

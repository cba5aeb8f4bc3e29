"""Recurrent layers as every phase sees them: which tensors they have, and one walk over layers, directions and shapes.

`run_layers` and `run_cell` take the user's input in any of torch's forms (batch first, unbatched, packed, with or
without a state) and call `run` once per layer and direction. Calibration shows each layer's states to observers,
simulation and training round them in float, and the int8 layer (`rnn.py`) brings the operator: the walk is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels.reference_rnn import input_bias, run_steps
from quant.ops.recurrent import is_cell, product_range, state_range

Run = Callable[[int, bool, Tensor, Tensor | None, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""(layer, reverse, x, batch_sizes, h, c) -> (y, h, c), as `reference_rnn.rnn_layer`; x is time-major."""

Round = Callable[[str, Tensor], Tensor]
"""(which range, as `state_range` and `product_range` name it, values) -> the values, observed or rounded."""


class Shape(Protocol):
    """What a whole-sequence layer says of itself, in float and in int8."""

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool
    proj_size: int


@dataclass(frozen=True)
class Tensors:
    """The parameters of one layer and direction, named as torch names them; differentiable."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None = None


def mode_of(module: nn.Module) -> str:
    """lstm, gru, rnn_tanh or rnn_relu."""
    if isinstance(module, (nn.RNN, nn.RNNCell)):
        return f"rnn_{module.nonlinearity}"
    return "lstm" if isinstance(module, (nn.LSTM, nn.LSTMCell)) else "gru"


def tensors_of(module: nn.Module, layer: int, reverse: bool) -> Tensors:
    """The parameters of a float recurrent layer."""
    found: Any = module
    if is_cell(module):
        return Tensors(found.weight_ih, found.weight_hh, found.bias_ih, found.bias_hh)
    suffix = f"_l{layer}" + ("_reverse" if reverse else "")
    named: dict[str, Any] = {name: getattr(found, name + suffix, None) for name in Tensors.__annotations__}
    return Tensors(**named)


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The input and the state of a call of a recurrent layer."""
    input = args[0] if args else kwargs["input"]
    return input, args[1] if len(args) > 1 else kwargs.get("hx")


def run_layers(shape: Shape, input: Any, hx: Any, run: Run, *, dropout: float = 0.0) -> Any:
    """The forward of torch.nn.LSTM, GRU or RNN, with `run` for every layer and direction.

    Args:
        dropout: between layers, in training; no integer layer has any.

    Raises:
        ValueError: a size is not the layer's; the message says which was expected.
    """
    if isinstance(input, PackedSequence):
        data, batch_sizes, order, back = input
        _check_input(shape, data, 2)
        h, c = _states(shape, hx, int(batch_sizes[0]), data.device, order)
        y, h, c = _stack(shape, data, batch_sizes, h, c, run, dropout)
        if back is not None:
            h, c = h.index_select(1, back), None if c is None else c.index_select(1, back)
        return PackedSequence(y, batch_sizes, order, back), h if c is None else (h, c)
    batched = input.dim() == 3
    x = input if batched else input.unsqueeze(1)
    x = x.transpose(0, 1) if batched and shape.batch_first else x
    _check_input(shape, x, 3)
    if hx is not None and not batched:
        hx = tuple(one.unsqueeze(1) for one in hx) if shape.mode == "LSTM" else hx.unsqueeze(1)
    h, c = _states(shape, hx, x.size(1), x.device, None)
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
    shape: Shape, hx: Any, batch: int, device: torch.device, order: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """h and c, (layers * directions, batch, size), in the order of the batch; zeros where none are given."""
    count = shape.num_layers * (2 if shape.bidirectional else 1)
    sizes = {"h_0": shape.proj_size or shape.hidden_size}
    if shape.mode == "LSTM":
        sizes["c_0"] = shape.hidden_size
    if hx is None:
        made = [torch.zeros(count, batch, size, device=device) for size in sizes.values()]
    else:
        made = list(hx) if shape.mode == "LSTM" else [hx]
    for (name, size), state in zip(sizes.items(), made, strict=True):
        if list(state.shape) != [count, batch, size]:
            raise ValueError(
                f"{name} has shape {list(state.shape)}, expected {[count, batch, size]} (layers * directions, batch, "
                "size)"
            )
    if order is not None and hx is not None:
        made = [state.index_select(1, order) for state in made]
    return made[0], made[1] if len(made) > 1 else None


def run_cell(mode: str, input_size: int, hidden_size: int, input: Tensor, hx: Any, run: Run) -> Any:
    """The forward of torch.nn.LSTMCell, GRUCell or RNNCell: a sequence of one step.

    Raises:
        ValueError: a size is not the layer's; the message says which was expected.
    """
    if input.dim() not in (1, 2) or input.size(-1) != input_size:
        raise ValueError(f"input has shape {list(input.shape)}, expected (batch, {input_size}) or ({input_size},)")
    batched = input.dim() == 2
    x = input if batched else input.unsqueeze(0)
    states = [None, None] if hx is None else list(hx) if mode == "lstm" else [hx]
    made = [_cell_state(state, x, hidden_size, batched) for state in states]
    _, h, c = run(0, False, x.unsqueeze(0), None, made[0], made[1] if mode == "lstm" else None)
    h, c = (h, c) if batched else (h.squeeze(0), c.squeeze(0))
    return (h, c) if mode == "lstm" else h


def _cell_state(state: Tensor | None, x: Tensor, size: int, batched: bool) -> Tensor:
    if state is None:
        return torch.zeros(x.size(0), size, device=x.device)
    rows = state if batched else state.unsqueeze(0)
    if list(rows.shape) != [x.size(0), size]:
        raise ValueError(
            f"the state has shape {list(state.shape)}, expected {[x.size(0), size] if batched else [size]}"
        )
    return rows


def run_float(module: nn.Module, input: Any, hx: Any, around: Round, tensors: Any = tensors_of) -> Any:
    """A float recurrent layer step by step, with `around` at every place that integers round; differentiable.

    Args:
        module: of torch.nn; its own forward is not called.
        around, tensors: as in `float_run`.
    """
    found: Any = module
    run = float_run(module, around, tensors)
    if is_cell(module):
        return run_cell(mode_of(module), found.input_size, found.hidden_size, input, hx, run)
    return run_layers(found, input, hx, run, dropout=found.dropout if module.training else 0.0)


def float_run(module: nn.Module, around: Round, tensors: Any = tensors_of) -> Run:
    """One layer and direction of a float recurrent layer, step by step.

    Args:
        around: given the states before every product with them, and the output of each layer but the last, which the
            caller rounds where integers read it.
        tensors: (module, layer, reverse) -> Tensors, its parameters or rounded ones.
    """
    mode = mode_of(module)
    layers: int = 1 if is_cell(module) else module.num_layers  # type: ignore[assignment]

    def run(
        layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own: Tensors = tensors(module, layer, reverse)
        gates = F.linear(x, own.weight_ih, input_bias(mode, own.bias_ih, own.bias_hh))
        sizes = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
        w_hr = own.weight_hr
        project = None if w_hr is None else lambda m: F.linear(around(product_range(layer), m), w_hr)
        y, h, c = run_steps(
            gates.reshape(-1, gates.shape[-1]),
            sizes,
            h,
            c,
            own.bias_hh,
            mode,
            reverse,
            lambda before: F.linear(around(state_range(layer), before), own.weight_hh),
            project,
        )
        y = y.reshape(*x.shape[:-1], h.shape[1])
        return y if layer + 1 == layers else around(state_range(layer), y), h, c

    return run


def observe(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, show: Round) -> None:
    """Show the states of a float call to observers: the initial ones, and those of every step, layer and direction.

    Args:
        output: what the call gave. The states of the last layer are its output; those of layers below are computed
            once more, by torch's own kernels.
    """
    input, hx = call_of(args, kwargs)
    found: Any = module
    if is_cell(module):
        for state in (hx, output):
            if state is not None:
                show(state_range(0), state[0] if isinstance(state, (tuple, list)) else state)
        return
    if found.proj_size:  # torch's kernels do not show what the projection reads
        run_float(module, input, hx, show)
    else:
        _observe_lower(found, input, hx, show)
    y = output[0]
    show(state_range(found.num_layers - 1), y.data if isinstance(y, PackedSequence) else y)


def _observe_lower(module: nn.RNNBase, input: Any, hx: Any, show: Round) -> None:
    if hx is not None:
        h = hx[0] if module.mode == "LSTM" else hx
        for layer, states in enumerate(h.chunk(module.num_layers)):
            show(state_range(layer), states)
    if module.num_layers == 1:
        return

    def run(
        layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if layer + 1 == module.num_layers:  # nobody looks at it
            return x, h, h if c is None else c
        own = tensors_of(module, layer, reverse)
        y, h, c = _by_torch(module.mode, own, reverse, x, batch_sizes, h, c)
        show(state_range(layer), y)
        return y, h, c

    run_layers(module, input, hx, run)


def _by_torch(
    mode: str, own: Tensors, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer and direction by torch's kernel; its states are the same in whichever direction time is laid out."""
    biased = own.bias_ih is not None
    weights = [own.weight_ih, own.weight_hh, *([own.bias_ih, own.bias_hh] if biased else [])]
    kernel = getattr(torch._VF, mode.lower())
    state = h[None] if c is None else (h[None], c[None])
    if batch_sizes is not None and reverse:
        # A packed sequence reversed starts each sample at its own end; torch has that in a kernel of two directions.
        two = [one.expand(2, *one.shape) for one in (h, c) if one is not None]
        both = two[0] if c is None else two
        y, *finals = kernel(x, batch_sizes, both, weights * 2, biased, 1, 0.0, False, True)
        finals = [one[1] for one in finals]
        y = y[..., y.shape[-1] // 2 :]
    elif batch_sizes is not None:
        y, *finals = kernel(x, batch_sizes, state, weights, biased, 1, 0.0, False, False)
        finals = [one[0] for one in finals]
    else:
        y, *finals = kernel(x.flip(0) if reverse else x, state, weights, biased, 1, 0.0, False, False, False)
        finals = [one[0] for one in finals]
        y = y.flip(0) if reverse else y
    return y, finals[0], finals[-1]

"""Recurrent layers in float, step by step: with a function wherever integers round, or with observers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels.reference_rnn import run_steps
from quant.ops.recurrent import product_range, state_range
from quant.recurrent_layers import Tensors, is_cell, kind_of, sizes_of, tensors_of
from quant.runtime.layers.recurrent_walk import Run, call_of, run_cell, run_layers

Round = Callable[[str, Tensor], Tensor]
"""(name of the range, as from `state_range` and `product_range`, values) -> the values, observed or rounded."""


def run_float(module: nn.Module, input: Any, hx: Any, around: Round, tensors: Any = tensors_of) -> Any:
    """A float recurrent layer step by step, with `around` at every place that integers round; differentiable.

    Args:
        module: its own forward is not called.
        around, tensors: as in `float_run`.
    """
    kind, sizes = kind_of(module), sizes_of(module)
    run = float_run(module, around, tensors)
    if is_cell(module):
        return run_cell(kind, sizes.input_size, sizes.hidden_size, input, hx, run)
    return run_layers(kind, sizes, input, hx, run, dropout=sizes.dropout if module.training else 0.0)


def float_run(module: nn.Module, around: Round, tensors: Any = tensors_of) -> Run:
    """One layer and direction of a float recurrent layer, step by step.

    Args:
        around: given the states before every product with them, and the output of each layer but the last, which the
            caller rounds where integers read it.
        tensors: (module, layer, reverse) -> Tensors, its parameters or rounded ones.
    """
    kind, layers = kind_of(module), sizes_of(module).num_layers

    def run(
        layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own: Tensors = tensors(module, layer, reverse)
        gates = F.linear(x, own.weight_ih, kind.input_bias(own.bias_ih, own.bias_hh))
        sizes = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
        w_hr = own.weight_hr
        project = None if w_hr is None else lambda m: F.linear(around(product_range(layer), m), w_hr)
        y, h, c = run_steps(
            kind,
            gates.reshape(-1, gates.shape[-1]),
            sizes,
            h,
            c,
            own.bias_hh,
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
            once more, by torch's own kernels where it has some for the kind.
    """
    input, hx = call_of(args, kwargs)
    sizes = sizes_of(module)
    if is_cell(module):
        for state in (hx, output):
            if state is not None:
                show(state_range(0), state[0] if isinstance(state, (tuple, list)) else state)
        return
    kernel = kind_of(module).whole_sequence
    if kernel is None or sizes.proj_size:  # torch's kernels do not give the input of a projection
        run_float(module, input, hx, show)
    else:
        with _without_autocast(input):
            _observe_lower(module, kernel, input, hx, show)
    y = output[0]
    show(state_range(sizes.num_layers - 1), y.data if isinstance(y, PackedSequence) else y)


def _observe_lower(module: nn.Module, kernel: Callable[..., Any], input: Any, hx: Any, show: Round) -> None:
    kind, sizes = kind_of(module), sizes_of(module)
    if hx is not None:
        h = hx[0] if kind.has_cell else hx
        for layer, states in enumerate(h.chunk(sizes.num_layers)):
            show(state_range(layer), states)
    if sizes.num_layers == 1:
        return

    def run(
        layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if layer + 1 == sizes.num_layers:  # unused
            return x, h, h if c is None else c
        own = tensors_of(module, layer, reverse)
        y, h, c = _by_torch(kernel, own, reverse, x, batch_sizes, h, c)
        show(state_range(layer), y)
        return y, h, c

    run_layers(kind, sizes, input, hx, run)


def _by_torch(
    kernel: Callable[..., Any],
    own: Tensors,
    reverse: bool,
    x: Tensor,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer and direction by torch's kernel; its states are the same in whichever direction time is laid out."""
    biased = own.bias_ih is not None
    weights = [own.weight_ih, own.weight_hh, *([own.bias_ih, own.bias_hh] if biased else [])]
    x, h = x.to(own.weight_ih.dtype), h.to(own.weight_ih.dtype)
    c = None if c is None else c.to(own.weight_ih.dtype)
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


def _without_autocast(input: Any) -> contextlib.AbstractContextManager[object]:
    """Float32 in autocast too: the states that are observed are those of the weights as they are."""
    kind = (input.data if isinstance(input, PackedSequence) else input).device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()

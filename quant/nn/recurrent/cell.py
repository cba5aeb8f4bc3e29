"""Recurrent cells with int8 weights, of any kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.nn.base import output_dtype
from quant.nn.recurrent.direction import Direction
from quant.recipe import QConfig
from quant.recurrent_layers import kind_of, sizes_of, tensors_of
from quant.runtime.layers.recurrent_module import Int8Cell


class RecurrentCell(Int8Cell):
    """One step: a `Direction` over a sequence of length one."""

    def __init__(self, module: nn.Module, qconfig: QConfig) -> None:
        tensors = tensors_of(module, 0, False)
        super().__init__(sizes_of(module), bias=tensors.bias_ih is not None)
        self.direction = Direction(kind_of(module), tensors, qconfig)

    def _out(self, state: Tensor, input: Tensor) -> Tensor:
        dtype = self.dtype
        if not torch.jit.is_scripting():
            dtype = output_dtype(dtype, input)
        return state if dtype == torch.float32 else state.to(dtype)

    @torch.jit.unused
    def _check_kinds(self, input: Any, hx: Any, two_states: bool) -> None:
        """Raise where the input or the state is of another kind than this layer takes."""
        check_kinds(self._where, input, hx, two_states=two_states)

    def _check(self, input: Tensor) -> None:
        if torch.jit.is_tracing():
            return
        if input.dim() not in (1, 2) or input.size(-1) != self.input_size:
            raise ValueError(
                f"layer '{self._where()}': input has shape {list(input.shape)}, expected (batch, {self.input_size}) "
                f"or ({self.input_size},)"
            )


class OneStateCell(RecurrentCell):
    """Of a kind whose whole state is h."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """float32 (batch, input) or (input,) -> h of (batch, hidden) or (hidden,)."""
        if not torch.jit.is_scripting():
            self._check_kinds(input, hx, False)
        self._check(input)
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        if hx is None:
            h = torch.zeros(x.size(0), self.hidden_size, dtype=x.dtype, device=x.device)
        else:
            h = hx if batched else hx.unsqueeze(0)
        _, h, _ = self.direction(x.unsqueeze(0), None, h, None)
        h = self._out(h, input)
        return h if batched else h.squeeze(0)


class TwoStateCell(RecurrentCell):
    """Of a kind with a cell state c beside h."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """float32 (batch, input) or (input,) -> (h, c) of (batch, hidden) or (hidden,)."""
        if not torch.jit.is_scripting():
            self._check_kinds(input, hx, True)
        self._check(input)
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        if hx is None:
            h = torch.zeros(x.size(0), self.hidden_size, dtype=x.dtype, device=x.device)
            c = h
        else:
            h, c = hx
            if not batched:
                h, c = h.unsqueeze(0), c.unsqueeze(0)
        _, h, c = self.direction(x.unsqueeze(0), None, h, c)
        h, c = self._out(h, input), self._out(c, input)
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


def check_kinds(where: Callable[[], str], input: Any, hx: Any, *, two_states: bool) -> None:
    """Raise TypeError where the input of the layer `where`, or its state, is of another kind than it takes."""
    if not isinstance(input, (Tensor, PackedSequence)):
        raise TypeError(f"layer '{where()}': input is {type(input).__name__}, expected a tensor or a PackedSequence")
    if hx is None:
        return
    if two_states:
        given = [type(one).__name__ for one in hx] if isinstance(hx, (tuple, list)) else type(hx).__name__
        if isinstance(given, str) or len(given) != 2 or not all(isinstance(one, Tensor) for one in hx):
            shown = given if isinstance(given, str) else f"({', '.join(given)})"
            raise TypeError(f"layer '{where()}': the state is {shown}, expected two tensors: call it with (h, c)")
    elif not isinstance(hx, Tensor):
        raise TypeError(f"layer '{where()}': the state is {type(hx).__name__}, expected one tensor: call it with h")

"""torch.nn.RNN and RNNCell."""

from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels.recurrent.kind import RecurrentKind, find
from quant.nn.recurrent.cell import OneStateCell
from quant.nn.recurrent.register import register_recurrent
from quant.nn.recurrent.sequence import OneStateSequence
from quant.recipe import QConfig


class RNN(OneStateSequence):
    """torch.nn.RNN (tanh or ReLU) with int8 weights; the same call, shapes and PackedSequence handling."""

    def __init__(self, module: nn.RNN, qconfig: QConfig) -> None:
        super().__init__(module, qconfig)
        self.nonlinearity = module.nonlinearity

    @overload
    @torch._jit_internal._overload_method
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pass

    @overload
    @torch._jit_internal._overload_method
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]:
        pass

    def forward(self, input, hx=None):  # type: ignore[no-untyped-def]
        """`dtype` in and out, as torch.nn.RNN: (y, h)."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)


class RNNCell(OneStateCell):
    """torch.nn.RNNCell (tanh or ReLU) with int8 weights."""

    def __init__(self, module: nn.RNNCell, qconfig: QConfig) -> None:
        super().__init__(module, qconfig)
        self.nonlinearity = module.nonlinearity


def kind_by_nonlinearity(module: Any) -> RecurrentKind:
    """The kind of a torch.nn.RNN or RNNCell."""
    return find(f"rnn_{module.nonlinearity}")


register_recurrent(kind_by_nonlinearity, sequence=nn.RNN, cell=nn.RNNCell, int8_sequence=RNN, int8_cell=RNNCell)

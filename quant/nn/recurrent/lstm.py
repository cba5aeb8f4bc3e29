"""torch.nn.LSTM and LSTMCell."""

from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels.recurrent.lstm import LSTM as KIND
from quant.nn.recurrent.cell import TwoStateCell
from quant.nn.recurrent.register import register_recurrent
from quant.nn.recurrent.sequence import TwoStateSequence


class LSTM(TwoStateSequence):
    """torch.nn.LSTM with int8 weights; the same call, shapes and PackedSequence handling."""

    @overload
    @torch._jit_internal._overload_method
    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pass

    @overload
    @torch._jit_internal._overload_method
    def forward(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]:
        pass

    def forward(self, input, hx=None):  # type: ignore[no-untyped-def]
        """`dtype` in and out, as torch.nn.LSTM: (y, (h, c))."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)


class LSTMCell(TwoStateCell):
    """torch.nn.LSTMCell with int8 weights."""


register_recurrent(KIND, sequence=nn.LSTM, cell=nn.LSTMCell, int8_sequence=LSTM, int8_cell=LSTMCell)

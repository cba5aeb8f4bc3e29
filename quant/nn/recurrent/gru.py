"""torch.nn.GRU and GRUCell."""

from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels.recurrent.gru import GRU as KIND
from quant.nn.recurrent.cell import OneStateCell
from quant.nn.recurrent.register import register_recurrent
from quant.nn.recurrent.sequence import OneStateSequence


class GRU(OneStateSequence):
    """torch.nn.GRU with int8 weights; the same call, shapes and PackedSequence handling."""

    @overload
    @torch._jit_internal._overload_method
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pass

    @overload
    @torch._jit_internal._overload_method
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]:
        pass

    def forward(self, input, hx=None):  # type: ignore[no-untyped-def]
        """`dtype` in and out, as torch.nn.GRU: (y, h)."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)


class GRUCell(OneStateCell):
    """torch.nn.GRUCell with int8 weights."""


register_recurrent(KIND, sequence=nn.GRU, cell=nn.GRUCell, int8_sequence=GRU, int8_cell=GRUCell)

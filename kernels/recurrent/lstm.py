"""LSTM (Hochreiter and Schmidhuber, 1997; with forget gates, Gers et al., 2000), as torch.nn.LSTM defines it."""

from __future__ import annotations

import torch
from quant.kernels.recurrent.kind import RecurrentKind, register
from torch import Tensor


def lstm_step(a: Tensor, r: Tensor, bias_hh: Tensor | None, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """c_t = sigmoid(f) * c + sigmoid(i) * tanh(g), h_t = sigmoid(o) * tanh(c_t); i, f, g, o = a + r."""
    assert c is not None
    in_gate, forget, cell, out_gate = (a + r).chunk(4, dim=1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(in_gate) * torch.tanh(cell)
    return torch.sigmoid(out_gate) * torch.tanh(c), c


LSTM = register(
    RecurrentKind(
        "lstm", gates=4, step=lstm_step, has_cell=True, projects=True, native=True, whole_sequence=torch._VF.lstm
    )
)

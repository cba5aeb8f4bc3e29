"""The simple network of Elman (1990), with tanh or ReLU, as torch.nn.RNN defines it."""

from __future__ import annotations

import torch
from quant.kernels.recurrent.kind import RecurrentKind, register
from torch import Tensor


def tanh_step(a: Tensor, r: Tensor, bias_hh: Tensor | None, h: Tensor, c: Tensor | None) -> tuple[Tensor, None]:
    """h_t = tanh(a + r)."""
    return torch.tanh(a + r), None


def relu_step(a: Tensor, r: Tensor, bias_hh: Tensor | None, h: Tensor, c: Tensor | None) -> tuple[Tensor, None]:
    """h_t = relu(a + r)."""
    return torch.relu(a + r), None


RNN_TANH = register(RecurrentKind("rnn_tanh", gates=1, step=tanh_step, native=True, whole_sequence=torch._VF.rnn_tanh))
RNN_RELU = register(RecurrentKind("rnn_relu", gates=1, step=relu_step, native=True, whole_sequence=torch._VF.rnn_relu))

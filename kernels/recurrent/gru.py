"""GRU (Cho et al., 2014), as torch.nn.GRU defines it: the reset gate multiplies the product, its bias included."""

from __future__ import annotations

import torch
from quant.kernels.recurrent.kind import RecurrentKind, register
from torch import Tensor


def gru_step(a: Tensor, r: Tensor, bias_hh: Tensor | None, h: Tensor, c: Tensor | None) -> tuple[Tensor, None]:
    """h_t = (1 - z) * n + z * h; reset and z = sigmoid(a + r + b), n = tanh(a + reset * (r + b))."""
    reset_in, update_in, new_in = a.chunk(3, dim=1)
    reset_h, update_h, new_h = r.chunk(3, dim=1)
    bias_reset, bias_update, bias_new = (0.0, 0.0, 0.0) if bias_hh is None else bias_hh.chunk(3)
    reset = torch.sigmoid(reset_in + reset_h + bias_reset)
    update = torch.sigmoid(update_in + update_h + bias_update)
    new = torch.tanh(new_in + reset * (new_h + bias_new))
    return (1.0 - update) * new + update * h, None


GRU = register(
    RecurrentKind("gru", gates=3, step=gru_step, sums_biases=False, native=True, whole_sequence=torch._VF.gru)
)

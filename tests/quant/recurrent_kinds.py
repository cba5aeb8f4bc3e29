"""Every kind of recurrent network that torch makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=6, **options),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))

"""The operators of a kind on a backend: its kernel, else the reference around the backend's products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quant.kernels.backend import Backend
from quant.kernels.recurrent.kind import RecurrentKind
from torch import Tensor

Layer = Callable[..., tuple[Tensor, Tensor, Tensor]]


def rnn_layer(kind: RecurrentKind, backend: Backend) -> Layer:
    """`reference_rnn.rnn_layer`, with the backend's own kernel where the kind has one."""
    return backend.rnn_layer if kind.native else partial(Backend.rnn_layer, backend)


def rnn_layer_static(kind: RecurrentKind, backend: Backend) -> Layer:
    """`reference_rnn.rnn_layer_static`, likewise."""
    return backend.rnn_layer_static if kind.native else partial(Backend.rnn_layer_static, backend)

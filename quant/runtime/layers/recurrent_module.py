"""The base of int8 recurrent layers, dynamic and static: their integers, and the float layer's names and sizes.

Files of int8 modules do not use `from __future__ import annotations`, as `quant_module.py` explains.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels.recurrent.kind import RecurrentKind
from quant.runtime.layers.quant_module import QuantModule, dequantize_weight, frozen
from quant.runtime.layers.recurrent_walk import Sizes

FLOAT_NAME = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l(\d+)(_reverse)?")
"""The names of a recurrent layer's parameters."""


@dataclass(frozen=True)
class Int8Tensors:
    """The tensors of an `Int8Direction`; biases in any float type."""

    q_weight_ih: Tensor
    scale_ih: Tensor
    q_weight_hh: Tensor
    scale_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    columns_ih: Tensor | None = None
    q_weight_hr: Tensor | None = None
    scale_hr: Tensor | None = None


class Int8Direction(QuantModule):
    """One direction of one recurrent layer (`reference_rnn.rnn_layer`), or the only one of a cell.

    Attributes:
        mode: the name of its kind, which operators and TorchScript take.
        terms: number of int8 terms in which the input's weight is stored.

    Buffers: q_weight_ih int8 (gates * hidden, terms * input), scale_ih (gates * hidden,), columns_ih (terms * input,)
    or None;
    q_weight_hh (gates * hidden, state), scale_hh; q_weight_hr (state, hidden) and scale_hr, or None.
    Parameters: bias_ih, bias_hh float32 (gates * hidden,), or None.
    """

    q_weight_ih: Tensor
    scale_ih: Tensor
    columns_ih: Tensor | None
    q_weight_hh: Tensor
    scale_hh: Tensor
    q_weight_hr: Tensor | None
    scale_hr: Tensor | None

    def __init__(self, kind: RecurrentKind, tensors: Int8Tensors, *, reverse: bool = False, terms: int = 1) -> None:
        super().__init__()
        self.mode = kind.name
        self._kind = kind
        self.reverse = reverse
        self.terms = terms
        self.register_buffer("q_weight_ih", tensors.q_weight_ih)
        self.register_buffer("scale_ih", tensors.scale_ih)
        self.register_buffer("columns_ih", tensors.columns_ih)
        self.register_buffer("q_weight_hh", tensors.q_weight_hh)
        self.register_buffer("scale_hh", tensors.scale_hh)
        self.register_buffer("q_weight_hr", tensors.q_weight_hr)
        self.register_buffer("scale_hr", tensors.scale_hr)
        self.bias_ih: Tensor | None
        self.bias_hh: Tensor | None
        self.register_parameter("bias_ih", frozen(tensors.bias_ih))
        self.register_parameter("bias_hh", frozen(tensors.bias_hh))

    @torch.jit.unused
    def float_tensor(self, which: str) -> Tensor | None:
        """The real value of weight_ih, weight_hh, weight_hr, bias_ih or bias_hh in `dtype`; None where it has none."""
        tensor = self._float32(which)
        return None if tensor is None else tensor.to(self.dtype)

    @torch.jit.unused
    def _float32(self, which: str) -> Tensor | None:
        if which == "weight_ih":
            return dequantize_weight(self.q_weight_ih, self.scale_ih, self.columns_ih, self.terms)
        if which == "weight_hh":
            return dequantize_weight(self.q_weight_hh, self.scale_hh, None)
        if which == "weight_hr":
            q_weight, scale = self.q_weight_hr, self.scale_hr
            return None if q_weight is None or scale is None else dequantize_weight(q_weight, scale, None)
        return self.bias_ih if which == "bias_ih" else self.bias_hh


class Int8Sequence(QuantModule):
    """A recurrent layer over sequences: its sizes, and the real values of its tensors under torch's names.

    Children: directions, an `Int8Direction` per layer and direction, which a subclass sets.
    """

    __jit_unused_properties__: list[str] = ["all_weights"]  # noqa: RUF012

    def __init__(self, kind: RecurrentKind, sizes: Sizes, *, bias: bool) -> None:
        super().__init__()
        self.mode = kind.name.upper()  # as torch.nn.RNNBase.mode
        self.input_size = sizes.input_size
        self.hidden_size = sizes.hidden_size
        self.num_layers = sizes.num_layers
        self.batch_first = sizes.batch_first
        self.dropout = sizes.dropout
        self.bidirectional = sizes.bidirectional
        self.proj_size = sizes.proj_size
        self.num_directions = len(sizes.directions)
        self.state_size = sizes.proj_size or sizes.hidden_size
        self.bias = bias

    def __getattr__(self, name: str) -> Any:
        # Other code reads a float LSTM's weight_ih_l0, bias_hh_l0_reverse, ...
        asked = FLOAT_NAME.fullmatch(name)
        if asked is None or "directions" not in self._modules:
            return super().__getattr__(name)
        kind, layer, reverse = asked.groups()
        if int(layer) < self.num_layers and (self.bidirectional or not reverse):
            directions = self._modules["directions"]
            assert isinstance(directions, nn.ModuleList)
            direction = directions[int(layer) * self.num_directions + (1 if reverse else 0)]
            assert isinstance(direction, Int8Direction)
            value = direction.float_tensor(kind)
            if value is not None:
                return value
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The real values of its tensors, a list for each layer and direction, as torch.nn.RNNBase has them."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        each = ([one.float_tensor(name) for name in names] for one in self.directions)
        return [[tensor for tensor in tensors if tensor is not None] for tensors in each]

    def flatten_parameters(self) -> None:
        """Does nothing, as kernels pack the int8 weights; training code calls it."""

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, bias={self.bias}"
        for name in ("batch_first", "bidirectional"):
            if getattr(self, name):
                text += f", {name}=True"
        return text + (f", proj_size={self.proj_size}" if self.proj_size else "")


class Int8Cell(QuantModule):
    """A recurrent cell: its sizes, and the real values of its tensors under torch's names.

    Children: direction, an `Int8Direction`, which a subclass sets.
    """

    __jit_unused_properties__: list[str] = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]  # noqa: RUF012

    def __init__(self, sizes: Sizes, *, bias: bool) -> None:
        super().__init__()
        self.input_size = sizes.input_size
        self.hidden_size = sizes.hidden_size
        self.bias = bias

    def _real(self, which: str) -> Tensor | None:
        direction = self.direction
        assert isinstance(direction, Int8Direction)
        return direction.float_tensor(which)

    @property
    def weight_ih(self) -> Tensor | None:
        """The real value of the int8 weight, in `dtype`, (gates * hidden, input)."""
        return self._real("weight_ih")

    @property
    def weight_hh(self) -> Tensor | None:
        """The real value of the int8 weight, in `dtype`, (gates * hidden, hidden)."""
        return self._real("weight_hh")

    @property
    def bias_ih(self) -> Tensor | None:
        """`dtype` (gates * hidden,), or None."""
        return self._real("bias_ih")

    @property
    def bias_hh(self) -> Tensor | None:
        """`dtype` (gates * hidden,), or None."""
        return self._real("bias_hh")

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}"

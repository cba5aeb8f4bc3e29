"""What int8 recurrent layers hold, dynamic and static ones: integers under the float layer's names, and its sizes.

The files of int8 modules do without `from __future__ import annotations`, as `quant_module.py` says.
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
"""How recurrent layers call their parameters."""


@dataclass(frozen=True)
class Int8Tensors:
    """The tensors of one layer and direction, as `Int8Direction` holds them; biases in any float type."""

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
    """One direction of one layer (`reference_rnn.rnn_layer`), or a cell's only one.

    Attributes:
        mode: the name of its kind, which operators and TorchScript take.
        terms: in how many int8 terms the input's weight is stored.

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
        """weight_ih, weight_hh, weight_hr, bias_ih or bias_hh in `dtype`: what the int8 one stands for, or None."""
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
    """A layer over sequences: its sizes, and the real values of its tensors by the names that torch's have.

    Children: directions, an `Int8Direction` per layer and direction, which a subclass sets.
    """

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
        # What other code reads of a float LSTM: weight_ih_l0, bias_hh_l0_reverse, ...
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

    def flatten_parameters(self) -> None:
        """Nothing to do: int8 weights are packed by the kernels. Here because training code calls it."""

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, bias={self.bias}"
        for name in ("batch_first", "bidirectional"):
            if getattr(self, name):
                text += f", {name}=True"
        return text + (f", proj_size={self.proj_size}" if self.proj_size else "")


class Int8Cell(QuantModule):
    """One step, with the real values of its tensors by the names that torch's have.

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
        """`dtype` (gates * hidden, input): what the int8 weight stands for."""
        return self._real("weight_ih")

    @property
    def weight_hh(self) -> Tensor | None:
        """`dtype` (gates * hidden, hidden): what the int8 weight stands for."""
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

"""LSTM, GRU and RNN with int8 weights: whole sequences, and their cells.

A recurrent network is a list of `Direction`s, one per layer and direction, each one operator call over the whole
sequence: the input projection is one product outside the time loop, and the loop itself runs in the kernel.
"""

import re
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels import dispatch
from quant.nn.base import QuantizedWeight, QuantModule, dequantize_weight, frozen
from quant.recipe import QConfig

MODES = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}

FINE_INPUT_SHARE = 0.2
"""Share of a network's weights up to which the first input projection is stored in two int8 terms."""

FINE_INPUT_SIZE = 128
"""Input features up to which it is in any case: as many as filter banks have, and the network is small then."""

FLOAT_NAME = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l(\d+)(_reverse)?")
"""How torch.nn.LSTM calls its parameters."""


class Direction(QuantModule):
    """One direction of one layer (`reference_rnn.rnn_layer`).

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

    def __init__(
        self,
        mode: str,
        reverse: bool,
        qconfig: QConfig,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
        weight_hr: Tensor | None = None,
        *,
        fine_input: bool = False,
    ) -> None:
        super().__init__()
        self.mode = mode
        self.reverse = reverse
        self.per_row = qconfig.ranges_per_row
        inputs = (QuantizedWeight.in_two_terms if fine_input else QuantizedWeight.of)(weight_ih, qconfig)
        # The state is quantised per row and, but for ReLU, lies in (-1, 1): 8 bits hold it.
        state = QConfig(weight_bits=qconfig.weight_bits, per_channel=qconfig.per_channel, activation_bits=8)
        hidden = QuantizedWeight.of(weight_hh, state)
        projection = None if weight_hr is None else QuantizedWeight.of(weight_hr, state)
        self.activation_bits = inputs.activation_bits
        self.terms = inputs.terms
        self.described = inputs.described
        self.register_buffer("q_weight_ih", inputs.q_weight)
        self.register_buffer("scale_ih", inputs.scale)
        self.register_buffer("columns_ih", inputs.columns)
        self.register_buffer("q_weight_hh", hidden.q_weight)
        self.register_buffer("scale_hh", hidden.scale)
        self.register_buffer("q_weight_hr", None if projection is None else projection.q_weight)
        self.register_buffer("scale_hr", None if projection is None else projection.scale)
        self.bias_ih: Tensor | None
        self.bias_hh: Tensor | None
        self.register_parameter("bias_ih", frozen(bias_ih))
        self.register_parameter("bias_hh", frozen(bias_hh))

    def forward(
        self, input: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(time, batch, input), or (rows, input) with batch_sizes -> (y, h, c) as `reference_rnn.rnn_layer` says."""
        if self.terms == 2:
            input = torch.cat([input, input], dim=-1)
        if torch.jit.is_scripting():
            return torch.ops.octet.rnn_layer(  # type: ignore[no-any-return]
                input,
                batch_sizes,
                h,
                c,
                self.q_weight_ih,
                self.scale_ih,
                self.columns_ih,
                self.activation_bits,
                self.per_row,
                self.q_weight_hh,
                self.scale_hh,
                self.bias_ih,
                self.bias_hh,
                self.q_weight_hr,
                self.scale_hr,
                self.mode,
                self.reverse,
                self.backend,
            )
        return self._dispatch(input, batch_sizes, h, c)

    @torch.jit.unused
    def _dispatch(
        self, input: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Tensors not by attribute: nn.Module takes half a microsecond for each, which a cell's step would notice.
        buffers: dict[str, Any] = self._buffers
        parameters = self._parameters
        try:
            return dispatch.current(self.backend).rnn_layer(
                input,
                batch_sizes,
                h,
                c,
                buffers["q_weight_ih"],
                buffers["scale_ih"],
                buffers["columns_ih"],
                self.activation_bits,
                self.per_row,
                buffers["q_weight_hh"],
                buffers["scale_hh"],
                parameters["bias_ih"],
                parameters["bias_hh"],
                buffers["q_weight_hr"],
                buffers["scale_hr"],
                self.mode,
                self.reverse,
            )
        except (TypeError, ValueError) as error:
            raise self._named(error) from error

    @torch.jit.unused
    def float_tensor(self, which: str) -> Tensor | None:
        """weight_ih, weight_hh, weight_hr, bias_ih or bias_hh as float32: what the int8 one stands for, or None."""
        if which == "weight_ih":
            return dequantize_weight(self.q_weight_ih, self.scale_ih, self.columns_ih, self.terms)
        if which == "weight_hh":
            return dequantize_weight(self.q_weight_hh, self.scale_hh, None)
        if which == "weight_hr":
            q_weight, scale = self.q_weight_hr, self.scale_hr
            return None if q_weight is None or scale is None else dequantize_weight(q_weight, scale, None)
        return self.bias_ih if which == "bias_ih" else self.bias_hh


class _Recurrent(QuantModule):
    """What LSTM, GRU and RNN share: the layers, and the user's tensors in and out of their shapes."""

    def __init__(self, module: nn.RNNBase, qconfig: QConfig) -> None:
        super().__init__()
        self.mode = module.mode
        self.input_size = module.input_size
        self.hidden_size = module.hidden_size
        self.num_layers = module.num_layers
        self.bias = module.bias
        self.batch_first = module.batch_first
        self.dropout = module.dropout
        self.bidirectional = module.bidirectional
        self.proj_size = module.proj_size
        self.num_directions = 2 if module.bidirectional else 1
        self.state_size = module.proj_size or module.hidden_size
        self.directions = nn.ModuleList(
            _direction(module, layer, reverse, qconfig)
            for layer in range(module.num_layers)
            for reverse in ((False, True) if module.bidirectional else (False,))
        )

    def _run(
        self, input: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every layer over a time-major input; h and c are (layers * directions, batch, size)."""
        finals: list[Tensor] = []
        cells: list[Tensor] = []
        outputs: list[Tensor] = []
        for index, direction in enumerate(self.directions):
            y, h_final, c_final = direction(input, batch_sizes, h[index], None if c is None else c[index])
            finals.append(h_final)
            cells.append(c_final)
            outputs.append(y)
            if len(outputs) == self.num_directions:
                input = outputs[0] if self.num_directions == 1 else torch.cat(outputs, dim=-1)
                outputs = []
                if self.training and self.dropout > 0 and index + 1 < self.num_layers * self.num_directions:
                    input = torch.dropout(input, self.dropout, True)
        return input, torch.stack(finals), torch.stack(cells)

    def _check_input(self, input: Tensor, packed: bool) -> None:
        if torch.jit.is_tracing():
            return  # a shape check would be a warning and a constant in the graph; the kernels look again
        expected = 2 if packed else 3
        if input.dim() != expected or input.size(-1) != self.input_size:
            raise ValueError(
                f"layer '{self.layer_name}': input has shape {list(input.shape)}, expected {expected} dimensions "
                f"(2 for an unbatched input), the last of {self.input_size} (input_size)"
            )

    def _check_state(self, state: Tensor, batch: int, size: int, what: str) -> None:
        if torch.jit.is_tracing():
            return
        layers = self.num_layers * self.num_directions
        if list(state.shape) != [layers, batch, size]:
            raise ValueError(
                f"layer '{self.layer_name}': {what} has shape {list(state.shape)}, expected {[layers, batch, size]} "
                f"(layers * directions, batch, size)"
            )

    def _zeros(self, input: Tensor, batch: int, size: int) -> Tensor:
        return torch.zeros(self.num_layers * self.num_directions, batch, size, dtype=input.dtype, device=input.device)

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
            assert isinstance(direction, Direction)
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


def _direction(module: nn.RNNBase, layer: int, reverse: bool, qconfig: QConfig) -> Direction:
    suffix = f"_l{layer}" + ("_reverse" if reverse else "")

    def tensor(name: str) -> Tensor | None:
        found: Tensor | None = getattr(module, name + suffix, None)
        return found

    weight_ih, weight_hh = tensor("weight_ih"), tensor("weight_hh")
    assert weight_ih is not None
    assert weight_hh is not None
    # Fewer bits than 8 are the user's own trade, which a second term would undo.
    wants = qconfig.activation_bits == "auto" and qconfig.weight_bits == 8
    fine = wants and layer == 0 and affords_fine_input(module)
    return Direction(
        MODES[module.mode],
        reverse,
        qconfig,
        weight_ih,
        weight_hh,
        tensor("bias_ih") if module.bias else None,
        tensor("bias_hh") if module.bias else None,
        tensor("weight_hr") if module.proj_size else None,
        fine_input=fine,
    )


def affords_fine_input(module: nn.RNNBase) -> bool:
    """Whether the first layer's input projection is narrow, or at most FINE_INPUT_SHARE of the network's weights.

    It alone reads the user's features, which may span decades (mel power before the log); the layers above read states
    in (-1, 1). Rounding its weights to 8 bits then flips the gates that such inputs drive from end to end (cosine 0.99
    to float on random networks of 40 to 128 features, against 0.9996), so where a second int8 term costs little it
    gets one.
    """
    if module.input_size <= FINE_INPUT_SIZE:
        return True
    first = sum(p.numel() for name, p in module.named_parameters() if name in ("weight_ih_l0", "weight_ih_l0_reverse"))
    every = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
    return first <= FINE_INPUT_SHARE * every


class LSTM(_Recurrent):
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
        """Float32 in and out, as torch.nn.LSTM: (y, (h, c))."""
        if isinstance(input, PackedSequence):
            data, batch_sizes, sorted_indices, unsorted_indices = input
            self._check_input(data, True)
            batch = int(batch_sizes[0])
            if hx is None:
                h, c = self._zeros(data, batch, self.state_size), self._zeros(data, batch, self.hidden_size)
            else:
                h, c = hx
                if sorted_indices is not None:
                    h, c = h.index_select(1, sorted_indices), c.index_select(1, sorted_indices)
            self._check_state(h, batch, self.state_size, "h_0")
            self._check_state(c, batch, self.hidden_size, "c_0")
            y, h_n, c_n = self._run(data, batch_sizes, h, c)
            if unsorted_indices is not None:
                h_n, c_n = h_n.index_select(1, unsorted_indices), c_n.index_select(1, unsorted_indices)
            return PackedSequence(y, batch_sizes, sorted_indices, unsorted_indices), (h_n, c_n)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            x = x.transpose(0, 1)
        self._check_input(x, False)
        batch = x.size(1)
        if hx is None:
            h, c = self._zeros(x, batch, self.state_size), self._zeros(x, batch, self.hidden_size)
        else:
            h, c = hx
            if not batched:
                h, c = h.unsqueeze(1), c.unsqueeze(1)
        self._check_state(h, batch, self.state_size, "h_0")
        self._check_state(c, batch, self.hidden_size, "c_0")
        y, h_n, c_n = self._run(x, None, h, c)
        if batched and self.batch_first:
            y = y.transpose(0, 1)
        if not batched:
            y, h_n, c_n = y.squeeze(1), h_n.squeeze(1), c_n.squeeze(1)
        return y, (h_n, c_n)


class _OneState(_Recurrent):
    """GRU and RNN: h is the whole state.

    Each has its own `forward`, because TorchScript finds overloads by the very class of a module.
    """

    def _run_packed(self, input: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        self._check_input(data, True)
        batch = int(batch_sizes[0])
        h = self._zeros(data, batch, self.state_size) if hx is None else hx
        if hx is not None and sorted_indices is not None:
            h = h.index_select(1, sorted_indices)
        self._check_state(h, batch, self.state_size, "h_0")
        y, h_n, _ = self._run(data, batch_sizes, h, None)
        if unsorted_indices is not None:
            h_n = h_n.index_select(1, unsorted_indices)
        return PackedSequence(y, batch_sizes, sorted_indices, unsorted_indices), h_n

    def _run_padded(self, input: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            x = x.transpose(0, 1)
        self._check_input(x, False)
        batch = x.size(1)
        if hx is None:
            h = self._zeros(x, batch, self.state_size)
        else:
            h = hx if batched else hx.unsqueeze(1)
        self._check_state(h, batch, self.state_size, "h_0")
        y, h_n, _ = self._run(x, None, h, None)
        if batched and self.batch_first:
            y = y.transpose(0, 1)
        if not batched:
            y, h_n = y.squeeze(1), h_n.squeeze(1)
        return y, h_n


class GRU(_OneState):
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
        """Float32 in and out, as torch.nn.GRU: (y, h)."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)


class RNN(_OneState):
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
        """Float32 in and out, as torch.nn.RNN: (y, h)."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)


class _Cell(QuantModule):
    """One step: a `Direction` over a sequence of length one."""

    __jit_unused_properties__: list[str] = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]  # noqa: RUF012

    def __init__(self, module: nn.RNNCellBase, mode: str, qconfig: QConfig) -> None:
        super().__init__()
        self.input_size = module.input_size
        self.hidden_size = module.hidden_size
        self.bias = module.bias
        self.direction = Direction(
            mode, False, qconfig, module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
        )

    @property
    def weight_ih(self) -> Tensor | None:
        """float32 (gates * hidden, input): what the int8 weight stands for."""
        return self.direction.float_tensor("weight_ih")

    @property
    def weight_hh(self) -> Tensor | None:
        """float32 (gates * hidden, hidden): what the int8 weight stands for."""
        return self.direction.float_tensor("weight_hh")

    @property
    def bias_ih(self) -> Tensor | None:
        """float32 (gates * hidden,), or None."""
        return self.direction.bias_ih

    @property
    def bias_hh(self) -> Tensor | None:
        """float32 (gates * hidden,), or None."""
        return self.direction.bias_hh

    def _check(self, input: Tensor) -> None:
        if torch.jit.is_tracing():
            return
        if input.dim() not in (1, 2) or input.size(-1) != self.input_size:
            raise ValueError(
                f"layer '{self.layer_name}': input has shape {list(input.shape)}, expected (batch, {self.input_size}) "
                f"or ({self.input_size},)"
            )

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}"


class LSTMCell(_Cell):
    """torch.nn.LSTMCell with int8 weights."""

    def __init__(self, module: nn.LSTMCell, qconfig: QConfig) -> None:
        super().__init__(module, "lstm", qconfig)

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """float32 (batch, input) or (input,) -> (h, c) of (batch, hidden) or (hidden,)."""
        self._check(input)
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        if hx is None:
            h = torch.zeros(x.size(0), self.hidden_size, dtype=x.dtype, device=x.device)
            c = h
        else:
            h, c = hx
            if not batched:
                h, c = h.unsqueeze(0), c.unsqueeze(0)
        _, h, c = self.direction(x.unsqueeze(0), None, h, c)
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


class _OneStateCell(_Cell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """float32 (batch, input) or (input,) -> h of (batch, hidden) or (hidden,)."""
        self._check(input)
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        if hx is None:
            h = torch.zeros(x.size(0), self.hidden_size, dtype=x.dtype, device=x.device)
        else:
            h = hx if batched else hx.unsqueeze(0)
        _, h, _ = self.direction(x.unsqueeze(0), None, h, None)
        return h if batched else h.squeeze(0)  # type: ignore[no-any-return]


class GRUCell(_OneStateCell):
    """torch.nn.GRUCell with int8 weights."""

    def __init__(self, module: nn.GRUCell, qconfig: QConfig) -> None:
        super().__init__(module, "gru", qconfig)


class RNNCell(_OneStateCell):
    """torch.nn.RNNCell (tanh or ReLU) with int8 weights."""

    def __init__(self, module: nn.RNNCell, qconfig: QConfig) -> None:
        super().__init__(module, f"rnn_{module.nonlinearity}", qconfig)
        self.nonlinearity = module.nonlinearity

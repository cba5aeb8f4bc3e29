"""Whole sequences of recurrent layers with int8 weights, of any kind.

A recurrent network is a list of `Direction`s, one per layer and direction, each one operator call over the whole
sequence.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.nn.base import output_dtype
from quant.nn.recurrent.cell import check_kinds
from quant.nn.recurrent.direction import Direction
from quant.recipe import QConfig
from quant.recurrent_layers import directions_of, kind_of, sizes_of, tensors_of
from quant.runtime.layers.recurrent_module import Int8Sequence

FINE_INPUT_SHARE = 0.2
"""Share of a network's weights up to which the first input projection is stored in two int8 terms."""

FINE_INPUT_SIZE = 128
"""Input features up to which it is in any case: as many as filter banks have, and the network is small then."""


class RecurrentSequence(Int8Sequence):
    """What all kinds share: the layers, and the user's tensors in and out of their shapes."""

    def __init__(self, module: nn.Module, qconfig: QConfig) -> None:
        kind, sizes = kind_of(module), sizes_of(module)
        super().__init__(kind, sizes, bias=tensors_of(module, 0, False).bias_ih is not None)
        self.directions = nn.ModuleList(
            Direction(
                kind,
                tensors_of(module, layer, reverse),
                qconfig,
                reverse=reverse,
                fine_input=layer == 0 and _wants_fine_input(module, qconfig),
            )
            for layer, reverse in directions_of(module)
        )

    def _run(
        self, input: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every layer over a time-major input; h and c are (layers * directions, batch, size)."""
        dtype = self.dtype
        if not torch.jit.is_scripting():
            dtype = output_dtype(dtype, input)
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
        return input.to(dtype), torch.stack(finals).to(dtype), torch.stack(cells).to(dtype)

    @torch.jit.unused
    def _check_kinds(self, input: Any, hx: Any, two_states: bool) -> None:
        """Raise where the input or the state is of another kind than this layer takes."""
        check_kinds(self._where, input, hx, two_states=two_states)
        if isinstance(input, Tensor) and input.dim() not in (2, 3):
            self._check_input(input, False)

    def _check_input(self, input: Tensor, packed: bool) -> None:
        if torch.jit.is_tracing():
            return  # a shape check would be a warning and a constant in the graph; the kernels look again
        expected = 2 if packed else 3
        if input.dim() != expected or input.size(-1) != self.input_size:
            raise ValueError(
                f"layer '{self._where()}': input has shape {list(input.shape)}, expected {expected} dimensions "
                f"(2 for an unbatched input), the last of {self.input_size} (input_size)"
            )

    def _check_state(self, state: Tensor, batch: int, size: int, what: str) -> None:
        if torch.jit.is_tracing():
            return
        layers = self.num_layers * self.num_directions
        if list(state.shape) != [layers, batch, size]:
            raise ValueError(
                f"layer '{self._where()}': {what} has shape {list(state.shape)}, expected {[layers, batch, size]} "
                f"(layers * directions, batch, size)"
            )

    def _zeros(self, input: Tensor, batch: int, size: int) -> Tensor:
        return torch.zeros(self.num_layers * self.num_directions, batch, size, dtype=input.dtype, device=input.device)


class OneStateSequence(RecurrentSequence):
    """Of a kind whose whole state is h.

    What is to be scripted needs a `forward` of its own: TorchScript finds overloads by the very class of a module.
    """

    def forward(self, input: Any, hx: Any = None) -> Any:
        """`dtype` in and out, as the float layer: (y, h)."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)

    def _run_packed(self, input: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        if not torch.jit.is_scripting():
            self._check_kinds(input, hx, False)
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
        if not torch.jit.is_scripting():
            self._check_kinds(input, hx, False)
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


class TwoStateSequence(RecurrentSequence):
    """Of a kind with a cell state c beside h; else as `OneStateSequence`."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """`dtype` in and out, as the float layer: (y, (h, c))."""
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hx)
        return self._run_padded(input, hx)

    def _run_packed(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor] | None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]:
        if not torch.jit.is_scripting():
            self._check_kinds(input, hx, True)
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

    def _run_padded(self, input: Tensor, hx: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not torch.jit.is_scripting():
            self._check_kinds(input, hx, True)
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


def _wants_fine_input(module: nn.Module, qconfig: QConfig) -> bool:
    # Fewer bits than 8 are the user's own trade, which a second term would undo.
    return qconfig.activation_bits == "auto" and qconfig.weight_bits == 8 and affords_fine_input(module)


def affords_fine_input(module: nn.Module) -> bool:
    """Whether the first layer's input projection is narrow, or at most FINE_INPUT_SHARE of the network's weights.

    It alone reads the user's features, which may span decades (mel power before the log); the layers above read states
    in (-1, 1). Rounding its weights to 8 bits then flips the gates that such inputs drive from end to end (cosine 0.99
    to float on random networks of 40 to 128 features, against 0.9996), so where a second int8 term costs little it
    gets one.
    """
    if sizes_of(module).input_size <= FINE_INPUT_SIZE:
        return True
    first = sum(p.numel() for name, p in module.named_parameters() if name in ("weight_ih_l0", "weight_ih_l0_reverse"))
    every = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
    return first <= FINE_INPUT_SHARE * every

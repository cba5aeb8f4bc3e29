"""Int8 recurrent layers and cells of any kind with static ranges (`reference_rnn.rnn_layer_static`).

Called by itself, a layer takes and returns floats. Inside a converted model, `compute` takes uint8. States are uint8
between layers; those of the last layer are uint8 or float32, as the model reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels import Backend, QParams, dispatch
from quant.kernels.recurrent.kind import RecurrentKind
from quant.runtime import nonfinite
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.recurrent_module import Int8Cell, Int8Direction, Int8Sequence, Int8Tensors
from quant.runtime.layers.recurrent_walk import Run, Sizes, run_cell, run_layers
from quant.runtime.own_forward import is_falling_back


@dataclass(frozen=True)
class RecurrentRanges:
    """The ranges of a recurrent layer.

    Attributes:
        input: that of its input.
        states: for each layer, that of its states in both directions.
        products: for each layer, that of its projection's input; empty without projections.
    """

    input: QParams
    states: Sequence[QParams]
    products: Sequence[QParams] = ()


class _Static(QuantModule):
    """The ranges of a recurrent layer, and the call of its operator; a base class.

    Attributes:
        _kind: the kind of cell.

    Buffers:
        input_scale, input_zero_point: float32 and int32, (), of its input.
        state_scale, state_zero_point: (layers,), of the states of each layer in both directions.
        product_scale, product_zero_point: (layers,), of the projections' inputs; None without projections.
    """

    input_scale: Tensor
    input_zero_point: Tensor
    _kind: RecurrentKind
    _numbers: _Numbers | None

    def _take(self, ranges: RecurrentRanges) -> None:
        """Register the buffers."""
        x = ranges.input
        self.register_buffer("input_scale", x.scale.reshape(()).clone())
        self.register_buffer("input_zero_point", x.zero_point.reshape(()).clone())
        for name, qparams in (("state", ranges.states), ("product", ranges.products)):
            scales = torch.stack([one.scale for one in qparams]) if qparams else None
            zero_points = torch.stack([one.zero_point for one in qparams]) if qparams else None
            self.register_buffer(f"{name}_scale", scales)
            self.register_buffer(f"{name}_zero_point", zero_points)
        self.derive()

    def numbers(self) -> _Numbers:
        """The ranges as plain numbers."""
        if self._numbers is None:
            self._numbers = _Numbers(self)
        return self._numbers

    def derive(self) -> None:
        """Read the ranges, as `StaticLayer.derive` does."""
        self._numbers = None if self.input_scale.device.type == "meta" else _Numbers(self)

    def quantize(self, x: Tensor) -> Tensor:
        """float32 -> uint8, by the input's range."""
        scale, zero_point = self.numbers().input
        if x.dtype != torch.float32:
            raise TypeError(f"layer {self.layer_name or '(root)'!r}: input is {x.dtype}, expected torch.float32")
        q: Tensor = dispatch.current(self.backend).operators["quantize"](x, scale, zero_point)
        return q

    def call(
        self,
        direction: Int8Direction,
        layer: int,
        x: Tensor,
        batch_sizes: Tensor | None,
        h: Tensor,
        c: Tensor | None,
        quantized: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One layer and direction on uint8 x."""
        known = self.numbers()
        backend = dispatch.current(self.backend)
        compute = backend.rnn_layer_static if self._kind.native else partial(Backend.rnn_layer_static, backend)
        return compute(
            x,
            *(known.states[layer - 1] if layer else known.input),
            batch_sizes,
            h,
            c,
            direction.q_weight_ih,
            direction.scale_ih,
            direction.q_weight_hh,
            direction.scale_hh,
            direction.bias_ih,
            direction.bias_hh,
            *known.states[layer],
            direction.q_weight_hr,
            direction.scale_hr,
            *(known.products[layer] if known.products else (1.0, 0)),
            direction.mode,
            direction.reverse,
            quantized,
        )

    def call_dynamic(
        self, direction: Int8Direction, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One layer and direction on float32 x, each row of which, and of the states, has a range of its own."""
        if x.dtype != torch.float32:
            raise TypeError(f"layer {self.layer_name or '(root)'!r}: input is {x.dtype}, expected torch.float32")
        backend = dispatch.current(self.backend)
        compute = backend.rnn_layer if self._kind.native else partial(Backend.rnn_layer, backend)
        return compute(
            x,
            batch_sizes,
            h,
            c,
            direction.q_weight_ih,
            direction.scale_ih,
            direction.columns_ih,
            8,
            True,
            direction.q_weight_hh,
            direction.scale_hh,
            direction.bias_ih,
            direction.bias_hh,
            direction.q_weight_hr,
            direction.scale_hr,
            direction.mode,
            direction.reverse,
        )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.derive()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.derive()


class _Numbers:
    """(scale, zero point) of the input, of each layer's states, and of each layer's projected values."""

    def __init__(self, layer: _Static) -> None:
        self.input = float(layer.input_scale), int(layer.input_zero_point)
        self.states = _pairs(layer, "state")
        self.products = _pairs(layer, "product")


def _pairs(layer: nn.Module, name: str) -> list[tuple[float, int]]:
    scales, zero_points = layer._buffers[f"{name}_scale"], layer._buffers[f"{name}_zero_point"]
    if scales is None or zero_points is None:
        return []
    return list(zip(scales.tolist(), zero_points.tolist(), strict=True))


class StaticRecurrent(_Static, Int8Sequence):
    """An int8 recurrent network, called as torch's, PackedSequence included."""

    def __init__(
        self, kind: RecurrentKind, sizes: Sizes, tensors: Sequence[Int8Tensors], ranges: RecurrentRanges
    ) -> None:
        """`tensors` has one entry per layer and direction, in torch's order."""
        super().__init__(kind, sizes, bias=tensors[0].bias_ih is not None)
        self._kind = kind
        ways = sizes.directions * sizes.num_layers
        self.directions = nn.ModuleList(
            Int8Direction(kind, one, reverse=reverse) for one, reverse in zip(tensors, ways, strict=True)
        )
        self._take(ranges)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Float32 in and out: (y, (h, c)), or (y, h).

        With ranges of the call in a user's forward that runs as it is.
        """
        packed, seen = isinstance(input, PackedSequence), dict[int, Any]()
        nonfinite.note(input.data if packed else input, seen)
        nonfinite.note_recurrent(self, input, hx, seen)
        if is_falling_back():
            return nonfinite.spoiled(self.dynamic(input, hx), seen)
        data = self.quantize(input.data if packed else input)
        return nonfinite.spoiled(self.compute(input._replace(data=data) if packed else data, hx), seen)

    def dynamic(self, input: Any, hx: Any = None) -> Any:
        """Float32 in and out, with ranges that are taken of the call."""

        def run(
            layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            direction: Any = self.directions[layer * self.num_directions + reverse]
            return self.call_dynamic(direction, x, batch_sizes, h, c)

        return self._named_run(run, input, hx)

    def compute(self, input: Any, hx: Any = None, *, quantized: bool = False) -> Any:
        """uint8 in, as a tensor or a PackedSequence; y in uint8 by the last layer's range, or in float32.

        h and c are float32, not rounded: what comes back as the next call's state goes on as one sequence would.
        """

        def run(
            layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            direction: Any = self.directions[layer * self.num_directions + reverse]
            integers = quantized or layer + 1 < self.num_layers
            return self.call(direction, layer, x, batch_sizes, h, c, integers)

        return self._named_run(run, input, hx)

    def _named_run(self, run: Run, input: Any, hx: Any) -> Any:
        try:
            return run_layers(self._kind, self, input, hx, run)
        except (TypeError, ValueError) as error:
            raise self._named(error) from error


class StaticCell(_Static, Int8Cell):
    """An int8 recurrent cell, called as torch's."""

    def __init__(self, kind: RecurrentKind, sizes: Sizes, tensors: Int8Tensors, ranges: RecurrentRanges) -> None:
        super().__init__(sizes, bias=tensors.bias_ih is not None)
        self._kind = kind
        self.direction = Int8Direction(kind, tensors)
        self._take(ranges)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """float32 (batch, input) or (input,) -> h, or (h, c), of (batch, hidden) or (hidden,).

        With ranges of the call in a user's forward that runs as it is.
        """
        seen = dict[int, Any]()
        nonfinite.note(input, seen)
        nonfinite.note_recurrent(self, input, hx, seen)
        if is_falling_back():
            return nonfinite.spoiled(self.dynamic(input, hx), seen)
        return nonfinite.spoiled(self.compute(self.quantize(input), hx), seen)

    def dynamic(self, input: Tensor, hx: Any = None) -> Any:
        """Float32 in and out, with ranges that are taken of the call."""

        def run(
            layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            return self.call_dynamic(self.direction, x, None, h, c)

        return self._named_run(run, input, hx)

    def compute(self, input: Tensor, hx: Any = None, *, quantized: bool = False) -> Any:
        """uint8 in, float32 out: the state passes through the user's loop and is rounded where it is multiplied."""

        def run(
            layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            return self.call(self.direction, 0, x, None, h, c, False)

        return self._named_run(run, input, hx)

    def _named_run(self, run: Run, input: Tensor, hx: Any) -> Any:
        try:
            return run_cell(self._kind, self.input_size, self.hidden_size, input, hx, run)
        except (TypeError, ValueError) as error:
            raise self._named(error) from error

"""Recurrent layers and cells of any kind with ranges known beforehand (`reference_rnn.rnn_layer_static`).

Called by itself a layer takes and gives floats, as the user's own. Inside a converted model `compute` takes uint8; the
states of every layer but the last are uint8 between layers, and those of the last where the model wants them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quant.kernels import Backend, QParams, dispatch
from quant.kernels.recurrent.kind import RecurrentKind
from quant.nn.base import QuantModule
from quant.nn.recurrent import Direction, RecurrentCell, RecurrentSequence
from quant.ops.recurrent import product_range, state_range
from quant.recipe import QConfig
from quant.recurrent_layers import Tensors, directions_of, is_cell, kind_of, tensors_of
from quant.runtime import nonfinite
from quant.static.recurrent import run_cell, run_layers
from quant.static.weights import dequantized_rows, quantized_rows


class _Static(QuantModule):
    """The ranges of a recurrent layer, and the call of its operator.

    Attributes:
        _kind: what it computes at a step.

    Buffers:
        input_scale, input_zero_point: float32 and int32, (), of what it reads.
        state_scale, state_zero_point: (layers,), of the states of each layer, of both directions.
        product_scale, product_zero_point: (layers,), of what a projection reads; None without one.
    """

    input_scale: Tensor
    input_zero_point: Tensor
    _kind: RecurrentKind
    _numbers: _Numbers | None

    def take_ranges(self, layers: int, projected: bool, x: QParams, inner: Mapping[str, QParams]) -> None:
        """Make the buffers; `inner` by the names of `ops.recurrent.range_names`."""
        states = [inner[state_range(layer)] for layer in range(layers)]
        products = [inner[product_range(layer)] for layer in range(layers)] if projected else []
        self.register_buffer("input_scale", x.scale.reshape(()).clone())
        self.register_buffer("input_zero_point", x.zero_point.reshape(()).clone())
        for name, qparams in (("state", states), ("product", products)):
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
        direction: Direction,
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


class StaticRecurrent(_Static, RecurrentSequence):
    """A recurrent network in int8; the same call, shapes and PackedSequence handling."""

    def __init__(self, module: nn.Module, qconfig: QConfig, x: QParams, inner: Mapping[str, QParams]) -> None:
        super().__init__(module, _eight_bits(qconfig))
        self._kind = kind_of(module)
        self.take_ranges(self.num_layers, bool(self.proj_size), x, inner)
        for place, direction in zip(directions_of(module), self.directions, strict=True):
            _round_weights(direction, tensors_of(module, *place), qconfig)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Float32 in and out: (y, (h, c)), or (y, h)."""
        packed, seen = isinstance(input, PackedSequence), dict[int, Any]()
        nonfinite.note(input.data if packed else input, seen)
        nonfinite.note_recurrent(self, input, hx, seen)
        data = self.quantize(input.data if packed else input)
        return nonfinite.spoiled(self.compute(input._replace(data=data) if packed else data, hx), seen)

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

        try:
            return run_layers(self._kind, self, input, hx, run)
        except (TypeError, ValueError) as error:
            raise self._named(error) from error


class StaticCell(_Static, RecurrentCell):
    """A cell in int8."""

    def __init__(self, module: nn.Module, qconfig: QConfig, x: QParams, inner: Mapping[str, QParams]) -> None:
        super().__init__(module, _eight_bits(qconfig))
        self._kind = kind_of(module)
        self.take_ranges(1, False, x, inner)
        _round_weights(self.direction, tensors_of(module, 0, False), qconfig)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """float32 (batch, input) or (input,) -> h, or (h, c), of (batch, hidden) or (hidden,)."""
        seen = dict[int, Any]()
        nonfinite.note(input, seen)
        nonfinite.note_recurrent(self, input, hx, seen)
        return nonfinite.spoiled(self.compute(self.quantize(input), hx), seen)

    def compute(self, input: Tensor, hx: Any = None, *, quantized: bool = False) -> Any:
        """uint8 in, float32 out: a state goes round in the user's loop and is rounded where it is multiplied."""

        def run(
            layer: int, reverse: bool, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            return self.call(self.direction, 0, x, None, h, c, False)

        try:
            return run_cell(self._kind, self.input_size, self.hidden_size, input, hx, run)
        except (TypeError, ValueError) as error:
            raise self._named(error) from error


def static_recurrent(
    module: nn.Module, qconfig: QConfig, x: QParams, inner: Mapping[str, QParams]
) -> StaticRecurrent | StaticCell:
    """The int8 form of a float recurrent layer.

    Args:
        x: the range of its input.
        inner: those of `ops.recurrent.range_names`.
    """
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"its {name} holds NaN or inf, expected finite values; check the training")
    return (StaticCell if is_cell(module) else StaticRecurrent)(module, qconfig, x, inner)


def _eight_bits(qconfig: QConfig) -> QConfig:
    return replace(qconfig, activation_bits=8)


def _round_weights(direction: Any, own: Tensors, qconfig: QConfig) -> None:
    """Take the weights' ranges from the observer that the settings name."""
    for name in ("ih", "hh", "hr"):
        weight = getattr(own, f"weight_{name}")
        if weight is not None:
            q_weight, scale = quantized_rows(weight.detach().to(torch.float32), qconfig)
            direction._buffers[f"q_weight_{name}"], direction._buffers[f"scale_{name}"] = q_weight, scale


def rounded(module: nn.Module, qconfig: QConfig) -> Any:
    """`recurrent_layers.tensors_of` with the weights that the int8 layer has, in float."""

    def tensors(network: nn.Module, layer: int, reverse: bool) -> Tensors:
        own = tensors_of(network, layer, reverse)
        weights = {}
        for name in ("weight_ih", "weight_hh", "weight_hr"):
            weight = getattr(own, name)
            if weight is not None:
                weights[name] = dequantized_rows(weight.detach().to(torch.float32), qconfig)
        return replace(own, **weights)

    return tensors

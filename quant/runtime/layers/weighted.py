"""Int8 linear layers and convolutions with static ranges, under the user's names.

Called by itself, a layer takes and returns floats. Inside a converted model, `compute` takes uint8 and returns uint8,
or float32 where only floats are read. With 16-bit activations it takes float32 and makes two bytes of it
(`kernels/two_bytes.py`). Buffers hold what defines the arithmetic: the int8 weight, the scales and zero points, the
float bias. Everything else is derived from them when first needed, and anew where one of them was written to or
replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import Backend, QParams, dispatch, narrow, two_bytes
from quant.kernels.reference_ops import OpTable
from quant.kernels.scheme import SCALE_MIN
from quant.runtime import nonfinite
from quant.runtime.layers.polyphase import Polyphase
from quant.runtime.layers.products import Product, TransposedProduct
from quant.runtime.layers.quant_module import REFUSALS, named
from quant.runtime.layers.requantizing import clamp_limits, quantized_bias
from quant.runtime.layers.sites import add_site, register_sites
from quant.runtime.own_forward import is_falling_back
from quant.runtime.scripting import refuse_scripting


@dataclass
class QWeight:
    """An int8 weight in the layout of the user's layer, or narrow; its scale per output channel; the float bias."""

    q_weight: Tensor
    scale: Tensor
    bias: Tensor | None


class StaticLayer(nn.Module):
    """A linear layer or convolution with an int8 weight, and with input and output ranges for each site that calls it.

    Buffers:
        q_weight: int8, in the layout of the user's layer; or narrow (`quant.kernels.narrow`), of a linear layer.
        weight_scale: float32, (out,).
        bias: float32, (out,), or None. Becomes int32 at scale s_x * s_w.
        input_scale, input_zero_point, output_scale, output_zero_point: for each site (`sites.py`). New ones have to be
            assigned: a call does not look whether they were written to in place, as it does for the others.
        fold_gain, fold_shift: float32 (out,), or None: the batch norm or similar that is folded into the weight, as a
            function of the layer's own output, y = gain x + shift; 1 and 0 for channels whose gain is 0.

    Attributes:
        product: the kind of product, with the settings of a convolution.
        clamps: for each site, (low, high) of the activation that is fused with the layer, or None.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.
        own: the site whose ranges apply when the layer is called by itself.
        activation_bits: 8, or 16 as two bytes.
        layer_name: dotted name in the user's model, for errors.
    """

    activation_bits = 8
    layer_name = ""
    q_weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor
    input_zero_point: Tensor
    output_scale: Tensor
    output_zero_point: Tensor
    fold_gain: Tensor | None
    fold_shift: Tensor | None

    def __init__(
        self,
        product: Product,
        q: QWeight,
        backend: str | None,
        fold: tuple[Tensor, Tensor] | None = None,
        activation_bits: int = 8,
    ) -> None:
        super().__init__()
        self.product, self.backend = product, backend
        self.activation_bits = activation_bits
        self.own = 0
        self.clamps: list[tuple[float, float] | None] = []
        self.register_buffer("q_weight", q.q_weight)
        self.register_buffer("weight_scale", q.scale)
        self.register_buffer("bias", q.bias)
        gain, shift = (None, None) if fold is None else _invertible(*fold)
        self.register_buffer("fold_gain", gain)
        self.register_buffer("fold_shift", shift)
        register_sites(self)
        self._derived: dict[int, _Derived] = {}
        self.training = False

    def add_site(self, x: QParams, y: QParams | None, clamp: tuple[float, float] | None) -> int:
        """Add a site that calls the layer.

        Args:
            x: scale and zero point of the input.
            y: those of the output; None where the site returns float32.
            clamp: the activation's bounds, if any.

        Returns:
            the site's number.
        """
        self.clamps.append(clamp)
        return add_site(self, x, y)

    @property
    def weight(self) -> Tensor:
        """The real values of the int8 weight without the norm that is folded in, for code that reads a weight."""
        return self.unfolded()[0]

    def __getattr__(self, name: str) -> Any:
        """A buffer; the bias without the folded norm, as `weight` is. The buffer itself has the norm in it."""
        if name == "bias" and name in self.__dict__.get("_buffers", ()):
            return self.unfolded()[1]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A buffer counts from the next call on; a bias is given without the folded norm, as it is read."""
        if name not in self.__dict__.get("_buffers", ()):
            super().__setattr__(name, value)
            return
        if isinstance(value, nn.Parameter):
            value = value.detach()
        if name == "bias" and isinstance(value, Tensor) and self.fold_gain is not None and self.fold_shift is not None:
            value = value * self.fold_gain + self.fold_shift
        super().__setattr__(name, value)
        self.__dict__.get("_derived", {}).clear()

    def unfolded(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in float, without the norm that is folded into them."""
        folded = self._buffers["bias"]
        if self.fold_gain is None or self.fold_shift is None:
            return self.product.real_weight(self.q_weight, self.weight_scale), folded
        bias = None if folded is None else (folded - self.fold_shift) / self.fold_gain
        return self.product.real_weight(self.q_weight, self.weight_scale / self.fold_gain), bias

    def unknown_fold(self) -> dict[str, Tensor]:
        """Neutral gain and shift by name, for files of an older version, which do not store what is folded in."""
        if self.fold_gain is None or self.fold_shift is None:
            return {}
        return {"fold_gain": torch.ones_like(self.fold_gain), "fold_shift": torch.zeros_like(self.fold_shift)}

    def forward(self, x: Tensor) -> Tensor:
        """float32 in, float32 out, by the ranges of site `own`.

        Where the user's own forward runs (`own_forward.py`), calibration may not have seen such values: the input has
        the range of this call, the output is not rounded or clamped, and a folded norm is undone, because the
        forward computes it itself, or leaves it out.
        """
        try:
            if not isinstance(x, Tensor):
                raise TypeError(f"expected a tensor, got a {type(x).__name__}")
            if x.dtype != torch.float32:
                raise TypeError(f"expected torch.float32, got {x.dtype}: call it with x.float()")
            if self.product.lacks_batch(x):
                return self._between_floats(x.unsqueeze(0)).squeeze(0)
            return self._between_floats(x)
        except REFUSALS as error:
            raise named(error, self.layer_name, f"int8 {self.product.name}") from error

    def _between_floats(self, x: Tensor) -> Tensor:
        known = self._alone(x) if is_falling_back() else self.site(self.own)
        backend = dispatch.current(self.backend)
        if known.low is None:
            x_form = backend.operators["quantize"](x, known.input_scale, known.input_zero_point)
        else:
            x_form = x
        y = self._compute(x_form, known, None if known.alone else self.clamps[self.own], backend)
        if y.dtype == torch.uint8:
            y = backend.operators["dequantize"](y, known.output_scale, known.output_zero_point)
        if known.alone and self.fold_gain is not None and self.fold_shift is not None:
            gain, shift = (self.product.along_channels(one, y.dim()) for one in (self.fold_gain, self.fold_shift))
            y = (y - shift) / gain
        if x.is_contiguous():  # kernels leave images channels last, and the caller may ask for a view of them
            y = y.contiguous()
        seen: dict[int, Any] = {}
        nonfinite.note(x, seen)
        return nonfinite.spoiled(y, seen)  # type: ignore[no-any-return]

    def compute(self, x: Tensor, site: int) -> Tensor:
        """uint8 in, float32 with 16-bit activations; uint8 or float32 out, as of the site."""
        return self._compute(x, self.site(site), self.clamps[site], dispatch.current(self.backend))

    def _alone(self, x: Tensor) -> _Derived:
        """The derived numbers for an input with the range of this call, and a float32 output."""
        return _Derived(self, self.own, range_of_call(x))

    def _compute(self, x: Tensor, known: _Derived, clamp: tuple[float, float] | None, backend: Backend) -> Tensor:
        if known.low is not None:
            return self._compute_two_bytes(x, known, known.low, clamp, backend)
        y = self._formed(x, known, backend)
        return y if clamp is None or known.limits is not None else y.clamp_(*clamp)

    def _compute_two_bytes(
        self, x: Tensor, known: _Derived, low: _LowByte, clamp: tuple[float, float] | None, backend: Backend
    ) -> Tensor:
        """The same of float32: the products of both bytes, added as float32."""
        table = backend.operators
        q_high = table["quantize"](x, known.input_scale, known.input_zero_point)
        rest = x - table["dequantize"](q_high, known.input_scale, known.input_zero_point)
        q_low = table["quantize"](rest, low.input_scale, low.input_zero_point)
        y = self._formed(q_high, known, backend) + self._formed(q_low, low, backend)
        y = y if clamp is None else y.clamp_(*clamp)
        if not known.output_scale:
            return y
        return table["quantize"](y, known.output_scale, known.output_zero_point)

    def _formed(self, q_x: Tensor, known: _Derived | _LowByte, backend: Backend) -> Tensor:
        """The product with one tensor of bytes."""
        table = backend.operators
        if known.pad is not None:
            q_x = table["pad"](q_x, *known.pad)
        if known.phases is None or backend.transposes:
            return self._product(table, known, known, (q_x, known.input_zero_point, self.q_weight))
        y = self._product(table, known, known.phases, (q_x, known.input_zero_point, known.phases.q_weight))
        return known.phases.in_order(y, q_x.shape[2:])

    @staticmethod
    def _product(
        table: OpTable, known: _Derived | _LowByte, how: _Derived | _LowByte | Polyphase, operands: tuple[Any, ...]
    ) -> Tensor:
        args = (*operands, how.q_bias, *how.settings, how.multiplier)
        if known.limits is None:
            return table[how.product.reals](*args)
        return table[how.product.integers](*args, known.output_zero_point, *known.limits)

    def site(self, site: int) -> _Derived:
        """The derived numbers of a site, of the buffers as they are now.

        In a graph, and where stand-ins without values are in the places of buffers, they are those known before.
        """
        known = self._derived.get(site)
        if known is not None and (torch.compiler.is_compiling() or known.stands() or not self._has_values()):
            return known
        known = self._derived[site] = _Derived(self, site)
        return known

    def _has_values(self) -> bool:
        """Whether all buffers are plain tensors, whose numbers can be read."""
        return all(one is None or (type(one) is Tensor and not one.is_meta) for one in self._buffers.values())

    def derive(self) -> None:
        """Derive the numbers of all sites now, so that torch.compile takes a model that never ran.

        Numbers read from tensors cannot be part of a graph. On the meta device there are none yet.
        """
        self._derived.clear()
        if self.q_weight.device.type != "meta":
            for site in range(len(self.clamps)):
                self.site(site)

    def derived_weights(self) -> list[Tensor]:
        """The int8 weights that are derived from `q_weight` and given to kernels in its place: those of phases."""
        return [known.phases.q_weight for known in self._derived.values() if known.phases is not None]

    def places(self, site: int) -> list[tuple[dict[Any, Any], Any, Any]]:
        """What has to be where it is for the numbers of a site to hold: dictionaries, with a key and its value."""
        known = self.site(site)
        return [*known.places, (self._derived, site, known), (self._buffers, "q_weight", self._buffers["q_weight"])]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StaticLayer:
        """Move the buffers to another device; they keep their types, as kernels need them."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: Any, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        for name, value in self.unknown_fold().items():
            state_dict.setdefault(prefix + name, value)
        if prefix + "q_weight" in state_dict:
            state_dict[prefix + "q_weight"] = narrow.as_stored(state_dict[prefix + "q_weight"], self.q_weight)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        bias, own = state_dict.get(prefix + "bias"), self._buffers["bias"]
        assigned = local_metadata.get("assign_to_params_buffers", False) and isinstance(bias, Tensor)
        if assigned and own is not None and own.shape == bias.shape:
            self._buffers["bias"] = bias  # with the folded norm, as it was stored
        self.derive()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_derived": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.derive()

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script asks for."""
        refuse_scripting(f"an int8 {self.product.name} layer")

    def extra_repr(self) -> str:
        weight, form = self.q_weight, ""
        shape = tuple(weight.shape)
        if narrow.is_narrow(weight):
            shape, form = (shape[0], narrow.columns_of(weight)), f" of {shape[1]} bits"
        return f"{self.product.name}, {shape}{form}, sites={len(self.clamps)}"


class FoldedNorm(nn.Identity):
    """Replaces a batch norm that is folded into a layer: the identity, except where the user's own forward runs.

    Attributes:
        layer: the layer that it is folded into; not a child.
    """

    def __init__(self, layer: StaticLayer) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def forward(self, input: Tensor) -> Tensor:
        """The input; where the user's own forward runs, the norm of it, since the layer returns its unfolded output."""
        layer: StaticLayer = self.__dict__["layer"]
        if not is_falling_back() or layer.fold_gain is None or layer.fold_shift is None:
            return input
        shape = (-1, *[1] * (input.dim() - 2))
        return input * layer.fold_gain.reshape(shape) + layer.fold_shift.reshape(shape)


def _invertible(gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Gain 1 and shift 0 for channels whose gain has no reciprocal: their norm stays folded in."""
    lost = ~torch.isfinite(1 / gain)
    return torch.where(lost, 1.0, gain), torch.where(lost, 0.0, shift)


class _Derived:
    """The numbers of one site that are derived from a layer's buffers: Python numbers and int32 tensors.

    Attributes:
        places: where its weights, scales and bias were found.
        versions: the versions of these, which count the writes to them; a tensor of inference mode has none.
    """

    def __init__(self, layer: StaticLayer, site: int, input_range: tuple[Tensor, int] | None = None) -> None:
        self.places: list[tuple[dict[str, Any], str, Any]] = []
        self.versions: list[tuple[Tensor, int]] = []
        scale = layer.input_scale[site]
        self.input_scale, self.input_zero_point = float(scale), int(layer.input_zero_point[site])
        self.output_scale, self.output_zero_point = float(layer.output_scale[site]), int(layer.output_zero_point[site])
        self.alone = input_range is not None
        if input_range is not None:
            scale, self.input_zero_point = input_range
            self.input_scale, self.output_scale = float(scale), 0.0
        product, bias = scale * layer.weight_scale, layer._buffers["bias"]
        self.q_bias = None if bias is None else quantized_bias(bias, product)
        self.limits: tuple[int, int] | None = None
        self.multiplier = product
        fine = layer.activation_bits == 16  # the sum of both products is rounded, and not each
        if self.output_scale and not fine:
            self.multiplier = product / layer.output_scale[site]
            self.limits = clamp_limits(layer.clamps[site], self.output_scale, self.output_zero_point)
        self.product = layer.product
        self.settings = tuple(layer.product.settings.values())
        self.phases: Polyphase | None = None
        if isinstance(layer.product, TransposedProduct) and layer.product.has_phases and not self.alone:
            self._note(layer, "q_weight")
            self.phases = Polyphase(layer.product, layer.q_weight, self.q_bias, self.multiplier)
        before = layer.product.pad_before
        self.pad = None if before is None else (*before, self.input_zero_point)
        self.low = _LowByte(self) if fine else None
        self._note(layer, "weight_scale", "bias")

    def _note(self, layer: StaticLayer, *names: str) -> None:
        """Take note of buffers that the numbers are derived from."""
        for name in names:
            one = layer._buffers[name]
            self.places.append((layer._buffers, name, one))
            if one is not None and not one.is_inference():
                self.versions.append((one, one._version))

    def stands(self) -> bool:
        """Whether the buffers are still those, and nobody wrote to them."""
        for store, name, one in self.places:
            if store[name] is not one:
                return False
        for tensor, version in self.versions:  # noqa: SIM110  # a generator for `all` costs more
            if tensor._version != version:
                return False
        return True


class _LowByte:
    """The numbers for the low byte of 16-bit activations: those of the high byte, with another scale and no bias."""

    limits = q_bias = None
    input_zero_point = output_zero_point = two_bytes.LOW_ZERO_POINT

    def __init__(self, high: _Derived) -> None:
        self.input_scale = two_bytes.low_scale(high.input_scale)
        self.multiplier = high.multiplier / two_bytes.STEPS
        self.product, self.settings = high.product, high.settings
        self.pad = None if high.pad is None else (*high.pad[:-1], self.input_zero_point)
        self.phases = None if high.phases is None else high.phases.scaled(1 / two_bytes.STEPS)


def _extremes(x: Tensor) -> tuple[float, float]:
    """The least and the largest value, 0 among them."""
    return (min(float(x.amin()), 0.0), max(float(x.amax()), 0.0)) if x.numel() else (0.0, 0.0)


def range_of_call(x: Tensor) -> tuple[Tensor, int]:
    """Scale, float32 (), and zero point of an input's own extremes, for values that calibration may not have seen.

    Samples with NaN or inf become NaN afterwards, so that only finite values count.
    """
    low, high = _extremes(x.detach())
    if not math.isfinite(high - low):
        low, high = _extremes(x.detach()[torch.isfinite(x)])
    if high == low:
        low, high = 0.0, 1.0
    scale = torch.tensor(max((high - low) / 255, SCALE_MIN), dtype=torch.float32)
    zero_point = round(-low / float(scale))
    return scale, min(max(zero_point, 0), 255)

"""Builds int8 modules from float ones: quantises weights, and transfers hooks and attributes of the user's module.

Files of int8 modules do not use `from __future__ import annotations`: torch.jit.script cannot read annotations of a
module class that are strings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quant.kernels import narrow
from quant.kernels.row_slices import row_slices
from quant.kernels.scheme import QParams, weight_scale, weight_scheme
from quant.nn.inherited import inherit_methods
from quant.observers import HistogramObserver, make_observer
from quant.recipe import QConfig, RecipeError
from quant.rounding.scales import least_error_shares
from quant.runtime.layers.quant_module import HALVES, QuantModule

LOST_COLUMN_SQNR = 100.0
"""Ratio of signal to rounding noise (20 dB) below which a weight column counts as lost by int8 rows."""

RESIDUAL_STEPS = 254.0
"""Steps of a weight's second term in one step of its first; the residue is at most half a step, 127 of these."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def scripted_as(twin: _Function) -> Callable[[_Function], _Function]:
    """A decorator: torch.jit.script compiles `twin` in place of the method, which TorchScript cannot read.

    TorchScript reads the source of the wrapped function, as `inspect` returns it.
    """

    def mark(method: _Function) -> _Function:
        method.__wrapped__ = twin  # type: ignore[attr-defined]
        return method

    return mark


def adopt(new: nn.Module, old: nn.Module, name: str) -> None:
    """Transfer hooks, the train/eval flag and further attributes of the user's module to `new`.

    Raises:
        ValueError: an attribute of the user's has the name of one of `new`'s tensors or modules, and would hide it.
    """
    for key, value in old.__dict__.items():
        if key in new._buffers or key in new._parameters or key in new._modules:
            raise ValueError(f"its attribute {key!r} has a name that {type(new).__name__} needs; rename it")
        is_hook = key.startswith("_") and "_hooks" in key
        is_users = not key.startswith("_") and key not in new.__dict__ and not hasattr(type(new), key)
        if is_hook or is_users:
            new.__dict__[key] = value
    # Buffers and modules are the user's too: none of the float types has any but those that `new` has.
    for key, buffer in old._buffers.items():
        if key in new._buffers:
            raise ValueError(f"its buffer {key!r} has a name that {type(new).__name__} needs; rename it")
        new.register_buffer(key, buffer, persistent=key not in old._non_persistent_buffers_set)
    for key, child in old._modules.items():
        if not hasattr(new, key):
            new.add_module(key, child)
    inherit_methods(new, type(old))
    new.train(old.training)
    if isinstance(new, QuantModule):
        new.layer_name = name
    halves = {parameter.dtype for parameter in old.parameters()} & set(HALVES)
    for part in new.modules():
        if isinstance(part, QuantModule) and halves:
            part.dtype = min(halves, key=HALVES.index)


def as_float32(x: Tensor) -> Tensor:
    """A float tensor as float32; tensors of other types stay, and the kernels refuse them."""
    return x.float() if x.is_floating_point() else x  # `to` takes twice the time of a small row's cast


def takes_half(x: Any) -> bool:
    """Whether a float32 layer takes this input for one of a half type: under autocast, where float layers give such."""
    return isinstance(x, Tensor) and x.dtype in HALVES and torch.is_autocast_enabled(x.device.type)


def output_dtype(dtype: torch.dtype, x: Any) -> torch.dtype:
    """The dtype of what a layer of this type gives for an input."""
    given: torch.dtype = x.dtype if dtype is torch.float32 and takes_half(x) else dtype
    return given


@dataclass(frozen=True)
class QuantizedWeight:
    """An int8 weight with its scales.

    Attributes:
        q_weight: int8 (N, K), of weight / columns; or narrow, with 4 bits and fewer (`quant.kernels.narrow`).
        scale: float32 (N,); of a narrow weight also by group.
        columns: float32 (K,), factors of the input before it is quantised, or None.
        activation_bits: 8 or 16, for the input.
        terms: 1; or 2 where q_weight and columns have 2K columns, and the input is repeated side by side.
    """

    q_weight: Tensor
    scale: Tensor
    columns: Tensor | None
    activation_bits: int
    terms: int = 1

    @classmethod
    def of(cls, weight: Tensor, qconfig: QConfig) -> "QuantizedWeight":
        """Quantise a float weight (N, K); see `loses_columns` for when its input takes 16 bits."""
        weight = weight.detach()
        bits = qconfig.activation_bits
        if bits == "auto":
            bits = 16 if loses_columns(weight) else 8
        columns = column_norms(weight) if bits == 16 else None
        if columns is not None:
            weight = weight / columns  # a half type becomes float32
        q_weight, scale = _quantize(weight, qconfig)
        return cls(q_weight, scale, columns, bits)

    @classmethod
    def in_two_terms(cls, weight: Tensor, qconfig: QConfig) -> "QuantizedWeight":
        """Quantise a float weight (N, K), and its rounding error in steps that are RESIDUAL_STEPS times finer.

        Both share one product: weight = scale * (first + second / RESIDUAL_STEPS), so the input of the second is the
        input divided by RESIDUAL_STEPS, which `columns` does.
        """
        weight = weight.detach().to(torch.float32)
        columns = column_norms(weight)
        # The second term holds half a step at most, which a weight beyond a clipped range would exceed.
        first, scale = _quantize(weight / columns, replace(qconfig, weight_observer="minmax", weight_options={}))
        left = weight / columns - first.to(torch.float32) * scale.unsqueeze(1)
        second = torch.round(left / (scale / RESIDUAL_STEPS).unsqueeze(1)).clamp(-127, 127).to(torch.int8)
        both = torch.cat([columns, columns / RESIDUAL_STEPS])
        return cls(torch.cat([first, second], dim=1).contiguous(), scale, both, 16, terms=2)

    @property
    def described(self) -> str:
        """For the report: '' for the default form, else the form and the reason."""
        if self.columns is None:
            return ""
        if self.terms == 2:
            return "16-bit activations and weights in two int8 terms, which a narrow input makes cheap"
        spread = float(self.columns.max() / self.columns.min())
        return f"16-bit activations and columns scaled by their norms, which span a factor of {spread:.1e}"


def _quantize(weight: Tensor, qconfig: QConfig) -> tuple[Tensor, Tensor]:
    bits = qconfig.weight_bits
    if qconfig.group_size is not None:
        check_groups(weight.shape[1], qconfig)
        symmetric = qconfig.weight_symmetric
        shares = partial(least_error_shares, bits=bits, symmetric=symmetric) if qconfig.clips_weights else None
        return narrow.quantize(weight, bits, qconfig.group_size, symmetric=symmetric, shares=shares)
    narrow_bits = narrow.fits(weight.shape[1], bits)
    if narrow_bits and qconfig.per_channel and not qconfig.clips_weights:
        return narrow.quantize(weight, bits)
    q_weight, scale = _bytes(weight, qconfig) if qconfig.per_channel else quantized_rows(weight, qconfig, compares=True)
    return (narrow.pack(q_weight + 2 ** (bits - 1), bits) if narrow_bits else q_weight), scale


def _bytes(weight: Tensor, qconfig: QConfig) -> tuple[Tensor, Tensor]:
    """A weight (N, K) with a scale per row, some rows at a time: int8 (N, K) and float32 (N,)."""
    q_weight = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], device=weight.device)
    for first, rows in row_slices(weight):
        last = first + len(rows)
        q_weight[first:last], scale[first:last] = quantized_rows(rows, qconfig, compares=True)
    return q_weight, scale


def quantized_rows(rows: Tensor, qconfig: QConfig, *, compares: bool = False) -> tuple[Tensor, Tensor]:
    """int8 of the shape of float `rows` (out, ...), and the scale, float32 (out,), as of `chosen_scale`."""
    rows = rows.detach().to(torch.float32)
    scale = chosen_scale(rows, qconfig, compares=compares)
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    return QParams(scale, zeros, weight_scheme(qconfig.weight_bits)).quantize(rows).contiguous(), scale


def chosen_scale(rows: Tensor, qconfig: QConfig, *, compares: bool = False) -> Tensor:
    """The scale of each row of float32 `rows` (out, ...), float32 (out,), by the settings' observer of weights.

    Not finite of a row that holds NaN or inf.

    Args:
        compares: whether a row has its whole range where the one of least squared error, which a histogram knows by a
            little, has more; dynamic layers do. Static ones keep the bytes that they have had.
    """
    if not qconfig.per_channel:
        return _scale_of_each(rows.reshape(1, -1), qconfig, compares).expand(rows.shape[0]).clone()
    return _scale_of_each(rows, qconfig, compares)


def _scale_of_each(rows: Tensor, qconfig: QConfig, compares: bool) -> Tensor:
    if not qconfig.clips_weights or not rows.numel():
        return weight_scale(rows, bits=qconfig.weight_bits)
    observer = make_observer(qconfig.weight_observer, weight_scheme(qconfig.weight_bits), **qconfig.weight_options)
    observer(rows)
    if int(observer.nan_count) or int(observer.inf_count):
        return rows.new_full((rows.shape[0],), torch.nan)
    chosen = observer.qparams().scale
    if not compares or not isinstance(observer, HistogramObserver):
        return chosen
    widest = weight_scale(rows, bits=qconfig.weight_bits)
    finer = _squared_error(rows, chosen, qconfig) <= _squared_error(rows, widest, qconfig)
    return torch.where(finer, chosen, widest)


def _squared_error(rows: Tensor, scale: Tensor, qconfig: QConfig) -> Tensor:
    """The squared rounding error of each of float32 `rows` (out, ...), float64 (out,), at scales (out,)."""
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    qparams = QParams(scale, zeros, weight_scheme(qconfig.weight_bits))
    return (qparams.dequantize(qparams.quantize(rows)) - rows).double().square().flatten(1).sum(1)


def check_groups(columns: int, qconfig: QConfig) -> None:
    """Raise RecipeError where a weight of so many inputs cannot have the groups that its settings ask for."""
    size = qconfig.group_size
    if size is None or columns % size == 0:
        return
    fitting = [one for one in narrow.GROUP_SIZES if columns % one == 0]
    way = f"take group_size={fitting[-1]}" if fitting else "leave group_size out for this layer: a scale per output"
    raise RecipeError(f"group_size is {size}, expected a divisor of the weight's {columns} inputs; {way}")


def column_norms(weight: Tensor) -> Tensor:
    """The largest magnitude of each column of (N, K), 1 where a column is zero: float32 (K,)."""
    norms = torch.zeros(weight.shape[1], device=weight.device)
    for _, rows in row_slices(weight):
        norms = torch.maximum(norms, rows.abs().amax(dim=0)) if rows.shape[0] else torch.ones_like(norms)
    return torch.where(norms > 0, norms, torch.ones_like(norms))


def loses_columns(weight: Tensor) -> bool:
    """Whether symmetric int8 rows would round some column of `weight` (N, K) away.

    A row's step is set by its largest weight. A column of far smaller weights matters only where its input is far
    larger (mel power before the log, say), and there it matters fully; rounded to a step or two it is noise. So a
    column whose power is less than LOST_COLUMN_SQNR times its rounding noise (step**2 / 12 a weight) counts as lost.
    Judged at 8 bits also for narrower weights: what they lose beyond that is the user's own trade.
    """
    if weight.numel() == 0:
        return False
    noise, power = torch.zeros((), device=weight.device), torch.zeros(weight.shape[1], device=weight.device)
    for _, rows in row_slices(weight):
        noise = noise + (rows.abs().amax(dim=1) / 127).square().sum() / 12
        power = power + rows.square().sum(dim=0)
    return bool(((power > 0) & (power < LOST_COLUMN_SQNR * noise)).any())

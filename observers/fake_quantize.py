"""Fake quantisation: the results of integer arithmetic in float, with a gradient for training.

The straight-through estimator of Bengio et al. 2013 (arXiv 1308.3432) as used by Jacob et al. 2018 (arXiv 1712.05877):
the gradient passes unchanged where rounding decided and is zero where clamping did. Learned ranges are in lsq.py
and pact.py; the arithmetic of all of them is `_rounding.round_trip`, which is QParams' own to the bit.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from quant.kernels import ACTIVATION_U8, QParams, QScheme
from quant.kernels.scheme import SCALE_MIN
from quant.observers._rounding import NO_CLAMP as NO_CLAMP  # exported: callers of forward need it
from quant.observers._rounding import as_dtype, gradient_inside, round_trip, scale_and_zero_point
from quant.observers._rounding import compiled as compiled
from quant.observers._state import Stateful, fresh
from quant.observers.base import EmptyAverage, NoDataSeen, Observer, RangeObserver
from quant.observers.moving_average import MovingAverageObserver
from torch import Tensor


class ScaleCollapsed(ValueError):
    """A learned scale became zero, negative, NaN or infinite."""


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, clamp: tuple[float, float] = NO_CLAMP
) -> Tensor:
    """dequantize(quantize(clamp(x))), with the gradient of x inside the range and zero outside.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; computed in float32.
        scale, zero_point: float32 and int32, () or (channels,) as scheme.axis says; no gradient flows into them.
        clamp: (low, high) of an activation that comes before, such as a ReLU's (0, inf), in the same pass over memory.

    Returns:
        x's dtype and shape. In float32 equal to QParams(scale, zero_point, scheme).dequantize(quantize(x)) bit for
        bit; in another dtype that value rounded once more.
    """
    out: Tensor = _StraightThrough.apply(x, scale, zero_point, scheme, clamp)  # type: ignore[no-untyped-call]
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, clamp: tuple[float, float]
    ) -> Tensor:
        with_mask = ctx.needs_input_grad[0]
        out, mask = round_trip(x.to(torch.float32), scale, zero_point, scheme, with_mask=with_mask, clamp=clamp)
        if mask is not None:
            ctx.save_for_backward(mask)
        return as_dtype(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (mask,) = ctx.saved_tensors
        return gradient_inside(grad, mask), None, None, None, None


class FakeQuantizeBase(Stateful, ABC):
    """What every fake quantiser has: a scheme, two switches, and QParams to convert with.

    Buffers:
        observing: bool scalar, whether ranges follow the data (or are learned). True at first.
        quantizing: bool scalar, whether forward rounds. True at first; False gives back the input itself.

    The switches are buffers, so a checkpoint resumes with them and an average of models copies them. Set them by
    `set_observing` and `set_quantizing`; under torch.compile, which cannot branch on a buffer, and on CUDA, where
    reading one waits for the device, their last known values are used: those of the setters, of load_state_dict, and
    of the last call of train() or eval().
    """

    observing: Tensor
    quantizing: Tensor

    def __init__(self, scheme: QScheme) -> None:
        super().__init__()
        self.scheme = scheme
        self.register_buffer("observing", torch.ones((), dtype=torch.bool))
        self.register_buffer("quantizing", torch.ones((), dtype=torch.bool))
        self._known = {"observing": True, "quantizing": True}

    @abstractmethod
    def qparams(self) -> QParams:
        """What forward rounds with now; convert must use exactly this.

        Raises:
            NoDataSeen: there was no data to choose a range from.
            ScaleCollapsed: a learned scale is not positive and finite.
        """

    @abstractmethod
    def current_scale(self) -> Tensor:
        """The scale of `qparams`, float32 () or (channels,), without its checks, which wait for values and break
        torch.compile's graph; NaN before any data."""

    @abstractmethod
    def start(self, low: Tensor, high: Tensor) -> None:
        """Begin with the range [low, high], float32 () or (channels,), of calibration."""

    def set_observing(self, on: bool) -> None:
        """Let ranges follow the data, or freeze them."""
        self.observing.fill_(on)
        self._known["observing"] = on

    def set_quantizing(self, on: bool) -> None:
        """Round, or pass the input through."""
        self.quantizing.fill_(on)
        self._known["quantizing"] = on

    @property
    def collapsed(self) -> bool:
        """Every range is empty: only zeros were seen, and everything is rounded to zero."""
        return bool((self.qparams().scale <= SCALE_MIN).all())

    def train(self, mode: bool = True) -> FakeQuantizeBase:
        super().train(mode)
        self._read_switches()
        return self

    def extra_repr(self) -> str:
        switches = ", ".join(f"{key}={value}" for key, value in self._known.items())
        return f"scheme={self.scheme}, {switches}"

    def _is_on(self, switch: str) -> bool:
        if not torch.compiler.is_compiling():
            buffer = self._buffers[switch]
            if buffer is not None and buffer.device.type == "cpu":
                return bool(buffer)
        return self._known[switch]

    def _read_switches(self) -> None:
        for switch in self._known:
            buffer = self._buffers[switch]
            if buffer is not None and buffer.device.type != "meta":
                self._known[switch] = bool(buffer)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._read_switches()

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"{self._where()}: got a tensor of {x.dtype}, expected real values in a floating dtype")

    @property
    def _rows_may_change(self) -> bool:
        return self.scheme.axis is not None


class FakeQuantize(FakeQuantizeBase):
    """An observer, and quantise-dequantise with its range so far.

    In training mode, while observing, the batch is observed first and then rounded with the range that includes it; in
    eval mode nothing is observed, as in batch normalisation. A recomputation of the forward by gradient checkpointing
    does not observe the same batch a second time.

    Buffers, besides the switches':
        scale: float32, () or (channels,); NaN before any data.
        zero_point: int32, same shape.

    Args:
        observer: finds the range and carries the scheme; default MovingAverageObserver(). Ranges that need a search
            (histogram and its kin) are searched in every step that rounds and observes: milliseconds each.
        observe_in_eval: observe in eval mode too. For weights, which are the same in both: the range must be that of
            the weight as it is.

    Raises:
        NoDataSeen: from `forward`, when it has to round and has seen nothing.
        TypeError: from `forward`, for a tensor that is not real floating point.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, observer: Observer | None = None, *, observe_in_eval: bool = False) -> None:
        observer = MovingAverageObserver(ACTIVATION_U8) if observer is None else observer
        super().__init__(observer.scheme)
        self.observer = observer
        self.observe_in_eval = observe_in_eval
        self._warned = False
        shape = () if self.scheme.axis is None else (0,)
        self.register_buffer("scale", torch.full(shape, torch.nan))
        self.register_buffer("zero_point", torch.zeros(shape, dtype=torch.int32))
        if not isinstance(observer, RangeObserver) or observer.given is not None:
            self._refresh()  # a range by hand is known without data

    def forward(self, x: Tensor, clamp: tuple[float, float] = NO_CLAMP) -> Tensor:
        """Observe and round as the switches say; x's dtype, shape and device.

        Args:
            clamp: (low, high) to clamp x to first: a ReLU that needs no pass over memory, and no memory, of its own.
        """
        self._check(x)
        quantizing = self._is_on("quantizing")
        if (self.training or self.observe_in_eval) and self._is_on("observing") and not recomputing():
            self._observe(x, clamp, quantizing)
        if not quantizing or x.numel() == 0:
            return x if clamp == NO_CLAMP else x.clamp(*clamp)
        if not torch.compiler.is_compiling() and not self._has_range():
            self._check_average()
            raise NoDataSeen(
                f"{self._where()}: has to quantise but has seen no finite value; run training batches through the "
                "model with observing on, or load a checkpoint that has ranges"
            )
        return fake_quantize(x, self.scale, self.zero_point, self.scheme, clamp)

    def _observe(self, x: Tensor, clamp: tuple[float, float], quantizing: bool) -> None:
        """Show clamp(x) to the observer, and take the range that it has then."""
        observer = self.observer
        if (
            type(observer) is MovingAverageObserver
            and observer.is_untouched()
            and x.dtype == torch.float32
            and observer.follow(x, clamp, self.scale, self.zero_point)
        ):
            self._warn_of_non_finite()
            return
        observer(x if clamp == NO_CLAMP else x.detach().clamp(*clamp))
        self._warn_of_non_finite()
        if quantizing or isinstance(self.observer, RangeObserver):
            self._refresh()

    def train(self, mode: bool = True) -> FakeQuantize:
        """Also takes the scale from the observer's range: an average of models averages both, integers badly."""
        super().train(mode)
        if isinstance(self.observer, RangeObserver):
            self._refresh()
        return self

    def qparams(self) -> QParams:
        if self._is_on("observing"):
            self._refresh()
        if not self._has_range():
            self._check_average()
            self.observer.name = self.observer.name or self.name
            self.observer.range()  # raises with what is known: channels, NaN counts
            raise NoDataSeen(f"{self._where()}: ranges were frozen before any data was seen")
        return QParams(self.scale.clone(), self.zero_point.clone(), self.scheme)

    def current_scale(self) -> Tensor:
        return self.scale

    def start(self, low: Tensor, high: Tensor) -> None:
        """Begin with this range; an observer that searches (a histogram) replaces it at the next batch."""
        if isinstance(self.observer, RangeObserver):
            self.observer.start(low, high)
        with torch.no_grad():
            self._store(*scale_and_zero_point(low, high, self.scheme))

    def set_observing(self, on: bool) -> None:
        """Let ranges follow the data, or freeze them as they are.

        Warns:
            UserWarning: a range that is frozen is empty: the layer will put out zeros for good.
        """
        if not on:
            self._refresh()
            if self.scale.numel() and bool((self.scale <= SCALE_MIN).all()):
                warnings.warn(
                    f"{self._where()}: the range that is being frozen is empty: only zeros were seen, so everything "
                    "will be rounded to zero; look whether the layer before it is dead",
                    stacklevel=2,
                )
        super().set_observing(on)

    def set_quantizing(self, on: bool) -> None:
        """Round, or pass the input through."""
        if on and self._is_on("observing"):
            self._refresh()
        super().set_quantizing(on)

    def _refresh(self) -> None:
        """Take the range that the observer has now, if it has one."""
        with torch.no_grad():
            if isinstance(self.observer, RangeObserver) and self.observer.given is None:
                # Not range(): its checks wait for values and would break torch.compile's graph.
                low, high = self.observer.low, self.observer.high
                if low.numel() == 0:
                    return
            else:
                try:
                    low, high = self.observer.range()
                except NoDataSeen:
                    return
            self._store(*scale_and_zero_point(low, high, self.scheme))

    def _warn_of_non_finite(self) -> None:
        """Say once that values were left out of the range: they are rounded to zero or to an end, without a
        gradient."""
        if self._warned or torch.compiler.is_compiling():
            return
        nan, inf = int(self.observer.nan_count), int(self.observer.inf_count)
        if nan or inf:
            self._warned = True
            warnings.warn(
                f"{self._where()}: {nan} NaN and {inf} infinite values in its input; they are left out of the range, "
                "NaN is rounded to zero and infinities to the ends (warned of once per layer)",
                stacklevel=4,
            )

    def _store(self, scale: Tensor, zero_point: Tensor) -> None:
        shape = () if self.scheme.axis is None else (scale.numel(),)
        if self.scale.shape != shape:
            self.scale = fresh(self.scale, shape, torch.nan, scale.device)
            self.zero_point = fresh(self.zero_point, shape, 0, scale.device)
        self.scale.copy_(scale.view(shape))
        self.zero_point.copy_(zero_point.view(shape))

    def _check_average(self) -> None:
        """Say of a range that is an average with an empty one, inf and -inf, why batches do not help."""
        if not isinstance(self.observer, RangeObserver):
            return
        ends = torch.cat((self.observer.low, self.observer.high))
        counted = int(getattr(self.observer, "batches", 0)) > 0
        if bool(torch.isnan(ends).any()) or (counted and bool(torch.isinf(ends).any())):
            raise EmptyAverage(
                f"{self._where()}: its range is an average that began before the first batch, and stays empty; begin "
                "the average of models when the ranges are known, or copy the model into it then (timm: ema.set(model))"
            )

    def _has_range(self) -> bool:
        scale = self.scale
        if scale.numel() == 1:
            return not math.isnan(scale.item())
        return scale.numel() > 0 and not bool(torch.isnan(scale).any())


def recomputing() -> bool:
    """Whether this forward runs inside a backward: gradient checkpointing computes the same batch once more."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

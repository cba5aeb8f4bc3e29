"""Learned scales: LSQ (Esser et al. 2020, arXiv 1902.08153) and LSQ+ with a learned offset (Bhalgat et al. 2020,
arXiv 2004.09576).

Both learn by the gradient of the rounded value with respect to the scale s (LSQ, equation 3; v = x / s):

    d y / d s = round(v) - v   in range,     (bound - zero_point)   where clamped to a bound,

times the gradient scale g = 1 / sqrt(N * Q_P) (LSQ, section 2.2): N is the number of weights, or the number of features
of one sample, that share s, and Q_P = quant_max - zero_point. LSQ+ adds the offset b, the real value of the smallest
integer:

    d y / d b = 0   in range,     1   where clamped.

One thing differs from the LSQ+ paper. There the offset stays a real number, which leaves zero between two integers;
here zero_point = round(quant_min - b / s), with a straight-through gradient, so that zero is exact and the trained
layer is the deployed one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from quant.kernels import ACTIVATION_U8, QParams, QScheme
from quant.kernels.scheme import SCALE_MIN
from quant.observers._compiler import not_compiled
from quant.observers._rounding import along_axis, as_dtype, gradient_inside, round_trip, scale_and_zero_point
from quant.observers.base import FiniteRange, NoDataSeen, all_reduce, finite_range, joint_range, to_rows
from quant.observers.fake_quantize import FakeQuantizeBase, ScaleCollapsed
from quant.observers.histogram import HistogramObserver
from torch import Tensor, nn


class LSQFakeQuantize(FakeQuantizeBase):
    """Quantise-dequantise with a scale that is a parameter, set at the first batch to 2 mean(|x|) / sqrt(Q_P).

    The zero point is set once: where a symmetric scheme has it; else, for an affine scheme, where the first batch's
    range has it, which is quant_min for what a ReLU puts out. `set_observing(False)` stops the learning: the scale
    then gets no gradient at all (under DistributedDataParallel pass find_unused_parameters=True from then on).

    Parameters:
        scale: float32, (1,) or (channels,); never (), which FSDP cannot shard. Under FSDP run the first batch before
            sharding, or what it sets is lost with the gathered copy.

    Buffers, besides the switches':
        zero_point: int32, same shape.
        initialised: bool scalar.

    Args:
        scheme: what to round to.
        channels: the size of scheme.axis, required with one: a parameter must exist before the optimiser does.
        per_sample: the first dimension is the batch and does not count in N. True for activations, False for weights;
        the
            default takes per-tensor schemes for activations.
        distributed: start from the joint first batch of all ranks of the default process group, so that all ranks
            start alike. A collective in the first forward.

    Raises:
        NoDataSeen: from `forward` in eval mode and from `qparams`, before the first batch.
        ScaleCollapsed: the scale is not positive and finite any more.
    """

    scale: nn.Parameter
    zero_point: Tensor
    initialised: Tensor

    def __init__(
        self,
        scheme: QScheme = ACTIVATION_U8,
        *,
        channels: int | None = None,
        per_sample: bool | None = None,
        distributed: bool = False,
    ) -> None:
        super().__init__(scheme)
        if (scheme.axis is None) != (channels is None):
            raise ValueError(
                f"{type(self).__name__}: channels is {channels} with axis {scheme.axis}, expected "
                f"{'None for one scale per tensor' if scheme.axis is None else 'the size of that axis'}"
            )
        self.per_sample = scheme.axis is None if per_sample is None else per_sample
        self.distributed = distributed
        rows = 1 if channels is None else channels
        self.scale = nn.Parameter(torch.ones(rows))
        middle = scheme.symmetric_zero_point if scheme.symmetric else scheme.quant_min
        self.register_buffer("zero_point", torch.full((rows,), middle, dtype=torch.int32))
        self.register_buffer("initialised", torch.zeros((), dtype=torch.bool))
        self._known["initialised"] = False

    def forward(self, x: Tensor) -> Tensor:
        """Initialise at the first batch, then round as the switches say; x's dtype, shape and device."""
        self._check(x)
        starting = not self._is_on("initialised")
        if not self._is_on("quantizing") or (x.numel() == 0 and not (starting and self.distributed)):
            return x
        if starting:
            if not self.training:
                raise NoDataSeen(f"{self._where()}: its scale was never set; run a batch in training mode first")
            self._initialise(x)
            if x.numel() == 0:
                return x
        if not torch.compiler.is_compiling():
            self._check_scale()
        return self._round(x, torch.rsqrt(self._sharing(x) * self._positive_steps()))

    def qparams(self) -> QParams:
        if not bool(self.initialised):
            raise NoDataSeen(f"{self._where()}: its scale was never set; run a batch in training mode first")
        self._check_scale()
        scale, zero_point = floored(self.scale.detach()), self._zero_point()
        return QParams(self._shaped(scale).clone(), self._shaped(zero_point).clone(), self.scheme)

    def current_scale(self) -> Tensor:
        return self._shaped(torch.where(self.initialised, floored(self.scale.detach()), torch.nan))

    def start(self, low: Tensor, high: Tensor) -> None:
        """Begin with the scale and zero point of this range."""
        with torch.no_grad():
            scale, zero_point = scale_and_zero_point(low, high, self.scheme)
            self.scale.copy_(_or_one(scale).reshape(-1))
            self.zero_point.copy_(zero_point.reshape(-1))
        self.initialised.fill_(True)
        self._known["initialised"] = True

    def reset(self) -> None:
        """Set scales anew at the next batch."""
        self.initialised.fill_(False)
        self._known["initialised"] = False

    def _round(self, x: Tensor, gradient_scale: Tensor) -> Tensor:
        scale = floored(self.scale if self._is_on("observing") else self.scale.detach())
        scale, zero_point, gradient_scale = (self._shaped(t) for t in (scale, self.zero_point, gradient_scale))
        out: Tensor = _LearnedScale.apply(  # type: ignore[no-untyped-call]
            x, scale, zero_point, self.scheme, gradient_scale
        )
        return out

    def _shaped(self, values: Tensor) -> Tensor:
        """(rows,) as QParams has it: () per tensor."""
        return values.view(()) if self.scheme.axis is None else values

    def _zero_point(self) -> Tensor:
        """int32 (rows,), what forward rounds with."""
        return self.zero_point

    @not_compiled
    def _initialise(self, x: Tensor) -> None:
        with torch.no_grad():
            rows = to_rows(x.detach(), self.scheme.axis)
            seen = finite_range(rows)
            seen = joint_range(seen) if self.distributed else seen
            if bool((seen.low > seen.high).any()):
                raise NoDataSeen(f"{self._where()}: the first batch has no finite value to set the scale from")
            self._set_from(rows, seen)
        self.initialised.fill_(True)
        self._known["initialised"] = True

    def _set_from(self, rows: Tensor, seen: FiniteRange) -> None:
        """Set the parameters from the finite values of float32 (rows, n); `seen` is their range over all ranks."""
        if not self.scheme.symmetric:
            self.zero_point.copy_(scale_and_zero_point(seen.low, seen.high, self.scheme)[1])
        self.scale.copy_(_or_one(2.0 * self._mean(rows.abs()) / self._positive_steps().sqrt()))

    def _mean(self, values: Tensor) -> Tensor:
        """The mean of the finite values of each row, over all ranks where distributed."""
        finite = torch.isfinite(values)
        sums = torch.stack((torch.where(finite, values, 0.0).sum(dim=1, dtype=torch.float64), finite.sum(dim=1)))
        sums = all_reduce(sums, "SUM") if self.distributed else sums
        return torch.div(sums[0], sums[1]).to(torch.float32)

    def _positive_steps(self) -> Tensor:
        """Q_P, float32 (rows,): the steps above the zero point, or all where there is none above."""
        above = self.scheme.quant_max - self.zero_point
        return torch.where(above > 0, above, self.scheme.quant_max - self.scheme.quant_min).to(torch.float32)

    def _sharing(self, x: Tensor) -> int:
        """N: how many values of the layer share one scale."""
        count = x.numel() // self.scale.numel()
        return count // x.shape[0] if self.per_sample and x.dim() > 1 else count

    def _check_scale(self) -> None:
        scale = self.scale.detach()
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ScaleCollapsed(
                f"{self._where()}: learned scale is {scale}, expected positive and finite; lower the learning rate of "
                "the scales, clip gradients, or call reset()"
            )


class LSQPlusFakeQuantize(LSQFakeQuantize):
    """LSQ with a learned offset, for affine schemes; with a symmetric scheme the offset is absent, as for weights
    there.

    Set at the first batch as in LSQ+, section 3.3: weights to max(|mean - 3 std|, |mean + 3 std|) over the positive
    steps, activations to the range with the least squared error (the search of HistogramObserver).

    Parameters, besides scale:
        offset: float32, shape of scale, the real value of quant_min; None with a symmetric scheme.
    """

    offset: nn.Parameter | None

    def __init__(
        self,
        scheme: QScheme = ACTIVATION_U8,
        *,
        channels: int | None = None,
        per_sample: bool | None = None,
        distributed: bool = False,
    ) -> None:
        super().__init__(scheme, channels=channels, per_sample=per_sample, distributed=distributed)
        offset = None if scheme.symmetric else nn.Parameter(torch.zeros_like(self.scale))
        self.register_parameter("offset", offset)

    def start(self, low: Tensor, high: Tensor) -> None:
        super().start(low, high)
        if self.offset is not None:
            with torch.no_grad():
                self.offset.copy_((self.scheme.quant_min - self.zero_point) * self.scale)

    def _zero_point(self) -> Tensor:
        if self.offset is None:
            return super()._zero_point()
        steps = torch.round(self.offset.detach().to(torch.float32) * (1.0 / floored(self.scale.detach())))
        zero_point = (self.scheme.quant_min - steps).clamp(self.scheme.quant_min, self.scheme.quant_max)
        return torch.nan_to_num(zero_point, nan=float(self.scheme.quant_min)).to(torch.int32)

    def _round(self, x: Tensor, gradient_scale: Tensor) -> Tensor:
        if self.offset is None:
            return super()._round(x, gradient_scale)
        learning = self._is_on("observing")
        scale, offset = (self.scale, self.offset) if learning else (self.scale.detach(), self.offset.detach())
        scale, offset = floored(scale), offset.to(torch.float32)
        zero_point = self._shaped(self._zero_point())
        scale, offset, gradient_scale = (self._shaped(t) for t in (scale, offset, gradient_scale))
        out: Tensor = _LearnedOffset.apply(  # type: ignore[no-untyped-call]
            x, scale, offset, zero_point, self.scheme, gradient_scale
        )
        return out

    def _set_from(self, rows: Tensor, seen: FiniteRange) -> None:
        if self.offset is None:
            mean = self._mean(rows)
            std = self._mean((rows - mean.view(-1, 1)).square()).sqrt()
            bound = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs())
            self.scale.copy_(_or_one(bound / self._positive_steps()))
            return
        observer = HistogramObserver(replace(self.scheme, axis=0)).to(rows.device)
        # The joint extremes first: they fix the grid, so that the ranks' counts can be summed.
        observer(torch.stack((seen.low, seen.high), dim=1))
        observer.counts.zero_()
        observer(rows)
        if self.distributed:
            all_reduce(observer.counts, "SUM")
        chosen = observer.qparams()
        self.scale.copy_(_or_one(chosen.scale))
        self.offset.copy_((self.scheme.quant_min - chosen.zero_point) * self.scale)

    def _check_scale(self) -> None:
        super()._check_scale()
        if self.offset is not None and not bool(torch.isfinite(self.offset).all()):
            raise ScaleCollapsed(f"{self._where()}: learned offset is {self.offset.detach()}, expected finite")


def floored(scale: Tensor) -> Tensor:
    """The scale in float32, at least SCALE_MIN: under torch.compile nothing checks it. NaN passes, and shows."""
    return scale.to(torch.float32).clamp(min=SCALE_MIN)


def _or_one(scale: Tensor) -> Tensor:
    """A channel of zeros says nothing about its scale; 1 is as right as any and can be learned away from."""
    return torch.where(scale > SCALE_MIN, scale, torch.ones_like(scale)).to(torch.float32)


class _LearnedScale(torch.autograd.Function):
    """LSQ: gradients for x and scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme, gradient_scale: Tensor
    ) -> Tensor:
        out, mask = round_trip(x.to(torch.float32), scale, zero_point, scheme, with_mask=True)
        ctx.save_for_backward(x, out, mask, scale, gradient_scale)
        ctx.scheme = scheme
        return as_dtype(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, out, mask, scale, gradient_scale = ctx.saved_tensors
        grad_x = gradient_inside(grad, mask) if ctx.needs_input_grad[0] else None
        grad_scale = None
        if ctx.needs_input_grad[1]:
            # (y - x) / s = round(v) - v in range, and y / s = bound - zero_point where clamped: constants to a second
            # gradient, which goes straight through the rounding as the first one does.
            with torch.no_grad():
                slope = torch.where(mask, out - x, out)
            grad_scale = sum_rows(grad.to(torch.float32) * slope, ctx.scheme) / scale.detach() * gradient_scale
        return grad_x, grad_scale, None, None, None


class _LearnedOffset(torch.autograd.Function):
    """LSQ+: gradients for x, scale and offset."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, zero_point: Tensor, scheme: QScheme, gradient_scale: Tensor
    ) -> Tensor:
        out, mask = round_trip(x.to(torch.float32), scale, zero_point, scheme, with_mask=True)
        ctx.save_for_backward(x, out, mask, scale, offset, gradient_scale)
        ctx.scheme = scheme
        return as_dtype(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, out, mask, scale, offset, gradient_scale = ctx.saved_tensors
        scheme = ctx.scheme
        grad_x = gradient_inside(grad, mask) if ctx.needs_input_grad[0] else None
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return grad_x, None, None, None, None, None
        grad = grad.to(torch.float32)
        with torch.no_grad():
            steps = float(scheme.quant_max - scheme.quant_min)
            clamped_low = offset < -steps * scale
            # The zero point is clamped where the range does not reach zero; then the ends do not follow the offset.
            pinned = (offset > 0) | clamped_low
            low_slope, high_slope = -steps * clamped_low, steps * ~clamped_low
            above = ~mask & (x > 0)
            slope = torch.where(above, along_axis(high_slope, scheme, x.dim()), along_axis(low_slope, scheme, x.dim()))
            slope = torch.where(mask, (out - x) / along_axis(scale, scheme, x.dim()), slope)
        grad_scale = sum_rows(grad * slope, scheme) * gradient_scale
        grad_offset = sum_rows(torch.where(mask, 0.0, grad), scheme) * gradient_scale
        # A pinned offset moves only back towards where it matters.
        back = torch.where(clamped_low, grad_offset.clamp(max=0.0), grad_offset.clamp(min=0.0))
        return grad_x, grad_scale, torch.where(pinned, back, grad_offset), None, None, None


def sum_rows(values: Tensor, scheme: QScheme) -> Tensor:
    """Sums over all that shares a scale: () or (channels,)."""
    if scheme.axis is None:
        return values.sum()
    axis = scheme.axis % values.dim()
    return values.sum(dim=[d for d in range(values.dim()) if d != axis])

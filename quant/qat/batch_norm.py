"""Training of a layer with a batch norm as it is deployed: one convolution with the folded weight, rounded.

Deployed, the two are one layer (W the weight, b the bias, x the input; per output channel):

    z = W * x + b,    y = gamma (z - mu) / sqrt(v + eps) + beta
    y = (s W) * x + (b - mu) s + beta,    s = gamma / sqrt(v + eps)                                            (1)

with the running mean mu and variance v. So it is s W that becomes int8, and s W that training must round. But training
normalises by the mean m and variance u of the batch. Krishnamoorthi 2018 (arXiv 1806.08342, section 3.2) folds with the
running statistics and corrects by sqrt(v) / sqrt(u); a second convolution to find m and u is not needed, because the
first one's result a = Q(s W) * x is s (z - b), but for the rounding, so that

    m = mean(a) / s + b,    u = var(a) / s^2                                                                   (2)
    y = gamma (z - m) / sqrt(u + eps) + beta
      = gamma sign(s) (a - mean(a)) / sqrt(var(a) + eps s^2) + beta                                            (3)

(3) is a batch norm of a, with eps s^2 in the place of eps. b has fallen out, as it does in float. m and u of (2) update
the running statistics with the user's momentum. Once those are frozen (1) is computed as it stands.

Gradients go straight through the rounding. The derivative of (3) with respect to s is zero then, as scaling W and a
alike changes nothing; s is therefore a constant to the gradient, and gamma, beta and W get what a batch norm gives
them. Where gamma is 0 (a residual branch that starts switched off) s would be 0 and a hold nothing: there s is
1 / sqrt(v + eps), which changes neither y, as gamma is a factor of (3), nor what per-channel rounding does to W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quant.observers.base import as_plain
from quant.observers.fake_quantize import compiled, recomputing
from quant.qat.ranks import several


def uses_batch(norm: Any, *, frozen: bool) -> bool:
    """Whether a batch norm normalises by the batch: in its own training mode, as users may keep it in eval mode."""
    return norm is not None and bool(norm.training) and not frozen


def folding_gain(norm: Any) -> Tensor:
    """s of equation 1 as a constant, float32 (channels,); never 0."""
    with torch.no_grad():
        gain = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            gain = torch.where(norm.weight == 0, gain, gain * norm.weight)
        return kept(gain) if torch.compiler.is_compiling() else gain


@torch.library.custom_op("octet::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    """A copy by an opaque operator, whose result torch.compile keeps until backward.

    Without it, torch.compile keeps the running variance and recomputes the gain in backward, from the variance that
    this batch has updated: gradients of the weights were silently off by a few per cent.
    """
    return x.clone()


@kept.register_fake
def _kept_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def normalise(name: str, norm: Any, a: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Equation 3, and the update of the running statistics by equation 2.

    Args:
        name: of the layer, for errors.
        a: (batch, channels, ...), the layer's output with the weight folded by `gain`, without bias.
        gain: s, (channels,).
        bias: b, (channels,); it affects only the running mean, and its gradient is zero, as in float.

    Raises:
        ValueError: one value per channel, which has no variance; or the norm is to be that of several ranks.
    """
    if isinstance(norm, nn.SyncBatchNorm) and several():
        raise ValueError(
            f"layer '{name}': a SyncBatchNorm that is folded would normalise by this rank's batch alone; leave "
            "BatchNorm as it is, or freeze the batch norms from the start (QATSchedule(observe=0, freeze_norms_at=0))"
        )
    count = a.numel() // max(a.shape[1], 1)
    if count < 2:
        raise ValueError(
            f"layer '{name}': a batch norm needs more than one value per channel in training mode, got input "
            f"{tuple(a.shape)}; use a larger batch, or freeze the batch norms"
        )
    with torch.no_grad():
        mean, variance = _statistics(a)
        _update(norm, mean / gain, variance / gain.square(), count, bias)
        inverse = torch.rsqrt(variance + norm.eps * gain.square())
    weight = torch.sign(gain) if norm.weight is None else norm.weight * torch.sign(gain)
    y: Tensor = _Normalise.apply(a, weight, norm.bias, bias, mean, inverse)  # type: ignore[no-untyped-call]
    return y


def _statistics(a: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, float32."""
    images = a.is_contiguous() and a.numel() > a.shape[0] * a.shape[1]  # torch sums rows of channels in another order
    if images and compiled(a) and a.dtype == torch.float32:
        known: Callable[..., tuple[Tensor, Tensor]] = torch.ops.octet.batch_statistics
        return known(as_plain(a.detach()))
    halves = a.dtype in (torch.float16, torch.bfloat16)  # under autocast; the other branch sums in float32
    if a.device.type == "cpu" and not halves and not torch.compiler.is_compiling():
        mean, variance = torch.batch_norm_update_stats(a, None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(a.float(), [d for d in range(a.dim()) if d != 1], correction=0)
    return mean, variance


def _update(norm: Any, mean: Tensor, variance: Tensor, count: int, bias: Tensor | None) -> None:
    """What nn.BatchNorm does to its buffers; once a batch, also where gradient checkpointing computes it twice."""
    if not norm.track_running_stats or recomputing():
        return
    norm.num_batches_tracked.add_(1)
    share = norm.momentum if norm.momentum is not None else norm.num_batches_tracked.to(mean.dtype).reciprocal()
    mean = mean if bias is None else mean + bias
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_((variance * (count / (count - 1))).to(norm.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """weight (a - mean) * inverse + shift, where mean and inverse are the batch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        shift: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(a, weight, mean, inverse)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
        known: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.native_batch_norm
        return known(a, weight, shift, mean, inverse.square().reciprocal(), False, 0.0, 0.0)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, weight, mean, inverse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        grads = torch.ops.aten.native_batch_norm_backward(grad, a, weight, None, None, mean, inverse, True, 0.0, wanted)
        grad_a, grad_weight, grad_shift = (one if need else None for one, need in zip(grads, wanted, strict=True))
        grad_bias = None
        if ctx.needs_input_grad[3]:
            shape, dtype, device = ctx.bias
            grad_bias = torch.zeros(shape, dtype=dtype, device=device)
        return grad_a, grad_weight, grad_shift, grad_bias, None, None

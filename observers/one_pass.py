"""One pass over a layer's activations for all that watch them: a histogram, means of channels, and before both what is
left to compute of the layer. By itself each of these reads a tensor that no cache holds any more.

Nothing here changes what is kept: where the compiled pass does not apply the functions answer False, and the caller
shows the values to one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from quant.observers._histogram_store import HistogramStore
from quant.observers._rounding import NO_CLAMP, compiled
from quant.observers._state import buffers_of
from quant.observers.base import Observer, as_plain
from quant.observers.channel_mean import ChannelMean
from torch import Tensor, nn

SMALLEST_PLANE = 8
"""Values of a channel in one sample from which a batch norm is worth the compiled pass, which goes plane by plane."""


def observe_together(x: Tensor, observer: nn.Module, means: Sequence[nn.Module]) -> bool:
    """Show a tensor to its observer and to the means of its channels; False where they do not go together."""
    known = _together(x, observer, means)
    if known is None or not x.numel():
        return False
    store, axis, averages = known
    state = _state(store, averages, x.shape[axis])
    torch.ops.octet.observe_activation(as_plain(x.detach()), axis, *state)
    return True


def normalize_and_observe(
    x: Tensor,
    norm: nn.Module | None,
    clamp: tuple[float, float],
    observer: nn.Module,
    means: Sequence[nn.Module],
) -> bool:
    """Change x to clamp(norm(x)), in place, and show that to its observer and to the means of its channels.

    The values are torch's to the bit, as `contracts` has found out. False, and x as it was, where they do not go
    together.

    Args:
        x: that nobody else reads.
        norm: an `nn.BatchNorm1d`, `2d` or `3d` in eval mode, or None.
        clamp: (low, high), infinite for none.
    """
    shape = x.shape
    if len(shape) < 3 or not x.is_contiguous() or x.requires_grad:
        return False
    if x.numel() < max(1, SMALLEST_PLANE * shape[0] * shape[1]):
        return False
    known = _together(x, observer, means)
    of_norm = _NO_NORM if norm is None else _frozen(norm, shape[1])
    contracted = contracts()
    if known is None or of_norm is None or contracted is None:
        return False
    store, axis, averages = known
    if averages and axis % len(shape) != 1:
        return False
    torch.ops.octet.observe_normalized(x, *of_norm, contracted, *clamp, *_state(store, averages, shape[1]))
    return True


@functools.cache
def contracts() -> bool | None:
    """Whether torch's batch norm in inference rounds x * scale + shift once, as the compiler of this torch decided.

    None where it is neither that nor rounding twice, as thousands of values show: then batch norms are left to torch.
    """
    generator = torch.Generator().manual_seed(0)
    x, (mean, bias) = _random(generator, 2, 67, 5, 13), _random(generator, 2, 67)
    variance, weight = _random(generator, 2, 67).abs() + 0.1
    with torch.inference_mode():
        expected = F.batch_norm(x, mean, variance, weight, bias, eps=1e-5)
        for contracted in (True, False):
            y = x.clone()
            state = _state(HistogramStore(bins=64), [], 67)
            of_norm = (mean, variance, weight, bias, 1e-5)
            torch.ops.octet.observe_normalized(y, *of_norm, contracted, *NO_CLAMP, *state)
            if torch.equal(y, expected):
                return contracted
    return None


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _together(
    x: Tensor, observer: nn.Module, means: Sequence[nn.Module]
) -> tuple[HistogramStore, int, list[ChannelMean]] | None:
    """The observer, the axis of the means, and the means, if the compiled pass is all that they would do; else None."""
    if x.dtype != torch.float32 or not x.dim() or not compiled(x) or type(as_plain(x)) is not Tensor:
        return None
    if not isinstance(observer, HistogramStore) or observer.scheme.axis is not None or not observer.is_untouched():
        return None
    if not _looks_only(type(observer)):
        return None
    averages = [mean for mean in means if type(mean) is ChannelMean and mean.is_untouched()]
    axes = {mean.axis % x.dim() for mean in averages if -x.dim() <= mean.axis < x.dim()}
    if len(averages) != len(means) or len(axes) > 1 or (averages and not axes):
        return None
    return observer, axes.pop() if axes else 0, averages


@functools.cache
def _looks_only(kind: type[HistogramStore]) -> bool:
    """Whether a class takes in tensors as HistogramStore does."""
    return (
        kind._observe is HistogramStore._observe
        and kind._add is HistogramStore._add
        and kind.forward is Observer.forward
    )


def _state(observer: HistogramStore, means: Sequence[ChannelMean], channels: int) -> list[object]:
    """The buffers that the compiled pass adds to."""
    own: list[object] = [*buffers_of(observer, "low", "high", "nan_count", "inf_count", "counts")]
    device = torch.device("cpu")
    return [*own, [buffer for mean in means for buffer in mean.state_for(channels, device)]]


_NO_NORM = (None, None, None, None, 0.0)


def _frozen(norm: nn.Module, channels: int) -> tuple[Any, ...] | None:
    """mean, variance, weight, bias and eps of a batch norm of torch's that normalises by its running statistics; None
    where it does not, or where the compiled pass cannot read them as they lie.
    """
    if norm.training:
        return None
    mean, variance, weight, bias = (_attribute(norm, name) for name in _OF_NORM)
    if not _is_dense(mean, channels) or not _is_dense(variance, channels):
        return None
    if not all(one is None or _is_dense(one, channels) for one in (weight, bias)):
        return None
    return mean, variance, weight, bias, norm.eps


_OF_NORM = ("running_mean", "running_var", "weight", "bias")


def _attribute(module: nn.Module, name: str) -> Any:
    """`getattr(module, name)`, of a parameter or buffer in a fifth of its time."""
    if name not in module.__dict__:
        for store in (module._parameters, module._buffers):
            if name in store:
                return store[name]
    return getattr(module, name)


def _is_dense(one: Any, channels: int) -> bool:
    """Whether it is one float32 value for each channel, on the CPU, side by side."""
    if type(one) not in (Tensor, nn.Parameter) or one.dtype != torch.float32 or not one.is_cpu:
        return False
    return one.dim() == 1 and one.numel() == channels and bool(one.is_contiguous())

"""What 8 bits cost, found without the library under test: a float model whose layers get rounded weights and inputs.

`layers_rounded` rounds the weights of linear layers and convolutions to int8, a scale per output channel, and their
inputs to uint8 by ranges seen over the calibration batches, one per layer. Embeddings, sums, concatenations and what
lies between the layers stay float: what a static int8 model reaches at best. `everything_rounded` also rounds each
result of each torch function to 256 steps of its own range: what one reaches that keeps every value in uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
WEIGHTED = (*LAYERS, nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention)

MASKED = 1e4
"""Values from here on are masks, inf or NaN, which no range is for."""


def is_layer(module: nn.Module) -> bool:
    """A linear layer or convolution, Hugging Face's Conv1D counted."""
    return isinstance(module, LAYERS) or type(module).__name__ == "Conv1D"


def round_values(x: Tensor, low: float, high: float) -> Tensor:
    """To uint8 and back, zero exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    if high == low:
        return x
    scale = (high - low) / 255
    zero_point = round(-low / scale)
    return ((x / scale + zero_point).round().clamp(0, 255) - zero_point) * scale


def round_weight(weight: Tensor, channel: int) -> Tensor:
    """To int8 and back, by the largest absolute value of each slice of dimension `channel`."""
    others = [dim for dim in range(weight.ndim) if dim != channel]
    scale = weight.abs().amax(dim=others, keepdim=True) / 127
    return torch.where(scale > 0, (weight / scale.clamp_min(1e-30)).round() * scale, weight)


def _channel(layer: nn.Module) -> int:
    """The dimension of a layer's weight that its outputs lie in."""
    transposed = getattr(layer, "transposed", False)
    return 1 if transposed or type(layer).__name__ == "Conv1D" else 0


def _weight(layer: nn.Module) -> Tensor | None:
    """The parameter to be rounded; of a weight norm the direction, whose rounding is that of the product."""
    if parametrize.is_parametrized(layer, "weight"):
        return getattr(layer.parametrizations.weight, "original1", None)
    if isinstance(getattr(layer, "weight_v", None), Tensor):
        return layer.weight_v
    return layer.weight if isinstance(layer.weight, nn.Parameter) else None


@contextmanager
def rounded_weights(model: nn.Module) -> Iterator[None]:
    """The model's weights in int8, and as they were afterwards."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for layer in filter(is_layer, model.modules()):
            weight = _weight(layer)
            if weight is not None and id(weight) not in kept and weight.ndim > 1:
                kept[id(weight)] = weight, weight.detach().clone()
                weight.copy_(round_weight(weight, _channel(layer)))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept.values():
                weight.copy_(before)


@contextmanager
def _inputs(model: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[None]:
    """Give each layer what `change` makes of its input."""

    def hook(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(layer, args[0]), *args[1:]) if args and isinstance(args[0], Tensor) and args[0].numel() else args

    handles = [layer.register_forward_pre_hook(hook) for layer in model.modules() if is_layer(layer)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def layers_rounded(model: nn.Module, calibrate: Callable[[], object]) -> Iterator[None]:
    """Run `model` as said above; `calibrate` calls it on the calibration batches."""
    ranges: dict[nn.Module, tuple[float, float]] = {}

    def see(layer: nn.Module, x: Tensor) -> Tensor:
        low, high = ranges.get(layer, (0.0, 0.0))
        ranges[layer] = min(low, float(x.min())), max(high, float(x.max()))
        return x

    def give(layer: nn.Module, x: Tensor) -> Tensor:
        return round_values(x, *ranges[layer]) if layer in ranges else x

    with _inputs(model, see):
        calibrate()
    with rounded_weights(model), _inputs(model, give):
        yield


class _RoundResults(TorchFunctionMode):
    """Round what every torch function gives; not what only moves values, which are rounded already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        computed = isinstance(result, Tensor) and result.dtype == torch.float32 and result.numel() > 1
        if not computed or getattr(func, "__name__", "") in ("__get__", "__set__") or _moves(result, args):
            return result
        real = result.abs() < MASKED
        if not real.any():
            return result
        seen = result[real]
        rounded = torch.where(real, round_values(result, float(seen.min()), float(seen.max())), result)
        return result.copy_(rounded) if args and result is args[0] else rounded


def _moves(result: Tensor, args: Any) -> bool:
    """Whether the result is a view of the first argument."""
    first = args[0] if args else None
    return isinstance(first, Tensor) and result._is_view() and (result._base is first or result._base is first._base)


@contextmanager
def everything_rounded(model: nn.Module) -> Iterator[None]:
    """Run `model` as said above."""
    with rounded_weights(model), _RoundResults():
        yield

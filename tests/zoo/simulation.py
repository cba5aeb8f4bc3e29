"""What 8 bits cost, found without the library under test: a float model whose layers get rounded weights and inputs.

`layers_rounded` rounds the weights of all layers that have an int8 form, a scale per output channel (a range per row of
embeddings), and what the products of linear and recurrent layers and convolutions read, a recurrent layer's states at
each step included, to uint8 by the ranges that calibration batches had, one per layer. Sums, joins and what else lies
between the layers stay float: what a static int8 model reaches at best. `all_integers_rounded` also rounds what
activations, sums, joins, pooling and products read, to 256 steps of its own range, where it comes from a layer through
such functions alone: what one reaches whose integers go from layer to layer. Norms, softmax, attention, and sums of
what these give are float in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from .recurrent import RECURRENT, stepwise

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
WEIGHTED = (*LAYERS, *RECURRENT, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention)

DYNAMIC = (nn.Linear, *RECURRENT, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention)
"""Those of WEIGHTED that have a dynamic form, where a subclass has no forward of its own."""

MASKED = 1e4
"""Values from here on are masks, inf or NaN, which no range is for."""


def is_layer(module: nn.Module) -> bool:
    """A linear layer or convolution, Hugging Face's Conv1D counted."""
    return isinstance(module, LAYERS) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's linear layer."""
    return type(module).__name__ == "Conv1D"


def has_dynamic_form(module: nn.Module) -> bool:
    """Whether a dynamic model may be expected to compute the module in integers."""
    kind = next((kind for kind in DYNAMIC if isinstance(module, kind)), None)
    return is_conv1d(module) or (kind is not None and type(module).forward is kind.forward)


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
    return 1 if transposed or is_conv1d(layer) else 0


def _weight(layer: nn.Module) -> Tensor | None:
    """The parameter to be rounded; of a weight norm the direction, whose rounding is that of the product."""
    if parametrize.is_parametrized(layer, "weight"):
        return getattr(layer.parametrizations.weight, "original1", None)
    if isinstance(getattr(layer, "weight_v", None), Tensor):
        return layer.weight_v
    return layer.weight if isinstance(layer.weight, nn.Parameter) else None


def _weights(layer: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """What of a module's own parameters int8 models hold in int8, each with the dimension of its scales."""
    if is_layer(layer):
        weight = _weight(layer)
        if weight is not None:
            yield weight, _channel(layer)
    elif isinstance(layer, RECURRENT):
        yield from ((weight, 0) for name, weight in layer.named_parameters() if name.startswith("weight"))
    elif isinstance(layer, nn.MultiheadAttention):
        own = (layer.in_proj_weight, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        yield from ((weight, 0) for weight in own if weight is not None)
    elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        yield layer.weight, 0


def round_rows(table: Tensor) -> Tensor:
    """An embedding's rows to 256 steps of each row's own range, which need not hold zero."""
    low, high = table.amin(dim=1, keepdim=True), table.amax(dim=1, keepdim=True)
    step = ((high - low) / 255).clamp_min(1e-30)
    return ((table - low) / step).round() * step + low


@contextmanager
def rounded_weights(model: nn.Module) -> Iterator[None]:
    """The model's weights in int8, and as they were afterwards."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for layer in model.modules():
            for weight, channel in _weights(layer):
                if id(weight) not in kept and weight.ndim > 1:
                    kept[id(weight)] = weight, weight.detach().clone()
                    rows = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
                    weight.copy_(round_rows(weight) if rows else round_weight(weight, channel))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, before in kept.values():
                weight.copy_(before)


@contextmanager
def _inputs(model: nn.Module, change: Callable[[nn.Module, str, Tensor], Tensor]) -> Iterator[None]:
    """Give each layer what `change` makes of its input, or of its states."""

    def hook(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor) or not args[0].numel():
            return args
        return change(layer, "input", args[0]), *args[1:]

    handles = [layer.register_forward_pre_hook(hook) for layer in model.modules() if is_layer(layer)]
    try:
        with stepwise(model, change):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def layers_rounded(model: nn.Module, calibrate: Callable[[], object], wider: float = 1.0) -> Iterator[None]:
    """Run `model` as said above.

    Args:
        calibrate: calls it on the calibration batches.
        wider: what ranges are multiplied by. By a hundredth or two nothing is coarser, and all values are rounded
            otherwise: how far the outputs move then is how much of their error is luck.
    """
    ranges: dict[tuple[nn.Module, str], tuple[float, float]] = {}

    def see(layer: nn.Module, name: str, x: Tensor) -> Tensor:
        low, high = ranges.get((layer, name), (0.0, 0.0))
        ranges[layer, name] = min(low, float(x.min())), max(high, float(x.max()))
        return x

    def give(layer: nn.Module, name: str, x: Tensor) -> Tensor:
        if (layer, name) not in ranges:
            return x
        low, high = ranges[layer, name]
        return round_values(x, wider * low, wider * high)

    with _inputs(model, see):
        calibrate()
    with rounded_weights(model), _inputs(model, give):
        yield


_ACTIVATIONS = ("relu", "relu_", "relu6", "hardtanh", "hardswish", "leaky_relu", "silu", "gelu", "elu", "selu", "celu",
                "mish", "softplus", "sigmoid", "hardsigmoid", "tanh", "batch_norm", "prelu", "clamp")  # fmt: skip

_SUMS = ("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "__rsub__", "mul", "mul_", "__mul__",
         "__rmul__", "__imul__", "cat", "stack", "matmul", "__matmul__", "bmm", "mean")  # fmt: skip

_WINDOWS = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "interpolate")  # fmt: skip

_BETWEEN = {*_ACTIVATIONS, *_SUMS, *_WINDOWS}
"""Functions that integers go through between layers, by name. Norms, softmax, exp, attention are none."""

_LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
           "recurrent"}  # fmt: skip
"""Functions whose result is uint8 where such a function reads it."""


class _RoundBetween(TorchFunctionMode):
    """Round what the functions of _BETWEEN read, where some of it comes from a layer or another such function."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        mapped = name in _BETWEEN and any(self._is_pending(leaf) for leaf in _tensors((args, kwargs)))
        if mapped:
            args, kwargs = (_mapped(tree, _rounded) for tree in (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        moved = any(_moves(leaf, args) and self._is_pending(args[0]) for leaf in _tensors(result))
        if mapped or moved or name in _LAYERS:
            self.pending.update((id(leaf), leaf) for leaf in _tensors(result))
        return result

    def _is_pending(self, value: Any) -> bool:
        return self.pending.get(id(value)) is value


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(item, change) for key, item in tree.items()}
    return type(tree)(_mapped(item, change) for item in tree) if type(tree) in (tuple, list) else tree


def _rounded(x: Tensor) -> Tensor:
    """To 256 steps of its own range; parameters and what is no float32 as they are."""
    if isinstance(x, nn.Parameter) or x.dtype != torch.float32 or x.numel() < 2:
        return x
    real = x.abs() < MASKED
    if not real.any():
        return x
    seen = x[real]
    return torch.where(real, round_values(x, float(seen.min()), float(seen.max())), x)


def _moves(result: Tensor, args: Any) -> bool:
    """Whether the result is a view of the first argument."""
    first = args[0] if args else None
    return isinstance(first, Tensor) and result._is_view() and (result._base is first or result._base is first._base)


@contextmanager
def all_integers_rounded(model: nn.Module, calibrate: Callable[[], object]) -> Iterator[None]:
    """Run `model` as said above."""
    with layers_rounded(model, calibrate), _RoundBetween():
        yield

"""Narrow weights (`quant.kernels.narrow`) as int8, for forms without any: the runner's files, ONNX, QDQ."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from quant.kernels import narrow
from quant.runtime.layers.quant_module import QuantModule


class HasGroups(ValueError):
    """A weight has scales by group, which int8 has not; the message names the layer and the way out."""


def with_bytes(model: nn.Module) -> nn.Module:
    """The model itself where no int8 module has a narrow weight; else a copy with the same results.

    Raises:
        HasGroups: a weight has scales by group.
    """
    in_bytes = {
        name: {key: weight_in_bytes(layer, key, name) for key in _narrow_weights(layer)}
        for name, layer in _int8_modules(model).items()
    }
    if not any(in_bytes.values()):
        return model
    copied = copy.deepcopy(model)
    for name, weights in in_bytes.items():
        for key, weight in weights.items():
            copied.get_submodule(name).register_buffer(key, weight)
    return copied


def refuse_groups(model: nn.Module) -> None:
    """Raise HasGroups where a weight of the model has scales by group."""
    for name, layer in _int8_modules(model).items():
        for key in _narrow_weights(layer):
            _refuse_groups(layer, key, name)


def _int8_modules(model: nn.Module) -> dict[str, QuantModule]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantModule)}


def weight_in_bytes(layer: QuantModule, key: str = "q_weight", name: str | None = None) -> Tensor:
    """The int8 (N, K) of a layer's weight.

    Args:
        key: the buffer's name.
        name: of the layer, for the error; None takes its own.

    Raises:
        HasGroups: it has scales by group.
    """
    _refuse_groups(layer, key, layer.layer_name if name is None else name)
    return narrow.as_bytes(layer.get_buffer(key))


def _refuse_groups(layer: QuantModule, key: str, name: str) -> None:
    q_weight, scale = layer.get_buffer(key), layer.get_buffer(key.replace("q_weight", "scale"))
    if scale.dim() > 1:
        raise HasGroups(
            f"layer {name or '(root)'!r} ({type(layer).__name__}): {key} is {narrow.described(q_weight, scale)}, "
            "expected a scale per output; quantise it without group_size for this form"
        )


def _narrow_weights(layer: QuantModule) -> list[str]:
    buffers = layer.named_buffers(recurse=False)
    return [key for key, one in buffers if key.startswith("q_weight") and narrow.is_narrow(one)]

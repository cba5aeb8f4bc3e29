"""A model whose narrow weights (`quant.kernels.narrow`) are int8 instead, for forms without any: plans and ONNX."""

from __future__ import annotations

import copy

from torch import nn

from quant.kernels import narrow
from quant.runtime.layers.quant_module import QuantModule


class HasGroups(ValueError):
    """A weight has scales by group, which int8 has not; the message names the layer and the way out."""


def with_bytes(model: nn.Module) -> nn.Module:
    """The model itself where it has no narrow weight; else a copy with the same results.

    Raises:
        HasGroups: a weight has scales by group.
    """
    kept = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantModule)]
    if not any(True for _, layer in kept for _ in _narrow_weights(layer)):
        return model
    for name, layer in kept:
        for key in _narrow_weights(layer):
            scale = layer.get_buffer(key.replace("q_weight", "scale"))
            if scale.dim() > 1:
                raise HasGroups(
                    f"layer {name or '(root)'!r} ({type(layer).__name__}): {key} is "
                    f"{narrow.described(layer.get_buffer(key), scale)}, expected a scale per output; quantise it "
                    "without group_size for this form"
                )
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, QuantModule):
            for key in _narrow_weights(module):
                module.register_buffer(key, narrow.integers(module.get_buffer(key)))
    return copied


def _narrow_weights(layer: QuantModule) -> list[str]:
    buffers = layer.named_buffers(recurse=False)
    return [key for key, one in buffers if key.startswith("q_weight") and narrow.is_narrow(one)]

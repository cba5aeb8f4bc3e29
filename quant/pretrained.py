"""Models of transformers, known without importing it."""

from __future__ import annotations

import sys

from torch import nn

from quant.recipe import Recipe
from quant.runtime.layers.quant_module import QuantModule


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module has `from_pretrained` and `save_pretrained` of transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _holds_int8(module: nn.Module) -> bool:
    return any(isinstance(one, QuantModule) for one in module.modules())


def let_it_save(model: nn.Module, recipe: Recipe) -> None:
    """Let `save_pretrained` of a quantised model, and of those in it, write the int8 layers.

    Without this it would write their tensors as if they were the float layers', and loading them would draw the float
    weights at random. A model in it that stayed float is transformers' alone: it saves and trains as before.
    """
    parts = [module for module in model.modules() if is_pretrained(module) and _holds_int8(module)]
    if not parts:
        return
    try:
        from quant.integrations.transformers_quantizer import OctetConfig, OctetQuantizer
    except ImportError:  # transformers 4, whose models are quantised too, and kept by quant.save
        return
    for part in parts:
        part.hf_quantizer = OctetQuantizer(OctetConfig(recipe=recipe), pre_quantized=True)

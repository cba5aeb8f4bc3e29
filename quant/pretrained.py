"""Models of transformers, known without importing it."""

from __future__ import annotations

import sys

from torch import nn

from quant.recipe import Recipe


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module has `from_pretrained` and `save_pretrained` of transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def let_it_save(model: nn.Module, recipe: Recipe) -> None:
    """Let `save_pretrained` of a quantised model, and of those in it, write the int8 layers.

    Without this it would write their tensors as if they were the float layers', and loading them would draw the float
    weights at random.
    """
    parts = [module for module in model.modules() if is_pretrained(module)]
    if not parts:
        return
    try:
        from quant.integrations.transformers_quantizer import OctetConfig, OctetQuantizer
    except ImportError:  # transformers 4, whose models are quantised too, and kept by quant.save
        return
    for part in parts:
        part.hf_quantizer = OctetQuantizer(OctetConfig(recipe=recipe), pre_quantized=True)

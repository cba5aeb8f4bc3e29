"""Models of transformers, diffusers and the Hugging Face hub, known without importing these."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from quant.recipe import Recipe
from quant.report import summary
from quant.runtime.layers.quant_module import QuantModule

TRANSFORMERS = ("transformers.modeling_utils", "PreTrainedModel")
LIBRARIES = (
    TRANSFORMERS,
    ("diffusers.models.modeling_utils", "ModelMixin"),
    ("huggingface_hub.hub_mixin", "ModelHubMixin"),
)
"""Modules, and their classes whose `save_pretrained` writes a folder that `from_pretrained` reads."""


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module has `from_pretrained` and `save_pretrained` of transformers."""
    return _is_of(module, *TRANSFORMERS)


def _is_of(module: nn.Module, library: str, name: str) -> bool:
    imported = sys.modules.get(library)
    return imported is not None and isinstance(module, getattr(imported, name))


@dataclass(frozen=True)
class RefusedSave:
    """What a model has in place of `save_pretrained` where `from_pretrained` would not find the layers in the folder.

    Attributes:
        what: the model, in the error.
        way: what to do.
    """

    what: str
    way: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"save_pretrained: {self.what}, and from_pretrained would load the folder with random weights; {self.way}"
        )


QUANT_SAVE = "write a file by quant.save(model, path), and read it by quant.load(path, model=the float model)"


def let_it_save(model: nn.Module, recipe: Recipe) -> None:
    """Let `save_pretrained` of a dynamically quantised model, and of those in it, write the int8 layers, or refuse.

    Without this it would write their tensors as if they were the float layers', and loading them would draw the float
    weights at random. A model in it that stayed float is transformers' alone: it saves and trains as before.
    """
    parts = [module for module in model.modules() if is_pretrained(module) and _holds_int8(module)]
    if parts:
        try:
            from quant.integrations.transformers_quantizer import OctetConfig, OctetQuantizer
        except ImportError:  # transformers 4, whose models are quantised too
            refuse_to_save(model, "holds int8 layers, which transformers reads from version 5 on")
            return
    for part in parts:
        part.hf_quantizer = OctetQuantizer(OctetConfig(recipe=recipe), pre_quantized=True)
    refuse_to_save(model, "holds int8 layers, which its library does not know", but=parts)


def _holds_int8(module: nn.Module) -> bool:
    return any(isinstance(one, QuantModule) for one in module.modules())


def refuse_to_save(model: nn.Module, why: str, *, but: list[nn.Module] | None = None) -> None:
    """Let `save_pretrained` of a quantised model, and of those in it that are quantised, raise ValueError.

    Args:
        model: with its report.
        why: about such a model, for the error.
        but: modules that can save.
    """
    parts = {
        path: module
        for path, module in model.named_modules()
        if module not in (but or ()) and any(_is_of(module, *library) for library in LIBRARIES)
    }
    names = [entry.name for entry in summary(model) if entry.quantized] if parts else []
    for path, module in parts.items():
        if any(not path or f"{name}.".startswith(f"{path}.") for name in names):
            module.__dict__["save_pretrained"] = RefusedSave(f"{type(module).__name__} {why}", QUANT_SAVE)

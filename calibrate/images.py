"""One image file as a tensor: netpbm by ourselves, everything else through Pillow where it is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from quant.calibrate.errors import DataError
from torch import Tensor

NETPBM = (".ppm", ".pgm")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", *NETPBM)


def read_image(path: Path, channels: Literal[1, 3], size: int | tuple[int, int] | None) -> Tensor:
    """float32 (channels, height, width), values 0 to 255, resized and cropped to `size`.

    Raises:
        DataError: the file is not an image, is damaged, or needs Pillow, which is not installed.
    """
    pixels = read_netpbm(path) if path.suffix.lower() in NETPBM else _read_with_pillow(path)
    if channels == 3 and pixels.shape[0] == 1:
        pixels = pixels.expand(3, -1, -1)
    elif channels == 1 and pixels.shape[0] == 3:
        # ITU-R BT.601 luma, as Pillow's "L".
        pixels = (pixels * torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)).sum(0, keepdim=True)
    return pixels.contiguous() if size is None else fit(pixels, size)


def fit(pixels: Tensor, size: int | tuple[int, int]) -> Tensor:
    """(C, H, W) resized to just cover `size` (bilinear, antialiased, the proportions kept), and its middle."""
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise DataError(f"image_size is {size}, expected at least 1 pixel")
    factor = max(height / pixels.shape[1], width / pixels.shape[2])
    covering = (max(round(pixels.shape[1] * factor), height), max(round(pixels.shape[2] * factor), width))
    if covering != tuple(pixels.shape[1:]):
        pixels = torch.nn.functional.interpolate(
            pixels[None], covering, mode="bilinear", align_corners=False, antialias=True
        )[0]
    top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
    return pixels[:, top : top + height, left : left + width].contiguous()


def read_netpbm(path: Path) -> Tensor:
    """float32 (1 or 3, height, width), values 0 to 255, of a P2, P3, P5 or P6 file (netpbm.sourceforge.net/doc)."""
    data = path.read_bytes()
    header = re.match(rb"P([2356])((?:\s|#[^\n]*\n)+\d+){3}\s", data)
    if header is None:
        raise DataError(f"{path}: not a netpbm file (P2, P3, P5 or P6)")
    text = re.sub(rb"#[^\n]*\n", b" ", header.group())
    kind, (width, height, largest) = int(text[1:2]), map(int, text[2:].split())
    channels = 3 if kind in (3, 6) else 1
    count = channels * width * height
    if count == 0 or not 1 <= largest <= 65535:
        raise DataError(f"{path}: an image of {width} x {height} with values up to {largest} cannot be")
    body = data[header.end() :]
    if kind < 4:
        try:
            values = np.array(body.split()[:count], dtype=np.float32)
        except ValueError as error:
            raise DataError(f"{path}: damaged: {error}") from error
    else:
        kept = np.dtype("u1" if largest < 256 else ">u2")
        values = np.frombuffer(body, kept, min(count, len(body) // kept.itemsize)).astype(np.float32)
    if values.size < count:
        raise DataError(f"{path}: truncated: it has {values.size} of {count} values")
    # Channels are interleaved in the file.
    pixels = torch.from_numpy(values).reshape(height, width, channels).permute(2, 0, 1)
    return pixels * (255.0 / largest)


def _read_with_pillow(path: Path) -> Tensor:
    try:
        from PIL import Image  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{path}: reading {path.suffix} needs Pillow, which is not installed: pip install pillow (.ppm and .pgm "
            "are read without it)"
        ) from error
    try:
        with Image.open(path) as image:
            return _pixels(image, path)
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: Pillow cannot read it: {error}") from error


def _pixels(image: Any, path: Path) -> Tensor:
    if image.mode.startswith(("I", "F")):
        # Pillow would clip 16 bits at 255 without a word.
        raise DataError(f"{path}: pixels of mode {image.mode!r} have more than 8 bits; convert the file to 8")
    grey = image.mode in ("1", "L", "LA")
    values = np.array(image.convert("L" if grey else "RGB"), dtype=np.float32)
    return torch.from_numpy(values).reshape(values.shape[0], values.shape[1], -1).permute(2, 0, 1)

"""Fashion-MNIST: 70,000 small grey photos of clothes in ten classes, of the Debian package dataset-fashion-mnist.

Xiao, Rasul & Vollgraf, arXiv:1708.07747, MIT. 60,000 images train, 10,000 others score; both are balanced.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .fetch import FASHION_MNIST, DataUnavailable, fetch

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

MEAN, DEVIATION = 0.2860, 0.3530
"""Of the training images' pixels in [0, 1]."""


def load(split: Literal["train", "test"], *, cache: Path | None = None) -> tuple[Tensor, Tensor]:
    """Images, float32 (N, 1, 28, 28), shifted and scaled to mean 0 and deviation 1; classes, int64 (N,).

    N is 60,000 for "train" and 10,000 for "test".

    Raises:
        DataUnavailable: the Debian package is not cached and cannot be fetched.
    """
    folder = fetch(FASHION_MNIST, cache=cache) / "usr" / "share" / "datasets" / "fashion-mnist"
    stem = {"train": "train", "test": "t10k"}[split]
    pixels = read_idx(folder / f"{stem}-images-idx3-ubyte.gz")
    classes = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz")
    images = (pixels.to(torch.float32) / 255 - MEAN) / DEVIATION
    return images.unsqueeze(1), classes.to(torch.int64)


def read_idx(path: Path) -> Tensor:
    """A gzipped IDX file of bytes as uint8: 0, 0, 8, the number of dimensions, each as a big-endian int32, the values.

    Raises:
        DataUnavailable: the file is no such file, or is truncated.
    """
    try:
        data = gzip.decompress(path.read_bytes())
    except (EOFError, OSError) as error:
        raise DataUnavailable(f"{path}: not a complete gzip file: {error}") from error
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise DataUnavailable(f"{path}: not an IDX file of bytes")
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if values.size != shape.prod():
        raise DataUnavailable(f"{path}: {values.size} values, expected {'x'.join(map(str, shape))}")
    return torch.from_numpy(values.copy()).reshape(shape.tolist())

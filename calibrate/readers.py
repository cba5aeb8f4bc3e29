"""Batches from what people have on disk: a folder of images, .npy, .npz, .csv, or a loader of their own.

    read("photos/", image_size=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    read("digits.npz", fields=["x_train"], scale=1 / 255, shuffle=True, limit=500)
    read("mypackage.data:make_loader")

A source is a number of samples and a way to get one; `Batches` puts order, limit, shard and batch size on any of them.
Floats become float32, integers int64 and stay integers (they may be indices) unless scale, mean or std is set.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from quant.calibrate.arrays import load_csv, load_npy, load_npz
from quant.calibrate.errors import DataError, listed
from quant.calibrate.images import SUFFIXES, read_image
from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """(value * scale - mean) / std. mean and std have one value, or one per channel (the samples' first dimension)."""

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in (self.scale, *self.mean, *self.std)):
            raise DataError(f"scale, mean or std is not finite: {self.scale}, {self.mean}, {self.std}")
        if not self.mean or not self.std or 0.0 in self.std or self.scale == 0.0:
            raise DataError(f"scale {self.scale} and std {self.std} must not be zero, mean and std not empty")

    def __call__(self, sample: Tensor, name: str) -> Tensor:
        sample = sample.to(torch.float32) * self.scale
        return (sample - self._per_channel(self.mean, sample, name)) / self._per_channel(self.std, sample, name)

    def _per_channel(self, values: tuple[float, ...], sample: Tensor, name: str) -> Tensor:
        if len(values) > 1 and (sample.dim() == 0 or sample.shape[0] != len(values)):
            raise DataError(
                f"{name}: mean or std has {len(values)} values, and a sample has shape {list(sample.shape)}; expected "
                "one value, or one per index of the first dimension"
            )
        return (
            torch.tensor(values).reshape(-1, *[1] * max(sample.dim() - 1, 0))
            if len(values) > 1
            else torch.tensor(values[0])
        )


@dataclass(frozen=True)
class Source:
    """Samples by their index.

    Attributes:
        count: how many.
        get: index -> a tensor, a tuple or a dict of tensors.
        name: index -> the sample's name in messages.
    """

    count: int
    get: Callable[[int], Any]
    name: Callable[[int], str]


class Batches:
    """A source cut into batches; can be iterated many times, in the same order each time. `len` counts batches."""

    def __init__(self, source: Source, order: Sequence[int], batch_size: int) -> None:
        self.source, self.order, self.batch_size = source, order, batch_size

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        first: tuple[str, list[list[int]]] | None = None
        for start in range(0, len(self.order), self.batch_size):
            samples = []
            for index in self.order[start : start + self.batch_size]:
                sample, name = self.source.get(index), self.source.name(index)
                shapes = [list(part.shape) for part in _parts(sample)]
                first = first or (name, shapes)
                if shapes != first[1]:
                    raise DataError(
                        f"samples differ in shape: {name} has {_shown(shapes)}, {first[0]} {_shown(first[1])}; "
                        "give images one size with image_size (--image-size)"
                    )
                samples.append(sample)
            yield _stack(samples)


def read(
    data: str | os.PathLike[str],
    *,
    batch_size: int = 32,
    limit: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    image_size: int | tuple[int, int] | None = None,
    channels: Literal[1, 3] = 3,
    scale: float | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    fields: Sequence[str] | None = None,
) -> Iterable[Any]:
    """Batches for `calibrate.run`.

    Args:
        data: a folder (its .png, .jpg, .jpeg, .bmp through Pillow where that is installed, .ppm and .pgm without;
            subfolders too, in the order of their paths), a .npy or .npz file (samples along the first axis), a .csv
            file (a sample per row), or "package.module:loader", a callable without arguments or the iterable itself.
        batch_size: samples in a batch; the last one may have fewer.
        limit: how many samples to take; of a loader, how many batches.
        shuffle, seed: a random order, the same for a seed, chosen before `limit`.
        shard: (rank, ranks): every ranks-th sample (of a loader, batch) from rank on.
        image_size: shorter side S of the resized image, of which the middle S x S is used; or (height, width).
        channels: of an image: 3, or 1 for grey.
        scale, mean, std: (value * scale - mean) / std, in this order; mean and std are numbers, or one per channel.
            Images: scale is 1/255 where it is not set.
        fields: which arrays of the .npz, or columns of the .csv. One array gives tensors, several give dicts by name;
            arrays that numpy named arr_0, arr_1, ... give tuples.

    Raises:
        DataError: what is wrong with which file; some of it only while iterating.
    """
    if batch_size < 1 or (limit is not None and limit < 1):
        raise DataError(f"batch_size is {batch_size} and limit {limit}, expected at least 1 (or no limit)")
    text, path = os.fspath(data), Path(data)
    own = {"image_size": image_size, "scale": scale, "mean": mean, "std": std, "fields": fields}
    if not path.exists() and ":" in text and path.suffix.partition(":")[0] not in (".npz", ".npy", ".csv"):
        settings = [name for name, value in {**own, "shuffle": shuffle or None}.items() if value is not None]
        if settings:
            raise DataError(f"{text}: {', '.join(settings)} do not apply to a loader, which gives finished batches")
        return _Strided(load(text), limit, shard)
    transform = None
    if scale is not None or mean is not None or std is not None:
        default = 1.0 / 255.0 if path.is_dir() and scale is None else 1.0 if scale is None else scale
        transform = Transform(default, _numbers("mean", mean, 0.0), _numbers("std", std, 1.0))
    if path.is_dir():
        if fields:
            raise DataError(f"{path}: fields apply to .npz and .csv, not to a folder of images")
        source = images(path, image_size, channels, transform or Transform(1.0 / 255.0))
    elif image_size is not None:
        raise DataError(f"{path}: image_size applies to a folder of images")
    else:
        source = _file(path, transform, fields)
    order = list(range(source.count))
    if shuffle:
        order = torch.randperm(source.count, generator=torch.Generator().manual_seed(seed)).tolist()
    return Batches(source, order[:limit][shard[0] :: shard[1]], batch_size)


def _numbers(name: str, value: float | Sequence[float] | None, default: float) -> tuple[float, ...]:
    if value is None:
        return (default,)
    try:
        return tuple(float(one) for one in (value if isinstance(value, Iterable) else (value,)))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is {value!r}, expected a number, or one per channel") from error


def images(path: Path, size: int | tuple[int, int] | None, channels: Literal[1, 3], transform: Transform) -> Source:
    """The images under a folder: float32 (channels, height, width)."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    chosen = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not chosen:
        others = sorted({file.suffix or file.name for file in files})
        raise DataError(
            f"{path}: no images ({', '.join(SUFFIXES)}) in the folder; it has "
            f"{'files of ' + listed(others) if others else 'no files'}"
        )

    def get(index: int) -> Tensor:
        return transform(read_image(chosen[index], channels, size), str(chosen[index]))

    return Source(len(chosen), get, lambda index: str(chosen[index]))


def load(spec: str) -> Iterable[Any]:
    """The iterable that "package.module:loader" names or returns; the current folder is searched too."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise DataError(f"{spec!r}: expected a file, a folder, or package.module:loader")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise DataError(
            f"{spec!r}: there is no such file or folder, and no module {error.name!r} in the current folder or among "
            "the installed packages"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name, value in vars(target).items() if callable(value) and not name.startswith("_")]
            raise DataError(f"{spec!r}: there is no {part!r}; there is {listed(names) or 'nothing callable'}")
        target = getattr(target, part)
    # A DataLoader subclass is callable and iterable: as a class it is called, as an instance it is a loader already.
    if callable(target) and (isinstance(target, type) or not hasattr(target, "__iter__")):
        try:
            target = target()
        except Exception as error:
            raise DataError(
                f"{spec!r} failed with {type(error).__name__}: {error}; it is called without arguments"
            ) from error
    if isinstance(target, (str, bytes, Mapping, Tensor)) or not hasattr(target, "__iter__"):
        raise DataError(f"{spec!r}: it gives a {type(target).__name__}, expected an iterable of batches")
    iterable: Iterable[Any] = target
    return iterable


class _Strided:
    """Every ranks-th batch of a loader; it has a length where the loader has one."""

    def __init__(self, loader: Iterable[Any], limit: int | None, shard: tuple[int, int]) -> None:
        self.loader, self.limit, self.shard = loader, limit, shard

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = self.shard
        for index, batch in enumerate(self.loader):
            if index % ranks == rank:
                yield batch
            if index + 1 == self.limit:
                return

    def __len__(self) -> int:
        length = len(self.loader)  # type: ignore[arg-type]
        length = length if self.limit is None else min(length, self.limit)
        return len(range(self.shard[0], length, self.shard[1]))


def _file(path: Path, transform: Transform | None, fields: Sequence[str] | None) -> Source:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file or folder")
    suffix = path.suffix.lower()
    if suffix == ".npy":
        if fields:
            raise DataError(f"{path}: fields apply to .npz and .csv, a .npy holds one array")
        return _arrays({"": load_npy(path)}, path, transform)
    if suffix == ".npz":
        return _arrays(load_npz(path, fields), path, transform)
    if suffix == ".csv":
        return _arrays({"": load_csv(path, fields)}, path, transform)
    if suffix in SUFFIXES:
        raise DataError(f"{path}: it is a single image; give the folder that holds the images")
    raise DataError(f"{path}: ends in {suffix!r}, expected .npy, .npz, .csv, a folder, or package.module:loader")


def _arrays(arrays: Mapping[str, Any], path: Path, transform: Transform | None) -> Source:
    """One array: its rows. Several: dicts of their rows; tuples where the names are numpy's own arr_0, arr_1, ..."""
    counts = {}
    for name, values in arrays.items():
        where = f"{path}: array {name!r}" if name else str(path)
        if values.dtype.kind not in "fiub":
            raise DataError(f"{where} holds {values.dtype}, expected real numbers")
        if values.ndim == 0:
            raise DataError(f"{where} is a single number, expected samples along the first axis")
        counts[name] = values.shape[0]
    if len(set(counts.values())) > 1:
        raise DataError(
            f"{path}: its arrays differ in length ({counts}); choose with fields (--fields {next(iter(counts))})"
        )
    count = next(iter(counts.values()))
    if count == 0:
        raise DataError(f"{path}: it has no samples")

    def get(index: int) -> Any:
        tensors = {}
        for name, values in arrays.items():
            sample = _to_tensor(values[index])
            tensors[name] = sample if transform is None else transform(sample, f"{path}, sample {index}")
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        if all(name == f"arr_{place}" for place, name in enumerate(tensors)):
            return tuple(tensors.values())
        return tensors

    return Source(count, get, lambda index: f"{path}, sample {index}")


def _to_tensor(sample: Any) -> Tensor:
    kind = sample.dtype.kind
    # A copy: the array is a read-only map of the file, perhaps of the other byte order. What float32 cannot hold
    # turns infinite, and calibrate.run says so.
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(sample, dtype={"f": np.float32, "b": np.bool_}.get(kind, np.int64)))


def _parts(sample: Any) -> list[Tensor]:
    if isinstance(sample, dict):
        return list(sample.values())
    return list(sample) if isinstance(sample, tuple) else [sample]


def _stack(samples: list[Any]) -> Any:
    first = samples[0]
    if isinstance(first, dict):
        return {name: torch.stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return torch.stack(samples)


def _shown(shapes: list[list[int]]) -> str:
    return ", ".join(map(str, shapes))

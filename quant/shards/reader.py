"""Tensors of a checkpoint that is one safetensors file or several, each read alone and by its name.

Headers are read first and say names, shapes, dtypes and places. A tensor is then read from its place into memory of its
own: safetensors maps the whole file and copies from there, and what is mapped counts as the process's memory too.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch
from torch import Tensor

Shards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
"""A .safetensors file, several, an index (.json), or a folder with such files."""

INDEX = "model.safetensors.index.json"

FLOATS = ("F32", "BF16", "F16")
"""Names in safetensors of the dtypes that layers are quantised from."""

FOREIGN = {
    "GPTQ": "*.g_idx",
    "AWQ or GPTQ": "*.qweight",
    "bitsandbytes (8 bits)": "*.SCB",
    "bitsandbytes (4 bits)": "*.weight.absmax",
    "compressed-tensors": "*.weight_packed",
}
"""Tensors by which a checkpoint shows that others have quantised it."""


class ShardError(ValueError):
    """A checkpoint cannot be loaded: it is damaged, quantised already, or does not fit the model."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is: its file and its first byte there; with its shape, and its dtype as safetensors calls it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    place: int


class Checkpoint:
    """The tensors of some safetensors files.

    Attributes:
        entries: by the tensors' names.
        source: the files in errors: their name, or that of the first and how many more there are.
    """

    def __init__(self, shards: Shards) -> None:
        self.entries: dict[str, Entry] = {}
        files, promised = _files(shards)
        self.source = str(shards) if isinstance(shards, (str, os.PathLike)) else _listed(files)
        for file in files:
            for name, entry in _header(file).items():
                if name in self.entries:
                    raise ShardError(f"tensor {name!r} is in {self.entries[name].file} and in {file}; give one of them")
                self.entries[name] = entry
        absent = sorted(promised - self.entries.keys())
        if absent:
            raise ShardError(
                f"{self.source}: tensor {absent[0]!r} is listed in the index and in none of its files; load the files "
                "again"
            )
        self._refuse_foreign()

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in memory of its own.

        Raises:
            ShardError: its file cannot be read as the header says.
        """
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise ShardError(f"{self.where(name)} is {entry.dtype}, expected one of {', '.join(_DTYPES)}")
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        if tensor.numel():
            with entry.file.open("rb") as file:
                file.seek(entry.place)
                count = file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
            if count != tensor.nbytes:
                raise ShardError(f"{self.where(name)} ends after {count} of {tensor.nbytes} bytes; download it again")
        return tensor

    def where(self, name: str) -> str:
        """A tensor in errors."""
        return f"tensor {name!r} of {self.entries[name].file}"

    def _refuse_foreign(self) -> None:
        for name, entry in self.entries.items():
            kind = next((kind for kind, pattern in FOREIGN.items() if fnmatch.fnmatchcase(name, pattern)), None)
            if kind is not None:
                raise ShardError(
                    f"tensor {name!r} of {entry.file} is of a checkpoint that {kind} has quantised; its integers have "
                    "another layout and cannot be taken over: load the float checkpoint that it was made of"
                )
            if entry.dtype.startswith("F8_"):
                raise ShardError(
                    f"tensor {name!r} of {entry.file} is fp8 ({entry.dtype}), which has scales in tensors of its own; "
                    "load the bfloat16 checkpoint, or convert this one to bfloat16 first"
                )


def _listed(files: list[Path]) -> str:
    return str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _files(shards: Shards) -> tuple[list[Path], set[str]]:
    """The files, and the names that an index says they have."""
    if not isinstance(shards, (str, os.PathLike)):
        if not isinstance(shards, Iterable):
            raise TypeError(f"shards is {shards!r}, expected a .safetensors file, a list of them, an index or a folder")
        paths = list(shards)
        if not paths:
            raise ShardError("shards: there are no files")
        return [file for path in paths for file in _files(path)[0]], set()
    if not os.fspath(shards):
        raise ShardError("shards is an empty path, expected a file or folder; '.' is the working folder")
    path = Path(shards)
    if path.is_dir():
        _refuse_configured(path / "config.json")
        if (path / INDEX).exists():
            return _indexed(path / INDEX)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            kinds = sorted({file.suffix for file in path.iterdir() if file.is_file()}) or "no files"
            raise ShardError(
                f"{path} holds no .safetensors file, it has {kinds}; save the weights with "
                "safetensors.torch.save_file, or save_pretrained, first"
            )
        return files, set()
    if path.suffix == ".json":
        return _indexed(path)
    if path.suffix != ".safetensors":
        raise ShardError(
            f"{path}: expected a .safetensors file, an index (.json) or a folder of them; pickles are not read"
        )
    return [path], set()


def _indexed(index: Path) -> tuple[list[Path], set[str]]:
    try:
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{index} is no index of safetensors files: it has no table 'weight_map'") from error
    for name, file in zip(names, files, strict=True):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ShardError(f"{index} names {name!r}, which lies outside its folder; give the files themselves")
        if not file.is_file():
            raise ShardError(f"{index} names {name}, which is not beside it; download the missing file")
    return files, set(places)


def _refuse_configured(config: Path) -> None:
    """Refuse a folder whose config.json says that its weights are quantised."""
    if not config.exists():
        return
    try:
        settings: Any = json.loads(config.read_text(encoding="utf-8")).get("quantization_config")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ShardError(f"{config} is no JSON object: {error}") from error
    if not settings:
        return
    method = settings.get("quant_method", "an unknown method") if isinstance(settings, Mapping) else settings
    way = "load the float checkpoint that it was made of"
    if method == "octet":
        way = "load it with transformers' from_pretrained, after importing quant.integrations.transformers_quantizer"
    raise ShardError(f"{config} says that the weights beside it are quantised, by {method}; {way}")


def _header(file: Path) -> dict[str, Entry]:
    try:
        with safetensors.safe_open(file, framework="pt"):  # checks that the header and the file's length are sound
            pass
    except safetensors.SafetensorError as error:
        raise ShardError(f"{file} is not a whole safetensors file: {error}") from error
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return {
        name: Entry(file, tuple(one["shape"]), one["dtype"], 8 + size + one["data_offsets"][0])
        for name, one in header.items()
    }


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

"""The file from which interrupted learning goes on: the layers that are done, without pickle.

A safetensors file, written as calibration's checkpoints are (`calibrate/checkpoint.py`). Its header has what was
asked for and digests of the model and the data, so that a file of something else is refused. Every block is learned
by itself from a seed of its own, so layers from the file and layers learned now are together what one run would have
given, to the bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from quant.calibrate import CheckpointError
from quant.calibrate.batches import fingerprint, tensors
from quant.calibrate.checkpoint import digest, read_whole
from quant.calibrate.whole_files import remove_left, replace_file
from quant.runtime.layers.weighted import QWeight
from quant.runtime.names import dtype_name

SCHEMA = 1
KEY = "octet.rounding"
"""Name of the manifest in the safetensors header."""

_REMEDY = "; delete it to begin anew, or name another"


def identity(prepared: nn.Module, batches: Iterable[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a file belongs to: the model with its ranges, the data and the settings."""
    model, data = hashlib.sha256(), hashlib.sha256()
    for name, tensor in prepared.state_dict().items():
        if isinstance(tensor, Tensor):
            model.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            model.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for batch in batches:
        data.update(fingerprint(batch))
        for tensor in tensors(batch):
            data.update(str(tensor.double().sum().item()).encode())
    return {"schema": SCHEMA, "model": model.hexdigest(), "data": data.hexdigest(), **settings}


class Checkpoint:
    """The layers that are done, by name; written after each block where there is a path.

    Attributes:
        done: a layer's weight, and its errors as numbers.
    """

    def __init__(self, path: Path | None, belongs_to: Mapping[str, Any]) -> None:
        self.path, self.belongs_to = path, dict(belongs_to)
        self.done: dict[str, tuple[QWeight, list[float]]] = {}
        if path is not None and path.exists():
            self._read(path)
            remove_left(path)  # nothing is written any more where all is done
        elif path is not None:
            self.write()  # known before the work rather than after, that the file can be written

    def write(self) -> None:
        """Write what is done."""
        if self.path is None:
            return
        state = {}
        for name, (weight, _) in self.done.items():
            kept = {"q_weight": weight.q_weight, "scale": weight.scale, "bias": weight.bias}
            state.update({f"{name}/{key}": one.contiguous().clone() for key, one in kept.items() if one is not None})
        errors = {name: numbers for name, (_, numbers) in self.done.items()}
        text = json.dumps({**self.belongs_to, "errors": errors}, sort_keys=True)
        header = {KEY: text, "digest": digest(text, state)}
        replace_file(self.path, safetensors.torch.save(state, metadata=header), "rounding: checkpoint")

    def _read(self, path: Path) -> None:
        manifest, state = read_whole(path, KEY, "learn_rounding", _REMEDY)
        errors = manifest.pop("errors", None)
        other = [name for name, value in self.belongs_to.items() if manifest.get(name) != value]
        if other:
            there, here = manifest.get(other[0]), self.belongs_to[other[0]]
            what = f"{other[0]} is {there!r} there and {here!r} here"
            if other[0] in ("model", "data"):
                what = f"it was written with another {other[0]}, or in another order"
            raise CheckpointError(f"{path} belongs to something else: {what}{_REMEDY}")
        if not isinstance(errors, dict) or not all(map(_are_errors, errors.values())):
            raise CheckpointError(f"{path} was altered or damaged: its layers have no errors as numbers{_REMEDY}")
        for name, numbers in errors.items():
            q_weight, scale = state.get(f"{name}/q_weight"), state.get(f"{name}/scale")
            if q_weight is None or scale is None:
                raise CheckpointError(f"{path} was altered or damaged: it lacks the weight of {name!r}{_REMEDY}")
            if not _are_scales(scale, of_bytes=q_weight.dtype == torch.int8):
                raise CheckpointError(f"{path} was altered or damaged: the scale of {name!r} is none{_REMEDY}")
            self.done[name] = QWeight(q_weight, scale, state.get(f"{name}/bias")), numbers

    def check_fits(self, name: str, **own: Tensor | None) -> None:
        """Check a layer's tensors, by their names in a `QWeight`, against those that the layer has now.

        Raises:
            CheckpointError: one has another shape or dtype.
        """
        kept, _ = self.done[name]
        for key, tensor in own.items():
            read: Tensor | None = getattr(kept, key)
            form, wanted = _form(read), _form(tensor)
            if form != wanted:
                raise CheckpointError(
                    f"{self.path} does not fit the model: {key} of {name!r} is {form} there and {wanted} here{_REMEDY}"
                )


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _are_scales(scale: Tensor, *, of_bytes: bool) -> bool:
    """Whether they are finite, and positive; of a group of narrow weights a half may have become 0."""
    if scale.dtype not in (torch.float32, torch.float16) or scale.dim() > 3:  # beyond 64 torch compares none
        return False
    return bool((scale.isfinite() & (scale > 0 if of_bytes else scale >= 0)).all())


def _are_errors(numbers: Any) -> bool:
    return isinstance(numbers, list) and len(numbers) in (2, 4) and all(type(one) in (int, float) for one in numbers)

"""What a search has measured, in memory and in a checkpoint: a search that goes on takes it from there.

The search itself keeps nothing: it is a function of what was measured, so a run that was killed begins again, finds its
measurements, and goes on from where none is left. Another budget for the same model finds them too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.autoquant.candidates import CANDIDATES, Plan
from quant.autoquant.costs import Cost
from quant.calibrate import CheckpointError
from quant.calibrate.batches import fingerprint, sample_bytes
from quant.calibrate.json_forms import is_list, is_table, is_text
from quant.calibrate.whole_files import remove_left, replace_file
from quant.recipe import Recipe

VERSION = "2"
"""Of the file, and of what its measurements mean."""


class Records:
    """Measurements by kind and name, each made once.

    Attributes:
        path: of the checkpoint; None keeps them in memory.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Mapping[str, str],
        layers: Collection[str] = (),
        begin: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """A checkpoint that is there is read; `layers` are those that it may name. Another one begins with `begin`."""
        self.path, self.identity = path, dict(identity)
        self._values: dict[str, dict[str, Any]] = json.loads(json.dumps(begin or {}))  # as a checkpoint gives it back
        if path is not None and path.exists():
            self._values = _read(path, self.identity, layers)
            remove_left(path)  # nothing is written any more where all is measured
        else:
            self._write()  # known before the work rather than after, that the file can be written

    def get(self, kind: str, name: str, measure: Callable[[], Any]) -> Any:
        """What was measured, or is now: anything that JSON holds."""
        known = self._values.setdefault(kind, {})
        if name not in known:
            known[name] = json.loads(json.dumps(measure()))  # as a checkpoint gives it back
            self._write()
        return known[name]

    def known(self, kind: str, name: str) -> Any:
        """What was measured; None where it was not."""
        return self._values.get(kind, {}).get(name)

    def names(self, *kinds: str) -> list[str]:
        """The names of what was measured in all of these kinds, sorted."""
        return sorted(set.intersection(*(set(self._values.get(kind, {})) for kind in kinds)))

    def _write(self) -> None:
        if self.path is not None:
            data = {"identity": self.identity, "measured": self._values}
            replace_file(self.path, (json.dumps(data) + "\n").encode(), "quant.autoquant: checkpoint")


def weights_of(model: nn.Module) -> str:
    """A hash of a model's weights, its classes, and the settings of torch's own."""
    seen = hashlib.sha256()
    for name, module in model.named_modules():
        own = module.extra_repr() if type(module).__module__.startswith("torch.") else ""
        seen.update(f"{name} {type(module).__qualname__} {own}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        seen.update(sample_bytes(tensor))
    return seen.hexdigest()


def identity(weights: str, data: str, recipe: Recipe, example: Any) -> dict[str, str]:
    """What measurements belong to: equal where they can be taken over.

    Args:
        weights: by `weights_of`, before a forward changed any.
        data: a hash of all batches.
    """
    return {
        "version of the file": VERSION,
        "version of torch": torch.__version__,
        "weights": weights,
        "data": data,
        "example": fingerprint(example).hex(),
        "recipe": repr(recipe),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }


def _read(path: Path, expected: Mapping[str, str], layers: Collection[str]) -> dict[str, dict[str, Any]]:
    remedy = "delete it to begin anew, or name another"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known, values = data["identity"], data["measured"]
        if not all(isinstance(one, dict) for one in (known, *values.values(), *values.get("scores", {}).values())):
            raise TypeError("it lacks a table")
        other = [name for name in expected if known.get(name) != expected[name]]
        if not other:
            _check_values(values, layers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no checkpoint of quant.autoquant ({error}); {remedy}") from error
    if other:
        raise CheckpointError(f"{path} was measured with another {', '.join(other)}; {remedy}")
    return {kind: dict(known) for kind, known in values.items()}


def _check_values(values: Mapping[str, Any], layers: Collection[str]) -> None:
    """Raise ValueError, TypeError or KeyError where measurements are not of their kinds."""
    for kind, known in values.items():
        if kind not in _KINDS:
            raise ValueError(f"{kind!r} is no kind of measurement")
        for name, value in known.items():
            if not _KINDS[kind](value):
                raise ValueError(f"{value!r:.80} is no measurement of {kind!r}")
            if kind in _OF_PLANS and not {choice for _, choice in Plan.read(name).choices} <= CANDIDATES.keys():
                raise ValueError(f"{name!r:.80} is no model of a search")
            if kind == "layers" and not value.keys() <= set(layers):
                raise ValueError("it has measurements of layers that the model does not have")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _is_score(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"value", "samples"}:
        return False
    samples = value["samples"]
    # A metric may be inf or NaN.
    numbers = [value["value"], *(samples if isinstance(samples, list) else ())]
    return all(type(one) is float or _is_number(one) for one in numbers) and isinstance(samples, (list, type(None)))


def _is_cost(value: Any) -> bool:
    names = {one.name for one in dataclasses.fields(Cost)}
    return (
        isinstance(value, dict)
        and value.keys() == names
        and all(isinstance(one, (bool, int, float)) for one in value.values())
    )


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "scores": _is_score,
    "costs": _is_cost,
    "metric": _is_number,
    "layers": lambda value: is_table(value, _is_number),
    "forms": lambda value: isinstance(value, bool),
    "advice": lambda value: is_list(value, is_text),
    "backends": lambda value: is_table(value, is_text),
    "tuned": _is_number,
}
"""Kind of a measurement -> whether a value is one."""

_OF_PLANS = frozenset({"scores", "costs", "advice", "backends", "tuned"})
"""Kinds whose names are keys of plans."""

"""Ranges by hand: as a JSON file that a person can edit, or as pairs of numbers by name.

A line of the file is one range:

    "features.0": {"low": -2.5, "high": 3.1, "info": {"observer": "histogram", "scale": ..., "zero_point": ..., ...}}

`low` and `high` are what is read back. `info` says what they gave when the file was written and what was seen; it is
for people, and nothing reads it. Ends are written with as many digits as tell one float32 from the next, so a file that
nobody edited gives every scale and zero point back to the bit.

A range from a file takes the place of the observer's own; the observer goes on counting, so that the report still warns
of values outside that range.
"""

from __future__ import annotations

import difflib
import json
import numbers
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quant.calibrate.errors import listed
from quant.calibrate.report import unseen
from quant.calibrate.whole_files import replace_file
from quant.kernels import choose_qparams
from quant.observers import OBSERVERS, ChannelMean, FakeQuantizeBase, Observer
from torch import Tensor, nn

FORMAT = "octet ranges 1"
NOTE = "low and high are read back; info is for people, and nothing reads it"


def save_ranges(prepared: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the range of every value of a calibrated model to a JSON file that a person can edit.

    Args:
        prepared: from `quant.prepare`, after data went through it or its ranges were set.
        path: of the file; one that is there is replaced.

    Raises:
        TypeError, ValueError: `prepared` has no observers, or is prepared for training; or observers saw no data,
            which are listed.
        OSError: the file cannot be written.
    """
    observers = _observers(prepared, "save_ranges")
    missing = unseen(observers)
    if missing:
        raise ValueError(
            f"calibrate.save_ranges: {len(missing)} observers saw no data: {listed(missing)}; run calibration batches "
            "through the prepared model first"
        )
    agreed = _agreed(prepared)
    entries = {name: _entry(observer, agreed.get(id(observer))) for name, observer in observers.items()}
    lines = [f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    head = [f'  "format": {json.dumps(FORMAT)},', f'  "note": {json.dumps(NOTE)},', '  "ranges": {']
    text = "\n".join(["{", *head, ",\n".join(lines), "  }", "}", ""])
    replace_file(path, text, "calibrate.save_ranges")


def load_ranges(prepared: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give a prepared model the ranges of a file from `save_ranges`, edited or not, whatever its data say.

    Args:
        prepared: from `quant.prepare`, of the same model; before or after calibration, which it may do without. Data
            still serve to correct biases and to find layers that 8 bits cannot hold.

    Raises:
        ValueError: the file is no such file, names a range that the model does not have, or lacks one that it has.
            Nothing was changed.
        OSError: it cannot be read.
    """
    names = list(_observers(prepared, "load_ranges"))
    ranges = _read(Path(path))
    missing = [name for name in names if name not in ranges]
    if missing:
        raise ValueError(
            f"{path} lacks the ranges of {_with_near(missing, list(ranges), 'the file has')}; calibrate.set_ranges "
            "sets some and leaves the others to the data"
        )
    _give(prepared, ranges, str(path), "load_ranges")


def set_ranges(prepared: nn.Module, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Give some values of a prepared model the ranges (low, high), whatever its data say.

    Args:
        prepared: from `quant.prepare`, before or after calibration.
        ranges: by the names that `quant.calibrate.ranges` lists as `layer`, as in ``{"input_0": (0.0, 1.0)}``.

    Raises:
        ValueError: a name that the model does not have, with those like it; or a pair that is no range. Nothing was
            changed.
    """
    _give(prepared, ranges, "calibrate.set_ranges", "set_ranges")


def _give(prepared: nn.Module, ranges: Mapping[str, Sequence[float]], where: str, verb: str) -> None:
    observers = _observers(prepared, verb)
    unknown = [name for name in ranges if name not in observers]
    if unknown:
        raise ValueError(f"{where}: the model has no range of {_with_near(unknown, list(observers), 'it has')}")
    pairs = {name: _pair(pair, f"{where}: {name!r}") for name, pair in ranges.items()}
    before = {name: observers[name].given for name in pairs}
    try:
        for name, pair in pairs.items():
            observers[name].give(*pair)
    except ValueError as error:
        for name, pair_before in before.items():
            observers[name].given = pair_before
        raise ValueError(f"{where}: {error}") from error


def _pair(pair: Any, where: str) -> tuple[float, float]:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise ValueError(f"{where} is {pair!r:.200}, expected two numbers, (low, high)")
    try:
        return float(pair[0]), float(pair[1])
    except OverflowError as error:
        raise ValueError(f"{where} has a number that no float holds") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _observers(prepared: nn.Module, verb: str) -> dict[str, Observer]:
    """The observers that choose a range per tensor, by the layer's name; those per channel only watch."""
    if not isinstance(prepared, nn.Module):
        raise TypeError(f"calibrate.{verb}: prepared is a {type(prepared).__name__}, expected an nn.Module")
    if any(isinstance(module, FakeQuantizeBase) for module in prepared.modules()):
        raise ValueError(
            f"calibrate.{verb}: the model is prepared for training, which moves its ranges; set them before, on the "
            "model from quant.prepare that quant.prepare_qat starts from"
        )
    observers: dict[str, Observer] = {}
    for name, module in prepared.named_modules():
        if isinstance(module, Observer) and not isinstance(module, ChannelMean) and module.scheme.axis is None:
            observers[name if module.name in observers else module.name or name] = module
    if not observers:
        raise ValueError(
            f"calibrate.{verb}: {type(prepared).__name__} has no observers; quant.prepare(model, example_inputs) puts "
            "them in"
        )
    return observers


def _agreed(prepared: nn.Module) -> dict[int, tuple[Tensor, Tensor]]:
    """(low, high) where values that are concatenated took one range together, by their observers' ids."""
    agreed: dict[int, tuple[Tensor, Tensor]] = {}
    for module in prepared.modules():
        ends = getattr(module, "agreed_ends", None)
        if ends is not None:
            agreed.update(ends())
    return agreed


def _entry(observer: Observer, agreed: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
    low, high = agreed or observer.range()
    qparams = choose_qparams(low, high, observer.scheme)
    info: dict[str, Any] = {
        "observer": _kind(observer),
        "scale": _short(qparams.scale.item()),
        "zero_point": int(qparams.zero_point),
    }
    if bool((observer.low <= observer.high).all()):
        info["seen"] = [_short(observer.low.item()), _short(observer.high.item())]
    return {"low": _short(low.item()), "high": _short(high.item()), "info": info}


def _kind(observer: Observer) -> str:
    """As recipes call it; "given" where the range is not the observer's choice."""
    names = {kind: name for name, kind in OBSERVERS.items()}
    kind = names.get(type(observer), type(observer).__name__)
    return kind if observer.given is None or observer.by_hand else "given"


def _short(value: float) -> float:
    """The number of fewest digits that is the same float32: 0.1 where the float32 as a float64 is 0.10000000149."""
    return float(str(np.float32(value)))


def _read(path: Path) -> dict[str, tuple[float, float]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refusing_twins)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("ranges"), dict):
        raise ValueError(f"{path}: expected what calibrate.save_ranges writes, with the format {FORMAT!r}")
    return {name: _ends(entry, f"{path}: {name!r}") for name, entry in data["ranges"].items()}


def _refusing_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two lines with one name, json would take the last without a word."""
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(f"{listed(list(map(repr, repeated)))} stands there twice")
    return dict(pairs)


def _ends(entry: Any, where: str) -> tuple[float, float]:
    expected = 'expected {"low": number, "high": number}, and perhaps "info"'
    if not isinstance(entry, dict) or not {"low", "high"} <= set(entry) <= {"low", "high", "info"}:
        raise ValueError(f"{where} is {json.dumps(entry):.200}, {expected}")
    return _pair((entry["low"], entry["high"]), where)


def _with_near(names: Sequence[str], known: Sequence[str], what: str) -> str:
    """Names for a message, each with those like it."""
    return listed([_like(name, known, what) for name in names])


def _like(name: str, known: Sequence[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, 3) or known
    return f"{name!r} ({what} {listed([repr(other) for other in near]) or 'none'})"

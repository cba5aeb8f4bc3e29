"""The form of a file's manifest, checked before anything is built from it.

A checksum shows damage, and no intent: whoever alters a file can compute it anew. What a description and programs say
of a static conversion is checked where they are read (`program_document.py`, `rebuild.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from quant.calibrate.json_forms import is_count, is_list, is_table, is_text
from quant.report import ReportEntry

SETTINGS: dict[str, Callable[[Any], bool]] = {
    "backend": lambda value: isinstance(value, str),
    "layer_name": lambda value: isinstance(value, str),
    "activation_bits": lambda value: type(value) is int and value in (8, 16),
    "terms": lambda value: type(value) is int and value in (1, 2),
    "per_row": lambda value: isinstance(value, bool),
    "described": lambda value: isinstance(value, str),
    "bits": lambda value: type(value) is int and 2 <= value <= 8,
}
"""Attributes of int8 modules that the float module does not determine, and what they may be."""


def check(manifest: Any) -> None:
    """Check the entries that `write` and `save` give every file, where they are there.

    Raises:
        ValueError: one is of another form; the message names it.
    """
    _expect(isinstance(manifest, dict), "the manifest", "a table")
    for name in ("checksums", "forms", "same"):
        _expect(is_table(manifest.get(name, {}), is_text), repr(name), "a table of texts")
    for name in ("static", "programs", "modules", "versions"):
        _expect(isinstance(manifest.get(name, {}), dict), repr(name), "a table")
    for name in ("static", "programs"):
        _expect(is_table(manifest.get(name, {}), lambda one: isinstance(one, dict)), repr(name), "a table of tables")
    for name, entry in manifest.get("modules", {}).items():
        _expect(_is_layer(entry), f"layer {name!r} of 'modules'", "its class and its settings")
    entries = manifest.get("report", [])
    _expect(is_list(entries, _is_entry), "'report'", "a list of entries")
    size = manifest.get("float_bytes")
    _expect(size is None or is_count(size), "'float_bytes'", "a number of bytes")


def check_setting(name: str, value: Any, others: tuple[str, ...]) -> None:
    """Check a setting of an int8 module; `others` are the further ones that its class keeps in files.

    Raises:
        ValueError: there is no such setting, or it has no such value.
    """
    known = SETTINGS.get(name)
    if known is None and name in others:
        known = _is_plain
    _expect(known is not None and known(value), f"setting {name!r}", f"one of an int8 layer, got {value!r:.80}")


def _expect(holds: bool, what: str, expected: str) -> None:
    if not holds:
        raise ValueError(f"{what} is not {expected}")


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _is_layer(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or not is_text(entry.get("class")):
        return False
    inner = entry.get("inner")
    return isinstance(inner, dict) and "" in inner and all(isinstance(one, dict) for one in inner.values())


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {one.name for one in dataclasses.fields(ReportEntry)}:
        return False
    sizes = ("bytes_before", "bytes_after")
    return all(is_count(value) if name in sizes else is_text(value) for name, value in entry.items())

"""Checks the text of a plan against the table csrc/core/plan/settings.inc, which the C++ reads too.

Elementwise operators of two bytes have their rows beside their kernels, in csrc/core/rows/binary.inc.

A row of that table is an operator with its settings, `name:kind`. `name?` may be missing, `kind|-` may be nothing. A
kind is a register (u8, f32, i64, any), a constant ($int8; $weight is int8 or narrow, $scales are float32 or by group),
a number with bounds, one of several words, or a list: `counts` is a list of `count`, `count/s` a list or one value for
all. Shapes are not known here; `plan_shapes` and the kernels look at them.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from quant.kernels import plan_sizes
from quant.kernels.recurrent.kind import kinds

_Check: TypeAlias = "Callable[[str, str], Any]"

CORE = Path(__file__).resolve().parent / "csrc" / "core"

MOST = 1 << 24
"""Of a window, a width, a factor: beyond every image, and no product of them overflows."""


@dataclass(frozen=True)
class Setting:
    """One setting in a row of the table."""

    name: str
    kind: str
    optional: bool
    nothing: bool

    @property
    def is_register(self) -> bool:
        """Whether it names an activation, or a list of some."""
        return self.kind.removesuffix("s") in REGISTERS

    @property
    def takes_sizes(self) -> bool:
        """Whether its numbers may be sizes of activations."""
        return self.kind.startswith("extent")

    def has_word(self, value: object) -> bool:
        """False where the value has to be one of several words and is not."""
        return "," not in self.kind or str(value) in self.kind.split(",")


@functools.cache
def table() -> dict[str, dict[str, Setting]]:
    """Operator -> its settings by name."""
    rows = {}
    for row in (
        *(CORE / "plan" / "settings.inc").read_text(encoding="ascii").strip().split("\n")[1:-1],
        *binary_rows(),
    ):
        op, *fields = row.split(" ")
        settings = {}
        for field in fields:
            name, kind = field.split(":")
            bare = name.removesuffix("?")
            settings[bare] = Setting(bare, kind.removesuffix("|-"), name != bare, kind.endswith("|-"))
        rows[op] = settings
    return rows


def binary_rows() -> list[str]:
    """The rows of operators whose kernels are functions of two bytes."""
    kernels = (CORE / "rows" / "binary.inc").read_text(encoding="ascii")
    calls = re.findall(r"^ +kind_of<\w+>\(((?:\s*\"[^\"]*\")+)\)", kernels, re.MULTILINE)
    return ["".join(re.findall(r"\"([^\"]*)\"", call)) for call in calls]


def integer(word: str) -> int:
    """Parse an int64.

    Raises:
        ValueError: the word is not one.
    """
    if not re.fullmatch(r"-?[0-9]+", word) or not -(2**63) <= int(word) < 2**63:
        raise ValueError(f"'{word}' is no integer")
    return int(word)


def number(word: str) -> float:
    """Parse a float64; infinities are valid, NaN is not.

    Raises:
        ValueError: the word is not a number, or too large for float64.
    """
    if word in ("inf", "-inf"):
        return float(word)
    if not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", word):
        raise ValueError(f"'{word}' is no number")
    value = float(word)
    if math.isinf(value) or (value == 0 and re.search("[1-9]", re.split("[eE]", word)[0])):
        raise ValueError(f"'{word}' is no number")
    return value


def index(word: str, mark: str) -> int:
    """The n of %n or $n.

    Raises:
        ValueError: the word does not have this mark and a number after it.
    """
    if len(word) < 2 or word[0] != mark:
        raise ValueError(f"expected {mark}number, got '{word}'")
    number = integer(word[1:])
    if word[1] == "-":
        raise ValueError(f"'{word}' is negative")
    return number


def parts(name: str, word: str) -> list[str]:
    """The items of a list, which may end with a comma.

    Raises:
        ValueError: an item is empty.
    """
    words = word.removesuffix(",").split(",")
    if "" in words:
        raise ValueError(f"{name} has an empty part")
    return words


def check(op: str, fields: Mapping[str, str]) -> None:
    """Check a line against the table.

    Args:
        op: its operator.
        fields: its settings, as text.

    Raises:
        ValueError: the operator or a setting is unknown, a setting is missing, or a value is not of its kind.
    """
    settings = table().get(op)
    if settings is None:
        raise ValueError("no such operation")
    for name in fields:
        if name not in settings:
            raise ValueError(f"{op} has no setting {name}")
    for setting in settings.values():
        if setting.name in fields:
            _check_setting(setting, fields[setting.name])
        elif not setting.optional:
            raise ValueError(f"has no {setting.name}")
    _check_together(op, {name: word for name, word in fields.items() if word != "-"})


def _check_together(op: str, fields: Mapping[str, str]) -> None:
    """Check settings that depend on each other."""
    if "quant_min" in fields and int(fields["quant_min"]) > int(fields["quant_max"]):
        raise ValueError("quant_min is above quant_max")
    if op == "attention" and fields["causal"] == "True" and "mask" in fields:
        raise ValueError("is causal and has a mask")
    if op == "cat":
        _check_rescaling(fields)
    if op == "interpolate":
        if ("size" in fields) == ("scale_factor" in fields):
            raise ValueError("expected one of size and scale_factor")
        if "size" in fields and fields.get("recompute_scale_factor") == "True":
            raise ValueError("has a size and no scale_factor to recompute")
        if fields.get("align_corners") == "True" and not fields["mode"].endswith("linear"):
            raise ValueError("aligns corners in a mode that has none")


def _check_rescaling(fields: Mapping[str, str]) -> None:
    """Check that a concatenation rescales either all of its inputs or none."""
    present = [name in fields for name in ("zero_points", "multipliers", "output_zero_point")]
    if any(present) and not all(present):
        raise ValueError("expected zero_points, multipliers and output_zero_point, or none of them")
    inputs = len(parts("tensors", fields["tensors"]))
    for name in ("zero_points", "multipliers") if all(present) else ():
        count = len(parts(name, fields[name]))
        if count != inputs:
            raise ValueError(f"{name} has {count} values, expected one for each of {inputs} inputs")


def _check_setting(setting: Setting, word: str) -> None:
    name, kind = setting.name, setting.kind
    if setting.nothing and word == "-":
        return
    if kind.startswith("$"):
        index(word, "$")
    elif kind in KINDS:
        KINDS[kind](name, word)
    elif "," in kind:
        if word not in kind.split(","):
            raise ValueError(f"{name} is {word}, expected one of {kind}")
    else:
        either = kind.endswith("/s")
        if "," not in word and not either:
            raise ValueError(f"{name} is {word}, expected a list (a list of one ends with a comma)")
        for part in parts(name, word):
            KINDS[kind.removesuffix("s").removesuffix("/")](name, part)


def _within(low: int, high: int) -> _Check:
    def checks(name: str, word: str) -> None:
        if not low <= integer(word) <= high:
            raise ValueError(f"{name} is {integer(word)}, expected {low} to {high}")

    return checks


def _positive(most: float) -> _Check:
    def checks(name: str, word: str) -> None:
        if not 0 < _float32(number(word)) <= most:
            raise ValueError(f"{name} is {word}, expected a positive number")

    return checks


def _real(name: str, word: str) -> None:
    if not math.isfinite(_float32(number(word))):
        raise ValueError(f"{name} is {word}, expected a finite number")


def _output(name: str, word: str) -> None:
    if word != "-":
        _within(1, MOST)(name, word)


def _size(name: str, word: str) -> None:
    if isinstance(plan_sizes.parse(word, Dimension), int):
        _within(-1, 1 << 40)(name, word)


def _place(name: str, word: str) -> None:
    plan_sizes.parse(word, Dimension)


class Dimension(NamedTuple):
    """The size of a register's dimension."""

    register: int
    dim: int


def _extent(name: str, word: str) -> None:
    if isinstance(plan_sizes.parse(word, Dimension), int):
        _within(1, MOST)(name, word)


def _flag(name: str, word: str) -> None:
    if word not in ("True", "False"):
        raise ValueError(f"{name} is {word}, expected True or False")


def _cell(name: str, word: str) -> None:
    known = [kind.name for kind in kinds() if kind.native]
    if word not in known:
        raise ValueError(f"{name} is {word}, expected one of {', '.join(known)}")


def _register(name: str, word: str) -> None:
    index(word, "%")


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


REGISTERS = ("u8", "f32", "i64", "any")
LARGEST = _float32(3.4028234663852886e38)
KINDS: dict[str, _Check] = {
    "byte": _within(0, 255),
    "count": _within(1, MOST),
    "pad": _within(0, MOST),
    "width": _within(-MOST, MOST),
    "integer": lambda name, word: integer(word),
    "output": _output,
    "size": _size,
    "extent": _extent,
    "place": _place,
    "real": _real,
    "number": lambda name, word: number(word),
    "positive": _positive(LARGEST),
    "factor": _positive(MOST),
    "flag": _flag,
    "cell": _cell,
    **dict.fromkeys(REGISTERS, _register),
}
"""Kind -> the check of one value of that kind, in lists too."""

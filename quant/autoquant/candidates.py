"""What a layer may be, and what a whole model may be: the points of the search."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quant.observers import PER_CALL
from quant.recipe import QConfig
from quant.static.dynamic_fallback import dynamic_part
from quant.variants import Layer


class Form(enum.Enum):
    """How a model computes."""

    FLOAT = "float"
    """As the user gave it."""
    STATIC = "static"
    """With ranges of calibration, by `quantize_static`."""
    DYNAMIC = "dynamic"
    """With ranges per call, by `quantize_dynamic`."""


@dataclass(frozen=True)
class Candidate:
    """What a layer may be in an int8 model.

    Attributes:
        name: in recipes of the search, checkpoints and tables.
        settings: of a layer; None leaves it float.
        fits: whether a layer may be worth trying so.
    """

    name: str
    settings: Callable[[Layer], QConfig | None]
    fits: Callable[[Layer], bool] = lambda layer: True


def _per_call(layer: Layer, **changes: Any) -> QConfig:
    """A layer's settings as a dynamic one."""
    return replace(dynamic_part(layer.qconfig), activation_observer=PER_CALL, **changes)


def _narrow(layer: Layer) -> QConfig:
    """With 4 bits a weight: of a linear layer in groups as large as one scale serves well, of a table by rows."""
    size = next((size for size in (64, 32) if layer.columns and layer.columns % size == 0), None)
    return _per_call(layer, weight_bits=4, group_size=size, per_channel=True, weight_symmetric=True)


INT8 = Candidate("int8", lambda layer: layer.qconfig)
NARROW = Candidate("4-bit weights", _narrow, lambda layer: layer.has_narrow_form and layer.qconfig.weight_bits > 4)
DYNAMIC = Candidate("dynamic", _per_call, lambda layer: layer.static)
WIDE = Candidate("int16 activations", lambda layer: replace(layer.qconfig, activation_bits=16))
FLOAT = Candidate("float", lambda layer: None)

CANDIDATES = {one.name: one for one in (INT8, NARROW, DYNAMIC, WIDE, FLOAT)}
"""By name. One more is a line here; the search asks `Bench.possible` which layers can be so."""


@dataclass(frozen=True)
class Plan:
    """A model of the search.

    Attributes:
        form: how it computes.
        choices: the layers that are not INT8, sorted by name, with the candidate's name.
    """

    form: Form
    choices: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, form: Form, choices: Mapping[str, str]) -> Plan:
        """With choices in any order."""
        return cls(form, tuple(sorted((name, one) for name, one in choices.items() if one != INT8.name)))

    @classmethod
    def read(cls, key: str) -> Plan:
        """The inverse of `key`."""
        form, *choices = json.loads(key)
        return cls(Form(form), tuple((name, one) for name, one in choices))

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return json.dumps([self.form.value, *map(list, self.choices)])

    @property
    def says(self) -> str:
        """For progress and tables."""
        if self.form is Form.FLOAT:
            return "float"
        counts = {one: sum(name == one for _, name in self.choices) for one in CANDIDATES}
        others = ", ".join(f"{count} {one}" for one, count in counts.items() if count)
        return f"{self.form.value}, {others}" if others else self.form.value

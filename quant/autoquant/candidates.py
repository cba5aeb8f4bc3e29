"""What a layer may be, and what a whole model may be: the points of the search."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quant.recipe import QConfig


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
        settings: from those of the recipe; None leaves the layer float.
    """

    name: str
    settings: Callable[[QConfig], QConfig | None]


INT8 = Candidate("int8", lambda qconfig: qconfig)
WIDE = Candidate("int16 activations", lambda qconfig: replace(qconfig, activation_bits=16))
FLOAT = Candidate("float", lambda qconfig: None)

CANDIDATES = {one.name: one for one in (INT8, WIDE, FLOAT)}
"""By name, the cheapest first. One more is a line here; the search asks `Calibrated.integer_layers` which layers can be
so, and tries a cheaper one first."""


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

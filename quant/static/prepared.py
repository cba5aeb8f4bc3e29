"""The record that prepare leaves on the model it returns, for convert, training and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.recipe import Recipe
from quant.runtime.programs import RESERVED

RECORD = f"{RESERVED}_prepared"
"""The attribute of a prepared model that holds its record."""


@dataclass
class Prepared:
    """The record that prepare leaves on the model it returns.

    Attributes:
        recipe: as given.
        islands: why modules are not part of a graph, by dotted name.
        called: dotted names of the modules that ran on the example inputs.
        example: shapes and dtypes of the example inputs, as JSON; None where they have no such form.
        state: the model's state that its forward changes, as it was before: calibration changes it.
        halves: of the tensors that are in a half type in the user's model, by name.
        measured: what was measured of a layer and decided by it, by its name, for the report.
    """

    recipe: Recipe
    islands: dict[str, str]
    called: set[str]
    example: Any
    state: dict[str, Any] = field(default_factory=dict)
    halves: dict[str, torch.dtype] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)


def is_prepared(model: nn.Module) -> bool:
    """Whether the model is what prepare returned: not a part of it, nor a wrapper around it."""
    return RECORD in model.__dict__


def record_of(prepared: nn.Module) -> Prepared:
    """The record that prepare left. Raises KeyError where `is_prepared` is False."""
    record: Prepared = prepared.__dict__[RECORD]
    return record


def leave_record(prepared: nn.Module, record: Prepared) -> None:
    """Make the model one that `is_prepared`."""
    prepared.__dict__[RECORD] = record

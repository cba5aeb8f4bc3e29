"""The record that prepare leaves on the model it returns, for convert, training and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from quant.recipe import Recipe


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

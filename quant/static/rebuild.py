"""What must be known of a static conversion to make it again from the float model, without data: plain JSON.

The user's own code says what the graph is, so no code and no graph is stored: capture runs again on example inputs of
the same shapes, the ranges are the stored ones, and the weights come from a state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import ACTIVATION_U8, QParams
from quant.prepare import RESERVED, prepare, runners
from quant.recipe import QConfig, Recipe
from quant.static.examples import CannotRebuild, decode

DESCRIPTION = RESERVED + "_description"
"""The attribute of a converted model that holds its description."""

VERSION = 1


def describe(converted: nn.Module) -> dict[str, Any]:
    """The JSON-ready description of a model from `convert`: everything but the tensors of its state_dict.

    Raises:
        ValueError: the model is not from `convert`.
    """
    found = converted.__dict__.get(DESCRIPTION)
    if not isinstance(found, dict):
        raise ValueError(
            f"{type(converted).__name__}: expected a model from quant.convert, this one has no description"
        )
    return found


def make_description(
    example: Any, ranges: Mapping[str, Mapping[str, QParams]], layers: Mapping[str, QConfig], backend: str | None
) -> dict[str, Any]:
    """The description of a conversion; `example` is None where it cannot be written in JSON."""
    numbers = {
        unit: {name: [float(one.scale), int(one.zero_point)] for name, one in slots.items()}
        for unit, slots in ranges.items()
    }
    settings = {name: qconfig.to_dict() for name, qconfig in layers.items()}
    return {"version": VERSION, "example": example, "ranges": numbers, "layers": settings, "backend": backend}


def rebuild(model: nn.Module, description: Mapping[str, Any], example_inputs: Any = None) -> nn.Module:
    """The converted model that `description` is of, with weights made from `model`; load its state_dict afterwards.

    Args:
        model: the float model, of the same code.
        example_inputs: as for `prepare`; None takes tensors of ones in the shapes that the description has.

    Raises:
        CannotRebuild: the model's layers or ranges are not those of the description.
    """
    from quant.convert import convert  # which writes descriptions, and so needs this module

    if description.get("version") != VERSION:
        raise CannotRebuild(f"description has version {description.get('version')!r}, expected {VERSION}")
    if example_inputs is None:
        example_inputs = decode(description["example"])
    layers = {name: QConfig.from_dict(data) for name, data in description["layers"].items()}
    try:
        prepared = prepare(model, example_inputs, Recipe(dict(layers), default=None))
    except ValueError as error:
        raise CannotRebuild(f"{type(model).__name__} does not fit the description: {error}") from error
    found = runners(prepared)
    for unit, slots in description["ranges"].items():
        have = set(found[unit].plan.slots) if unit in found else set()
        if have != set(slots):
            raise CannotRebuild(
                f"{type(model).__name__}{'.' + unit if unit else ''}: ranges differ from the description's in "
                f"{sorted(have ^ set(slots))}; is it the model that was converted? Where its forward depends on the "
                "data, give example_inputs"
            )
        for name, (scale, zero_point) in slots.items():
            found[unit].set_point(name, Known(scale, zero_point))
    return convert(prepared, description["backend"])


class Known(nn.Module):
    """Stands where an observer stood, with a range that is decided."""

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        scales, points = torch.tensor(scale, dtype=torch.float32), torch.tensor(zero_point, dtype=torch.int32)
        self.known = QParams(scales, points, ACTIVATION_U8)

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def qparams(self) -> QParams:
        """The range."""
        return self.known

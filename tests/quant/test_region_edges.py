"""Float views at the ends of native calls: which are computed there, and which torch gives without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.programs import RESERVED
from quant.static.native import SMALL, Schedule


class Viewed(nn.Module):
    """A view, a layer, another view, and a sum that has no native form."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.layer = before, after, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x))).cumsum(-1)


def alone(before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], rows: int) -> list[str]:
    """The calls that run by themselves beside the one native call, after the model was held against its steps."""
    torch.manual_seed(0)
    model, x = Viewed(before, after).eval(), torch.randn(1, rows, 16)
    q = quant.quantize_static(model, [x], progress=False)
    with torch.no_grad():
        assert (q(x) - model(x)).norm() < 0.05 * model(x).norm()
    runner: Any = q._modules[RESERVED]
    found: Schedule = runner.program.schedule
    assert len(found.regions) == 1
    return [step.step.rpartition("_")[0] for step in found.steps if step not in found.regions]  # type: ignore[union-attr]


FEW, MANY = 8, SMALL // 16 + 1


def same(x: Tensor) -> Tensor:
    return x


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_view_before_the_first_layer_is_computed_with_it(rows: int) -> None:
    assert alone(turned, same, rows) == ["cumsum"]


@pytest.mark.parametrize(("view", "rows", "by_torch"), [
    (turned, FEW, []), (turned, MANY, ["transpose"]), (flat, MANY, []), (lambda x: flat(turned(x)), MANY, []),
], ids=["small", "large", "in order", "copied anyway"])  # fmt: skip
def test_a_view_after_the_last_layer(view: Callable[[Tensor], Tensor], rows: int, by_torch: list[str]) -> None:
    assert alone(same, view, rows) == [*by_torch, "cumsum"]


class ReadByOthers(nn.Module):
    """A view of the input that the layer and a float call read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.layer(x).cumsum(-1) + x.cumsum(-1)


@pytest.mark.parametrize(("rows", "by_torch"), [(FEW, False), (MANY, True)])
def test_a_large_view_that_others_read_is_not_copied(rows: int, by_torch: bool) -> None:
    q = quant.quantize_static(ReadByOthers().eval(), [torch.randn(1, rows, 16)], progress=False)
    runner: Any = q._modules[RESERVED]
    steps = [getattr(step, "step", "") for step in runner.program.schedule.steps]
    assert any("transpose" in step for step in steps) is by_torch

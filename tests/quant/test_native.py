"""Planned runs of converted models: what is computed together, and that nothing else changes by it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.prepare import RESERVED
from quant.static import ops
from quant.static.native import Schedule


class Net(nn.Module):
    """Convolutions, a look-up, pooling, a reshape by the batch's size, a product that has no native form, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(), nn.MaxPool2d(2))
        self.mix, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.mix(x) @ x.transpose(2, 3)
        return self.head(x.view(x.shape[0], -1))


def converted(x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    prepared = quant.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        return quant.convert(prepared)


def schedule(model: nn.Module) -> Schedule:
    runner: Any = model._modules[RESERVED]
    found: Schedule = runner.schedule(runner.program)
    return found


def by_steps(model: nn.Module, x: Tensor) -> Tensor:
    with mock.patch.object(ops, "plans", return_value=None):
        y: Tensor = model(x)
    return y


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_regions_reach_up_to_what_has_no_native_form() -> None:
    model = converted(X)
    made = schedule(model)
    assert len(made.regions) == 2
    assert list(made.reasons.values()) == ["matmul has no native kernel"]
    entry = quant.summary(model)["(planned run)"]
    assert "native calls: 2" in entry.detail
    assert "matmul has no native kernel" in entry.detail


@pytest.mark.parametrize("batch", [1, 5])
def test_planned_and_step_by_step_are_the_same(batch: int) -> None:
    model, x = converted(X), torch.randn(batch, 3, 8, 8)
    assert torch.equal(model(x), by_steps(model, x))
    assert torch.equal(model.features(x), by_steps(model.features, x))  # type: ignore[operator, arg-type]


def test_other_numbers_make_another_plan() -> None:
    model = converted(X)
    model(X)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["head.weight_scale"] *= 2
    state["mix.input_scale"] *= 1.5
    model.load_state_dict(state)
    assert torch.equal(model(X), by_steps(model, X))
    model.head.q_weight = -model.head.q_weight  # type: ignore[union-attr, operator]
    assert torch.equal(model(X), by_steps(model, X))


def test_copies_share_nothing() -> None:
    model = converted(X)
    before = model(X)
    twin = copy.deepcopy(model)
    twin.head.q_weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(twin(X), by_steps(twin, X))
    assert not torch.equal(twin(X), before)
    assert torch.equal(model(X), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_graph_takes_any_batch() -> None:
    model = converted(X)
    model(X)
    graph = torch.export.export(model, (X,), dynamic_shapes={"args": ({0: torch.export.Dim.DYNAMIC},)})
    x = torch.randn(7, 3, 8, 8)
    assert torch.equal(graph.module()(x), model(x))

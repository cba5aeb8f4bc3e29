"""Layers that an island calls for some inputs only, and not for the example inputs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.static.runner import GraphRunner, runners
from quant.static.simulation import simulating


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


class ByValues(nn.Module):
    """One block for inputs of positive mean, another one for others."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.head = block(), block(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.positive(x) if x.mean() > 0 else self.negative(x))
        return out


class SetsFirst(ByValues):
    """Sets something on a block before it calls it, which the block by itself does not show."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.by = nn.Linear(16, 16), 0.0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) + self.by
            return out

    def __init__(self) -> None:
        super().__init__()
        self.negative = self.Shifted()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() < 0:
            self.negative.by = float(x.mean())
        return super().forward(x)


class Counts(ByValues):
    """Counts the calls of a block, and decides by the count too."""

    def __init__(self) -> None:
        super().__init__()
        self.negatives = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return super().forward(x)
        self.negatives += 1
        out: Tensor = self.head(self.negative(x) if self.negatives < 3 else self.positive(x))
        return out


class Routed(nn.Module):
    """A mixture of experts: each row goes to the one that it is for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = x.abs().argmax(1) // 4
        for place, expert in enumerate(self.experts):
            rows = (chosen == place).nonzero()[:, 0]
            if rows.numel():
                out[rows] = expert(x[rows])
        return out


def positive(count: int = 32) -> Tensor:
    return torch.randn(count, 16).abs()


def outcomes(model: nn.Module) -> dict[str, str]:
    return {one.name: one.outcome for one in quant.summary(model).entries}


def relative(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).norm() / expected.norm())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shown", [True, False], ids=["by an example", "by calibration"])
@torch.no_grad()
def test_a_branch_that_calibration_takes_becomes_int8(shown: bool, tmp_path: Path) -> None:
    model = ByValues().eval()
    prepared = quant.prepare(model, positive(), examples=[-positive()] if shown else [])
    for _ in range(2):
        x = positive()
        assert torch.equal(prepared(x), model(x))
        assert torch.equal(prepared(-x), model(-x))
    q = quant.convert(prepared)
    assert {outcomes(q)[f"{name}.{place}"] for name in ("positive", "negative") for place in (0, 2)} == {"int8"}
    for x in (positive(), -positive()):
        assert relative(model(x), q(x)) < 0.03
        with simulating(prepared):
            assert torch.allclose(prepared(x), q(x), atol=1e-5)
    quant.save(q, tmp_path / "q.q8")
    again = quant.load(tmp_path / "q.q8", model=ByValues())
    assert torch.equal(again(-x), q(-x))


@torch.no_grad()
def test_the_first_call_of_a_branch_is_observed() -> None:
    prepared = quant.prepare(ByValues().eval(), positive())
    x = -positive()
    prepared(positive())
    prepared(x)
    runner = runners(prepared)["negative"]
    (slot,) = {runner.fused.slot_of[step.inputs[0]] for step in runner.fused.steps if step.name == "0"}
    qparams = runner.qparams(slot)
    low = float((0 - qparams.zero_point.int()) * qparams.scale)
    assert low == pytest.approx(float(x.min()), rel=0.2)


@torch.no_grad()
def test_a_branch_that_nothing_calls_is_float_and_named() -> None:
    prepared = quant.prepare(ByValues().eval(), positive())
    prepared(positive())
    q = quant.convert(prepared)
    entry = quant.summary(q)["negative.0"]
    assert entry.outcome == "float"
    assert entry.detail.startswith("called by no example and no batch of data; (root), an island")


@torch.no_grad()
def test_a_branch_that_an_example_alone_calls_is_float_and_named() -> None:
    model = ByValues().eval()
    prepared = quant.prepare(model, positive(), examples=[-positive()])
    assert isinstance(runners(prepared)["negative"], GraphRunner)
    prepared(positive())
    q, x = quant.convert(prepared), -positive()
    assert quant.summary(q)["negative.0"].detail == "an example calls it, and no batch of data"
    assert relative(model(x), q(x)) < 0.1  # calibration saw the head's input for positive ones alone
    with simulating(prepared):
        assert torch.allclose(prepared(x), q(x), atol=1e-5)


@torch.no_grad()
def test_a_simulation_captures_nothing() -> None:
    prepared = quant.prepare(ByValues().eval(), positive())
    prepared(positive())
    with simulating(prepared):
        prepared(-positive())
    assert "negative" not in runners(prepared)


@torch.no_grad()
def test_what_an_island_sets_before_its_call_is_seen() -> None:
    model = SetsFirst().eval()
    prepared = quant.prepare(copy.deepcopy(model), positive())
    for _ in range(2):
        prepared(positive())
        prepared(-positive())
    q = quant.convert(prepared)
    assert quant.summary(q)["negative"].outcome == "float"
    assert outcomes(q)["negative.layer"] == "int8"
    x = -positive()
    assert relative(model(x), q(x)) < 0.03


@torch.no_grad()
def test_state_of_the_island_is_as_without_the_capture() -> None:
    model = Counts().eval()
    prepared = quant.prepare(model, positive())
    for _ in range(4):
        prepared(-positive())
        prepared(positive())
    assert prepared.negatives == 4
    q = quant.convert(prepared)
    assert q.negatives == 0
    assert outcomes(q)["negative.0"] == "int8"


@torch.no_grad()
def test_every_expert_that_calibration_calls_becomes_int8() -> None:
    model = nn.Sequential(nn.ReLU(), Routed(), nn.Linear(16, 16)).eval()
    few, many = torch.randn(1, 16), torch.randn(256, 16)
    prepared = quant.prepare(model, few)
    for _ in range(2):
        prepared(many)
    q = quant.convert(prepared)
    assert all(outcome == "int8" for name, outcome in outcomes(q).items() if name.endswith((".0", ".2")))
    assert relative(model(many), q(many)) < 0.05


@pytest.mark.parametrize("shown", [True, False], ids=["by an example", "by nothing"])
def test_a_branch_is_trained_for_int8_where_an_example_calls_it(shown: bool) -> None:
    prepared = quant.prepare_qat(ByValues(), positive(), examples=[-positive()] if shown else [])
    optimiser = torch.optim.SGD(prepared.parameters(), lr=0.01)
    before = prepared.negative[0].weight.detach().clone()  # type: ignore[index]
    for _ in range(3):
        for x in (positive(), -positive()):
            optimiser.zero_grad()
            prepared(x).square().sum().backward()
            optimiser.step()
    assert not torch.equal(before, prepared.negative[0].weight)  # type: ignore[index]
    q = quant.convert(prepared)
    x = -positive()
    assert outcomes(q)["negative.0"] == ("int8" if shown else "float")
    with torch.no_grad():
        assert torch.allclose(prepared.eval()(x), q(x), atol=1e-4)


def test_a_copy_of_a_prepared_model_waits_by_itself() -> None:
    prepared = quant.prepare(ByValues().eval(), positive())
    prepared(positive())
    other = copy.deepcopy(prepared)
    other(-positive())
    assert "negative" in runners(other)
    assert "negative" not in runners(prepared)


class Copies(ByValues):
    """Calls a shallow copy, with another bias, of the block that its example does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.negative = nn.Linear(16, 16)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return super().forward(x)
        other = copy.copy(self.negative)
        other._parameters = dict(other._parameters, bias=nn.Parameter(torch.ones(16)))
        out: Tensor = self.head(other(x))
        return out


@torch.no_grad()
def test_a_shallow_copy_of_what_waits_runs_with_its_own_parameters() -> None:
    model = Copies().eval()
    prepared = quant.prepare(model, positive())
    for x in (positive(), -positive()):
        assert torch.equal(prepared(x), model(x))
    for x in (positive(), -positive()):
        assert relative(model(x), quant.convert(prepared)(x)) < 0.05

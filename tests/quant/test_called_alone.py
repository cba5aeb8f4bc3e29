"""Parts of a model that its user calls by themselves, as `generate()` calls an encoder, and programs nobody calls."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.keys import ProgramKey
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.runner import all_runners
from quant.static.simulation import simulating


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, *, doubled: bool = False) -> Tensor:
        y = self.last(self.first(x).relu())
        return y * 2 if doubled else y


class Model(nn.Module):
    """Takes a sequence, or what its encoder made of one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 4)

    def forward(self, x: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x) if hidden is None else hidden)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval()


def in_two(model: nn.Module, x: Tensor) -> Tensor:
    """Encoder and rest, called one after the other."""
    hidden = model.encoder(x, doubled=True)  # type: ignore[operator]
    found: Tensor = model(hidden=hidden)
    return found


def calibrated(model: nn.Module) -> nn.Module:
    prepared = quant.prepare(model, torch.randn(8, 16))
    with torch.no_grad():
        for _ in range(4):
            in_two(prepared, torch.randn(8, 16))
    return prepared


def relative(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).norm() / expected.norm())


@torch.no_grad()
def test_a_part_that_calibration_calls_alone_has_a_program(model: nn.Module) -> None:
    prepared = calibrated(model)
    runner = all_runners(prepared)[ProgramKey("encoder")]
    assert runner.alone
    assert runner.has_seen()
    q, x = quant.convert(prepared), torch.randn(8, 16)
    program = q.encoder._modules[RESERVED]  # type: ignore[union-attr]
    assert isinstance(program, ProgramRunner)
    assert [region.steps for region in program.program.schedule.regions]
    assert relative(in_two(model, x), in_two(q, x)) < 0.02
    with simulating(prepared):
        assert torch.allclose(in_two(prepared, x), in_two(q, x), atol=1e-5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert relative(model(x), q(x)) < 0.02  # nobody calibrated it as a whole
    assert [one.category for one in said] == [quant.types.UncapturedCall]


@torch.no_grad()
def test_a_part_shares_observers_with_the_module_around_it(model: nn.Module) -> None:
    prepared = quant.prepare(model, torch.randn(8, 16))
    prepared(torch.randn(8, 16))
    prepared.encoder(torch.randn(8, 16))  # type: ignore[operator]
    found = {str(key): runner for key, runner in all_runners(prepared).items()}
    whole, part = ({slot.name: slot for slot in found[name].fused.slots.values()} for name in ("", "encoder"))
    shared = [name for name in part if found["encoder"].observer(name) in set(found[""].observers.values())]
    assert shared == ["first"]
    assert "encoder.first" in whole
    assert found[""].fused.shared == {"encoder.first", "encoder.last"}
    assert found["encoder"].fused.shared == {"first", "last"}


@torch.no_grad()
def test_a_part_keeps_the_users_own_forward(model: nn.Module) -> None:
    own = model.encoder.forward
    model.encoder.forward = lambda x, **settings: own(x, **settings) + 1  # type: ignore[assignment, operator]
    prepared, x = calibrated(model), torch.randn(8, 16)
    q = quant.convert(prepared)
    assert relative(in_two(model, x), in_two(q, x)) < 0.02


@torch.no_grad()
def test_programs_of_parts_and_dropped_ones_are_saved(model: nn.Module, tmp_path: Path) -> None:
    q, x = quant.convert(calibrated(model)), torch.randn(8, 16)
    quant.save(q, tmp_path / "q.q8")
    restored = quant.load(tmp_path / "q.q8", model=Model())
    assert torch.equal(in_two(restored, x), in_two(q, x))


class Branching(nn.Module):
    """An island around an embedding, which is captured by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 64), nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.words(ids)
        return self.head(y if y.sum() > 1e9 else y + 1)


@torch.no_grad()
def test_an_embedding_in_an_island_becomes_int8_and_is_simulated() -> None:
    torch.manual_seed(0)
    model, ids = Branching().eval(), torch.randint(50, (4, 6))
    prepared = quant.prepare(model, ids)
    prepared(ids)
    q = quant.convert(prepared)
    assert quant.summary(q)["words"].outcome == "int8"
    with simulating(prepared):
        simulated = prepared(ids)
    assert torch.allclose(simulated, q(ids), atol=1e-5)
    assert not torch.allclose(prepared(ids), q(ids), atol=1e-5)


@torch.no_grad()
def test_a_part_without_a_program_is_simulated_as_its_stretch_of_the_graph(model: nn.Module) -> None:
    prepared, x = quant.prepare(model, torch.randn(8, 16)), torch.randn(8, 16)
    prepared(x)
    q = quant.convert(prepared)
    with simulating(prepared):
        simulated = prepared.encoder(x)  # type: ignore[operator]
    assert list(map(str, all_runners(prepared))) == [""]  # a simulation changes nothing
    assert torch.allclose(simulated, q.encoder(x), atol=1e-5)  # type: ignore[operator]
    assert not torch.allclose(model.encoder(x), q.encoder(x), atol=1e-5)  # type: ignore[operator]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, signed: bool = False) -> Tensor:
        y = self.norm(self.conv(x))
        return self.head((y.tanh() if signed else y.relu()).mean(-1))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_a_call_that_no_program_stands_for_is_simulated_layer_by_layer() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(6, 4, 20)
    model(x)
    model.eval()
    prepared = quant.prepare(model, x)
    prepared(x)
    q = quant.convert(prepared)
    with simulating(prepared):
        simulated = prepared(3 * x, signed=True)
    assert torch.allclose(simulated, q(3 * x, signed=True), atol=1e-5)
    assert not torch.allclose(model(3 * x, signed=True), q(3 * x, signed=True), atol=1e-5)


@torch.no_grad()
def test_exact_sums_are_those_of_the_integers_to_the_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 64)).eval()
    prepared = quant.prepare(model, torch.randn(8, 64))
    prepared(torch.randn(256, 64))
    q, x = quant.convert(prepared), torch.randn(2000, 64)
    with simulating(prepared, exact=True):
        assert torch.equal(prepared(x), q(x))
    with simulating(prepared):
        assert not torch.equal(prepared(x), q(x))

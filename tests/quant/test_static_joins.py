"""Concatenations of values that have readers elsewhere: ranges of their own, and what agrees on one."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import dispatch
from quant.kernels.backends.compiled import CompiledBackend
from safetensors.torch import load_file
from torch import Tensor, nn

import quant
from quant.fusion.fused_graph import FusedGraph
from quant.runtime.instructions import IntegerMove
from quant.runtime.programs import RESERVED
from quant.static.runner import runners

KEPT = Path(__file__).parent / "artefacts"


def decibels(expected: Tensor, found: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (expected - found).square().sum()))


class Beside(nn.Module):
    """A small value that is joined to one `factor` times as large, and is read by a layer of its own too."""

    def __init__(self, factor: float = 50.0, how: str = "cat", dim: int = 1) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.own, self.joined = nn.Conv2d(8, 4, 1), nn.Conv2d(16 if how == "cat" and dim == 1 else 8, 4, 1)
        self.factor, self.how, self.dim = factor, how, dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = torch.tanh(self.a(x))
        parts = (
            [small, torch.tanh(self.b(x)) * self.factor, small]
            if self.how == "stack"
            else [small, self.b(x) * self.factor]
        )
        if self.how == "stack":
            y = torch.stack(parts, dim=self.dim).flatten(0, 1)
        else:
            y = torch.cat(parts, dim=self.dim)
        return self.own(small), self.joined(y)


def images(seed: int = 1) -> Tensor:
    return torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def fused_graph_of(prepared: nn.Module) -> FusedGraph:
    [runner] = runners(prepared).values()
    return runner.fused


def rescaled(q: nn.Module) -> list[dict[Any, Any]]:
    """How the joins of a converted model rescale their inputs."""
    runner: Any = q._modules[RESERVED]
    moves = [one for one in runner.program.instructions if isinstance(one, IntegerMove)]
    return [one.rescaled for one in moves if one.rescaled]


def made(factor: float = 50.0, how: str = "cat", dim: int = 1) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Float, calibrated and converted."""
    torch.manual_seed(0)
    model = Beside(factor, how, dim).eval()
    prepared = quant.prepare(model, images())
    quant.calibrate.run(prepared, [images(seed) for seed in range(4)], progress=False)
    return model, prepared, quant.convert(prepared)


@pytest.mark.parametrize(("how", "dim"), [("cat", 1), ("cat", 0), ("cat", -1), ("stack", 0)], ids=str)
def test_a_small_part_keeps_its_precision_for_those_who_read_it_elsewhere(how: str, dim: int) -> None:
    model, prepared, q = made(how=how, dim=dim)
    with torch.no_grad():
        expected, found = model(images()), q(images())
    assert decibels(expected[0], found[0]) > 34
    assert decibels(expected[1], found[1]) > 34
    assert len(rescaled(q)) == 1
    assert quant.parity(prepared, q, [images()]).holds


def test_a_comparison_shows_what_rescaling_costs() -> None:
    model, _, q = made()
    [step] = [step for step in quant.compare(model, q, [images()]).steps if step.kind == "cat"]
    assert step.name == "cat_5"
    assert 40 < step.own_sqnr < 70
    assert not any(step.kind == "cat" for step in quant.compare(*made(1.0)[::2], [images()]).steps)


def test_planned_runs_steps_and_the_reference_give_the_same_bits() -> None:
    _, _, q = made()
    expected = q(images())
    with mock.patch.object(CompiledBackend, "plans", False):
        steps = q(images())
    with dispatch.use("reference"):
        reference = q(images())
    for other in (steps, reference):
        assert all(torch.equal(one, two) for one, two in zip(expected, other, strict=True))


def test_what_is_loaded_computes_the_same(tmp_path: Path) -> None:
    _, _, q = made()
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=Beside())
    assert all(torch.equal(one, two) for one, two in zip(q(images()), loaded(images()), strict=True))
    assert rescaled(loaded) == rescaled(q)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.2])
def test_ranges_that_nearly_agree_are_one_and_copied(factor: float) -> None:
    _, prepared, q = made(factor)
    [(whole, part)] = fused_graph_of(prepared).joined
    [runner] = runners(prepared).values()
    one, other = runner.qparams(whole), runner.qparams(part)
    assert (float(one.scale), int(one.zero_point)) == (float(other.scale), int(other.zero_point))
    assert rescaled(q) == []
    assert quant.parity(prepared, q, [images()]).holds


def test_what_only_the_concatenation_reads_has_its_range() -> None:
    """Rounded once; and nothing but the concatenation's inputs is observed."""

    class Inception(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(11, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            parts = [F.relu(self.a(x)), 9 * self.b(x), torch.cat([self.a(x)[:, :3]], 1)]
            return self.c(torch.cat([F.max_pool2d(part, 2) for part in parts], 1))

    fused = fused_graph_of(quant.prepare(Inception().eval(), images()))
    assert fused.joined == ()
    [slot] = {fused.slot_of[step.output] for step in fused.steps if step.operator.name in ("cat", "max_pool")}
    assert len(fused.slots[slot].observed) == 3


def test_a_dense_block_has_a_range_for_each_part_that_differs() -> None:
    """Every layer joins all before it; one part is far larger than those before it."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * index, 4, 3, padding=1) for index in range(4))
            self.last = nn.Conv2d(19, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            parts, seen = [x], []
            for index, layer in enumerate(self.layers):
                seen.append(layer(torch.cat(parts, 1)))
                parts.append(seen[-1] * (40.0 if index == 2 else 1.0))
            return *seen, self.last(torch.cat(parts, 1))

    torch.manual_seed(0)
    model, data = Dense().eval(), [images(seed) for seed in range(4)]
    q = quant.quantize_static(model, data, progress=False)
    with torch.no_grad():
        pairs = zip(model(data[0]), q(data[0]), strict=True)
        assert min(decibels(expected, found) for expected, found in pairs) > 28
    assert 0 < len(rescaled(q)) < 5


def test_states_of_a_recurrent_layer_keep_their_range_beside_something_large() -> None:
    class Beam(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.skip, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.cat([self.rnn(x)[0], 50 * self.skip(x)], dim=-1))

    torch.manual_seed(0)
    model, data = Beam().eval(), [torch.randn(4, 6, 8) for _ in range(4)]
    prepared = quant.prepare(model, data[0])
    quant.calibrate.run(prepared, data, progress=False)
    q = quant.convert(prepared)
    [runner] = runners(prepared).values()
    assert float(runner.qparams("rnn.h_l0").scale) < 2 / 255
    assert quant.parity(prepared, q, data).holds
    with torch.no_grad():
        assert decibels(model(data[0]), q(data[0])) > 35


def test_training_rounds_parts_by_their_own_ranges(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Beside().eval()
    p = quant.prepare_qat(model, images()).train()
    schedule = quant.QATSchedule(p, steps=8)
    for step in range(8):
        sum(y.square().mean() for y in p(images(step))).backward()
        schedule.step()
    q = quant.convert(p)
    p.eval()
    assert len(rescaled(q)) == 1
    assert quant.parity(p, q, [images()]).holds
    with torch.no_grad():
        expected, simulated, found = model(images()), p(images()), q(images())
    for place in range(2):
        assert decibels(expected[place], found[place]) > 30
        assert decibels(simulated[place], found[place]) > 50
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=Beside())
    assert all(torch.equal(one, two) for one, two in zip(found, loaded(images()), strict=True))


def test_training_goes_on_from_calibrated_ranges() -> None:
    _, prepared, _ = made()
    p = quant.prepare_qat(prepared).eval()
    q = quant.convert(p)
    assert len(rescaled(q)) == 1
    assert quant.parity(p, q, [images()]).holds


class Before(nn.Module):
    """A concatenation with another reader, and a stream with a layer norm: older versions plan both otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)
        self.norm, self.d, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        small = torch.tanh(self.a(x))
        y = self.c(torch.cat([small, 20 * self.b(x)], dim=1))
        y = self.d(small) + y
        y = y + self.d(self.norm(y))
        return self.head(y)


def test_a_file_is_planned_by_the_rules_that_it_was_written_by(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    loaded = quant.load(KEPT / "joined.q8", model=Before())
    assert torch.equal(loaded(x), load_file(KEPT / "joined.expected")["output"])
    quant.save(loaded, tmp_path / "again.q8")
    assert torch.equal(quant.load(tmp_path / "again.q8", model=Before())(x), loaded(x))
    assert rescaled(loaded) == []
    new = quant.quantize_static(Before().eval(), [x], progress=False)
    assert len(rescaled(new)) == 1


def test_rules_of_a_later_version_are_refused() -> None:
    from quant.artefact.rebuild import rebuild
    from quant.static.description import describe

    _, _, q = made()
    description = copy.deepcopy(describe(q)) | {"rules": 99}
    with pytest.raises(ValueError, match="fused by rules 99, this version knows 1 to"):
        rebuild(Beside(), description, {})


def test_a_range_that_is_given_to_a_joined_value_is_taken_as_it_is(tmp_path: Path) -> None:
    model, prepared, before = made(1.0)  # which agree
    assert rescaled(before) == []
    slots = {pair for pairs in fused_graph_of(prepared).joined for pair in pairs}
    ends = runners(prepared)[""].agreed_ends()
    assert len(ends) == len(slots) == 2

    file = tmp_path / "ranges.json"
    quant.calibrate.save_ranges(prepared, file)
    fresh = quant.prepare(model, images())
    quant.calibrate.run(fresh, [images(seed) for seed in range(4)], progress=False)  # which corrects the same biases
    quant.convert(fresh)
    quant.calibrate.load_ranges(fresh, file)
    again = quant.convert(fresh)
    with torch.no_grad():
        assert all(torch.equal(one, other) for one, other in zip(before(images()), again(images()), strict=True))

    name = next(name for name in slots if name.startswith("tanh"))
    quant.calibrate.set_ranges(prepared, {name: (-0.25, 0.25)})
    edited = runners(prepared)[""].qparams(name)
    assert float(edited.scale) == pytest.approx(0.5 / 255)
    assert len(rescaled(quant.convert(prepared))) == 1

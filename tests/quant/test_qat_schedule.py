"""QATSchedule and distill_loss: phases in order, state that goes on, and the closed form of the loss."""

from __future__ import annotations

import json

import pytest
import torch
from quant.observers import FakeQuantizeBase
from torch import Tensor, nn

import quant
from quant.qat import tracked_ranges
from quant.qat.runner import TrainingRunner
from quant.recipe import QConfig, Recipe


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x = torch.randn(8, 3, 6, 6)
    return quant.prepare_qat(model, x).train(), x


def state(prepared: nn.Module) -> tuple[bool, bool, bool, bool]:
    """(weights rounded, activations rounded, ranges moving, norms frozen)."""
    runner = prepared._modules["_quant"]
    assert isinstance(runner, TrainingRunner)
    points = [point for point in runner.modules() if isinstance(point, FakeQuantizeBase)]
    quantizing, observing = {bool(one.quantizing) for one in points}, {bool(one.observing) for one in points}
    assert len(quantizing) == len(observing) == 1
    return bool(runner.rounding), quantizing.pop(), observing.pop(), bool(runner.norms_frozen)


def test_phases_come_in_order() -> None:
    prepared, x = made()
    assert state(prepared) == (True, True, True, False)
    schedule = quant.QATSchedule(prepared, steps=20)
    seen = []
    for _ in range(20):
        seen.append(state(prepared))
        prepared(x)
        schedule.step()
    assert seen == (
        [(False, False, True, False)]  # 5 % of 20
        + [(True, True, True, False)] * 11
        + [(True, True, False, False)] * 3
        + [(True, True, False, True)] * 5
    )


def test_phases_where_the_user_wants_them() -> None:
    prepared, x = made()
    schedule = quant.QATSchedule(prepared, steps=9, observe=2, freeze_norms_at=3, freeze_ranges_at=9)
    seen = []
    for _ in range(4):
        prepared(x)
        schedule.step()
        seen.append(list(schedule.phases))
    assert seen == [["observe"], ["observe", "round"], *[["observe", "round", "freeze_norms"]] * 2]
    assert repr(schedule).startswith("QATSchedule(step 4 of 9, now freeze_norms")


def test_one_step_of_training_still_rounds_after_it() -> None:
    prepared, x = made()
    schedule = quant.QATSchedule(prepared, steps=1)
    prepared(x)
    schedule.step()
    assert state(prepared) == (True, True, False, True)
    assert quant.QATSchedule(prepared, steps=100).starts["round"] == 0


def test_state_is_plain_and_goes_on() -> None:
    prepared, x = made()
    schedule = quant.QATSchedule(prepared, steps=20)
    for _ in range(13):
        prepared(x)
        schedule.step()
    saved = json.loads(json.dumps(schedule.state_dict()))
    other, _ = made()
    other.load_state_dict(prepared.state_dict())
    resumed = quant.QATSchedule(other, steps=20, observe=1)
    resumed.load_state_dict(saved)
    assert resumed.phases == schedule.phases
    assert state(other) == state(prepared)
    with pytest.raises(ValueError, match="build it with the same arguments"):
        quant.QATSchedule(other, steps=30).load_state_dict(saved)


def test_ranges_are_logged() -> None:
    prepared, x = made()
    seen: list[tuple[dict[str, float], int]] = []
    schedule = quant.QATSchedule(prepared, steps=20, log=lambda values, step: seen.append((values, step)), log_every=5)
    for _ in range(8):
        prepared(x)
        schedule.step()
    assert [(step, values["phase"]) for values, step in seen] == [(1, 1), (5, 1)]
    rows = {row.layer: row for row in quant.calibrate.ranges(prepared)}
    schedule = quant.QATSchedule(prepared, steps=1, log=lambda values, step: seen.append((values, step)))
    schedule.step()
    values, _ = seen[-1]
    for layer, row in rows.items():
        assert (values[f"{layer}/low"], values[f"{layer}/high"]) == (row.chosen_low, row.chosen_high)
    assert set(values) == {f"{layer}/{end}" for layer in rows for end in ("low", "high")} | {"phase"}


def test_learned_ranges_are_logged() -> None:
    learned = quant.QConfig(weight_observer="lsq", activation_observer="lsq")
    x = torch.randn(8, 6)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    prepared = quant.prepare_qat(model, x, quant.Recipe(default=learned)).train()
    seen: list[dict[str, float]] = []
    schedule = quant.QATSchedule(
        prepared, steps=4, observe=1, log=lambda values, step: seen.append(values), log_every=1
    )
    assert tracked_ranges(prepared) == {}  # nothing has seen data
    for _ in range(2):
        prepared(x)
        schedule.step()
    assert seen[-1]["2.weight/high"] > 0 > seen[-1]["2.weight/low"]
    assert seen[-1]["0/high"] > seen[-1]["0/low"]


def test_bad_schedules_are_refused() -> None:
    prepared, _ = made()
    with pytest.raises(ValueError, match="steps is 0"):
        quant.QATSchedule(prepared, steps=0)
    with pytest.raises(ValueError, match="expected 0 <= observe <= freeze_ranges_at"):
        quant.QATSchedule(prepared, steps=10, observe=8)
    with pytest.raises(ValueError, match="got Linear"):
        quant.QATSchedule(nn.Linear(2, 2), steps=10)
    with pytest.raises(TypeError, match="log is 3, expected a function"):
        quant.QATSchedule(prepared, steps=10, log=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log_every is 0"):
        quant.QATSchedule(prepared, steps=10, log=print, log_every=0)


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, right: bool = False) -> Tensor:
        return self.right(x) if right else self.left(x)


@pytest.mark.parametrize("learned", [True, False])
def test_ranges_that_a_call_of_another_kind_brings_are_missed_in_the_optimiser_once(learned: bool) -> None:
    kind = QConfig(weight_observer="lsq", activation_observer="lsq") if learned else QConfig()
    x = torch.randn(8, 6)
    prepared = quant.prepare_qat(Sides(), x, Recipe(default=kind)).train()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    schedule = quant.QATSchedule(prepared, steps=8, observe=1, optimizer=optimizer)
    prepared(x)
    schedule.step()
    before = {id(one) for one in prepared.parameters()}
    prepared(x, True)
    new = [one for one in prepared.parameters() if id(one) not in before]
    if learned:
        with pytest.warns(UserWarning, match=rf"brought {len(new)} learned ranges .*weights\.right\.scale.*examples="):
            schedule.step()
        optimizer.add_param_group({"params": new})
    assert bool(new) is learned
    for right in (False, True):
        prepared(x, right)
        schedule.step()
    assert quant.check_optimizer(prepared, optimizer) == []


def test_distillation_is_hintons() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randn(6, 5).double()
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    p, q = (teacher / 3).softmax(dim=1), (student / 3).softmax(dim=1)
    soft = 9 * (p * (p.log() - q.log())).sum(dim=1).mean()
    hard = -student.log_softmax(dim=1)[torch.arange(6), labels].mean()
    torch.testing.assert_close(quant.distill_loss(student, teacher, temperature=3.0), soft)
    mixed = quant.distill_loss(student, teacher, labels, temperature=3.0, alpha=0.7)
    torch.testing.assert_close(mixed, 0.7 * soft + 0.3 * hard)
    assert torch.autograd.gradcheck(lambda s: quant.distill_loss(s, teacher, labels), (student,))
    sequence = quant.distill_loss(student.reshape(2, 3, 5), teacher.reshape(2, 3, 5), labels.reshape(2, 3))
    torch.testing.assert_close(sequence, quant.distill_loss(student, teacher, labels))
    assert float(quant.distill_loss(teacher, teacher)) == pytest.approx(0.0, abs=1e-12)


def test_bad_distillation_is_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"student has shape \(2, 3\) and teacher \(2, 4\)"):
        quant.distill_loss(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="temperature is 0"):
        quant.distill_loss(x, x, temperature=0)
    with pytest.raises(ValueError, match="alpha 2"):
        quant.distill_loss(x, x, alpha=2)

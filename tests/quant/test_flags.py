"""Branches on the caller's masks and indices are guards of a graph; branches on activations make an island."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.program_runner import ProgramRunner
from quant.types import UncapturedCall

FULL = torch.ones(4, 6, dtype=torch.long)
PADDED = FULL.clone()
PADDED[1, 3:] = 0


class Masked(nn.Module):
    """Leaves a mask out that hides nothing, as libraries of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        y = torch.relu(self.first(self.table(ids)))
        if not mask.to(torch.bool).all():
            y = y * mask[:, :, None]
        return self.last(y)


class OfActivations(Masked):
    """Decides by what a layer gives."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        y = torch.relu(self.first(self.table(ids)))
        if (y > 0).all():
            y = y * 2
        return self.last(y)


class OfReals(Masked):
    """Decides by the caller's floats."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        y = self.table(ids) * (1 if mask.max() > 2 else 2)
        return self.last(torch.relu(self.first(y)))


def ids(seed: int) -> Tensor:
    return torch.randint(10, (4, 6), generator=torch.Generator().manual_seed(seed))


def converted(model: nn.Module, *masks: Tensor) -> nn.Module:
    calls = [(ids(place), mask) for place, mask in enumerate([*masks, *masks])]
    return quant.quantize_static(model.eval(), calls, progress=False)


def runners(q: nn.Module) -> list[ProgramRunner]:
    return [one for one in q.modules() if isinstance(one, ProgramRunner)]


def relative(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


def model_of(kind: type[Masked]) -> Masked:
    torch.manual_seed(0)
    return kind()


def test_a_branch_on_a_mask_is_a_guard_of_one_program() -> None:
    model = model_of(Masked)
    q = converted(model, FULL)
    [runner] = runners(q)
    assert runner.root is q
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative(q(ids(9), FULL), model(ids(9), FULL)) < 0.05
        assert relative(q(ids(9)[:2, :5], FULL[:2, :5]), model(ids(9)[:2, :5], FULL[:2, :5])) < 0.05


def test_another_mask_than_in_calibration_runs_layer_by_layer_and_says_so() -> None:
    model = model_of(Masked)
    q = converted(model, FULL)
    with torch.no_grad(), pytest.warns(UncapturedCall, match="decides by a condition: it was True"):
        assert relative(q(ids(9), PADDED), model(ids(9), PADDED)) < 0.05


@pytest.mark.parametrize("first", [FULL, PADDED], ids=["full first", "padded first"])
def test_masks_of_both_kinds_in_calibration_give_two_programs(first: Tensor, tmp_path: Path) -> None:
    model = model_of(Masked)
    q = converted(model, first, PADDED if first is FULL else FULL)
    assert len(runners(q)[0].programs()) == 2
    quant.save(q, tmp_path / "q.q8")
    loaded = quant.load(tmp_path / "q.q8", model=model)
    for mask in (FULL, PADDED):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert relative(q(ids(9), mask), model(ids(9), mask)) < 0.05
            assert torch.equal(loaded(ids(9), mask), q(ids(9), mask))


def test_a_mask_that_another_order_would_change_is_guarded_too() -> None:
    """The proof rolls integers, and this forward asks for the last of them."""

    class AsksTheLast(Masked):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            y = torch.relu(self.first(self.table(ids)))
            return self.last(y * 2 if (mask[:, -1] == 0).any() else y)

    model = model_of(AsksTheLast)
    q = converted(model, PADDED)
    assert runners(q)[0].root is q
    with torch.no_grad():
        assert relative(q(ids(9), PADDED), model(ids(9), PADDED)) < 0.05


@pytest.mark.parametrize("kind", [OfActivations, OfReals])
def test_a_branch_on_activations_makes_an_island(kind: type[Masked]) -> None:
    model = model_of(kind)
    mask = FULL.float() if kind is OfReals else FULL
    q = converted(model, mask)
    assert all(runner.root is not q for runner in runners(q))
    with torch.no_grad():
        assert relative(q(ids(9), 3 * mask), model(ids(9), 3 * mask)) < 0.05


def test_training_takes_both_branches() -> None:
    model = model_of(Masked).train()
    prepared = quant.prepare_qat(model, (ids(0), FULL))
    for mask in (FULL, PADDED, FULL):
        prepared(ids(1), mask).sum().backward()
    q = quant.convert(prepared.eval())
    with torch.no_grad():
        for mask in (FULL, PADDED):
            assert relative(q(ids(9), mask), model.eval()(ids(9), mask)) < 0.2

"""What a module gives that runs as it is: its caller may go on by all of it, not by tensors and numbers alone."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.forms import form_of

WIDTH = 16


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


class Tag:
    """An object without a tensor in it."""

    def __init__(self, text: str) -> None:
        self.text = text


class Inner(nn.Module):
    """Gives something chosen by values, which makes it an island, and may count its calls."""

    def __init__(self, give: Callable[[Tensor, bool], Any], counts: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.give, self.counts, self.calls = give, counts, 0

    def forward(self, x: Tensor) -> Any:
        if self.counts:
            self.calls += 1
        return self.give(self.last(self.first(x).relu()), bool(x.mean() > 0))


class Outer(nn.Module):
    """Goes on by what its part gives."""

    def __init__(
        self, give: Callable[[Tensor, bool], Any], take: Callable[[Any], Tensor], *, counts: bool = False
    ) -> None:
        super().__init__()
        self.inner, self.behind, self.take = Inner(give, counts), nn.Linear(WIDTH, WIDTH), take

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.take(self.inner(x)))


def _taken_keys(given: dict[str, Tensor]) -> Tensor:
    return given["warm"] if "warm" in given else -given["cold"]


PAIRS: dict[str, tuple[Callable[[Tensor, bool], Any], Callable[[Any], Tensor]]] = {
    "enum": (lambda y, warm: (y, Phase.WARM if warm else Phase.COLD), lambda o: o[0] * (3 - 2 * o[1].value)),
    "word": (lambda y, warm: (y, "warm" if warm else "cold"), lambda o: o[0] if o[1] == "warm" else -o[0]),
    "class": (lambda y, warm: (y, Tag if warm else Phase), lambda o: o[0] if o[1] is Tag else -o[0]),
    "object": (lambda y, warm: (y, Tag("warm" if warm else "cold")), lambda o: o[0] if o[1].text == "warm" else -o[0]),
    "none beside": (lambda y, warm: (y, None if warm else 2 * y), lambda o: o[0] if o[1] is None else o[1]),
    "none alone": (lambda y, warm: y if warm else None, lambda o: torch.ones(3, WIDTH) if o is None else o),
    "count": (lambda y, warm: [y] * (1 if warm else 2), lambda o: sum(o) / 2),
    "keys": (lambda y, warm: {"warm" if warm else "cold": y}, _taken_keys),
}


def batch(index: int) -> Tensor:
    """Rows whose mean is above zero and below it in turn; two values make their range the same."""
    torch.manual_seed(index)
    x = torch.rand(16, WIDTH) * 4 - 2 + (0.4 if index % 2 else -0.4)
    x[:, 0], x[:, 1] = 3.0, -3.0
    return x


def decibels(expected: Tensor, got: Tensor) -> float:
    return float(10 * torch.log10(expected.square().mean() / (expected - got).square().mean()).detach())


def made(name: str, *, counts: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Outer(*PAIRS[name], counts=counts).eval()


@pytest.mark.parametrize("counts", [False, True], ids=["keeps nothing", "counts its calls"])
@pytest.mark.parametrize("name", PAIRS)
def test_static_goes_on_by_what_an_island_gives_now(name: str, counts: bool) -> None:
    model = made(name, counts=counts)
    q = quant.quantize_static(copy.deepcopy(model), [batch(index) for index in range(4)], progress=False)
    for index in (100, 101, 102, 103):
        assert decibels(model(batch(index)), q(batch(index))) > 30
    assert q.inner.calls == model.inner.calls


@pytest.mark.parametrize("name", PAIRS)
def test_training_goes_on_by_what_an_island_gives_now(name: str) -> None:
    model = made(name)
    recipe = quant.Recipe(default=quant.QConfig(activation_observer="minmax"))
    prepared = quant.prepare_qat(copy.deepcopy(model), batch(0), recipe).train()
    for index in range(4):
        assert decibels(model(batch(index)), prepared(batch(index))) > 25


def test_an_island_that_counts_its_calls_runs_once_where_its_caller_decides_later() -> None:
    class Decides(Outer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if x.shape[0] > 10 else -y

    torch.manual_seed(0)
    model = Decides(lambda y, warm: y * 2, lambda o: o, counts=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = quant.quantize_static(copy.deepcopy(model), [batch(index) for index in range(4)], progress=False)
        for index in (100, 101):
            model(batch(index)[:5])
            q(batch(index)[:5])
    assert q.inner.calls == model.inner.calls == 2


def test_the_caller_of_an_island_is_a_graph_that_is_saved_with_its_programs(tmp_path: Path) -> None:
    q = quant.quantize_static(made("enum"), [batch(index) for index in range(4)], progress=False)
    programs = str(q.program)
    assert "form_of" in programs
    assert "WARM" in programs
    quant.save(q, tmp_path / "model.octet")
    loaded = quant.load(tmp_path / "model.octet", model=made("enum"), example_inputs=batch(0), examples=[batch(1)])
    for index in (100, 101):
        assert torch.equal(q(batch(index)), loaded(batch(index)))


def test_the_caller_of_an_island_that_counts_and_gives_a_tensor_is_a_graph() -> None:
    torch.manual_seed(0)
    model = Outer(lambda y, warm: y * (1 + warm), lambda o: o, counts=True).eval()
    q = quant.quantize_static(model, [batch(index) for index in range(4)], progress=False)
    assert "form_of" not in str(q.program)
    assert not any("an island" in entry.detail for entry in quant.summary(q) if entry.name == "(root)")


def test_form() -> None:
    assert form_of((torch.ones(2), 3, [None, 2.5])) == form_of((torch.zeros(5), 4, [None, 7.5]))
    different = [(1, 2), [1, 2], (1, 2, 3), (1, None), (1, "a"), (1, "b"), (1, Phase.WARM), (1, Phase.COLD), (1, 2.0),
                 (1, Tag("a")), (1, Tag("b")), (1, Tag), {"a": 1}, {"b": 1}, (1, torch.float32), 1, None]  # fmt: skip
    assert len({form_of(one) for one in different}) == len(different)


def test_form_of_objects_that_hold_each_other() -> None:
    tag = Tag("a")
    tag.other = tag  # type: ignore[attr-defined]
    assert "..." in form_of(tag)

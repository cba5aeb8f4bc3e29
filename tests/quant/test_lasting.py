"""State that programs write: calibration leaves none of it, and each call writes once, whichever program it takes."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.runner import GraphRunner, all_runners
from quant.types import UncapturedCall


class Counter(nn.Module):
    """Counts calls with a mask, in a buffer before it decides by a size, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))
        self.total = torch.zeros(())

    def forward(self, x: Tensor, mask: Tensor | None = None, *, mode: str = "plain") -> Tensor:
        if mask is not None:
            self.calls += 1
            self.total = self.total + mask.sum()
            mask.clamp_(max=0.9)
        y = self.first(x).relu()
        if mask is not None:
            y = y * mask
        if y.shape[0] > 10:
            y = y * 0.5
        return self.last(y.tanh() if mode == "tanh" else y)


class Undecided(Counter):
    """Branches on values where it has a mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, mode: str = "plain") -> Tensor:
        return super().forward(x) * 2 if mask is not None and mask.sum() > 3 else super().forward(x)


def rows(count: int) -> Tensor:
    return torch.randn(count, 16)


def mask() -> Tensor:
    return torch.rand(16)


def prepared() -> nn.Module:
    found = quant.prepare(Counter().eval(), rows(4), examples=[(rows(4), mask())])
    with torch.no_grad():
        for _ in range(4):
            found(rows(4))
            found(rows(4), mask())
    return found


def test_state_that_a_further_program_writes_is_as_before_any_data() -> None:
    p = prepared()
    assert p.calls.tolist() == [4.0], "examples leave nothing, calibration its own"
    q = quant.convert(p)
    assert q.calls.tolist() == [0.0]
    assert q.total == 0.0


class Late(nn.Module):
    """Makes a buffer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "offset"):
            self.register_buffer("offset", torch.ones(16))
        return self.last(self.first(x) + self.offset)


def test_what_a_first_call_makes_is_not_there_after_calibration() -> None:
    model, x = Late().eval(), rows(4)
    q = quant.quantize_static(model, [x, *(rows(4) for _ in range(3))], progress=False)
    assert not hasattr(q, "offset")
    with torch.no_grad():
        for _ in range(2):
            assert (q(x) - model(x)).norm() < 0.05 * model(x).norm()


class Swaps(nn.Module):
    """Puts another layer in place of its own when it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        self.last = nn.Linear(16, 16, bias=False)
        nn.init.ones_(self.last.weight)
        return out


def test_a_layer_that_a_forward_replaces_in_a_loop_of_the_users_own_is_there_again() -> None:
    model, x = Swaps().eval(), rows(4)
    p = quant.prepare(model, rows(4))
    with torch.no_grad():
        for _ in range(4):
            p(x)
        replaced = p.last
        q = quant.convert(p)
        assert p.last is replaced, "the prepared model is left as it is"
        assert quant.summary(q)["last"].outcome == "int8"
        for _ in range(3):
            assert (q(x) - model(x)).norm() < 0.05 * model(x).norm()


def training() -> nn.Module:
    p = quant.prepare_qat(Counter().eval(), rows(4), examples=[(rows(4), mask())])
    schedule = quant.QATSchedule(p, steps=100)  # which still observes at the end
    p.train()
    for _ in range(4):
        p(rows(4)).sum().backward()
        p(rows(4), mask()).sum().backward()
        schedule.step()
    p.calls.zero_()
    return p


@pytest.mark.parametrize(
    "make", [prepared, lambda: quant.convert(prepared()), training], ids=["prepared", "converted", "training"]
)
@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_a_program_that_finds_out_late_takes_back_what_it_wrote(make: Callable[[], nn.Module]) -> None:
    q, one, other = make(), mask(), mask()
    before = q.calls[0].item()
    with torch.no_grad():
        q(rows(20), one)  # a new program in calibration, the user's forward in a converted model
        assert q.calls[0].item() == before + 1
        q(rows(4), other)
        assert q.calls[0].item() == before + 2
    assert max(one.max(), other.max()) <= 0.9, "the caller's tensor is written to"


@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_an_error_midway_leaves_the_model_as_it_was() -> None:
    p = prepared()
    forwards = {name: module.__dict__.get("forward") for name, module in p.named_modules()}
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                p(rows(20), torch.rand(7))
            with pytest.raises(TypeError):
                p(rows(4), nonsense=1)
        assert {name: module.__dict__.get("forward") for name, module in p.named_modules()} == forwards
        q = quant.convert(p)
        with pytest.raises((RuntimeError, ValueError)):  # torch's, or a native call's that names the layer
            q(rows(20), torch.rand(7))
        x = rows(4)
        assert torch.equal(q(x), q(x))


def test_calls_that_have_no_program_say_why_and_are_not_captured_for_ever() -> None:
    p = quant.prepare(Undecided().eval(), rows(4))
    runner = p._modules[RESERVED]
    assert isinstance(runner, GraphRunner)
    assert runner.extend is not None
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(12):
            p(rows(4), mask())
    assert [one.category for one in said] == [UncapturedCall]
    assert "branches on a tensor's values" in str(said[0].message)
    assert "examples=" not in str(said[0].message), "which would not help"
    assert len(runner.extend.refused[""]) == 7


def reloaded(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))
    return found


def saved_by_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    found: nn.Module = torch.load(buffer, weights_only=False)
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded, saved_by_torch])
@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_copies_have_all_programs_and_their_own_state(copied: Callable[[nn.Module], nn.Module]) -> None:
    p = prepared()
    twin = copied(p)
    with torch.no_grad():
        twin(rows(4), mode="tanh")  # a program of the copy's own
        assert list(map(str, all_runners(twin))) == ["", "@2", "@3"]
        assert list(map(str, all_runners(p))) == ["", "@2"]
        assert quant.convert(twin).calls.tolist() == [0.0]
        q, x, one = quant.convert(p), rows(4), mask()
        for _ in range(2):  # the second copy is of a model that ran the user's forward
            again = copied(q)
            for args, kwargs in [((x,), {}), ((x, one), {}), ((rows(20),), {}), ((x,), {"mode": "tanh"})]:
                assert torch.equal(again(*args, **kwargs), q(*args, **kwargs))
            again(x, one)
            assert again.calls[0] == q.calls[0] + 1


def test_state_dicts_of_several_programs_come_round() -> None:
    p = prepared()
    other = quant.prepare(Counter().eval(), rows(4), examples=[(rows(4), mask())])
    other.load_state_dict(p.state_dict())
    q, again, x, one = quant.convert(p), quant.convert(other), rows(4), mask()
    with torch.no_grad():
        assert torch.equal(q(x, one), again(x, one))
        again.load_state_dict(q.state_dict())
        assert torch.equal(q(x, one), again(x, one))


def test_one_thread_falls_back_while_another_runs_programs() -> None:
    q, x = quant.convert(prepared()), rows(4)
    with torch.no_grad():
        expected = q(x)
    wrong: list[str] = []

    def planned() -> None:
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(q(x), expected):
                    wrong.append("a planned call")

    def falling() -> None:
        with torch.no_grad():
            for _ in range(60):
                if (q(x, mode="tanh") - q(x, mode="tanh")).abs().max() > 0:
                    wrong.append("a call as it is")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncapturedCall)
        threads = [threading.Thread(target=one) for one in (planned, falling, planned, falling)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert RESERVED in q._modules


class Cleared(dict[Any, Any]):
    """Keeps nothing, as if another thread cleared it at once."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_a_replaced_module_in_one_thread_does_not_disturb_another() -> None:
    q, x = quant.convert(prepared()), rows(4)
    runner = q._modules[RESERVED]
    assert isinstance(runner, ProgramRunner)
    assert runner.origin is not None
    with torch.no_grad():
        expected = q(x)
        runner.origin._edges = Cleared()
        q.last = copy.deepcopy(q.last)
        assert torch.equal(q(x), expected)

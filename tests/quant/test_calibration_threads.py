"""Threads that calibrate one model: each call is observed, and none meets a half-made program of another."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.programs import RESERVED
from quant.static.prepared import record_of
from quant.static.runner import GraphRunner, all_runners, runners
from quant.types import UncapturedCall


class Meeting:
    """A place in a forward at which one call lets another begin, and goes on some time later."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.inside, self.begun = threading.Event(), threading.Event()

    def __call__(self) -> None:
        """Wait, in the first call of the thread that is `first`."""
        if self.first == threading.get_ident() and not self.inside.is_set():
            self.inside.set()
            self.begun.wait(10)
            self.begun.clear()
            self.begun.wait(0.3)  # the other call comes to an end in this time, where it does not wait

    def __deepcopy__(self, memo: dict[int, Any]) -> Meeting:
        return self

    def hold(self, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The results of two calls, of which the second begins while the first is here."""

        def one() -> Tensor:
            self.first = threading.get_ident()
            return first()

        def other() -> Tensor:
            assert self.inside.wait(10)
            self.begun.set()
            return second()

        with ThreadPoolExecutor(2) as pool:
            results = [pool.submit(one), pool.submit(other)]
            return results[0].result(), results[1].result()


class Scaled(nn.Module):
    """Its forward goes through its children."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)
        self.meet = meet

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.children():
            x = layer(x)
        if scale is None:
            return x
        self.meet()
        return x * scale


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield Meeting()


def ranges(prepared: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in prepared.state_dict().items() if name.endswith((".low", ".high"))}


@pytest.mark.parametrize("scale", [None, torch.rand(16)], ids=["a known call", "another of the same kind"])
@torch.no_grad()
def test_a_call_while_another_is_captured_is_observed(meeting: Meeting, scale: Tensor | None) -> None:
    model, x = Scaled(meeting).eval(), torch.randn(8, 16)
    arguments = (100 * x,) if scale is None else (100 * x, scale)
    prepared = quant.prepare(model, x)
    assert not record_of(prepared).islands
    _, of_second = meeting.hold(lambda: prepared(x, torch.rand(16)), lambda: prepared(*arguments))
    torch.testing.assert_close(of_second, model(*arguments))
    assert len(all_runners(prepared)) == 2, "both calls with a scale have one program"
    highest = max(float(value) for name, value in ranges(prepared).items() if name.endswith(".high"))
    assert highest >= 100 * float(x.max())


@torch.no_grad()
def test_ranges_of_many_threads_are_those_of_one() -> None:
    torch.manual_seed(0)
    model, batches = Scaled(lambda: None).eval(), [torch.randn(4, 16) * k for k in range(1, 65)]
    recipe = quant.Recipe(default=quant.QConfig(activation_observer="minmax"))
    alone, shared = quant.prepare(model, batches[0], recipe), quant.prepare(model, batches[0], recipe)
    for batch in batches:
        alone(batch)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(shared, batches))
    for (name, one), other in zip(alone.state_dict().items(), shared.state_dict().values(), strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=1e-4, atol=0.05, msg=name)  # sums come in another order
        else:
            assert torch.equal(one, other), name


class Chooses(nn.Module):
    """One of two layers by its input's values, so that an example calls neither or one."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.stem, self.low, self.high = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        self.meet()
        y, total = self.stem(x), float(x.sum())
        return self.low(y) if total < -1 else self.high(y) if total > 1 else y


def test_layers_that_two_calls_reach_for_the_first_time_both_become_int8(meeting: Meeting) -> None:
    model, x = Chooses(meeting).eval(), torch.rand(4, 16)
    prepared = quant.prepare(model, torch.zeros(4, 16))
    meeting.hold(lambda: prepared(x), lambda: prepared(-x))
    assert set(runners(prepared)) == {"stem", "low", "high"}
    assert {one.name for one in quant.summary(quant.convert(prepared)).quantized} == {"stem", "low", "high"}


def test_who_goes_through_an_int8_model_meets_no_change_of_its_children() -> None:
    """As `state_dict()` of another thread does, while a call that no program takes hides the runner."""
    torch.manual_seed(0)
    begun: list[Iterator[tuple[str, nn.Module]]] = []
    names: list[str] = []

    def go_on() -> None:
        if begun:
            names.extend(name for name, _ in begun.pop())

    with torch.no_grad():
        prepared = quant.prepare(Scaled(go_on).eval(), torch.randn(8, 16))
        prepared(torch.randn(8, 16))
        q = quant.convert(prepared)
        begun.append(q.named_children())
        assert next(begun[0])[0] == "first"
        with pytest.warns(UncapturedCall):
            q(torch.randn(8, 16), torch.rand(16))
    assert names == ["activation", "last", RESERVED]


class Encodes(nn.Module):
    """A part that is called by itself too."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.encoder, self.last = Scaled(meet), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x))  # type: ignore[no-any-return]


def test_a_part_that_two_threads_call_first_has_one_program_and_its_own_forward(meeting: Meeting) -> None:
    model, x, scale = Encodes(meeting).eval(), torch.randn(8, 16), torch.rand(16)
    prepared = quant.prepare(model, x)
    part = prepared.get_submodule("encoder")
    assert "encoder" not in runners(prepared)
    meeting.hold(lambda: part(x, scale), lambda: part(x, scale))
    assert len([key for key in all_runners(prepared) if key.path == "encoder"]) == 1
    torch.testing.assert_close(part(x), model.get_submodule("encoder")(x))


class Inside(nn.Module):
    """Calls a module that chooses."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.meet, self.first, self.inner = meet, nn.Linear(16, 16), Chooses(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.meet()
        return self.inner(x) + self.first(x) if float(x.sum()) < 1e9 else x


def test_a_layer_that_a_thread_calls_beside_a_call_of_the_model_goes_on_waiting(meeting: Meeting) -> None:
    prepared, x = quant.prepare(Inside(meeting).eval(), torch.zeros(4, 16)), torch.rand(4, 16)
    high = prepared.get_submodule("inner.high")
    meeting.hold(lambda: prepared(torch.zeros(4, 16)), lambda: high(x))
    assert "inner.high" not in runners(prepared)
    prepared(x)
    assert "inner.high" in runners(prepared)


class InThreads(nn.Module):
    """Shares a large batch among threads, each of which calls it, and runs layers for a small one."""

    def __init__(self, *, is_island: bool) -> None:
        super().__init__()
        self.first, self.last, self.is_island = nn.Linear(16, 16), nn.Linear(16, 16), is_island

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            with ThreadPoolExecutor(2) as pool:
                return torch.cat(list(pool.map(self, x.split(4))))
        if self.is_island and float(x.sum()) < -1e9:
            return x
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_island", [False, True])
def test_a_forward_that_calls_itself_in_threads_of_its_own_ends(is_island: bool) -> None:
    torch.manual_seed(0)
    model, x = InThreads(is_island=is_island).eval(), torch.randn(4, 16)
    prepared, large = quant.prepare(model, x), torch.randn(16, 16)
    prepared(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncapturedCall)
        torch.testing.assert_close(prepared(large), model(large))


class Holder:
    """An object of the user's."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Refers(nn.Module):
    """Reaches a child, a tensor and a layer that is no child by other ways than their names."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.child, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        child, tensor, loose = self.child, torch.ones(16), nn.Linear(16, 16)
        holds = {
            "list": lambda: [child, tensor, loose],
            "dictionary": lambda: dict(enumerate([child, tensor, loose])),
            "object": lambda: Holder([child, tensor, loose]),
            "function": lambda: lambda: [child, tensor, loose],
            "method": lambda: [child.forward, tensor, loose.forward],
            "weak reference": lambda: [weakref.ref(child), tensor, loose],
        }
        self.way = holds[way]()

    def parts(self) -> Any:
        held = self.way() if callable(self.way) else self.way.held if isinstance(self.way, Holder) else self.way
        child, tensor, loose = (held[place] for place in range(3))
        return child() if isinstance(child, weakref.ref) else child, tensor, loose

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        child, tensor, loose = self.parts()
        y = self.last(loose(child(x) * tensor).relu())
        return y if scale is None else y * scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["list", "dictionary", "object", "function", "method", "weak reference"])
@torch.no_grad()
def test_another_program_reaches_what_the_first_reaches(way: str) -> None:
    torch.manual_seed(0)
    model, x, scale = Refers(way).eval(), torch.randn(4, 16), torch.full((16,), 2.0)
    prepared = quant.prepare(model, x)
    assert torch.equal(prepared(x) * 2, prepared(x, scale))
    first, second = all_runners(prepared).values()
    shared = set(first.observers.values()) & set(second.observers.values())
    assert len(shared) == len(first.observers), "the same places have the same observers"
    prepared.get_parameter("child.weight").mul_(3)
    prepared.parts()[1].mul_(3)  # type: ignore[operator]
    assert torch.equal(prepared(x) * 2, prepared(x, scale))


class AndDict(dict[str, Tensor], nn.Linear):
    """Holds something in itself."""

    def __init__(self) -> None:
        nn.Linear.__init__(self, 16, 16)

    __hash__ = nn.Linear.__hash__

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self["factor"]


class ScaledTwice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.layer(x)
        return y if scale is None else y * scale


def test_another_call_of_a_module_that_is_more_than_its_dictionary_is_captured() -> None:
    torch.manual_seed(0)
    layer, x = AndDict(), torch.randn(4, 16)
    layer["factor"] = torch.full((16,), 3.0)
    prepared = quant.prepare(ScaledTwice(layer).eval(), x)
    with torch.no_grad():
        torch.testing.assert_close(prepared(x, torch.full((16,), 2.0)), layer(x) * 2)
    assert len(all_runners(prepared)) == 2


class GivesItself(nn.Module):
    """Its output names a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, nn.Module]:
        y = self.child(x)
        return (y if scale is None else y * scale), self.child


def test_an_output_that_is_a_module_is_the_models_own() -> None:
    x = torch.randn(4, 16)
    prepared = quant.prepare(GivesItself().eval(), x)
    assert prepared(x)[1] is prepared.child
    assert prepared(x, torch.rand(16))[1] is prepared.child


def test_a_program_is_added_where_the_module_holds_what_cannot_be_copied(meeting: Meeting) -> None:
    model, x = Scaled(meeting).eval(), torch.randn(8, 16)
    prepared: Any = quant.prepare(model, x)
    prepared.lock = threading.Lock()
    scale = torch.rand(16)
    torch.testing.assert_close(prepared(x, scale), model(x, scale))
    assert [type(one) for one in all_runners(prepared).values()] == [GraphRunner, GraphRunner]

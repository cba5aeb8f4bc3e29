"""What the benchmarks' verdicts rest on: turns, ratios within a round, intervals, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch


class Clock:
    """Time that passes only when a contender says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def call() -> None:
            self.called.append(name)
            self.now += seconds()

        return call


def test_every_round_times_everyone_once_and_starts_with_another(load: Callable[[str], ModuleType]) -> None:
    harness, clock = load("harness"), Clock()
    contenders = [harness.Contender(name, clock.work(name, lambda: 0.01)) for name in "abc"]
    result = harness.race("case", contenders, effort=harness.Effort(0.0, 4), clock=clock)
    assert {name: len(times) for name, times in result.seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert "".join(clock.called[-12:]) == "abc" + "bca" + "cab" + "abc"


def test_a_drifting_machine_does_not_change_a_ratio(load: Callable[[str], ModuleType]) -> None:
    harness, clock = load("harness"), Clock()
    slow_down = iter(1 + index / 50 for index in range(10_000))
    fast = harness.Contender("fast", clock.work("fast", lambda: 0.01 * next(slow_down)))
    slow = harness.Contender("slow", clock.work("slow", lambda: 0.02 * next(slow_down)))
    result = harness.race("case", [fast, slow], effort=harness.Effort(0.0, 40), clock=clock)
    assert max(result.seconds["fast"]) > 2 * min(result.seconds["fast"])
    ratio = result.ratio("slow", "fast")
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.median == pytest.approx(2.0, rel=0.02)


def test_a_short_call_is_repeated_and_its_warm_up_not_counted(load: Callable[[str], ModuleType]) -> None:
    harness, clock = load("harness"), Clock()
    contender = harness.Contender("short", clock.work("short", lambda: 1e-5))
    result = harness.race("case", [contender], effort=harness.Effort(0.0, 3), clock=clock)
    assert result.calls["short"] == pytest.approx(harness.SAMPLE_SECONDS / 1e-5, rel=0.01)
    assert result.seconds["short"] == pytest.approx([1e-5] * 3)


def test_samples_run_inside_their_contenders_scope(load: Callable[[str], ModuleType]) -> None:
    harness, clock = load("harness"), Clock()
    inside: list[bool] = []
    seen: list[bool] = []

    @contextmanager
    def scope() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def call() -> None:
        seen.append(bool(inside))
        clock.now += 0.01

    harness.race("case", [harness.Contender("a", call, scope)], effort=harness.Effort(0.0, 2), clock=clock)
    assert seen
    assert all(seen)


def test_an_undecided_case_gets_more_rounds_and_not_for_ever(load: Callable[[str], ModuleType]) -> None:
    harness, clock = load("harness"), Clock()
    contender = harness.Contender("a", clock.work("a", lambda: 0.01))
    effort = harness.Effort(seconds=0.02, rounds=1, patience=2.0)
    undecided = harness.race("case", [contender], effort=effort, undecided=lambda race: True, clock=clock)
    asked: list[int] = []

    def until_three(race: object) -> bool:
        asked.append(1)
        return len(asked) < 3

    decided = harness.race("case", [contender], effort=effort, undecided=until_three, clock=clock)
    assert len(asked) <= 3
    assert undecided.seconds["a"]
    assert decided.seconds["a"]


def test_two_contenders_of_one_name_are_refused(load: Callable[[str], ModuleType]) -> None:
    harness = load("harness")
    same = harness.Contender("a", lambda: None)
    with pytest.raises(ValueError, match=r"case 'x'.*\['a', 'a'\]"):
        harness.race("x", [same, same], effort=harness.Effort())


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]], ids=["none", "nan"])
def test_an_estimate_needs_finite_samples(load: Callable[[str], ModuleType], values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite samples"):
        load("harness").Estimate.of(values)


@pytest.mark.parametrize(
    ("theirs", "error", "expected"),
    [
        ([2.0] * 9, 0.01, "ok"),
        ([1.0] * 9, 0.01, "ok"),
        ([0.9] * 9, 0.01, "SLOWER than float"),
        ([0.9, 1.2] * 5, 0.01, "unsure: float"),
        ([2.0] * 9, 0.02, "ERROR above 0.015"),
    ],
    ids=["faster", "as fast", "slower", "unsure", "inaccurate"],
)
def test_verdict(load: Callable[[str], ModuleType], theirs: list[float], error: float, expected: str) -> None:
    harness, bench = load("harness"), load("bench_dynamic")
    case = bench.Case("LSTM", {}, torch.nn.Identity, (1,), error_limit=0.015)
    race = harness.Race(
        "LSTM", {}, {"float": theirs, "octet": [1.0] * len(theirs)}, {}, {"float": None, "octet": error}
    )
    assert bench.verdict(case, race) == expected


def test_the_small_linear_has_a_limit_of_time(load: Callable[[str], ModuleType]) -> None:
    harness, bench = load("harness"), load("bench_dynamic")
    (case,) = [case for case in bench.cases() if case.time_limit is not None]
    assert case.name == "Linear 1x64x64"
    race = harness.Race(case.name, {}, {"float": [9e-6], "octet": [7e-6]}, {}, {"float": None, "octet": 0.0})
    assert bench.verdict(case, race) == "ABOVE 6 us"


def test_torch_aos_engine_is_put_back(load: Callable[[str], ModuleType]) -> None:
    peers = load("peers")
    before = torch.backends.quantized.engine
    engine = next(name for name in torch.backends.quantized.supported_engines if name not in ("none", before))
    with peers.ao_engine(engine):
        assert torch.backends.quantized.engine == engine
    assert torch.backends.quantized.engine == before


def test_a_peer_that_cannot_be_had_is_named_with_the_reason(load: Callable[[str], ModuleType]) -> None:
    peers = load("peers")
    model, x = torch.nn.Linear(4, 4), torch.randn(1, 4)
    wanted = {"float": peers.torch_float, "ao none": peers.torch_ao("no such engine")}
    found, missing = peers.assemble(model, x, wanted)
    assert [peer.name for peer in found] == ["float"]
    assert load("display").absent_lines({"a": missing, "b": missing}) == [
        "absent: ao none, because engine 'no such engine' is not in this build of torch"
    ]
    assert load("display").absent_lines({"a": missing, "b": {}})[0].endswith("(a)")

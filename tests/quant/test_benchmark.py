"""`quant.benchmark`: percentiles and turns by a clock of the tests, the steps of each kind of model, memory, files."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quant.kernels import ops
from torch import Tensor, nn

import quant
from quant.benchmark import memory
from quant.benchmark.result import Latency
from quant.benchmark.steps import time_steps
from quant.benchmark.turns import TURNS, timed_in_turns
from quant.types import Benchmark

SHORT = 1e-3
"""Seconds of a measurement whose times are not looked at."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Block(), nn.MaxPool2d(2))
    return nn.Sequential(stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def static() -> nn.Module:
    return quant.quantize_static(network(), [images()], progress=False)


class Time:
    """A clock that stands still but where a test lets time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Sleeper(nn.Module):
    """Takes so many seconds of a clock."""

    def __init__(self, clock: Time, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return x * self.seconds


def test_percentiles_are_times_that_were_measured() -> None:
    samples = [float(one) for one in range(1, 201)]
    found = Latency.of(samples[::-1])
    assert (found.calls, found.p50, found.p90, found.p99, found.mean, found.least) == (200, 100, 180, 198, 100.5, 1)
    assert Latency.of([3.0, 1.0, 2.0]) == Latency(3, 2.0, 3.0, 3.0, 2.0, 1.0)
    assert Latency.of([5.0]) == Latency(1, 5.0, 5.0, 5.0, 5.0, 5.0)


def test_contenders_take_turns_and_the_first_call_of_a_turn_is_not_counted() -> None:
    clock, called = Time(), []

    def contender(name: str) -> Callable[[], None]:
        def call() -> None:
            # The first call after the other's finds its data in the caches.
            clock.now += 100.0 if called and called[-1] != name else 1.0
            called.append(name)

        return call

    samples = timed_in_turns({"a": contender("a"), "b": contender("b")}, 40.0, clock)
    assert {name: [len(turn) for turn in turns] for name, turns in samples.items()} == {
        "a": [4] * TURNS,
        "b": [4] * TURNS,
    }
    late = [one for turns in samples.values() for turn in turns for one in turn]
    assert late == [1.0] * len(late)


def test_the_speedup_is_of_neighbouring_turns() -> None:
    clock = Time()
    ours, float_model = Sleeper(clock, 0.5), Sleeper(clock, 1.5)
    found = quant.benchmark(ours, torch.ones(3), float_model=float_model, seconds=20.0, clock=clock)
    [row] = found.threads
    assert (row.speedup, row.int8.p50, row.int8.p99) == (3.0, 0.5, 0.5)
    assert row.float_model is not None
    assert row.float_model.p90 == 1.5
    assert row.int8.calls == 10 * 4
    assert found.error == pytest.approx(2 / 3)


def test_a_static_model_has_the_steps_of_its_program() -> None:
    q = static()
    found = quant.benchmark(q, images(), seconds=SHORT)
    program = q.program  # type: ignore[union-attr]
    names = list(dict.fromkeys(one.step for one in program.instructions))
    assert [one.name for one in found] == names
    assert {one.where for one in found} == {"native" if not ops.extension_problem() else "single"}
    assert "0.2.add_5" in names
    assert all(one.seconds >= 0 and one.calls == 1 for one in found)
    assert "execute" not in vars(q.get_submodule("_quant"))


def test_a_native_call_gives_the_same_with_times(monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.extension_problem():
        pytest.skip(ops.extension_problem())
    q, outputs = static(), []
    for x in (images(), images()[:1], images() * torch.nan):
        with torch.no_grad():
            expected = q(x)
            time_steps(q, lambda x=x: outputs.append(q(x)), 2, Time())  # type: ignore[misc]
        assert len(outputs) == 3
        assert all(torch.equal(one.nan_to_num(7), expected.nan_to_num(7)) for one in outputs)
        outputs.clear()


def test_the_times_of_a_native_call_are_of_its_operations() -> None:
    if ops.extension_problem():
        pytest.skip(ops.extension_problem())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten()).eval()
    x = torch.randn(1, 3, 34, 34)
    q = quant.quantize_static(model, [x], progress=False)
    found = {one.name: one for one in quant.benchmark(q, x, seconds=SHORT)}
    # 28 million products a call against a copy of 58 thousand values.
    assert found["2"].kind.startswith("conv_u8s8")
    assert found["2"].seconds > found["3"].seconds


def test_a_dynamic_model_has_its_layers_and_none_keeps_a_hook() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    q = quant.quantize_dynamic(nn.Sequential(inner, inner, nn.LSTM(8, 8)).eval())
    found = quant.benchmark(q, torch.randn(3, 8), seconds=SHORT)
    assert [(one.name, one.kind, one.where, one.calls) for one in found] == [
        ("0.0", "Linear", "layer", 2),
        ("0.1", "ReLU", "layer", 2),
        ("2", "LSTM", "layer", 1),
    ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in q.modules())


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * float(x.sum().item() > 1e9)


def test_the_time_of_a_program_in_an_island_is_counted_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Island(), nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8)
    q = quant.quantize_static(model, [x], progress=False)
    found = quant.benchmark(q, x, seconds=SHORT)
    names = [one.name for one in found]
    assert {"0", "1", "2"} <= set(names)
    assert any(name.startswith("1.layers") for name in names)
    assert sum(one.seconds for one in found) + found.between == pytest.approx(found.call)


def test_calls_of_other_threads_are_not_recorded() -> None:
    q, x = static(), images()

    def call() -> None:
        for _ in range(2):
            other = threading.Thread(target=q, args=(x,))
            other.start()
            other.join()
        q(x)

    with torch.no_grad():
        steps, _ = time_steps(q, call, 2, Time())
    assert {one.calls for one in steps} == {1}


@pytest.mark.parametrize("fails", [False, True])
def test_the_number_of_threads_is_set_back(fails: bool) -> None:
    before, seen = torch.get_num_threads(), []

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            if fails and seen[-1] == before + 2:
                raise RuntimeError("no")
            return x

    model = Counts().eval()
    numbers = (before + 1, before + 2)
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            quant.benchmark(model, torch.ones(1), threads=numbers, seconds=SHORT)
    else:
        found = quant.benchmark(model, torch.ones(1), threads=numbers, seconds=SHORT)
        assert tuple(one.threads for one in found.threads) == numbers
    assert set(seen) == {before, *numbers}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"threads": (1, 0)}, "benchmark: threads has 0, expected numbers from 1"),
        ({"seconds": 0.0}, "benchmark: seconds is 0.0, expected a positive number"),
        ({"seconds": float("nan")}, "benchmark: seconds is nan, expected a positive number"),
        ({"float_model": nn.Linear(2, 2)}, r"benchmark: float_model is in training mode; call its eval\(\) first"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        quant.benchmark(nn.Linear(2, 2).eval(), torch.ones(1, 2), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="benchmark: model is in training mode"):
        quant.benchmark(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="benchmark: model is a str"):
        quant.benchmark("model", torch.ones(1, 2))  # type: ignore[arg-type]


def test_weights_that_are_shared_count_once() -> None:
    layer = nn.Linear(8, 8)
    found = quant.benchmark(nn.Sequential(layer, layer).eval(), torch.ones(1, 8), seconds=SHORT, steps=False)
    assert (found.memory.weights, found.memory.packed, len(found)) == (4 * (64 + 8), 0, 0)
    packed = quant.benchmark(static(), images(), seconds=SHORT, steps=False).memory.packed
    assert (packed > 0) == (not ops.extension_problem())


@pytest.mark.parametrize("timed", [True, False], ids=["steps", "no steps"])
def test_only_steps_that_were_timed_are_printed(timed: bool) -> None:
    found = quant.benchmark(nn.Sequential(nn.Linear(8, 8)).eval(), torch.ones(1, 8), seconds=SHORT, steps=timed)
    assert ("between the steps" in str(found)) == timed


def test_the_peak_of_a_call_is_what_it_held_at_once() -> None:
    if memory.peak_of(lambda: None) is None:
        pytest.skip("this system does not say how much memory was resident at the peak")
    size = 1 << 26

    def call() -> None:
        for _ in range(3):
            torch.ones(size, dtype=torch.uint8)

    found = memory.peak_of(call)
    assert found is not None
    assert 0.9 * size < found < 1.5 * size


def test_memory_is_unknown_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[int] = []
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "away" / "clear_refs")
    assert memory.peak_of(lambda: called.append(1)) is None
    assert called == [1]
    found = quant.benchmark(nn.Linear(2, 2).eval(), torch.ones(1, 2), seconds=SHORT)
    assert (found.memory.first_call, found.memory.call) == (None, None)
    assert "peak of the first call unknown" in str(found)


@pytest.fixture(scope="module")
def measured() -> Benchmark:
    return quant.benchmark(static(), images(), float_model=network(), seconds=SHORT)


def test_it_is_json(measured: Benchmark, tmp_path: Path) -> None:
    text = measured.to_json(tmp_path / "found.json")
    data = json.loads(text)
    assert data == json.loads(json.dumps(measured.to_dict())) == json.loads((tmp_path / "found.json").read_text())
    assert [one["name"] for one in data["steps"]] == [one.name for one in measured]
    assert set(data["threads"][0]["int8"]) == {"calls", "p50", "p90", "p99", "mean", "least"}
    assert 0 < data["error"] < 0.1


def test_the_drawing_has_each_module_and_step_as_wide_as_its_time(measured: Benchmark, tmp_path: Path) -> None:
    measured.plot(tmp_path / "call.svg")
    name = "{http://www.w3.org/2000/svg}"
    widths = {}
    for group in ElementTree.parse(tmp_path / "call.svg").getroot().iter(f"{name}g"):
        title, rectangle = group.find(f"{name}title"), group.find(f"{name}rect")
        assert title is not None
        assert rectangle is not None
        widths[str(title.text).partition(":")[0]] = float(rectangle.attrib["width"])
    whole = max(measured.call, sum(one.seconds for one in measured))
    drawn = [one for one in measured if 960 * one.seconds / whole >= 0.2]  # a narrower one cannot be seen
    assert drawn
    for one in drawn:
        assert widths[one.name] == pytest.approx(max(960 * one.seconds / whole - 0.5, 0.2), abs=0.02)
    inside = [one.seconds for one in measured if one.name.startswith("0.")]
    assert widths["0"] == pytest.approx(960 * sum(inside) / whole - 0.5, abs=0.02)
    with pytest.raises(ValueError, match=r"expected \.svg"):
        measured.plot(tmp_path / "call.png")


def test_it_prints_what_takes_longest_first(measured: Benchmark) -> None:
    lines = measured.table(most=3).splitlines()
    slowest = sorted(measured, key=lambda one: -one.seconds)
    assert [line.split()[0] for line in lines[2:5]] == [one.name for one in slowest[:3]]
    assert lines[5].startswith(f"{len(measured) - 3} more steps: ")
    assert "float over int8" in str(measured)
    assert "differs from the float model's by" in str(measured)

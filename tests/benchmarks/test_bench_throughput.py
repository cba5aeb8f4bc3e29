"""What `bench_throughput.py` counts, and that its processes answer what they are asked."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn


def test_arrangements_are_those_that_differ(load: Callable[[str], ModuleType]) -> None:
    bench = load("bench_throughput")
    assert [str(way) for way in bench.arrangements(2)] == [
        "1 process, 2 threads a call",
        "1 process, 2 workers, 1 thread a call",
        "2 processes, 1 thread a call",
    ]
    assert len(bench.arrangements(1)) == 1


def test_arrivals_are_the_same_each_time_and_as_many_as_asked(load: Callable[[str], ModuleType]) -> None:
    times = load("bench_throughput").arrivals(200, 50)
    assert times == load("bench_throughput").arrivals(200, 50)
    assert len(times) == 10_000
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50, rel=0.05)


def test_a_request_that_outlasts_the_round_counts_in_part(load: Callable[[str], ModuleType]) -> None:
    rate_of = load("bench_throughput").rate_of
    # Two whole requests; one of which a quarter lay in the round of two seconds; one begun as it ended.
    answered = [(0.5, 0.5), (1.0, 0.5), (3.5, 2.0), (4.0, 2.0)]
    assert rate_of(answered, 2.0, 8) == pytest.approx(2.25 * 8 / 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_answers_rounds(
    workers: int, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("throughput_workers")
    monkeypatch.setitem(module.CASES, "small", (lambda: nn.Sequential(nn.Linear(8, 8)), (8,)))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of a process of its own, not of this one
    here, there = multiprocessing.Pipe()
    tickets = module.CONTEXT.Value("q", 0)
    process = threading.Thread(target=module.serve, args=(there, tickets, "small", module.Arrangement(1, workers, 1)))
    process.start()
    assert here.recv() >= 0
    due = (0.0, 0.01, 0.02)
    for round_ in (module.Round(module.INT8, 2, 0.05), module.Round(module.FLOAT, 1, float("inf"), due)):
        tickets.value = 0
        here.send(round_)
        assert here.recv() == "ready"
        here.send(module.time.monotonic())
        answered = here.recv()
        assert all(took >= 0 for _, took in answered)
        if round_.arrivals is None:
            assert answered
        else:
            assert sorted(done - took for done, took in answered) == pytest.approx(due)
    here.close()
    process.join()

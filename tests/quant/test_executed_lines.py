"""What counts the lines of functions, and the places of code that read an attribute."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quant.capture.attribute_reads import reads_of
from quant.capture.executed_lines import ExecutedLines


def counts(n: int) -> int:
    place = 0
    for _ in range(n):
        place += 3
    return place


COUNTING: dict[str, Callable[[int], Any]] = {
    "a loop": counts,
    "a comprehension": lambda n: [k for k in range(n) if k > 40],
    "a generator": lambda n: any(k > 40 for k in range(n)),
    "a filter": lambda n: list(filter(lambda k: k > 40, range(n))),
    "a helper": lambda n: counts(n) > 120,
}


def lines_of(call: Callable[[], Any], *, is_counting: bool = True) -> ExecutedLines:
    lines = ExecutedLines()
    with lines.counting():
        lines.switch(is_counting)
        call()
    return lines


@pytest.mark.parametrize("count", COUNTING.values(), ids=COUNTING)
def test_other_turns_are_other_lines(count: Callable[[int], Any]) -> None:
    eight = lines_of(lambda: count(8))
    assert eight.differ_from(lines_of(lambda: count(9)))
    assert not eight.differ_from(lines_of(lambda: count(8)))


def test_what_ran_once_alone_may_be_cached() -> None:
    assert not lines_of(lambda: counts(8)).differ_from(lines_of(lambda: None))
    assert not lines_of(lambda: counts(8)).differ_from(lines_of(lambda: counts(9), is_counting=False))


def test_lines_count_again_after_a_pause() -> None:
    def paused_at(n: int, other: int) -> ExecutedLines:
        lines = ExecutedLines()
        with lines.counting():
            lines.switch(True)
            counts(n)
            lines.switch(False)
            counts(other)
            lines.switch(True)
            counts(3)
        return lines

    assert not paused_at(8, 30).differ_from(paused_at(8, 40))
    assert paused_at(8, 30).differ_from(paused_at(9, 30))
    assert paused_at(8, 30).differ_from(lines_of(lambda: counts(8)))


class Freed:
    def __init__(self, turns: int) -> None:
        self.turns, self.itself = turns, self
        weakref.finalize(self, counts, turns)

    def __del__(self) -> None:
        counts(self.turns)
        with contextlib.suppress(ZeroDivisionError):
            _ = self.turns / 0


def test_what_runs_when_objects_are_freed_does_not_count() -> None:
    def collected(phase: str, info: object) -> None:
        counts(len(freed))

    def counts_and_frees(n: int, objects: int) -> ExecutedLines:
        def call() -> None:
            freed.clear()
            gc.collect()
            counts(n)

        freed.extend(Freed(turns) for turns in range(objects))
        return lines_of(call)

    freed: list[Freed] = []
    gc.callbacks.append(collected)
    try:
        assert not counts_and_frees(8, 0).differ_from(counts_and_frees(8, 5))
        assert counts_and_frees(8, 5).differ_from(counts_and_frees(9, 5))
    finally:
        gc.callbacks.remove(collected)


def test_a_trace_function_is_put_back() -> None:
    def mine(frame: object, event: str, argument: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        with pytest.raises(ZeroDivisionError):
            lines_of(lambda: 1 / 0)
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.local = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
        self.outside, self.named = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        local, other = self.local, self.twice
        return x @ self.once + local + local.t() + other + self.twice + self.outside + self.named


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.owner(x) + self.owner.outside + getattr(self.owner, "named")  # noqa: B009
        return y


@pytest.mark.parametrize(
    ("name", "is_read_elsewhere"),
    [("once", False), ("twice", True), ("local", True), ("outside", True), ("named", True)],
)
def test_the_places_that_read_an_attribute(name: str, is_read_elsewhere: bool) -> None:
    model = Around()
    assert (reads_of(model, model.owner, name) > 1) == is_read_elsewhere

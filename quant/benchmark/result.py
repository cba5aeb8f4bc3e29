"""What `quant.benchmark` measured, as a table, a drawing and JSON."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quant.calibrate.whole_files import replace_file
from quant.page.flame import Part, drawn_flame
from quant.page.text_table import aligned

COLOURS = {"native": "#1f6f8b", "single": "#b4631a", "layer": "#4b6e2e"}
"""Of a step's rectangle, by where it runs."""

BETWEEN, GREY = "(between the steps)", "#8a929c"


@dataclass(frozen=True)
class Latency:
    """The times of calls, in seconds.

    Attributes:
        calls: how many were timed.
        p50, p90, p99: the time that half, nine tenths and 99 % of the calls take at most; of fewer than 100 calls p99
            is the longest.
        mean, least: of all.
    """

    calls: int
    p50: float
    p90: float
    p99: float
    mean: float
    least: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Latency:
        """Of the seconds of each call, one at least."""
        ordered = sorted(samples)

        def rank(share: float) -> float:
            return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

        mean = statistics.fmean(ordered)
        return cls(len(ordered), rank(0.5), rank(0.9), rank(0.99), mean, ordered[0])


@dataclass(frozen=True)
class Threads:
    """The latency with a number of threads.

    Attributes:
        threads: of torch and our kernels.
        int8: of the int8 model.
        float_model: of the float model; None where none was given.
        speedup: how many times longer the float model takes: the median over the turns of both, which ran one after the
            other; None where none was given.
    """

    threads: int
    int8: Latency
    float_model: Latency | None
    speedup: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes of a model.

    Attributes:
        weights: of its parameters and buffers.
        packed: of packed weights that this process holds besides them, after the first call.
        first_call, call: of resident memory at the peak of the first call and of the next one, above what was resident
            before it. The first call packs weights and fills caches; where the model was called before, it did so then.
            None where the system does not say.
    """

    weights: int
    packed: int
    first_call: int | None
    call: int | None


@dataclass(frozen=True)
class StepTime:
    """A step of the int8 model's call.

    Attributes:
        name: dotted, as `print(q.program)` and `quant.compare` have it, or the name of the layer.
        kind: what computes it: the operation, function or class; of several, the one that takes longest.
        where: "native", in a native call with other steps; "single", by itself, called by Python; "layer", called by
            the user's own forward.
        calls: how often it ran in one call of the model.
        seconds: of one call of the model, median.
        share: of the whole call's time.
    """

    name: str
    kind: str
    where: str
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class Benchmark:
    """What `quant.benchmark` measured. Printable, iterable over `steps`, and JSON.

    Attributes:
        threads: the latency, by number of threads.
        memory, float_memory: of the int8 model, and of the float model if one was given.
        error: of the int8 model's output on the example, relative to the float model's: the norm of the difference over
            the norm; None without a float model, or where no output is real.
        steps: of the int8 model, in the order in which they run, with the first number of threads.
        call: seconds of a call whose steps are timed, which takes longer than one whose are not: the sum of the steps'
            medians and of the median of what is between them.
        machine: the CPU, the instruction set and backend in use, and versions.
    """

    threads: tuple[Threads, ...]
    memory: Memory
    float_memory: Memory | None
    error: float | None
    steps: tuple[StepTime, ...]
    call: float
    machine: dict[str, str]

    def __iter__(self) -> Iterator[StepTime]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def between(self) -> float:
        """Seconds of a call that belong to no step: Python between them, and the copying of inputs and outputs."""
        return max(0.0, self.call - sum(one.seconds for one in self.steps))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {**asdict(self), "between": self.between}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same as text, which is also written to `path`, if any."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            replace_file(path, text + "\n", "quant.benchmark: to_json")
        return text

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a drawing of a call: modules above, their steps below, each as wide as its time.

        Args:
            path: of an .svg file, which browsers show.

        Raises:
            ValueError: another suffix.
        """
        whole = max(self.call, sum(one.seconds for one in self.steps)) or 1.0
        parts = [
            Part(one.name or "(root)", one.seconds / whole, f"{one.name}: {one.kind}, {_ms(one.seconds)} ms, "
                 f"{100 * one.share:.1f} %", COLOURS[one.where])
            for one in self.steps
        ]  # fmt: skip
        if self.between:
            says = f"{_ms(self.between)} ms of Python between the steps, and of copies of inputs and outputs"
            parts.append(Part(BETWEEN, self.between / whole, says, GREY))
        present = {one.where for one in self.steps}
        words = {"native": "in a native call", "single": "by itself", "layer": "called by the model's forward"}
        legend = {words[where]: colour for where, colour in COLOURS.items() if where in present}
        title = f"Where {_ms(self.call)} ms of a call go, {self.threads[0].threads} thread(s)"
        drawn_flame(path, title, "call", parts, legend)

    def table(self, most: int | None = 20) -> str:
        """The steps as a table, those that take longest first; `most` of them, None for all."""
        chosen = sorted(self.steps, key=lambda one: -one.seconds)[:most]
        rows = [[one.name or "(root)", one.kind, one.where, str(one.calls), _ms(one.seconds), f"{100 * one.share:.1f}"]
                for one in chosen]  # fmt: skip
        lines = aligned([["step", "kind", "runs", "calls", "ms", "%"], *rows], left=3)
        others = len(self.steps) - len(chosen)
        rest = sum(one.seconds for one in self.steps) - sum(one.seconds for one in chosen)
        if others:
            lines.append(f"{others} more steps: {_ms(rest)} ms")
        lines.append(f"between the steps: {_ms(self.between)} ms of {_ms(self.call)} ms")
        return "\n".join(lines)

    def __str__(self) -> str:
        head = ["threads", "model", "calls", "p50 ms", "p90", "p99", "least", "float over int8"]
        rows = []
        for one in self.threads:
            ratio = "" if one.speedup is None else f"{one.speedup:.2f}"
            rows.append([str(one.threads), "int8", *_cells(one.int8), ratio])
            if one.float_model is not None:
                rows.append([str(one.threads), "float", *_cells(one.float_model), ""])
        lines = aligned([head, *rows], left=2)
        memory = [("int8", self.memory), *([] if self.float_memory is None else [("float", self.float_memory)])]
        for name, held in memory:
            lines.append(
                f"{name}: weights {_kib(held.weights)}, packed besides {_kib(held.packed)}; peak of the first call "
                f"{_kib(held.first_call)}, of a call {_kib(held.call)}"
            )
        if self.error is not None:
            lines.append(f"output: differs from the float model's by {self.error:.3g} of its norm")
        steps = ["", self.table()] if self.call else []  # 0 where no steps were timed
        lines += [*steps, "", ", ".join(f"{name} {value}" for name, value in self.machine.items() if value)]
        return "\n".join(lines)


def _cells(one: Latency) -> list[str]:
    return [str(one.calls), *(_ms(value) for value in (one.p50, one.p90, one.p99, one.least))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _kib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1024:.1f} KiB"

"""The measuring that every benchmark shares: who is timed against whom, how, and what is kept.

Contenders of one case run in one process, round-robin: each round times every contender once, and a comparison is the
median over rounds of the two times' ratio in the same round, so that a machine that slows down slows both. Here are
also the facts of the machine and the raw numbers as JSON. What is measured stands in the bench_*.py, the peers in
peers.py, tables and charts in display.py.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results"
"""Where raw numbers go; not in git."""

SAMPLE_SECONDS = 0.003
"""A sample calls its contender until about this long has passed: far above the clock's 0.1 us, and short enough for
many rounds."""

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: how the table calls it.
        call: one inference; what it returns is ignored.
        scope: a context for its samples, outside the timed part: the engine switch of a library that has one.
        error: of its output against the float model's, measured beforehand; None for the float model itself.
    """

    name: str
    call: Callable[[], object]
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    error: float | None = None


@dataclass(frozen=True)
class Effort:
    """How long one case is measured, by the wall clock.

    Attributes:
        seconds: the least time, and also the most unless the case is undecided.
        rounds: the least number of rounds, whatever they cost.
        patience: how many times `seconds` an undecided case may take.
    """

    seconds: float = 2.5
    rounds: int = 15
    patience: float = 4.0


@dataclass(frozen=True)
class Estimate:
    """A median with the bounds of its confidence interval (percentile bootstrap over rounds)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of samples that are independent given the order of rounds; the resampling is seeded."""
        data = np.asarray(values, dtype=np.float64)
        if data.size == 0 or not np.isfinite(data).all():
            raise ValueError(f"expected finite samples, at least one, got {list(values)}")
        chosen = np.random.default_rng(0).integers(0, data.size, size=(RESAMPLES, data.size))
        low, high = np.quantile(np.median(data[chosen], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return cls(float(np.median(data)), float(low), float(high))


@dataclass
class Race:
    """What one case gave.

    Attributes:
        case: its name.
        shape: what was computed, for the record.
        seconds: by contender, the time of one call in each round.
        calls: by contender, how many calls a sample averages.
        errors: by contender, `Contender.error`.
        cpu_share: of the wall time, what this thread had a core for; well below 1 means that others wanted it too.
    """

    case: str
    shape: dict[str, Any]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)
    cpu_share: float = 1.0

    def time(self, name: str) -> Estimate:
        """Seconds a call."""
        return Estimate.of(self.seconds[name])

    def ratio(self, name: str, against: str) -> Estimate:
        """How many times longer `name` takes than `against`, round by round."""
        pairs = zip(self.seconds[name], self.seconds[against], strict=True)
        return Estimate.of([theirs / ours for theirs, ours in pairs])

    def to_dict(self) -> dict[str, Any]:
        """Everything measured, and the medians and minima for readers in a hurry."""
        summary = {name: {**asdict(self.time(name)), "min": min(times)} for name, times in self.seconds.items()}
        return {**asdict(self), "summary": summary}


def race(
    case: str,
    contenders: Sequence[Contender],
    *,
    effort: Effort,
    shape: dict[str, Any] | None = None,
    undecided: Callable[[Race], bool] = lambda race: False,
    clock: Callable[[], float] = time.perf_counter,
    settle: float = 0.0,
) -> Race:
    """Time the contenders of one case against each other.

    Args:
        case: its name.
        contenders: at least one, with different names.
        effort: how long.
        shape: recorded with the result.
        undecided: asked once the effort is spent; while it holds, rounds are added, up to the effort's patience.
        clock: seconds, see `clock_for`.
        settle: seconds to sleep before each sample, which then starts with a call that is not counted; for threads that
            go on spinning after their work is done and would be in the next contender's way.
    """
    names = [contender.name for contender in contenders]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"case {case!r}: contenders are {names}, expected different names, at least one")
    result = Race(case, shape or {}, {name: [] for name in names}, {}, {c.name: c.error for c in contenders})
    for contender in contenders:
        result.calls[contender.name] = _calls(contender, clock)
    start, start_cpu = time.perf_counter(), time.thread_time()
    limit = effort.seconds
    with _no_garbage_collection():
        while True:
            # Each round starts with another contender, so that nobody always runs in the same neighbour's cache.
            turn = len(result.seconds[names[0]]) % len(names)
            for contender in (*contenders[turn:], *contenders[:turn]):
                result.seconds[contender.name].append(_sample(contender, result.calls[contender.name], clock, settle))
            rounds, spent = len(result.seconds[names[0]]), time.perf_counter() - start
            if rounds < effort.rounds or spent < limit:
                continue
            if spent >= effort.seconds * effort.patience or not undecided(result):
                break
            limit = spent + effort.seconds / 2
    result.cpu_share = min(1.0, (time.thread_time() - start_cpu) / (time.perf_counter() - start))
    return result


def clock_for(threads: int) -> Callable[[], float]:
    """The clock for contenders that compute on so many threads.

    One thread: the process's CPU time, which is the wall time less what others took of the core. All contenders compute
    and none waits, so that on an idle machine the two are equal. More threads: the wall time.
    """
    return time.process_time if threads == 1 else time.perf_counter


def _calls(contender: Contender, clock: Callable[[], float]) -> int:
    """How many calls a sample needs; warms up on the way (caches, packing, lazy initialisation)."""
    with contender.scope():
        contender.call()
        calls = 1
        while True:
            start = clock()
            for _ in range(calls):
                contender.call()
            spent = clock() - start
            if spent >= SAMPLE_SECONDS / 2:
                return max(1, round(calls * SAMPLE_SECONDS / spent))
            calls *= 2


def _sample(contender: Contender, calls: int, clock: Callable[[], float], settle: float = 0.0) -> float:
    """Seconds a call, over `calls` calls."""
    call = contender.call
    time.sleep(settle)
    with contender.scope():
        if calls > 1 or settle:
            call()  # brings its weights back into the cache, where the loop then keeps them
        start = clock()
        for _ in range(calls):
            call()
        return (clock() - start) / calls


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def relative_error(y: Tensor, reference: Tensor) -> float:
    """||y - reference|| / ||reference||."""
    return float((y.double() - reference.double()).norm() / reference.double().norm())


def cosine(y: Tensor, reference: Tensor) -> float:
    """Of the angle between two tensors, as vectors."""
    y, reference = y.double().flatten(), reference.double().flatten()
    return float(y @ reference / (y.norm() * reference.norm()))


def pin(threads: int) -> list[int]:
    """Compute on `threads` threads, and on as many CPUs where the system lets us choose; returns those CPUs.

    The last ones of those allowed, because interrupts and everyone else's processes like the first.
    """
    torch.set_num_threads(threads)
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise ValueError(f"{threads} threads asked for, but this process may use {len(allowed)} CPUs")
    chosen = allowed[-threads:]
    os.sched_setaffinity(0, chosen)
    return chosen


def in_children(counts: Iterable[int], arguments: Sequence[str]) -> int:
    """Run this script once for each number of threads, each in a process of its own; returns the worst exit status.

    A process of its own, because thread pools do not shrink and keep the CPUs they were made on.
    """
    script = [sys.executable, sys.argv[0], *arguments]
    return max(subprocess.run([*script, "--threads", str(count)], check=False).returncode for count in counts)


def machine(packages: Iterable[str] = (), threads: int = 1, cpus: Sequence[int] = ()) -> dict[str, Any]:
    """What a number is worth nothing without: CPU, instruction sets, threads, load, versions, commit."""
    name, flags = _cpu()
    wanted = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm")
    return {
        "cpu": name or platform.processor(),
        "architecture": platform.machine(),
        "isa": [flag for flag in wanted if flag in flags],
        "cpus": os.cpu_count(),
        "pinned_to": list(cpus),
        "threads": threads,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in ("torch", "numpy", "octet-quant", *packages)},
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "", set()
    lines = [line.partition(":") for line in text.splitlines()]
    facts = {key.strip(): value.strip() for key, _, value in lines}
    return facts.get("model name", ""), set(facts.get("flags", facts.get("Features", "")).split())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(facts: dict[str, Any]) -> str:
    """`machine()` in three lines."""
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in facts["versions"].items())
    pinned = f"pinned to CPU {', '.join(map(str, facts['pinned_to']))}" if facts["pinned_to"] else "not pinned"
    return (
        f"{facts['cpu']} ({facts['architecture']}: {' '.join(facts['isa'])}), {facts['cpus']} CPUs, "
        f"load {facts['load_average'][0]}\n"
        f"{facts['threads']} thread(s), {pinned}; commit {facts['commit']}\n"
        f"Python {facts['python']}, {versions}"
    )


def save(name: str, content: dict[str, Any]) -> Path:
    """Write raw numbers as results/NAME-TIME.json; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path

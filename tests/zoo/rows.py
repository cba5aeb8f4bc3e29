"""Rows of a long run over the zoo: each computed in a process of its own, and kept as a line of JSON as it comes.

A crash or a hang is a row, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from .catalogue import CATALOGUE, library
from .torchvision_ops import import_library

PATIENCE = 6
"""Times the limit until a row ends whatever it does: one that waits for something uses no CPU time."""

Key: TypeAlias = tuple[str, str]
"""An architecture's name and how it is measured, a word of the caller's."""

Row: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Limits:
    """How rows are computed.

    Attributes:
        seconds: of CPU time, for one row.
        jobs: processes at a time.
        minutes: after which no further row is begun; those that run end.
    """

    seconds: int
    jobs: int = 1
    minutes: float = math.inf


def kept(path: Path) -> dict[Key, Row]:
    """The rows of an earlier run; a last line that was cut off does not count."""
    rows = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["name"], row["mode"]] = row
    return rows


def computable(todo: list[Key], *, training: bool = False) -> list[Key]:
    """Those whose library is installed, imported for the processes to come; what is missing is said on stderr."""
    missing = _preload({library(CATALOGUE[name]) for name, _ in todo}, training=training)
    for reason in missing.values():
        print(f"left out: {reason}", file=sys.stderr)
    return [(name, mode) for name, mode in todo if library(CATALOGUE[name]) not in missing]


def _preload(libraries: set[str], *, training: bool) -> dict[str, str]:
    """Import the libraries before the processes are forked, which then have them. Returns what is missing and why."""
    torch.set_num_threads(1)  # no pool of threads, which a fork would not take along
    if training:
        importlib.import_module("torch._dynamo")  # every optimiser imports it, for seconds
    missing = {}
    for name in sorted(libraries - {"torch"}):
        try:
            import_library(name)
        except ImportError as error:
            missing[name] = f"{name}: {error}; install it with: pip install 'octet-quant[zoo]'"
    return missing


@dataclass
class _Job:
    """One row in the making."""

    key: Key
    process: Any
    answer: Connection
    deadline: float


def compute(
    todo: list[Key], measure: Callable[[Key], Row], path: Path, limits: Limits, note: Callable[[Row], None]
) -> None:
    """Compute rows in processes of their own, and write each to the file as it comes.

    Args:
        measure: gives the row of a key; it runs in a child process.
        path: of the lines; those that are there are kept.
        note: is told each row, `verdict` among it.
    """
    queue, running = todo[::-1], []
    last = time.monotonic() + 60 * limits.minutes
    path.parent.mkdir(parents=True, exist_ok=True)
    _end_line(path)
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(todo), unit="row", smoothing=0.05) as bar:
        while queue or running:
            if time.monotonic() >= last:
                queue.clear()
            while queue and len(running) < limits.jobs:
                running.append(_start(queue.pop(), measure, limits.seconds))
            bar.set_postfix_str(", ".join(" ".join(job.key) for job in running))
            multiprocessing.connection.wait([job.answer for job in running], timeout=1.0)
            for job in list(running):
                row = _finished(job, limits.seconds)
                if row is None:
                    continue
                running.remove(job)
                file.write(json.dumps(row) + "\n")
                file.flush()
                bar.update()
                note(row)


def _end_line(path: Path) -> None:
    """End a last line that was cut off, so that the next row begins its own."""
    if path.exists() and path.read_text(encoding="utf-8")[-1:] not in ("", "\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")


def _start(key: Key, measure: Callable[[Key], Row], limit: int) -> _Job:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(key, measure, limit, there), daemon=True)
    process.start()
    there.close()
    return _Job(key, process, here, time.monotonic() + PATIENCE * limit)


def _child(key: Key, measure: Callable[[Key], Row], limit: int, answer: Connection) -> None:
    """Measure one row; what the model prints does not belong between the progress bars."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    answer.send(measure(key))


def _finished(job: _Job, limit: int) -> Row | None:
    """The row of a job that has ended, one way or the other; None while it runs."""
    row: Row = {"name": job.key[0], "mode": job.key[1]}
    if job.answer.poll():
        try:
            row = job.answer.recv()
        except EOFError:
            job.process.join()
            row["verdict"] = f"fails: {_ending(job.process.exitcode, limit)}"
    elif time.monotonic() < job.deadline:
        return None
    else:
        row["verdict"] = f"fails: no end after {PATIENCE * limit} s"
    job.process.kill()
    job.process.join()
    job.answer.close()
    return row


def _ending(code: int, limit: int) -> str:
    if code == -signal.SIGXCPU:
        return f"no end after {limit} s of CPU time"
    return f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"

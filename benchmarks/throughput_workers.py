"""Processes that answer requests with a model, for `bench_throughput.py`.

A process holds the float and the int8 model of one case; its workers are threads that call the same one. All workers of
all processes draw tickets from one counter, so that a request goes to whoever is free first, as in a server with one
queue. A ticket's request arrives at a time that is fixed beforehand, or, where there is none, at once.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeAlias

import networks
import torch
from torch import Tensor, nn

import quant

FLOAT, INT8 = "float", "octet"
CONTEXT = multiprocessing.get_context("spawn")
LEAD = 0.02
"""Seconds from the word to begin to the beginning, which is then the same for all."""


def lstm() -> nn.Module:
    """Two layers of 512 over sequences of 35 steps."""
    return nn.LSTM(512, 512, 2, batch_first=True)


def bert() -> nn.Module:
    """Four layers of BERT-base."""
    return nn.Sequential(*(networks.BertLayer() for _ in range(4)))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18": (networks.ResNet18, (3, 224, 224)),
    "MobileNetV2": (networks.MobileNetV2, (3, 224, 224)),
    "BERT, 4 layers": (bert, (128, 768)),
    "LSTM H512": (lstm, (35, 512)),
}
"""Name -> the float model, and the shape of one sample."""


@dataclass(frozen=True)
class Arrangement:
    """How the cores are used.

    Attributes:
        processes: each with models of its own.
        workers: threads of a process that answer requests.
        threads: that one call computes on.
    """

    processes: int
    workers: int
    threads: int

    def __str__(self) -> str:
        many = "processes" if self.processes > 1 else "process"
        inside = f"{self.workers} workers, " if self.workers > 1 else ""
        return f"{self.processes} {many}, {inside}{self.threads} thread{'s' if self.threads > 1 else ''} a call"


@dataclass(frozen=True)
class Round:
    """What the workers do next.

    Attributes:
        who: FLOAT or INT8.
        batch: samples a request.
        seconds: after which no more requests are begun.
        arrivals: seconds from the beginning, a request each; None where a worker's next one is always there.
    """

    who: str
    batch: int
    seconds: float
    arrivals: tuple[float, ...] | None = None


Answered: TypeAlias = list[tuple[float, float]]
"""For each request: when it was answered, in seconds from the round's beginning, and how long it waited and took."""


def models(case: str) -> dict[str, nn.Module]:
    """The float model of a case with random weights, and its int8 form: dynamic if it is recurrent, else static."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    batches = [torch.randn(2, *shape) for _ in range(4)]
    model = networks.settle_norms(make(), batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the batches are few
        recurrent = isinstance(model, nn.LSTM)
        int8 = quant.quantize_dynamic(model) if recurrent else quant.quantize_static(model, batches, progress=False)
    return {FLOAT: model, INT8: int8}


def serve(connection: Connection, tickets: Synchronized[int], case: str, arrangement: Arrangement) -> None:
    """Answer rounds until the connection closes: the body of a process."""
    torch.set_num_threads(arrangement.threads)
    made = models(case)
    inputs: dict[int, Tensor] = {}
    met: set[tuple[str, int]] = set()
    connection.send(proportional_memory())
    while (round_ := _received(connection)) is not None:
        x = inputs.setdefault(round_.batch, torch.randn(round_.batch, *CASES[case][1]))
        if (round_.who, round_.batch) not in met:
            met.add((round_.who, round_.batch))
            with torch.inference_mode():
                made[round_.who](x)  # what is packed, planned and allocated once
        connection.send("ready")
        begin: float = connection.recv()
        answered: list[Answered] = [[] for _ in range(arrangement.workers)]
        work = functools.partial(_work, made[round_.who], x, round_, begin, tickets)
        workers = [threading.Thread(target=work, args=(own,)) for own in answered]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        connection.send([one for own in answered for one in own])


def _received(connection: Connection) -> Round | None:
    try:
        message: Round = connection.recv()
    except EOFError:
        return None
    return message


def _work(
    model: nn.Module, x: Tensor, round_: Round, begin: float, tickets: Synchronized[int], answered: Answered
) -> None:
    with torch.inference_mode():
        while time.monotonic() < begin + round_.seconds:
            due = begin
            if round_.arrivals is not None:
                ticket = _draw(tickets)
                if ticket >= len(round_.arrivals):
                    return
                due += round_.arrivals[ticket]
            time.sleep(max(0.0, due - time.monotonic()))
            came = due if round_.arrivals is not None else time.monotonic()
            model(x)
            done = time.monotonic()
            answered.append((done - begin, done - came))


def _draw(tickets: Synchronized[int]) -> int:
    with tickets.get_lock():
        ticket = tickets.value
        tickets.value += 1
    return ticket


def proportional_memory() -> int:
    """Bytes of this process, pages that it shares counted in part (Linux's Pss); 0 where the system does not say."""
    try:
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


class Service:
    """The processes of one arrangement, with the models of one case. Close it."""

    def __init__(self, case: str, arrangement: Arrangement) -> None:
        self.tickets: Any = CONTEXT.Value("q", 0)
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(arrangement.processes):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(there, self.tickets, case, arrangement), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self.memory: int = sum(self._hear())

    def run(self, who: str, batch: int, seconds: float, arrivals: Sequence[float] | None = None) -> Answered:
        """One round by all processes, by default with as many requests as they can answer."""
        self.tickets.value = 0
        until = seconds if arrivals is None else math.inf
        round_ = Round(who, batch, until, None if arrivals is None else tuple(arrivals))
        self._tell(round_)
        self._hear()
        self._tell(time.monotonic() + LEAD)
        return [one for answered in self._hear() for one in answered]

    def _tell(self, message: object) -> None:
        for connection in self._connections:
            connection.send(message)

    def _hear(self) -> list[Any]:
        return [connection.recv() for connection in self._connections]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

"""Two gloo processes that train together, as a user's loop does it: rank 0 writes the state after each step.

fuzz_kills.py kills one of them, or both, and has them go on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import killed_jobs
from .two_ranks import STEPS, Run

CHECKPOINT = "training.pt"


def train(folder: Path, store: Path, rank: int) -> dict[str, object]:
    """Train to the end from what is there; the digest of the model, and the step that it began with."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    run, path = Run("moving_average", rank), folder / CHECKPOINT
    if path.exists():
        run.load(torch.load(path))
    torch.distributed.barrier()  # nobody writes before both have read
    begun = run.schedule.count
    while run.schedule.count < STEPS:
        run.until(run.schedule.count + 1)
        if rank == 0:
            partial = folder / f".{CHECKPOINT}.partial"
            torch.save(run.state(), partial)
            partial.replace(path)
    torch.distributed.barrier()
    return {"digest": killed_jobs.digest(run.model), "begun": begun}


def pair(folder: Path, store: Path, arms: tuple[Callable[[], object], Callable[[], object]]) -> list[dict[str, object]]:
    """Both ranks to their ends: what each said, or {"killed": name of the signal}, or {"error": ...}.

    Where one is killed the other is, a moment later, as torchrun does: it may wait for half an hour.
    """
    children: dict[int, Path] = {}
    for rank in range(2):
        answer = store.with_name(f"{store.name}.{rank}.json")
        pid = os.fork()
        if pid == 0:
            try:
                arms[rank]()
                torch.set_num_threads(1)
                said = train(folder, store, rank)
            except BaseException as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            answer.write_text(json.dumps(said), encoding="utf-8")
            os._exit(0)
        children[pid] = answer
    said_by = {}
    while len(said_by) < len(children):
        pid, status = os.waitpid(-1, 0)
        said_by[pid] = _said(status, children[pid])
        if "digest" not in said_by[pid]:
            time.sleep(GRACE)
            for other in children.keys() - said_by.keys():
                os.kill(other, signal.SIGKILL)
    return [said_by[pid] for pid in children]


GRACE = 1.0
"""Seconds."""


def _said(status: int, answer: Path) -> dict[str, object]:
    if os.WIFSIGNALED(status):
        return {"killed": signal.Signals(os.WTERMSIG(status)).name}
    said: dict[str, object] = json.loads(answer.read_text(encoding="utf-8"))
    return said

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
    """Both ranks to their ends: what each said, or {"killed": True}, or {"error": ...}."""
    children = []
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
        children.append((pid, answer))
    return [_end_of(pid, answer) for pid, answer in children]


def _end_of(pid: int, answer: Path, seconds: float = 600.0) -> dict[str, object]:
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"hung": True}
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        return {"killed": signal.Signals(os.WTERMSIG(status)).name}
    said: dict[str, object] = json.loads(answer.read_text(encoding="utf-8"))
    return said

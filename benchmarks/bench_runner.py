"""The torch-free runner beside Python: time of a call, and of a process from its start to the first result.

    make bench-runner
    make bench-runner ARGS='--threads 1 2'

Calls take turns in one process, with equal threads, and a model has a row for each number of them. One thread is
measured in CPU time, which others who use the machine disturb less, several in wall time. "Python" is the int8 model
itself, "loaded" the file in Python without the float model (`quant.load(path)`), and the ratios are the runner's time
over theirs. "bits" says whether the runner's outputs are the loaded file's, to the last bit, and whether they are the
model's: those of dynamic models with attention, norms or softmax, which the model leaves to torch, agree within
rounding. The errors are relative to the float model, L2 over all outputs, of the int8 model and of the runner.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from runner_cases import CASES, Task
from torch import Tensor
from zoo.fetch import DataUnavailable

import quant
from quant.export.naming import named_leaves

CHECKOUT = Path(__file__).resolve().parents[1]
DTYPES = {torch.float32: 0, torch.uint8: 1, torch.bool: 2, torch.int64: 3}
"""octet_dtype of octet.h."""


class OctetTensor(ctypes.Structure):
    """octet_tensor of octet.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
    ]


def described(tensor: Tensor) -> OctetTensor:
    result = OctetTensor(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.dim())
    result.sizes[: tensor.dim()], result.strides[: tensor.dim()] = tensor.shape, tensor.stride()
    return result


def runner_call(
    library: ctypes.CDLL, path: Path, inputs: Sequence[Tensor], threads: int
) -> tuple[Callable[[], int], list[Tensor]]:
    """A call of octet_run on some inputs, and the tensors that it writes."""
    model = ctypes.c_void_p(library.octet_open(str(path).encode()))
    assert model, library.octet_error().decode()
    library.octet_set_threads(model, threads)
    given = (OctetTensor * len(inputs))(*map(described, inputs))
    results = (OctetTensor * library.octet_output_count(model))()
    assert library.octet_plan(model, given, results) == 0, library.octet_error().decode()
    outputs = []
    for one in results:
        outputs.append(torch.empty_strided(one.sizes[: one.rank], one.strides[: one.rank]))
        one.data = outputs[-1].data_ptr()
    return lambda: library.octet_run(model, given, results), outputs


def in_turns(calls: list[Callable[[], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """The median time of each call, in milliseconds."""
    times: list[list[float]] = [[] for _ in calls]
    for place in range(rounds + 3):
        for call, taken in zip(calls, times, strict=True):
            begin = clock()
            call()
            if place >= 3:
                taken.append(clock() - begin)
    return [1e3 * statistics.median(taken) for taken in times]


CHILD = """
import json, os, sys
times, memory = [], []
for _ in range(int(sys.argv[1])):
    silent = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    child = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=[silent])
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    times.append(1e3 * (usage.ru_utime + usage.ru_stime))
    memory.append(usage.ru_maxrss / 1024)
print(json.dumps([times, memory]))
"""
"""Starts processes from a small one: Linux counts the memory of the one that a process was started by as its own."""


@dataclass(frozen=True)
class Start:
    """A process that opens a model, plans, packs and gives one result: medians of its CPU time and of its most memory,
    which is at least that of a Python that has imported nothing."""

    milliseconds: float
    mebibytes: float


def start_up(program: Path, path: Path, arrays: Sequence[Path], times: int) -> Start:
    words = [str(program), str(path), "--threads", "1"]
    for array in arrays:
        words += ["--input", str(array)]
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(times), *words]
    taken, memory = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return Start(statistics.median(taken), statistics.median(memory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", type=Path, default=CHECKOUT / "build", help="the folder that `make runner` fills")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="a part of a model's name")
    options = parser.parse_args()
    library = ctypes.CDLL(str(options.runner / "liboctet.so"))
    library.octet_open.restype, library.octet_error.restype = ctypes.c_void_p, ctypes.c_char_p
    library.octet_instruction_set.restype = ctypes.c_char_p
    size = (options.runner / "octet-run").stat().st_size / 1e6
    print(f"octet-run {size:.2f} MB, {library.octet_instruction_set().decode()}, torch {torch.__version__}")
    titles = (
        *("model", "threads", "Python ms", "loaded ms", "runner ms", "/ Python", "/ loaded", "start-up ms", "peak MiB"),
        *("file MB", "error", "runner's", "  bits"),
    )
    print(line_of(titles), flush=True)
    for name, build in CASES.items():
        if options.only in name:
            try:
                measure(name, build, library, options)
            except DataUnavailable as error:
                print(f"{name:31}left out: {error}", flush=True)
    return 0


def line_of(cells: Sequence[str]) -> str:
    widths = (-30, 8, 10, 10, 10, 9, 9, 12, 9, 8, 8, 9, -1)
    return "".join(cell.ljust(-w) if w < 0 else cell.rjust(w) for cell, w in zip(cells, widths, strict=True))


def measure(name: str, build: Callable[[], Task], library: ctypes.CDLL, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    task = build()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path, arrays = Path(folder, "model.q8"), [Path(folder, f"{place}.npy") for place in range(len(task.inputs))]
        quant.save(task.model, path, runner=True, example_inputs=task.inputs if task.is_dynamic else None)
        for array, x in zip(arrays, task.inputs, strict=True):
            numpy.save(array, x.numpy())
        start, size = start_up(options.runner / "octet-run", path, arrays, 15), path.stat().st_size / 1e6
        beside = [f"{start.milliseconds:.1f}", f"{start.mebibytes:.1f}", f"{size:.2f}"]
        for threads in options.threads:
            run = timed(task, library, path, threads, options.rounds)
            ratios = (run.runner / run.python, run.runner / run.loaded)
            times = [f"{one:.3f}" for one in (run.python, run.loaded, run.runner, *ratios)]
            errors = [f"{one:.4f}" for one in run.errors]
            print(line_of([name, str(threads), *times, *beside, *errors, f"  {run.bits}"]), flush=True)
            beside = [""] * len(beside)  # of a process, which has one thread


@dataclass(frozen=True)
class Run:
    """Milliseconds of the int8 model, of its file loaded in Python and in the runner; the errors of the first and the
    last against float; and how the runner's outputs agree with the other two."""

    python: float
    loaded: float
    runner: float
    errors: tuple[float, float]
    bits: str


def timed(task: Task, library: ctypes.CDLL, path: Path, threads: int, rounds: int) -> Run:
    """A run on some threads."""
    torch.set_num_threads(threads)
    loaded = quant.load(path)
    call, outputs = runner_call(library, path, task.inputs, threads)
    assert call() == 0
    wanted, own = tensors_of(task.original(*task.inputs)), tensors_of(task.model(*task.inputs))
    errors = (error(own, wanted), error(outputs, wanted))
    bits = f"{agreement(outputs, tensors_of(loaded(*task.inputs)))} loaded, {agreement(outputs, own)} Python"
    clock = time.process_time if threads == 1 else time.perf_counter
    calls = [lambda: task.model(*task.inputs), lambda: loaded(*task.inputs), call]
    return Run(*in_turns(calls, rounds, clock), errors, bits)


def tensors_of(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in named_leaves(output)]


def error(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Relative, L2, over all outputs together."""
    one, other = (torch.cat([tensor.flatten() for tensor in every]) for every in (outputs, wanted))
    return float((one - other).norm() / other.norm())


def agreement(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """ "=" where the bits are equal; else the largest difference over the largest value."""
    if all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True)):
        return "="
    apart = max(
        float((one - other).abs().max() / other.abs().max()) for one, other in zip(outputs, wanted, strict=True)
    )
    return f"{apart:.1e} from"


if __name__ == "__main__":
    sys.exit(main())

"""The torch-free runner beside Python: time of a call, and of a process from its start to the first result.

    make bench-runner

Calls of both take turns in one process, with equal threads. One thread is measured in CPU time, which others who use
the machine disturb less, several in wall time. The outputs have to be equal to the bit.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import networks
import numpy
import torch
from torch import Tensor, nn

import quant

CHECKOUT = Path(__file__).resolve().parents[1]
NETWORKS: dict[str, Callable[[], nn.Module]] = {"ResNet-18": networks.ResNet18, "MobileNetV2": networks.MobileNetV2}


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
    result = OctetTensor(tensor.data_ptr(), 0, tensor.dim())
    result.sizes[: tensor.dim()], result.strides[: tensor.dim()] = tensor.shape, tensor.stride()
    return result


def runner_call(library: ctypes.CDLL, path: Path, x: Tensor, threads: int) -> tuple[Callable[[], int], Tensor]:
    """A call of octet_run on `x`, and the tensor that it writes."""
    model = ctypes.c_void_p(library.octet_open(str(path).encode()))
    assert model, library.octet_error().decode()
    library.octet_set_threads(model, threads)
    given, result = described(x), OctetTensor()
    assert library.octet_plan(model, ctypes.byref(given), ctypes.byref(result)) == 0, library.octet_error().decode()
    y = torch.empty_strided(result.sizes[: result.rank], result.strides[: result.rank])
    result.data = y.data_ptr()
    return lambda: library.octet_run(model, ctypes.byref(given), ctypes.byref(result)), y


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


def start_up(program: Path, path: Path, image: Path, times: int) -> float:
    """CPU time of a process that opens a model, plans, packs and gives one result, in milliseconds; the median."""
    taken = []
    for _ in range(times):
        words = [str(program), str(path), "--input", str(image), "--threads", "1"]
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        taken.append(1e3 * (usage.ru_utime + usage.ru_stime))
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", type=Path, default=CHECKOUT / "build", help="the folder that `make runner` fills")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="a part of a network's name")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    library = ctypes.CDLL(str(options.runner / "liboctet.so"))
    library.octet_open.restype, library.octet_error.restype = ctypes.c_void_p, ctypes.c_char_p
    library.octet_instruction_set.restype = ctypes.c_char_p
    size = (options.runner / "octet-run").stat().st_size / 1e6
    print(f"octet-run {size:.2f} MB, {library.octet_instruction_set().decode()}, {options.threads} threads")
    print(f"{'network':14}{'Python ms':>11}{'runner ms':>11}{'ratio':>8}{'start-up ms':>13}")
    for name, make in NETWORKS.items():
        if options.only in name:
            measure(name, make, library, options, clock)
    return 0


def measure(
    name: str,
    make: Callable[[], nn.Module],
    library: ctypes.CDLL,
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 224, 224)
    model = quant.quantize_static(make().eval(), [x, torch.randn(1, 3, 224, 224)], progress=False)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path, image = Path(folder, "model.q8"), Path(folder, "x.npy")
        quant.save(model, path, runner=True)
        numpy.save(image, x.numpy())
        call, y = runner_call(library, path, x, options.threads)
        assert call() == 0
        assert torch.equal(y, model(x)), f"{name}: the runner gives other bits than Python"
        python, runner = in_turns([lambda: model(x), call], options.rounds, clock)
        start = start_up(options.runner / "octet-run", path, image, 9)
    print(f"{name:14}{python:11.3f}{runner:11.3f}{runner / python:8.3f}{start:13.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

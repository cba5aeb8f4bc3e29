"""`benchmark`: latency against float in turns, by threads; memory; and the time of each step."""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.benchmark.memory import peak_of
from quant.benchmark.result import Benchmark, Latency, Memory, StepTime, Threads
from quant.benchmark.steps import time_steps
from quant.benchmark.turns import timed_in_turns
from quant.capture import as_arguments
from quant.kernels import dispatch, ops
from quant.kernels.race import Clock
from quant.report import own_bytes, summary
from quant.sensitivity.output_error import OutputError

STEP_CALLS = 20
"""Calls whose steps are timed."""

INT8, FLOAT = "int8", "float"


@torch.inference_mode()
def benchmark(
    model: nn.Module,
    example: Any,
    *,
    float_model: nn.Module | None = None,
    threads: Sequence[int] = (),
    seconds: float = 2.0,
    steps: bool = True,
    clock: Clock = time.perf_counter,
) -> Benchmark:
    """Measure the calls of an int8 model on one example: latency, memory, and the time of each step.

    With a float model the two are called in turns, so that a machine that slows down slows both. Calls run under
    inference_mode, on the CPU, in this thread and torch's.

    Args:
        model: int8, from `quant.quantize_dynamic`, `quant.convert` or `quant.load`; in eval mode. Any other module is
            measured too.
        example: inputs of the model: a tensor, a tuple of positional or a dictionary of keyword arguments.
        float_model: the model before quantisation, in eval mode.
        threads: numbers of threads to measure with, one after the other; () for the number that torch has now. This is
            the process's number, as torch has it, and is set back at the end.
        seconds: how long to measure each model with each number of threads, after a warm-up.
        steps: time each step too, in calls of their own.
        clock: returns seconds.

    Raises:
        ValueError: a model is in training mode; a number of threads is less than 1; `seconds` is not positive.
    """
    _check(model, float_model, threads, seconds)
    args, kwargs = as_arguments(example)
    models = {INT8: model, **({} if float_model is None else {FLOAT: float_model})}
    calls = {name: lambda one=one: one(*args, **kwargs) for name, one in models.items()}
    memory = {name: _memory(one, calls[name]) for name, one in models.items()}
    error = None if float_model is None else _error(calls[FLOAT](), calls[INT8]())
    measured: list[Threads] = []
    found: tuple[StepTime, ...] = ()
    call = 0.0
    with _threads_set_back():
        for number in threads or (torch.get_num_threads(),):
            torch.set_num_threads(number)
            measured.append(_latency(timed_in_turns(calls, seconds, clock), number))
            if steps and len(measured) == 1:
                found, call = time_steps(model, calls[INT8], STEP_CALLS, clock)
    return Benchmark(tuple(measured), memory[INT8], memory.get(FLOAT), error, found, call, _machine())


def _check(model: nn.Module, float_model: nn.Module | None, threads: Sequence[int], seconds: float) -> None:
    models: dict[str, object] = {"model": model, **({} if float_model is None else {"float_model": float_model})}
    for name, one in models.items():
        if not isinstance(one, nn.Module):
            raise TypeError(f"benchmark: {name} is a {type(one).__name__}, expected an nn.Module")
        if one.training:
            raise ValueError(f"benchmark: {name} is in training mode; call its eval() first")
    wrong = [number for number in threads if number < 1]
    if wrong:
        raise ValueError(f"benchmark: threads has {wrong[0]}, expected numbers from 1")
    if not seconds > 0:
        raise ValueError(f"benchmark: seconds is {seconds}, expected a positive number")


@contextlib.contextmanager
def _threads_set_back() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _latency(samples: Mapping[str, list[list[float]]], threads: int) -> Threads:
    """Of the calls of each turn."""
    by_model = {name: Latency.of([one for turn in turns for one in turn]) for name, turns in samples.items()}
    speedup = None
    if FLOAT in samples:
        pairs = zip(samples[FLOAT], samples[INT8], strict=True)
        speedup = statistics.median(statistics.median(theirs) / statistics.median(ours) for theirs, ours in pairs)
    return Threads(threads, by_model[INT8], by_model.get(FLOAT), speedup)


def _memory(model: nn.Module, call: Callable[[], object]) -> Memory:
    counted: set[int] = set()
    weights = sum(own_bytes(module, counted) for module in model.modules())
    first, later = peak_of(call), peak_of(call)
    return Memory(weights, summary(model).bytes_packed, first, later)


def _error(expected: Any, output: Any) -> float | None:
    """The norm of the difference over that of `expected`, over all real tensors of both; None where there is none."""
    sums = OutputError()
    sums.add(expected, output)
    return (sums.noise / sums.signal) ** 0.5 if sums.signal else None


def _machine() -> dict[str, str]:
    isa = "" if ops.extension_problem() else str(torch.ops.octet_native.isa())
    return {"backend": dispatch.current().name, "ISA": isa, "machine": platform.machine(), "torch": torch.__version__}

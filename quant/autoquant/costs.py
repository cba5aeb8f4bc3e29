"""What a model costs here: its time beside the float model's, and its bytes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from quant.capture import as_arguments
from quant.kernels.race import Clock, clearly_faster, race, timed
from quant.report import own_bytes
from quant.runtime.arguments import copied
from quant.submodule_calls import evaluating

FINE = 1e-6
"""Seconds: the coarsest clock that can time a call."""

PASSES = 5
"""Runs of the float model by which its layers' times are measured."""


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        seconds: of a call at the example's shape, the least of all rounds: what else the machine does only adds.
        float_seconds: of the float model, in the same rounds.
        ratio: of the two.
        faster, slower: whether it is so clearly, by the rule of the autotuner.
        bytes: of its parameters and buffers.
    """

    seconds: float
    float_seconds: float
    ratio: float
    faster: bool
    slower: bool
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def cost_of(model: nn.Module, float_model: nn.Module, example: Any, clock: Clock) -> Cost:
    """Time a model and the float model in turns."""
    args, kwargs = as_arguments(example)

    def call(one: nn.Module) -> Callable[[], object]:
        return lambda: one(*args, **kwargs)

    with evaluating(model, float_model), torch.inference_mode():
        args, kwargs = copied((args, kwargs))
        contenders = {"float": call(float_model), **({} if model is float_model else {"": call(model)})}
        samples, _ = race(contenders, clock, needed=tuple(contenders))
    others = samples["float"]
    mine = samples.get("", others)
    rounds = min(len(mine), len(others))  # a hopeless one has a single round
    mine, others = mine[:rounds], others[:rounds]
    least, base = min(mine), min(others)
    ratio = least / base if base > 0 else 1.0
    return Cost(least, base, ratio, clearly_faster(mine, others), clearly_faster(others, mine), bytes_of(model))


def default_clock() -> Clock:
    """The time of this thread, which other processes do not add to, where torch computes in it alone; else all time."""
    alone = torch.get_num_threads() == 1 and time.get_clock_info("thread_time").resolution < FINE
    return time.thread_time if alone else time.perf_counter


def bytes_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each once."""
    counted: set[int] = set()
    return sum(own_bytes(module, counted) for module in model.modules())


def layer_seconds(model: nn.Module, names: list[str], example: Any, clock: Clock) -> dict[str, float]:
    """The time that each of the named modules takes in a call of the float model."""
    args, kwargs = as_arguments(example)
    passes: list[dict[str, float]] = []
    with evaluating(model), torch.inference_mode(), _timing(model, names, clock) as spent:
        for _ in range(PASSES):
            spent.clear()
            timed(lambda: model(*copied(args), **copied(kwargs)), 1, clock)
            passes.append(dict(spent))
    return {name: statistics.median(one.get(name, 0.0) for one in passes) for name in names}


@contextlib.contextmanager
def _timing(model: nn.Module, names: list[str], clock: Clock) -> Iterator[dict[str, float]]:
    spent: dict[str, float] = {}
    began: dict[str, float] = {}
    with contextlib.ExitStack() as hooks:

        def watch(name: str) -> None:
            def before(*_: Any) -> None:
                began[name] = clock()

            def after(*_: Any) -> None:
                spent[name] = spent.get(name, 0.0) + clock() - began[name]

            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)

        for name in names:
            watch(name)
        yield spent

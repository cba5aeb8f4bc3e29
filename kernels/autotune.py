"""Measures which backend computes each layer of a model fastest on this machine, at the user's shapes and threads.

It tunes modules with an attribute `backend`, where '' or None is the dispatcher's choice. A layer that the model calls
is tuned by itself. Layers that run in one native call of a module around them get one choice together, measured by
calling that module: a statically converted model is one, and so is each captured module in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from quant.kernels import dispatch
from quant.kernels.progress import progress_of
from quant.kernels.race import ROUNDS, clearly_faster, race
from quant.kernels.tuning import FLOAT, Tuned, Tuning
from torch import Tensor, nn

SHAPES = 8
"""Most input shapes of one layer that are measured; further ones are ignored."""


def autotune(
    model: nn.Module,
    example: Any,
    *,
    float_model: nn.Module | None = None,
    backends: Sequence[str] | None = None,
    progress: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Time the backends for each int8 layer of `model` on `example`, and set the layer's `backend` to the fastest.

    All backends compute the same integers, so only the time changes. `quant.save` stores the choices with the model.

    Args:
        model: int8, from `quant.quantize_dynamic`, `quant.convert` or `quant.load`.
        example: inputs of the model: a tensor, a tuple of positional or a dictionary of keyword arguments.
        float_model: the model before quantisation; its layers are then measured too, under the same names, and the
            result says where float is faster. The int8 model is not changed for it: see `Tuning.float_rules`.
        backends: names of `quant.kernels.available()` to try besides the dispatcher's choice; None tries all that can
            be used here, except the reference.
        progress: a bar on standard error, two lines where that is no terminal; and print the table.
        clock: returns seconds.

    Raises:
        BackendUnavailable: a name in `backends` does not exist or cannot be used here.
    """
    names = _candidates(backends)
    tunable = {name: module for name, module in model.named_modules() if hasattr(module, "backend")}
    if not tunable:
        raise ValueError(f"{type(model).__name__} has no int8 layer to tune; quantise it first")
    args, kwargs = _arguments(example)
    with torch.inference_mode():
        groups, unseen = _groups(model, tunable, _calls(model, args, kwargs))
        if not groups:
            raise ValueError(
                f"the example reaches no int8 layer of {type(model).__name__}; it has {', '.join(tunable)}"
            )
        originals = {} if float_model is None else dict(float_model.named_modules())
        layers = [_tune(one, names, originals, clock) for one in _shown(groups, progress)]
    result = Tuning(tuple(layers), tuple(unseen), torch.get_num_threads(), dispatch.current().name)
    if progress:
        print(result)
    return result


@dataclass
class _Call:
    """Inputs that a module was called with, and how often with such shapes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int = 1


@dataclass
class _Group:
    """A module that was called, and what takes its backend from the choice."""

    name: str
    module: nn.Module
    calls: list[_Call]
    parts: list[Any] = field(default_factory=list)


def _candidates(backends: Sequence[str] | None) -> list[str]:
    if backends is not None:
        return [dispatch.find(name).name for name in backends]
    known = {"reference", dispatch.current().name}  # too slow ever to win, and what '' stands for
    return [name for name, reason in dispatch.available().items() if not reason and name not in known]


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _calls(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, list[_Call]]:
    """Run the model once; what every module in it was called with, by name."""
    calls: dict[str, dict[str, _Call]] = {}

    def recorder(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = calls.setdefault(name, {})
            key = _shapes((args, kwargs))
            if key in seen:
                seen[key].count += 1
            elif len(seen) < SHAPES:
                seen[key] = _Call(args, kwargs)

        return record

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            handle = module.register_forward_pre_hook(recorder(name), with_kwargs=True)
            hooks.callback(handle.remove)
        model(*args, **kwargs)
    return {name: list(seen.values()) for name, seen in calls.items()}


def _groups(
    model: nn.Module, tunable: Mapping[str, nn.Module], calls: Mapping[str, list[_Call]]
) -> tuple[list[_Group], list[str]]:
    """Who is called, with the parts that follow it, the innermost first; and the parts that nobody called."""
    groups: dict[str, _Group] = {}
    unseen = []
    for name, part in tunable.items():
        caller = next((outer for outer in _outwards(name) if outer in calls), None)
        if caller is None:
            unseen.append(name)
            continue
        group = groups.setdefault(caller, _Group(caller, model.get_submodule(caller), calls[caller]))
        group.parts.append(part)
    return sorted(groups.values(), key=lambda group: -len(group.name.split(".")) if group.name else 1), unseen


def _outwards(name: str) -> Iterator[str]:
    """a.b.c, a.b, a, ''."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _tune(group: _Group, names: Sequence[str], originals: Mapping[str, nn.Module], clock: Callable[[], float]) -> Tuned:
    contenders: dict[str, Callable[[], None]] = {name: _caller(group.module, group, name) for name in ("", *names)}
    if group.name in originals:
        contenders[FLOAT] = _caller(originals[group.name], group, None)
    before = [part.backend for part in group.parts]
    _choose(group, "")
    try:
        samples, cannot = race(contenders, clock, needed=("",))
    except BaseException:
        for part, backend in zip(group.parts, before, strict=True):
            part.backend = backend
        raise
    best = _fastest(samples)
    _choose(group, best)
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    shapes = "; ".join(_shapes((call.args, call.kwargs)) + (f" x {call.count}" if call.count > 1 else "")
                       for call in group.calls)  # fmt: skip
    return Tuned(group.name, type(group.module).__name__, shapes, len(group.parts), seconds, best, cannot)


def _fastest(samples: Mapping[str, list[float]]) -> str:
    """The backend with the least median, or '' where it is not clearly faster than the dispatcher's choice."""
    best = min((name for name in samples if name != FLOAT), key=lambda name: statistics.median(samples[name]))
    if len(samples[""]) < ROUNDS:
        return best  # too slow to be measured further
    return best if clearly_faster(samples[best], samples[""]) else ""


def _choose(group: _Group, backend: str) -> None:
    for part in group.parts:
        part.backend = backend


def _caller(module: nn.Module, group: _Group, backend: str | None) -> Callable[[], None]:
    """All calls of one inference, on one backend; None for a module that has none."""

    def call() -> None:
        if backend is not None:
            _choose(group, backend)
        for one in group.calls:
            for _ in range(one.count):
                module(*one.args, **one.kwargs)

    return call


def _shapes(tree: Any) -> str:
    """Shapes of the tensors in nested arguments; other values do not change what is computed by much."""
    if isinstance(tree, Tensor):
        return "x".join(map(str, tree.shape)) or "()"
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        return ", ".join(text for text in map(_shapes, tree) if text)
    return ""


def _shown(groups: Sequence[_Group], progress: bool) -> Iterator[_Group]:
    with progress_of("autotune", unit="layer", total=len(groups), shown=progress) as bar:
        for group in groups:
            yield group
            bar.update()

"""Runs a case in float and quantised, and says how it went.

The oracle of static quantisation is the float model from its first state; that of training is a twin that is called
with the same batches in the same mode, since a model in training lives on.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quant

from .cases import BATCH, LENGTH, Case, Inputs
from .clipping import Ranges, clipping, ranges_read
from .pictures import Comparison, Literal, Tree, picture

INTERNAL = ("Untraceable", "KeyError", "AttributeError", "IndexError", "AssertionError", "NotImplementedError")
"""Names of errors that tell a user nothing; in the message of an error of ours they say that it wraps one."""

RAISED = "raises"
"""The kind of the picture of a call that raises an error of the user's."""

Call = tuple[int, int, int]
"""Batch, length and index of a call's inputs."""

CALIBRATION: list[Call] = [(BATCH, LENGTH, index) for index in range(4)]


QAT_RECIPE = quant.Recipe(default=quant.QConfig(activation_observer="minmax"))
"""A moving average would clip what a few calls bring, which is no fault."""


@dataclass(frozen=True)
class Outcome:
    """How one case went.

    Attributes:
        status: "ok"; "refused" by a clear error; or what must not be: "wrong" numbers, other "structure", a "raw"
            error, a "crash", "float" where nothing computes in integers.
        reason: one line.
        sqnr: the smallest of all outputs, in dB.
    """

    status: str
    reason: str = ""
    sqnr: float = float("inf")

    def passes(self, case: Case) -> bool:
        return self.status == "ok" or (self.status == "refused" and bool(case.refusal))


class Failed(Exception):
    """Ends a check with its outcome."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = Outcome(status, reason)


def check_static(case: Case) -> Outcome:
    """Quantise statically on four batches, and compare on fresh inputs."""
    return _outcome(lambda: _static(case))


def check_qat(case: Case) -> Outcome:
    """Prepare for training, call in training mode and in eval mode, convert, and compare each time."""
    return _outcome(lambda: _trained(case))


CHECKS: dict[str, Callable[[Case], Outcome]] = {"static": check_static, "qat": check_qat}


def _static(case: Case) -> Outcome:
    model = case.build()
    before = portrait(model)
    batches = (case.make(*call) for call in CALIBRATION)
    with _explained(model, "quantize_static"):
        q = quant.quantize_static(model, batches, forward=case.call, progress=False)
    if portrait(model) != before:
        raise Failed("wrong", "the model that was given is changed")
    _require_integers(q)
    calls = fresh_calls(case)
    comparison = Comparison(case.floor, case.integers)
    with torch.no_grad():
        compare_calls(case, case.build(), q, calls, comparison)
        if comparison.differences and _starts_from_calibration(case, q, calls):
            raise Failed("wrong", "keeps the state that calibration left")
        if comparison.differences:
            model = case.build()
            _call(case, model, calls)
            _forgive_clipping(case, model, q, calls, comparison, _ranges_of(case, CALIBRATION, training=False))
    return _verdict(comparison)


def _forgive_clipping(
    case: Case, model: nn.Module, q: nn.Module, calls: list[Call], comparison: Comparison, ranges: Ranges
) -> None:
    """Compare once more, with a float model whose layers read nothing outside of these ranges."""
    again = Comparison(comparison.floor, comparison.integers)
    try:
        with clipping(model, ranges):
            compare_calls(case, model, q, calls, again)
    except Exception:  # hooks are something else to a hostile forward
        return
    if not again.differences:
        comparison.differences, comparison.lowest = [], again.lowest


def _ranges_of(case: Case, calls: list[Call], *, training: bool) -> Ranges:
    """What the layers of the float model read in these calls."""
    model = case.build().train(training)
    return ranges_read(model, lambda: _call(case, model, calls))


def _call(case: Case, model: nn.Module, calls: list[Call]) -> None:
    for call in calls:
        seed(call[2])
        case.call(model, case.make(*call))


def _starts_from_calibration(case: Case, q: nn.Module, calls: list[Call]) -> bool:
    """Whether the differences are those of a float model that calibration has been through."""
    try:
        lived = case.build()
        _call(case, lived, [*CALIBRATION, *calls])
        again = Comparison(case.floor, case.integers)
        compare_calls(case, lived, q, calls, again)
    except Exception:
        return False
    return not again.differences


def _trained(case: Case) -> Outcome:
    model = case.build()
    before = portrait(model)
    example = case.make(*CALIBRATION[0])
    with _explained(model, "prepare_qat"):
        prepared = quant.prepare_qat(model, example, QAT_RECIPE)
    if portrait(model) != before:
        raise Failed("wrong", "the model that was given is changed")
    twin = case.build()
    names = parametrized_names(twin, prepared)
    comparison = Comparison(case.floor - 3.0, case.integers)
    compare_calls(case, twin.train(), prepared.train(), CALIBRATION[:3], comparison, gradients=names)
    _raise(comparison, "in training mode")
    with torch.no_grad():
        _compare_trained(case, twin.eval(), prepared.eval(), fresh_calls(case)[:2], comparison)
        _raise(comparison, "in eval mode")
        with _explained(model, "convert"):
            q = quant.convert(prepared)
        _require_integers(q)
        _compare_trained(case, twin, q, fresh_calls(case), comparison)
    return _verdict(comparison)


def _compare_trained(case: Case, twin: nn.Module, q: nn.Module, calls: list[Call], comparison: Comparison) -> None:
    """Compare after training; the ranges are those of the training's batches."""
    compare_calls(case, twin, q, calls, comparison)
    if comparison.differences:
        _forgive_clipping(case, twin, q, calls, comparison, _ranges_of(case, CALIBRATION[:3], training=True))


def fresh_calls(case: Case) -> list[Call]:
    """Two calls of the calibration's size, one of another, and the first size again."""
    other = case.other or (BATCH, LENGTH)
    return [(BATCH, LENGTH, 100), (BATCH, LENGTH, 101), (*other, 102), (BATCH, LENGTH, 103)]


def compare_calls(
    case: Case,
    model: nn.Module,
    q: nn.Module,
    calls: Iterable[Call],
    comparison: Comparison,
    *,
    gradients: Mapping[str, str] | None = None,
) -> None:
    """Call both models with each call's inputs, one model after the other, and compare what they give.

    Args:
        gradients: send gradients back through the last call, and compare which parameters get any; `q` has the
            parameters that are named here under other names.
    """
    calls = list(calls)
    expected = _run(case, model, calls, gradients is not None)
    with _explained(model, "a call"):
        found = _run(case, q, calls, expected.went_back, expected)
    for index, (one, other) in enumerate(zip(expected.pictures, found.pictures, strict=True)):
        seen = len(comparison.differences)
        comparison.compare(one, other)
        if len(comparison.differences) > seen and index:
            return  # what follows may only follow from it
    if expected.went_back:
        names = gradients or {}
        missing = sorted({names.get(name, name) for name in _reached(model)} - _reached(q))
        if missing:
            raise Failed("wrong", f"in training mode: no gradient reaches {', '.join(missing[:4])}")


@dataclass
class Run:
    """The pictures of calls one after the other, and whether gradients went back through the last."""

    pictures: list[Any]
    went_back: bool = False


def _run(case: Case, model: nn.Module, calls: list[Call], gradients: bool, expected: Run | None = None) -> Run:
    """Call a model; what the float model raises is `expected` of the other, and any other error passes through."""
    if case.reset is not None:
        case.reset()
    run = Run([])
    for place, call in enumerate(calls):
        inputs = case.make(*call)
        seed(call[2])
        try:
            output = case.call(model, inputs)
        except Exception as error:
            if expected is not None and expected.pictures[place].kind != RAISED:
                raise
            run.pictures.append(Literal(RAISED, type(error).__name__))
            continue
        run.pictures.append(_taken(case, model, inputs, output))
        if gradients and place == len(calls) - 1:
            run.went_back = _went_back(output, expected is not None)
    return run


def _taken(case: Case, model: nn.Module, inputs: Inputs, output: Any) -> Tree:
    """The output, the inputs (a forward may write into them) and the state that the case names."""
    read = output if case.read is None else case.read(output)
    parts = [("", picture(read)), (" (inputs)", picture(inputs))]
    if case.state is not None:
        parts.append((" (state)", picture(case.state(model))))
    return Tree("call", tuple(parts))


def _went_back(output: Any, required: bool) -> bool:
    """Send gradients back; a float model may be unable to, where its forward writes over what backward needs."""
    found = [leaf for leaf in _tensors(output) if leaf.requires_grad and leaf.is_floating_point()]
    if not found:
        return False
    try:
        torch.stack([leaf.float().square().mean() for leaf in found]).sum().backward()
    except RuntimeError:
        if required:
            raise
        return False
    return True


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, nn.Module)):
        yield from (value for value in vars(thing).values() if isinstance(value, Tensor))


def _reached(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def parametrized_names(model: nn.Module, prepared: nn.Module) -> dict[str, str]:
    """What hooks of torch compute becomes a parametrization of the same layer, in which the same parameters are.

    Only a name that `prepared` has not, of a layer that is parametrized there and not in `model`, has another: that of
    the one parameter in the parametrization that holds the same values.
    """
    mine, others = dict(model.named_parameters()), dict(prepared.named_parameters())
    names = {}
    for name in set(mine) - set(others):
        owner = name.rpartition(".")[0]
        inside = f"{owner}.parametrizations." if owner else "parametrizations."
        same = [other for other in set(others) - set(mine) if other.startswith(inside)
                and others[other].shape == mine[name].shape and torch.equal(others[other], mine[name])]  # fmt: skip
        if len(same) == 1:
            names[name] = same[0]
    return names


def seed(index: int) -> None:
    """So that both models draw the same random numbers."""
    torch.manual_seed(index)
    np.random.seed(index)
    random.seed(index)


def portrait(model: nn.Module) -> Any:
    """All values that the model holds, and the names of its attributes and hooks."""
    tensors = {name: picture(value).values.tolist() for name, value in model.state_dict().items()}
    hooks = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()]
    return tensors, hooks, [(name, sorted(vars(m)), m.training) for name, m in model.named_modules()]


def _require_integers(q: nn.Module) -> None:
    if not any(entry.outcome.startswith("int") for entry in quant.summary(q)):
        raise Failed("float", "no layer computes in integers, and nobody was told")


def _raise(comparison: Comparison, when: str) -> None:
    if comparison.differences:
        first = comparison.differences[0]
        raise Failed(first.kind, f"{when}: {first}")


def _verdict(comparison: Comparison) -> Outcome:
    if comparison.differences:
        first = min(comparison.differences, key=lambda difference: difference.kind != "wrong")
        return Outcome(first.kind, str(first), comparison.lowest)
    return Outcome("ok", "", comparison.lowest)


def _outcome(check: Callable[[], Outcome]) -> Outcome:
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            return check()
        except Failed as failed:
            return failed.outcome


@contextmanager
def _explained(model: nn.Module, what: str) -> Iterator[None]:
    """Errors as Failed: "refused" where they are ours and clear, "raw" else."""
    try:
        yield
    except Failed:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        status = "refused" if is_clear(error, model) else "raw"
        raise Failed(status, f"{what}: {type(error).__name__}: {text}") from error


def is_clear(error: Exception, model: nn.Module) -> bool:
    """Whether an error is of this toolkit, and its message names the module and what to do."""
    if not isinstance(error, (TypeError, ValueError, RuntimeError)):
        return False
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = type(error).__module__.startswith("quant") or Path(raised).is_relative_to(Path(quant.__file__).parent)
    text = str(error)
    names = {type(module).__name__ for module in model.modules()} | {name for name, _ in model.named_modules() if name}
    named = any(name in text for name in names) or "(root)" in text
    return ours and named and ";" in text and not any(word in text for word in INTERNAL)

"""A pytest plugin that hashes what every model gives that the tests convert or load; suite.py starts it.

It stands in the place of the public functions: each converted model is copied and run on the example inputs that it was
prepared with, and each loaded one on those of the model that was saved. Conversions inside `quant.load` are not the
test's, and versions differ in whether there are any. A line of JSON each, into a file per process in the folder
OCTET_GOLDEN: ["test", its name, its outcome] or ["model", what it is, its hash].
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
from torch import Tensor, nn

import quant

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `golden` is a package

from golden.hashing import digest, tensors

EXAMPLES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Prepared or converted model -> a copy of its example inputs."""

SAVED: dict[str, Any] = {}
"""File -> the example inputs of the model that was saved there."""

COUNTS: Counter[str] = Counter()
"""Test, or test and " load" -> how many models it has converted or loaded so far."""

INSIDE: ContextVar[bool] = ContextVar("INSIDE", default=False)
"""Whether the caller is one of the functions that are replaced here."""


def pytest_configure(config: pytest.Config) -> None:
    for name in ("prepare", "prepare_qat"):
        replace(getattr(quant, name), remembering(getattr(quant, name)))
    for name in ("convert", "quantize_dynamic"):
        replace(getattr(quant, name), noting(getattr(quant, name)))
    replace(quant.save, saving(quant.save))
    replace(quant.load, loading(quant.load))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        note(["test", item.nodeid, "collected"] for item in session.items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The call's outcome, or that of a setup without one."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        note([["test", report.nodeid, report.outcome]])


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Some files make their models when they are imported."""
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed()


def seed() -> None:
    """For tests that draw without a seed of their own."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Under every name that a module of the package has for it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "quant":
            for name, value in list(vars(module).items()):
                if value is function:
                    setattr(module, name, other)


def remembering(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A prepare that keeps the example inputs."""

    @functools.wraps(function)
    def wrapped(model: nn.Module, example_inputs: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
        try:
            kept = copy.deepcopy(example_inputs)
        except Exception:  # what cannot be copied is not run
            kept = None
        prepared = function(model, example_inputs, *args, **kwargs)
        EXAMPLES[prepared] = EXAMPLES.get(model) if kept is None else kept
        return prepared

    return wrapped


@contextmanager
def inside() -> Iterator[bool]:
    """Whether this is the outermost of the functions that note."""
    outermost, token = not INSIDE.get(), INSIDE.set(True)
    try:
        yield outermost
    finally:
        INSIDE.reset(token)


def noting(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A conversion whose result is hashed."""

    @functools.wraps(function)
    def wrapped(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with inside() as outermost:
            converted = function(model, *args, **kwargs)
        if outermost:
            note_model("", converted, EXAMPLES.get(model))
        return converted

    return wrapped


def saving(function: Callable[..., None]) -> Callable[..., None]:
    """A save that keeps the example inputs."""

    @functools.wraps(function)
    def wrapped(model: nn.Module, path: str | os.PathLike[str]) -> None:
        function(model, path)
        SAVED[os.path.realpath(path)] = EXAMPLES.get(model)

    return wrapped


def loading(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A load whose result is hashed."""

    @functools.wraps(function)
    def wrapped(path: str | os.PathLike[str], **kwargs: Any) -> nn.Module:
        with inside() as outermost:
            loaded = function(path, **kwargs)
        if outermost:
            note_model(" load", loaded, SAVED.get(os.path.realpath(path)))
        return loaded

    return wrapped


def note_model(how: str, model: nn.Module, example: Any) -> None:
    """Hash it, as the next one of the running test."""
    if example is not None:
        EXAMPLES[model] = example
    count_as = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0] + how
    place = f"{count_as} #{COUNTS[count_as]}"
    COUNTS[count_as] += 1
    note(["model", f"{place} {what}", value] for what, value in result(model, example).items())


def result(converted: nn.Module, example: Any) -> dict[str, str]:
    """Hashes of the weights and, where the model can be run, of its outputs; or the error that it ended with."""
    state = {name: value for name, value in converted.state_dict().items() if isinstance(value, Tensor)}
    hashes = {"weights": digest({name: value.cpu() for name, value in state.items()})}
    if example is None:
        return hashes
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            output = called(copy.deepcopy(converted).eval(), copy.deepcopy(example))
            leaves = {str(place): leaf.contiguous() for place, leaf in enumerate(tensors(output))}
        hashes["outputs"] = digest(leaves)
    except Exception as error:
        hashes["outputs"] = type(error).__name__
    return hashes


def called(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


def note(lines: Iterable[list[str]]) -> None:
    with Path(os.environ["OCTET_GOLDEN"], f"{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)

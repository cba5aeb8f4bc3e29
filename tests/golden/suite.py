"""A pytest plugin that hashes what every model gives that the tests convert; run.py starts it with --suite.

It stands in the place of the public functions: each converted model is copied and run on the example inputs that it was
prepared with. A line of JSON each, into a file per process in the folder OCTET_GOLDEN.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
from torch import Tensor, nn

import quant

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `golden` is a package

from golden.child import digest
from golden.networks import tensors

EXAMPLES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Prepared model -> a copy of its example inputs."""

COUNTS: Counter[str] = Counter()
"""Test -> how many models it has converted so far."""


def pytest_configure(config: pytest.Config) -> None:
    for name, around in (("prepare", remembering), ("prepare_qat", remembering), ("convert", noting)):
        replace(getattr(quant, name), around(getattr(quant, name)))
    replace(quant.quantize_dynamic, noting(quant.quantize_dynamic))


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


def noting(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A conversion whose result is hashed."""

    @functools.wraps(function)
    def wrapped(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        converted = function(model, *args, **kwargs)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
        place = f"{test} #{COUNTS[test]}"
        COUNTS[test] += 1
        note(place, result(converted, EXAMPLES.get(model)))
        return converted

    return wrapped


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


def note(place: str, hashes: dict[str, str]) -> None:
    with Path(os.environ["OCTET_GOLDEN"], f"{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps([f"{place} {what}", value]) + "\n" for what, value in hashes.items())

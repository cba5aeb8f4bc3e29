"""What all tests share: registries that tests may add to, and an installed package that adds to them."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import settings
from quant.kernels import dispatch
from quant.kernels.recurrent import kind as recurrent_kinds
from quant.observers import registry as observers

from quant import int8_classes, leaves, recurrent_layers
from quant.nn import registry as _  # noqa: F401  # adds torch's layers to int8_classes.LAYERS, before a test has a copy

_EXAMPLES = 10 if os.environ.get("OCTET_FAST_TESTS") == "1" else 200
settings.register_profile("same", max_examples=_EXAMPLES, deadline=None, derandomize=True)
settings.register_profile("random", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")  # --hypothesis-profile=random draws other examples each time


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "skip the other cases of a test function when those before have computed for so many seconds (default: none)"
    parser.addoption("--enough", type=float, default=float("inf"), metavar="SECONDS", help=text)

    text = "leave the trace function of coverage.py in place where a capture counts lines by its own"
    parser.addoption("--keep-tracer", action="store_true", help=text)


_seconds: dict[str, float] = defaultdict(float)
"""Test function -> what its cases have computed, in processes of theirs too."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    begin = sum(os.times()[:4])
    result = yield
    _seconds[item.nodeid.partition("[")[0]] += sum(os.times()[:4]) - begin
    return result


def begin_anew() -> None:
    """Seed what draws: random numbers are the same whichever tests ran before in this process."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Before a file is imported, which may draw."""
    begin_anew()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    begin_anew()
    if _seconds[item.nodeid.partition("[")[0]] > item.config.getoption("--enough"):
        pytest.skip("--enough: its other cases have computed as long")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--keep-tracer"):
        from quant.capture.executed_lines import ExecutedLines

        ExecutedLines.switch = lambda self, on: None  # type: ignore[method-assign]
    gc.disable()  # until all tests are there, nothing becomes garbage
    if not torch.accelerator.is_available():
        torch.manual_seed = seeded  # type: ignore[assignment]


def seeded(seed: int) -> torch.Generator:
    """torch.manual_seed for the CPU. torch's own formats the stack of its caller for each kind of device that may be
    there later: more than a millisecond in a test, where many tests take five, and twenty under emulation."""
    return torch.default_generator.manual_seed(int(seed))


def pytest_collection_finish() -> None:
    """The tests and the modules of torch are a million objects, which each run of the garbage collector would visit."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def torchvision_loads() -> None:
    """transformers imports torchvision where it finds one, and a CUDA build of it does not load beside a CPU torch."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            pytest.skip(f"torchvision does not load here: {error}")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> io.StringIO:
    """A terminal that keeps what it is sent; a test puts it in sys.stderr's place, which is pytest's before."""
    return Terminal()


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries only grow, so a test that adds to them has copies."""
    by_name = (dispatch._BACKENDS, observers._REGISTRY, recurrent_kinds._KINDS)
    by_class = (leaves._REGISTERED, int8_classes.LAYERS, recurrent_layers._CLASSES)
    for registry in (*by_name, *by_class):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.setattr(dispatch, "_usable", dict(dispatch._usable))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install(source, group, name=value) puts the distribution "toy", with one module, on sys.path."""

    def made(source: str, group: str, **offers: str) -> None:
        about = tmp_path / "toy-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in offers.items()))
        (tmp_path / "toy_module.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    yield made
    sys.modules.pop("toy_module", None)

"""Small forms of published networks, static and dynamic, in the runner: the bits of Python on each instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from quant.kernels import build
from torch import Tensor, nn

import quant
from quant.export.naming import named_leaves

from .runner_models import needs_kernels, run_model, starts_python
from .runner_networks import NETWORKS

CONVOLVES = ("lite", "detector", "voice")
KINDS = [(name, dynamic) for name in NETWORKS for dynamic in (False, True) if not (dynamic and name in CONVOLVES)]
"""Convolutions have no dynamic form, and no plan computes them in float."""


@dataclass(frozen=True)
class Saved:
    """A network in a file, and whether torch computes a part of it in Python: a dynamic one's attention and norms."""

    model: nn.Module
    path: Path
    rounds_apart: bool


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Saved]:
    folder, networks = tmp_path_factory.mktemp("networks"), {}
    for name, dynamic in KINDS:
        torch.manual_seed(5)
        make, example, _ = NETWORKS[name]
        model = make().eval()
        q = quant.quantize_dynamic(model) if dynamic else quant.quantize_static(model, [example] * 2, progress=False)
        path = folder / f"{name} {'dynamic' if dynamic else 'static'}.q8"
        quant.save(q, path, runner=True, example_inputs=example if dynamic else None)
        networks[name, dynamic] = Saved(q, path, dynamic and name == "bert")
    return networks


def outputs_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        result: Any = model(*inputs)
    return [leaf for _, leaf in named_leaves(result)]


@needs_kernels
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("place", [1, 2], ids=["as at export", "other sizes"])
@pytest.mark.parametrize(("name", "dynamic"), KINDS, ids=[f"{n}-{'dynamic' if d else 'static'}" for n, d in KINDS])
def test_the_bits_of_python(
    saved: dict[tuple[str, bool], Saved],
    runner: Path,
    tmp_path: Path,
    name: str,
    dynamic: bool,
    place: int,
    threads: str,
) -> None:
    one = saved[name, dynamic]
    inputs: Any = NETWORKS[name][place]
    expected, planned = outputs_of(one.model, inputs), outputs_of(quant.load(one.path), inputs)
    found = run_model(runner, one.path, tmp_path, inputs, len(expected), "--threads", threads)
    for output, wanted, by_model in zip(found, planned, expected, strict=True):
        assert torch.equal(output, wanted)
        torch.testing.assert_close(output, by_model, rtol=0, atol=2e-5 if one.rounds_apart else 0)


PYTHON = """
import sys, numpy, torch, quant
from pathlib import Path
for folder in map(Path, sys.argv[1:]):
    model = quant.load(folder / "model.q8", backend="native")
    inputs = [torch.from_numpy(numpy.load(folder / f"in{place}.npy")) for place in range(len(model.plan.inputs))]
    for place, output in enumerate(model.run(inputs)):
        numpy.save(folder / f"wanted{place}.npy", output.numpy())
"""


@needs_kernels
@starts_python
@pytest.mark.parametrize("isa", [one.name for one in build.instruction_sets(build.host_arch())])
def test_on_each_instruction_set(saved: dict[tuple[str, bool], Saved], runner: Path, tmp_path: Path, isa: str) -> None:
    """One process of Python for all networks, with the same plan on the same instruction set."""
    found = {}
    for place, (name, dynamic) in enumerate(KINDS):
        folder, inputs = tmp_path / str(place), NETWORKS[name][2]
        folder.mkdir()
        (folder / "model.q8").write_bytes(saved[name, dynamic].path.read_bytes())
        count = len(outputs_of(saved[name, dynamic].model, inputs))
        found[folder] = run_model(runner, folder / "model.q8", folder, inputs, count, QUANT_ISA=isa)
    environment = {**os.environ, "QUANT_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PYTHON, *map(str, found)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for folder, outputs in found.items():
        for place, output in enumerate(outputs):
            assert torch.equal(output, torch.from_numpy(numpy.load(folder / f"wanted{place}.npy"))), KINDS[
                int(folder.name)
            ]

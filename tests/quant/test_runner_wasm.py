"""The runner as WebAssembly, in node: the bits of Python."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

import quant

from .conftest import CHECKOUT
from .runner_models import EXAMPLES, SHAPES, converted, image, needs_kernels, outputs_of, run_model


@pytest.fixture(scope="module")
def in_node(runner_build: ModuleType) -> Path:
    """octet-run.js, with octet-run.wasm beside it."""
    if shutil.which("em++") is None or shutil.which("node") is None:
        pytest.skip("no em++ or no node (on Debian: apt install emscripten)")
    made = runner_build.Settings("em++", "wasm32", CHECKOUT / "build" / "wasm", "none")
    if not runner_build.is_current(made):
        pytest.skip("build/wasm/octet-run.js is missing or not current: `make runner-wasm` compiles it")
    return made.out / "octet-run.js"


@needs_kernels
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bits_of_python(in_node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Without fetch, which an old Emscripten takes for a browser's.
    monkeypatch.setenv("OCTET_EMULATOR", "node --no-experimental-fetch")
    model = converted(name)
    quant.save(model, tmp_path / "model.q8", runner=True)
    inputs = [image(*shape, seed=21) for shape in SHAPES[name][1]]
    expected = outputs_of(model, inputs)
    found = run_model(in_node, tmp_path / "model.q8", tmp_path, inputs, len(expected))
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_what_does_not_go_together_is_refused(
    runner_build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cxx", "/nonexistent", "--arch", "wasm32", "--out", str(tmp_path)]
    assert runner_build.main(arguments) == 1
    assert "--arch wasm32 goes with --threads none" in capsys.readouterr().err

"""What nobody imports: torch.ao, pickle, and in the kernel layer anything heavy. test_architecture.py has the order."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "observers", "calibrate", "quant")
SOURCES = [
    pytest.param(path, id=str(path.relative_to(ROOT))) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
]
TORCH_AO = ("torch.ao", "torch.quantization", "torch.quint8", "torch.qint8", "torch.qint32", "torch.ops.quantized")
# pickle.UnpicklingError is what torch.load raises of a file that it refuses.
PICKLE = ("dill", *(f"pickle.{name}" for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")))
FORBIDDEN = TORCH_AO + PICKLE
BELOW_CAPTURE = ("graph", "leaves", "recurrent_layers", "int8_classes", "dead_calls", "folding", "runtime")
"""What of `quant` `quant.capture` stands on; the operators, the plans and the three jobs stand on capture."""
CAPTURE = [*(ROOT / "quant/capture").glob("*.py"), *(ROOT / f"quant/{name}.py" for name in BELOW_CAPTURE[:-1])]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted text of every attribute, as torch.ops.quantized."""
    return ((node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", CAPTURE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_capture_knows_of_nothing_that_is_made_of_graphs(path: Path) -> None:
    is_capture = path.parent.name == "capture"
    allowed = (*BELOW_CAPTURE, "capture", "half_precision") if is_capture else BELOW_CAPTURE
    others = ("kernels", "observers", "calibrate")
    own = [(line, name) for line, name in imported(ast.parse(path.read_text())) if within(name, "quant")]
    for line, name in own:
        assert name == "quant" or name.split(".")[1] in (*allowed, *others), f"{path.name}:{line} imports {name}"


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_of_torch_ao_and_no_pickle(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for line, name in [*imported(tree), *attributes(tree)]:
        assert not any(within(name, bad) for bad in FORBIDDEN), f"{path.name}:{line} uses {name}"


def test_the_rules_above_can_fail() -> None:
    tree = ast.parse("from torch.ao import quantization\nx = torch.ops.quantized.linear\nx = pickle.loads(y)")
    names = [name for _, name in [*imported(tree), *attributes(tree)]]
    found = {bad for bad in FORBIDDEN if any(within(name, bad) for name in names)}
    assert found == {"torch.ao", "torch.ops.quantized", "pickle.loads"}
    assert SOURCES


@pytest.mark.skipif(
    os.environ.get("OCTET_FAST_TESTS") == "1", reason="OCTET_FAST_TESTS=1: a process that imports torch is slow"
)
@pytest.mark.parametrize("module", ["quant.kernels", "quant.observers"])
def test_a_lower_package_brings_in_nothing_heavy(module: str) -> None:
    # torch's compiler alone takes a second to import; tqdm belongs to calibration.
    code = f"import sys, torch; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    brought = {name.split(".")[0] for name in result.stdout.split()}
    assert not brought & {"scipy", "tqdm"}
    assert not {"torch.ao", "torch._dynamo"} & {".".join(name.split(".")[:2]) for name in result.stdout.split()}


@pytest.mark.skipif(
    os.environ.get("OCTET_FAST_TESTS") == "1", reason="OCTET_FAST_TESTS=1: a process that imports torch is slow"
)
def test_a_prompt_in_the_checkouts_root_finds_every_package() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    code = "import quant, quant.calibrate, quant.observers; print(quant.__file__, quant.calibrate.__file__)"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert result.stdout.split() == [str(ROOT / name / "__init__.py") for name in ("quant", "calibrate")]

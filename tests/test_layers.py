"""kernels <- observers <- calibrate <- quant: each package imports only from its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
ORDER = ("kernels", "observers", "calibrate")
"""Folders whose packages are `quant.<folder>`; all else of `quant` stands to the right of them."""


def imported(path: Path) -> set[str]:
    """Every module of `quant` that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import, which hides the layer; name the package"
            found |= {node.module or ""} if node.module != "quant" else {f"quant.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "quant"}


@pytest.mark.parametrize("folder", ORDER)
def test_imports_come_from_the_left(folder: str) -> None:
    allowed = {f"quant.{name}" for name in ORDER[: ORDER.index(folder) + 1]}
    wrong = {
        f"{path.relative_to(CHECKOUT)} imports {name}"
        for path in (CHECKOUT / folder).rglob("*.py")
        for name in imported(path)
        if ".".join(name.split(".")[:2]) not in allowed
    }
    assert wrong == set()


def test_nothing_imports_torch_ao() -> None:
    names = (node for folder in ("quant", *ORDER) for path in (CHECKOUT / folder).rglob("*.py") for node in _all(path))
    assert [name for name in names if name.startswith("torch.ao")] == []


def _all(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return modules

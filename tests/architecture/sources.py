"""The import arrows between the packages, read from the source: every import counts, in functions and for types too.

A *unit* is a package (`kernels`, `quant.static`) or a module that lies directly in `quant/` (`quant.graph`). Files of
one unit may import each other as they like; between units the arrows must not make a cycle. `quant/__init__.py` is a
unit of its own, `quant`, which imports the public names from all others.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = {"quant": "quant", "quant.kernels": "kernels", "quant.observers": "observers", "quant.calibrate": "calibrate"}
"""Package -> its folder in a checkout, as in setup.py."""


@dataclass(frozen=True, order=True)
class Arrow:
    """One import of one unit by another.

    Attributes:
        source, target: units.
        file: relative to the checkout.
        module: what is imported, with its full name.
        where: "top", "function" (when it is called) or "typing" (for a type checker alone).
    """

    source: str
    target: str
    file: str
    line: int
    module: str
    where: str

    def __str__(self) -> str:
        mark = "" if self.where == "top" else f" ({self.where})"
        return f"{self.source} -> {self.target}  {self.file}:{self.line} {self.module}{mark}"


@dataclass(frozen=True)
class File:
    """A source file: its module, its unit, its path relative to the checkout, and its text."""

    module: str
    unit: str
    path: str
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def files(checkout: Path) -> list[File]:
    """All Python files of the packages, in the order of their paths."""
    result = []
    for package, folder in FOLDERS.items():
        for path in sorted((checkout / folder).rglob("*.py")):
            inner = path.relative_to(checkout / folder).with_suffix("").parts
            module = ".".join((package, *inner)).removesuffix(".__init__")
            result.append(File(module, unit_of(module, inner), path.relative_to(checkout).as_posix(), path.read_text()))
    return result


def unit_of(module: str, inner: tuple[str, ...]) -> str:
    """quant.kernels.scheme -> kernels, quant.static.runner -> quant.static, quant.graph -> quant.graph."""
    top = ".".join(module.split(".")[:2])
    return top.removeprefix("quant.") if top in FOLDERS and top != "quant" else top


def arrows(sources: Iterable[File]) -> list[Arrow]:
    """Every import of one unit by another, sorted."""
    sources = list(sources)
    units = {one.module: one.unit for one in sources}
    result = set()
    for one in sources:
        for line, name, where in imports(ast.parse(one.text)):
            module = resolve(name, units)
            if module is not None and units[module] != one.unit:
                result.add(Arrow(one.unit, units[module], one.path, line, module, where))
    return sorted(result)


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, full name (`from a import b` is a.b) and place of every import."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "top")]
    while waiting:
        node, where = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}", where) for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            where = "function"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend((child, "typing") for child in node.body)
            waiting.extend((child, where) for child in node.orelse)
            continue
        waiting.extend((child, where) for child in ast.iter_child_nodes(node))


def resolve(name: str, known: Iterable[str]) -> str | None:
    """The module of ours that an imported name is or lies in; None for anyone else's."""
    parts = name.split(".")
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((module for module in candidates if module in known), None)


def cycles(found: Iterable[Arrow]) -> list[set[str]]:
    """The strongly connected sets of more than one unit, largest first."""
    follows: dict[str, set[str]] = defaultdict(set)
    for arrow in found:
        follows[arrow.source].add(arrow.target)
    reached = {unit: reachable(unit, follows) for unit in follows}
    groups = {
        frozenset({unit} | {other for other in reached[unit] if unit in reached.get(other, ())}) for unit in reached
    }
    return sorted((set(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), sorted(group)))


def reachable(unit: str, follows: dict[str, set[str]]) -> set[str]:
    result: set[str] = set()
    waiting = [unit]
    while waiting:
        for other in follows.get(waiting.pop(), ()):
            if other not in result:
                result.add(other)
                waiting.append(other)
    return result


def link(checkout: Path, site: Path) -> None:
    """Make the folders of a checkout importable as one package, as an editable install does."""
    for package, folder in FOLDERS.items():
        target = site.joinpath(*package.split("."))
        if package == "quant":
            target.mkdir()
            for entry in (checkout / folder).resolve().iterdir():
                (target / entry.name).symlink_to(entry)
        else:
            target.symlink_to((checkout / folder).resolve())

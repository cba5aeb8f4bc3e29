"""The document of a static conversion's programs in a file, and how it is read and checked.

A document is plain JSON. For each captured module it has the programs, with their schedules and graphs as texts, and
those of its parts; for each int8 layer its names, product and clamps. A text may name functions of an allow-list and
classes of the float model's own packages. Tensors are constants, numbered in the file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quant.runtime.layers.products import Product
from quant.runtime.program import Program
from quant.runtime.program_reader import parse
from quant.runtime.restored_weights import WeightsToRestore, read_restored
from quant.runtime.schedule_text import parse_schedule
from quant.runtime.text_scanner import TextError
from quant.static.graph_text import parse_graph
from quant.static.kept_graph import GraphText

VERSION = 1
"""Version of a document; a model with another version is captured again."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunnerDocument:
    """A program, and the further attributes of its `ProgramRunner`.

    Attributes:
        floats: the float calls that its integer steps stand for, as a program.
        int8: paths of the modules that are int8 layers.
    """

    program: Program
    floats: Program
    ranges: dict[int, tuple[float, int]]
    restored: WeightsToRestore
    int8: frozenset[str]
    graph: GraphText
    backend: str | None


@dataclass(frozen=True)
class UnitDocument:
    """The programs of a captured module, and path of a part -> its program, or the reason that it has none."""

    path: str
    runners: list[RunnerDocument]
    parts: dict[str, Program | str]


@dataclass(frozen=True)
class LayerDocument:
    """An int8 layer: all its names, its product, and its clamp at each site."""

    names: list[str]
    product: Product
    clamps: list[tuple[float, float] | None]
    own: int
    backend: str | None
    activation_bits: int = 8


def packages_of(model: nn.Module) -> frozenset[str]:
    """The packages of the classes of a model's modules, except torch."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return frozenset(kind.__module__.partition(".")[0] for kind in kinds) - {"torch", "builtins"}


def laid_out(constants: list[Tensor], orders: Mapping[str, list[int]]) -> list[Tensor]:
    """Constants with the memory order that they had when saved: the sums of some kernels depend on it."""
    result = list(constants)
    for place, order in orders.items():
        back = sorted(range(len(order)), key=order.__getitem__)
        result[int(place)] = result[int(place)].permute(order).contiguous().permute(back)
    return result


def read_units(document: Mapping[str, Any], constants: list[Tensor], packages: Collection[str]) -> list[UnitDocument]:
    """The captured modules of a document.

    Raises:
        TextError: a text is not valid, or names something that it may not; the message names the line.
        TypeError, ValueError, KeyError: the document does not have this form.
    """

    def program(entry: Mapping[str, Any]) -> Program:
        result = parse(entry["program"], constants, packages)
        result.schedule = parse_schedule(entry["schedule"], result, constants)
        return result

    def runner(entry: Mapping[str, Any]) -> RunnerDocument:
        return RunnerDocument(
            program(entry),
            parse(entry["floats"], constants, packages),
            {_of(int, value): _range(scale, point) for value, scale, point in entry["ranges"]},
            WeightsToRestore(read_restored(*one) for one in entry["restores"]),
            frozenset(entry["int8"]),
            GraphText(entry["graph"], constants, packages),
            _backend(entry),
        )

    def part(entry: Mapping[str, Any]) -> Program | str:
        return _of(str, entry["why_none"]) if "why_none" in entry else program(entry)

    return [
        UnitDocument(
            _of(str, entry["path"]),
            [runner(one) for one in entry["programs"]],
            {_of(str, one["path"]): part(one) for one in entry["parts"]},
        )
        for entry in document["units"]
    ]


def check_graphs(document: Mapping[str, Any], constants: list[Tensor], packages: Collection[str]) -> None:
    """Check that the graphs of a document can be read; loading reads them only when one is asked for.

    Raises:
        TextError: one cannot be read.
    """
    for unit in document["units"]:
        for entry in unit["programs"]:
            parse_graph(entry["graph"], constants, packages)


def read_layers(document: Mapping[str, Any]) -> list[LayerDocument]:
    """The int8 layers of a document.

    Raises:
        TextError, TypeError, ValueError, KeyError: the document does not have this form.
    """
    return [
        LayerDocument(
            [_of(str, name) for name in entry["names"]],
            _product(entry["product"]),
            [None if clamp is None else (float(clamp[0]), float(clamp[1])) for clamp in entry["clamps"]],
            _of(int, entry["own"]),
            _backend(entry),
            _bits(entry.get("activation_bits", 8)),
        )
        for entry in document["layers"]
    ]


def _bits(value: Any) -> int:
    if type(value) is not int or value not in (8, 16):
        raise TextError(f"activations of {value!r} bits, expected 8 or 16")
    return value


def product_document(product: Product) -> dict[str, Any]:
    """The product of an int8 layer as JSON."""
    settings = {item.name: getattr(product, item.name) for item in fields(product)}
    plain = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in settings.items()}
    before = product.pad_before
    return {**plain, "kind": product.name, "pad_before": None if before is None else [list(before[0]), before[1]]}


def _product(entry: Mapping[str, Any]) -> Product:
    kinds = {kind.name: kind for kind in _subclasses(Product)}
    settings = {name: value for name, value in entry.items() if name not in ("kind", "pad_before")}
    kind = kinds.get(entry["kind"])
    if kind is None:
        raise TextError(f"{entry['kind']!r} is not a product of an int8 layer known to this version")
    for value in settings.values():
        if not all(type(one) is int for one in (value if isinstance(value, list) else [value])):
            raise TextError(f"{value!r} is not a setting of a {kind.name} layer")
    before = entry["pad_before"]
    if before is not None:
        widths, mode = before
        before = [_of(int, width) for width in widths], _of(str, mode)
    return kind(**settings, pad_before=before)


def _subclasses(kind: type[T]) -> list[type[T]]:
    return [one for child in kind.__subclasses__() for one in (child, *_subclasses(child))]


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TextError(f"expected {kind.__name__}, got {value!r}")
    return value


def _backend(entry: Mapping[str, Any]) -> str | None:
    return None if entry["backend"] is None else _of(str, entry["backend"])


def _range(scale: str, point: int) -> tuple[float, int]:
    value = float(scale)
    if not (math.isfinite(value) and value > 0) or not 0 <= _of(int, point) <= 255:
        raise TextError(f"{scale} and {point} are not a scale and zero point of uint8")
    return value, point


def is_plain(tensor: Tensor) -> bool:
    """Whether a file can hold a tensor as a constant."""
    strided = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return type(tensor) is Tensor and strided and tensor.dtype in DTYPES


DTYPES = frozenset((
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
))  # fmt: skip

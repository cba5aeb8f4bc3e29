"""Functions that files write as several nodes and that are one here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from quant.onnx.file import Node, OnnxFile


def with_gelus(file: OnnxFile) -> OnnxFile:
    """The file with a Gelu for x / sqrt(2) - Erf - 1 + - x * - / 2, in the orders in which exporters write it.

    Nodes whose values are rounded on the way stay as they are: only reals that nothing else reads are left out.
    """
    makers, readers = _ends(file)
    gelus = {
        last.outputs[0]: Node(last.name, "Gelu", (x,), last.outputs[:1], {})
        for node in file.nodes
        if node.op == "Erf"
        for last, x in _gelu(node, makers, readers, file)
    }
    if not gelus:
        return file
    nodes = tuple(gelus.get(node.outputs[0], node) if node.outputs else node for node in file.nodes)
    return replace(file, nodes=nodes)


def with_roundings(file: OnnxFile) -> OnnxFile:
    """The file with a QuantizeLinear for x / s - QuantizeLinear by 1, as `export_onnx` writes a model's inputs.

    That is: x times a number, rounded by the scale 1, and read by a DequantizeLinear of which the number is the inverse
    scale. Plans round by the inverse, so that it is one operation of theirs.
    """
    makers, readers = _ends(file)
    changed: dict[str, Node] = {}
    for node in file.nodes:
        if node.op != "QuantizeLinear" or len(node.inputs) < 3 or not _is_one(node.inputs[1], file.constants):
            continue
        scaled = makers.get(node.inputs[0])
        by = None if scaled is None or scaled.op != "Mul" else _with_number(scaled, file.constants)
        scales = {one.inputs[1] for one in readers.get(node.outputs[0], []) if one.op == "DequantizeLinear"}
        if by is None or len(scales) != 1 or node.outputs[0] in file.outputs:
            continue
        [scale] = scales
        known = file.constants.get(scale)
        if known is not None and _is_number(known) and float(1.0 / known.reshape(())) == by[1]:
            changed[node.outputs[0]] = replace(node, inputs=(by[0], scale, *node.inputs[2:]))
    nodes = tuple(changed.get(node.outputs[0], node) if node.outputs else node for node in file.nodes)
    return replace(file, nodes=nodes)


def _is_one(name: str, constants: Mapping[str, Tensor]) -> bool:
    return name in constants and _is_number(constants[name]) and float(constants[name]) == 1.0


def _ends(file: OnnxFile) -> tuple[dict[str, Node], dict[str, list[Node]]]:
    """The node that makes each value, and those that read it."""
    makers = {name: node for node in file.nodes for name in node.outputs}
    readers: dict[str, list[Node]] = {}
    for node in file.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    return makers, readers


def _gelu(
    erf: Node, makers: Mapping[str, Node], readers: Mapping[str, list[Node]], file: OnnxFile
) -> Iterator[tuple[Node, str]]:
    """The last node of a gelu and its argument; nothing where there is another function."""
    scaled = makers.get(erf.inputs[0])
    by = None if scaled is None else _with_number(scaled, file.constants)
    if scaled is None or by is None or not math.isclose(_factor(scaled, by[1]), math.sqrt(0.5), rel_tol=1e-4):
        return
    plus = _only_reader(erf, "Add", readers, file)
    if plus is None or (_with_number(plus, file.constants) or ("", 0.0))[1] != 1.0:
        return
    x, product = by[0], _only_reader(plus, "Mul", readers, file)
    if product is None:
        return
    other = next((name for name in product.inputs if name != plus.outputs[0]), "")
    half = _only_reader(product, "Mul", readers, file)
    if other == x and half is not None and _is_half(half, file.constants):
        yield half, x
    before = makers.get(other)
    if before is not None and x in before.inputs and _is_half(before, file.constants):
        yield product, x


def _only_reader(node: Node, op: str, readers: Mapping[str, list[Node]], file: OnnxFile) -> Node | None:
    name = node.outputs[0]
    found = readers.get(name, [])
    return found[0] if len(found) == 1 and found[0].op == op and name not in file.outputs else None


def _with_number(node: Node, constants: Mapping[str, Tensor]) -> tuple[str, float] | None:
    """The other operand and the number of an operator of two, of which one is a number."""
    if node.op not in ("Add", "Mul", "Div") or len(node.inputs) != 2:
        return None
    for name, other in (node.inputs, node.inputs[::-1]):
        if other in constants and _is_number(constants[other]) and (node.op != "Div" or other == node.inputs[1]):
            return name, float(constants[other])
    return None


def _is_number(constant: Tensor) -> bool:
    """Whether it is one value that gives no result more dimensions."""
    return constant.numel() == 1 and constant.dim() <= 1


def _factor(node: Node, number: float) -> float:
    """What a Mul or Div by a number multiplies by; NaN for another operator."""
    if node.op == "Mul":
        return number
    return 1.0 / number if node.op == "Div" and number else math.nan


def _is_half(node: Node, constants: Mapping[str, Tensor]) -> bool:
    by = _with_number(node, constants)
    return by is not None and math.isclose(_factor(node, by[1]), 0.5)

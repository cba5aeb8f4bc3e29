"""Writes and reads a captured graph (`quant/graph.py`) as text, for files.

    octet-graph 1
    graph('', ranked=True)
    arguments({'x': %0})
    input 'x'(): float32[2, 8] ; also=[(3, 8)]
    module fc(%0): float32[2, 3]
    span('block', 1, 2, {'x': %0}, %1)
    output(%1)

A line for each call, in order. After the colon comes the type of its result, `object` where that is not a tensor; after
the semicolon, further attributes of the node. The graph is needed to compare a program with the float model, and to run
a step whose module the user has replaced.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from quant.graph import Graph, Kind, Node, Span, TensorMeta
from quant.runtime.callee import Function, Method, Submodule, function
from quant.runtime.instruction_reader import check_call, read_callee, read_dtype
from quant.runtime.program_text import callee_text
from quant.runtime.text_scanner import TextError
from quant.runtime.tree_reader import Reader
from quant.runtime.tree_text import Writer
from quant.runtime.trees import Ref, leaves

HEADER = "octet-graph 1"
_FLAGS = ("typed", "ranked", "contiguous")
_BARE = (Kind.INPUT, Kind.GUARD)
_CALLS = {Function: Kind.FUNCTION, Method: Kind.METHOD, Submodule: Kind.MODULE}
_NUMBERS: dict[str, type] = {"int": int, "float": float}


def graph_text(graph: Graph, writer: Writer) -> str:
    """A graph as text; its tensors are added to the writer's constants."""
    flags = {name: True for name in _FLAGS if getattr(graph, name)}
    lines = [HEADER, f"graph{writer.arguments((graph.path,), flags)}", f"arguments({writer.value(graph.arguments)})"]
    lines += [_node(node, writer) for node in graph.nodes]
    lines += [
        f"span{writer.arguments((one.path, one.start, one.end, one.arguments, one.output), {})}" for one in graph.spans
    ]
    lines.append(f"output({writer.value(graph.output)})")
    return "\n".join(lines)


def _node(node: Node, writer: Writer) -> str:
    meta = node.meta
    kind = "object" if meta is None else f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
    attributes: dict[str, Any] = {
        "owner": node.owner,
        "site": node.site,
        "writes": node.writes,
        "frozen": node.frozen,
        "number": None if node.number is None else node.number.__name__,
        "also": list(node.other_shapes),
        "layout": None if meta is None or meta.layout is torch.strided else meta.layout,
    }
    besides = writer.arguments((), {name: value for name, value in attributes.items() if value})
    return f"{_called(node)}{writer.arguments(node.args, node.kwargs)}: {kind} ; {besides}"


def _called(node: Node) -> str:
    if node.kind in (Kind.INPUT, Kind.GUARD):
        return f"{node.kind.value} {node.target!r}"
    if node.kind is Kind.FUNCTION:
        return callee_text(function(node.target))
    return callee_text(Method(node.target) if node.kind is Kind.METHOD else Submodule(node.target))


def parse_graph(text: str, constants: list[Tensor], packages: Collection[str] | None = None) -> Graph:
    """Parse the text of a graph.

    Args:
        text: as `graph_text` writes it.
        constants: the tensors that `$0`, `$1`, ... name.
        packages: the packages whose classes it may name, as for `program_reader.parse`.

    Raises:
        TextError: the text is not a graph; the message names the line.
    """
    rows = text.split("\n")
    if rows[0] != HEADER:
        raise TextError(f"line 1: expected {HEADER!r}, got {rows[0]!r}: the graph was written by another version")
    readers = [Reader(row, number, constants, packages) for number, row in enumerate(rows[1:], 2)]
    if len(readers) < 3:
        raise TextError("expected a graph, its arguments and its output")
    (path,), flags = _given(readers[0], "graph", 1)
    (arguments,), _ = _given(readers[1], "arguments", 1)
    if not isinstance(path, str) or not set(flags) <= set(_FLAGS) or not isinstance(arguments, dict):
        readers[0].fail("is no graph")
    graph = Graph(path, [], arguments, None, [], **dict.fromkeys(flags, True))
    for reader in readers[2:-1]:
        if reader.at("span("):
            graph.spans.append(_read_span(reader, len(graph.nodes)))
        else:
            graph.nodes.append(_read_node(reader, len(graph.nodes)))
    (graph.output,), _ = _given(readers[-1], "output", 1)
    _check(readers[-1], graph.output, len(graph.nodes))
    _check(readers[1], graph.arguments, len(graph.nodes))
    return graph


def _given(reader: Reader, word: str, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    reader.expect(word)
    args, attributes = reader.arguments()
    reader.end()
    if len(args) != count:
        reader.fail(f"expected {count} values")
    return args, attributes


def _read_span(reader: Reader, nodes: int) -> Span:
    (path, start, end, arguments, output), attributes = _given(reader, "span", 5)
    whole = isinstance(path, str) and isinstance(arguments, dict) and type(start) is type(end) is int
    if attributes or not whole or not 0 <= start <= end <= nodes:
        reader.fail("is no span of the graph")
    _check(reader, (arguments, output), nodes)
    return Span(path, start, end, arguments, output)


def _read_node(reader: Reader, index: int) -> Node:
    kind = next((one for one in (Kind.INPUT, Kind.GUARD) if reader.take(f"{one.value} ")), None)
    if kind is not None:
        target: Any = reader.word()
        args, kwargs = reader.arguments()
    else:
        callee = read_callee(reader)
        args, kwargs = reader.arguments()
        check_call(reader, callee, args, kwargs)
        kind = {Function: Kind.FUNCTION, Method: Kind.METHOD, Submodule: Kind.MODULE}[type(callee)]
        target = callee.target if isinstance(callee, Function) else _name(callee)
    _check(reader, (args, kwargs), index)
    reader.expect(":")
    dtype = read_dtype(reader)
    shape = reader.value() if dtype is not None else None
    reader.expect(";")
    _, attributes = reader.arguments()
    reader.end()
    return Node(index, kind, target, args, kwargs, **_besides(reader, attributes, dtype, shape))


def _name(callee: Method | Submodule) -> str:
    return callee.name if isinstance(callee, Method) else callee.path


def _besides(reader: Reader, attributes: dict[str, Any], dtype: torch.dtype | None, shape: Any) -> dict[str, Any]:
    """The attributes of a node besides its call."""
    layout, also = attributes.pop("layout", torch.strided), attributes.pop("also", [])
    number = attributes.pop("number", None)
    kinds = {"owner": str, "site": int, "writes": bool, "frozen": bool}
    wrong = any(name not in kinds or type(value) is not kinds[name] for name, value in attributes.items())
    if wrong or not all(map(_is_shape, also)) or (number is not None and number not in _NUMBERS):
        reader.fail("is no call of a graph")
    if dtype is not None and (not _is_shape(shape) or not isinstance(layout, torch.layout)):
        reader.fail("expected a shape")
    besides: dict[str, Any] = {
        **attributes,
        "number": _NUMBERS[number] if number else None,
        "other_shapes": tuple(also),
    }
    return besides if dtype is None else {**besides, "meta": TensorMeta(tuple(shape), dtype, layout)}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (list, tuple)) and all(type(size) is int for size in shape)


def _check(reader: Reader, tree: Any, nodes: int) -> None:
    wrong = [leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref) and leaf.index >= nodes]
    if wrong:
        reader.fail(f"%{wrong[0]} is not computed before")

"""Describes the structure of a captured call in words, to tell the programs of one module apart."""

from __future__ import annotations

from typing import Any

from torch import nn

from quant.graph import Graph
from quant.runtime.arguments import signature_of
from quant.runtime.matching import said
from quant.runtime.objects import Instance
from quant.runtime.trees import Attr, Ref, map_leaves

LONGEST = 400
"""Most characters of a description: that of a cache of forty layers would be too long to read."""


def call_text(graph: Graph, root: nn.Module) -> str:
    """As "x: float32[4, 16], mask: None": the arguments of the captured call, without defaults.

    Sizes are those of the example; the graph may leave them free.
    """
    defaults = {name: one.default for name, one in signature_of(root).parameters.items()}
    shown = [
        f"{name}: {_text(value, graph)}"
        for name, value in graph.arguments.items()
        if value is not defaults.get(name, graph) and value not in ((), {})
    ]
    text = ", ".join(shown) or "no arguments"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


class _Word:
    def __init__(self, word: str) -> None:
        self.word = word

    def __repr__(self) -> str:
        return self.word


def _text(value: Any, graph: Graph) -> str:
    def word(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            node = graph.nodes[leaf.index]
            if node.meta is None:
                return _Word(node.number.__name__ if node.number else "a value")
            return _Word(f"{str(node.meta.dtype).removeprefix('torch.')}{list(node.meta.shape)}")
        return _Word(leaf.path if isinstance(leaf, Attr) else said(leaf))

    if type(value) is Instance:
        parts = [f"{name}={_text(one, graph)}" for name, one in value.attributes.items()]
        items = [] if value.items is None else [_text(value.items, graph)]
        return f"{value.kind.__name__}({', '.join([*items, *parts])})"
    if type(value) in (list, tuple) and any(type(item) is Instance for item in value):
        inside = ", ".join(_text(item, graph) for item in value)
        return f"[{inside}]" if type(value) is list else f"({inside})"
    return repr(map_leaves(word, value))

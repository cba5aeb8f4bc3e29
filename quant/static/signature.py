"""A captured graph as lines of text, to compare the code of two models and to show where they differ."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Graph, Kind, Node
from quant.leaves import base_layer
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref, map_leaves

IGNORED = {"inplace", "p"}
"""Settings of torch's layers that change nothing at inference."""


def signature(graph: Graph, root: nn.Module) -> list[str]:
    """A line per call: the callee, its settings and the values it reads; without shapes, which depend on inputs."""
    return [f"{_target(node, root)}({_arguments(node)})" for node in graph.nodes]


def outline(graph: Graph) -> list[str]:
    """As `signature`, without settings, so that it is the same before and after layers become int8."""
    held = [repr(node.args[1]) if node.kind is Kind.GUARD else "" for node in graph.nodes]
    calls = [
        f"{node.kind.value} {_name(node)}({_arguments(node)}) {guard}"
        for node, guard in zip(graph.nodes, held, strict=True)
    ]
    return [_text(graph.arguments), *calls]


def guards(graph: Graph) -> list[str]:
    """The expected values of a graph's guards, in order: programs of one module may differ in these only."""
    return [repr(node.args[1]) for node in graph.nodes if node.kind is Kind.GUARD]


def same_call(line: str, other: str) -> bool:
    """Whether two lines are the same call: `2 * x` is recorded as `x * 2`, in older descriptions as it was written."""
    return _number_last(line) == _number_last(other)


def _number_last(line: str) -> str:
    return re.sub(r"^(add|mul)\(([^%(),]+), (%\d+)\)$", r"\1(\3, \2)", line)


def _target(node: Node, root: nn.Module) -> str:
    if node.kind is Kind.MODULE:
        module = attribute(root, node.target)
        return f"{node.target or '(root)'}: {(base_layer(module) or type(module)).__name__}{_settings(module)}"
    return _name(node)


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", type(node.target).__name__)


def _settings(module: nn.Module) -> str:
    """The constants that a layer of torch declares (stride, eps, ...); extra_repr may change between versions."""
    names = [name for name in getattr(type(module), "__constants__", ()) if name not in IGNORED]
    shown = [f"{name}={_text(getattr(module, name))}" for name in sorted(names) if hasattr(module, name)]
    return f"[{', '.join(shown)}]" if shown else ""


def _arguments(node: Node) -> str:
    if node.kind is Kind.GUARD:  # of a size, which may differ for other example inputs
        return f"%{node.args[0].index}" if isinstance(node.args[0], Ref) else ""
    named = [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
    return ", ".join([*map(_text, node.args), *named])


class _Word:
    """Its repr is the word."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __repr__(self) -> str:
        return self.word


def _text(tree: Any) -> str:
    return repr(map_leaves(_leaf, tree))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Ref):
        return _Word(f"%{leaf.index}")
    if isinstance(leaf, Attr):
        return _Word(leaf.path)
    if isinstance(leaf, Tensor):
        return _Word(f"tensor{tuple(leaf.shape)}")
    if leaf is None or leaf is ... or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return leaf
    return _Word(type(leaf).__name__)  # a repr may contain an address, which differs from run to run

"""A captured call as recognisers read it: its arguments by place or by name, and what it calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from quant.graph import Graph, Kind, Node, TensorMeta
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref


class StaysFloat(Exception):
    """A call that has no integer kernel; the message is the reason in the report."""


def check_tensor(meta: TensorMeta, dtype: torch.dtype) -> None:
    """Raise StaysFloat for a value of another dtype, and for a sparse one."""
    if meta.dtype != dtype:
        raise StaysFloat(f"its input is {meta.dtype}, expected {dtype}")
    if meta.layout != torch.strided:
        raise StaysFloat(f"its input has the layout {meta.layout}, expected torch.strided")


class Call:
    """A node whose arguments can be read by place or by name.

    Attributes:
        dtype: of its activations: float32, which can be quantised, or of indices int64.
    """

    def __init__(self, node: Node, graph: Graph, root: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.node, self.graph, self.root, self.dtype = node, graph, root, dtype
        self.module: nn.Module | None = attribute(root, node.target) if node.kind is Kind.MODULE else None

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place` or called `name`."""
        if place < len(self.node.args):
            return self.node.args[place]
        return self.node.kwargs.get(name, default)

    def activation(self, place: int = 0, name: str = "input") -> int:
        """The value read as this argument, which must be a tensor of `dtype`."""
        value = self.get(place, name)
        if not isinstance(value, Ref):
            raise StaysFloat(f"{name} is no activation")
        meta = self.graph.nodes[value.index].meta
        if meta is None:
            raise StaysFloat("its input is no tensor")
        check_tensor(meta, self.dtype)
        return value.index

    def rank(self, index: int) -> int:
        """Dimensions of a tensor value, as captured."""
        meta = self.graph.nodes[index].meta
        assert meta is not None
        return len(meta.shape)

    def constant(self, value: Any, name: str) -> Any:
        """`value`, which must not have been computed from the input."""
        if _is_ref(value) or (isinstance(value, (tuple, list)) and any(map(_is_ref, value))):
            raise StaysFloat(f"its {name} is computed at run time")
        return value


def _is_ref(value: Any) -> bool:
    return isinstance(value, (Ref, Attr))


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """A setting that torch takes as one number for all dimensions or one for each."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims


def called(node: Node, root: nn.Module) -> str:
    """The name of a node's call for reports: the class of a module, the name of a function."""
    if node.kind is Kind.MODULE:
        return type(attribute(root, node.target)).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def is_call_of(node: Node, targets: Collection[Any]) -> bool:
    """Whether a node calls one of these functions, or of these methods by their names."""
    return node.kind in (Kind.FUNCTION, Kind.METHOD) and node.target in targets

"""A call that no captured program stands for: the user's own forward runs, with int8 layers in it and floats between.

Weights of functional layers (`F.linear(x, self.weight)`) are no module of their own; for the user's forward they are
put back as the real values of their integers, when it first runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.names import attribute, full_name
from quant.runtime.trees import Attr, Ref
from quant.static.layers import StaticLayer


class WeightsToRestore:
    """The parameters that a user's forward reads and that have become parts of int8 layers."""

    def __init__(self, fused: FusedGraph) -> None:
        self.parts: list[tuple[str, slice | None, str, bool]] = []
        self._done = False
        for step in fused.steps:
            if isinstance(step.operator, Weighted) and fused.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
                self._note(step, step.operator, fused)

    def _note(self, step: Step, layer: Weighted, fused: FusedGraph) -> None:
        key = "/" + step.name.replace(".", "/")
        for is_weight, value in ((True, layer.weight), (False, layer.bias)):
            rows: slice | None = None
            if isinstance(value, Ref):
                node = fused.graph.nodes[value.index]
                owner = fused.graph.nodes[step.nodes[0]].owner
                if node.target is operator.getitem and isinstance(node.args[1], slice):
                    value, rows = node.args
                else:  # computed from parts: the module reads it as its `weight`
                    value = Attr(full_name(owner, "weight" if is_weight else "bias"))
            if isinstance(value, Attr):
                self.parts.append((value.path, rows, key, is_weight))

    def restore(self, root: nn.Module, layers: Mapping[str, StaticLayer]) -> None:
        """Set the parameters that are gone to the real values of the integers they became."""
        if self._done:
            return
        found: dict[str, list[Tensor]] = {}
        for path, _, key, is_weight in self.parts:
            value = layers[key[1:]].unfolded()[0 if is_weight else 1]
            if value is not None:
                found.setdefault(path, []).append(value)
        for path, values in found.items():
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            if _is_gone(module, name):
                sliced = any(rows is not None for place, rows, _, _ in self.parts if place == path)
                module.__dict__[name] = torch.cat(values) if sliced else values[0]
        self._done = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_done": False}


def _is_gone(module: nn.Module, name: str) -> bool:
    if name in module.__dict__:
        return False
    try:
        value = attribute(module, name)
    except AttributeError:
        return True
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)

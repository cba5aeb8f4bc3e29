"""A call that no captured program stands for: the user's own forward runs, with int8 layers in it and floats between.

Weights of functional layers (`F.linear(x, self.weight)`) are no module of their own; for the user's forward they are
put back as the real values of their integers, when it first runs.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.fuse import Plan, Step
from quant.graph import Attr, CaptureMismatch, Ref, attribute
from quant.static.folding import norm_arguments
from quant.static.layers import StaticLayer
from quant.static.recognise import OPERATORS


class UncapturedCall(UserWarning):
    """A call of a converted or prepared model that none of its captured programs stands for; it runs all the same."""


def warn_once(
    said: set[str], path: str, root: nn.Module, mismatch: CaptureMismatch, how: str, refused: str = ""
) -> None:
    """Say once per model and module that a call runs outside of its programs, and why; `refused`: it can have none."""
    if path in said:
        return
    said.add(path)
    hint = "quant.prepare(model, examples=[..., inputs like this call]) gives it a program of its own"
    if refused:
        hint = f"It can have no program of its own, because {refused}"
    warnings.warn(
        f"{path or type(root).__name__}: a call is unlike those it was prepared with, so it runs {how}: {mismatch}. "
        f"{hint}",
        UncapturedCall,
        stacklevel=4,
    )


class WeightsToRestore:
    """The parameters that a user's forward reads and that have become parts of int8 layers.

    Attributes:
        problem: why the user's forward cannot run any more; '' where it can.
        neutral: statistics of batch norms in weights, with which they do nothing, by dotted names.
        watched: running means among them that belong to layers of their own.
    """

    def __init__(self, plan: Plan) -> None:
        self.problem = ""
        self.parts: list[tuple[str, slice | None, str, bool]] = []
        self.neutral: dict[str, Tensor] = {}
        self.watched: list[str] = []
        self._done = False
        for step in plan.steps:
            if step.integer and OPERATORS[step.op].weighted:
                self._note_folded(step, plan)
                if plan.graph.nodes[step.nodes[0]].kind != "module":
                    self._note(step, plan)

    def _note_folded(self, step: Step, plan: Plan) -> None:
        """What is a part of an int8 weight and would be computed once more: a batch norm can be made to do nothing."""
        place = step.attrs.get("batch_norm")
        if "affine" in step.attrs:
            self.problem = f"layer '{step.name}' has a scale and an offset in its weight that the forward computes"
        elif place is not None and plan.graph.nodes[place].kind != "module":
            given = norm_arguments(plan.graph.nodes[place])
            values = {"running_mean": 0.0, "running_var": 1.0 - given["eps"], "weight": 1.0, "bias": 0.0}
            sources = [given[name] for name in values]
            if not all(one is None or isinstance(one, Attr) for one in sources):
                self.problem = f"layer '{step.name}' has a batch norm in its weight whose parameters are computed"
                return
            if plan.graph.nodes[step.nodes[0]].kind == "module" and isinstance(given["running_mean"], Attr):
                self.watched.append(given["running_mean"].path)
            width = plan.graph.nodes[place].meta
            assert width is not None
            for source, value in zip(sources, values.values(), strict=True):
                if source is not None:
                    self.neutral[source.path] = torch.full((width.shape[1],), value)

    def _note(self, step: Step, plan: Plan) -> None:
        key = "/" + step.name.replace(".", "/")
        for name in ("weight", "bias"):
            value = step.attrs[name]
            rows: slice | None = None
            if isinstance(value, Ref):
                node = plan.graph.nodes[value.index]
                owner = plan.graph.nodes[step.nodes[0]].owner
                if node.target is operator.getitem and isinstance(node.args[1], slice):
                    value, rows = node.args
                else:  # computed from parts: the module reads it as its `weight`
                    value = Attr(f"{owner}.{name}" if owner else name)
            if isinstance(value, Attr):
                self.parts.append((value.path, rows, key, name == "weight"))

    def restore(self, root: nn.Module, layers: Mapping[str, StaticLayer]) -> None:
        """Set the parameters that are gone to the real values of the integers they became."""
        if self._done:
            return
        found: dict[str, list[Tensor]] = {path: [value] for path, value in self.neutral.items()}
        for path, _, key, is_weight in self.parts:
            layer = layers[key[1:]]
            value = layer.weight if is_weight else layer.bias
            if value is not None:
                found.setdefault(path, []).append(value)
        for path, values in found.items():
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            if path in self.neutral or _is_gone(module, name):
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

"""Checks that the programs of a module fold the same into each weight, since a layer has one weight for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from quant.folding import norm_arguments
from quant.graph import Kind, Node
from quant.ops.operator import Weighted
from quant.runtime.trees import Attr
from quant.static.runner import GraphRunner


def agree(one: GraphRunner, first: GraphRunner) -> bool:
    """Whether a further program can share its layers with the first one."""
    mine, theirs = _of_layers(one), _of_layers(first)
    shared = mine.keys() & theirs.keys()
    return all(mine[layer] == theirs[layer] for layer in shared) and _norms(one) == _norms(first)


def _of_layers(runner: GraphRunner) -> dict[str, list[str]]:
    """Module or parameter -> the operations folded into its weight."""
    folds: dict[str, list[str]] = {}
    for step in runner.fused.steps:
        if isinstance(step.operator, Weighted):
            node, weight = runner.graph.nodes[step.nodes[0]], step.operator.weight
            layer = node.target if node.kind is Kind.MODULE else weight.path if isinstance(weight, Attr) else ""
            if layer:
                folds[layer] = _folded(step.operator, runner)
    return folds


def _folded(layer: Weighted, runner: GraphRunner) -> list[str]:
    folds = [repr(replace(one, constant=_named(one.constant), axis=0)) for one in layer.affine]
    if layer.batch_norm is not None:
        node = runner.graph.nodes[layer.batch_norm]
        norm = node.target if node.kind is Kind.MODULE else {**norm_arguments(node), "input": None}
        folds.append(repr(norm))
    return folds


def _named(constant: Any) -> Any:
    """A constant by its name: a computed one has other node numbers in other programs."""
    return constant if isinstance(constant, Attr) else type(constant).__name__


def _norms(runner: GraphRunner) -> tuple[set[str], set[str]]:
    """The batch norms that a program folds into weights, and those it calls; functional ones by their statistics."""
    graph, folded, called = runner.graph, set(), set()
    for step in runner.fused.steps:
        norm = step.operator.batch_norm if isinstance(step.operator, Weighted) else None
        if norm is not None:
            folded.add(_name(graph.nodes[norm]))
        called |= {_name(graph.nodes[index]) for index in step.nodes if index != norm
                   and _is_norm(graph.nodes[index], runner.root)}  # fmt: skip
    return folded, called


def _is_norm(node: Node, root: nn.Module) -> bool:
    if node.kind is Kind.MODULE:
        return isinstance(root.get_submodule(node.target), _BatchNorm)
    return node.target is F.batch_norm


def _name(node: Node) -> str:
    return str(node.target) if node.kind is Kind.MODULE else repr(norm_arguments(node).get("running_mean"))

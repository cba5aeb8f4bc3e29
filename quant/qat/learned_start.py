"""Training that starts from integers which `learn_rounding` chose: each weight becomes what its integers stand for.

Rounding to nearest gives the same integers again where the largest of a row, which sets its scale in training, is the
last of the range; learned rounding seldom leaves a row without it. The bias takes what the learned one has more. From
there training moves both as any others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.folding import gain_and_shift, norm_of
from quant.graph import Kind
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.layers.weighted import QWeight
from quant.runtime.names import attribute
from quant.runtime.trees import Attr
from quant.static.runner import GraphRunner
from quant.static.weights import dequantized, folded_bias

COMPUTED = "its weight is computed from others"
SHARED = "its weight is another layer's too, whose inputs the integers were not chosen for"


@torch.no_grad()
def start_from_learned(runners: Iterable[GraphRunner]) -> Iterator[tuple[GraphRunner, str, str]]:
    """Give the parameters of captured modules the values that their learned weights stand for.

    Args:
        runners: all of a model's.

    Yields:
        layers that keep their float weight: the runner, the layer's name in it, and why.
    """
    programs = list(runners)
    shared, done = _shared(programs), set[int]()
    for runner in programs:
        for step in runner.fused.steps:
            learned = runner.learned_weights.get(step.name)
            if learned is None:
                continue
            weight = _parameter(step.weighted.weight, runner.root)
            if weight is None or step.weighted.affine:
                yield runner, step.name, COMPUTED
            elif id(weight) in shared:
                yield runner, step.name, SHARED
            elif id(weight) not in done:
                done.add(id(weight))
                _start(step, learned, weight, runner)


def _shared(runners: list[GraphRunner]) -> set[int]:
    """The ids of weights that several layers read, or that one layer has several learned integers for."""
    readers: dict[int, set[Hashable]] = {}
    integers: dict[int, Tensor] = {}
    unlike: set[int] = set()
    for runner in runners:
        for node in runner.graph.nodes:
            if node.kind is Kind.MODULE:
                module = attribute(runner.root, node.target)
                for one in module.parameters(recurse=False):
                    readers.setdefault(id(one), set()).add(id(module))
        for step in runner.fused.steps:
            weight = _parameter(step.weighted.weight, runner.root) if isinstance(step.operator, Weighted) else None
            if weight is None:
                continue
            if runner.graph.nodes[step.nodes[0]].kind is not Kind.MODULE:
                readers.setdefault(id(weight), set()).add((id(runner.root), runner.fused.layer_of(step)))
            learned = runner.learned_weights.get(step.name)
            if learned is not None and not torch.equal(
                integers.setdefault(id(weight), learned.q_weight), learned.q_weight
            ):
                unlike.add(id(weight))
    return unlike | {one for one, layers in readers.items() if len(layers) > 1}


def _parameter(source: object, root: nn.Module) -> nn.Parameter | None:
    found = attribute(root, source.path) if isinstance(source, Attr) else None
    return found if isinstance(found, nn.Parameter) else None


def _start(step: Step, learned: QWeight, weight: nn.Parameter, runner: GraphRunner) -> None:
    layer, before = step.weighted, folded_bias(step, runner.graph, runner.root)
    rows = layer.output_first(dequantized(learned, step))
    norm = None if layer.batch_norm is None else norm_of(layer.batch_norm, runner.graph, runner.root)
    gain = torch.ones(len(rows)) if norm is None else gain_and_shift(norm)[0].to(torch.float32)
    lost = (gain == 0).reshape(-1, *[1] * (rows.dim() - 1))
    own = layer.output_first(weight.detach())
    real = torch.where(lost, own, rows / torch.where(lost, 1.0, gain.reshape(lost.shape)))
    weight.copy_(layer.as_layer(real))
    if learned.bias is not None and before is not None:
        _shift(learned.bias - before, gain, norm, _parameter(layer.bias, runner.root))


def _shift(more: Tensor, gain: Tensor, norm: Any, bias: nn.Parameter | None) -> None:
    """Add to what a layer puts out: by the bias of its norm where it has one, else by the mean, or by its own."""
    if norm is not None and isinstance(norm.bias, nn.Parameter):
        norm.bias.add_(more)
    elif norm is not None:
        norm.running_mean.sub_(torch.where(gain == 0, 0.0, more / gain))
    elif bias is not None:
        bias.add_(more)

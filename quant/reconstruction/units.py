"""Where a graph's steps are cut: the layers that are rounded anew, one by one, and the blocks that they form.

A block ends where one value alone goes on (BRECQ, Li et al. 2021, arXiv:2102.05426, section 3.2: a residual block,
with its squeeze-and-excitation). Values that follow from no such layer, as masks and rotary tables, do not count. A
stretch without such a place is cut behind every MOST_LAYERS layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from quant.dynamic_decisions import TABLES
from quant.fusion.fused_graph import FusedGraph
from quant.fusion.last_readers import last_readers
from quant.graph import Kind
from quant.observers import LEARNED
from quant.ops.operator import Weighted
from quant.ops.registered import Registered
from quant.ops.step import Step, is_recurrent
from quant.reconstruction.moments import has_rows

MOST_LAYERS = 8
"""The most layers of a block."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps, and which of them are layers to round anew.

    Attributes:
        outputs: the values that follow from these layers and are read behind the block.
    """

    steps: tuple[Step, ...]
    layers: tuple[Step, ...]
    outputs: tuple[int, ...]


def why_left(step: Step, fused: FusedGraph) -> str:
    """Why a layer's step is rounded to nearest; '' where it is rounded anew."""
    assert step.qconfig is not None
    if is_recurrent(step):
        return "it is recurrent: what its weights read follows from its own outputs"
    if not has_rows(step):
        return f"a {step.operator.name} is no product of rows with its weight"
    if step.qconfig.weight_observer in LEARNED:
        return "training learns its scale"
    if len(fused.calls_of_layer(step)) > 1 or fused.graph.nodes[step.nodes[0]].target in fused.shared:
        return "it is called at several places, which have inputs of their own"
    return ""


def why_dynamic_left(module: nn.Module) -> str:
    """Why a layer of a static model that becomes dynamic is rounded to nearest."""
    if isinstance(module, TABLES):
        return "a table has no inputs to be multiplied with"
    return "it is dynamic; quant.quantize_dynamic(model, batches=..., rounding=...) is what rounds such layers by data"


def blocks_of(fused: FusedGraph, layers: set[int]) -> list[Block]:
    """The steps of a graph in blocks; each ends with a layer, or at a place that one value passes alone.

    Args:
        layers: outputs of the steps that are rounded anew.
    """
    dead = last_readers(fused)
    live: set[int] = set()
    blocks: list[Block] = []
    begun: list[Step] = []
    for step in fused.steps:
        begun.append(step)
        if step.output in layers or any(value in live for value in step_reads(step, fused)):
            live.update(step.nodes if is_recurrent(step) else [step.output])
        live.difference_update(dead.get(step.output, ()))
        own = [one for one in begun if one.output in layers]
        alone = len(live) <= 1 and not _continues(step, fused)
        if own and (alone or len(own) >= MOST_LAYERS or isinstance(step.operator, Registered) or is_recurrent(step)):
            blocks.append(_block(begun, own, live))
            begun = []
    if begun:
        blocks.append(_block(begun, [one for one in begun if one.output in layers], live))
    return blocks


def _block(steps: list[Step], layers: list[Step], live: set[int]) -> Block:
    inside = {index for step in steps for index in step.nodes}
    return Block(tuple(steps), tuple(layers), tuple(sorted(live & inside)) if layers else ())


def _continues(step: Step, fused: FusedGraph) -> bool:
    """Whether a function of the step's value alone comes next: an activation belongs to its layer's block."""
    place = fused.steps.index(step)
    if place + 1 == len(fused.steps):
        return False
    after = fused.steps[place + 1]
    return not isinstance(after.operator, Weighted) and set(step_reads(after, fused)) == {step.output}


def step_reads(step: Step, fused: FusedGraph) -> Iterator[int]:
    """The values of other steps that a step's calls read."""
    for index in step.nodes:
        yield from (ref for ref in fused.graph.nodes[index].refs if ref not in step.nodes)


def is_input(step: Step, fused: FusedGraph) -> bool:
    """Whether the step is an argument of the module."""
    return fused.graph.nodes[step.output].kind is Kind.INPUT

"""Layers that stand alone between float steps with so few products that they are slower in int8: they stay float.

Such a layer rounds its own input, and what it gives is read in float: the values on both sides are turned over for it
alone, while the products are what int8 gains by. With p products for each value that it reads or gives
(`products_per_value` of its operator),

    time in int8 / time in float  =  (a + b p) / (c + d p),        a > c, b < d,

so there is a p from which int8 is faster. It is taken from the weight's shape and the strides alone: a model becomes
the same on every CPU and by every example. `benchmarks/bench_lone_layers.py` measures it (docs/decisions.md has
figures).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quant.folding import parameter
from quant.fusion.fuse import fuse_again
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.recipe import Recipe
from quant.runtime.names import attribute, full_name

FEWEST_PRODUCTS = 14.0
"""p below which a layer that stands alone stays float."""


def without_lone_layers(graphs: Sequence[tuple[FusedGraph, nn.Module]], recipe: Recipe) -> list[FusedGraph]:
    """The graphs of a model fused again with such layers in float; arguments as of `lone_layers`."""
    return [
        fuse_again(fused, root, recipe, reasons) if reasons else fused
        for (fused, root), reasons in zip(graphs, lone_layers(graphs, recipe), strict=True)
    ]


def lone_layers(graphs: Sequence[tuple[FusedGraph, nn.Module]], recipe: Recipe) -> list[dict[str, str]]:
    """The layers to leave float in each graph, by their names within its captured module, and why.

    A layer that a rule of the recipe names is none of them, nor is one that is not alone in another graph. Where they
    are all that could be int8 there are none: whoever quantises nothing else wants these.

    Args:
        graphs: all of a model, each with the captured module.
        recipe: that they were fused by.
    """
    slower: list[dict[str, str]] = []
    kept: set[int] = set()  # modules: a layer that is called in several graphs is int8 in all of them or in none
    for fused, root in graphs:
        slower.append({})
        for name, steps in _layers(fused).items():
            module = attribute(root, name)
            asked = recipe.asks_for(full_name(fused.graph.path, name), module)
            products = max(_products_per_value(step, fused, root) for step in steps)
            if asked or products >= FEWEST_PRODUCTS or not all(_is_alone(step, fused) for step in steps):
                kept.add(id(module))
            else:
                slower[-1][name] = _why(products)
    if not kept:
        return [{} for _ in graphs]
    return [
        {name: why for name, why in own.items() if id(attribute(root, name)) not in kept}
        for own, (_, root) in zip(slower, graphs, strict=True)
    ]


def _layers(fused: FusedGraph) -> dict[str, list[Step]]:
    """The integer steps whose inputs are worth quantising, by the module whose rule decides them."""
    layers: dict[str, list[Step]] = {}
    for step in fused.steps:
        if step.integer and step.operator.anchor:
            node = fused.graph.nodes[step.nodes[0]]
            layers.setdefault(node.target if node.kind is Kind.MODULE else node.owner, []).append(step)
    return layers


def _is_alone(step: Step, fused: FusedGraph) -> bool:
    """Whether no other integer step gives it integers, or reads its own."""
    makers = (other for other in fused.steps if other.output in step.inputs)
    return not fused.emits_integers(step) and not any(map(fused.emits_integers, makers))


def _products_per_value(step: Step, fused: FusedGraph, root: nn.Module) -> float:
    layer = step.operator
    weight = parameter(layer.weight, fused.graph, root) if isinstance(layer, Weighted) else None
    return float("inf") if weight is None else step.weighted.products_per_value(tuple(weight.shape))


def _why(products: float) -> str:
    return (
        f"float steps stand before and after it, and {products:.2g} products for each value that it reads or gives are "
        f"fewer than rounding these costs ({FEWEST_PRODUCTS:g}), so it is faster in float; a rule that names it makes "
        "it int8"
    )

"""Finds layers that get larger values in eval mode than in training, or that training does not call.

A forward that branches on the mode, or on whether gradients are taken, is an island. But the layers that it calls see
only the values of training, and ranges of those may be too small for eval mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quant.graph import Kind, Node
from quant.leaves import is_leaf
from quant.runtime.names import attribute
from quant.runtime.trees import Attr, Ref, leaves

if TYPE_CHECKING:
    from quant.capture.recorder import Recorder

LARGER = "eval mode gives it larger values than training, whose ranges would clip them"
NEVER_TRAINED = "eval mode calls it and training does not, which has no ranges for it"
REASONS = (LARGER, NEVER_TRAINED)
MARGIN = 0.25
"""Share of a range from training by which eval mode may exceed it: dropout and the statistics of a batch norm move the
ends a little, and 8 bits lose little there."""


def within(layers: Mapping[str, str], path: str) -> dict[str, str]:
    """The layers within the module `path`, by their names in it, with the reasons that they stay float."""
    inside = (name for name in layers if not path or name == path or name.startswith(f"{path}."))
    return {name.removeprefix(path).removeprefix("."): layers[name] for name in inside}


def called_layers(recorder: Recorder) -> set[str]:
    """The layers that a recording called; functional ones by their owners."""
    return {name for node in recorder.nodes if (name := _layer(node, recorder.root)) is not None}


def larger_layers(evaluated: Recorder, trained: Recorder) -> Iterator[str]:
    """The layers within the root, and the owners of functional ones, whose values are computed otherwise in eval mode
    than in training, and are larger there.

    Args:
        evaluated, trained: recordings of the same call in either mode.
    """
    kinds: dict[Any, int] = {}
    calls, others = _calls(evaluated, kinds), _calls(trained, kinds)
    for name, values in calls.items():
        known = others.get(name, {})
        new = [value for kind, value in values.items() if kind not in known]
        if new and known and _exceed(new, list(known.values())):
            yield name


def _calls(recorder: Recorder, kinds: dict[Any, int]) -> dict[str, dict[int, Tensor]]:
    """Layer -> its float inputs, each with the calls that computed it."""
    ways: list[int] = []
    activations: set[int] = set()
    by_layer: dict[str, dict[int, Tensor]] = {}
    for node in recorder.nodes:
        target = node.target if isinstance(node.target, str) else id(node.target)
        arguments = tuple(ways[leaf.index] if isinstance(leaf, Ref) else _key(leaf) for leaf in _leaves(node))
        key: tuple[Any, ...] = (node.kind, target, node.owner, arguments)
        if node.kind is Kind.INPUT or not activations.isdisjoint(node.refs):
            activations.add(node.index)
        else:  # spectral norm computes its weight differently in training, and converges
            key = ("stored", node.owner)
        ways.append(kinds.setdefault(key, len(kinds)))
        name = _layer(node, recorder.root)
        if name is None:
            continue
        for ref in filter(activations.__contains__, node.refs):
            value = recorder.value(ref)
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                by_layer.setdefault(name, {})[ways[ref]] = value.detach()
    return by_layer


def _layer(node: Node, root: nn.Module) -> str | None:
    """The name of the layer that a node may be."""
    if node.kind is Kind.MODULE:
        return str(node.target) if is_leaf(attribute(root, node.target)) else None
    return node.owner if any(isinstance(leaf, Attr) for leaf in _leaves(node)) else None


def _leaves(node: Node) -> list[Any]:
    return list(leaves((node.args, node.kwargs)))


def _key(constant: Any) -> Any:
    """A key for a constant that tells 1 from True."""
    if isinstance(constant, (bool, int, float, str, Attr, type(None), torch.dtype, torch.device)):
        return type(constant), constant
    return type(constant)


def _exceed(values: list[Tensor], known: list[Tensor]) -> bool:
    low, high = _ends(known)
    lower, higher = _ends(values)
    slack = MARGIN * (high - low)
    return lower < low - slack or higher > high + slack


def _ends(values: list[Tensor]) -> tuple[float, float]:
    """The ends of a range that contains zero, as ranges of activations do."""
    ends = [one.aminmax() for one in values]
    return min(0.0, *(float(low) for low, _ in ends)), max(0.0, *(float(high) for _, high in ends))

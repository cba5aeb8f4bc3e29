"""Padding by zeros as the convolution's own: runtimes pad in float between a DequantizeLinear and a QuantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from quant.onnx.file import Node


def with_folded_pads(
    nodes: Sequence[Node], constants: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The nodes without DequantizeLinear - Pad - QuantizeLinear where one convolution alone reads the result.

    The convolution reads what was padded, and pads itself: by the real 0, which is what its own padding is.
    """
    makers = {name: node for node in nodes for name in node.outputs}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    changed: dict[str, Node] = {}
    dropped: set[str] = set()
    for node in nodes:
        chain = _chain(node, makers, readers, outputs)
        widths = None if chain is None else _widths(chain[0], constants)
        if chain is None or widths is None:
            continue
        changed[node.name] = replace(
            node,
            inputs=(chain[0].inputs[0], *node.inputs[1:]),
            attributes={
                **node.attributes,
                "pads": [a + b for a, b in zip(node.attributes["pads"], widths, strict=True)],
            },
        )
        dropped.update(one.name for one in chain)
    return tuple(changed.get(node.name, node) for node in nodes if node.name not in dropped)


def _chain(
    node: Node, makers: Mapping[str, Node], readers: Mapping[str, list[Node]], outputs: Sequence[str]
) -> tuple[Node, Node, Node] | None:
    """Pad, QuantizeLinear and DequantizeLinear before a convolution, none of them read by anything else."""
    if node.op != "Conv" or "pads" not in node.attributes:
        return None
    found: list[Node] = []
    name = node.inputs[0]
    for op in ("DequantizeLinear", "QuantizeLinear", "Pad"):
        maker = makers.get(name)
        if maker is None or maker.op != op or len(readers[name]) != 1 or name in outputs:
            return None
        found.insert(0, maker)
        name = maker.inputs[0]
    before = makers.get(name)
    same_range = before is not None and before.op == "DequantizeLinear" and before.inputs[1:] == found[1].inputs[1:]
    return (found[0], found[1], found[2]) if same_range else None


def _widths(pad: Node, constants: Mapping[str, Tensor]) -> list[int] | None:
    """What is added to each side of the pixels, in a convolution's order; None for another padding than by zeros."""
    if pad.attributes.get("mode", b"constant") != b"constant" or len(pad.inputs) != 2 or pad.inputs[1] not in constants:
        return None
    widths = constants[pad.inputs[1]].tolist()
    rank = len(widths) // 2
    if any(one < 0 for one in widths) or any((widths[0], widths[1], widths[rank], widths[rank + 1])):
        return None
    return [*widths[2:rank], *widths[rank + 2 :]]

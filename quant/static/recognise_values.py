"""Recognises what takes each value by itself: functions of one or two, joins, and moves that change none."""

from __future__ import annotations

from typing import Any

import torch

from quant.graph import Attr, Node, Ref
from quant.static.leaves import base_layer
from quant.static.meaning import Call, Handler, Meaning, StaysFloat, what, what_name

SPLITTING = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes"}


def lookup(call: Call) -> Meaning:
    """A function of one value, which is a table of 256 entries."""
    others = [arg for arg in [*call.node.args[1:], *call.node.kwargs.values()] if isinstance(arg, Ref)]
    if others:
        raise StaysFloat("a setting of it is computed at run time")
    return Meaning("lookup", (call.activation(),), {"channels": False, "clamp": _clamp(call)})


def batch_norm(call: Call) -> Meaning:
    """A batch norm by the statistics it has kept; `fuse.py` folds it into a layer before it."""
    module: Any = call.module
    if module.running_mean is None:
        raise StaysFloat("it normalises by the statistics of each batch")
    return Meaning("lookup", (call.activation(),), {"channels": True, "clamp": None, "is_batch_norm": True})


def prelu(call: Call) -> Meaning:
    """`nn.PReLU`, with a slope for all or one per channel."""
    module: Any = call.module
    attrs = {"channels": module.num_parameters > 1, "clamp": None}
    return Meaning("lookup", (call.activation(),), attrs)


def _clamp(call: Call) -> tuple[float, float] | None:
    """The interval that a call clamps to, where that is all it does."""
    module: Any = call.module
    infinity = float("inf")
    name = what(call.node, call.root) if module is None else (base_layer(module) or object).__name__
    if name in ("ReLU", "relu", "relu_"):
        return 0.0, infinity
    if name in ("ReLU6", "relu6"):
        return 0.0, 6.0
    if name == "Hardtanh":
        return module.min_val, module.max_val
    if name in ("hardtanh", "hardtanh_"):
        return call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0)
    if name in ("clamp", "clamp_", "clip"):
        low, high = call.get(1, "min"), call.get(2, "max")
        if isinstance(low, (torch.Tensor, Attr)) or isinstance(high, (torch.Tensor, Attr)):
            raise StaysFloat("clamps to tensors")
        return -infinity if low is None else float(low), infinity if high is None else float(high)
    return None


def binary(op: str, sign: int = 1) -> Handler:
    """A sum, a difference (sign -1) or a product."""

    def handler(call: Call) -> Meaning:
        args = [call.get(0, "input"), call.get(1, "other")]
        if call.get(2, "alpha") is not None or call.node.kwargs.get("out") is not None:
            raise StaysFloat("it has an alpha or an out")
        numbers = [isinstance(arg, (int, float)) for arg in args]
        if any(numbers):
            return _with_number(call, args, numbers.index(False))
        inputs = (call.activation(0), call.activation(1, "other"))
        return Meaning(op, inputs, {"sign": sign, "clamp": None})

    return handler


def _with_number(call: Call, args: list[Any], place: int) -> Meaning:
    """A sum or product with a Python number is a function of one value."""
    if not isinstance(args[place], Ref):
        raise StaysFloat("its operand is no activation")
    return Meaning("lookup", (call.activation(place, "input"),), {"channels": False, "clamp": None})


def division(call: Call) -> Meaning:
    """Division by a number; by a tensor it stays float."""
    if isinstance(call.get(1, "other"), (int, float)) and len(call.node.args) == 2:
        return _with_number(call, [call.get(0, "input"), call.get(1, "other")], 0)
    raise StaysFloat("division by a tensor is kept in float")


def cat(call: Call) -> Meaning:
    """A concatenation or a stack, of values that have its range or are given it."""
    tensors = call.get(0, "tensors")
    if not isinstance(tensors, (tuple, list)):
        raise StaysFloat("it joins a list made at run time")
    inputs = []
    for tensor in tensors:
        if not isinstance(tensor, Ref):
            raise StaysFloat("it joins a constant")
        meta = call.graph.nodes[tensor.index].meta
        if meta is None or meta.dtype != torch.float32:
            raise StaysFloat("it joins what is not float32")
        inputs.append(tensor.index)
    return Meaning("cat", tuple(inputs))


def moved(call: Call) -> Meaning:
    """What moves values or leaves some out, and changes none."""
    found = call.get(0, "input")
    if not isinstance(found, Ref):
        raise StaysFloat("its input is no activation")
    source = call.graph.nodes[found.index]
    if source.meta is not None and source.meta.dtype != torch.float32:
        raise StaysFloat(f"its input is {source.meta.dtype}")
    if source.meta is None and not _splits(source):
        raise StaysFloat("its input is no tensor")
    return Meaning("pass", (found.index,))


def _splits(node: Node) -> bool:
    """Whether a node's value is a tuple of parts of one tensor."""
    return node.kind in ("function", "method") and what_name(node) in SPLITTING

"""Recognises what takes each value by itself: functions of one or two, joins, and moves that change none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from quant.graph import Attr, Node, Ref, TensorMeta
from quant.static.folding import Affine, depends_on_nothing, is_own_norm, norm_arguments, own_shape
from quant.static.meaning import Call, Handler, Meaning, StaysFloat, check_reals, function_name, what

DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
"""Functions of torch that are told whether to drop; those of `nn` ask their module."""

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


def batch_norm_function(call: Call) -> Meaning:
    """`F.batch_norm` by statistics that are the model's own; folded as `batch_norm`."""
    if not is_own_norm(call.node, call.graph) or isinstance(norm_arguments(call.node)["eps"], Ref):
        raise StaysFloat("it normalises by the statistics of each batch, or by what is computed from the input")
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
    name = what(call.node, call.root)
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
        for place in (0, 1):
            meaning = _per_channel(call, args, place, op, sign)
            if meaning is not None:
                return meaning
        inputs = (call.activation(0), call.activation(1, "other"))
        return Meaning(op, inputs, {"sign": sign, "clamp": None})

    return handler


def _per_channel(call: Call, args: list[Any], place: int, op: str, sign: int) -> Meaning | None:
    """A sum or product with the model's own numbers, one per channel: a part of the layer before, where it can be.

    Args:
        place: of the operand that is no activation.
    """
    x, constant = args[1 - place], args[place]
    shape = own_shape(call.graph, call.root, constant)
    if shape is None or not isinstance(x, Ref) or depends_on_nothing(call.graph, x):
        return None
    if call.node.meta is None or call.node.meta.dtype != torch.float32:  # a wider constant makes a wider result
        return None
    index = call.activation(1 - place, ("input", "other")[1 - place])
    axis = _channel_axis(shape, call.graph.nodes[index].meta)
    if axis is None:
        return None
    signs = (1, sign) if place == 1 else (sign, 1)  # of x and of the constant
    attrs = {"channels": True, "clamp": None, "affine": Affine(op, constant, axis, signs[1], signs[0])}
    return Meaning("lookup", (index,), {**attrs, "only_folded": axis != 1 or not isinstance(constant, Ref)})


def _channel_axis(shape: tuple[int, ...], meta: TensorMeta | None) -> int | None:
    """1 or -1 for a tensor of `shape` with a number for each index of that axis of a value; 0 with one for all."""
    if meta is None or len(meta.shape) < 2 or len(shape) > len(meta.shape):
        return None
    if set(shape) <= {1}:
        return 0
    full = (1,) * (len(meta.shape) - len(shape)) + shape
    for axis in (1, -1):
        expected = [1] * len(full)
        expected[axis] = meta.shape[axis]
        if list(full) == expected:
            return axis
    return None


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
        if meta is None or meta.dtype != torch.float32 or meta.layout != torch.strided:
            raise StaysFloat("it joins what is not float32, or is sparse")
        inputs.append(tensor.index)
    return Meaning("cat", tuple(inputs))


def moved(call: Call) -> Meaning:
    """What moves values or leaves some out, and changes none."""
    if call.node.target in DROPOUTS and call.get(2, "training", True) is True:
        raise StaysFloat("it drops values in eval mode too")
    found = call.get(0, "input")
    if not isinstance(found, Ref):
        raise StaysFloat("its input is no activation")
    source = call.graph.nodes[found.index]
    if source.meta is not None:
        check_reals(source.meta)
    if source.meta is None and not _splits(source):
        raise StaysFloat("its input is no tensor")
    return Meaning("pass", (found.index,))


def _splits(node: Node) -> bool:
    """Whether a node's value is a tuple of parts of one tensor."""
    return node.kind in ("function", "method") and function_name(node) in SPLITTING

"""Calls that are layers of their own in float: products, norms, attention, pads, resizing."""

from __future__ import annotations

import torch

from quant.onnx.arithmetic_calls import cast
from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.integer_steps import padding
from quant.onnx.resizes import resize
from quant.onnx.sizes import reshaped, scalar, sizes_of

# Products.


@writes_call("matmul")
def _matmul(call: WrittenCall) -> str:
    a, b = call.get(0, "input"), call.get(1, "other", call.raw(1, "mat2"))
    done = call.writer.node("MatMul", a, b)
    if call.rank() > 1:
        call.writer.same_sizes(done, a, count=call.rank() - 1)
    return done


@writes_call("einsum")
def _einsum(call: WrittenCall) -> str:
    equation, operands = call.args[0], call.rest(1, "operands")
    if not isinstance(equation, str):
        raise NotWritten("is an einsum over lists of dimensions")
    return call.writer.node("Einsum", *operands, equation=equation)


@writes_call("linear")
def _linear(call: WrittenCall) -> str:
    writer, x, weight, bias = call.writer, call.get(0, "input"), call.get(1, "weight"), call.get(2, "bias")
    if not isinstance(weight, str):
        raise NotWritten("linear with a weight that is no tensor")
    done = writer.node("MatMul", x, writer.node("Transpose", weight, perm=[1, 0]))
    done = done if bias is None else writer.node("Add", done, bias)
    return writer.same_sizes(done, x, count=call.rank() - 1)


# Norms.


@writes_call("layer_norm")
def _layer_norm(call: WrittenCall) -> str:
    writer, x = call.writer, call.get(0, "input")
    shape = call.get(1, "normalized_shape")
    shape = [shape] if isinstance(shape, int) else list(shape)
    weight, bias, eps = call.get(2, "weight"), call.get(3, "bias"), float(call.get(4, "eps", 1e-5))
    if weight is None and not all(isinstance(one, int) for one in shape):
        return _normed(writer, x, len(shape), bias, eps)
    if weight is None:
        weight = writer.constant(torch.ones(shape), "weight")
    inputs = [x, weight] if bias is None else [x, weight, bias]
    done = writer.node("LayerNormalization", *inputs, axis=-len(shape), epsilon=eps)
    return writer.same_sizes(done, x)


def _normed(writer: GraphWriter, x: str, dims: int, bias: str | None, eps: float) -> str:
    """A layer norm over sizes that differ between calls: without a weight, ONNX's operator has none of its shape."""
    axes = [-1 - place for place in range(dims)]
    centred = writer.node("Sub", x, writer.node("ReduceMean", x, axes=axes, keepdims=1))
    variance = writer.node("ReduceMean", writer.node("Mul", centred, centred), axes=axes, keepdims=1)
    root = writer.node("Sqrt", writer.node("Add", variance, writer.constant(torch.tensor(eps), "eps")))
    done = writer.node("Div", centred, root)
    return writer.same_sizes(done if bias is None else writer.node("Add", done, bias), x)


@writes_call("rms_norm")
def _rms_norm(call: WrittenCall) -> str:
    writer, x = call.writer, call.get(0, "input")
    shape = call.get(1, "normalized_shape")
    axes = [-1 - place for place in range(1 if isinstance(shape, int) else len(shape))]
    eps = call.get(3, "eps")
    mean = writer.node("ReduceMean", writer.node("Mul", x, x), axes=axes, keepdims=1)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    root = writer.node("Sqrt", writer.node("Add", mean, writer.constant(torch.tensor(float(eps)), "eps")))
    done, weight = writer.node("Div", x, root), call.get(2, "weight")
    return writer.same_sizes(done if weight is None else writer.node("Mul", done, weight), x)


@writes_call("group_norm")
def _group_norm(call: WrittenCall) -> str:
    writer, x, groups, shape = call.writer, call.get(0, "input"), call.get(1, "num_groups"), call.shape()
    channels = shape[1]
    assert channels is not None
    flat = reshaped(writer, x, (Dimension(x, 0), groups, -1))
    ones, zeros = writer.constant(torch.ones(groups), "ones"), writer.constant(torch.zeros(groups), "zeros")
    normed = writer.node("InstanceNormalization", flat, ones, zeros, epsilon=float(call.get(4, "eps", 1e-5)))
    done = reshaped(writer, normed, sizes_of(writer, x, call.source()))
    for op, place, name in (("Mul", 2, "weight"), ("Add", 3, "bias")):
        value = call.get(place, name)
        if value is not None:
            done = writer.node(op, done, reshaped(writer, value, (channels, *[1] * (len(shape) - 2))))
    return writer.same_sizes(done, x)


# Attention.


@writes_call("scaled_dot_product_attention", "attend")
def _attention(call: WrittenCall) -> str:
    mask = call.get(3, "attn_mask" if call.name != "attend" else "mask")
    if call.name != "attend" and call.get(6, "scale") is not None:
        scale = float(call.get(6, "scale"))
    else:
        width = call.shape()[-1]
        if width is None:
            raise NotWritten("attends with a width that differs between calls")
        scale = width**-0.5
    if call.kwargs.get("enable_gqa"):
        raise NotWritten("attends with fewer heads of keys than of queries (enable_gqa)")
    causal = bool(call.get(5, "is_causal", False) if call.name != "attend" else call.kwargs.get("is_causal", False))
    scores = _scores(call, scale)
    writer = call.writer
    if causal:
        scores = writer.node("Add", scores, _causal(call))
    if mask is not None:
        scores = writer.node("Add", scores, _additive(writer, mask))
    weights = writer.node("Softmax", scores, axis=-1)
    q = call.get(0, "query")
    return writer.same_sizes(writer.node("MatMul", weights, call.get(2, "value")), q, count=call.rank() - 1)


def _scores(call: WrittenCall, scale: float) -> str:
    """q k' times a number."""
    writer, rank = call.writer, call.rank()
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    keys = writer.node("Transpose", call.get(1, "key"), perm=swapped)
    products = writer.node("MatMul", call.get(0, "query"), keys)
    return writer.node("Mul", products, writer.constant(torch.tensor(scale, dtype=torch.float32), "scale"))


def _additive(writer: GraphWriter, mask: str) -> str:
    """A mask of booleans as what is added to scores."""
    if writer.dtype(mask) != torch.bool:
        return cast(writer, mask, torch.float32)
    ends = [writer.constant(torch.tensor(one), "masked") for one in (0.0, float("-inf"))]
    return writer.node("Where", mask, *ends)


def _causal(call: WrittenCall) -> str:
    """-inf where the key is later than the query, of the upper triangle."""
    writer = call.writer
    ends = [scalar(writer, sizes_of(writer, call.get(place, name), call.source(place, name))[-2])
            for place, name in ((0, "query"), (1, "key"))]  # fmt: skip
    full = writer.node("Expand", writer.constant(torch.tensor(float("-inf")), "masked"),
                       writer.node("Concat", *ends, axis=0))  # fmt: skip
    return writer.node("Trilu", full, writer.constant(torch.tensor(1), "diagonal"), upper=1)


@writes_call("attention_weights")
def _attention_weights(call: WrittenCall) -> str:
    width = call.shape()[-1]
    if width is None:
        raise NotWritten("attends with a width that differs between calls")
    writer, mask, scores = call.writer, call.get(2, "mask"), _scores(call, width**-0.5)
    scores = scores if mask is None else writer.node("Add", scores, _additive(writer, mask))
    weights = writer.node("Softmax", scores, axis=-1)
    return writer.node("ReduceMean", weights, axes=[1], keepdims=0) if call.kwargs.get("average") else weights


# What float parts of convolutional networks call.


@writes_call("pad")
def _pad(call: WrittenCall) -> str:
    widths, mode, fill = call.get(1, "pad"), call.get(2, "mode", "constant"), call.get(3, "value")
    return padding(call.writer, call.get(0, "input"), call.rank(), list(widths), mode, float(fill or 0.0))


@writes_call("constant_pad", "reflection_pad", "replication_pad")
def _pad_module(call: WrittenCall) -> str:
    mode = {"constant_pad": "constant", "reflection_pad": "reflect", "replication_pad": "replicate"}[call.name]
    fill = float(call.get(2, "value") or 0.0)
    return padding(call.writer, call.get(0, "input"), call.rank(), list(call.get(1, "padding")), mode, fill)


@writes_call("interpolate")
def _interpolate(call: WrittenCall) -> str:
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    options = {name: call.get(place, name) for place, name in enumerate(names, 1)}
    return resize(call.writer, call.get(0, "input"), call.source(), call.out, options)


@writes_call("normalize")
def _normalize(call: WrittenCall) -> str:
    if call.get(1, "p", 2.0) != 2.0:
        raise NotWritten("normalises by another norm than 2")
    writer, x, dim = call.writer, call.get(0, "input"), call.get(2, "dim", 1)
    norm = writer.node("ReduceL2", x, axes=[dim % call.rank()], keepdims=1)
    least = writer.constant(torch.tensor(float(call.get(3, "eps", 1e-12))), "eps")
    return writer.same_sizes(writer.node("Div", x, writer.node("Max", norm, least)), x)

"""The operators of ONNX that quantised convolutional networks consist of, each as the lines of a plan.

An operator is one function, registered by its name (https://onnx.ai/onnx/operators/); those that only move values are
in `load_moves.py`. The lines have the bits of ONNX
Runtime, whose optimiser joins the same operators into integer kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant.kernels.reference_plan import Register
from quant.onnx.file import Node, OnnxFile
from quant.onnx.functions import IN_TORCH, OF_TWO
from quant.onnx.load_moves import are_sizes, index_of_channels, size_arithmetic, sizes
from quant.onnx.load_plan import NotTranslated, PlanWriter
from quant.onnx.load_registry import OPERATORS, translates
from quant.onnx.load_values import UNKNOWN, Dequantized, Integers, Range, Real, Sizes, Value, Waiting, Weight
from quant.runtime.layers.requantizing import clamp_limits, quantized_bias

INT8_SHIFT = 128
"""What makes an int8 integer, and its zero point, uint8."""


def plan_of(file: OnnxFile) -> tuple[str, list[Tensor]]:
    """The text and the constants of the plan that computes a file.

    Raises:
        NotTranslated: a node has no integer form; with its name.
    """
    return PlanWriter(file).write(OPERATORS)


@translates("QuantizeLinear")
def _quantize(plan: PlanWriter, node: Node) -> Value:
    return plan.round(plan.value(node, 0), _range(plan, node), node)


@translates("DequantizeLinear")
def _dequantize(plan: PlanWriter, node: Node) -> Value:
    if node.inputs[0] in plan.file.constants:
        return _constant(plan, node)
    value, own = plan.value(node, 0), _range(plan, node)
    if isinstance(value, Integers) and value.range == UNKNOWN:
        return Dequantized(Integers(value.register, own))
    if not isinstance(value, Integers) or value.range != own:
        raise NotTranslated(f"{node}: expected the range that its input was quantised with")
    return Dequantized(value)


def _range(plan: PlanWriter, node: Node) -> Range:
    """The range of an activation; int8 ones are shifted by 128."""
    scale, zero_point = plan.array(node, 1), plan.array(node, 2, torch.tensor(0, dtype=torch.uint8))
    assert scale is not None
    assert zero_point is not None
    if scale.numel() != 1 or zero_point.dtype not in (torch.uint8, torch.int8):
        raise NotTranslated(
            f"{node}: has {scale.numel()} scales and zero points of {zero_point.dtype}, expected one scale, and "
            "uint8 or int8"
        )
    return Range(float(scale), int(zero_point) + (INT8_SHIFT if zero_point.dtype == torch.int8 else 0))


def _constant(plan: PlanWriter, node: Node) -> Weight:
    values, scale = plan.array(node, 0), plan.array(node, 1)
    assert values is not None
    assert scale is not None
    zero_points = plan.array(node, 2, torch.zeros((), dtype=values.dtype))
    assert zero_points is not None
    zero_points = zero_points.to(torch.int32)
    if values.dtype == torch.uint8:
        values, zero_points = (values.to(torch.int16) - INT8_SHIFT).to(torch.int8), zero_points - INT8_SHIFT
    if values.dtype not in (torch.int8, torch.int32) or bool(zero_points.any()) or node.attributes.get("block_size"):
        raise NotTranslated(
            f"{node}: a constant of {values.dtype} with a zero point or scales of blocks, expected int8 with the zero "
            "point 0 (or uint8 with 128) and a scale for all or for each channel"
        )
    return Weight(values, scale.to(torch.float32).reshape(-1), int(node.attributes.get("axis", 1)))


@translates("Conv")
def _conv(plan: PlanWriter, node: Node) -> Value:
    weight = plan.weight(node, 1)
    dims = weight.values.dim() - 2
    at = node.attributes
    if at.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotTranslated(f"{node}: pads automatically, expected widths")
    pads = list(at.get("pads", [0] * 2 * dims))
    x = plan.integers(node, 0)
    register = x.register
    if pads[:dims] != pads[dims:]:
        widths = tuple(one for k in reversed(range(dims)) for one in (pads[k], pads[dims + k]))
        register = plan.emit("pad", q=Register(register), widths=widths, mode="constant", fill=x.range.zero_point)
        pads = [0] * 2 * dims
    settings = {
        "stride": tuple(at.get("strides", [1] * dims)),
        "padding": tuple(pads[:dims]),
        "dilation": tuple(at.get("dilations", [1] * dims)),
        "groups": int(at.get("group", 1)),
    }
    return _product(plan, node, "conv", Integers(register, x.range), weight.values, settings)


@translates("Gemm", "MatMul")
def _linear(plan: PlanWriter, node: Node) -> Value:
    at, values = node.attributes, plan.weight(node, 1).values
    if at.get("transA") or at.get("alpha", 1.0) != 1.0 or at.get("beta", 1.0) != 1.0 or values.dim() != 2:
        raise NotTranslated(f"{node}: expected x times a matrix, with alpha and beta 1")
    return _product(plan, node, "linear", plan.integers(node, 0), values if at.get("transB") else values.t(), {})


def _product(
    plan: PlanWriter, node: Node, kind: str, x: Integers, q_weight: Tensor, settings: dict[str, Any]
) -> Waiting:
    weight_scale = plan.weight(node, 1).scale.expand(q_weight.shape[0])
    scale = torch.tensor(x.range.scale) * weight_scale
    bias = _bias(plan, node, scale)
    inputs = {
        "q_x": Register(x.register),
        "zero_point": x.range.zero_point,
        "q_weight": plan.constant(q_weight),
        "q_bias": None if bias is None else plan.constant(bias),
        **settings,
    }

    def finish(to: Range | None, low: float, high: float) -> int:
        if to is None:
            out = plan.emit(f"{kind}_u8s8_f32", **inputs, multiplier=plan.constant(scale))
            return out if (low, high) == (-torch.inf, torch.inf) else _clamp(plan, out, low, high)
        multiplier = plan.constant(scale / torch.tensor(to.scale))
        return plan.emit(f"{kind}_u8s8_u8", **inputs, multiplier=multiplier, **_limits(to, low, high))

    return Waiting(finish)


def _bias(plan: PlanWriter, node: Node, scale: Tensor) -> Tensor | None:
    """The bias at the scale of the products, int32."""
    if len(node.inputs) < 3 or not node.inputs[2]:
        return None
    if node.inputs[2] in plan.file.constants:
        return quantized_bias(plan.file.constants[node.inputs[2]].to(torch.float32), scale)
    own = plan.weight(node, 2)
    if own.values.dtype == torch.int32 and torch.allclose(own.scale.expand_as(scale), scale, rtol=1e-5, atol=0.0):
        return own.values
    return quantized_bias(own.values.to(torch.float32) * own.scale, scale)


def _limits(to: Range, low: float, high: float) -> dict[str, int]:
    least, most = clamp_limits((low, high), to.scale, to.zero_point)
    return {"output_zero_point": to.zero_point, "quant_min": least, "quant_max": most}


def _clamp(plan: PlanWriter, register: int, low: float, high: float) -> int:
    return plan.emit("clamp", x=Register(register), low=low, high=high)


@translates("Relu")
def _relu(plan: PlanWriter, node: Node) -> Value:
    return _clamped(plan, node, 0.0, torch.inf)


@translates("Clip")
def _clip(plan: PlanWriter, node: Node) -> Value:
    return _clamped(plan, node, *_ends(plan, node))


def _clamped(plan: PlanWriter, node: Node, low: float, high: float) -> Value:
    value = plan.value(node, 0)
    if isinstance(value, Waiting):
        return value.clamped(low, high)
    if isinstance(value, Dequantized):
        return value.then(lambda x: x.clamp(low, high))
    if isinstance(value, Real):
        return Real(_clamp(plan, value.register, low, high))
    raise NotTranslated(f"{node}: clamps a constant")


def _ends(plan: PlanWriter, node: Node) -> tuple[float, float]:
    """The ends of a Clip: inputs since opset 11, attributes before."""
    ends = []
    for place, name, default in ((1, "min", -torch.inf), (2, "max", torch.inf)):
        given = plan.array(node, place)
        ends.append(float(node.attributes.get(name, default)) if given is None else float(given))
    return ends[0], ends[1]


FUNCTIONS = sorted(IN_TORCH.keys() - {"Relu"})
"""Functions of one value, which become tables of 256 integers; a Relu is a clamp."""


@translates(*FUNCTIONS)
def _function(plan: PlanWriter, node: Node) -> Value:
    value = plan.value(node, 0)
    if not isinstance(value, Dequantized):
        raise NotTranslated(f"{node}: its input is not quantised, and has to be here")
    return value.then(IN_TORCH[node.op](node.attributes))


def _of_one_value(plan: PlanWriter, node: Node) -> Value | None:
    """An operator of sizes, or of two functions of the same integers or a number; else None."""
    if are_sizes(plan, node):
        return size_arithmetic(plan, node)
    values = [plan.file.constants.get(name, plan.values.get(name)) for name in node.inputs]
    sources = {one.integers for one in values if isinstance(one, Dequantized)}
    numbers = [one for one in values if isinstance(one, Tensor)]
    functions = [one for one in values if isinstance(one, Dequantized) and one.function is not None]
    known = len(numbers) + len([one for one in values if isinstance(one, Dequantized)]) == 2
    if not known or len(sources) != 1 or not (functions or numbers) or any(one.numel() != 1 for one in numbers):
        return None

    def operand(value: Any) -> Callable[[Tensor], Tensor]:
        if isinstance(value, Tensor):
            return lambda x: value.reshape(()).to(torch.float32)
        return (lambda x: x) if value.function is None else value.function

    one, other = map(operand, values)
    apply = OF_TWO[node.op]
    return Dequantized(sources.pop(), lambda x: apply(one(x), other(x)))


@translates("Div")
def _division(plan: PlanWriter, node: Node) -> Value:
    value = _of_one_value(plan, node)
    if value is None:
        raise NotTranslated(f"{node}: divides by what is no number, which has no integer form")
    return value


@translates("Add", "Sub")
def _add(plan: PlanWriter, node: Node) -> Value:
    known = index_of_channels(plan, node) or _of_one_value(plan, node)
    if known is not None:
        return known
    a, b = plan.integers(node, 0), plan.integers(node, 1)
    sign = -1.0 if node.op == "Sub" else 1.0

    def finish(to: Range | None, low: float, high: float) -> int:
        scale = _needed(node, to).scale
        return plan.emit(
            "add",
            q_a=Register(a.register), a_zero_point=a.range.zero_point, a_multiplier=_ratio(a.range.scale, scale),
            q_b=Register(b.register), b_zero_point=b.range.zero_point, b_multiplier=sign * _ratio(b.range.scale, scale),
            **_limits(_needed(node, to), low, high),
        )  # fmt: skip

    return Waiting(finish)


@translates("Mul")
def _mul(plan: PlanWriter, node: Node) -> Value:
    known = _of_one_value(plan, node)
    if known is not None:
        return known
    a, b = plan.integers(node, 0), plan.integers(node, 1)

    def finish(to: Range | None, low: float, high: float) -> int:
        product = torch.tensor(a.range.scale) * torch.tensor(b.range.scale)
        return plan.emit(
            "mul",
            q_a=Register(a.register), a_zero_point=a.range.zero_point,
            q_b=Register(b.register), b_zero_point=b.range.zero_point,
            multiplier=float(product / torch.tensor(_needed(node, to).scale)),
            **_limits(_needed(node, to), low, high),
        )  # fmt: skip

    return Waiting(finish)


@translates("Concat")
def _concat(plan: PlanWriter, node: Node) -> Value:
    if are_sizes(plan, node):
        return Sizes(tuple(one for place in range(len(node.inputs)) for one in sizes(plan, node, place) or ()))
    values = [plan.value(node, place) for place in range(len(node.inputs))]
    whole = [one for one in values if isinstance(one, Integers)]
    if len(whole) == len(values):
        return _joined_integers(plan, node, whole)
    parts = [plan.integers(node, place) for place in range(len(node.inputs))]

    def finish(to: Range | None, low: float, high: float) -> int:
        range_ = _needed(node, to)
        _unclamped(node, low, high)
        return plan.emit(
            "cat",
            tensors=tuple(Register(one.register) for one in parts),
            dim=int(node.attributes["axis"]),
            zero_points=tuple(one.range.zero_point for one in parts),
            multipliers=tuple(_ratio(one.range.scale, range_.scale) for one in parts),
            output_zero_point=range_.zero_point,
        )

    return Waiting(finish)


def _joined_integers(plan: PlanWriter, node: Node, parts: list[Integers]) -> Value:
    if len({one.range for one in parts}) > 1:
        raise NotTranslated(f"{node}: joins integers of several ranges")
    tensors = tuple(Register(one.register) for one in parts)
    return Integers(plan.emit("cat", tensors=tensors, dim=int(node.attributes["axis"])), parts[0].range)


@translates("GlobalAveragePool")
def _global_average(plan: PlanWriter, node: Node) -> Value:
    return _average(plan, node, "adaptive_avg_pool", size=(1, 1))


@translates("AveragePool")
def _average_pool(plan: PlanWriter, node: Node) -> Value:
    counts = bool(node.attributes.get("count_include_pad", 0))
    return _average(plan, node, "avg_pool", **_pool(node), count_include_pad=counts)


@translates("ReduceMean")
def _mean(plan: PlanWriter, node: Node) -> Value:
    """Its axes are an input since opset 18, and an attribute before."""
    axes = plan.array(node, 1)
    dims = tuple(node.attributes["axes"]) if axes is None else tuple(map(int, axes.reshape(-1)))
    return _average(plan, node, "mean", dim=dims, keepdim=bool(node.attributes.get("keepdims", 1)))


def _average(plan: PlanWriter, node: Node, op: str, **settings: Any) -> Waiting:
    x = plan.integers(node, 0)

    def finish(to: Range | None, low: float, high: float) -> int:
        range_ = _needed(node, to)
        _unclamped(node, low, high)
        multiplier = _ratio(x.range.scale, range_.scale)
        return plan.emit(
            op, q=Register(x.register), zero_point=x.range.zero_point, **settings,
            multiplier=multiplier, output_zero_point=range_.zero_point,
        )  # fmt: skip

    return Waiting(finish)


def _pool(node: Node) -> dict[str, Any]:
    at = node.attributes
    dims = len(at["kernel_shape"])
    pads = list(at.get("pads", [0] * 2 * dims))
    if pads[:dims] != pads[dims:] or at.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotTranslated(f"{node}: pads its sides differently, or automatically")
    return {
        "kernel": tuple(at["kernel_shape"]),
        "stride": tuple(at.get("strides", [1] * dims)),
        "padding": tuple(pads[:dims]),
        "ceil_mode": bool(at.get("ceil_mode", 0)),
    }


@translates("MaxPool")
def _max_pool(plan: PlanWriter, node: Node) -> Value:
    x = plan.integers(node, 0)
    dilation = tuple(node.attributes.get("dilations", [1] * len(node.attributes["kernel_shape"])))
    return Dequantized(Integers(plan.emit("max_pool", q=Register(x.register), **_pool(node), dilation=dilation),
                                x.range))  # fmt: skip


def _needed(node: Node, to: Range | None) -> Range:
    if to is None:
        raise NotTranslated(f"{node}: its result is read as float32, expected a QuantizeLinear after it")
    return to


def _unclamped(node: Node, low: float, high: float) -> None:
    if (low, high) != (-torch.inf, torch.inf):
        raise NotTranslated(f"{node}: is clamped before it is quantised, which has no integer form")


def _ratio(scale: float, to: float) -> float:
    return float(torch.tensor(scale) / torch.tensor(to))

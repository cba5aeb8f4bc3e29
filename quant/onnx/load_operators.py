"""The operators of ONNX that quantised convolutional networks consist of, each as the lines of a plan.

An operator is one function, registered by its name (https://onnx.ai/onnx/operators/); those that only move values are
in `load_moves.py`, and Resize in `load_resizes.py`. The lines have the bits of ONNX Runtime, whose optimiser joins the
same operators into integer kernels. What stands in float between integers is in `load_reals.py` and `load_torch.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quant.kernels.reference_plan import Register
from quant.onnx import load_reals, load_resizes  # noqa: F401  # they register operators
from quant.onnx.file import Node, OnnxFile
from quant.onnx.functions import IN_TORCH, OF_TWO
from quant.onnx.load_fusions import with_gelus, with_roundings
from quant.onnx.load_moves import are_sizes, index_of_channels, size_arithmetic, sizes
from quant.onnx.load_plan import FilePlan, NotTranslated, PlanWriter
from quant.onnx.load_registry import OPERATORS, translates
from quant.onnx.load_torch import DTYPES, TORCH, reduced
from quant.onnx.load_values import (
    UNKNOWN,
    ChannelIntegers,
    ChannelRange,
    Dequantized,
    Held,
    Integers,
    Range,
    Real,
    Sizes,
    Value,
    Waiting,
    Weight,
)
from quant.runtime.layers.requantizing import clamp_limits, quantized_bias

INT8_SHIFT = 128
"""What makes an int8 integer, and its zero point, uint8."""


def plan_of(file: OnnxFile) -> FilePlan:
    """What computes a file.

    Raises:
        NotTranslated: a node has no form, with its name; or nothing is quantised.
    """
    if not any(node.op in ("QuantizeLinear", "DequantizeLinear") for node in file.nodes):
        raise NotTranslated(
            "it holds no QuantizeLinear and no DequantizeLinear, so nothing in it has calibrated ranges; where it has "
            "QLinearConv, ConvInteger or MatMulInteger, quantise with calibration and QuantFormat.QDQ"
        )
    return PlanWriter(with_roundings(with_gelus(file))).write(OPERATORS)


@translates("QuantizeLinear")
def _quantize(plan: PlanWriter, node: Node) -> Value | tuple[Value, ...] | None:
    if plan.is_constant(node.inputs[0]):
        plan.file.constants[node.outputs[0]] = _rounded_constant(plan, node)
        return None
    channels, value = _channel_range(plan, node), plan.value(node, 0)
    if channels is not None and isinstance(value, Waiting) and value.by_channel:
        with contextlib.suppress(NotTranslated):
            return plan.round_channels(value, channels, node)
    if _has_channels(plan, node):
        return plan.in_float(node)
    return replace(plan.round(value, _range(plan, node), node), signed=_zero_point(plan, node).dtype == torch.int8)


def _zero_point(plan: PlanWriter, node: Node, signed: bool = False) -> Tensor:
    """Of QuantizeLinear or DequantizeLinear; where it is left out 0 of the dtype that the node says, or its input has.

    Args:
        signed: whether the input is int8.
    """
    known = plan.array(node, 2)
    said = int(node.attributes.get("output_dtype", 0))
    if node.op == "DequantizeLinear" and said in (0, FLOAT32):
        return torch.tensor(0, dtype=torch.int8 if signed else torch.uint8) if known is None else known
    dtype = DTYPES.get(said) if said else torch.uint8 if known is None else known.dtype
    if node.op == "DequantizeLinear" or dtype is None or (known is not None and known.dtype != dtype):
        raise NotTranslated(f"{node}: gives the type {said} (output_dtype), expected 8 bits, or float32 of them")
    return torch.tensor(0, dtype=dtype) if known is None else known


FLOAT32 = 1
"""Of onnx.TensorProto.DataType."""


@translates("DequantizeLinear")
def _dequantize(plan: PlanWriter, node: Node) -> Value | tuple[Value, ...]:
    if node.inputs[0] in plan.file.constants:
        return _constant(plan, node)
    value = plan.value(node, 0)
    if isinstance(value, ChannelIntegers) and value.range == _channel_range(plan, node):
        return replace(value, real=True)
    if isinstance(value, Held) and _has_channels(plan, node):
        return plan.in_float(node)
    own = _range(plan, node, isinstance(value, Integers) and value.signed)
    if not isinstance(value, Integers):
        raise NotTranslated(f"{node}: its input is not quantised")
    if value.range != UNKNOWN and value.signed != (_zero_point(plan, node, value.signed).dtype == torch.int8):
        raise NotTranslated(f"{node}: its zero point and its input have different dtypes")
    return Dequantized(Integers(value.register, own))  # whatever range they were rounded by


def _has_channels(plan: PlanWriter, node: Node) -> bool:
    """Whether there is a range of 8 bits for each channel."""
    scale, zero_point = plan.array(node, 1), plan.array(node, 2)
    if scale is None or zero_point is None or node.attributes.get("block_size"):
        return False
    return zero_point.dtype in (torch.uint8, torch.int8) and scale.numel() > 1 and scale.shape == zero_point.shape


def _channel_range(plan: PlanWriter, node: Node) -> ChannelRange | None:
    """A range for each channel, as NNCF has before depthwise convolutions; None for another one."""
    scale, zero_point = plan.array(node, 1), plan.array(node, 2)
    if scale is None or zero_point is None or scale.numel() == 1 or int(node.attributes.get("axis", 1)) != 1:
        return None
    if zero_point.dtype not in (torch.uint8, torch.int8) or len(set(zero_point.tolist())) != 1:
        return None
    return ChannelRange(tuple(scale.tolist()), int(zero_point[0]) + INT8_SHIFT * (zero_point.dtype == torch.int8))


def _range(plan: PlanWriter, node: Node, signed: bool = False) -> Range:
    """The range of an activation; int8 ones are shifted by 128."""
    scale, zero_point = plan.array(node, 1), _zero_point(plan, node, signed)
    assert scale is not None
    if scale.numel() != 1 or zero_point.dtype not in (torch.uint8, torch.int8):
        raise NotTranslated(
            f"{node}: has {scale.numel()} scales and zero points of {zero_point.dtype}, expected one scale, and "
            "uint8 or int8"
        )
    if not 0 < float(scale) < torch.inf:
        raise NotTranslated(f"{node}: its scale is {float(scale)}, expected a positive number")
    return Range(float(scale), int(zero_point) + (INT8_SHIFT if zero_point.dtype == torch.int8 else 0))


def _rounded_constant(plan: PlanWriter, node: Node) -> Tensor:
    """The integers of a constant that the file keeps as floats."""
    values, scale = plan.constant_named(node.inputs[0]), plan.array(node, 1)
    assert values is not None
    assert scale is not None
    zero_point = _zero_point(plan, node).expand_as(scale)
    if zero_point.dtype not in (torch.uint8, torch.int8) or node.attributes.get("block_size"):
        raise NotTranslated(f"{node}: rounds a constant to {zero_point.dtype} or by blocks, expected uint8 or int8")
    shape = [1] * values.dim()
    if scale.numel() > 1:
        shape[int(node.attributes.get("axis", 1))] = -1
    limits = torch.iinfo(zero_point.dtype)
    rounded = torch.round(values / scale.reshape(shape)) + zero_point.reshape(shape)
    return rounded.clamp(limits.min, limits.max).to(zero_point.dtype)


def _constant(plan: PlanWriter, node: Node) -> Weight:
    values, scale = plan.array(node, 0), plan.array(node, 1)
    assert values is not None
    assert scale is not None
    _zero_point(plan, node)  # for its output_dtype
    zero_points = plan.array(node, 2, torch.zeros((), dtype=values.dtype))
    assert zero_points is not None
    zero_points = zero_points.to(torch.int32).reshape(-1)
    if values.dtype == torch.uint8:
        values, zero_points = (values.to(torch.int16) - INT8_SHIFT).to(torch.int8), zero_points - INT8_SHIFT
    axis = int(node.attributes.get("axis", 1)) if values.dim() > 1 else 0  # of biases quantisers leave it out
    count = scale.numel()
    per_channel = count > 1 and -values.dim() <= axis < values.dim() and values.shape[axis] == count
    if values.dtype not in (torch.int8, torch.int32) or node.attributes.get("block_size"):
        raise NotTranslated(
            f"{node}: a constant of {values.dtype}, or with scales of blocks, expected int8 and a scale for all or for "
            "each channel"
        )
    if not (count == 1 or per_channel) or zero_points.numel() not in (1, count):
        raise NotTranslated(
            f"{node}: {count} scales and {zero_points.numel()} zero points for a constant of shape "
            f"{tuple(values.shape)}, expected one or one for each of axis {axis}"
        )
    return Weight(values, scale.to(torch.float32).reshape(-1), zero_points.expand(count), axis)


@translates("Conv")
def _conv(plan: PlanWriter, node: Node) -> Value:
    weight = plan.weight(node, 1)
    dims = weight.values.dim() - 2
    at = node.attributes
    if weight.scale.numel() > 1 and weight.axis % weight.values.dim():
        raise NotTranslated(f"{node}: has scales along axis {weight.axis} of its weight, expected 0")
    if at.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotTranslated(f"{node}: pads automatically, expected widths")
    pads = _widths(node, dims)
    group = int(at.get("group", 1))
    x = _input_of_convolution(plan, node, group)
    register = x.register
    if pads[:dims] != pads[dims:]:
        widths = tuple(one for k in reversed(range(dims)) for one in (pads[k], pads[dims + k]))
        register = plan.emit("pad", q=Register(register), widths=widths, mode="constant", fill=x.range.zero_point)
        pads = [0] * 2 * dims
    settings = {
        "stride": tuple(at.get("strides", [1] * dims)),
        "padding": tuple(pads[:dims]),
        "dilation": tuple(at.get("dilations", [1] * dims)),
        "groups": group,
    }
    return _product(plan, node, "conv", replace(x, register=register), weight.values, settings)


def _input_of_convolution(plan: PlanWriter, node: Node, groups: int) -> Integers | ChannelIntegers:
    """With a range for each channel where each is a group."""
    value = plan.value(node, 0)
    if not isinstance(value, ChannelIntegers):
        return plan.integers(node, 0)
    if not value.real or groups != len(value.range.scale):
        raise NotTranslated(f"{node}: its input has a range for each channel, expected one")
    return value


@translates("Gemm", "MatMul")
def _linear(plan: PlanWriter, node: Node) -> Value:
    if node.op == "MatMul" and not isinstance(plan.value(node, 1), Weight):
        return _product_of_two(plan, node)
    at, weight = node.attributes, plan.weight(node, 1)
    if at.get("transA") or at.get("alpha", 1.0) != 1.0 or at.get("beta", 1.0) != 1.0 or weight.values.dim() != 2:
        raise NotTranslated(f"{node}: expected x times a matrix, with alpha and beta 1")
    rows = 0 if at.get("transB") else 1
    if weight.scale.numel() > 1 and weight.axis % 2 != rows:
        raise NotTranslated(f"{node}: has scales along axis {weight.axis} of its weight, expected {rows}")
    q_weight = weight.values.t() if rows else weight.values
    return _product(plan, node, "linear", plan.integers(node, 0), q_weight, {})


def _product_of_two(plan: PlanWriter, node: Node) -> Value:
    """A MatMul of activations, as attention has two of."""
    a, b = plan.integers(node, 0), plan.integers(node, 1)
    scale = torch.tensor(a.range.scale) * torch.tensor(b.range.scale)
    inputs = {
        "q_a": Register(a.register), "a_zero_point": a.range.zero_point,
        "q_b": Register(b.register), "b_zero_point": b.range.zero_point,
    }  # fmt: skip

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        if not isinstance(to, Range):
            return _clamp(plan, plan.emit("matmul_f32", **inputs, multiplier=float(scale)), low, high)
        multiplier = float(scale / torch.tensor(to.scale))
        return plan.emit("matmul", **inputs, multiplier=multiplier, **_limits(to, low, high))

    return Waiting(finish)


def _product(
    plan: PlanWriter,
    node: Node,
    kind: str,
    x: Integers | ChannelIntegers,
    q_weight: Tensor,
    settings: dict[str, Any],
    added: Tensor | None = None,
) -> Waiting:
    """The product of integers and a weight.

    Args:
        added: a bias that the file adds to the result.
    """
    weight_scale = plan.weight(node, 1).scale.expand(q_weight.shape[0])
    input_scale = torch.tensor(x.range.scale)
    if input_scale.numel() > 1:
        input_scale = input_scale.repeat_interleave(q_weight.shape[0] // input_scale.numel())
    scale = input_scale * weight_scale
    bias = _bias(plan, node, scale) if added is None else quantized_bias(added, scale)

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        inputs = {
            "q_x": Register(x.register),
            "zero_point": x.range.zero_point,
            "q_weight": plan.constant(q_weight),
            "q_bias": None if bias is None else plan.constant(bias),
            **settings,
        }
        if to is None:
            out = plan.emit(f"{kind}_u8s8_f32", **inputs, multiplier=plan.constant(scale))
            return _clamp(plan, out, low, high)
        multiplier = plan.constant(scale / torch.tensor(to.scale))
        return plan.emit(f"{kind}_u8s8_u8", **inputs, multiplier=multiplier, **_limits(to, low, high))

    def with_bias(one: Tensor) -> Waiting | None:
        if kind != "linear" or bias is not None or one.shape != q_weight.shape[:1] or one.dtype != torch.float32:
            return None
        return _product(plan, node, kind, x, q_weight, settings, one)

    return Waiting(finish, by_channel=kind == "conv", with_bias=with_bias)


def _bias(plan: PlanWriter, node: Node, scale: Tensor) -> Tensor | None:
    """The bias at the scale of the products, int32."""
    if len(node.inputs) < 3 or not node.inputs[2]:
        return None
    if node.inputs[2] in plan.file.constants:
        bias = plan.file.constants[node.inputs[2]].to(torch.float32)
        if bias.numel() != bias.shape[-1:].numel() or bias.numel() not in (1, scale.numel()):
            raise NotTranslated(f"{node}: adds a bias of shape {tuple(bias.shape)}, expected ({scale.numel()},)")
        return quantized_bias(bias.reshape(-1).expand_as(scale), scale)
    own = plan.weight(node, 2)
    if own.values.dtype == torch.int32 and torch.allclose(own.scale.expand_as(scale), scale, rtol=1e-5, atol=0.0):
        return own.values
    return quantized_bias(own.values.to(torch.float32) * own.scale, scale)


def _limits(to: Range | ChannelRange, low: float, high: float) -> dict[str, int]:
    scales = to.scale if isinstance(to, ChannelRange) else (to.scale,)
    limits = {clamp_limits((low, high), scale, to.zero_point) for scale in scales}
    if len(limits) > 1:
        raise NotTranslated("clamps each channel at another integer, expected the same for all")
    [(least, most)] = limits
    return {"output_zero_point": to.zero_point, "quant_min": least, "quant_max": most}


def _clamp(plan: PlanWriter, register: int, low: float, high: float) -> int:
    if (low, high) == (-torch.inf, torch.inf):
        return register
    return plan.emit("clamp", x=Register(register), low=low, high=high)


def _in_float(plan: PlanWriter, node: Node, low: float, high: float, to: Range | ChannelRange | None = None) -> int:
    """The register of a node that no integers compute, rounded or as it is."""
    value = plan.in_float(node)
    assert isinstance(value, Real)
    out = _clamp(plan, value.register, low, high)
    return plan.round(Real(out), to, node).register if isinstance(to, Range) else out


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
    if isinstance(value, Integers) and value.range != UNKNOWN:
        held = plan.array(node, 1)
        if held is None or held.dtype != torch.uint8:
            raise NotTranslated(f"{node}: clamps integers, expected uint8 and both ends")
        table = torch.arange(256).clamp(low, min(high, 255)).to(torch.uint8)
        return replace(value, register=plan.emit("lookup", q=Register(value.register), table=plan.constant(table)))
    raise NotTranslated(f"{node}: clamps a constant, or whole numbers")


def _ends(plan: PlanWriter, node: Node) -> tuple[float, float]:
    """The ends of a Clip: inputs since opset 11, attributes before."""
    ends = []
    for place, name, default in ((1, "min", -torch.inf), (2, "max", torch.inf)):
        given = plan.array(node, place)
        ends.append(float(node.attributes.get(name, default)) if given is None else float(given))
    return ends[0], ends[1]


FUNCTIONS = sorted({*IN_TORCH, "Gelu"} - {"Relu"})
"""Functions of one value, which become tables of 256 integers; a Relu is a clamp."""


@translates(*FUNCTIONS)
def _function(plan: PlanWriter, node: Node) -> Value:
    value = plan.value(node, 0)
    if not isinstance(value, Dequantized):
        raise NotTranslated(f"{node}: its input is not quantised, and has to be here")
    function = TORCH[node.op].function
    return value.then(lambda x: function(node.attributes, x))


def _of_one_value(plan: PlanWriter, node: Node) -> Value | None:
    """An operator of sizes, or of two functions of the same integers or a number; else None."""
    if are_sizes(plan, node):
        return size_arithmetic(plan, node)
    values = [_number(plan, name) for name in node.inputs]
    sources = {one.integers for one in values if isinstance(one, Dequantized)}
    numbers = [one for one in values if isinstance(one, Tensor)]
    numbers = [one for one in numbers if one.dtype == torch.float32]
    functions = [one for one in values if isinstance(one, Dequantized) and one.function is not None]
    known = len(numbers) + len([one for one in values if isinstance(one, Dequantized)])
    if known != 2 or len(values) != 2 or len(sources) != 1 or not (functions or numbers):
        return None
    source = next(iter(sources))
    if not all(one.numel() == 1 and plan.keeps_rank(source.register, one) for one in numbers):
        return None

    def operand(value: Any) -> Callable[[Tensor], Tensor]:
        if isinstance(value, Tensor):
            return lambda x: value.reshape(()).to(torch.float32)
        return (lambda x: x) if value.function is None else value.function

    one, other = map(operand, values)
    apply = OF_TWO[node.op]
    return Dequantized(sources.pop(), lambda x: apply(one(x), other(x)))


def _number(plan: PlanWriter, name: str) -> Value | Tensor | None:
    """An operand; a quantised constant of one value is that."""
    value = plan.file.constants.get(name, plan.values.get(name))
    return value.reals() if isinstance(value, Weight) and value.values.numel() == 1 else value


@translates("Div")
def _division(plan: PlanWriter, node: Node) -> Value:
    value = _of_one_value(plan, node)
    if value is None:
        raise NotTranslated(f"{node}: divides by what is no number, which has no integer form")
    return value


@translates("Add", "Sub")
def _add(plan: PlanWriter, node: Node) -> Value:
    known = index_of_channels(plan, node) or _of_one_value(plan, node) or _biased(plan, node)
    if known is not None:
        return known
    a, b = plan.integers(node, 0), plan.integers(node, 1)
    sign = -1.0 if node.op == "Sub" else 1.0

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        if not isinstance(to, Range):
            return _in_float(plan, node, low, high)
        return plan.emit(
            "add",
            q_a=Register(a.register), a_zero_point=a.range.zero_point, a_multiplier=_ratio(a.range.scale, to.scale),
            q_b=Register(b.register), b_zero_point=b.range.zero_point,
            b_multiplier=sign * _ratio(b.range.scale, to.scale), **_limits(to, low, high),
        )  # fmt: skip

    return Waiting(finish)


@translates("Sum")
def _sum(plan: PlanWriter, node: Node) -> Value:
    if len(node.inputs) == 1:  # between two roundings that are to stay two
        return plan.value(node, 0)
    if len(node.inputs) != 2:
        raise NotTranslated(f"{node}: adds {len(node.inputs)} values, expected one or two")
    return _add(plan, replace(node, op="Add"))


def _biased(plan: PlanWriter, node: Node) -> Waiting | None:
    """A product to which a constant is added, as the bias of its layer; else None."""
    for name, other in (node.inputs, node.inputs[::-1]):
        value, constant = plan.values.get(name), plan.file.constants.get(other)
        if node.op == "Add" and constant is not None and isinstance(value, Waiting) and not value.moves:
            return None if value.with_bias is None else value.with_bias(constant)
    return None


@translates("Mul")
def _mul(plan: PlanWriter, node: Node) -> Value:
    known = _of_one_value(plan, node)
    if known is not None:
        return known
    a, b = plan.integers(node, 0), plan.integers(node, 1)

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        if not isinstance(to, Range):
            return _in_float(plan, node, low, high)
        product = torch.tensor(a.range.scale) * torch.tensor(b.range.scale)
        return plan.emit(
            "mul",
            q_a=Register(a.register), a_zero_point=a.range.zero_point,
            q_b=Register(b.register), b_zero_point=b.range.zero_point,
            multiplier=float(product / torch.tensor(to.scale)), **_limits(to, low, high),
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

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        if not isinstance(to, Range) or (low, high) != (-torch.inf, torch.inf):
            return _in_float(plan, node, low, high, to)
        return plan.emit(
            "cat",
            tensors=tuple(Register(one.register) for one in parts),
            dim=int(node.attributes["axis"]),
            zero_points=tuple(one.range.zero_point for one in parts),
            multipliers=tuple(_ratio(one.range.scale, to.scale) for one in parts),
            output_zero_point=to.zero_point,
        )

    return Waiting(finish)


def _joined_integers(plan: PlanWriter, node: Node, parts: list[Integers]) -> Value:
    if len({one.range for one in parts}) > 1:
        raise NotTranslated(f"{node}: joins integers of several ranges")
    tensors = tuple(Register(one.register) for one in parts)
    return Integers(plan.emit("cat", tensors=tensors, dim=int(node.attributes["axis"])), parts[0].range)


@translates("GlobalAveragePool")
def _global_average(plan: PlanWriter, node: Node) -> Value:
    value = plan.integers(node, 0)
    if plan.ranks[value.register] != 4:
        raise NotTranslated(f"{node}: averages over other dimensions than two")
    return _average(plan, node, "adaptive_avg_pool", size=(1, 1))


@translates("AveragePool")
def _average_pool(plan: PlanWriter, node: Node) -> Value:
    counts = bool(node.attributes.get("count_include_pad", 0))
    if set(node.attributes.get("dilations", [1])) != {1}:
        raise NotTranslated(f"{node}: averages over windows with holes (dilations)")
    return _average(plan, node, "avg_pool", **_pool(node), count_include_pad=counts)


@translates("ReduceMean")
def _mean(plan: PlanWriter, node: Node) -> Value:
    """Its axes are an input since opset 18, and an attribute before."""
    dims = reduced(node.attributes, plan.array(node, 1))
    if not dims:
        raise NotTranslated(f"{node}: has no axes")
    return _average(plan, node, "mean", dim=dims, keepdim=bool(node.attributes.get("keepdims", 1)))


def _average(plan: PlanWriter, node: Node, op: str, **settings: Any) -> Waiting:
    x = plan.integers(node, 0)

    def finish(to: Range | ChannelRange | None, low: float, high: float) -> int:
        if not isinstance(to, Range) or (low, high) != (-torch.inf, torch.inf):
            return _in_float(plan, node, low, high, to)
        return plan.emit(
            op, q=Register(x.register), zero_point=x.range.zero_point, **settings,
            multiplier=_ratio(x.range.scale, to.scale), output_zero_point=to.zero_point,
        )  # fmt: skip

    return Waiting(finish)


def _widths(node: Node, dims: int) -> list[int]:
    """The padding of a window: VALID is none."""
    none = [0] * 2 * dims
    return none if node.attributes.get("auto_pad") == b"VALID" else list(node.attributes.get("pads", none))


def _pool(node: Node) -> dict[str, Any]:
    at = node.attributes
    dims = len(at["kernel_shape"])
    pads = _widths(node, dims)
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


def _ratio(scale: float, to: float) -> float:
    return float(torch.tensor(scale) / torch.tensor(to))

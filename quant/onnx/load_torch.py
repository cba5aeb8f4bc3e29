"""The operators of ONNX in torch: what a file computes in float, with masks and sizes, around its integers.

An operator is a function of its attributes and inputs, None for those that are left out. It computes constants while a
file is read, and is a step between plans where no plan has it (https://onnx.ai/onnx/operators/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.onnx.functions import IN_TORCH
from quant.onnx.load_ranks import BROADCAST

Attributes: TypeAlias = Mapping[str, Any]
Dtypes: TypeAlias = Sequence[torch.dtype | None]

MOST = 1 << 28
"""Values of a tensor whose shape is computed: a file may ask for any."""

ENDLESS = (1 << 31) - 1
"""Ends of slices beyond it are none."""

DTYPES = {1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64,
          9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # fmt: skip
"""By the numbers of onnx.TensorProto.DataType."""


@dataclass(frozen=True)
class Operation:
    """An operator.

    Attributes:
        function: of the attributes and the inputs; gives a tensor, or a tuple of them.
        dtype: of the results, of the attributes and the inputs' dtypes.
    """

    function: Callable[..., Any]
    dtype: Callable[[Attributes, Dtypes], torch.dtype]


TORCH: dict[str, Operation] = {}


def computes(*names: str, like: int = 0, dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """Register a function for operators of ONNX.

    Args:
        like: the input whose dtype the result has.
        dtype: of the result, where it is always the same.
    """

    def of_inputs(attributes: Attributes, dtypes: Dtypes) -> torch.dtype:
        chosen = dtype or dtypes[like]
        assert chosen is not None
        return chosen

    def add(function: Any) -> Any:
        TORCH.update(dict.fromkeys(names, Operation(function, of_inputs)))
        return function

    return add


def _of_attribute(name: str, default: int) -> Callable[[Attributes, Dtypes], torch.dtype]:
    return lambda attributes, dtypes: DTYPES[int(attributes.get(name, default))]


# Functions of one value, and arithmetic.


def _unary(name: str) -> Callable[[Attributes, Tensor], Tensor]:
    return lambda at, x: IN_TORCH[name](at)(x)


for _name in IN_TORCH:
    computes(_name)(_unary(_name))

for _name, _function in {
    "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign, "Identity": lambda x: x,
}.items():  # fmt: skip
    computes(_name)(lambda at, x, function=_function: function(x))

for _name, _binary in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Pow": torch.pow,
}.items():  # fmt: skip
    computes(_name)(lambda at, a, b, function=_binary: function(a, b).to(a.dtype))

for _name, _binary in {
    "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt, "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
}.items():  # fmt: skip
    computes(_name, dtype=torch.bool)(lambda at, a, b, function=_binary: function(a, b))


@computes("Div")
def _div(at: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@computes("Mod")
def _mod(at: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b) if at.get("fmod") else torch.remainder(a, b)


def _folded(function: Any) -> Callable[..., Tensor]:
    def fold(at: Attributes, first: Tensor, *others: Tensor) -> Tensor:
        for one in others:
            first = function(first, one)
        return first

    return fold


for _name, _binary in {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}.items():
    computes(_name)(_folded(_binary))


@computes("Not", dtype=torch.bool)
def _not(at: Attributes, x: Tensor) -> Tensor:
    return torch.logical_not(x)


@computes("Where", like=1)
def _where(at: Attributes, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@computes("Clip")
def _clip(at: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    ends = at.get("min") if low is None else low, at.get("max") if high is None else high
    return x if ends == (None, None) else x.clamp(*ends)


@computes("Dropout")
def _dropout(at: Attributes, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> Tensor:
    if training is not None and bool(training):
        raise ValueError("drops values, in training mode")
    return x


def _cast(at: Attributes, x: Tensor) -> Tensor:
    return x.to(DTYPES[int(at["to"])])


TORCH["Cast"] = Operation(_cast, _of_attribute("to", 0))


def _along(at: Attributes, vector: Tensor, x: Tensor) -> Tensor:
    """Numbers of each channel, shaped for x."""
    shape = [1] * x.dim()
    shape[at.get("axis", 1)] = -1
    return vector.reshape(shape if vector.numel() > 1 else [])


def _quantize(at: Attributes, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """With a range for each channel."""
    limits = torch.iinfo(zero_point.dtype)
    rounded = torch.round(x / _along(at, scale, x)) + _along(at, zero_point, x)
    return rounded.clamp(limits.min, limits.max).to(zero_point.dtype)


TORCH["QuantizeLinear"] = Operation(_quantize, lambda attributes, dtypes: dtypes[2] or torch.uint8)


@computes("DequantizeLinear", like=1)
def _dequantize(at: Attributes, q: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (q.to(torch.int32) - _along(at, zero_point.to(torch.int32), q)).to(torch.float32) * _along(at, scale, q)


# Products, norms and reductions.


@computes("MatMul")
def _matmul(at: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@computes("Gemm")
def _gemm(at: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    product = torch.matmul(a.t() if at.get("transA") else a, b.t() if at.get("transB") else b) * at.get("alpha", 1.0)
    return product if c is None else torch.add(product, c, alpha=at.get("beta", 1.0))


@computes("Conv")
def _conv(at: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dims = weight.dim() - 2
    stride, dilation = _each(at, "strides", dims), _each(at, "dilations", dims)
    padded = F.pad(x, _pads(at, x, list(weight.shape[2:])))
    convolve: Callable[..., Tensor] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return convolve(padded, weight, bias, stride, 0, dilation, at.get("group", 1))


def _each(at: Attributes, name: str, dims: int) -> list[int]:
    return list(at.get(name, [1] * dims))


def _pads(at: Attributes, x: Tensor, kernel: list[int]) -> list[int]:
    """The padding of a window in torch's order, from the last dimension on."""
    dims, how = len(kernel), at.get("auto_pad", b"NOTSET")
    ends = [0] * 2 * dims if how == b"VALID" else list(at.get("pads", [0] * 2 * dims))
    if how in (b"SAME_UPPER", b"SAME_LOWER"):
        steps = zip(x.shape[2:], kernel, _each(at, "strides", dims), _each(at, "dilations", dims), strict=True)
        total = [
            max(((size - 1) // stride) * stride + (k - 1) * holes + 1 - size, 0) for size, k, stride, holes in steps
        ]
        less, more = [one // 2 for one in total], [one - one // 2 for one in total]
        ends = less + more if how == b"SAME_UPPER" else more + less
    affordable([*x.shape[:2], *(size + ends[k] + ends[dims + k] for k, size in enumerate(x.shape[2:]))])
    return [one for k in reversed(range(dims)) for one in (ends[k], ends[dims + k])]


@computes("MaxPool")
def _max_pool(at: Attributes, x: Tensor) -> Tensor:
    kernel = list(at["kernel_shape"])
    dims = len(kernel)
    pool: Callable[..., Tensor] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]
    padded = F.pad(x, _pads(at, x, kernel), value=-math.inf)
    return pool(padded, kernel, _each(at, "strides", dims), 0, _each(at, "dilations", dims), _whole_windows(at))


@computes("AveragePool")
def _average_pool(at: Attributes, x: Tensor) -> Tensor:
    """Padding counts as nothing, or as zeros."""
    kernel = list(at["kernel_shape"])
    dims, pads = len(kernel), _pads(at, x, kernel)
    if set(_each(at, "dilations", dims)) != {1}:
        raise ValueError("averages over windows with holes")
    pool: Callable[..., Tensor] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    options = {"kernel_size": kernel, "stride": _each(at, "strides", dims), "ceil_mode": _whole_windows(at)}
    means = pool(F.pad(x, pads), **options)
    return means if at.get("count_include_pad") else means / pool(F.pad(torch.ones_like(x), pads), **options)


def _whole_windows(at: Attributes) -> bool:
    """Whether the last windows may reach beyond the input: never, since torch and ONNX differ in what they hold."""
    if at.get("ceil_mode"):
        raise ValueError("rounds the number of its windows up (ceil_mode)")
    return False


@computes("Softmax")
def _softmax(at: Attributes, x: Tensor) -> Tensor:
    return torch.softmax(x, at.get("axis", -1))


@computes("LogSoftmax")
def _log_softmax(at: Attributes, x: Tensor) -> Tensor:
    return torch.log_softmax(x, at.get("axis", -1))


def _over_rows(function: Any) -> Callable[[Attributes, Tensor], Tensor]:
    """Before version 13: over all dimensions from the axis on."""

    def compute(at: Attributes, x: Tensor) -> Tensor:
        result: Tensor = function(_flatten(at, x), -1).reshape(x.shape)
        return result

    return compute


computes("Softmax-11")(_over_rows(torch.softmax))
computes("LogSoftmax-11")(_over_rows(torch.log_softmax))


@computes("Gelu")
def _gelu(at: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=at.get("approximate", b"none").decode())


@computes("LayerNormalization")
def _layer_norm(at: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[at.get("axis", -1) :]
    return F.layer_norm(x, shape, weight.expand(shape), None if bias is None else bias.expand(shape),
                        at.get("epsilon", 1e-5))  # fmt: skip


@computes("InstanceNormalization")
def _instance_norm(at: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, x.shape[1], weight, bias, at.get("epsilon", 1e-5))


@computes("BatchNormalization")
def _batch_norm(at: Attributes, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    if at.get("training_mode") or not at.get("spatial", 1):
        raise ValueError("is a batch norm by the statistics of each batch, or of each pixel")
    return F.batch_norm(x, mean, variance, weight, bias, eps=at.get("epsilon", 1e-5))


@computes("GlobalAveragePool")
def _global_average(at: Attributes, x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def reduced(at: Attributes, axes: Tensor | None) -> tuple[int, ...] | None:
    """The dimensions that a reduction goes over; () for none, None for all."""
    chosen = at.get("axes") if axes is None else axes.tolist()
    if chosen:
        return tuple(chosen)
    return () if at.get("noop_with_empty_axes") else None


def _reduces(function: Any) -> Callable[..., Tensor]:
    def reduce(at: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
        dims = reduced(at, axes)
        if dims == ():
            return x
        chosen = tuple(range(x.dim())) if dims is None else dims
        result: Tensor = function(x, chosen, keepdim=bool(at.get("keepdims", 1)))
        return result.to(x.dtype)  # torch sums whole numbers as int64

    return reduce


for _name, _reduction in {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
}.items():  # fmt: skip
    computes(_name)(_reduces(_reduction))


# Moves and sizes.


@computes("Shape", dtype=torch.int64)
def _shape(at: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.shape[at.get("start", 0) : at.get("end")], dtype=torch.int64)


@computes("Size", dtype=torch.int64)
def _size(at: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.numel())


@computes("Reshape")
def _reshape(at: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    if at.get("allowzero") and not bool(shape.all()):
        raise ValueError("has sizes of 0 that are meant as such")
    return x.reshape([x.shape[place] if one == 0 else one for place, one in enumerate(shape.tolist())])


@computes("Flatten")
def _flatten(at: Attributes, x: Tensor) -> Tensor:
    axis = at.get("axis", 1)
    if not -x.dim() <= axis <= x.dim():
        raise ValueError(f"flattens from dimension {axis} of {x.dim()}")
    axis += x.dim() if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@computes("Transpose")
def _transpose(at: Attributes, x: Tensor) -> Tensor:
    return x.permute(*at.get("perm", reversed(range(x.dim()))))


@computes("Squeeze")
def _squeeze(at: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = at.get("axes") if axes is None else axes.tolist()
    if chosen is not None and not chosen:
        raise ValueError("names no axes, where runtimes differ in what is meant")
    dims = [axis for axis, size in enumerate(x.shape) if size == 1] if chosen is None else [
        one % x.dim() for one in chosen]  # fmt: skip
    if any(x.shape[one] != 1 for one in dims):
        raise ValueError(f"takes away dimensions {dims} of {tuple(x.shape)}, expected sizes of 1")
    return x.squeeze(tuple(dims))


@computes("Unsqueeze")
def _unsqueeze(at: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = list(at["axes"] if axes is None else axes.reshape(-1).tolist())
    for axis in sorted(one % (x.dim() + len(chosen)) for one in chosen):
        x = x.unsqueeze(axis)
    return x


@computes("Expand")
def _expand(at: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(affordable(torch.broadcast_shapes(x.shape, shape.tolist())))


@computes("Tile")
def _tile(at: Attributes, x: Tensor, times: Tensor) -> Tensor:
    affordable([one * size for one, size in zip(times.tolist(), x.shape, strict=True)])
    return x.repeat(times.tolist())


def affordable(shape: Sequence[int]) -> Sequence[int]:
    """The same sizes.

    Raises:
        ValueError: a tensor of them has more than MOST values.
    """
    if math.prod(shape) > MOST:
        raise ValueError(f"asks for a tensor of {list(shape)}, expected at most {MOST} values")
    return shape


def shape_of_result(op: str, attributes: Attributes, inputs: Sequence[Tensor]) -> Sequence[int]:
    """Sizes that hold as many values as the result of an operator that can make much of little; () of another one.

    Those that are told a size by a value check it themselves.
    """
    shapes = [one.shape for one in inputs]
    if op in BROADCAST - {"MatMul"}:
        return torch.broadcast_shapes(*shapes)
    if op == "Concat":
        return [sum(one.numel() for one in inputs)]
    if op == "Gather":
        axis = attributes.get("axis", 0)
        return [*shapes[0][:axis], *shapes[1], *shapes[0][axis:][1:]]
    if op in ("MatMul", "Gemm") and all(len(one) > 1 for one in shapes[:2]):
        places = (-1 if attributes.get("transA") else -2), (-2 if attributes.get("transB") else -1)
        sizes = [one[place] for one, place in zip(shapes, places, strict=False)]
        return [*torch.broadcast_shapes(*(one[:-2] for one in shapes[:2])), *sizes]
    return ()


@computes("Pad")
def _pad(at: Attributes, x: Tensor, pads: Tensor, fill: Tensor | None = None) -> Tensor:
    ends, dims = pads.tolist(), x.dim()
    mode = at.get("mode", b"constant").decode()
    widths = [one for k in reversed(range(dims)) for one in (ends[k], ends[dims + k])]
    affordable([size + ends[k] + ends[dims + k] for k, size in enumerate(x.shape)])
    if mode == "constant":
        return F.pad(x, widths, value=0.0 if fill is None else float(fill))
    while widths and widths[-2:] == [0, 0]:
        del widths[-2:]
    return F.pad(x, widths, {"edge": "replicate"}.get(mode, mode))


@computes("Concat")
def _concat(at: Attributes, *x: Tensor) -> Tensor:
    return torch.cat(x, at["axis"])


@computes("Split")
def _split(at: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    chosen = at.get("split") if sizes is None else sizes.tolist()
    axis = at.get("axis", 0)
    if chosen is not None:
        return torch.split(x, list(chosen), axis)
    count, size = int(at["num_outputs"]), x.shape[axis]
    each = -(-size // count)
    if count > size or each * (count - 1) > size:
        raise ValueError(f"splits {size} values into {count} parts, of which one would be empty")
    return torch.split(x, [each] * (count - 1) + [size - each * (count - 1)], axis)


@computes("Slice")
def _slice(
    at: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    count = starts.numel()
    chosen = list(range(count)) if axes is None else axes.tolist()
    strides = [1] * count if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), chosen, strides, strict=True):
        taken = slice(start, None if end < -ENDLESS and step < 0 else end, step)
        if step < 0:
            x = x.index_select(axis, torch.tensor(range(*taken.indices(x.shape[axis])), dtype=torch.int64))
        else:
            x = x[(slice(None),) * (axis % x.dim()) + (taken,)]
    return x


@computes("Gather")
def _gather(at: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = at.get("axis", 0) % max(x.dim(), 1)
    places = torch.where(index < 0, index + x.shape[axis], index).to(torch.int64)
    taken = x.index_select(axis, places.reshape(-1))
    return taken.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _constant_of_shape(at: Attributes, shape: Tensor) -> Tensor:
    value: Tensor = at.get("value", torch.zeros(1))
    return value.reshape(()).expand(affordable(shape.tolist())).clone()


TORCH["ConstantOfShape"] = Operation(
    _constant_of_shape, lambda attributes, dtypes: attributes.get("value", torch.zeros(1)).dtype
)


@computes("Range")
def _range(at: Attributes, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, last, step = start.item(), limit.item(), delta.item()
    if not step:
        raise ValueError("counts in steps of 0")
    affordable([math.ceil((last - first) / step)])
    return torch.arange(first, max(last, first) if step > 0 else min(last, first), step, dtype=start.dtype)


@computes("Trilu")
def _trilu(at: Attributes, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return x.triu(diagonal) if at.get("upper", 1) else x.tril(diagonal)

"""Calls that compute in float with tensors and numbers: arithmetic, functions of one value, sizes, reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.file import DTYPES
from quant.onnx.functions import GELU, HARDSIGMOID, MISH, SILU, Applied
from quant.onnx.graph_writer import Count, Dimension, GraphWriter, NotWritten
from quant.onnx.integer_steps import function_of
from quant.onnx.moves import MOVES
from quant.onnx.sizes import ARITHMETIC, computed, is_number, scalar, sizes_of, vector
from quant.runtime.trees import Attr

# Sizes.


@writes_call("getattr")
def _getattr(call: WrittenCall) -> Any:
    name, source = call.args[1], call.raw(0, "input")
    held = call.get(0, "input")
    if isinstance(held, tuple) and name in getattr(held, "_fields", ()):
        return getattr(held, name)
    if name == "shape":
        return _sizes(call)
    if name == "dtype":
        return (
            call.constant(source).dtype if isinstance(source, Attr) else call.writer.program.values[source.index].dtype
        )
    if name == "ndim":
        return call.rank()
    if name == "device":
        return torch.device("cpu")
    if name in ("T", "mT"):
        return MOVES["t"](call)
    if name == "data":
        return call.get(0, "input")
    raise NotWritten(f"reads the attribute '{name}' of a tensor")


def _sizes(call: WrittenCall) -> Any:
    x = call.get(0, "input")
    if not isinstance(x, str):
        raise NotWritten("reads the shape of what is no tensor")
    if isinstance(call.raw(0, "input"), Attr):
        return call.shape()
    return sizes_of(call.writer, x, call.source())


@writes_call("size")
def _size(call: WrittenCall) -> Any:
    sizes, dim = _sizes(call), call.get(1, "dim")
    return sizes if dim is None else sizes[dim]


@writes_call("dim", "ndimension")
def _dim(call: WrittenCall) -> int:
    return call.rank()


@writes_call("len")
def _len(call: WrittenCall) -> Any:
    held = call.get(0, "input")
    return sizes_of(call.writer, held, call.source())[0] if isinstance(held, str) else len(held)


@writes_call("numel")
def _numel(call: WrittenCall) -> Any:
    total: Any = 1
    for one in _sizes(call):
        total = computed(call.writer, "mul", total, one)
    return total


@writes_call("int")
def _int(call: WrittenCall) -> Any:
    held = call.get(0, "input")
    return _cast(call, torch.int32) if isinstance(held, str) else int(held) if isinstance(held, float) else held


# Arithmetic of tensors, and of numbers with them.


def operand(call: WrittenCall, place: int, name: str, dtype: torch.dtype | None) -> str:
    """A tensor or a number as a tensor of a dtype."""
    value = call.get(place, name)
    return as_tensor(call.writer, value, dtype or torch.float32)


def as_tensor(writer: GraphWriter, value: Any, dtype: torch.dtype) -> str:
    """A held value as a tensor of a dtype."""
    if isinstance(value, (bool, int, float)):
        return writer.constant(torch.tensor(value, dtype=dtype), "number")
    if not isinstance(value, str):
        return cast(writer, scalar(writer, value), dtype)
    return cast(writer, value, dtype)


def cast(writer: GraphWriter, name: str, dtype: torch.dtype) -> str:
    """A tensor in another dtype."""
    if writer.dtype(name) == dtype:
        return name
    if dtype not in DTYPES:
        raise NotWritten(f"has values of {dtype}")
    return writer.is_dtype(writer.same_sizes(writer.node("Cast", name, to=DTYPES[dtype]), name), dtype)


def _operand_dtype(call: WrittenCall) -> torch.dtype:
    """The dtype in which two operands meet, as torch promotes them."""
    dtypes, numbers = [], []
    for place, name in ((0, "input"), (1, "other")):
        value = call.get(place, name) if not isinstance(call.raw(place, name), torch.Tensor) else None
        if isinstance(call.raw(place, name), torch.Tensor):
            dtypes.append(call.raw(place, name).dtype)
        elif isinstance(value, str):
            dtypes.append(call.writer.dtype(value))
        else:
            numbers.append(value)
    whole = torch.promote_types(dtypes[0], dtypes[-1]) if dtypes else torch.int64
    if any(isinstance(one, float) for one in numbers) and not whole.is_floating_point:
        whole = torch.float32
    if numbers and whole == torch.bool:
        whole = torch.int64
    return whole


BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min"}
COMPARED = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}


@writes_call(*BINARY, "floordiv", "rsub", "rdiv", "rtruediv", "mod", "remainder")
def _binary(call: WrittenCall) -> Any:
    writer, values = call.writer, [call.get(0, "input"), call.get(1, "other")]
    name = call.name
    if name.startswith("r") and name != "remainder":
        values, name = values[::-1], {"rsub": "sub"}.get(name, "div")
    if all(map(is_number, values)):
        if name in ARITHMETIC:
            return computed(writer, name, *values)
        if name == "div" and not any(isinstance(one, (Dimension, Count)) for one in values):
            return values[0] / values[1]
        raise NotWritten(f"computes {name} of sizes")
    if call.raw(2, "alpha") not in (None, 1):
        raise NotWritten(f"{name} with an alpha")
    if (mode := call.kwargs.get("rounding_mode")) is not None:
        return _floored(call, values, mode)
    if name in ("mod", "remainder"):
        return _remainder(call, values)
    if name == "floordiv":
        raise NotWritten(f"{name} of tensors")
    dtype = call.dtype if name == "div" else _operand_dtype(call)
    names = [as_tensor(writer, one, dtype or torch.float32) for one in values]
    return _like_largest(call, writer.node(BINARY[name], *names))


def _floored(call: WrittenCall, values: list[Any], mode: str) -> str:
    """A quotient of reals rounded down, where the quotient itself is exact: by a power of two."""
    by = values[1]
    is_exact = isinstance(by, (int, float)) and math.frexp(by)[0] == 0.5
    if mode != "floor" or call.dtype != torch.float32 or not is_exact:
        raise NotWritten(f"div with the rounding mode '{mode}', expected 'floor', of reals by a power of two")
    names = [as_tensor(call.writer, one, torch.float32) for one in values]
    return _like_largest(call, call.writer.node("Floor", call.writer.node("Div", *names)))


def _remainder(call: WrittenCall, values: list[Any]) -> str:
    """Of whole numbers, with the sign of the divisor as in Python; ONNX takes that of the dividend for floats."""
    dtype = _operand_dtype(call)
    if dtype.is_floating_point or dtype == torch.bool:
        raise NotWritten("takes the remainder of reals")
    names = [as_tensor(call.writer, one, dtype) for one in values]
    return _like_largest(call, call.writer.is_dtype(call.writer.node("Mod", *names), dtype))


@writes_call(*COMPARED, "ne")
def _compared(call: WrittenCall) -> Any:
    writer, dtype = call.writer, _operand_dtype(call)
    names = [as_tensor(writer, call.get(place, name), dtype) for place, name in ((0, "input"), (1, "other"))]
    done = writer.is_dtype(writer.node(COMPARED.get(call.name, "Equal"), *names), torch.bool)
    if call.name == "ne":
        done = writer.is_dtype(writer.node("Not", done), torch.bool)
    return _like_largest(call, done)


@writes_call("bitwise_and", "bitwise_or", "logical_and", "logical_or")
def _logical(call: WrittenCall) -> str:
    writer = call.writer
    names = [as_tensor(writer, call.get(place, name), torch.bool) for place, name in ((0, "input"), (1, "other"))]
    op = "And" if call.name.endswith("and") else "Or"
    return _like_largest(call, writer.is_dtype(writer.node(op, *names), torch.bool))


@writes_call("logical_not")
def _not(call: WrittenCall) -> str:
    x = as_tensor(call.writer, call.get(0, "input"), torch.bool)
    return call.writer.is_dtype(call.writer.same_sizes(call.writer.node("Not", x), x), torch.bool)


def _like_largest(call: WrittenCall, done: str) -> str:
    """A result that has the sizes of an operand of its own rank, where that operand does not repeat."""
    if call.dtype is None:
        return done
    shape = call.writer.shape(call.out)
    for place, name in ((0, "input"), (1, "other")):
        raw = call.raw(place, name)
        held = call.writer.names.get(getattr(raw, "index", -1))
        if held is not None and call.writer.shape(raw.index) == shape:
            return call.writer.same_sizes(done, held)
    return done


@writes_call("where")
def _where(call: WrittenCall) -> str:
    writer, dtype = call.writer, call.dtype or torch.float32
    condition = as_tensor(writer, call.get(0, "condition"), torch.bool)
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        raise NotWritten("lists the places where a mask holds")
    names = [as_tensor(writer, call.get(place, name), dtype) for place, name in ((1, "input"), (2, "other"))]
    return writer.node("Where", condition, *names)


@writes_call("masked_fill")
def _masked_fill(call: WrittenCall) -> str:
    writer, dtype = call.writer, call.dtype or torch.float32
    x, mask = call.get(0, "input"), as_tensor(writer, call.get(1, "mask"), torch.bool)
    done = writer.node("Where", mask, as_tensor(writer, call.get(2, "value"), dtype), x)
    return writer.same_sizes(done, x)


def _ends(call: WrittenCall) -> tuple[Any, Any]:
    if call.name in ("clamp_min", "clamp_max"):
        end = call.get(1, call.name.removeprefix("clamp_"))
        return (end, None) if call.name == "clamp_min" else (None, end)
    if call.name == "relu6":
        return 0.0, 6.0
    names = ("min", "max") if call.name == "clamp" else ("min_val", "max_val")
    defaults = (None, None) if call.name == "clamp" else (-1.0, 1.0)
    return call.get(1, names[0], defaults[0]), call.get(2, names[1], defaults[1])


@writes_call("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6")
def _clamp(call: WrittenCall) -> str:
    low, high = _ends(call)
    if any(isinstance(one, str) for one in (low, high)):
        raise NotWritten("clamps by tensors")
    writer, x = call.writer, call.get(0, "input")
    dtype = writer.dtype(x)
    ends = ["" if one is None else as_tensor(writer, one, dtype) for one in (low, high)]
    return writer.same_sizes(writer.node("Clip", x, *ends), x)


UNARY: dict[str, tuple[Applied, ...]] = {
    "relu": (Applied("Relu"),), "sigmoid": (Applied("Sigmoid"),), "tanh": (Applied("Tanh"),),
    "exp": (Applied("Exp"),), "log": (Applied("Log"),), "sqrt": (Applied("Sqrt"),), "abs": (Applied("Abs"),),
    "neg": (Applied("Neg"),), "erf": (Applied("Erf"),), "reciprocal": (Applied("Reciprocal"),),
    "rsqrt": (Applied("Sqrt"), Applied("Reciprocal", ("y",))), "square": (Applied("Mul", ("x", "x")),),
    "sin": (Applied("Sin"),), "cos": (Applied("Cos"),), "floor": (Applied("Floor"),), "ceil": (Applied("Ceil"),),
    "silu": SILU, "mish": MISH, "hardswish": (Applied("HardSwish"),), "hardsigmoid": HARDSIGMOID,
    "relu_": (Applied("Relu"),), "sign": (Applied("Sign"),),
}  # fmt: skip


@writes_call(*UNARY)
def _unary(call: WrittenCall) -> str:
    x = call.get(0, "input")
    if is_number(x):
        raise NotWritten(f"computes {call.name} of a number")
    return call.writer.is_dtype(function_of(call.writer, x, UNARY[call.name]), call.dtype or torch.float32)


@writes_call("gelu")
def _gelu(call: WrittenCall) -> str:
    x = call.get(0, "input")
    if call.get(1, "approximate", "none") == "none":
        return function_of(call.writer, x, GELU)
    cubic = (Applied("Mul", ("x", "x")), Applied("Mul", ("x", "y")), Applied("Mul", ("y", 0.044715)))
    inner = (*cubic, Applied("Add", ("x", "y")), Applied("Mul", ("y", math.sqrt(2 / math.pi))))
    outer = (
        Applied("Tanh", ("y",)),
        Applied("Add", ("y", 1.0)),
        Applied("Mul", ("x", "y")),
        Applied("Mul", ("y", 0.5)),
    )
    return function_of(call.writer, x, (*inner, *outer))


@writes_call("glu")
def _glu(call: WrittenCall) -> str:
    writer, dim = call.writer, call.get(1, "dim", -1) % call.rank()
    one, other = writer.several("Split", call.get(0, "input"), outputs=2, axis=dim)
    return writer.node("Mul", one, writer.node("Sigmoid", other))


@writes_call("leaky_relu", "elu")
def _with_slope(call: WrittenCall) -> str:
    name, default = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0)}[call.name]
    op = {"leaky_relu": "LeakyRelu", "elu": "Elu"}[call.name]
    return function_of(
        call.writer, call.get(0, "input"), (Applied(op, attributes={"alpha": call.get(1, name, default)}),)
    )


@writes_call("softplus")
def _softplus(call: WrittenCall) -> str:
    if call.get(1, "beta", 1.0) != 1.0:
        raise NotWritten("softplus with a beta")
    return function_of(call.writer, call.get(0, "input"), (Applied("Softplus"),))


# dtypes.


@writes_call("to", "type", "type_as", "float", "long", "bool", "half", "double")
def _to(call: WrittenCall) -> str:
    return _cast(call, call.dtype or torch.float32)


def _cast(call: WrittenCall, dtype: torch.dtype) -> str:
    return cast(call.writer, call.get(0, "input"), dtype)


# Constants of a size.


@writes_call("arange")
def _arange(call: WrittenCall) -> str:
    values = [call.take(one) for one in call.args] or [call.get(0, "end")]
    start, end, step = (0, values[0], 1) if len(values) == 1 else (*values, 1)[:3]
    if any(isinstance(one, (float, str)) for one in (start, end, step)):
        raise NotWritten("counts by what is no whole number")
    writer = call.writer
    axes = writer.numbers([0], "axes")
    ends = [writer.node("Squeeze", scalar(writer, one), axes) for one in (start, end, step)]
    return cast(writer, writer.is_dtype(writer.node("Range", *ends), torch.int64), call.dtype or torch.int64)


@writes_call("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _filled(call: WrittenCall) -> str:
    name, writer, dtype = call.name, call.writer, call.dtype or torch.float32
    first = 1 if name.startswith("new_") else 0
    if name.endswith("_like"):
        sizes: Any = _sizes(call)
        value = call.get(1, "fill_value", 0) if name.startswith("full") else int("ones" in name)
    elif "full" in name:
        sizes, value = call.get(first, "size"), call.get(first + 1, "fill_value")
    else:
        sizes, value = call.rest(first, "size"), int("ones" in name)
    filling = as_tensor(writer, value, dtype)
    if not sizes:
        return filling
    return writer.is_dtype(writer.node("Expand", filling, vector(writer, tuple(sizes))), dtype)


@writes_call("tensor", "scalar_tensor", "as_tensor")
def _tensor(call: WrittenCall) -> str:
    data, dtype = call.get(0, "data"), call.dtype or torch.float32
    if not isinstance(data, tuple):
        return as_tensor(call.writer, data, dtype)
    if all(isinstance(one, (bool, int, float)) for one in data):
        return call.writer.constant(torch.tensor(data, dtype=dtype), "data")
    return cast(call.writer, call.writer.is_dtype(vector(call.writer, data), torch.int64), dtype)


# Reductions.


@writes_call("mean", "sum", "amax", "amin", "prod")
def _reduced(call: WrittenCall) -> str:
    writer, x, rank = call.writer, call.get(0, "input"), call.rank()
    if call.kwargs.get("dtype") is not None:
        raise NotWritten(f"{call.name} with a dtype")
    dims, keep = call.get(1, "dim"), bool(call.get(2, "keepdim", False))
    axes = list(range(rank)) if dims in (None, ()) else [dims] if isinstance(dims, int) else list(dims)
    axes = [one % max(rank, 1) for one in axes]
    if call.name == "sum":
        x = cast(writer, x, call.dtype or torch.float32)
        done = writer.node("ReduceSum", x, writer.numbers(axes, "axes"), keepdims=keep)
    else:
        op = {"mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd"}[call.name]
        done = writer.node(op, x, axes=axes, keepdims=keep)
    place = 0
    for axis in range(rank):
        if axis not in axes:
            writer.note_size(done, place, Dimension(x, axis))
        place += axis not in axes or keep
    return done


@writes_call("all", "any")
def _all(call: WrittenCall) -> str:
    """The least, or the largest, of booleans as numbers."""
    writer, rank = call.writer, call.rank()
    dim, keep = call.get(1, "dim"), bool(call.get(2, "keepdim", False))
    x = cast(writer, cast(writer, call.get(0, "input"), torch.bool), torch.int32)
    axes = list(range(rank)) if dim is None else [dim % rank]
    done = writer.node("ReduceMin" if call.name == "all" else "ReduceMax", x, axes=axes, keepdims=keep)
    return cast(writer, writer.is_dtype(done, torch.int32), torch.bool)


@writes_call("cumsum")
def _cumsum(call: WrittenCall) -> str:
    writer = call.writer
    x = cast(writer, call.get(0, "input"), call.dtype or torch.float32)
    axis = writer.constant(torch.tensor(call.get(1, "dim")), "axis")
    return writer.same_sizes(writer.node("CumSum", x, axis), x)


@writes_call("softmax", "log_softmax")
def _softmax(call: WrittenCall) -> str:
    writer, x = call.writer, call.get(0, "input")
    dim = call.get(1, "dim", call.kwargs.get("dim"))
    if dim is None:
        raise NotWritten("softmax without a dim")
    x = cast(writer, x, torch.float32)
    op = "Softmax" if call.name == "softmax" else "LogSoftmax"
    return writer.same_sizes(writer.node(op, x, axis=dim % call.rank()), x)

"""A call of the user's as the functions of `moves.py` and `float_calls.py` read it, whatever way it was written.

`x.flatten(1)`, `torch.flatten(x, 1)` and `nn.Flatten()(x)` are one call: the name "flatten", with arguments by place or
by name.

Another call is one function:

    @writes_call("cumsum")
    def cumsum(call: WrittenCall) -> str:
        axis = call.writer.constant(call.get(1, "dim"), "axis", torch.int64)
        return call.writer.node("CumSum", call.get(0, "input"), axis)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quant.onnx.graph_writer import GraphWriter, NotWritten
from quant.onnx.registries import registering
from quant.runtime.callee import Callee, Function, Method
from quant.runtime.instructions import FloatCall, IntegerMove
from quant.runtime.names import attribute, submodule
from quant.runtime.trees import Attr, Ref


@dataclass(frozen=True)
class WrittenCall:
    """A call.

    Attributes:
        name: of the function, without a trailing underscore.
        args, kwargs: its arguments, with Ref for registers and Attr for parameters.
        out: the register that it writes.
        module: the float module that is called, if it is one.
        reals: whether integers among its arguments are read as reals.
    """

    writer: GraphWriter
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: int
    module: nn.Module | None = None
    reals: bool = False

    def raw(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place` or called `name`, as the program has it."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The same with names of the file's tensors, and what is held, in the place of registers."""
        return self.take(self.raw(place, name, default))

    def take(self, value: Any) -> Any:
        """An argument as the file has it."""
        return self.writer.take(value, reals=self.reals)

    def source(self, place: int = 0, name: str = "input") -> int:
        """The register that is read as this argument."""
        value = self.raw(place, name)
        if not isinstance(value, Ref):
            raise NotWritten(f"{self.name} of what is no value of the model")
        return value.index

    def rest(self, place: int, name: str) -> Sequence[Any]:
        """Arguments that torch takes one by one or as one tuple, from `place` on."""
        if name in self.kwargs:
            value = self.take(self.kwargs[name])
            return list(value) if isinstance(value, (tuple, list)) else [value]
        values = [self.take(one) for one in self.args[place:]]
        return list(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values

    def shape(self, place: int = 0, name: str = "input") -> tuple[int | None, ...]:
        """The shape of an argument, None for sizes that differ between calls."""
        value = self.raw(place, name)
        if isinstance(value, Ref):
            return self.writer.shape(value.index)
        return tuple(self.constant(value).shape)

    def constant(self, value: Any) -> Tensor:
        """A parameter, buffer or other tensor that is no value of the program."""
        tensor = attribute(self.writer.root, value.path) if isinstance(value, Attr) else value
        if not isinstance(tensor, Tensor):
            raise NotWritten(f"{self.name} of a {type(tensor).__name__}, expected a tensor")
        return tensor

    def rank(self, place: int = 0, name: str = "input") -> int:
        """Dimensions of an argument."""
        return len(self.shape(place, name))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its value."""
        return self.writer.program.values[self.out].dtype


WriteCall: TypeAlias = Callable[[WrittenCall], Any]
"""Gives the name of the result in the file, a tuple of names, or what is held instead (`sizes.Number` and others)."""

MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: ("linear", ("weight", "bias")),
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        ("convolution", ("weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode")),
    ),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        ("conv_transpose", ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")),
    ),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        ("batch_norm", ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")),
    ),
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        ("max_pool", ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")),
    ),
    **dict.fromkeys(
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        ("avg_pool", ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")),
    ),
    **dict.fromkeys(
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), ("adaptive_avg_pool", ("output_size",))
    ),
    nn.Flatten: ("flatten", ("start_dim", "end_dim")),
    nn.Unflatten: ("unflatten", ("dim", "unflattened_size")),
    nn.Softmax: ("softmax", ("dim",)),
    nn.LogSoftmax: ("log_softmax", ("dim",)),
    nn.LayerNorm: ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
    nn.RMSNorm: ("rms_norm", ("normalized_shape", "weight", "eps")),
    nn.GroupNorm: ("group_norm", ("num_groups", "weight", "bias", "eps")),
    nn.Embedding: ("embedding", ("weight",)),
    nn.GELU: ("gelu", ("approximate",)),
    nn.ReLU: ("relu", ()),
    nn.ReLU6: ("relu6", ()),
    nn.SiLU: ("silu", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.Hardswish: ("hardswish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
    nn.Softplus: ("softplus", ("beta",)),
    nn.Mish: ("mish", ()),
    nn.ELU: ("elu", ("alpha",)),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val")),
    nn.GLU: ("glu", ("dim",)),
    nn.PixelShuffle: ("pixel_shuffle", ("upscale_factor",)),
    nn.Upsample: ("interpolate", ("size", "scale_factor", "mode", "align_corners")),
    **dict.fromkeys(
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        ("constant_pad", ("padding", "value")),
    ),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), ("reflection_pad", ("padding",))),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), ("replication_pad", ("padding",))),
    nn.Identity: ("identity", ()),
    nn.Dropout: ("dropout", ()),
    nn.Dropout1d: ("dropout", ()),
    nn.Dropout2d: ("dropout", ()),
    nn.Dropout3d: ("dropout", ()),
    nn.AlphaDropout: ("dropout", ()),
    nn.FeatureAlphaDropout: ("dropout", ()),
}
"""Float modules as functions, with the attributes that are the arguments behind the input."""


def call_of(writer: GraphWriter, instruction: FloatCall | IntegerMove) -> WrittenCall:
    """The call that an instruction makes.

    Raises:
        NotWritten: it calls a module of a class that is no function here.
    """
    callee, (args, kwargs) = instruction.callee, instruction.arguments
    if callee is None:
        return WrittenCall(writer, "identity", args, kwargs, instruction.out)
    if isinstance(callee, (Function, Method)):
        return WrittenCall(writer, function_name(callee), args, kwargs, instruction.out)
    module = submodule(writer.root, callee.path)
    known = MODULES.get(type(module))
    if known is None:
        return WrittenCall(writer, type(module).__name__, args, kwargs, instruction.out, module)
    name, settings = known
    behind = [_setting(module, callee.path, one) for one in settings]
    return WrittenCall(writer, name, (*args, *kwargs.values(), *behind), {}, instruction.out, module)


def _setting(module: nn.Module, path: str, name: str) -> Any:
    for kept in (module._parameters, module._buffers):
        if name in kept:
            return None if kept[name] is None else Attr(f"{path}.{name}" if path else name)
    return getattr(module, name)


def function_name(callee: Callee) -> str:
    """The name of a function or method, the same for its spellings: `add_`, `iadd` and `Tensor.__add__` are "add"."""
    assert isinstance(callee, (Function, Method))
    if isinstance(callee, Function) and callee.module.partition(".")[0] not in KNOWN:
        return f"{callee.module}.{callee.name}"
    name = callee.name.rpartition(".")[2]
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    if isinstance(callee, Function) and callee.module in ("_operator", "operator") and name in IN_PLACE:
        name = name[1:]
    name = name.rstrip("_")
    return SPELLINGS.get(name, name)


KNOWN = ("torch", "operator", "_operator", "builtins", "math", "quant")
"""Packages whose functions are named by their last name alone; a library's own `softmax` may be another function."""

IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ifloordiv", "imatmul", "ipow", "iand", "ior"})
SPELLINGS = {
    "view": "reshape", "view_as": "reshape_as", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
    "swapdims": "transpose", "multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div",
    "subtract": "sub", "clip": "clamp", "negative": "neg", "bmm": "matmul", "mm": "matmul", "and": "bitwise_and",
    "or": "bitwise_or", "invert": "logical_not", "bitwise_not": "logical_not", "not": "logical_not",
    "floor_divide": "floordiv", "radd": "add", "rmul": "mul", "alpha_dropout": "dropout", "dropout1d": "dropout",
    **{f"{name}{dims}d": name for name in ("max_pool", "avg_pool", "adaptive_avg_pool") for dims in (1, 2, 3)},
    **{f"conv{dims}d": "convolution" for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": "conv_transpose" for dims in (1, 2, 3)},
    "dropout2d": "dropout", "dropout3d": "dropout", "feature_dropout": "dropout", "unsafe_chunk": "chunk",
}  # fmt: skip
"""Other names of the same functions."""


CALLS: dict[str, WriteCall] = {}


def writes_call(*names: str) -> Callable[[WriteCall], WriteCall]:
    """A decorator for the function that writes float calls of some names.

    Raises:
        ValueError: another function writes one of them already.
    """
    return registering(CALLS, *names)

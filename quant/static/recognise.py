"""What a captured call means: the integer operator that stands for it, or the reason it stays float.

One table each for modules, functions and methods, from a class or a name to a small function. A new operator is a
line here, an entry in `lower.py`, and its reference in `quant.kernels.reference_ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quant.graph import Attr, Graph, Node, PackedParts, Ref, attribute
from quant.static.leaves import base_layer, is_registered
from quant.static.recurrent import range_names


@dataclass
class Meaning:
    """What a call computes.

    Attributes:
        op: an entry of `OPERATORS`.
        inputs: the values it reads as activations.
        attrs: its settings, by the names that `lower.py` expects.
    """

    op: str
    inputs: tuple[int, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


class StaysFloat(Exception):
    """A call that has no integer kernel; the message is the reason in the report."""


@dataclass(frozen=True)
class Operator:
    """How an operator takes part in quantisation.

    Attributes:
        anchor: worth quantising its inputs for; others become integers only between integers.
        shares: its inputs and its output have one range, because values pass through it unchanged.
        weighted: has a weight and a bias of its own, and nothing else.
        recurrent: has states, with ranges of their own inside of it (`static/recurrent.py`).
    """

    anchor: bool = False
    shares: bool = False
    weighted: bool = False
    recurrent: bool = False


OPERATORS = {
    "linear": Operator(anchor=True, weighted=True),
    "conv": Operator(anchor=True, weighted=True),
    "conv_transpose": Operator(anchor=True, weighted=True),
    "matmul": Operator(anchor=True),
    "sequence": Operator(anchor=True, recurrent=True),
    "cell": Operator(anchor=True, recurrent=True),
    "lookup": Operator(),
    "add": Operator(),
    "mul": Operator(),
    "cat": Operator(shares=True),
    "pass": Operator(shares=True),
    "pad": Operator(shares=True),
    "max_pool": Operator(shares=True),
    "adaptive_max_pool": Operator(shares=True),
    "avg_pool": Operator(),
    "adaptive_avg_pool": Operator(),
    "mean": Operator(),
    "interpolate": Operator(),
}


class Call:
    """A node with what its arguments need to be read by place or by name."""

    def __init__(self, node: Node, graph: Graph, root: nn.Module) -> None:
        self.node, self.graph, self.root = node, graph, root
        self.module: nn.Module | None = attribute(root, node.target) if node.kind == "module" else None

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place` or called `name`."""
        if place < len(self.node.args):
            return self.node.args[place]
        return self.node.kwargs.get(name, default)

    def activation(self, place: int = 0, name: str = "input") -> int:
        """The value read as this argument, which must be a float32 tensor."""
        found = self.get(place, name)
        if not isinstance(found, Ref):
            raise StaysFloat(f"{name} is no activation")
        meta = self.graph.nodes[found.index].meta
        if meta is None:
            raise StaysFloat("its input is no tensor")
        if meta.dtype != torch.float32:
            raise StaysFloat(f"its input is {meta.dtype}, expected torch.float32")
        return found.index

    def rank(self, index: int) -> int:
        """Dimensions of a tensor value, as captured."""
        meta = self.graph.nodes[index].meta
        assert meta is not None
        return len(meta.shape)

    def constant(self, value: Any, name: str) -> Any:
        """`value`, which must not have been computed from the input."""
        if isinstance(value, (Ref, Attr)) or (isinstance(value, (tuple, list)) and any(map(_is_ref, value))):
            raise StaysFloat(f"its {name} is computed at run time")
        return value


def _is_ref(value: Any) -> bool:
    return isinstance(value, (Ref, Attr))


def recognise(node: Node, graph: Graph, root: nn.Module) -> Meaning:
    """The integer operator for a call.

    Raises:
        StaysFloat: there is none, with the reason.
    """
    call = Call(node, graph, root)
    if node.kind == "module":
        handler = _module_handler(call)
    elif node.kind == "method":
        handler = METHODS.get(node.target)
    elif node.kind == "function":
        handler = FUNCTIONS.get(node.target)
    else:
        raise StaysFloat("not a computation")
    if handler is None:
        raise StaysFloat(f"{what(node, root)} has no int8 kernel")
    return handler(call)


def what(node: Node, root: nn.Module) -> str:
    """How people call what a node does: the class of a module, the name of a function."""
    if node.kind == "module":
        return type(attribute(root, node.target)).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _module_handler(call: Call) -> Callable[[Call], Meaning] | None:
    module = call.module
    assert module is not None
    if is_registered(module):
        raise StaysFloat("registered as a layer of its own; it runs as it is")
    base = base_layer(module)
    return None if base is None else MODULES.get(base)


def _linear_module(call: Call) -> Meaning:
    return Meaning("linear", (call.activation(),), {"weight": _own("weight", call), "bias": _own("bias", call)})


def _recurrent(op: str) -> Callable[[Call], Meaning]:
    def handler(call: Call) -> Meaning:
        found = call.get(0, "input")
        if isinstance(found, PackedParts):
            call = Call(replace(call.node, args=(found.data, *call.node.args[1:])), call.graph, call.root)
        return Meaning(op, (call.activation(),), {"ranges": range_names(attribute(call.root, call.node.target))})

    return handler


def _own(name: str, call: Call) -> Attr | None:
    module, path = call.module, call.node.target
    assert module is not None
    return None if getattr(module, name) is None else Attr(f"{path}.{name}" if path else name)


def _conv_module(call: Call) -> Meaning:
    module: Any = call.module
    batched = call.activation()
    dims = len(module.kernel_size)
    if call.rank(batched) != dims + 2:
        raise StaysFloat("its input has no batch dimension")
    transposed = module.transposed
    if transposed and len(call.node.args) + len(call.node.kwargs) > 1:
        raise StaysFloat("its output_size is given at run time")
    attrs = {
        "weight": _own("weight", call),
        "bias": _own("bias", call),
        "stride": module.stride,
        "dilation": module.dilation,
        "groups": module.groups,
        **_padding(module.padding, module.padding_mode, module.dilation, module.kernel_size),
    }
    if transposed:
        attrs["output_padding"] = module.output_padding
    return Meaning("conv_transpose" if transposed else "conv", (batched,), attrs)


def _padding(padding: Any, mode: str, dilation: Any, kernel: Any) -> dict[str, Any]:
    """Padding that both sides share goes to the kernel; the rest (uneven "same", circular, ...) is a pad before it."""
    dims = len(kernel)
    if padding == "valid":
        return {"padding": (0,) * dims, "pad_before": None}
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in padding]
    if mode == "zeros" and all(left == right for left, right in sides):
        return {"padding": tuple(left for left, _ in sides), "pad_before": None}
    widths = [width for side in reversed(sides) for width in side]
    return {"padding": (0,) * dims, "pad_before": (widths, "constant" if mode == "zeros" else mode)}


def _linear_function(call: Call) -> Meaning:
    return Meaning("linear", (call.activation(),), {"weight": _weight(call, 1), "bias": call.get(2, "bias")})


def _weight(call: Call, place: int) -> Any:
    weight = call.get(place, "weight")
    if isinstance(weight, Ref) and not depends_on_nothing(call.graph, weight.index):
        raise StaysFloat("its weight is computed from the input")
    return weight


def depends_on_nothing(graph: Graph, index: int) -> bool:
    """Whether a value follows from parameters and constants alone."""
    node = graph.nodes[index]
    return node.kind not in ("input", "guard") and all(depends_on_nothing(graph, ref) for ref in node.refs)


def _conv_function(dims: int) -> Callable[[Call], Meaning]:
    def handler(call: Call) -> Meaning:
        batched = call.activation()
        if call.rank(batched) != dims + 2:
            raise StaysFloat("its input has no batch dimension")
        weight = _weight(call, 1)
        meta = call.graph.nodes[weight.index].meta if isinstance(weight, Ref) else None
        kernel = meta.shape[2:] if meta else tuple(_tensor(call, weight).shape[2:])
        stride = _tuple(call.constant(call.get(3, "stride", 1), "stride"), dims)
        padding = call.constant(call.get(4, "padding", 0), "padding")
        dilation = _tuple(call.constant(call.get(5, "dilation", 1), "dilation"), dims)
        padding = padding if isinstance(padding, str) else _tuple(padding, dims)
        attrs = {
            "weight": weight,
            "bias": call.get(2, "bias"),
            "stride": stride,
            "dilation": dilation,
            "groups": call.constant(call.get(6, "groups", 1), "groups"),
            **_padding(padding, "zeros", dilation, kernel),
        }
        return Meaning("conv", (batched,), attrs)

    return handler


def _tensor(call: Call, weight: Any) -> torch.Tensor:
    found: torch.Tensor = attribute(call.root, weight.path) if isinstance(weight, Attr) else weight
    return found


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims


def _matmul(call: Call) -> Meaning:
    one, two = call.activation(0), call.activation(1, "other")
    if min(call.rank(one), call.rank(two)) < 2:
        raise StaysFloat("a product with a vector")
    return Meaning("matmul", (one, two))


def _lookup(fixed: tuple[float, float] | None = None, *, channels: bool = False) -> Callable[[Call], Meaning]:
    def handler(call: Call) -> Meaning:
        others = [arg for arg in [*call.node.args[1:], *call.node.kwargs.values()] if isinstance(arg, Ref)]
        if others:
            raise StaysFloat("a setting of it is computed at run time")
        return Meaning("lookup", (call.activation(),), {"fixed": fixed, "channels": channels, "clamp": _clamp(call)})

    return handler


def _batch_norm(call: Call) -> Meaning:
    module: Any = call.module
    if module.running_mean is None:
        raise StaysFloat("it normalises by the statistics of each batch")
    return Meaning(
        "lookup", (call.activation(),), {"fixed": None, "channels": True, "clamp": None, "is_batch_norm": True}
    )


def _prelu(call: Call) -> Meaning:
    module: Any = call.module
    attrs = {"fixed": None, "channels": module.num_parameters > 1, "clamp": None}
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


def _binary(op: str, sign: int = 1) -> Callable[[Call], Meaning]:
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
    return Meaning("lookup", (call.activation(place, "input"),), {"fixed": None, "channels": False, "clamp": None})


def _division(call: Call) -> Meaning:
    if isinstance(call.get(1, "other"), (int, float)) and len(call.node.args) == 2:
        return _with_number(call, [call.get(0, "input"), call.get(1, "other")], 0)
    raise StaysFloat("division by a tensor is kept in float")


def _cat(call: Call) -> Meaning:
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


def _pass(call: Call) -> Meaning:
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


def what_name(node: Node) -> str:
    """The bare name of a function or method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


SPLITTING = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes"}


def _max_pool(dims: int) -> Callable[[Call], Meaning]:
    def handler(call: Call) -> Meaning:
        batched = call.activation()
        if call.module is not None:
            module: Any = call.module
            if module.return_indices:
                raise StaysFloat("it also returns indices")
            settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
        else:
            kernel = call.get(1, "kernel_size")
            settings = (kernel, call.get(2, "stride"), call.get(3, "padding", 0), call.get(4, "dilation", 1),
                        call.get(5, "ceil_mode", False))  # fmt: skip
        for value in settings:
            call.constant(value, "window")
        options = dict(zip(("kernel", "stride", "padding", "dilation", "ceil_mode"), settings, strict=True))
        return Meaning("max_pool", (batched,), {**options, "kernel": _tuple(options["kernel"], dims)})

    return handler


def _avg_pool(dims: int) -> Callable[[Call], Meaning]:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    defaults = (None, None, 0, False, True, None)

    def handler(call: Call) -> Meaning:
        if call.module is not None:
            options = {name: getattr(call.module, name, default) for name, default in zip(names, defaults, strict=True)}
        else:
            pairs = enumerate(zip(names, defaults, strict=True), 1)
            options = {
                name: call.constant(call.get(place, name, default), "window") for place, (name, default) in pairs
            }
        kernel = _tuple(options.pop("kernel_size"), dims)
        options["stride"] = kernel if options["stride"] is None else options["stride"]
        if dims == 1:
            options.pop("divisor_override")
        return Meaning("avg_pool", (call.activation(),), {"kernel": kernel, **options})

    return handler


def _adaptive(op: str, dims: int) -> Callable[[Call], Meaning]:
    def handler(call: Call) -> Meaning:
        module: Any = call.module
        if module is not None and getattr(module, "return_indices", False):
            raise StaysFloat("it also returns indices")
        size = call.get(1, "output_size") if module is None else module.output_size
        return Meaning(op, (call.activation(),), {"size": _tuple(call.constant(size, "output size"), dims)})

    return handler


def _mean(call: Call) -> Meaning:
    index = call.activation()
    dim = call.constant(call.get(1, "dim"), "dim")
    if call.node.kwargs.get("dtype") is not None:
        raise StaysFloat("it changes the dtype")
    dims = tuple(range(call.rank(index))) if dim is None else _tuple(dim, 1)
    return Meaning("mean", (index,), {"dim": dims, "keepdim": bool(call.get(2, "keepdim", False))})


def _interpolate(call: Call) -> Meaning:
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    if call.module is not None:
        options = {name: getattr(call.module, name, None) for name in names[:5]}
    else:
        options = {name: call.get(place, name) for place, name in enumerate(names, 1)}
    options["mode"] = options["mode"] or "nearest"
    if options["mode"] not in ("nearest", "nearest-exact", "bilinear", "linear", "trilinear"):
        raise StaysFloat(f"interpolation {options['mode']!r} has no int8 kernel")
    return Meaning(
        "interpolate", (call.activation(),), {"options": {k: v for k, v in options.items() if v is not None}}
    )


def _pad_function(call: Call) -> Meaning:
    mode, value = call.get(2, "mode", "constant"), call.get(3, "value")
    if value not in (None, 0, 0.0):
        raise StaysFloat("it pads with a value other than zero")
    return Meaning("pad", (call.activation(),), {"widths": call.get(1, "pad"), "mode": mode})


def _pad_module(mode: str) -> Callable[[Call], Meaning]:
    def handler(call: Call) -> Meaning:
        module: Any = call.module
        if getattr(module, "value", 0.0) != 0:
            raise StaysFloat("it pads with a value other than zero")
        return Meaning("pad", (call.activation(),), {"widths": tuple(module.padding), "mode": mode})

    return handler


Handler = Callable[[Call], Meaning]
UNIT, TANH = (0.0, 1.0), (-1.0, 1.0)

MODULES: dict[type[nn.Module], Handler] = {
    nn.Linear: _linear_module,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear_module,
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _conv_module
    ),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys(
        (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.ELU, nn.SELU, nn.CELU,
         nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold),
        _lookup(),
    ),
    **dict.fromkeys((nn.Sigmoid, nn.Hardsigmoid), _lookup(UNIT)),
    nn.Tanh: _lookup(TANH),
    nn.PReLU: _prelu,
    **dict.fromkeys(
        (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
         nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        _pass,
    ),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent("sequence")),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _recurrent("cell")),
    nn.MaxPool1d: _max_pool(1), nn.MaxPool2d: _max_pool(2), nn.MaxPool3d: _max_pool(3),
    nn.AvgPool1d: _avg_pool(1), nn.AvgPool2d: _avg_pool(2), nn.AvgPool3d: _avg_pool(3),
    nn.AdaptiveAvgPool1d: _adaptive("adaptive_avg_pool", 1), nn.AdaptiveAvgPool2d: _adaptive("adaptive_avg_pool", 2),
    nn.AdaptiveAvgPool3d: _adaptive("adaptive_avg_pool", 3),
    nn.AdaptiveMaxPool1d: _adaptive("adaptive_max_pool", 1), nn.AdaptiveMaxPool2d: _adaptive("adaptive_max_pool", 2),
    nn.AdaptiveMaxPool3d: _adaptive("adaptive_max_pool", 3),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), _interpolate),
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
                    _pad_module("constant")),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), _pad_module("reflect")),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), _pad_module("replicate")),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), _pad_module("circular")),
}  # fmt: skip
"""Layers of torch.nn, subclasses of which count where they compute the same."""

FUNCTIONS: dict[Callable[..., Any], Handler] = {
    F.linear: _linear_function,
    torch.conv1d: _conv_function(1), torch.conv2d: _conv_function(2), torch.conv3d: _conv_function(3),
    **dict.fromkeys((torch.matmul, torch.bmm, operator.matmul), _matmul),
    **dict.fromkeys(
        (F.relu, torch.relu, torch.relu_, F.relu6, F.hardtanh, F.hardswish, F.leaky_relu, F.silu, F.gelu, F.elu, F.selu,
         F.celu, F.mish, F.softplus, F.hardshrink, F.softshrink, torch.clamp, torch.clip, torch.neg, operator.neg,
         torch.abs, operator.abs),
        _lookup(),
    ),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, F.hardsigmoid), _lookup(UNIT)),
    **dict.fromkeys((torch.tanh, F.tanh), _lookup(TANH)),
    **dict.fromkeys((operator.add, operator.iadd, torch.add), _binary("add")),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub), _binary("add", -1)),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, torch.multiply), _binary("mul")),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div), _division),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), _cat),
    **dict.fromkeys(
        (torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.swapaxes, torch.movedim, torch.squeeze,
         torch.unsqueeze, torch.chunk, torch.split, torch.unbind, torch.tensor_split, operator.getitem, F.dropout,
         F.dropout1d, F.dropout2d, F.dropout3d, F.pixel_shuffle, F.pixel_unshuffle, torch.channel_shuffle, torch.roll,
         torch.flip, torch.narrow, torch.repeat_interleave),
        _pass,
    ),
    F.max_pool1d: _max_pool(1), F.max_pool2d: _max_pool(2), F.max_pool3d: _max_pool(3),
    torch.max_pool1d: _max_pool(1), torch.max_pool2d: _max_pool(2), torch.max_pool3d: _max_pool(3),
    F.avg_pool1d: _avg_pool(1), F.avg_pool2d: _avg_pool(2), F.avg_pool3d: _avg_pool(3),
    F.adaptive_avg_pool1d: _adaptive("adaptive_avg_pool", 1), F.adaptive_avg_pool2d: _adaptive("adaptive_avg_pool", 2),
    F.adaptive_avg_pool3d: _adaptive("adaptive_avg_pool", 3),
    F.adaptive_max_pool1d: _adaptive("adaptive_max_pool", 1), F.adaptive_max_pool2d: _adaptive("adaptive_max_pool", 2),
    F.adaptive_max_pool3d: _adaptive("adaptive_max_pool", 3),
    torch.mean: _mean,
    F.interpolate: _interpolate,
    F.pad: _pad_function, torch._C._nn.pad: _pad_function,
}  # fmt: skip

METHODS: dict[str, Handler] = {
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("relu", "relu_", "clamp", "clamp_", "clip", "neg", "abs"), _lookup()),
    **dict.fromkeys(("sigmoid", "sigmoid_"), _lookup(UNIT)),
    **dict.fromkeys(("tanh", "tanh_"), _lookup(TANH)),
    **dict.fromkeys(("add", "add_"), _binary("add")),
    **dict.fromkeys(("sub", "sub_"), _binary("add", -1)),
    **dict.fromkeys(("mul", "mul_"), _binary("mul")),
    **dict.fromkeys(("div", "div_"), _division),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "chunk", "split",
         "unbind", "tensor_split", "expand", "repeat", "clone", "detach", "swapaxes", "movedim", "narrow", "unflatten",
         "roll", "flip", "view_as", "reshape_as", "t"),
        _pass,
    ),
    "mean": _mean,
}  # fmt: skip

SHAPE_CALLS = {"size", "dim", "numel", "nelement", "stride", "len"}


def reads_only_shape(node: Node) -> bool:
    """Whether a call looks at a tensor's shape alone, so that integers serve it as well as reals."""
    if node.kind == "function" and node.target is getattr:
        return bool(node.args[1] == "shape")
    return node.kind in ("function", "method") and what_name(node) in SHAPE_CALLS

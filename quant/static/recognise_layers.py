"""Recognises what has a weight or sums products: linear layers, convolutions, recurrent layers, matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quant.graph import Attr, PackedParts, Ref, attribute
from quant.static.folding import Transposed, depends_on_nothing, has_parameter, own_shape
from quant.static.meaning import Call, Handler, Meaning, StaysFloat, per_dimension
from quant.static.recurrent import range_names


def linear_module(call: Call) -> Meaning:
    """`nn.Linear`."""
    return Meaning("linear", (call.activation(),), {"weight": _own("weight", call), "bias": _own("bias", call)})


def linear_function(call: Call) -> Meaning:
    """`F.linear`, whose weight may be computed, but not from the input."""
    return Meaning("linear", (call.activation(),), {"weight": _weight(call), "bias": call.get(2, "bias")})


def conv_module(call: Call) -> Meaning:
    """`nn.Conv1d` ... `nn.ConvTranspose3d`."""
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


def conv_function(dims: int) -> Handler:
    """`torch.conv1d` ... `torch.conv3d`."""

    def handler(call: Call) -> Meaning:
        batched = call.activation()
        if call.rank(batched) != dims + 2:
            raise StaysFloat("its input has no batch dimension")
        weight = _weight(call)
        meta = call.graph.nodes[weight.index].meta if isinstance(weight, Ref) else None
        kernel = meta.shape[2:] if meta else tuple(_tensor(call, weight).shape[2:])
        stride = per_dimension(call.constant(call.get(3, "stride", 1), "stride"), dims)
        padding = call.constant(call.get(4, "padding", 0), "padding")
        dilation = per_dimension(call.constant(call.get(5, "dilation", 1), "dilation"), dims)
        padding = padding if isinstance(padding, str) else per_dimension(padding, dims)
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


def recurrent(op: str) -> Handler:
    """A recurrent network (op "sequence") or a cell ("cell"), with the names of its inner ranges."""

    def handler(call: Call) -> Meaning:
        found = call.get(0, "input")
        if isinstance(found, PackedParts):
            call = Call(replace(call.node, args=(found.data, *call.node.args[1:])), call.graph, call.root)
        return Meaning(op, (call.activation(),), {"ranges": range_names(attribute(call.root, call.node.target))})

    return handler


def added_product(call: Call) -> Meaning:
    """`torch.addmm(bias, x, weight)`, GPT-2's Conv1D, with the model's own bias (out,) and weight (in, out)."""
    if call.get(3, "beta", 1) != 1 or call.get(4, "alpha", 1) != 1 or call.node.kwargs.get("out") is not None:
        raise StaysFloat("it has a beta, an alpha or an out")
    bias, weight = call.get(0, "input"), call.get(2, "mat2")
    outputs = _outputs(call, weight)
    if outputs is None or own_shape(call.graph, call.root, bias) != (outputs,):
        raise StaysFloat("its bias or weight is computed from the input, or of another shape")
    return Meaning("linear", (call.activation(1, "mat1"),), {"weight": Transposed(weight), "bias": bias})


def matmul(call: Call) -> Meaning:
    """A product of two activations, or of one with the model's own weight (in, out)."""
    weight = call.get(1, "other" if "other" in call.node.kwargs else "mat2")
    if _outputs(call, weight) is not None and not depends_on_nothing(call.graph, call.get(0, "input")):
        x = call.activation(0)
        if call.rank(x) >= 2:
            return Meaning("linear", (x,), {"weight": Transposed(weight), "bias": None})
    one, two = call.activation(0), call.activation(1, "other")
    if min(call.rank(one), call.rank(two)) < 2:
        raise StaysFloat("a product with a vector")
    return Meaning("matmul", (one, two))


def _outputs(call: Call, weight: Any) -> int | None:
    """The outputs of a trained weight (in, out); None for anything else."""
    shape = own_shape(call.graph, call.root, weight)
    trained = shape is not None and len(shape) == 2 and has_parameter(call.graph, call.root, weight)
    return shape[1] if shape is not None and trained else None


def _own(name: str, call: Call) -> Attr | None:
    module, path = call.module, call.node.target
    assert module is not None
    return None if getattr(module, name) is None else Attr(f"{path}.{name}" if path else name)


def _weight(call: Call) -> Any:
    weight = call.get(1, "weight")
    if not depends_on_nothing(call.graph, weight):
        raise StaysFloat("its weight is computed from the input")
    return weight


def _tensor(call: Call, weight: Any) -> torch.Tensor:
    found: torch.Tensor = attribute(call.root, weight.path) if isinstance(weight, Attr) else weight
    return found


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

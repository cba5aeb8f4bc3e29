"""Int8 linear layers and convolutions as nodes: int8 weights with a scale per channel, and int32 biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.kernels import narrow
from quant.kernels.reference_plan import Register
from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.integer_steps import padding
from quant.onnx.integer_weights import dequantized_weight
from quant.onnx.sizes import reshaped, sizes_of
from quant.runtime.instructions import LayerCall
from quant.runtime.layers.polyphase import Polyphase
from quant.runtime.layers.products import ConvProduct, LinearProduct, TransposedProduct
from quant.runtime.layers.weighted import StaticLayer


@dataclass(frozen=True)
class Operands:
    """What a layer computes with at one site.

    Attributes:
        q_weight: int8.
        scale: float32, (out,), of the weight.
        q_bias: int32, (out,), at the scale of the products; or None.
        input_scale: float32, ().
    """

    q_weight: Tensor
    scale: Tensor
    q_bias: Tensor | None
    input_scale: Tensor

    def inputs(self, writer: GraphWriter, axis: int = 0) -> list[str]:
        """The dequantised weight and bias."""
        inputs = [dequantized_weight(writer, self.q_weight, self.scale, axis)]
        if self.q_bias is not None:
            scale = writer.constant(self.input_scale * self.scale, "bias_scale")
            zero = writer.constant(torch.zeros(len(self.scale), dtype=torch.int32), "bias_zero_point")
            inputs.append(writer.node("DequantizeLinear", writer.constant(self.q_bias, "bias"), scale, zero, axis=0))
        return inputs


def write_layer(writer: GraphWriter, call: LayerCall) -> None:
    """Write the call of an int8 layer."""
    layer: Any = writer.runner.layer(call.layer)
    if not isinstance(layer, StaticLayer):
        raise NotWritten(f"is a {type(layer).__name__}, whose arithmetic is its own")
    if layer.activation_bits == 16:
        raise NotWritten(
            "has 16-bit activations as two bytes, which no runtime multiplies; convert with quantize_static(..., "
            "smooth=False), and without activation_bits in the recipe"
        )
    known = layer.site(call.site)
    values = writer.program.values
    assert values[call.source].qparams == (known.input_scale, known.input_zero_point)
    operands = Operands(narrow.as_bytes(layer.q_weight), layer.weight_scale, known.q_bias, layer.input_scale[call.site])
    product = layer.product
    real = values[call.out].qparams is None
    if isinstance(product, LinearProduct):
        done, kind = _linear(writer, call, operands), "Gemm"
    elif isinstance(product, TransposedProduct):
        _transposed(writer, call, layer, operands, known)
        return
    elif isinstance(product, ConvProduct):
        done, kind = _convolution(writer, call, operands, product), "Conv"
    else:
        raise NotWritten(f"is a product of a kind that ONNX has not ({product.name})")
    _finish(writer, call, done, known.limits, layer.clamps[call.site])
    floats = kind == "Conv" and real and writer.runtime.rounds_convolutions
    why = f"{kind}, of reals: its output is not rounded" if floats else f"{kind} of integers"
    writer.tell(not floats, why, call.kind)


def _finish(
    writer: GraphWriter, call: LayerCall, done: str, limits: tuple[int, int] | None, clamp: tuple[float, float] | None
) -> None:
    if limits is not None:
        writer.clamped(done, call.out, *limits)
        return
    if clamp is not None:
        ends = torch.tensor(clamp, dtype=torch.float32).nan_to_num()
        done = writer.same_sizes(writer.node("Clip", done, *(writer.constant(end, "limit") for end in ends)), done)
    writer.leave(done, call.out)


def _linear(writer: GraphWriter, call: LayerCall, operands: Operands) -> str:
    """A Gemm; more dimensions than two are joined while the values are integers."""
    source, name = call.source, writer.names[call.source]
    qparams = writer.program.values[source].qparams
    assert qparams is not None
    rank = writer.rank(source)
    if rank == 2:
        x = writer.read_again(name, qparams)
        return writer.same_sizes(writer.node("Gemm", x, *operands.inputs(writer), transB=1), x, count=1)
    outputs, inputs = operands.q_weight.shape
    flat = writer.read_again(reshaped(writer, name, (-1, inputs)), qparams)
    done = writer.node("Gemm", flat, *operands.inputs(writer), transB=1)
    return reshaped(writer, done, (*sizes_of(writer, name, source)[:-1], outputs))


def _convolution(writer: GraphWriter, call: LayerCall, operands: Operands, product: ConvProduct) -> str:
    x = writer.dequantized(call.source)
    pads = list(product.padding) * 2
    before = product.pad_before
    if before is not None:
        widths, mode = before
        if mode == "constant":
            dims = len(product.padding)
            sides = [(widths[2 * (dims - 1 - k)], widths[2 * (dims - 1 - k) + 1]) for k in range(dims)]
            pads = [pad + own for pad, own in zip(pads, [*(a for a, _ in sides), *(b for _, b in sides)], strict=True)]
        else:
            x = _padded(writer, call, x, widths, mode)
    done = writer.node("Conv", x, *operands.inputs(writer), **_window(product, operands.q_weight), pads=pads)
    return writer.same_sizes(done, x, count=1)


def _padded(writer: GraphWriter, call: LayerCall, x: str, widths: Sequence[int], mode: str) -> str:
    """The padded input as integers of the same range, so that the convolution has integers."""
    qparams = writer.program.values[call.source].qparams
    assert qparams is not None
    padded = padding(writer, x, writer.rank(call.source), widths, mode)
    return writer.read_again(writer.rounded(padded, qparams), qparams)


def _window(product: ConvProduct, weight: Tensor) -> dict[str, Any]:
    return {
        "kernel_shape": list(weight.shape[2:]),
        "strides": list(product.stride),
        "dilations": list(product.dilation),
        "group": product.groups,
    }


def _transposed(writer: GraphWriter, call: LayerCall, layer: StaticLayer, operands: Operands, known: Any) -> None:
    """By the convolution of its phases (`runtime/layers/polyphase.py`): runtimes transpose convolutions in floats."""
    product = layer.product
    assert isinstance(product, TransposedProduct)
    qparams = writer.program.values[call.out].qparams
    if product.pad_before is not None:
        raise NotWritten("is a transposed convolution of a padded input")
    if writer.runtime.transposes:
        _as_it_is(writer, call, layer, operands, known)
        return
    if not product.has_phases:
        raise NotWritten("is a transposed convolution with a dilation, which runtimes compute in float only")
    phases = Polyphase(product, operands.q_weight, operands.q_bias, operands.scale)
    spread = Operands(phases.q_weight, phases.multiplier, phases.q_bias, operands.input_scale)
    done = _convolution(writer, call, spread, phases.product)
    if qparams is not None:
        done = writer.read_again(writer.rounded(done, qparams), qparams)
    done = _in_order(writer, call, phases, done)
    _finish(writer, call, done, known.limits, layer.clamps[call.site])
    floats = qparams is None and writer.runtime.rounds_convolutions
    writer.tell(not floats, "Conv of the phases, then moves", call.kind)


def _as_it_is(writer: GraphWriter, call: LayerCall, layer: StaticLayer, operands: Operands, site: Any) -> None:
    """A ConvTranspose; axis 1 of its weight has the channels of one group, so several groups have no scale each."""
    product = layer.product
    assert isinstance(product, TransposedProduct)
    if product.groups == 1:
        inputs = operands.inputs(writer, axis=1)
    else:
        weight = product.real_weight(operands.q_weight, operands.scale)
        inputs = [writer.constant(weight, "weight"), *operands.inputs(writer)[1:]]
    x, pads = writer.dequantized(call.source), list(product.padding) * 2
    window = {**_window(product, operands.q_weight), "pads": pads, "output_padding": list(product.output_padding)}
    done = writer.same_sizes(writer.node("ConvTranspose", x, *inputs, **window), x, count=1)
    _finish(writer, call, done, site.limits, layer.clamps[call.site])
    writer.tell(product.groups == 1, "ConvTranspose" + ", float weights" * (product.groups > 1), call.kind)


def _in_order(writer: GraphWriter, call: LayerCall, phases: Polyphase, y: str) -> str:
    """The moves of `Polyphase.moves` as nodes."""
    sizes = [None if one is None else one + tap - 1
             for one, tap in zip(writer.shape(call.source)[2:], phases.taps, strict=True)]  # fmt: skip
    first = y

    def size(value: Any) -> Any:
        if not isinstance(value, Register):
            return value
        assert value.dim is not None
        fixed = sizes[value.dim - 2] if value.dim >= 2 else None
        return Dimension(first, value.dim) if fixed is None else fixed

    shape: list[Any] = []
    for op, settings in phases.moves(Register(0)):
        if op == "reshape":
            shape = [size(one) for one in settings["shape"]]
            y = reshaped(writer, y, shape)
        elif op == "permute":
            shape = [shape[place] for place in settings["dims"]]
            y = writer.node("Transpose", y, perm=list(settings["dims"]))
        elif op == "flatten":
            start = settings["start"]
            joined = (
                shape[start] * shape[start + 1] if all(isinstance(s, int) for s in shape[start : start + 2]) else -1
            )
            shape = [*shape[:start], joined, *shape[start + 2 :]]
            y = _joined(writer, y, start, shape)
        else:
            end = settings["end"]
            ends = [writer.numbers([one], "ends") for one in (settings["start"], 2**31 - 1 if end is None else end)]
            y = writer.node("Slice", y, *ends, writer.numbers([settings["dim"]], "axes"))
    return y


def _joined(writer: GraphWriter, y: str, start: int, shape: Sequence[Any]) -> str:
    """Two neighbouring dimensions as one; `shape` is the result's, in which those before it keep their places."""
    behind = [one if isinstance(one, int) else Dimension(y, start + 2 + k) for k, one in enumerate(shape[start + 1 :])]
    return reshaped(writer, y, [*[0] * start, -1, *behind])

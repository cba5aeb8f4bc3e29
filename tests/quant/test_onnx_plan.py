"""ONNX operators as plans, against torch's float arithmetic on dequantised values; no package onnx is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.kernels.reference_plan import run_plan
from torch import Tensor

from quant.onnx.file import Node, OnnxFile
from quant.onnx.load_operators import plan_of
from quant.onnx.load_plan import NotTranslated

X_SCALE, X_ZERO = 0.05, 120
Y_SCALE, Y_ZERO = 0.09, 77


class Written:
    """A file that is put together by hand: x is quantised, goes through some nodes, and y is quantised."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        out = f"{op}_{len(self.nodes)}"
        self.nodes.append(Node(out, op, inputs, (out,), attributes))
        return out

    def constant(self, value: Any, dtype: torch.dtype = torch.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = torch.as_tensor(value, dtype=dtype)
        return name

    def quantized(self, name: str, scale: float = X_SCALE, zero: int = X_ZERO, signed: bool = False) -> str:
        """A value rounded, and read again."""
        zero_point = self.constant(zero - 128 * signed, torch.int8 if signed else torch.uint8)
        ends = self.constant(scale), zero_point
        return self.node("DequantizeLinear", self.node("QuantizeLinear", name, *ends), *ends)

    def weight(self, values: Tensor, scale: Any, zero: Any = 0, **attributes: Any) -> str:
        zero_point = self.constant(zero, values.dtype)
        held = self.constant(values, values.dtype)
        return self.node("DequantizeLinear", held, self.constant(scale), zero_point, **attributes)

    def plan(self, output: str) -> tuple[str, list[Tensor]]:
        return plan_of(OnnxFile(tuple(self.nodes), self.constants, ("x",), (output,)))

    def run(self, output: str, x: Tensor) -> Tensor:
        text, constants = self.plan(output)
        return run_plan([x], constants, text)[0]


def rounded(x: Tensor, scale: float = X_SCALE, zero: int = X_ZERO) -> Tensor:
    return ((x / scale).round().add(zero).clamp(0, 255) - zero) * scale


def images() -> Tensor:
    return torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0)) * 2


def integers(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1))


WEIGHT, SCALES = integers(6, 4, 3, 3), torch.linspace(0.001, 0.004, 6)
REAL = WEIGHT.float() * SCALES.reshape(-1, 1, 1, 1)
MATRIX = integers(5, 36)


def conv(file: Written, x: str, **attributes: Any) -> str:
    return file.node("Conv", x, file.weight(WEIGHT, SCALES, [0] * 6, axis=0), **attributes)


def with_uint8_weights(file: Written, x: str) -> str:
    values = (WEIGHT.to(torch.int16) + 128).to(torch.uint8)
    return file.node("Conv", x, file.weight(values, SCALES, [128] * 6, axis=0))


def with_bias(file: Written, x: str) -> str:
    bias = file.weight(torch.arange(6, dtype=torch.int32) * 1000, SCALES * X_SCALE, [0] * 6)
    return file.node("Conv", x, file.weight(WEIGHT, SCALES, [0] * 6, axis=0), bias)


def flat_gemm(file: Written, x: str) -> str:
    weight = file.weight(MATRIX, 0.002)
    pooled = file.quantized(file.node("AveragePool", x, kernel_shape=[3, 3], strides=[3, 3]))
    return file.node("Gemm", file.node("Flatten", pooled), weight, file.constant(torch.ones(5)), transB=1)


def gemm_of(x: Tensor) -> Tensor:
    return F.linear(rounded(F.avg_pool2d(x, 3)).flatten(1), MATRIX.float() * 0.002, torch.ones(5))


CASES: dict[str, tuple[Callable[[Written, str], str], Callable[[Tensor], Tensor]]] = {
    "conv": (conv, lambda x: F.conv2d(x, REAL)),
    "conv with uint8 weights": (with_uint8_weights, lambda x: F.conv2d(x, REAL)),
    "conv with a bias": (
        with_bias,
        lambda x: F.conv2d(x, REAL, torch.arange(6) * 1000 * SCALES * X_SCALE),
    ),
    "conv with unlike pads": (
        lambda file, x: conv(file, x, pads=[0, 1, 2, 3], strides=[2, 1]),
        lambda x: F.conv2d(F.pad(x, (1, 3, 0, 2)), REAL, stride=(2, 1)),
    ),
    "conv, relu": (lambda file, x: file.node("Relu", conv(file, x)), lambda x: F.conv2d(x, REAL).relu()),
    "conv, clip": (
        lambda file, x: file.node("Clip", conv(file, x), file.constant(-1.0), file.constant(2.0)),
        lambda x: F.conv2d(x, REAL).clamp(-1, 2),
    ),
    "gemm": (flat_gemm, gemm_of),
    "add": (
        lambda file, x: file.node("Relu", file.node("Add", x, file.quantized(file.node("Tanh", x), 0.01, 100))),
        lambda x: (x + rounded(x.tanh(), 0.01, 100)).relu(),
    ),
    "mul": (
        lambda file, x: file.node("Mul", x, file.quantized(file.node("Sigmoid", x), 1 / 256, 0)),
        lambda x: x * rounded(x.sigmoid(), 1 / 256, 0),
    ),
    "concat": (
        lambda file, x: file.node("Concat", x, file.quantized(file.node("HardSwish", x), 0.02, 9), axis=1),
        lambda x: torch.cat([x, rounded(F.hardswish(x), 0.02, 9)], 1),
    ),
    "max pool": (
        lambda file, x: file.node("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        lambda x: F.max_pool2d(x, 3, 2, 1),
    ),
    "average pool": (
        lambda file, x: file.node("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    ),
    "global average, reshaped": (
        lambda file, x: file.node("Reshape", file.node("GlobalAveragePool", x), file.constant([2, -1], torch.int64)),
        lambda x: x.mean((2, 3)),
    ),
    "mean by attribute": (lambda file, x: file.node("ReduceMean", x, axes=[2, 3]), lambda x: x.mean((2, 3), True)),
    "mean by input": (
        lambda file, x: file.node("ReduceMean", x, file.constant([2, 3], torch.int64), keepdims=0),
        lambda x: x.mean((2, 3)),
    ),
    "transpose": (lambda file, x: file.node("Transpose", x, perm=[0, 2, 3, 1]), lambda x: x.permute(0, 2, 3, 1)),
    "leaky relu of a clip": (
        lambda file, x: file.node("LeakyRelu", file.node("Clip", x, min=-3.0, max=3.0), alpha=0.1),
        lambda x: F.leaky_relu(x.clamp(-3, 3), 0.1),
    ),
    "hard sigmoid": (
        lambda file, x: file.node("HardSigmoid", x, alpha=1 / 6, beta=0.5),
        F.hardsigmoid,
    ),
    "identity": (lambda file, x: file.node("Identity", x), lambda x: x),
}


@pytest.mark.parametrize("signed", [False, True], ids=["uint8", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_an_operator_between_two_ranges(case: str, signed: bool) -> None:
    """Within a step: the sums are exact, and float32 rounds a tie here and there the other way."""
    write, expected = CASES[case]
    file, x = Written(), images()
    out = write(file, file.quantized("x", signed=signed))
    got = file.run(file.quantized(out, Y_SCALE, Y_ZERO, signed), x)
    wanted = rounded(expected(rounded(x)), Y_SCALE, Y_ZERO)
    assert got.shape == wanted.shape
    steps = (got - wanted).abs() / Y_SCALE
    assert float(steps.max()) < 1.01
    assert float((steps > 0.5).float().mean()) < 0.01


def test_a_product_that_nobody_rounds_is_float() -> None:
    file, x = Written(), images()
    out = file.node("Relu", conv(file, file.quantized("x")))
    assert torch.allclose(file.run(out, x), F.conv2d(rounded(x), REAL).relu(), rtol=1e-5, atol=1e-5)


def test_a_value_that_two_read_is_computed_once() -> None:
    file = Written()
    product = conv(file, file.quantized("x"))
    first, second = (file.quantized(product, Y_SCALE, Y_ZERO) for _ in range(2))
    text, _ = file.plan(file.quantized(file.node("Add", first, second), 0.2, 77))
    assert text.count("conv_u8s8_u8") == 1


def float_weight(file: Written) -> str:
    return file.node("Conv", file.quantized("x"), file.constant(REAL))


def weight_with_zero_point(file: Written) -> str:
    return file.node("Conv", file.quantized("x"), file.weight(WEIGHT, SCALES, [3] * 6, axis=0))


def ranges_per_channel(file: Written) -> str:
    return file.node("QuantizeLinear", "x", file.constant([0.1, 0.2]), file.constant([0, 0], torch.uint8))


REFUSED: dict[str, tuple[Callable[[Written], str], str]] = {
    "float weight": (float_weight, "its input 'c2' is a constant that is not quantised"),
    "zero point": (weight_with_zero_point, "a constant of torch.int8 with a zero point"),
    "ranges per channel": (ranges_per_channel, "has 2 scales"),
    "unknown": (lambda file: file.node("Einsum", "x"), r"node 'Einsum_0' \(Einsum\) has no integer form here"),
    "float input": (lambda file: file.node("Add", "x", "x"), "its input 'x' is not quantised"),
    "float sum": (
        lambda file: file.node("Add", file.quantized("x"), file.quantized("x")),
        r"\(Add\): its result is read as float32, expected a QuantizeLinear",
    ),
    "backwards": (
        lambda file: file.node(
            "Slice", file.quantized("x"), *(file.constant([one], torch.int64) for one in (-1, -9, 2, -1))
        ),
        "takes values backwards",
    ),
    "automatic padding": (lambda file: conv(file, file.quantized("x"), auto_pad=b"SAME_UPPER"), "pads automatically"),
    "clamped mean": (
        lambda file: file.quantized(file.node("Relu", file.node("GlobalAveragePool", file.quantized("x")))),
        "is clamped before it is quantised",
    ),
    "transposed matrix": (
        lambda file: file.node("Gemm", file.quantized("x"), file.weight(MATRIX, 0.1), transA=1),
        "expected x times a matrix",
    ),
    "function of a float": (lambda file: file.node("Sigmoid", "x"), "its input is not quantised"),
    "function that nobody rounds": (
        lambda file: file.node("Sigmoid", file.quantized("x")),
        "output 'Sigmoid_2': is read as float32",
    ),
    "other range": (
        lambda file: file.node(
            "DequantizeLinear", file.nodes[-2].outputs[0] if file.quantized("x") else "", file.constant(1.0)
        ),
        "expected the range that its input was quantised with",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    write, message = REFUSED[case]
    file = Written()
    with pytest.raises(NotTranslated, match=message):
        file.plan(write(file))

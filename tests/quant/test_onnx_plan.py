"""ONNX operators as plans, against torch's float arithmetic on dequantised values; no package onnx is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quant.onnx.file import Node, OnnxFile, TensorKind
from quant.onnx.load import OnnxModule
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

    def module(self, output: str) -> OnnxModule:
        file = OnnxFile(tuple(self.nodes), self.constants, ("x",), (output,))
        return OnnxModule("by hand", file, plan_of(file), "reference")

    def run(self, output: str, x: Tensor) -> Tensor:
        y = self.module(output)(x)
        assert isinstance(y, Tensor)
        return y


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
    text = file.module(file.quantized(file.node("Add", first, second), 0.2, 77)).plan
    assert text.count("conv_u8s8_u8") == 1


def float_weight(file: Written, x: str) -> str:
    return file.node("Conv", x, file.constant(REAL), strides=[2, 2], auto_pad=b"SAME_UPPER")


def weight_with_zero_point(file: Written, x: str) -> str:
    return file.node("Conv", x, file.weight(WEIGHT, SCALES, [3] * 6, axis=0))


def gelu(file: Written, x: str) -> str:
    """Of a product, whose reals nobody rounds."""
    y = conv(file, x)
    erf = file.node("Erf", file.node("Div", y, file.constant(2**0.5)))
    return file.node("Mul", file.node("Mul", y, file.node("Add", erf, file.constant(1.0))), file.constant(0.5))


def normed(file: Written, x: str) -> str:
    """A norm as single nodes."""
    mean = file.node("ReduceMean", x, axes=[-1])
    centred = file.node("Sub", x, mean)
    variance = file.node("ReduceMean", file.node("Pow", centred, file.constant(2.0)), axes=[-1])
    deviation = file.node("Sqrt", file.node("Add", variance, file.constant(1e-5)))
    return file.node("Mul", file.node("Div", centred, deviation), file.constant(torch.linspace(1, 2, 9)))


def masked(file: Written, x: str) -> str:
    """As attention's masks are written."""
    shape = file.node("Shape", x)
    ones = file.node("ConstantOfShape", shape, value=torch.ones(1))
    mask = file.node("Trilu", ones, upper=0)
    allowed = file.node("Equal", mask, file.constant(1.0))
    return file.node("Softmax", file.node("Where", allowed, x, file.constant(-1e9)), axis=-1)


def ninths(x: Tensor) -> Tensor:
    return F.layer_norm(x, (9,)) * torch.linspace(1, 2, 9)


CHANNELS = torch.linspace(0.02, 0.05, 6)


def ranges_per_channel(zeros: list[int]) -> Callable[[Written, str], str]:
    """As NNCF has them before depthwise convolutions."""

    def write(file: Written, x: str) -> str:
        ends = file.constant(CHANNELS), file.constant(zeros, torch.uint8)
        y = file.node("Relu", conv(file, x))
        y = file.node("DequantizeLinear", file.node("QuantizeLinear", y, *ends), *ends)
        weight = file.weight(WEIGHT[:, :1], SCALES, [0] * 6, axis=0)
        y = file.node("Pad", y, file.constant([0, 0, 0, 1, 0, 0, 0, 1], torch.int64))
        return file.node("Conv", y, weight, group=6, pads=[1, 0, 1, 0])

    return write


def by_channels(zero: Tensor) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        scale, offset = CHANNELS.reshape(-1, 1, 1), zero.reshape(-1, 1, 1)
        y = F.conv2d(x, REAL).relu()
        y = ((y / scale).round().add(offset).clamp(0, 255) - offset) * scale
        return F.conv2d(y, REAL[:, :1], padding=1, groups=6)

    return compute


ROWS = torch.arange(20, dtype=torch.int64).reshape(4, 5) % 9

IN_FLOAT: dict[str, tuple[Callable[[Written, str], str], Callable[[Tensor], Tensor]]] = {
    "float weight": (float_weight, lambda x: F.conv2d(x, REAL, stride=2, padding=1)),
    "zero point of a weight": (
        weight_with_zero_point,
        lambda x: F.conv2d(x, (WEIGHT.float() - 3) * SCALES.reshape(-1, 1, 1, 1)),
    ),
    "sum that nobody rounds": (
        lambda file, x: file.node("Relu", file.node("Add", x, x)),
        lambda x: (x + x).relu(),
    ),
    "backwards": (
        lambda file, x: file.node("Slice", x, *(file.constant([one], torch.int64) for one in (-1, -(2**40), 2, -1))),
        lambda x: x.flip(2),
    ),
    "clamped mean": (
        lambda file, x: file.node("Relu", file.node("GlobalAveragePool", x)),
        lambda x: x.mean((2, 3), True).relu(),
    ),
    "function that nobody rounds": (lambda file, x: file.node("Sigmoid", x), torch.sigmoid),
    "functions in a row": (
        lambda file, x: file.node("Exp", file.node("Erf", file.node("Div", x, file.constant(2.0)))),
        lambda x: torch.erf(x / 2).exp(),
    ),
    "gelu": (gelu, lambda x: F.gelu(F.conv2d(x, REAL))),
    "norm": (normed, ninths),
    "mask": (
        masked,
        lambda x: x.masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9).softmax(-1),
    ),
    "reals by reals": (
        lambda file, x: file.node("MatMul", file.node("Softmax", x, axis=-1), x),
        lambda x: x.softmax(-1) @ x,
    ),
    "norm by one node": (
        lambda file, x: file.node(
            "LayerNormalization", x, file.constant(torch.linspace(1, 2, 9)), file.constant(torch.zeros(9)), axis=-1
        ),
        ninths,
    ),
    "pools": (
        lambda file, x: file.node(
            "Sub",
            file.node("MaxPool", file.node("Softmax", x), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            file.node("AveragePool", file.node("Softmax", x), kernel_shape=[3, 3], auto_pad=b"SAME_LOWER"),
        ),
        lambda x: F.max_pool2d(x.softmax(-1), 3, 1, 1) - F.avg_pool2d(x.softmax(-1), 3, 1, 1, count_include_pad=False),
    ),
    "ranges per channel": (ranges_per_channel([0] * 6), by_channels(torch.zeros(6))),
    "zero points per channel": (ranges_per_channel([0, 1, 2, 3, 4, 5]), by_channels(torch.arange(6))),
    "rows by numbers": (
        lambda file, x: file.node("Gather", x, file.constant(ROWS, torch.int64), axis=2),
        lambda x: x[:, :, ROWS],
    ),
}


@pytest.mark.parametrize("case", IN_FLOAT)
def test_an_operator_in_float(case: str) -> None:
    """Read as reals, and rounded afterwards."""
    write, expected = IN_FLOAT[case]
    file, x = Written(), images()
    out = write(file, file.quantized("x"))
    wanted = expected(rounded(x))
    assert torch.allclose(file.run(out, x), wanted, rtol=1e-4, atol=1e-4)
    scale = float(wanted.abs().max()) / 100
    got = file.run(file.quantized(out, scale, 128), x)
    assert got.shape == wanted.shape
    assert float((got - rounded(wanted, scale, 128)).abs().max()) <= 1.01 * scale


def test_ranges_of_channels_are_integers_where_the_zero_points_agree() -> None:
    file = Written()
    assert not file.module(file.quantized(ranges_per_channel([0] * 6)(file, file.quantized("x")))).in_torch
    file = Written()
    assert len(file.module(ranges_per_channel([0, 1, 2, 3, 4, 5])(file, file.quantized("x"))).in_torch) == 4


def test_a_gelu_of_a_product_is_one_line() -> None:
    file = Written()
    module = file.module(gelu(file, file.quantized("x")))
    assert not module.in_torch
    assert module.plan.count("by=gelu") == 1
    assert "erf" not in module.plan.lower()


def test_what_torch_computes_is_named() -> None:
    file = Written()
    module = file.module(file.node("Softplus", file.node("Softmax", file.quantized("x"), axis=-1)))
    assert module.in_torch == ("node 'Softplus_3' (Softplus)",)
    assert "in_torch=1" in repr(module)


REFUSED: dict[str, tuple[Callable[[Written], str], str]] = {
    "nothing quantised": (lambda file: file.node("Relu", "x"), "holds no QuantizeLinear and no DequantizeLinear"),
    "unknown": (
        lambda file: file.node("Einsum", file.quantized("x")),
        r"node 'Einsum_2' \(Einsum\) has no integer form here",
    ),
    "unknown attribute": (
        lambda file: file.node("Relu", file.quantized("x"), slope=1.0),
        r"node 'Relu_2' \(Relu\) has the attribute 'slope', which is not known here",
    ),
    "blocks": (
        lambda file: file.node("Conv", file.quantized("x"), file.weight(WEIGHT, SCALES, [0] * 6, axis=0, block_size=2)),
        "with scales of blocks",
    ),
    "too many inputs": (
        lambda file: file.node("Erf", file.node("Softmax", file.quantized("x")), file.constant(1.0)),
        r"node 'Erf_3' \(Erf\) breaks the rules of its operator",
    ),
    "constant output": (
        lambda file: file.node("Add", file.quantized("x") and file.constant(1.0), file.constant(2.0)),
        "output 'Add_2' is the same for all inputs",
    ),
    "other dtype": (
        lambda file: file.node(
            "DequantizeLinear",
            file.nodes[-2].outputs[0] if file.quantized("x") else "",
            file.constant(1.0),
            file.constant(3, torch.int8),
        ),
        "its zero point and its input have different dtypes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    write, message = REFUSED[case]
    file = Written()
    with pytest.raises(NotTranslated, match=message):
        file.module(write(file))


def test_what_the_inputs_shapes_do_not_fit_is_said_with_the_node() -> None:
    file = Written()
    module = file.module(file.node("Gather", file.quantized("x"), file.constant(ROWS, torch.int64), axis=2))
    with pytest.raises(ValueError, match=r"by hand: inputs 'x' \(2, 4, 3, 3\) do not fit the file.*node 'Gather_2'"):
        module(images()[:, :, :3, :3])


SIZED: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "squeeze": ("Squeeze", {}, (2, 1, 5), ((2, 3, 5), (2, 0, 5))),
    "split": ("Split", {"axis": 1}, (2, 3), ((2, 2), (2, 4), (2, 1))),
}


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("case", SIZED)
def test_sizes_that_a_node_does_not_take_are_refused(case: str, backend: str | None) -> None:
    """torch leaves a dimension of another size, and a slice has fewer values: ONNX Runtime refuses both."""
    op, attributes, fits, others = SIZED[case]
    file, kind = Written(), TensorKind(torch.float32, tuple("abc"[: len(fits)]))
    numbers = file.constant([1] if op == "Squeeze" else [1, 2], torch.int64)
    outputs = ("y",) if op == "Squeeze" else ("y", "z")
    file.nodes.append(Node("node", op, (file.quantized("x"), numbers), outputs, attributes))
    whole = OnnxFile(tuple(file.nodes), file.constants, ("x",), outputs, {"x": kind})
    module = OnnxModule("by hand", whole, plan_of(whole), backend)
    assert not module.in_torch
    module(torch.randn(fits))
    for shape in others:
        with pytest.raises(ValueError, match=r"by hand: inputs 'x' .* do not fit the file"):
            module(torch.randn(shape))


def test_integers_are_read_by_another_range_than_they_were_rounded_by() -> None:
    """As files round by the inverse of a scale: x / s, by the scale 1."""
    file, x = Written(), images()
    zero, number = file.constant(X_ZERO, torch.uint8), float(1.0 / torch.tensor(X_SCALE))
    q = file.node("QuantizeLinear", file.node("Mul", "x", file.constant(number)), file.constant(1.0), zero)
    read = file.node("DequantizeLinear", q, file.constant(X_SCALE), zero)
    y = conv(file, read)
    torch.testing.assert_close(file.run(y, x), F.conv2d(rounded(x), REAL), rtol=1e-4, atol=1e-3)
    assert "= mul " not in file.module(y).plan, "one operation of the plan rounds by the inverse"
    again = file.node("DequantizeLinear", q, file.constant(3.0), file.constant(X_ZERO + 1, torch.uint8))
    expected = 3.0 * ((x * number).round().add(X_ZERO).clamp(0, 255) - X_ZERO - 1)
    torch.testing.assert_close(file.run(again, x), expected)

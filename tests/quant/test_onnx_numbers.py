"""Rules of ONNX's operators that are easily missed: another default, a sign, a rank.

A file has its numbers, or is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quant
from quant.onnx.load_plan import NotTranslated

from .test_onnx_plan import MATRIX, WEIGHT, Written, images, rounded

Write = Callable[[Written, str], str]


def whole(file: Written, *numbers: int) -> str:
    return file.constant(numbers, torch.int64)


def gathered(place: int, axis: int) -> Write:
    return lambda file, x: file.node("Gather", x, whole(file, place), axis=axis)


def padded(fill: float) -> Write:
    return lambda file, x: file.node("Pad", x, whole(file, 0, 0, 1, 1, 0, 0, 1, 1), file.constant(fill))


def padded_integers(fill: int | None, signed: bool) -> Write:
    """A Pad between QuantizeLinear and DequantizeLinear, of integers."""

    def write(file: Written, x: str) -> str:
        ends = file.nodes[-1].inputs[1:]
        dtype = torch.int8 if signed else torch.uint8
        ends = (ends[0], file.constant(120 - 128 * signed, dtype))
        last = () if fill is None else (file.constant(fill, dtype),)
        q = file.node("Pad", file.node("QuantizeLinear", x, *ends), whole(file, 0, 0, 0, 1, 0, 0, 0, 1), *last)
        return file.node("DequantizeLinear", q, *ends)

    return write


def resized(*factors: float, **attributes: Any) -> Write:
    return lambda file, x: file.node("Resize", x, "", file.constant(factors), **attributes)


def with_number(op: str) -> Write:
    return lambda file, x: file.node(op, x, file.constant(torch.full((1,) * 5, 2.0)))


def biased(shape: tuple[int, ...]) -> Write:
    def write(file: Written, x: str) -> str:
        rows = file.node(
            "Reshape", file.node("Slice", x, whole(file, 0), whole(file, 6), whole(file, 3)), whole(file, -1, 36)
        )
        rows = file.quantized(rows)
        return file.node("Gemm", rows, file.weight(MATRIX, 0.002), file.constant(torch.ones(shape)), transB=1)

    return write


def gelu_of_more(file: Written, x: str) -> str:
    """The number that it is divided by has five dimensions, and so has the result."""
    erf = file.node("Erf", file.node("Div", x, file.constant([[[[[2**0.5]]]]])))
    return file.node("Mul", file.node("Mul", x, file.node("Add", erf, file.constant(1.0))), file.constant(0.5))


def pooled(op: str, before: str) -> Write:
    """VALID is no padding, whatever the widths."""
    settings = {"kernel_shape": [3, 3], "pads": PADDED, "auto_pad": b"VALID"}
    return lambda file, x: file.node(op, file.node(before, x), **settings)


def up_to_nothing(file: Written, x: str) -> str:
    return file.node("Slice", file.node("Softplus", x), whole(file, 1), whole(file, -(2**63)), whole(file, 1))


def doubled_in_size(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def by_twos(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, torch.full((1,) * 5, 2.0))


def product(x: Tensor) -> Tensor:
    return F.linear(x[..., :6].reshape(-1, 36), MATRIX.float() * 0.002, torch.ones(5))


def without_zero_point(file: Written, x: str) -> str:
    """The dtype that QuantizeLinear says is that of its DequantizeLinear too."""
    scale = file.constant(0.05)
    return file.node("DequantizeLinear", file.node("QuantizeLinear", x, scale, output_dtype=3), scale)


PADDED = (1, 1, 1, 1)
HALF_PIXEL = {"mode": b"linear", "coordinate_transformation_mode": b"half_pixel"}

NUMBERS: dict[str, tuple[Write, Callable[[Tensor], Tensor]]] = {
    "the last one": (gathered(-1, 2), lambda x: x[:, :, -1:]),
    "softmax of version 11": (
        lambda file, x: file.node("Softmax-11", x), lambda x: x.flatten(1).softmax(-1).view_as(x)
    ),
    "softmax of version 11 over the last dimension": (
        lambda file, x: file.node("LogSoftmax-11", x, axis=3), lambda x: x.log_softmax(-1)
    ),
    "flattened up to the last dimension": (
        lambda file, x: file.node("Flatten", x, axis=-1), lambda x: x.reshape(-1, x.shape[-1])
    ),
    "rows of another length": (lambda file, x: file.node("Reshape", x, whole(file, 9, -1)), lambda x: x.reshape(9, -1)),
    "one of the 256 integers around": (padded(0.05 * 100), lambda x: F.pad(x, PADDED, value=5.0)),
    "no integer around": (padded(0.32), lambda x: F.pad(x, PADDED, value=0.32)),
    "a large number around": (padded(-100.0), lambda x: F.pad(x, PADDED, value=-100.0)),
    "infinity around": (padded(-math.inf), lambda x: F.pad(x, PADDED, value=-math.inf)),
    "an integer around": (padded_integers(5, signed=False), lambda x: F.pad(x, (1, 1), value=(5 - 120) * 0.05)),
    "zeros around uint8": (padded_integers(None, signed=False), lambda x: F.pad(x, (1, 1), value=-120 * 0.05)),
    "zeros around int8": (padded_integers(None, signed=True), lambda x: F.pad(x, (1, 1), value=8 * 0.05)),
    "resized, and nobody rounds": (resized(1, 1, 2, 2, **HALF_PIXEL), doubled_in_size),
    "resized and clamped": (
        lambda file, x: file.node("Relu", resized(1, 1, 2, 2, **HALF_PIXEL)(file, x)),
        lambda x: doubled_in_size(x).relu(),
    ),
    **{
        f"{op} of a number of more dimensions": (with_number(op), by_twos(function))
        for op, function in {"Add": torch.add, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow}.items()
    },
    "gelu of a row of dimensions": (gelu_of_more, lambda x: F.gelu(x)[None]),
    "bias of a row": (biased((1, 5)), product),
    "bias of one number": (biased((1,)), product),
    "bias of each row": (biased((12, 1)), product),
    "no padding in spite of widths": (pooled("MaxPool", "Identity"), lambda x: F.max_pool2d(x, 3, 1)),
    "no padding of a float pool": (pooled("AveragePool", "Softmax"), lambda x: F.avg_pool2d(x.softmax(-1), 3, 1)),
    "no padding of a layer": (
        lambda file, x: file.node("Conv", x, file.weight(WEIGHT, 0.002), pads=PADDED, auto_pad=b"VALID"),
        lambda x: F.conv2d(x, WEIGHT.float() * 0.002),
    ),
    "global mean of rows": (
        lambda file, x: file.node("GlobalAveragePool", file.quantized(file.node("Reshape", x, whole(file, 2, 4, 81)))),
        lambda x: x.flatten(2).mean(2, keepdim=True),
    ),
    "one weight for all of a row": (
        lambda file, x: file.node("LayerNormalization", x, file.constant([2.0])), lambda x: F.layer_norm(x, (9,)) * 2
    ),
    "new dimensions in front": (
        lambda file, x: file.node("Expand", file.node("Softmax", x), whole(file, 1, 1, 1, 1)), lambda x: x.softmax(-1)
    ),
    "the sign of a type that is said": (without_zero_point, lambda x: (x / 0.05).round().clamp(-128, 127) * 0.05),
    "an empty slice": (up_to_nothing, lambda x: x[:, :0]),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers(case: str) -> None:
    write, expected = NUMBERS[case]
    file, x = Written(), images()
    got, wanted = file.run(write(file, file.quantized("x")), x), expected(rounded(x))
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)


def two_results(op: str, **attributes: Any) -> Write:
    def write(file: Written, x: str) -> str:
        node = file.node(op, x, **attributes)
        last = file.nodes[-1]
        file.nodes[-1] = type(last)(last.name, op, last.inputs, (node, "second"), attributes)
        return "second"

    return write


def table_by_int8(file: Written, x: str) -> str:
    """Gather counts negative integers from behind."""
    q = file.node("QuantizeLinear", x, file.constant(0.05), file.constant(-8, torch.int8))
    table = file.constant(torch.arange(256), torch.uint8)
    return file.node("Gather", table, file.node("Cast", q, to=6))


REFUSED: dict[str, tuple[Write, str]] = {
    "second result": (two_results("MaxPool", kernel_shape=[2, 2]), "output 'second' is the output of no node"),
    "parts": (two_results("Split", num_outputs=3, axis=1), "has 2 outputs, and its num_outputs says another number"),
    "table by int8": (table_by_int8, "is no conversion of integers to an index"),
    "scale of zero": (lambda file, x: file.quantized(x, 0.0), "its scale is 0.0, expected a positive number"),
    "16 bits": (
        lambda file, x: file.node("QuantizeLinear", x, file.constant(1.0), output_dtype=4),
        r"gives the type 4 \(output_dtype\)",
    ),
    "channels resized": (resized(1, 2, 2, 2, **HALF_PIXEL), "resizes batches or channels"),
    "half a pixel of torch": (
        resized(1, 1, 0.1, 0.1, mode=b"linear", coordinate_transformation_mode=b"pytorch_half_pixel"),
        "makes images smaller with pytorch_half_pixel",
    ),
    "steps of zero": (lambda file, x: file.node("Gather", x, counted(file, 0, 5, 0)), "counts in steps of 0"),
    "a product of constants that is larger than memory": (
        lambda file, x: file.node("Add", x, outer_product(file, 2**15)), r"asks for a tensor of \[32768, 32768\]"
    ),
    "a constant that doubles": (lambda file, x: doubled(file), "the constants that are computed hold"),
}  # fmt: skip


def counted(file: Written, *ends: int) -> str:
    return file.node("Range", *(file.constant(one, torch.int64) for one in ends))


def outer_product(file: Written, size: int) -> str:
    return file.node("Mul", file.constant(torch.ones(size, 1)), file.constant(torch.ones(size)))


def doubled(file: Written) -> str:
    """Each step within the bounds, all of them not."""
    name = file.node("ConstantOfShape", whole(file, 2**14))
    for _ in range(40):
        name = file.node("Concat", name, name, axis=0)
    return name


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "a constant that doubles":
        monkeypatch.setattr("quant.onnx.load_plan.MOST", 2**20)
    write, message = REFUSED[case]
    file = Written()
    with pytest.raises(NotTranslated, match=message):
        file.module(write(file, file.quantized("x")))


@pytest.mark.parametrize("place", [9, -10])
def test_a_place_that_is_not_there(place: int) -> None:
    file = Written()
    module = file.module(gathered(place, 2)(file, file.quantized("x")))
    with pytest.raises(ValueError, match="do not fit the file"):
        module(images())


def test_rows_of_a_table_that_are_not_there() -> None:
    file = Written()
    index = file.node("Cast", "x", to=7)
    module = file.module(file.node("Gather", file.weight(MATRIX, 0.1), index, axis=0))
    assert torch.equal(module(torch.tensor([-5.0])), module(torch.tensor([0.0])))
    with pytest.raises(ValueError, match="node 'Gather_2'"):
        module(torch.tensor([-6.0]))


def model_of(nodes: list[Any], opset: int, functions: tuple[Any, ...] = ()) -> Any:
    """x is quantised to r, then nodes give y."""
    from onnx import TensorProto, helper

    ends = ["scale", "zero"]
    first = [
        helper.make_node("QuantizeLinear", ["x", *ends], ["q"]),
        helper.make_node("DequantizeLinear", ["q", *ends], ["r"]),
    ]
    held = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [0.05]),
        helper.make_tensor("zero", TensorProto.UINT8, [], [120]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b", "c"]) for name in "xy"]
    graph = helper.make_graph([*first, *nodes], "by hand", values[:1], values[1:], held)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=functions)


def loaded(model: Any, folder: Path) -> Any:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return quant.load_onnx(path)


@pytest.mark.parametrize("opset", [12, 13])
@pytest.mark.parametrize("axis", [None, 1, 2])
def test_the_softmax_of_a_version(opset: int, axis: int | None, tmp_path: Path) -> None:
    helper = pytest.importorskip("onnx", reason="onnx is not installed").helper
    node = helper.make_node("Softmax", ["r"], ["y"], **({} if axis is None else {"axis": axis}))
    x = images()[:, 0]
    reals = rounded(x)
    wanted = reals.softmax(-1 if axis is None else axis)
    if opset < 13:
        wanted = reals.flatten(axis or 1).softmax(-1).view_as(reals)
    assert torch.allclose(loaded(model_of([node], opset), tmp_path)(x), wanted, atol=1e-6)


def test_names_of_two_values_and_operators_of_the_files_own(tmp_path: Path) -> None:
    helper = pytest.importorskip("onnx", reason="onnx is not installed").helper
    for twice in ("y", "scale", "x"):
        nodes = [helper.make_node("Neg", ["r"], [twice]), helper.make_node("Abs", ["r"], ["y"])]
        with pytest.raises(ValueError, match=f"the name '{twice}' is that of two values"):
            loaded(model_of(nodes, 17), tmp_path)
    gelu = helper.make_function(
        "com.microsoft", "Gelu", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    node = helper.make_node("Gelu", ["r"], ["y"], domain="com.microsoft")
    with pytest.raises(ValueError, match=r"it defines operators of its own \('Gelu'\)"):
        loaded(model_of([node], 17, (gelu,)), tmp_path)

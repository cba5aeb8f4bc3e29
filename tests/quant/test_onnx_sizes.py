"""Sizes in ONNX files: those that a stride hides from a capture, those that are computed with, and outputs of another
shape than the model's.

A file runs in onnx's own evaluator only where that package is installed, so the files are looked at as plain data.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.export.whole_plan import ExportError
from quant.onnx.export import file_of
from quant.onnx.verify import _difference, _error

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Strided(nn.Module):
    """A function behind a convolution of stride 2, which has 8 rows of 15 and of 16."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head, self.function = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.head(torch.relu(self.stem(x))))


def strided(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return quant.quantize_static(Strided(function).eval(), [torch.randn(2, 3, 15, 15)], progress=False)


def test_a_size_behind_a_stride_is_read_in_the_file() -> None:
    file, _ = file_of(strided(lambda y: y.sum((2, 3)) / y.shape[2]))
    [divided] = [node for node in file.nodes if node.op == "Div"]
    assert divided.inputs[1] not in file.constants, "8 rows belong to this input alone"


def test_an_output_with_a_size_that_a_stride_hides_from_the_capture_has_it_free() -> None:
    file, _ = file_of(strided(lambda y: y.narrow(1, 0, 4)))
    shape = file.kinds["output"].shape
    assert shape is not None
    assert shape[1] == 4
    assert all(isinstance(one, str) for one in (shape[0], shape[2], shape[3]))


def test_windows_are_not_fixed_by_such_a_size() -> None:
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Conv2d(8, 8, 1)]
    q = quant.quantize_static(nn.Sequential(*layers).eval(), [torch.randn(2, 3, 15, 15)], progress=False)
    ops = [node.op for node in file_of(q)[0].nodes]
    assert "AveragePool" not in ops, "8 rows tile into 2 windows, those of another input do not"
    assert ops.count("Range") == 2, "each dimension's windows are computed"


@pytest.mark.parametrize("function", [lambda y: y / y.shape[2], lambda y: y * (y.shape[2] * y.shape[3])])
def test_a_size_that_meets_floats_is_cast(function: Callable[[Tensor], Tensor]) -> None:
    model = Strided(function).eval()
    q = quant.quantize_static(model, [torch.randn(2, 3, 16, 16), torch.randn(2, 3, 20, 22)], progress=False)
    file, _ = file_of(q)
    cast = {name for node in file.nodes if node.op == "Cast" for name in node.outputs}
    [met] = [node for node in file.nodes if node.op in ("Div", "Mul") and cast.intersection(node.inputs)]
    assert met.inputs[1] in cast


def test_a_quotient_of_computed_sizes_is_refused_by_name() -> None:
    model = Strided(lambda y: y * ((y.shape[2] * y.shape[3]) / 2)).eval()
    q = quant.quantize_static(model, [torch.randn(2, 3, 16, 16), torch.randn(2, 3, 20, 22)], progress=False)
    with pytest.raises(ExportError, match="computes div of sizes"):
        file_of(q)


def test_an_output_of_another_shape_or_dtype_is_not_the_same() -> None:
    ours = torch.ones(())
    assert _error(torch.ones(1), ours) == float("inf")
    assert _error(torch.ones((), dtype=torch.float64), ours) == float("inf")
    assert _error(torch.ones(()), ours) == 0.0


def test_an_integer_value_of_another_shape_is_not_the_same() -> None:
    one = torch.zeros(1, dtype=torch.uint8)
    assert _difference("a", one, torch.zeros(4, dtype=torch.uint8), 0).differing == 1.0
    assert _difference("a", one, one, 0).differing == 0.0

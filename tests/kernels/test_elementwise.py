"""quantize, dequantize and requantize: the compiled loops against the reference, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import ACTIVATION_U8, QParams, dequantize, quantize, reference, requantize
from torch import Tensor

SIZES = [0, 1, 7, 15, 16, 17, 31, 33, 64, 1000]
SCALES = [2.0**-126, 1e-20, 0.1, 1.0, 3.0, 1e20]


def awkward(scale: float) -> Tensor:
    """Ties, ends, and everything that is not a number, in units of `scale`."""
    ties = torch.arange(-300, 300).float() + 0.5
    near = torch.cat([torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45, -1e-45, 2**31, -(2**31)])
    return torch.cat([ties * scale, near * scale, special])


@pytest.mark.parametrize("zero_point", [0, 1, 128, 255])
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_quantize_is_the_reference_on_ties_nan_and_infinity(scale: float, zero_point: int) -> None:
    x = awkward(scale)
    q = quantize(x, scale, zero_point)
    assert torch.equal(q, reference.quantize(x, scale, zero_point))
    qparams = QParams(torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), ACTIVATION_U8)
    assert torch.equal(q, qparams.quantize(x))


def test_quantize_says_what_becomes_of_each_special_value() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize(x, 1.0, 10).tolist() == [10, 255, 0, 10, 10, 12, 12, 10, 8]


@pytest.mark.parametrize("scale", [1e-40, 1e-45], ids=str)
def test_zero_is_the_zero_point_where_the_scale_has_no_finite_reciprocal(scale: float) -> None:
    x = torch.tensor([0.0, 1e-39, -1e-39, 5.0]).repeat(16)
    assert quantize(x, scale, 3).tolist() == [3, 255, 0, 255] * 16
    assert torch.equal(quantize(x, scale, 3), reference.quantize(x, scale, 3))


@pytest.mark.parametrize("size", SIZES)
def test_quantize_and_dequantize_of_every_length(size: int) -> None:
    x = torch.randn(size) * 50
    q = quantize(x, 0.4, 100)
    assert torch.equal(q, reference.quantize(x, 0.4, 100))
    assert torch.equal(dequantize(q, 0.4, 100), reference.dequantize(q, 0.4, 100))


@pytest.mark.parametrize("zero_point", [0, 1, 128, 255])
@pytest.mark.parametrize("scale", [*SCALES, 1e38], ids=str)
def test_dequantize_of_all_256_values(scale: float, zero_point: int) -> None:
    q = torch.arange(256).byte()
    x = dequantize(q, scale, zero_point)
    assert torch.equal(x, reference.dequantize(q, scale, zero_point))
    assert float(x[zero_point]) == 0.0


@pytest.mark.parametrize("zero_point", [0, 100, 255])
@pytest.mark.parametrize("bounds", [(0, 255), (100, 255), (0, 127), (100, 106)], ids=["u8", "relu", "u7", "relu6"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per-tensor", "per-channel"])
def test_requantize_is_the_reference(zero_point: int, bounds: tuple[int, int], per_channel: bool) -> None:
    ends = torch.tensor([2**31 - 1, -(2**31), 0, 1, -1, 2**24 + 1, -(2**24) - 1], dtype=torch.int32)
    sums = torch.cat([ends.repeat(5), torch.randint(-200000, 200000, (31 * 33 - 35,), dtype=torch.int32)]).view(31, 33)
    multiplier = torch.rand(33) * 2e-3 + 1e-4 if per_channel else torch.tensor(1e-3)
    q = requantize(sums, multiplier, zero_point, *bounds)
    assert torch.equal(q, reference.requantize(sums, multiplier, zero_point, *bounds))
    assert bounds[0] <= int(q.min()) <= int(q.max()) <= bounds[1]


def test_requantize_rounds_ties_to_even() -> None:
    sums = torch.tensor([1, 3, 5, 7, -1, -3], dtype=torch.int32)
    assert requantize(sums, torch.tensor(0.5), 10).tolist() == [10, 12, 12, 14, 10, 8]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,), (2, 3, 5), ()], ids=str)
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    q = quantize(x, 0.1, 5)
    assert q.shape == shape
    assert dequantize(q, 0.1, 5).shape == shape
    assert requantize(q.int(), torch.tensor(1.0), 0).shape == shape


def test_a_layout_that_is_not_contiguous_is_read_right() -> None:
    x = torch.randn(8, 6).t()[::2]
    q = quantize(x, 0.05, 128)
    assert torch.equal(q, quantize(x.contiguous(), 0.05, 128))
    assert torch.equal(dequantize(q.t(), 0.05, 128), dequantize(q, 0.05, 128).t())
    sums = torch.arange(12, dtype=torch.int32).view(3, 4).t()
    factors = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(requantize(sums, factors, 0), requantize(sums.contiguous(), factors, 0))


Q, WEIGHT, FACTORS = torch.zeros(1, 4, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.int8), torch.ones(4)
TAKE_BYTES: dict[str, Callable[..., Any]] = {
    "quantize": lambda ops, number: ops.quantize(Q.float(), 1.0, number),
    "dequantize": lambda ops, number: ops.dequantize(Q, 1.0, number),
    "requantize": lambda ops, number: ops.requantize(Q.int(), FACTORS, number, 0, 255),
    "requantize, quant_min": lambda ops, number: ops.requantize(Q.int(), FACTORS, 0, number, 255),
    "requantize, quant_max": lambda ops, number: ops.requantize(Q.int(), FACTORS, 0, 0, number),
    "linear": lambda ops, number, *backend: ops.linear_u8s8_f32(Q, number, WEIGHT, None, FACTORS, *backend),
    "linear, output": lambda ops, number, *backend: ops.linear_u8s8_u8(
        Q, 0, WEIGHT, None, FACTORS, number, 0, 255, *backend
    ),
}
"""Name -> a call with a number that is uint8's."""


@pytest.mark.parametrize("number", [-1, 256, 40_000, 2**32 + 3])
@pytest.mark.parametrize("name", TAKE_BYTES)
def test_a_zero_point_that_is_no_byte_is_refused(name: str, number: int) -> None:
    backend = ["native"] * name.startswith("linear")
    for call in (
        lambda: TAKE_BYTES[name](torch.ops.octet, number, *backend),
        lambda: TAKE_BYTES[name](reference, number),
    ):
        with pytest.raises(ValueError, match=rf"(zero_point|quant_m\w\w) is {number}, expected 0 to 255"):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32], ids=str)
def test_a_wrong_dtype_is_refused(extension: None, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="expected Float"):
        quantize(torch.zeros(3, dtype=dtype), 1.0, 0)
    with pytest.raises(TypeError, match="expected Byte"):
        dequantize(torch.zeros(3, dtype=dtype), 1.0, 0)


@pytest.mark.parametrize("shape", [(4,), (3, 1)], ids=str)
def test_a_multiplier_that_does_not_fit_is_refused(extension: None, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiplier has shape"):
        requantize(torch.zeros(2, 3, dtype=torch.int32), torch.ones(shape), 0)

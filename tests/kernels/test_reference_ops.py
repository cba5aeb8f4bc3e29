"""The oracle of what stands between layers: against float, within bounds that follow from its rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels import reference
from quant.kernels import reference_conv as conv
from quant.kernels import reference_ops as ops
from torch import Tensor

SCALES = st.floats(2**-10, 8.0, width=32)
POINTS = st.integers(0, 255)


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def real(q: Tensor, scale: float, zero_point: int) -> Tensor:
    return (q.double() - zero_point) * scale


def within_half_a_step(q: Tensor, exact: Tensor, scale: float, zero_point: int) -> None:
    """q is the nearest integer to the exact value, or the nearer end of the range; ties and float32 leave a crumb."""
    assert q.dtype == torch.uint8
    ideal = (exact / scale + zero_point).clamp(0, 255)
    # Three float32 roundings of values up to 2**16 steps: the two products and their sum.
    assert float((q.double() - ideal).abs().max()) <= 0.5 + 3 * 2**16 * 2**-24


@settings(max_examples=50)
@given(SCALES, POINTS, SCALES, POINTS, SCALES, POINTS, st.sampled_from([1, -1]))
def test_add(s_a: float, z_a: int, s_b: float, z_b: int, s_y: float, z_y: int, sign: int) -> None:
    a, b = integers(64, 5), integers(5, seed=1)
    exact = real(a, s_a, z_a) + sign * real(b, s_b, z_b)
    if max(s_a, s_b) / s_y > 128:
        return
    y = ops.add(a, z_a, s_a / s_y, b, z_b, sign * s_b / s_y, z_y, 0, 255)
    within_half_a_step(y, exact, s_y, z_y)


@settings(max_examples=50)
@given(SCALES, POINTS, SCALES, POINTS, SCALES, POINTS)
def test_mul(s_a: float, z_a: int, s_b: float, z_b: int, s_y: float, z_y: int) -> None:
    a, b = integers(64, 5), integers(5, seed=1)
    if s_a * s_b / s_y > 1:
        return
    y = ops.mul(a, z_a, b, z_b, s_a * s_b / s_y, z_y, 0, 255)
    within_half_a_step(y, real(a, s_a, z_a) * real(b, s_b, z_b), s_y, z_y)


def test_a_fused_relu_is_a_clamp_at_the_zero_point() -> None:
    a, b = integers(1000), integers(1000, seed=1)
    plain = ops.add(a, 100, 0.7, b, 90, 0.9, 120, 0, 255)
    assert torch.equal(ops.add(a, 100, 0.7, b, 90, 0.9, 120, 120, 255), plain.clamp(min=120))


def test_matmul() -> None:
    a, b = integers(2, 3, 5), integers(2, 5, 4, seed=1)
    exact = (a.long() - 7) @ (b.long() - 200)
    assert torch.equal(ops.matmul_sums(a, 7, b, 200).long(), exact)
    assert torch.equal(ops.matmul_f32(a, 7, b, 200, 0.25), exact.float() * 0.25)
    y = ops.matmul(a, 7, b, 200, 0.001, 128, 0, 255)
    assert torch.equal(y, reference.requantize(exact.int(), torch.tensor(0.001), 128, 0, 255))


def test_lookup() -> None:
    q = integers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    table = torch.arange(255, -1, -1).to(torch.uint8)
    y = ops.lookup(q, table)
    assert torch.equal(y, 255 - q)
    assert y.stride() == q.stride()
    tables = torch.stack([table, table.flip(0), torch.zeros_like(table)])
    y = ops.lookup(q, tables)
    assert torch.equal(y[:, 0], 255 - q[:, 0])
    assert torch.equal(y[:, 1], q[:, 1])
    assert int(y[:, 2].sum()) == 0
    assert y.stride() == q.stride()
    assert ops.lookup(q[:0], table).shape == (0, 3, 4, 5)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling_of_every_dimension(dims: int) -> None:
    q = integers(2, 3, *[7] * dims)
    pools: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]
    assert torch.equal(ops.max_pool(q, (3,) * dims, stride=2, padding=1).double(), pools(q.double(), 3, 2, 1))
    means: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    y = ops.avg_pool(q, 30, (3,) * dims, 0.5, 9, stride=2, padding=1)
    within_half_a_step(y, means(real(q, 0.1, 30), 3, 2, 1), 0.2, 9)
    adaptive: Any = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[dims]
    within_half_a_step(ops.adaptive_avg_pool(q, 30, (3,) * dims, 0.5, 9), adaptive(real(q, 0.1, 30), 3), 0.2, 9)
    largest: Any = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[dims]
    assert torch.equal(ops.adaptive_max_pool(q, (3,) * dims).double(), largest(q.double(), 3))
    spatial = tuple(range(2, dims + 2))
    within_half_a_step(ops.mean(q, 30, spatial, True, 0.5, 9), real(q, 0.1, 30).mean(spatial, keepdim=True), 0.2, 9)


def test_padding_and_resizing_keep_the_real_zero() -> None:
    q = integers(1, 2, 4, 4)
    padded = ops.pad(q, (1, 2, 0, 1), "constant", 77)
    assert torch.equal(padded[:, :, :4, 1:5], q)
    assert set(padded[:, :, 4].flatten().tolist()) == {77}
    for mode in ("reflect", "replicate", "circular"):
        assert torch.equal(ops.pad(q, (1, 1, 1, 1), mode, 0).double(), F.pad(q.double(), (1, 1, 1, 1), mode))
    nearest = ops.interpolate(q, 50, 1.0, 50, scale_factor=2, mode="nearest")
    assert torch.equal(nearest.double(), F.interpolate(q.double(), scale_factor=2))
    smooth = ops.interpolate(q, 50, 0.5, 20, size=(7, 5), mode="bilinear", align_corners=False)
    exact = F.interpolate(real(q, 0.1, 50), size=(7, 5), mode="bilinear", align_corners=False)
    within_half_a_step(smooth, exact, 0.2, 20)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution_sums_are_exact(dims: int, groups: int) -> None:
    q_x = integers(2, 4, *[5] * dims)
    q_weight = (integers(4, 6 // 2, *[3] * dims, seed=1).int() - 128).clamp(-127, 127).to(torch.int8)
    bias = torch.arange(3 * groups, dtype=torch.int32) * 1000
    two, one = (2,) * dims, (1,) * dims
    sums = conv.conv_transpose_u8s8_s32(q_x, 31, q_weight, bias, two, one, one, groups, one)
    transposed: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
    exact = transposed(q_x.double() - 31, q_weight.double(), bias.double(), two, one, one, groups, one)
    assert torch.equal(sums.double(), exact)
    multiplier = torch.rand(3 * groups) * 1e-3
    wide = multiplier.reshape(-1, *[1] * dims)
    args = (q_x, 31, q_weight, bias, two, one, one, groups, one, multiplier)
    assert torch.equal(conv.conv_transpose_u8s8_f32(*args), sums.float() * wide)
    assert torch.equal(conv.conv_transpose_u8s8_u8(*args, 128, 0, 255), reference.requantize(sums, wide, 128, 0, 255))


def test_every_operator_is_in_the_table_under_its_own_name() -> None:
    for name, function in ops.OPS.items():
        assert function.__name__ == name

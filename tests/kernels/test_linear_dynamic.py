"""linear_dynamic: every backend gives the reference's float32 bits, and they lie within a derived bound of the real."""

from __future__ import annotations

import math
import os

import pytest
import torch
from quant.kernels import quantize_weight, reference
from quant.kernels.backend import Backend
from torch import Tensor

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
SHAPES = [(5, 17, 3), (0, 4, 5), (3, 4, 0), (65, 33, 66)]
SHAPES += (
    [] if FAST else [(1, 64, 64), (2, 1, 1), (3, 0, 4), (7, 65, 130), (1, 130, 1100), (130, 16, 513), (16, 200, 70)]
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "M{}-N{}-K{}".format(*shape))
bits = pytest.mark.parametrize("activation_bits", [8, 16], ids=["8bit", "16bit"])


def operands(shape: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K), q_weight (N, K) and its scale (N,)."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-3, 3, max(m, 1))[:m, None]
    q_weight, scale = quantize_weight(torch.randn(n, k, generator=generator))
    return x, q_weight, scale


def same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(torch.isnan(actual), torch.isnan(expected))
    assert torch.equal(torch.nan_to_num(actual), torch.nan_to_num(expected))


@shapes
@bits
@pytest.mark.parametrize("per_row", [True, False], ids=["per-row", "per-tensor"])
@pytest.mark.parametrize("extras", ["bare", "relu", "bias", "bias+columns", "bias+columns+relu"][:: 4 if FAST else 1])
def test_bits_are_those_of_the_reference(
    backend: Backend, shape: tuple[int, int, int], activation_bits: int, per_row: bool, extras: str
) -> None:
    x, q_weight, scale = operands(shape)
    bias = torch.randn(shape[1]) if "bias" in extras else None
    columns = torch.logspace(-4, 4, shape[2]) if "columns" in extras else None
    arguments = (x, q_weight, scale, bias, columns, activation_bits, per_row, "relu" in extras)
    same_bits(backend.linear_dynamic(*arguments), reference.linear_dynamic(*arguments))


@shapes
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "bare"])
def test_the_plain_operator_has_the_bits_of_the_reference(shape: tuple[int, int, int], with_bias: bool) -> None:
    x, q_weight, scale = operands(shape)
    bias = torch.randn(shape[1]) if with_bias else None
    expected = reference.linear_dynamic(x, q_weight, scale, bias)
    same_bits(torch.ops.octet.linear_dynamic_plain(x, q_weight, scale, bias), expected)


@bits
def test_the_error_is_within_half_a_step_per_product(backend: Backend, activation_bits: int) -> None:
    x, q_weight, scale = operands((9, 40, 300))
    y = backend.linear_dynamic(x, q_weight, scale, None, None, activation_bits, True, False)
    weight = q_weight.double() * scale.double()[:, None]
    real = x.double() @ weight.t()
    # Each x is off by at most half its row's step, so each sum by half a step times sum |w|; float32 adds 2**-22 of
    # the sum's own terms.
    step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)).double() / (2**activation_bits - 1)
    bound = step[:, None] / 2 * weight.abs().sum(1) + 2.0**-22 * (x.abs().double() @ weight.abs().t())
    assert bool(((y - real).abs() <= bound).all())


@bits
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("place", [0, 15, 16, 32, 69], ids=lambda place: f"at{place}")
def test_a_row_that_is_not_finite_is_nan_and_no_other(
    backend: Backend, activation_bits: int, bad: float, place: int
) -> None:
    x, q_weight, scale = operands((5, 8, 70))
    clean = backend.linear_dynamic(x, q_weight, scale, torch.ones(8), None, activation_bits, True, True)
    x[2, place] = bad
    y = backend.linear_dynamic(x, q_weight, scale, torch.ones(8), None, activation_bits, True, True)
    assert bool(torch.isnan(y[2]).all()), "a ReLU must not turn NaN into 0"
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])


def test_with_one_range_for_all_a_nan_spreads_to_all(backend: Backend) -> None:
    x, q_weight, scale = operands((5, 8, 70))
    x[2, 3] = math.nan
    assert bool(torch.isnan(backend.linear_dynamic(x, q_weight, scale, None, None, 8, False, False)).all())


def test_columns_that_overflow_a_finite_input_give_nan(backend: Backend) -> None:
    x, q_weight, scale = operands((2, 8, 4))
    x[0, 0] = 1e30
    y = backend.linear_dynamic(x, q_weight, scale, None, torch.full((4,), 1e20), 8, True, False)
    assert bool(torch.isnan(y[0]).all())
    assert bool(torch.isfinite(y[1]).all())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("all zero", [0.0] * 5),
        ("minus zero", [-0.0] * 5),
        ("one value", [3.5] * 5),
        ("all negative", [-1.0, -2.0, -3.0, -4.0, -5.0]),
        ("all positive", [1.0, 2.0, 3.0, 4.0, 5.0]),
        ("subnormal", [1e-42, -1e-42, 0.0, 1e-45, 0.0]),
        ("widest", [3.4e38, -3.4e38, 0.0, 1e30, 1.0]),
        ("smallest scale", [255 * 2.0**-126, 0.0, 1e-38, 0.0, 0.0]),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
@bits
def test_awkward_rows(backend: Backend, name: str, row: list[float], activation_bits: int) -> None:
    q_weight, scale = quantize_weight(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)) / 100)
    arguments = (torch.tensor([row]), q_weight, scale, None, None, activation_bits, True, False)
    y = backend.linear_dynamic(*arguments)
    same_bits(y, reference.linear_dynamic(*arguments))
    assert bool(torch.isfinite(y).all())
    if name.endswith("zero"):
        assert bool((y == 0).all())


def test_a_row_does_not_depend_on_the_others(backend: Backend) -> None:
    x, q_weight, scale = operands((70, 20, 90))
    together = backend.linear_dynamic(x, q_weight, scale, None, None, 8, True, False)
    alone = [backend.linear_dynamic(row, q_weight, scale, None, None, 8, True, False) for row in x]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.skipif(FAST, reason="OCTET_FAST_TESTS=1: layers large enough for threads are slow under emulation")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 700, 1024), (30, 515, 600), (300, 130, 513), (150, 1030, 600)], ids=str)
@bits
def test_bits_do_not_depend_on_the_number_of_threads(
    backend: Backend, shape: tuple[int, int, int], threads: int, activation_bits: int
) -> None:
    arguments = (*operands(shape), torch.ones(shape[1]), None, activation_bits, True, False)
    expected = reference.linear_dynamic(*arguments)
    torch.set_num_threads(threads)
    same_bits(backend.linear_dynamic(*arguments), expected)


@pytest.mark.parametrize("shape", [(66,), (2, 3, 66), (2, 0, 66)], ids=str)
def test_leading_dimensions_are_kept(backend: Backend, shape: tuple[int, ...]) -> None:
    _, q_weight, scale = operands((1, 5, 66))
    x = torch.randn(shape)
    y = backend.linear_dynamic(x, q_weight, scale, None, None, 8, True, False)
    assert y.shape == (*shape[:-1], 5)
    flat = backend.linear_dynamic(x.reshape(-1, 66), q_weight, scale, None, None, 8, True, False)
    assert torch.equal(y.reshape(-1, 5), flat)


def test_layouts_that_are_not_contiguous_are_read_right(backend: Backend) -> None:
    x, q_weight, scale = operands((6, 10, 40))
    plain = (x, q_weight, scale, torch.randn(10), torch.rand(40) + 0.5)
    odd = (x.t().contiguous().t(), q_weight, *(torch.stack([t, t], 1)[:, 0] for t in plain[2:]))
    assert not odd[0].is_contiguous()
    assert not odd[2].is_contiguous()
    assert torch.equal(
        backend.linear_dynamic(*odd, 8, True, False),
        backend.linear_dynamic(*plain, 8, True, False),
    )


def test_inputs_are_left_as_they_were(backend: Backend) -> None:
    x, q_weight, scale = operands((6, 10, 40))
    columns, bias = torch.rand(40), torch.rand(10)
    before = [t.clone() for t in (x, q_weight, scale, bias, columns)]
    backend.linear_dynamic(x, q_weight, scale, bias, columns, 16, True, True)
    assert all(torch.equal(a, b) for a, b in zip((x, q_weight, scale, bias, columns), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_another_float_type_is_refused(backend: Backend, dtype: torch.dtype) -> None:
    x, q_weight, scale = operands((2, 3, 4))
    with pytest.raises(TypeError, match="expected"):
        backend.linear_dynamic(x.to(dtype), q_weight, scale, None, None, 8, True, False)


def test_other_activation_bits_are_refused(backend: Backend) -> None:
    x, q_weight, scale = operands((2, 3, 4))
    with pytest.raises(ValueError, match="activation_bits is 4, expected 8 or 16"):
        backend.linear_dynamic(x, q_weight, scale, None, None, 4, True, False)


def test_wrong_features_are_refused(backend: Backend) -> None:
    x, q_weight, scale = operands((2, 3, 4))
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 4\) \(in_features\)"):
        backend.linear_dynamic(x[:, :3], q_weight, scale, None, None, 8, True, False)


@pytest.mark.parametrize("name", ["scale", "bias", "columns"])
def test_a_vector_of_the_wrong_length_is_refused(compiled: Backend, name: str) -> None:
    x, q_weight, scale = operands((2, 3, 4))
    vectors = {"scale": scale, "bias": torch.ones(3), "columns": torch.ones(4), name: torch.ones(9)}
    with pytest.raises(ValueError, match=f"{name} has shape"):
        compiled.linear_dynamic(x, q_weight, vectors["scale"], vectors["bias"], vectors["columns"], 8, True, False)

"""GPTQ, AdaRound, coordinate descent and scales by the output, against the papers' equations and against all
choices."""

from __future__ import annotations

import itertools

import pytest
import torch
from quant.kernels import QScheme, weight_scheme
from quant.kernels.scheme import weight_scale
from torch import Tensor

from quant.rounding import adaround, descend, gptq, least_error_scale, output_error


def problem(rows: int, columns: int, seed: int = 0, samples: int = 200) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of inputs that correlate."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(samples, columns, generator=generator) @ mix + 0.5
    return torch.randn(rows, columns, generator=generator), x.t() @ x / samples


def nearest(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    return torch.round(weight / scale[:, None]).clamp(-top, top)


def algorithm_1(weight: Tensor, hessian: Tensor, scale: Tensor, bits: int, damping: float) -> Tensor:
    """Optimal brain quantisation in a fixed order, with the inverse Hessian of the columns that are left, in full."""
    top, (rows, columns) = 2 ** (bits - 1) - 1, weight.shape
    own, moments = weight.double().clone(), hessian.double()
    moments = moments + torch.eye(columns, dtype=torch.float64) * damping * moments.diagonal().mean()
    q = torch.empty(rows, columns, dtype=torch.float64)
    for k in range(columns):
        inverse = torch.linalg.inv(moments[k:, k:])
        q[:, k] = torch.round(own[:, k] / scale).clamp(-top, top)
        error = (own[:, k] - q[:, k] * scale) / inverse[0, 0]
        own[:, k:] -= error[:, None] * inverse[0]
    return q


@pytest.mark.parametrize("columns", [5, 150], ids=["one block", "two blocks"])
def test_gptq_is_algorithm_1(columns: int) -> None:
    weight, hessian = problem(6, columns, samples=4 * columns)
    scale = weight_scale(weight, bits=4)
    rounded = gptq(weight, hessian, weight_scheme(4), scale=scale)
    expected = algorithm_1(weight, hessian, scale, 4, 0.01)
    assert torch.equal(rounded.q.double(), expected)
    assert rounded.q.dtype == torch.int8
    assert torch.equal(rounded.scale, scale)
    assert not rounded.zero_point.any()


def test_gptq_of_two_weights_is_the_best_of_all() -> None:
    """With two columns, the second takes over what the first cannot: with the first rounded to nearest, none is
    better."""
    for seed in range(20):
        weight, hessian = problem(1, 2, seed)
        scale = weight_scale(weight, bits=3)
        rounded = gptq(weight, hessian, weight_scheme(3), scale=scale, damping=0.0)
        first = nearest(weight, scale, 3)[0, 0]
        errors = {
            second: output_error(weight, torch.tensor([[first, second]]) * scale, hessian).item()
            for second in range(-3, 4)
        }
        assert rounded.q[0, 0] == first
        assert errors[int(rounded.q[0, 1])] == pytest.approx(min(errors.values()), rel=1e-4)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_loses_less_than_nearest(bits: int, group_size: int | None, act_order: bool) -> None:
    weight, hessian = problem(16, 64)
    rounded = gptq(weight, hessian, weight_scheme(bits), group_size=group_size, act_order=act_order)
    parts = weight.reshape(-1, group_size or 64)
    by = hessian.diagonal().reshape(-1, group_size or 64).repeat(16, 1)
    scale = least_error_scale(parts, by, bits=bits)
    plain = (nearest(parts, scale, bits) * scale[:, None]).reshape(16, 64)
    scales = rounded.scale[:, None] if group_size is None else rounded.scale.repeat_interleave(group_size, 1)
    own = rounded.q * scales
    assert rounded.scale.shape == ((16,) if group_size is None else (16, 4))
    assert output_error(weight, own, hessian).sum() < 0.8 * output_error(weight, plain, hessian).sum()


def test_gptq_with_zero_points() -> None:
    weight, hessian = problem(8, 32)
    scheme = QScheme(torch.uint8, 0, 15, symmetric=False)
    rounded = gptq(weight + 1.0, hessian, scheme, group_size=8)
    zero = rounded.zero_point.repeat_interleave(8, 1)
    own = (rounded.q.to(torch.int32) - zero) * rounded.scale.repeat_interleave(8, 1)
    assert rounded.q.dtype == torch.uint8
    assert int(rounded.q.max()) <= 15
    assert (own - weight - 1.0).abs().max() < 1.0
    symmetric = gptq(weight + 1.0, hessian, weight_scheme(4), group_size=8)
    coarse = symmetric.q * symmetric.scale.repeat_interleave(8, 1)
    assert output_error(weight + 1.0, own, hessian).sum() < output_error(weight + 1.0, coarse, hessian).sum()


def test_gptq_of_a_batch_is_that_of_each() -> None:
    problems = [problem(3, 9, seed) for seed in range(4)]
    weights, hessians = (torch.stack(both) for both in zip(*problems, strict=True))
    together = gptq(weights, hessians, weight_scheme(4), group_size=3, act_order=True)
    for index, (weight, hessian) in enumerate(problems):
        alone = gptq(weight, hessian, weight_scheme(4), group_size=3, act_order=True)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[index], other)


def test_gptq_rounds_dead_inputs_to_nearest() -> None:
    weight, hessian = problem(4, 8)
    hessian[3], hessian[:, 3] = 0.0, 0.0
    scale = weight_scale(weight, bits=4)
    rounded = gptq(weight, hessian, weight_scheme(4), scale=scale)
    assert torch.equal(rounded.q[:, 3].float(), nearest(weight, scale, 4)[:, 3])
    silent = gptq(weight, torch.zeros(8, 8), weight_scheme(4), scale=scale)
    assert torch.equal(silent.q.float(), nearest(weight, scale, 4))


def test_gptq_takes_a_hessian_of_few_samples() -> None:
    weight, hessian = problem(4, 32, samples=3)
    rounded = gptq(weight, hessian, weight_scheme(4), damping=0.0)
    own = rounded.q * rounded.scale[:, None]
    plain = nearest(weight, rounded.scale, 4) * rounded.scale[:, None]
    assert output_error(weight, own, hessian).sum() < output_error(weight, plain, hessian).sum()


def test_gptq_names_what_does_not_fit() -> None:
    weight, hessian = problem(4, 8)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 8\) and hessian \(4, 4\)"):
        gptq(weight, hessian[:4, :4], weight_scheme(4))
    with pytest.raises(ValueError, match="group_size is 3, expected a divisor of the 8 inputs"):
        gptq(weight, hessian, weight_scheme(4), group_size=3)
    with pytest.raises(ValueError, match="hessian holds NaN or inf"):
        gptq(weight, hessian * torch.nan, weight_scheme(4))
    with pytest.raises(ValueError, match="no matrix of second moments"):
        gptq(weight, hessian - 100.0 * hessian.diagonal().mean() * (1 - torch.eye(8)), weight_scheme(4))
    with pytest.raises(ValueError, match=r"scale has shape \(8,\), expected \(4,\)"):
        gptq(weight, hessian, weight_scheme(4), scale=torch.ones(8))


def best_of_all(weight: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """The least error of a row when each weight is rounded up or down, by trying every way."""
    low = torch.floor(weight / scale[:, None])
    ways = torch.tensor(list(itertools.product((0.0, 1.0), repeat=weight.shape[1])))
    errors = [output_error(row.expand_as(ways), (one + ways) * s, hessian).min()
              for row, one, s in zip(weight, low, scale, strict=True)]  # fmt: skip
    return torch.stack(errors)


def test_adaround_finds_the_best_of_all_roundings() -> None:
    found, left, to_gain = 0, 0.0, 0.0
    for seed in range(8):
        weight, hessian = problem(4, 6, seed)
        scale = weight_scale(weight, bits=4) * 1.01
        q = adaround(weight, scale, hessian, bits=4, steps=1000)
        assert set((q - torch.floor(weight / scale[:, None])).unique().tolist()) <= {0.0, 1.0}
        own = output_error(weight, q * scale[:, None], hessian)
        best = best_of_all(weight, scale, hessian)
        plain = output_error(weight, nearest(weight, scale, 4) * scale[:, None], hessian)
        found += int((own <= best * 1.001 + 1e-9).sum())
        left += float((own / plain - best / plain).sum())
        to_gain += float((1.0 - best / plain).sum())
    assert found >= 16  # of 32; rounding to nearest finds fewer, and loses more
    assert left < 0.5 * to_gain


def test_descent_ends_where_no_integer_alone_does_better() -> None:
    weight, hessian = problem(4, 10)
    scale = weight_scale(weight, bits=3)
    start = nearest(weight, scale, 3)
    q = descend(start, weight, scale, hessian, bits=3)
    error = output_error(weight, q * scale[:, None], hessian)
    assert (error <= output_error(weight, start * scale[:, None], hessian)).all()
    for k, change in itertools.product(range(10), (-1.0, 1.0)):
        other = q.clone()
        other[:, k] = (other[:, k] + change).clamp(-3, 3)
        assert (output_error(weight, other * scale[:, None], hessian) >= error * (1 - 1e-5)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scale_has_the_least_weighted_error_of_a_fine_grid(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 40, generator=generator) * torch.rand(6, 1, generator=generator)
    importance = torch.rand(6, 40, generator=generator) ** 4
    scale = least_error_scale(rows, importance, bits=bits)

    def error(scale: Tensor) -> Tensor:
        return ((nearest(rows, scale, bits) * scale[:, None] - rows).square() * importance).sum(1)

    widest = weight_scale(rows, bits=bits)
    grid = torch.stack([error(widest * share) for share in torch.linspace(0.1, 1.0, 500)]).amin(0)
    assert (error(scale) <= error(widest)).all()
    assert (error(scale) <= 1.2 * grid + 1e-12).all()


def test_scale_of_what_is_never_read_is_that_of_the_largest_weight() -> None:
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    rows[2] = 0.0
    assert torch.equal(least_error_scale(rows, torch.zeros(1, 8), bits=4), weight_scale(rows, bits=4))
    assert least_error_scale(rows, bits=4)[2] == 1.0
    assert not torch.isfinite(least_error_scale(rows * torch.nan, bits=4)).any()

"""linear_u8s8_*: int32 sums bit for bit against int64 arithmetic written here, on every backend."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
from quant.kernels import dispatch, reference
from quant.kernels.backend import Backend
from torch import Tensor

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 17, 64, 65, 130]
OUTPUTS = [0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 130]
DEPTHS = [0, 1, 3, 5, 65, 513] if FAST else [0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 511, 512, 513, 519, 700, 1100]


def exact(q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None = None) -> Tensor:
    """The definition, in int64 and without torch: sum over i of (q_x - zero_point) * q_weight, plus the bias."""
    x = q_x.numpy().astype(np.int64) - zero_point
    sums = np.einsum("mk,nk->mn", x, q_weight.numpy().astype(np.int64))
    if q_bias is not None:
        sums = sums + q_bias.numpy()
    assert sums.size == 0 or np.abs(sums).max() < 2**31
    return torch.from_numpy(sums).int()


def activations(rows: int, k: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", DEPTHS, ids=lambda k: f"K{k}")
def test_sums_are_exact_for_every_shape(backend: Backend, k: int) -> None:
    x, weight = activations(max(ROWS), k), weights(max(OUTPUTS), k)
    zero_points = itertools.cycle((0, 3, 128, 255))
    expected = {zero_point: exact(x, zero_point, weight) for zero_point in (0, 3, 128, 255)}
    # oneDNN compiles a kernel for each shape: a thousand of them would take minutes.
    some = FAST or backend.name == "onednn"
    for n in OUTPUTS[:: 3 if some else 1]:
        channels = weight[:n].contiguous()
        for m in ROWS[:: 3 if some else 1]:
            zero_point = next(zero_points)
            sums = backend.linear_u8s8_s32(x[:m], zero_point, channels, None)
            assert sums.dtype == torch.int32
            assert torch.equal(sums, expected[zero_point][:m, :n]), f"M={m} N={n} K={k} zero_point={zero_point}"


@pytest.mark.parametrize("k", [1, 4, 12, 21, 40], ids=lambda k: f"K{k}")
def test_what_is_left_of_a_tile_is_exact(compiled: Backend, k: int) -> None:
    """Tiles have 4 to 6 rows of 16 to 64 outputs, in vectors of 4 to 16: every part of one, as sums and as bytes."""
    x, weight = activations(6, k, seed=5), weights(20, k, seed=6)
    expected, factors = exact(x, 7, weight), torch.linspace(0.001, 0.01, 20)
    for m, n in itertools.product(range(1, 7), (1, 3, 4, 6, 8, 9, 12, 14, 16, 19, 20)):
        channels, of = weight[:n].contiguous(), f"M={m} N={n} K={k}"
        assert torch.equal(compiled.linear_u8s8_s32(x[:m], 7, channels, None), expected[:m, :n]), of
        arguments = x[:m], 7, channels, None, factors[:n].contiguous(), 60, 0, 255
        assert torch.equal(compiled.linear_u8s8_u8(*arguments), reference.linear_u8s8_u8(*arguments)), of


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 7, 9, 15, 17, 31, 33], ids=lambda k: f"K{k}")
def test_rows_that_end_inside_a_word_are_exact(backend: Backend, k: int) -> None:
    """Kernels read four values of a row at once: such rows are copied, all but the last with what lies behind them."""
    x, weight = activations(300, k, seed=7), weights(33, k, seed=8)
    factors = torch.linspace(0.001, 0.01, 33)
    for m, n in itertools.product((1, 2, 3, 4, 5, 16, 17, 300), (1, 16, 33)):
        channels, of = weight[:n].contiguous(), f"M={m} N={n} K={k}"
        known = x[:m].clone(), 7, channels, None, factors[:n].contiguous()
        assert torch.equal(backend.linear_u8s8_f32(*known), exact(x[:m], 7, channels).float() * factors[:n]), of
        assert torch.equal(backend.linear_u8s8_u8(*known, 60, 0, 255), reference.linear_u8s8_u8(*known, 60, 0, 255)), of


@pytest.mark.parametrize("zero_point", [0, 3, 128, 255])
def test_the_zero_point_is_removed_and_the_bias_added(backend: Backend, zero_point: int) -> None:
    x, weight = activations(7, 100), weights(33, 100)
    bias = torch.randint(-(2**30), 2**30, (33,), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    sums = backend.linear_u8s8_s32(x, zero_point, weight, bias)
    assert torch.equal(sums, exact(x, zero_point, weight, bias))


@pytest.mark.parametrize("n", [1, 3, 7, 16, 20, 64])
def test_a_sum_that_a_bias_takes_out_of_int32_wraps(backend: Backend, n: int) -> None:
    x, weight = activations(7, 40), weights(n, 40)
    ends = torch.tensor([-(2**31), 2**31 - 1, 0], dtype=torch.int32)
    known = x, 7, weight, ends.repeat(n)[:n].contiguous()
    assert torch.equal(backend.linear_u8s8_s32(*known), reference.linear_u8s8_s32(*known))
    factors = torch.full((n,), 2.0**-24)
    assert torch.equal(backend.linear_u8s8_f32(*known, factors), reference.linear_u8s8_f32(*known, factors))
    arguments = *known, factors, 128, 0, 255
    assert torch.equal(backend.linear_u8s8_u8(*arguments), reference.linear_u8s8_u8(*arguments))


@pytest.mark.parametrize("factor", [-0.01, -1e5, -1e7, -3e38], ids=str)
def test_a_negative_multiplier_clamps_at_the_other_end(backend: Backend, factor: float) -> None:
    arguments = activations(7, 64), 7, weights(50, 64), None, torch.full((50,), factor), 60, 0, 255
    assert torch.equal(backend.linear_u8s8_u8(*arguments), reference.linear_u8s8_u8(*arguments))


def adversarial_activations(k: int) -> dict[str, Tensor]:
    column = torch.arange(k)
    return {
        "all 255": torch.full((k,), 255).byte(),
        "all 0": torch.zeros(k).byte(),
        "even 255": ((column % 2 == 0) * 255).byte(),
        "odd 255": ((column % 2 == 1) * 255).byte(),
        "pairs 255": ((column // 2 % 2 == 0) * 255).byte(),
        "255 and 254": (255 - column % 2).byte(),
        "random ends": (torch.randint(0, 2, (k,), generator=torch.Generator().manual_seed(3)) * 255).byte(),
    }


def adversarial_weights(k: int) -> dict[str, Tensor]:
    column = torch.arange(k)
    generator = torch.Generator().manual_seed(4)
    signs = torch.randint(0, 2, (k,), generator=generator) * 2 - 1
    return {
        "all 127": torch.full((k,), 127).char(),
        "all -127": torch.full((k,), -127).char(),
        "all -128": torch.full((k,), -128).char(),
        "alternating": (127 - 254 * (column % 2)).char(),
        "alternating pairs": (127 - 254 * (column // 2 % 2)).char(),
        "alternating fours": (127 - 254 * (column // 4 % 2)).char(),
        "random signs": (127 * signs).char(),
        "just fits": (64 * signs).char(),
        "just does not fit": ((64 + column % 2) * signs).char(),
        "one 127 beside 1": torch.where(column % 2 == 0, 127, 1).char(),
        "one 127 beside 2": torch.where(column % 2 == 0, 127, 2).char(),
    }


@pytest.mark.parametrize("k", [2, 65, 520] if FAST else [2, 3, 64, 65, 512, 520, 1100], ids=lambda k: f"K{k}")
def test_sums_are_exact_where_int16_pairs_would_saturate(backend: Backend, k: int) -> None:
    x = torch.stack(list(adversarial_activations(k).values()))
    names = list(adversarial_weights(k))
    weight = torch.stack(list(adversarial_weights(k).values()))
    expected = exact(x, 0, weight)
    for rows in (1, len(x)):
        assert torch.equal(backend.linear_u8s8_s32(x[:rows], 0, weight, None), expected[:rows])
    # Each row alone too, because a weight that is safe as a whole may be computed by another route.
    for row, name in enumerate(names):
        alone = weight[row : row + 1].contiguous()
        assert torch.equal(backend.linear_u8s8_s32(x, 0, alone, None), expected[:, row : row + 1]), name


def test_every_adjacent_pair_of_extreme_weights_at_every_place(backend: Backend) -> None:
    k = 12
    values = (-127, -65, -64, 0, 1, 2, 64, 65, 127)
    rows = []
    for first, second, place in itertools.product(values, values, range(k - 1)):
        row = torch.zeros(k, dtype=torch.int8)
        row[place], row[place + 1] = first, second
        rows.append(row)
    x, weight = torch.full((1, k), 255, dtype=torch.uint8), torch.stack(rows)
    assert torch.equal(backend.linear_u8s8_s32(x, 0, weight, None), exact(x, 0, weight))


def test_the_largest_k_at_full_range_does_not_overflow(backend: Backend) -> None:
    k = reference.MAX_K
    x = torch.full((1, k), 255, dtype=torch.uint8)
    weight = torch.stack([torch.full((k,), 127).char(), torch.full((k,), -127).char()])
    bias = torch.tensor([2**30, -(2**30)], dtype=torch.int32)
    assert torch.equal(backend.linear_u8s8_s32(x, 0, weight, bias), exact(x, 0, weight, bias))
    # With zero point 255 the sums cancel to 0 though both terms are at their largest.
    assert backend.linear_u8s8_s32(x, 255, weight, None).tolist() == [[0, 0]]


def test_a_larger_k_is_refused(backend: Backend) -> None:
    k = reference.MAX_K + 1
    with pytest.raises(ValueError, match="may overflow int32"):
        backend.linear_u8s8_s32(torch.zeros(1, k, dtype=torch.uint8), 0, torch.zeros(1, k, dtype=torch.int8), None)


def layout(x: Tensor, kind: str) -> Tensor:
    """The same values in another memory layout."""
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "every-second-column":
        wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    if kind == "offset":
        return torch.cat([x.new_full((3,), 9), x.flatten()])[3:].view(x.shape)
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("kind", ["transposed", "every-second-column", "offset", "expanded"])
def test_a_layout_that_is_not_contiguous_is_read_right(backend: Backend, kind: str) -> None:
    x, weight = layout(activations(9, 70), kind), weights(19, 70)
    assert torch.equal(backend.linear_u8s8_s32(x, 3, weight, None), exact(x.contiguous(), 3, weight))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (1, 2, 1, 6)], ids=str)
def test_leading_dimensions_are_kept(backend: Backend, shape: tuple[int, ...]) -> None:
    x, weight = torch.randint(0, 256, shape, dtype=torch.uint8), weights(5, 6)
    sums = backend.linear_u8s8_s32(x, 1, weight, None)
    assert sums.shape == (*shape[:-1], 5)
    assert torch.equal(sums.reshape(-1, 5), exact(x.reshape(-1, 6), 1, weight))


def multipliers(n: int, k: int) -> Tensor:
    """Such that outputs spread over, and a little beyond, the 256 steps."""
    spread = torch.rand(n, generator=torch.Generator().manual_seed(5)) + 0.5
    return spread * (128 / (255 * 127 * max(k, 1) ** 0.5))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (5, 33, 70), (17, 65, 513), (3, 4, 0)], ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
def test_u8_outputs_are_those_of_the_reference(backend: Backend, m: int, n: int, k: int, relu: bool) -> None:
    x, weight, factors = activations(m, k), weights(n, k), multipliers(n, k)
    bias = torch.randint(-9999, 9999, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    bottom = 60 if relu else 0
    q = backend.linear_u8s8_u8(x, 128, weight, bias, factors, 60, bottom, 255)
    # 0 steps apart: every backend's sums go through our own requantisation, none through the library's.
    assert torch.equal(q, reference.linear_u8s8_u8(x, 128, weight, bias, factors, 60, bottom, 255))
    # Against float64, where only a product that float32 rounds across a tie may differ.
    real = exact(x, 128, weight, bias).double() * factors.double()
    ideal = (torch.round(real) + 60).clamp(bottom, 255)
    assert (q.double() - ideal).abs().max() <= 1
    assert int(q.min()) >= bottom


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (5, 33, 70), (0, 3, 4), (3, 4, 0)], ids=str)
def test_f32_outputs_are_bitwise_those_of_the_reference(backend: Backend, m: int, n: int, k: int) -> None:
    x, weight, factors = activations(m, k), weights(n, k), multipliers(n, k)
    y = backend.linear_u8s8_f32(x, 7, weight, None, factors)
    assert y.dtype == torch.float32
    assert torch.equal(y, exact(x, 7, weight).float() * factors)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 700, 1024), (16, 515, 600), (300, 130, 513)], ids=str)
def test_sums_do_not_depend_on_the_number_of_threads(backend: Backend, threads: int, m: int, n: int, k: int) -> None:
    if FAST:
        pytest.skip("OCTET_FAST_TESTS=1: layers large enough for threads are slow under emulation")
    torch.set_num_threads(threads)
    x, weight = activations(m, k), weights(n, k)
    expected = (x.double() @ weight.double().t()).int()  # exact below 2**53
    assert torch.equal(backend.linear_u8s8_s32(x, 0, weight, None), expected)


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        pytest.param(torch.zeros(2, 3), weights(4, 3), "expected", id="float-input"),
        pytest.param(activations(2, 3), weights(4, 5), r"expected \(\.\.\., 5\)", id="wrong-features"),
        pytest.param(activations(2, 3), weights(4, 3).int(), "must be", id="int32-weight"),
        pytest.param(activations(2, 3), weights(4, 3)[0], "must be", id="vector-weight"),
        pytest.param(torch.tensor(3, dtype=torch.uint8), weights(4, 3), "has shape", id="scalar-input"),
    ],
)
def test_bad_operands_are_refused(backend: Backend, x: Tensor, weight: Tensor, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        backend.linear_u8s8_s32(x, 0, weight, None)


def test_a_weight_on_the_meta_device_is_refused(backend: Backend) -> None:
    weight = torch.empty(4, 3, dtype=torch.int8, device="meta")
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        backend.linear_u8s8_s32(activations(2, 3), 0, weight, None)


@pytest.mark.parametrize("name", ["q_bias", "multiplier"])
def test_a_vector_of_the_wrong_length_is_refused(compiled: Backend, name: str) -> None:
    bias = torch.zeros(5 if name == "q_bias" else 4, dtype=torch.int32)
    factors = torch.ones(5 if name == "multiplier" else 4)
    with pytest.raises(ValueError, match=rf"{name} has shape \[5\], expected \(4,\)"):
        compiled.linear_u8s8_f32(activations(2, 3), 0, weights(4, 3), bias, factors)


def test_every_backend_says_how_it_multiplies(backend: Backend) -> None:
    assert backend.route(weights(4, 8))


def test_at_least_the_default_backend_is_tested() -> None:
    assert dispatch.available()[dispatch.current().name] == ""

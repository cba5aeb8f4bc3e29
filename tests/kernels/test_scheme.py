"""QScheme, QParams, choose_qparams and quantize_weight: invariants, bounds that follow from them, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant.kernels import (
    ACTIVATION_U8,
    WEIGHT_S8,
    QParams,
    QScheme,
    choose_qparams,
    quantize_weight,
    weight_scheme,
)
from quant.kernels.scheme import SCALE_MIN
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
reals = st.floats(min_value=-LARGEST, max_value=LARGEST, width=32, allow_nan=False)
unit = st.floats(min_value=0.0, max_value=1.0)
SCHEMES = [
    pytest.param(ACTIVATION_U8, id="u8-affine"),
    pytest.param(QScheme(torch.uint8, 0, 127, symmetric=False), id="u7-affine"),
    pytest.param(QScheme(torch.uint8, 0, 255, symmetric=True), id="u8-symmetric"),
    pytest.param(QScheme(torch.int8, -128, 127, symmetric=False), id="s8-affine"),
    pytest.param(weight_scheme(8, axis=None), id="s8-symmetric"),
    pytest.param(weight_scheme(4, axis=None), id="s4-symmetric"),
]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def ordered(a: float, b: float) -> tuple[Tensor, Tensor]:
    return scalar(min(a, b)), scalar(max(a, b))


def inside(qparams: QParams, fractions: list[float]) -> Tensor:
    """Points between the smallest and the largest real that qparams can represent."""
    scheme = qparams.scheme
    ends = torch.tensor([scheme.quant_min, scheme.quant_max], dtype=scheme.dtype)
    low, high = qparams.dequantize(ends).double().tolist()
    return torch.tensor([low + f * (high - low) for f in fractions], dtype=torch.float64).float()


@pytest.mark.parametrize("scheme", SCHEMES)
@given(a=reals, b=reals, fractions=st.lists(unit, min_size=1, max_size=8))
def test_round_trip_is_within_half_a_step_inside_the_range(
    scheme: QScheme, a: float, b: float, fractions: list[float]
) -> None:
    qparams = choose_qparams(*ordered(a, b), scheme)
    x = inside(qparams, fractions)
    x = x[torch.isfinite(x)]  # the outermost step of the hugest ranges is beyond float32
    back = qparams.dequantize(qparams.quantize(x))
    # Half a step, and what float32 loses in x * (1 / scale) of up to 256 steps: four roundings of 2**-24 each.
    step = float(qparams.scale)
    assert (back.double() - x.double()).abs().max().item() <= step * (0.5 + 256 * 4 * 2.0**-24) if x.numel() else True


@pytest.mark.parametrize("scheme", SCHEMES)
@given(a=reals, b=reals)
def test_zero_is_exact(scheme: QScheme, a: float, b: float) -> None:
    qparams = choose_qparams(*ordered(a, b), scheme)
    q = qparams.quantize(torch.zeros(3))
    assert torch.equal(q.int(), qparams.zero_point.expand(3))
    assert torch.equal(qparams.dequantize(q), torch.zeros(3))


@pytest.mark.parametrize("scheme", SCHEMES)
@given(a=reals, b=reals, values=st.lists(reals, min_size=2, max_size=16))
def test_quantisation_is_monotone(scheme: QScheme, a: float, b: float, values: list[float]) -> None:
    q = choose_qparams(*ordered(a, b), scheme).quantize(torch.tensor(sorted(values))).int()
    assert bool((q[1:] >= q[:-1]).all())


@pytest.mark.parametrize("scheme", SCHEMES)
@given(a=reals, b=reals)
def test_the_range_is_covered_to_half_a_step(scheme: QScheme, a: float, b: float) -> None:
    low, high = ordered(a, b)
    qparams = choose_qparams(low, high, scheme)
    ends = torch.stack([low, high])
    # In steps, so that nothing overflows: one half for the scale's end, one for the rounded zero point.
    back = (qparams.quantize(ends).int() - qparams.zero_point).double()
    assert ((ends.double() / qparams.scale.double()) - back).abs().max() <= 0.5 + 0.5 + 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
@given(a=reals, b=reals)
def test_quantised_values_survive_a_round_trip(scheme: QScheme, a: float, b: float) -> None:
    qparams = choose_qparams(*ordered(a, b), scheme)
    q = torch.arange(scheme.quant_min, scheme.quant_max + 1).to(scheme.dtype)
    x = qparams.dequantize(q)
    finite = torch.isfinite(x)
    assert torch.equal(qparams.quantize(x)[finite], q[finite])


def test_the_widest_float32_range_does_not_overflow() -> None:
    qparams = choose_qparams(scalar(-LARGEST), scalar(LARGEST), ACTIVATION_U8)
    assert math.isfinite(float(qparams.scale))
    assert int(qparams.zero_point) in (127, 128)


def test_a_subnormal_range_gets_the_smallest_scale_whose_reciprocal_is_finite() -> None:
    qparams = choose_qparams(scalar(0.0), scalar(1e-42), ACTIVATION_U8)
    assert float(qparams.scale) == SCALE_MIN
    assert torch.isfinite(1.0 / qparams.scale)
    assert int(qparams.quantize(scalar(1e-42))) == 0


def test_an_all_zero_range_represents_zero() -> None:
    qparams = choose_qparams(scalar(0.0), scalar(0.0), ACTIVATION_U8)
    assert float(qparams.scale) == SCALE_MIN
    assert int(qparams.zero_point) == 0


@pytest.mark.parametrize(
    ("low", "high", "zero_point"), [(1.0, 5.0, 0), (-5.0, -1.0, 255)], ids=["positive", "negative"]
)
def test_a_one_sided_range_is_widened_to_zero(low: float, high: float, zero_point: int) -> None:
    qparams = choose_qparams(scalar(low), scalar(high), ACTIVATION_U8)
    assert int(qparams.zero_point) == zero_point
    assert float(qparams.scale) == pytest.approx(5.0 / 255, rel=1e-6)


@pytest.mark.parametrize(("value", "q"), [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (-2.5, -2)])
def test_ties_round_to_even(value: float, q: int) -> None:
    qparams = QParams(scalar(1.0), torch.tensor(0, dtype=torch.int32), weight_scheme(8, axis=None))
    assert int(qparams.quantize(scalar(value))) == q


def test_infinities_clamp_and_nan_becomes_zero_point() -> None:
    qparams = QParams(scalar(0.1), torch.tensor(7, dtype=torch.int32), ACTIVATION_U8)
    q = qparams.quantize(torch.tensor([math.inf, -math.inf, math.nan, 1e38, -1e38]))
    assert q.tolist() == [255, 0, 7, 255, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["minimum", "maximum"])
def test_a_range_that_is_not_finite_is_refused(bad: float, where: str) -> None:
    ends = {"minimum": scalar(-1.0), "maximum": scalar(1.0), where: scalar(bad)}
    with pytest.raises(ValueError, match="must be finite"):
        choose_qparams(ends["minimum"], ends["maximum"], ACTIVATION_U8)


def test_a_range_that_is_upside_down_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds maximum"):
        choose_qparams(scalar(1.0), scalar(-1.0), ACTIVATION_U8)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "symmetric", "words"),
    [
        pytest.param(torch.int32, 0, 255, False, "expected torch.uint8 or torch.int8", id="int32"),
        pytest.param(torch.uint8, -1, 255, False, "outside torch.uint8", id="below-dtype"),
        pytest.param(torch.int8, -128, 128, False, "outside torch.int8", id="above-dtype"),
        pytest.param(torch.uint8, 7, 7, False, "is empty", id="one-value"),
        pytest.param(torch.uint8, 0, 127, True, "both sides of its zero point 128", id="symmetric-one-sided"),
        pytest.param(torch.int8, 0, 127, True, "both sides of its zero point 0", id="symmetric-from-zero"),
    ],
)
def test_a_scheme_that_cannot_work_is_refused(
    dtype: torch.dtype, low: int, high: int, symmetric: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        QScheme(dtype, low, high, symmetric)


@pytest.mark.parametrize("bits", [1, 9], ids=str)
def test_weight_bits_outside_2_to_8_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 8"):
        weight_scheme(bits)


ZERO = torch.tensor(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("scale", "zero_point", "scheme", "words"),
    [
        pytest.param(scalar(0.0), ZERO, ACTIVATION_U8, "positive and finite", id="scale-zero"),
        pytest.param(scalar(-1.0), ZERO, ACTIVATION_U8, "positive and finite", id="scale-negative"),
        pytest.param(scalar(math.inf), ZERO, ACTIVATION_U8, "positive and finite", id="scale-inf"),
        pytest.param(scalar(math.nan), ZERO, ACTIVATION_U8, "positive and finite", id="scale-nan"),
        pytest.param(scalar(1.0).double(), ZERO, ACTIVATION_U8, "expected float32 and int32", id="scale-float64"),
        pytest.param(scalar(1.0), ZERO.long(), ACTIVATION_U8, "expected float32 and int32", id="zero-point-int64"),
        pytest.param(scalar(1.0), ZERO + 256, ACTIVATION_U8, "lies outside", id="zero-point-above"),
        pytest.param(scalar(1.0), ZERO - 1, ACTIVATION_U8, "lies outside", id="zero-point-below"),
        pytest.param(torch.ones(3), ZERO.expand(3), ACTIVATION_U8, "shape", id="channels-without-axis"),
        pytest.param(scalar(1.0), ZERO, WEIGHT_S8, "shape", id="axis-without-channels"),
        pytest.param(torch.ones(3), ZERO.expand(2), WEIGHT_S8, "shape", id="lengths-differ"),
    ],
)
def test_qparams_that_break_an_invariant_are_refused(
    scale: Tensor, zero_point: Tensor, scheme: QScheme, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        QParams(scale, zero_point, scheme)


def test_qparams_compare_by_value() -> None:
    a, b = (choose_qparams(scalar(-1.0), scalar(1.0), ACTIVATION_U8) for _ in range(2))
    assert a == b
    assert a != choose_qparams(scalar(-1.0), scalar(2.0), ACTIVATION_U8)
    assert a != 3


def test_an_axis_that_the_tensor_lacks_is_refused() -> None:
    qparams = QParams(torch.ones(3), torch.zeros(3, dtype=torch.int32), weight_scheme(8, axis=1))
    with pytest.raises(ValueError, match="axis 1 does not exist"):
        qparams.quantize(torch.ones(3))


@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8], ids=lambda bits: f"{bits}bit")
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 7), 0), ((5, 7), 1), ((5, 7), -1), ((4, 3, 2, 2), 0), ((4, 3, 2, 2), 1), ((6,), 0)],
    ids=["linear", "columns", "last", "conv", "conv-transposed", "vector"],
)
def test_each_channel_of_a_weight_uses_its_whole_range(bits: int, shape: tuple[int, ...], axis: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10
    q_weight, scale = quantize_weight(weight, bits=bits, axis=axis)
    assert q_weight.dtype == torch.int8
    assert q_weight.shape == weight.shape
    assert q_weight.is_contiguous()
    top = 2 ** (bits - 1) - 1
    channels = q_weight.movedim(axis, 0).reshape(shape[axis], -1).int()
    assert channels.abs().amax(dim=1).tolist() == [top] * shape[axis]
    assert int(channels.min()) >= -top
    error = (q_weight.movedim(axis, -1) * scale - weight.movedim(axis, -1)).abs()
    assert bool((error <= scale * (0.5 + 1e-5)).all())


def test_a_weight_channel_of_zeros_has_scale_one() -> None:
    weight = torch.randn(3, 4)
    weight[1] = 0
    q_weight, scale = quantize_weight(weight)
    assert float(scale[1]) == 1.0
    assert q_weight[1].tolist() == [0] * 4


def test_negating_a_weight_negates_its_integers() -> None:
    weight = torch.randn(8, 33)
    q_weight, scale = quantize_weight(weight)
    q_negative, scale_negative = quantize_weight(-weight)
    assert torch.equal(q_negative, -q_weight)
    assert torch.equal(scale_negative, scale)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=["no-outputs", "no-inputs"])
def test_an_empty_weight_is_quantised(shape: tuple[int, int]) -> None:
    q_weight, scale = quantize_weight(torch.empty(shape))
    assert q_weight.shape == shape
    assert scale.shape == shape[:1]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(2, 2)
    weight[1, 0] = bad
    with pytest.raises(ValueError, match="finite"):
        quantize_weight(weight)


def test_a_weight_that_requires_grad_gives_plain_integers() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    q_weight, scale = quantize_weight(weight)
    assert not q_weight.requires_grad
    assert not scale.requires_grad

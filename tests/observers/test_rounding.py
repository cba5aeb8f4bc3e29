"""The one arithmetic of all fake quantisers, against QParams' to the bit."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels import ACTIVATION_U8, QParams, QScheme, choose_qparams, reference_training, weight_scheme
from quant.observers import _rounding
from quant.observers._rounding import gradient_inside, round_trip, scale_and_zero_point
from torch import Tensor

EXAMPLES = 20 if os.environ.get("OCTET_FAST_TESTS") == "1" else 200
SCHEMES = {
    "u8": ACTIVATION_U8,
    "u8_symmetric": QScheme(torch.uint8, 0, 255, symmetric=True),
    "u7": QScheme(torch.uint8, 0, 127, symmetric=False),
    "s8_affine": QScheme(torch.int8, -128, 127, symmetric=False),
    **{f"s{bits}": weight_scheme(bits, None) for bits in range(2, 9)},
}
every_scheme = pytest.mark.parametrize("scheme", list(SCHEMES.values()), ids=list(SCHEMES))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def assert_exact(x: Tensor, qparams: QParams) -> None:
    """Equal to the reference in every bit, the sign of zero included; the mask is whether clamping left x alone."""
    q = qparams.quantize(x)
    for with_mask in (True, False):
        out, mask = round_trip(x, qparams.scale, qparams.zero_point, qparams.scheme, with_mask=with_mask)
        assert torch.equal(bits(out), bits(qparams.dequantize(q)))
        assert (mask is not None) == with_mask
    out, mask = round_trip(x, qparams.scale, qparams.zero_point, qparams.scheme, with_mask=True)
    scale, zero_point = qparams._broadcast(x.dim())
    free = torch.round(x * (1.0 / scale)) + zero_point
    assert mask is not None
    assert torch.equal(mask, (free >= qparams.scheme.quant_min) & (free <= qparams.scheme.quant_max))


@every_scheme
@settings(max_examples=EXAMPLES)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=30),
    ends=st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).map(sorted),
)
def test_any_values_at_any_range(scheme: QScheme, values: list[float], ends: list[float]) -> None:
    assert_exact(torch.tensor(values), choose_qparams(torch.tensor(ends[0]), torch.tensor(ends[1]), scheme))


@every_scheme
def test_every_half_step_and_its_neighbours(scheme: QScheme) -> None:
    """Ties round to even: shifting the arithmetic by half a step, or rounding half up, changes these."""
    qparams = choose_qparams(torch.tensor(-3.0), torch.tensor(5.0), scheme)
    halves = torch.arange(-600, 601).float() / 2 * qparams.scale
    x = torch.cat(
        (halves, torch.nextafter(halves, torch.tensor(math.inf)), torch.nextafter(halves, -torch.tensor(math.inf)))
    )
    assert_exact(x, qparams)


def test_a_shift_of_half_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard itself: with arithmetic that floors where it should round, the comparison fails."""
    monkeypatch.setattr(_rounding, "compiled", lambda x: False)
    monkeypatch.setattr(_rounding.torch, "round", torch.floor)
    qparams = choose_qparams(torch.tensor(-3.0), torch.tensor(5.0), ACTIVATION_U8)
    x = torch.linspace(-3, 5, 100)
    out, _ = round_trip(x, qparams.scale, qparams.zero_point, ACTIVATION_U8, with_mask=False)
    monkeypatch.undo()
    expected = qparams.dequantize(qparams.quantize(x))
    assert float((out - expected).abs().max()) > 0.9 * float(qparams.scale)


def test_special_values() -> None:
    qparams = choose_qparams(torch.tensor(-1.0), torch.tensor(3.0), ACTIVATION_U8)
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, -1e-30, 3e38, -3e38, 1e-44])
    assert_exact(x, qparams)
    out, mask = round_trip(x, qparams.scale, qparams.zero_point, ACTIVATION_U8, with_mask=True)
    assert mask is not None
    assert mask.tolist() == [False, False, False, True, True, False, False, True]
    assert float(out[0]) == 0.0
    assert not bool(torch.signbit(out[3:5]).any())


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel(axis: int) -> None:
    x = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0))
    for scheme in (weight_scheme(4, axis), replace(ACTIVATION_U8, axis=axis)):
        assert_exact(x, choose_qparams(-torch.tensor([0.1, 1.0, 10.0]), torch.tensor([0.2, 1.0, 0.0]), scheme))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 3),
        lambda x: x[:, :, ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
    ],
    ids=["contiguous", "channels_last", "transposed", "strided", "expanded"],
)
def test_pieces_cover_every_layout(monkeypatch: pytest.MonkeyPatch, layout) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(_rounding, "CHUNK", 7)
    monkeypatch.setattr(_rounding, "compiled", lambda x: False)
    x = layout(torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)))
    assert_exact(x, choose_qparams(torch.tensor(-1.0), torch.tensor(1.5), ACTIVATION_U8))
    assert_exact(x[:0], choose_qparams(torch.tensor(-1.0), torch.tensor(1.5), ACTIVATION_U8))


@every_scheme
@settings(max_examples=EXAMPLES)
@given(ends=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2).map(sorted))
def test_scale_and_zero_point_are_those_of_choose_qparams(scheme: QScheme, ends: list[float]) -> None:
    low, high = torch.tensor(ends[0]), torch.tensor(ends[1])
    expected = choose_qparams(low, high, scheme)
    scale, zero_point = scale_and_zero_point(low, high, scheme)
    assert QParams(scale, zero_point, scheme) == expected


@every_scheme
def test_no_data_gives_a_scale_that_cannot_pass_for_one(scheme: QScheme) -> None:
    scale, _ = scale_and_zero_point(torch.tensor([math.inf, -1.0]), torch.tensor([-math.inf, 1.0]), scheme)
    assert torch.isnan(scale).tolist() == [True, False]


@every_scheme
@pytest.mark.parametrize("clamp", [(-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0), (-1.0, 1.0)], ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_rounding_after_a_clamp(
    monkeypatch: pytest.MonkeyPatch, scheme: QScheme, clamp: tuple[float, float], compiled: bool
) -> None:
    """One pass is the two steps one after the other, values and gradients, in both implementations."""
    if not compiled:
        monkeypatch.setattr(_rounding, "compiled", lambda x: False)
    qparams = choose_qparams(torch.tensor(-3.0), torch.tensor(5.0), scheme)
    ends = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -0.0, 6.0, -1.0, 1.0])
    x = torch.cat((torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 5, ends))
    out, mask = round_trip(x, qparams.scale, qparams.zero_point, scheme, with_mask=True, clamp=clamp)
    assert torch.equal(out, qparams.dequantize(qparams.quantize(x.clamp(*clamp))))
    assert not bool(torch.signbit(out[out == 0]).any())
    _, inside = round_trip(x.clamp(*clamp), qparams.scale, qparams.zero_point, scheme, with_mask=True)
    assert mask is not None
    assert inside is not None
    assert torch.equal(mask, inside & (x > clamp[0]) & (x < clamp[1]))
    grad = torch.where(torch.isfinite(x), x, math.inf)
    assert torch.equal(gradient_inside(grad, mask), torch.where(mask, grad, torch.zeros(())))


CLAMPS = ((0, 255, -math.inf, math.inf, True), (0, 15, 0.0, 1.0, True), (0, 255, 0.0, 6.0, False))


def test_the_operator_is_its_reference() -> None:
    """Per tensor and per channel, in every layout, values and mask to the bit."""
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    scale, zero_point = torch.tensor([0.01, 0.1, 1.0, 0.02]), torch.tensor([0, 7, 128, 255], dtype=torch.int32)
    for values in (x, x.to(memory_format=torch.channels_last), x[..., ::2], x[:1].expand(4, -1, -1, -1), x[:0]):
        for axis, numbers in ((1, (scale, zero_point)), (-3, (scale, zero_point)), (None, (scale[1], zero_point[1]))):
            for arguments in CLAMPS:
                got = torch.ops.octet.fake_quantize(values, *numbers, axis, *arguments)
                expected = reference_training.fake_quantize(values, *numbers, axis, *arguments)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        mask = values > 0
        grad = torch.ones(()).expand(values.shape)
        assert torch.equal(torch.ops.octet.masked_gradient(grad, mask), mask.float())

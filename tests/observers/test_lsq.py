"""LSQ and LSQ+: gradients against the papers' closed forms, by hand and by finite differences, and their starts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from quant.kernels import ACTIVATION_U8, WEIGHT_S8, QScheme, weight_scheme
from quant.observers import HistogramObserver, LSQFakeQuantize, LSQPlusFakeQuantize, NoDataSeen, ScaleCollapsed
from torch import Tensor, nn

U4 = QScheme(torch.uint8, 0, 15, symmetric=False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(
    module: LSQFakeQuantize, scale: float, zero_point: int | None = None, offset: float | None = None
) -> LSQFakeQuantize:
    """The module past its first batch, with these parameters."""
    module.initialised.fill_(True)
    with torch.no_grad():
        module.scale.fill_(scale)
        if zero_point is not None:
            module.zero_point.fill_(zero_point)
        if offset is not None:
            assert isinstance(module, LSQPlusFakeQuantize)
            assert module.offset is not None
            module.offset.fill_(offset)
    return module


def grads(module: LSQFakeQuantize, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    module(x).backward(upstream)
    assert x.grad is not None
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("zero_point", [0, 5], ids=["unsigned", "signed"])
def test_lsq_gradients_are_the_papers(zero_point: int) -> None:
    """Equation 3, a value at a time."""
    scale, x, upstream = 0.3, normal(200) * 3, normal(200, seed=1)
    found = grads(started(LSQFakeQuantize(U4), scale, zero_point), x, upstream)
    q_n, q_p = zero_point, 15 - zero_point
    expected_scale, expected_x = 0.0, []
    for value, g in zip(x.tolist(), upstream.tolist(), strict=True):
        v = value / scale
        inside = -q_n <= round(v) <= q_p
        slope = round(v) - v if inside else (q_p if v > 0 else -q_n)
        expected_scale += g * slope
        expected_x.append(g if inside else 0.0)
    expected_scale /= math.sqrt(x.numel() * q_p)
    assert found["scale"].item() == pytest.approx(expected_scale, rel=1e-4)
    assert torch.allclose(found["x"], torch.tensor(expected_x))


def test_the_gradient_scale_counts_weights_or_features_of_a_sample() -> None:
    per_sample = LSQFakeQuantize(ACTIVATION_U8)
    weight = LSQFakeQuantize(weight_scheme(4, 0), channels=3)
    tensor_weight = LSQFakeQuantize(weight_scheme(4, None), per_sample=False)
    expected = {per_sample: (10, 255), weight: (20, 7), tensor_weight: (60, 7)}
    shapes = {per_sample: (6, 10), weight: (3, 20), tensor_weight: (6, 10)}
    for module, (count, steps) in expected.items():
        started(module, 1e-3)
        x = torch.full(shapes[module], 100.0)
        found = grads(module, x, torch.ones_like(x))["scale"]
        clamped = x.numel() / found.numel() * steps
        assert torch.allclose(found, torch.full_like(found, clamped / math.sqrt(count * steps)))


def test_lsq_clamped_values_are_linear_in_the_scale() -> None:
    """Where everything clamps, the function is smooth in s and finite differences must agree."""
    x = torch.tensor([50.0, -50.0, 70.0])
    module = started(LSQFakeQuantize(U4), 0.25, 6)
    upstream = torch.tensor([1.0, 2.0, 3.0])
    g = grads(module, x, upstream)["scale"].item() * math.sqrt(x.numel() * 9)
    outs = []
    for scale in (0.26, 0.24):
        outs.append((started(module, scale)(x) * upstream).sum().item())
    assert g == pytest.approx((outs[0] - outs[1]) / 0.02, rel=1e-4)


def surrogate(x: Tensor, scale: Tensor, offset: Tensor, levels: int) -> Tensor:
    """LSQ+ with what rounding added held constant: smooth in x, scale and offset between its kinks."""
    v = x / scale
    residue = (torch.round(v) - v).detach()
    inside = scale * (v + residue)
    low, high = offset, offset + levels * scale
    zero_point = torch.round(-offset / scale)
    q = torch.round(v) + zero_point
    return torch.where(q < 0, low, torch.where(q > levels, high, inside))


def test_lsq_plus_gradients_are_those_of_the_surrogate() -> None:
    x, upstream = normal(300) * 3, normal(300, seed=1)
    scale, offset = 0.3, -1.2  # -offset / scale is whole, so the surrogate's ends are the integers'
    module = started(LSQPlusFakeQuantize(U4), scale, offset=offset)
    found = grads(module, x, upstream)
    leaf_x, leaf_s, leaf_b = (t.double().requires_grad_() for t in (x, torch.tensor(scale), torch.tensor(offset)))
    out = surrogate(leaf_x, leaf_s, leaf_b, 15)
    assert torch.allclose(out.float(), module(x), atol=1e-5)
    out.backward(upstream.double())
    g = 1 / math.sqrt(x.numel() * 15)
    assert torch.allclose(found["x"], leaf_x.grad.float())
    assert found["scale"].item() == pytest.approx(leaf_s.grad.item() * g, rel=1e-4)
    assert found["offset"].item() == pytest.approx(leaf_b.grad.item() * g, rel=1e-4)


def test_the_surrogate_is_what_gradcheck_differentiates() -> None:
    """The closed forms above come from a function whose analytic and numeric derivatives agree."""
    x = torch.tensor([-9.0, -2.03, -0.1, 0.4, 1.33, 8.0], dtype=torch.float64)
    scale, offset = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, -1.2))
    clamped = x[[0, 5]].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, s, b: surrogate(a, s, b, 15), (clamped, scale, offset))


def test_per_channel_gradients_are_each_channels_own() -> None:
    x, upstream = normal(3, 50) * 2, normal(3, 50, seed=1)
    for kind, scheme in ((LSQFakeQuantize, weight_scheme(4, 0)), (LSQPlusFakeQuantize, replace(U4, axis=0))):
        together = kind(scheme, channels=3)
        together(x)
        found = grads(together, x, upstream)
        for index in range(3):
            alone = kind(replace(scheme, axis=None), per_sample=False)
            alone(x[index])
            single = grads(alone, x[index], upstream[index])
            assert torch.equal(found["x"][index], single["x"])
            for name in set(found) - {"x"}:
                assert torch.allclose(found[name][index], single[name], rtol=1e-4), name


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
def test_an_offset_beyond_zero_moves_only_back(sign: float) -> None:
    """Zero stays in range, so an offset that would leave it out acts through nothing and must not drift on."""
    scale = 0.5
    offset = 0.7 if sign > 0 else -15 * scale - 0.7
    module = started(LSQPlusFakeQuantize(U4), scale, offset=offset)
    assert int(module.qparams().zero_point) == (0 if sign > 0 else 15)
    outside = torch.tensor([100.0, -100.0])
    away = grads(module, outside, -sign * torch.ones(2))["offset"].item()
    back = grads(module, outside, sign * torch.ones(2))["offset"].item()
    assert away == 0.0
    assert back * sign > 0
    slope = grads(module, outside, torch.tensor([1.0, 1.0]))["scale"].item() * math.sqrt(2 * 15)
    assert slope == pytest.approx(15.0 if sign > 0 else -15.0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_starts_where_the_paper_does(bits: int) -> None:
    weight = normal(4, 50)
    module = LSQFakeQuantize(weight_scheme(bits), channels=4)
    module(weight)
    q_p = 2 ** (bits - 1) - 1
    assert torch.allclose(module.scale, 2 * weight.abs().mean(dim=1) / math.sqrt(q_p))


@pytest.mark.parametrize(
    ("symmetric", "low", "expected"), [(False, 0.0, 0), (False, -1.0, 64), (False, -3.0, 128), (True, -1.0, 128)]
)
def test_lsq_takes_the_zero_point_of_the_first_batch(symmetric: bool, low: float, expected: int) -> None:
    module = LSQFakeQuantize(replace(ACTIVATION_U8, symmetric=symmetric))
    module(torch.tensor([low, 3.0 - 1e-4 * (low == -3.0)]))
    assert int(module.zero_point) == expected


def test_lsq_plus_starts_where_the_paper_does() -> None:
    x = normal(5000) + 0.5
    module, best = LSQPlusFakeQuantize(U4), HistogramObserver(U4)
    module(x)
    best(x)
    assert module.qparams() == best.qparams()
    weight = normal(4, 500)
    module = LSQPlusFakeQuantize(weight_scheme(4), channels=4)
    module(weight)
    mean, std = weight.mean(dim=1), weight.std(dim=1, correction=0)
    assert module.offset is None
    assert torch.allclose(module.scale, torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / 7)


def test_starting_happens_once_and_again_after_reset() -> None:
    module = LSQFakeQuantize()
    module(normal(10))
    before = module.scale.detach().clone()
    module(100 * normal(10))
    assert torch.equal(module.scale, before)
    module.reset()
    module(100 * normal(10))
    assert float(module.scale.detach()) > 50 * float(before)


@pytest.mark.parametrize("kind", [LSQFakeQuantize, LSQPlusFakeQuantize])
def test_a_start_without_data_is_an_error_and_zeros_are_not(kind: type[LSQFakeQuantize]) -> None:
    with pytest.raises(NoDataSeen, match="no finite value"):
        kind()(torch.tensor([math.nan, math.inf]))
    module = kind()
    assert torch.equal(module(torch.zeros(4)), torch.zeros(4))
    assert float(module.qparams().scale) == 1.0
    dirty, clean = kind(), kind()
    dirty(torch.tensor([math.nan, 1.0, -1.5, math.inf]))
    clean(torch.tensor([1.0, -1.5]))
    assert dirty.qparams() == clean.qparams()


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("kind", [LSQFakeQuantize, LSQPlusFakeQuantize])
def test_a_scale_that_collapsed_is_an_error_that_names_the_layer(kind: type[LSQFakeQuantize], value: float) -> None:
    module = kind()
    module.name = "block.2"
    module(normal(10))
    with torch.no_grad():
        module.scale.fill_(value)
    with pytest.raises(ScaleCollapsed, match=r"'block\.2'.*positive and finite"):
        module(normal(10))
    with pytest.raises(ScaleCollapsed):
        module.qparams()


def test_an_offset_that_is_not_finite_is_an_error() -> None:
    module = LSQPlusFakeQuantize()
    module(normal(10))
    assert module.offset is not None
    with torch.no_grad():
        module.offset.fill_(math.nan)
    with pytest.raises(ScaleCollapsed, match="offset"):
        module(normal(10))


def test_frozen_scales_get_no_gradient() -> None:
    module = LSQPlusFakeQuantize()
    module(normal(10))
    module.set_observing(False)
    assert set(grads(module, normal(10), torch.ones(10))) == {"x"}


@pytest.mark.parametrize(("scheme", "channels"), [(WEIGHT_S8, None), (ACTIVATION_U8, 3)])
def test_channels_go_with_an_axis(scheme: QScheme, channels: int | None) -> None:
    with pytest.raises(ValueError, match="channels"):
        LSQFakeQuantize(scheme, channels=channels)


@pytest.mark.parametrize("kind", [LSQFakeQuantize, LSQPlusFakeQuantize])
def test_learning_lowers_the_error_of_a_bad_start(kind: type[LSQFakeQuantize]) -> None:
    x = normal(2000)
    module = started(kind(U4), 1.0, zero_point=7, offset=-7.0 if kind is LSQPlusFakeQuantize else None)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(400):
        loss = (module(x) - x).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]
    assert isinstance(module.scale, nn.Parameter)

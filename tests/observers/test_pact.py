"""PACT: equations 1 to 3 of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from quant.kernels import ACTIVATION_U8, WEIGHT_S8, QScheme, choose_qparams, weight_scheme
from quant.observers import PACTFakeQuantize, ScaleCollapsed
from torch import Tensor


def clip(x: Tensor, alpha: Tensor) -> Tensor:
    """Equation 1 as it is written, whose derivative equation 3 is."""
    return 0.5 * (x.abs() - (x - alpha).abs() + alpha)


def test_rounds_to_the_steps_of_alpha() -> None:
    x = torch.linspace(-2, 4, 1000)
    module = PACTFakeQuantize(alpha=2.5)
    qparams = choose_qparams(torch.tensor(0.0), torch.tensor(2.5), ACTIVATION_U8)
    assert torch.equal(module(x), qparams.dequantize(qparams.quantize(x)))
    assert module.qparams() == qparams
    out = module(x).detach()
    assert float((out - clip(x, torch.tensor(2.5))).abs().max()) <= float(qparams.scale) / 2 + 1e-6


def test_gradients_are_those_of_the_clip() -> None:
    x = torch.tensor([-1.0, 0.1, 1.9, 2.1, 5.0], dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(clip, (x, alpha))
    upstream = torch.arange(1.0, 6.0)
    clip(x, alpha).backward(upstream.double())
    module, y = PACTFakeQuantize(alpha=2.0), x.detach().float().requires_grad_()
    module(y).backward(upstream)
    assert y.grad is not None
    assert module.alpha.grad is not None
    assert x.grad is not None
    assert alpha.grad is not None
    assert torch.equal(y.grad.double(), x.grad)
    assert module.alpha.grad.item() == alpha.grad.item() == 9.0


def test_the_value_alpha_itself_belongs_to_alpha() -> None:
    module, x = PACTFakeQuantize(alpha=2.0), torch.tensor([0.0, 2.0], requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert module.alpha.grad is not None
    assert x.grad.tolist() == [1.0, 0.0]
    assert module.alpha.grad.item() == 1.0


def test_a_symmetric_scheme_clips_both_ends() -> None:
    module = PACTFakeQuantize(weight_scheme(4, None), alpha=1.0)
    x = torch.tensor([-3.0, -0.5, 0.5, 3.0, 4.0], requires_grad=True)
    out = module(x)
    assert out.detach()[[0, 3]].tolist() == pytest.approx([-1.0, 1.0])
    out.backward(torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0]))
    assert x.grad is not None
    assert module.alpha.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert module.alpha.grad.item() == 1.0 + 2.0 - 1.0


def test_frozen_alpha_gets_no_gradient() -> None:
    module, x = PACTFakeQuantize(alpha=2.0), torch.tensor([1.0, 3.0], requires_grad=True)
    module.set_observing(False)
    module(x).sum().backward()
    assert module.alpha.grad is None
    assert x.grad is not None


def test_the_penalty_is_alpha_squared() -> None:
    module = PACTFakeQuantize(alpha=3.0)
    module.penalty().backward()
    assert module.alpha.grad is not None
    assert module.alpha.grad.item() == 6.0


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_an_alpha_that_collapsed_is_an_error_that_names_the_layer(value: float) -> None:
    module = PACTFakeQuantize()
    module.name = "relu3"
    with torch.no_grad():
        module.alpha.fill_(value)
    with pytest.raises(ScaleCollapsed, match="'relu3'"):
        module(torch.ones(2))


@pytest.mark.parametrize(("scheme", "alpha"), [(WEIGHT_S8, 1.0), (ACTIVATION_U8, 0.0), (ACTIVATION_U8, math.nan)])
def test_settings_that_make_no_sense_are_refused(scheme: QScheme, alpha: float) -> None:
    with pytest.raises(ValueError, match="PACTFakeQuantize"):
        PACTFakeQuantize(scheme, alpha=alpha)

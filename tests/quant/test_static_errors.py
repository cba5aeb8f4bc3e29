"""What a statically quantised model says of inputs that do not fit: the layer, what was expected and what came."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quant


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8 * 36, 4))
    return quant.quantize_static(model.eval(), [torch.randn(4, 3, 8, 8)], progress=False)


def test_another_number_of_channels_names_the_first_layer(converted: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"layer '0': q_x has 4 channels, q_weight \[8, 3, 3, 3\] expects 3"):
        converted(torch.randn(1, 4, 8, 8))


def test_another_image_size_names_the_layer_that_it_does_not_fit(converted: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"layer '4': .*expected .*288"):
        converted(torch.randn(1, 3, 9, 9))


def test_another_dtype_names_the_input(converted: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"layer 'input_0': .*expected"):
        converted(torch.randn(1, 3, 8, 8, dtype=torch.float64))


def test_a_good_call_after_a_bad_one_is_as_before(converted: nn.Module) -> None:
    x = torch.randn(1, 3, 8, 8)
    before = converted(x)
    with pytest.raises(ValueError):
        converted(torch.randn(1, 4, 8, 8))
    assert torch.equal(converted(x), before)


class CalledTwice(nn.Module):
    """One convolution at two places, of which only the second is followed by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.conv(x))).relu().mean((2, 3))


def test_a_batch_norm_is_not_folded_into_a_layer_that_is_called_elsewhere() -> None:
    torch.manual_seed(0)
    model = CalledTwice()
    model(torch.randn(64, 4, 8, 8) * 3 + 1)  # running statistics of its own
    model.eval()
    x = torch.randn(8, 4, 8, 8)
    with torch.no_grad():
        expected, got = model(x), quant.quantize_static(model, [x], progress=False)(x)
    assert float((got - expected).norm() / expected.norm()) < 0.03

"""Scales of few bits follow from what rounding does to the layer's output, where calibration saw its input."""

from __future__ import annotations

import pytest
import torch
from quant.kernels.scheme import weight_scale
from torch import Tensor, nn

import quant
from quant.static.runner import runners

LAYERS = {
    "linear": (nn.Linear(24, 8), (24,)),
    "conv": (nn.Conv2d(6, 8, 3, padding=1), (6, 7, 7)),
    "grouped": (nn.Conv2d(8, 8, 3, groups=4), (8, 9, 9)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, 2, padding=1, groups=2), (6, 5, 5)),
}


def unequal(shape: tuple[int, ...]) -> Tensor:
    """Samples whose channels differ in size by a hundred."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(64, *shape, generator=generator) * sizes


def error(model: nn.Module, data: Tensor, qconfig: quant.QConfig) -> float:
    recipe = quant.Recipe(default=qconfig)
    q = quant.quantize_static(model, data.split(16), recipe, progress=False)
    with torch.no_grad():
        return float((q(data) - model(data)).square().mean())


@pytest.mark.parametrize("per_channel", [True, False], ids=["per channel", "per tensor"])
@pytest.mark.parametrize("kind", LAYERS)
def test_few_bits_lose_less_of_the_output(kind: str, per_channel: bool) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    model, data = nn.Sequential(layer).eval(), unequal(shape)
    by_weight, largest, by_output = (
        error(model, data, quant.QConfig(weight_bits=3, per_channel=per_channel, weight_observer=observer))
        for observer in ("mse", "minmax", "auto")
    )
    # One step for all rows is a compromise, in which the diagonal of the second moments decides less.
    assert by_output < (1.0 if per_channel else 1.1) * min(by_weight, largest)


def test_eight_bits_keep_the_largest_weight() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(24, 8)).eval(), unequal((24,))
    for bits in (5, 8):
        recipe = quant.Recipe(default=quant.QConfig(weight_bits=bits))
        prepared = quant.prepare(model, data, recipe)
        assert not runners(prepared)[""].squares
        prepared(data)
        assert torch.equal(quant.convert(prepared)[0].weight_scale, weight_scale(model[0].weight.detach(), bits=bits))  # type: ignore[index, union-attr, arg-type]


def test_simulation_and_integers_have_one_scale() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), unequal((6, 9, 9))
    prepared = quant.prepare(model, data, quant.Recipe(default=quant.QConfig(weight_bits=4)))
    prepared(data)
    assert quant.parity(prepared, quant.convert(prepared), [data]).holds


def test_a_layer_called_twice_has_the_scale_of_its_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu(self.fc(x)))

    torch.manual_seed(0)
    model, data = Twice().eval(), unequal((8,))
    prepared = quant.prepare(model, data, quant.Recipe(default=quant.QConfig(weight_bits=4)))
    prepared(data)
    assert torch.equal(quant.convert(prepared).fc.weight_scale, weight_scale(model.fc.weight.detach(), bits=4))  # type: ignore[union-attr, arg-type]

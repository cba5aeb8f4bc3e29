"""What other tools lost a model on, each held here: no crash, no silent loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant.convert import convert
from quant.fuse import Plan
from quant.graph import leaves
from quant.prepare import prepare, runners
from quant.recipe import QConfig, Recipe
from quant.report import summary
from quant.static.layers import StaticLayer

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


def static(model: nn.Module, *args: Any) -> nn.Module:
    model.eval()
    with torch.no_grad():
        prepared = prepare(model, args, RECIPE)
        assert equal(prepared(*args), model(*args))
        return convert(prepared)


def equal(one: Any, other: Any) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(leaves(one), leaves(other), strict=True))


def noise(one: Any, other: Any) -> float:
    """Signal to noise of the worst output, in dB."""
    found = [
        float(10 * torch.log10(a.detach().square().sum() / (a - b).detach().square().sum().clamp(min=1e-20)))
        for a, b in zip(leaves(one), leaves(other), strict=True)
    ]
    return min(found)


class NormalisedLinear(nn.Linear):
    """An activation and a normalisation inside a layer's own forward: Detectron2's habit."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.layer_norm(super().forward(x), (self.out_features,)))


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True) + 1e-5
        return F.conv2d(x, (self.weight - mean) / std, self.bias, self.stride, self.padding)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(NormalisedLinear(8, 16), nn.Linear(16, 4)), (16, 8)),
        (nn.Sequential(StandardisedConv(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), (4, 3, 8, 8)),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), (16, 8)),
        (nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)), (16, 8)),
    ],
    ids=["norm and relu inside", "weight standardisation", "weight norm", "orthogonal"],
)
def test_a_layer_with_a_forward_of_its_own(model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 25
    assert len([m for m in converted.modules() if isinstance(m, StaticLayer)]) == 2
    assert summary(converted)["0"].outcome == "int8"


def test_prelu_keeps_its_slopes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.PReLU(8), nn.Conv2d(8, 4, 1))
    model[1].weight.data.uniform_(-1, 2)
    x = torch.randn(4, 3, 8, 8)
    assert noise(model(x), static(model, x)(x)) > 30


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(y, batch_first=True)
        return self.out(padded.mean(1))


def test_packed_sequences_run() -> None:
    torch.manual_seed(0)
    model, x, lengths = Packed(), torch.randn(4, 5, 6), torch.tensor([5, 3, 2, 4])
    converted = static(model, x, lengths)
    assert noise(model(x, lengths), converted(x, lengths)) > 25
    other = torch.tensor([2, 5, 1, 1])
    assert noise(model(x, other), converted(x, other)) > 20
    assert summary(converted)["embed"].outcome == "int8"
    assert summary(converted)["out"].outcome == "int8"


class Masked(nn.Module):
    """BERT's mask: -10000 where nothing is to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        scores = scores + (1.0 - mask[:, None, :]) * -10000.0
        return self.out(scores.softmax(-1) @ self.v(x))


def test_a_mask_does_not_eat_the_range_of_the_scores() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 6, 8)
    mask = torch.ones(4, 6)
    mask[:, 4:] = 0
    converted = static(model, x, mask)
    assert noise(model(x, mask), converted(x, mask)) > 25


def plan_of(model: nn.Module, *args: Any) -> Plan:
    return runners(prepare(model.eval(), args, RECIPE))[""].plan


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x**2,
        torch.square,
        lambda x: torch.sqrt(x.abs()),
        lambda x: torch.log(x.abs() + 1),
        lambda x: x / (x.abs() + 1),
        torch.exp,
        torch.rsqrt,
    ],
    ids=["power", "square", "square root", "logarithm", "division", "exponential", "reciprocal root"],
)
def test_functions_that_bend_the_range_stay_float(function: Any) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(function(self.a(x)))

    plan = plan_of(Between(), torch.rand(8, 4))
    assert {step.op for step in plan.steps} <= {"linear", "float", "shape", "lookup", "add"}
    assert any(step.op == "float" and step.reason for step in plan.steps)


def test_float_steps_between_integers_stand_in_the_report() -> None:
    converted = static(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 2)), torch.randn(4, 8)
    )
    report = summary(converted)
    assert report["1"].detail == "LayerNorm has no int8 kernel"
    assert report["2"].detail == "Softmax has no int8 kernel"


def test_weights_with_nan_are_refused_by_name() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(4, 4)
    model[2].weight.data[0, 0] = float("nan")
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    with pytest.raises(ValueError, match=r"layer '2': its weight holds NaN or inf"):
        convert(prepared)


def test_zeros_in_and_constant_layers_convert() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    x = torch.zeros(2, 1, 2, 2)
    converted = static(model, x)
    assert torch.allclose(converted(x), model(x), atol=1e-3)


def test_gradients_and_double_inputs_are_told_apart() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 4)
    converted = static(model, x)
    assert not any(parameter.requires_grad for parameter in converted.parameters())
    assert converted(x.requires_grad_()).shape == (4, 2)


def test_a_channel_with_vanishing_weights_keeps_its_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model[1].weight.data[1] = 1e-14
    model[1].bias.data[1] = 0.7
    x = torch.randn(4, 3, 8, 8)
    converted = static(model, x)
    assert noise(model(x), converted(x)) > 30

"""The prepared model: the user's own in all but what it watches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.capture import as_arguments
from quant.convert import convert
from quant.dynamic_decisions import NothingQuantized
from quant.prepare import prepare
from quant.recipe import QConfig, Recipe, RecipeError
from quant.report import summary
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.trees import leaves
from quant.static.runner import runners
from quant.static.simulation import simulating

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


def fused_graph_of(model: nn.Module, inputs: Any) -> Any:
    return runners(prepare(model.eval(), inputs, RECIPE))[""].fused


class Small(nn.Module):
    kind = "small"

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.drop(F.relu(self.norm(self.conv(x)))), 0.2, self.training)
        return self.fc(y.mean((2, 3)))

    def names(self) -> list[str]:
        return ["a", "b"]


def test_the_model_is_left_alone_and_the_copy_is_of_its_class() -> None:
    model, x = Small(), torch.randn(2, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    prepared = prepare(model, x, RECIPE)
    assert type(prepared) is Small
    assert prepared.names() == ["a", "b"]  # type: ignore[operator]
    assert prepared.training == model.training
    prepared(x)
    assert "forward" not in vars(model)
    assert list(model._modules) == ["conv", "norm", "drop", "fc"]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_parameters_keep_their_names_and_a_float_checkpoint_loads() -> None:
    model, x = Small(), torch.randn(2, 3, 8, 8)
    prepared = prepare(model, x, RECIPE)
    assert [name for name, _ in prepared.named_parameters()] == [name for name, _ in model.named_parameters()]
    own = [key for key in prepared.state_dict() if not key.startswith("_quant.")]
    assert own == list(model.state_dict())
    other = Small()
    prepared.load_state_dict(other.state_dict())
    assert torch.equal(prepared.conv.weight, other.conv.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"fc.weight\""):
        prepared.load_state_dict({k: v for k, v in other.state_dict().items() if k != "fc.weight"})


def test_calibration_survives_state_dict() -> None:
    model, x = Small().eval(), torch.randn(2, 3, 8, 8)
    calibrated, fresh = prepare(model, x, RECIPE), prepare(model, x, RECIPE)
    calibrated(x)
    fresh.load_state_dict(calibrated.state_dict())
    assert torch.equal(convert(fresh)(x), convert(calibrated)(x))


def test_train_and_eval_behave_as_in_the_float_model() -> None:
    model, x = Small(), torch.randn(64, 3, 8, 8)
    prepared = prepare(model, x, RECIPE).train()
    torch.manual_seed(0)
    expected = model.train()(x)
    torch.manual_seed(0)
    got = prepared(x)
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.equal(prepared.norm.running_mean, model.norm.running_mean)  # type: ignore[union-attr, arg-type]
    got.sum().backward()
    assert prepared.conv.weight.grad is not None  # type: ignore[union-attr]


def test_hooks_of_the_users_layers_run() -> None:
    model, x = Small().eval(), torch.randn(2, 3, 8, 8)
    seen: list[tuple[int, ...]] = []
    model.fc.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    prepared = prepare(model, x, RECIPE)
    assert seen == []
    prepared(x)
    assert seen == [(2, 2)]
    model.register_forward_hook(lambda module, args, output: seen.append((0,)))
    prepare(model, x, RECIPE)
    assert seen == [(2, 2)]


def test_nothing_quantized_is_an_error_with_reasons() -> None:
    with pytest.raises(NothingQuantized, match="0: LayerNorm has no int8 kernel"):
        prepare(nn.Sequential(nn.LayerNorm(4)), torch.randn(2, 4))
    with pytest.raises(NothingQuantized, match="0: the recipe says so"):
        prepare(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), Recipe({"0": None}))


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"no module matches 'encoder\.\*' -> float"):
        prepare(Small(), torch.randn(2, 3, 8, 8), Recipe({"encoder.*": None}))


def test_preparing_twice_is_an_error() -> None:
    prepared = prepare(Small(), torch.randn(2, 3, 8, 8), RECIPE)
    with pytest.raises(ValueError, match="prepared already"):
        prepare(prepared, torch.randn(2, 3, 8, 8))


def test_the_one_reserved_name_is_not_overwritten() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].add_module("_quant", nn.Identity())
    with pytest.raises(ValueError, match="0 has an attribute '_quant'"):
        prepare(model, torch.randn(2, 4))


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([torch.sigmoid(self.a(x)), torch.max_pool2d(torch.tanh(self.b(x)), 1)], 1)
        return self.c(y.transpose(2, 3))


def test_tensors_that_are_the_same_numbers_share_one_range() -> None:
    fused = fused_graph_of(Gates(), torch.randn(2, 3, 8, 8))
    names = [step.name for step in fused.steps if step.integer]
    shared = {fused.slot_of[step.output] for step in fused.steps if step.operator.name in ("cat", "pass", "max_pool")}
    assert len(shared) == 1, names
    slot = fused.slots[shared.pop()]
    assert len(slot.values) == 5
    assert len(slot.observed) == 2


@pytest.mark.parametrize("function", [nn.Tanh(), nn.Sigmoid(), nn.Hardsigmoid()], ids=lambda one: type(one).__name__)
def test_a_function_that_bounds_its_output_has_the_range_that_was_seen(function: nn.Module) -> None:
    """Its ends are far away where it gets small values: with them, most of the integers would stand for nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), function, nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        model[0].weight.mul_(0.1)
    prepared = prepare(model, torch.randn(2, 3, 4, 4), RECIPE)
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = model[:2](x)
        prepared(x)
    low, high = runners(prepared)[""].observer("1").range()
    assert float(high) == pytest.approx(float(seen.max()))
    assert float(high) < 0.9
    assert float(low) == pytest.approx(float(seen.min()))


def test_the_last_layer_gives_floats_directly() -> None:
    fused = fused_graph_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert sorted(fused.slots) == ["0", "input_0"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x)) if x.sum() > 0 else self.fc(x)


def test_layers_of_islands_are_handled_one_by_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Branches(), nn.Linear(8, 4)).eval()
    x = torch.rand(16, 8)
    model[0].weight.data.abs_()
    prepared = prepare(model, x, RECIPE)
    assert sorted(runners(prepared)) == ["", "2.body", "2.fc"]
    assert torch.allclose(prepared(x), model(x), atol=1e-6)
    with simulating(prepared):
        simulated = prepared(x)
    converted = convert(prepared)
    layers = [name for name, module in converted.named_modules() if isinstance(module, StaticLayer)]
    assert layers == ["0", "2.fc", "2.body.0", "2.body.2", "3"]
    assert torch.allclose(converted(x), simulated, atol=1e-4)
    assert noise(model(x), converted(x)) > 30
    # The branch that calibration did not take still runs.
    assert noise(model(-x), converted(-x)) > 3
    report = summary(converted)
    assert report["2"].detail == (
        "an island: its forward branches on a tensor's values; its layers are handled one by one"
    )


def noise(one: Tensor, other: Tensor) -> float:
    one, other = one.detach(), other.detach()
    return float(10 * torch.log10(one.pow(2).sum() / (one - other).pow(2).sum()))


class Shared(nn.Module):
    """One layer at three places, on values of very different sizes, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.again = self.fc
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.fc.weight

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        z = self.again(100 * F.relu(y))
        return {"z": self.tied(self.block(self.block(y))), "y": z}


def test_shared_layers_have_one_weight_and_a_range_per_call() -> None:
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(32, 8)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    converted = convert(prepared)
    assert converted.fc is converted.again
    assert len(converted.fc.clamps) == 2  # type: ignore[union-attr, arg-type]
    expected, got = model(x), converted(x)
    assert noise(expected["y"], got["y"]) > 30
    assert noise(expected["z"], got["z"]) > 25


class Kwargs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.fc = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor, *, scale: int = 1) -> dict[str, Tensor]:
        x = self.fc(self.embed(ids)) * scale
        y, _ = self.lstm(x)
        z, _ = self.attention(y, y, y, key_padding_mask=~mask.bool())
        return {"out": self.norm(z + x), "pooled": z.mean(1)}


def test_integer_inputs_and_layers_without_a_kernel() -> None:
    torch.manual_seed(0)
    model = Kwargs().eval()
    inputs = {"ids": torch.randint(0, 16, (4, 6)), "mask": torch.ones(4, 6, dtype=torch.long), "scale": 2}
    _, kwargs = as_arguments(inputs)
    prepared = prepare(model, inputs, RECIPE)
    expected, seen = model(**kwargs), prepared(**kwargs)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(leaves(expected), leaves(seen), strict=True))
    converted = convert(prepared)
    got = converted(**kwargs)
    assert noise(expected["out"], got["out"]) > 25
    report = summary(converted)
    assert report["unused"].detail == "not called on the example inputs"
    assert report["lstm"].detail.startswith("static sequence, input [")
    assert report["embed"].detail.startswith("no static kernel, so dynamic: ")
    assert report["attention"].detail.count("static linear, input [") == 2
    assert report["attention.out_proj"].detail == "its weight is a part of attention"
    assert {report[name].outcome for name in ("embed", "attention", "attention.out_proj", "fc")} == {"int8"}


def test_a_transformer_layer_is_seen_through() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 5, 16)
    model.eval()
    prepared = prepare(model, x, RECIPE)
    with torch.no_grad():
        assert torch.allclose(prepared(x), model(x), atol=1e-5)
        converted = convert(prepared)
        assert noise(model(x), converted(x)) > 25
    layers = [name for name, module in converted.named_modules() if isinstance(module, StaticLayer)]
    assert "layers.1.linear2" in layers

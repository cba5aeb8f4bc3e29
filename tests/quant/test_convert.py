"""Whole models through prepare, calibration and convert: real integers, equal to the simulation, close to float."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import kernels, load, save
from quant.capture import as_arguments
from quant.convert import NotCalibrated, convert
from quant.parity import parity
from quant.prepare import prepare
from quant.recipe import QConfig, Recipe
from quant.report import summary
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.trees import leaves
from quant.static.simulation import simulating

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


def check(model: nn.Module, inputs: Any, *, sqnr: float = 25.0) -> nn.Module:
    """Prepare, calibrate on the inputs, convert: each step within one of its simulation, the whole near float."""
    model.eval()
    args, kwargs = as_arguments(inputs)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    prepared = prepare(model, inputs, RECIPE)
    same(prepared(*args, **kwargs), expected)
    with simulating(prepared):
        simulated = prepared(*args, **kwargs)
    converted = convert(prepared)
    for step in parity(prepared, converted, [inputs]):
        assert step.holds, step
    got = converted(*args, **kwargs)
    assert signal_to_noise(expected, got) >= sqnr
    assert signal_to_noise(expected, simulated) >= sqnr
    assert type(converted) is type(model)
    return converted


def same(one: Any, other: Any) -> None:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert all(torch.allclose(a, b, atol=1e-5) if isinstance(a, Tensor) else a == b for a, b in pairs)


def signal_to_noise(expected: Any, got: Any) -> float:
    """Of the worst output, in dB."""
    worst = 200.0
    for a, b in zip(leaves(expected), leaves(got), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            a = a.detach()
            noise = (a - b).double().pow(2).sum()
            assert bool(torch.isfinite(noise))
            if noise > 0:
                worst = min(worst, float(10 * torch.log10(a.double().pow(2).sum() / noise)))
    return worst


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with batch norms that do something."""
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3)
            assert module.running_var is not None
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                module.weight.data.uniform_(0.5, 1.5)
                module.bias.data.normal_(0, 0.3)
    return model


def layers_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, StaticLayer)]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.b2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.b1(self.c1(x)))
        y = self.b2(self.c2(y))
        y += x
        return self.relu(y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2))
        self.layers = nn.Sequential(Block(8), Block(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.layers(self.stem(x)))
        return self.fc(torch.flatten(y, 1))


def test_residual_network() -> None:
    converted = check(seeded(Residual), torch.randn(4, 3, 32, 32), sqnr=30)
    assert layers_of(converted) == [
        "stem.0", "layers.0.c1", "layers.0.c2", "layers.1.c1", "layers.1.c2", "fc",
    ]  # fmt: skip
    report = summary(converted)
    assert report["fc"].outcome == "int8"
    assert report["stem.1"].detail == "folded into stem.0"
    assert not [entry for entry in report if entry.outcome == "float"]


@pytest.mark.parametrize("observer", ["histogram", "moving_average", "percentile", "entropy", "mse"])
def test_every_observer_of_activations(observer: str) -> None:
    x = torch.randn(8, 3, 32, 32)
    model = seeded(Residual).eval()
    prepared = prepare(model, x, Recipe(default=QConfig(activation_observer=observer)))
    for part in x.split(4):
        prepared(part)
    converted = convert(prepared)
    assert all(step.holds for step in parity(prepared, converted, [x]))
    assert signal_to_noise(model(x), converted(x)) > 20


@pytest.mark.parametrize(
    "qconfig",
    [
        QConfig(activation_observer="minmax", activation_symmetric=True),
        QConfig(activation_observer="minmax", per_channel=False),
        QConfig(activation_observer="minmax", weight_observer="mse"),
    ],
    ids=["symmetric", "per tensor", "mse weights"],
)
def test_settings(qconfig: QConfig) -> None:
    x = torch.randn(4, 3, 32, 32)
    model = seeded(Residual).eval()
    prepared = prepare(model, x, Recipe(default=qconfig))
    prepared(x)
    converted = convert(prepared)
    assert all(step.holds for step in parity(prepared, converted, [x]))
    assert signal_to_noise(model(x), converted(x)) > 20


def test_other_batch_and_image_sizes_run() -> None:
    converted = check(seeded(Residual), torch.randn(2, 3, 32, 32), sqnr=25)
    assert converted(torch.randn(5, 3, 40, 56)).shape == (5, 10)
    assert converted(torch.randn(0, 3, 32, 32)).shape == (0, 10)


def test_converted_models_copy_and_pickle() -> None:
    x = torch.randn(2, 3, 32, 32)
    model = seeded(Residual).eval()
    prepared = prepare(model, x, RECIPE)
    prepared = copy.deepcopy(prepared)
    prepared(x)
    prepared = pickle.loads(pickle.dumps(prepared))
    converted = convert(prepared)
    expected = converted(x)
    assert torch.equal(copy.deepcopy(converted)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x), expected)
    # The copy runs its own layers, not those it was copied from.
    other = copy.deepcopy(converted)
    other.fc.bias += 1.0  # type: ignore[union-attr, operator]
    assert torch.equal(converted(x), expected)


def test_uncalibrated_points_are_listed_in_one_error() -> None:
    prepared = prepare(seeded(Residual), torch.randn(2, 3, 32, 32), RECIPE)
    with pytest.raises(NotCalibrated, match=r"9 observers saw no data: x_0, stem\.0, layers\.0\.c1"):
        convert(prepared)


def test_convert_refuses_a_float_model() -> None:
    with pytest.raises(ValueError, match="expected a model from quant"):
        convert(Residual())


def test_a_recipe_leaves_layers_float_and_the_report_says_so() -> None:
    x = torch.randn(2, 3, 32, 32)
    recipe = Recipe({"layers.0.*": None}, default=QConfig(activation_observer="minmax"))
    prepared = prepare(seeded(Residual).eval(), x, recipe)
    prepared(x)
    converted = convert(prepared)
    assert "layers.0.c1" not in layers_of(converted)
    assert summary(converted)["layers.0.c1"].detail == "the recipe says so"
    assert "layers.1.c1" in layers_of(converted)
    converted(x)


def test_fewer_weight_bits() -> None:
    x = torch.randn(2, 3, 32, 32)
    recipe = Recipe(default=QConfig(weight_bits=4, activation_observer="minmax"))
    prepared = prepare(seeded(Residual).eval(), x, recipe)
    prepared(x)
    converted = convert(prepared)
    assert int(converted.fc.q_weight.abs().max()) <= 7  # type: ignore[union-attr, operator]
    assert all(step.holds for step in parity(prepared, converted, [x]))


def test_activations_stay_uint8_between_layers() -> None:
    converted = check(seeded(Residual), torch.randn(2, 3, 32, 32))
    ops = [instruction.kind for instruction in converted._modules["_quant"].program.instructions]  # type: ignore[union-attr]
    assert ops.count("quantize") == 1
    assert ops.count("dequantize") == 0


def test_one_layer_model() -> None:
    model = nn.Linear(16, 8)
    x = torch.randn(32, 16)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    converted = convert(prepared)
    assert isinstance(converted, StaticLayer)
    assert signal_to_noise(model(x), converted(x)) > 30


class SubclassedPadding(nn.Conv2d):
    """EfficientNet's habit: padding that follows from the input's size."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.size()[-2:]
        down = max((-(-height // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - height, 0)
        right = max((-(-width // self.stride[1]) - 1) * self.stride[1] + self.kernel_size[1] - width, 0)
        if down > 0 or right > 0:
            x = F.pad(x, [right // 2, right - right // 2, down // 2, down - down // 2])
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def test_a_layer_whose_forward_is_its_own_is_seen_through() -> None:
    model = nn.Sequential(SubclassedPadding(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    converted = check(model, torch.randn(2, 3, 17, 17))
    assert summary(converted)["0"].outcome == "int8"


def test_a_part_can_be_called_by_itself() -> None:
    x = torch.randn(2, 3, 32, 32)
    model = seeded(Residual)
    converted = check(model, x)
    with torch.no_grad():
        inner = model.stem(x)  # type: ignore[operator]
        assert signal_to_noise(inner, converted.stem(x)) > 30  # type: ignore[operator]
        assert signal_to_noise(model.layers[1](inner), converted.layers[1](inner)) > 25  # type: ignore[index, operator]
        flat = torch.rand(2, 8)
        assert signal_to_noise(model.fc(flat), converted.fc(flat)) > 25  # type: ignore[operator]
    assert isinstance(converted.layers[0], Block)  # type: ignore[index]


class Split(nn.Module):
    """A convolution in one part, its clamp in another."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.features(x)))


def test_a_part_that_is_fused_with_what_follows_says_so() -> None:
    converted = check(Split(), torch.randn(2, 3, 8, 8))
    with pytest.raises(RuntimeError, match=r"features: cannot be called by itself .* features\.1 is computed together"):
        converted.features(torch.randn(2, 3, 8, 8))  # type: ignore[operator]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.gain = nn.Parameter(torch.rand(8, 1, 1, 1) + 0.5)
        self.bias = nn.Parameter(torch.randn(8))
        self.head = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, self.weight * self.gain, self.bias, padding=1))
        return F.linear(y.mean((2, 3)), self.head)


def test_functional_layers_with_computed_weights() -> None:
    converted = check(Functional(), torch.randn(4, 3, 8, 8))
    kept = [name for name, _ in converted.named_parameters()]
    assert kept == ["gain"]  # few numbers, which a call of the user's own forward reads
    assert len(layers_of(converted)) == 2
    report = summary(converted)
    buffers = [tensor for name in layers_of(converted) for tensor in converted.get_submodule(name).buffers()]
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*buffers, *converted.parameters()))
    assert sum(entry.bytes_after for entry in report) == held


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_converted_models_are_traced_and_compiled() -> None:
    x = torch.randn(2, 3, 32, 32)
    converted = check(seeded(Residual), x)
    with torch.no_grad():
        expected = converted(x)
        assert torch.equal(torch.jit.trace(converted, x)(x), expected)  # type: ignore[no-untyped-call]
        assert torch.equal(torch.compile(converted, backend="eager", fullgraph=True)(x), expected)
        assert torch.equal(torch.export.export(converted, (x,)).module()(x), expected)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(torch.softmax(self.a(x), -1) * (1.0 - mask.to(torch.float32)).exp())


def test_the_report_names_float_steps_beside_integers_and_no_others() -> None:
    inputs = (torch.randn(4, 8), torch.zeros(4, 8, dtype=torch.long))
    report = summary(check(Mixed(), inputs))
    assert {entry.name: entry.detail for entry in report if entry.outcome == "float"} == {
        "softmax_3": "softmax has no int8 kernel",
        "mul_7": "what it reads is float",
    }


def calibrated(model: nn.Module, x: Tensor, backend: str | None = None) -> nn.Module:
    prepared = prepare(model, x, Recipe(default=QConfig(activation_observer="minmax"), backend=backend))
    prepared(x)
    return convert(prepared)


def test_the_report_names_hooks_that_do_not_run_and_a_backend_that_cannot() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2), nn.LSTM(2, 3))
    for place in (model, model[0], model[1]):
        place.register_forward_hook(lambda *_: None)
    x = torch.randn(5, 4)
    with kernels.use("reference"):
        report = summary(calibrated(model, x))
    silent = {entry.name for entry in report if "its forward hooks do not run" in entry.detail}
    assert silent == {"0", "1"}
    before = sum(parameter.numel() * 4 for parameter in model[2].parameters())
    assert report["2"].bytes_before == before
    assert report["2"].bytes_after > 0
    assert not any(entry.name.startswith("2.") for entry in report)


@pytest.mark.skipif(bool(kernels.available()["onednn"]), reason="oneDNN is missing")
def test_the_report_says_who_computes_each_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(), nn.Linear(64, 2))
    report = summary(calibrated(model, torch.randn(5, 3, 6, 6), backend="onednn"))
    assert ", onednn (" in report["0"].detail
    assert "reference (exact), as onednn has no kernel for a convolution of 16 groups" in report["1"].detail
    assert ", onednn (" in report["3"].detail


def test_what_cannot_be_dynamic_stays_float_alone() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even, self.tied = nn.Embedding(10, 8), nn.Embedding(10, 8), nn.Embedding(10, 8)
            self.tied.weight = self.even.weight
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.odd(x) + self.even(x) + self.tied(x))

    torch.manual_seed(0)
    model, x = Tables().eval(), torch.randint(0, 10, (3, 4))
    prepared = prepare(model, x, Recipe({"odd": QConfig(weight_bits=5)}))
    prepared(x)
    converted: Any = convert(prepared)
    found = summary(converted)
    assert [(line.name, line.outcome) for line in found if line.type == "Embedding"] == [
        ("odd", "float"), ("even", "int8"), ("tied", "int8")]  # fmt: skip
    assert found["odd"].detail == "tables have 8, 4, 3 or 2 bits, the recipe asks for 5"
    assert converted.tied.rows is converted.even.rows


class OwnLinear(nn.Module):
    """Saves and copies itself by its own code, as layers of graph libraries do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sizes = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def __deepcopy__(self, memo: dict[int, object]) -> OwnLinear:
        made = OwnLinear(*self.sizes).to(self.weight.device)
        made.weight = copy.deepcopy(self.weight, memo)
        made.__dict__.update({key: value for key, value in vars(self).items() if key == "forward"})
        return made

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()


def test_a_class_that_saves_itself_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    model = nn.Sequential(OwnLinear(8, 8), nn.ReLU(), OwnLinear(8, 4)).eval()
    q = calibrated(model, x)
    assert [one.numel() for one in q.parameters()] == [0, 0]
    save(q, tmp_path / "int8.q8")
    restored = load(tmp_path / "int8.q8", model=nn.Sequential(OwnLinear(8, 8), nn.ReLU(), OwnLinear(8, 4)))
    with torch.no_grad():
        assert torch.equal(restored(x), q(x))


def test_a_prepared_part_of_a_model_is_named() -> None:
    prepared = prepare(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"its part 'body' is; convert the part and put it back: model\.body = "):
        convert(nn.ModuleDict({"body": prepared}))
    with pytest.raises(ValueError, match=r"Linear is a part of a prepared model"):
        convert(prepare(nn.Sequential(OwnBranch()), torch.randn(4, 8))[0].inner)  # type: ignore[index, union-attr]


class OwnBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * 2 if float(y.detach().sum()) > 1e9 else y

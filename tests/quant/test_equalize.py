"""equalize: the same answers from channels of like size, and only where that is so."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import quant


def unequal(model: nn.Module) -> nn.Module:
    """Channels between a tenth and ten times as large, and batch norms with statistics of their own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
                sizes = 10 ** (2 * torch.rand(module.weight.shape[0], generator=generator) - 1)
                module.weight.mul_(sizes.reshape(-1, *[1] * (module.weight.dim() - 1)))
            elif isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.running_var):
                    tensor.copy_(0.2 + torch.rand(tensor.shape, generator=generator))
                for tensor in (module.bias, module.running_mean):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.eval()


def separable(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        activation(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        activation(),
        nn.Conv2d(8, 6, 1, bias=True),
        nn.BatchNorm2d(6),
    )


def padded() -> nn.Sequential:
    """Borders of zeros as steps of their own, as in networks of TensorFlow, and a mirrored one."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.ReflectionPad2d(1),
        nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False),
    )


def strided() -> nn.Sequential:
    """A weight that is no view of one row per channel."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3))
    model[2].weight = nn.Parameter(model[2].weight.detach().permute(1, 0, 3, 2))
    return model


CASES = {
    "separable": (separable, (4, 3, 9, 9)),
    "linear with biases": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4), nn.Linear(4, 3)), (4, 5)),
    "sequence": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4)), (2, 3, 5)),
    "groups of several": (
        lambda: nn.Sequential(nn.Conv2d(4, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 6, 3, groups=3)),
        (2, 4, 7, 7),
    ),
    "padded": (padded, (4, 3, 9, 9)),
    "strides of its own": (strided, (2, 3, 7, 7)),
    "1d": (lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 3, 3, padding=1)), (2, 2, 9)),
}


def ranges(first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor]:
    """Per channel between two layers without norms: the largest weight that makes it, and that reads it."""
    groups = getattr(second, "groups", 1)
    reads = second.weight.reshape(groups, second.weight.shape[0] // groups, second.weight.shape[1], -1)
    return first.weight.flatten(1).abs().amax(1), reads.abs().amax((1, 3)).flatten()


@pytest.mark.parametrize("name", CASES)
def test_answers_stay(name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = unequal(make()), torch.randn(shape)
    before = copy.deepcopy(model.state_dict())
    equalized = quant.equalize(model, x)
    assert type(equalized) is type(model)
    assert any(not torch.equal(before[key], value) for key, value in equalized.state_dict().items())
    torch.testing.assert_close(equalized(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["linear with biases", "groups of several", "1d"])
def test_both_sides_of_a_channel_become_alike(name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    layers = [m for m in quant.equalize(unequal(make()), torch.randn(shape)).children() if not isinstance(m, nn.ReLU)]
    for pair in itertools.pairwise(layers):
        torch.testing.assert_close(*ranges(*pair), rtol=0.01, atol=0.0)


def test_one_scale_for_a_weight_then_does() -> None:
    torch.manual_seed(0)
    model, x = unequal(separable()), torch.randn(64, 3, 9, 9)
    recipe = quant.Recipe(default=quant.QConfig(per_channel=False))

    def error(start: nn.Module) -> float:
        q = quant.quantize_static(start, [x], recipe, progress=False)
        with torch.inference_mode():
            return float((q(x) - model(x)).norm() / model(x).norm())

    assert error(quant.equalize(model, x)) < 0.5 * error(model)


def test_a_relu6_acts_as_a_relu() -> None:
    torch.manual_seed(0)
    model, x = unequal(separable(nn.ReLU6)).requires_grad_(False), torch.randn(64, 3, 9, 9)
    unclamped = separable(nn.ReLU).eval().requires_grad_(False)
    unclamped.load_state_dict(model.state_dict())
    for norm, layer in ((1, 0), (4, 3)):  # statistics of this very input
        y = unclamped[: layer + 1](x)
        for one in (model, unclamped):
            one[norm].running_mean.copy_(y.mean((0, 2, 3)))
            one[norm].running_var.copy_(y.var((0, 2, 3)))
    equalized = quant.equalize(model, x)
    assert isinstance(equalized[2], nn.ReLU6)
    torch.testing.assert_close(equalized(x), unclamped(x), rtol=1e-4, atol=1e-4)
    for norm in (equalized[1], equalized[4]):
        assert float((norm.bias + 6.0 * norm.weight.abs()).max()) <= 6.0 + 1e-5


def test_a_channel_of_zeros_stays() -> None:
    model = unequal(nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)))
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[2].weight[:, 2] = 0.0
    x = torch.randn(5, 3)
    equalized = quant.equalize(model, x)
    assert torch.equal(equalized[0].weight[2], model[0].weight[2])
    assert torch.equal(equalized[2].weight[:, 1], model[2].weight[:, 1])
    torch.testing.assert_close(equalized(x), model(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return y + self.second(y)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.layer(x))
        return y


class ReadAsWell(nn.Module):
    """The weight of its second layer also serves elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + torch.nn.functional.linear(x, self.second.weight)


class Units(nn.Module):
    """Two captured units, as what stands between them depends on values, with a layer in common."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(4, 4)
        self.one, self.two = nn.Sequential(nn.Linear(4, 4), common), nn.Sequential(nn.Linear(4, 4), common)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        return self.two(y) if float(y.detach().sum()) < 1e9 else y


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))


def hooked(place: int, *, container: bool = False) -> nn.Module:
    """A hook adds to what is between the two layers."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    (model[0] if container else [model[0][0], model[0][1]][place]).register_forward_hook(lambda _, __, y: y + 1)
    return model


LEFT_ALONE = {
    "hook on a layer": lambda: hooked(0),
    "hook on a relu": lambda: hooked(1),
    "hook on a block": lambda: hooked(0, container=True),
    "read twice": Residual,
    "called twice": Twice,
    "called by two units": Units,
    "read as well": ReadAsWell,
    "one parameter": tied,
    "computed weight": weight_normed,
    "sigmoid between": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)),
    "clamped from below at -1": lambda: nn.Sequential(nn.Linear(4, 4), nn.Hardtanh(-1.0, torch.inf), nn.Linear(4, 4)),
    "relu6 without a norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 4)),
    "one layer": lambda: nn.Sequential(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_would_change_the_answers_is_left_alone(name: str) -> None:
    with pytest.raises(ValueError, match=r"quant\.equalize: no two convolutions or linear layers of the model follow"):
        quant.equalize(LEFT_ALONE[name]().eval(), torch.randn(2, 4))


def test_a_padding_that_mixes_channels_or_has_a_hook_is_left_alone() -> None:
    x = torch.randn(2, 3, 9, 9)
    for place, pad in ((3, nn.ConstantPad3d((0, 1, 0, 1, 0, 0), 0.0)), (4, nn.ReflectionPad2d(1))):
        model = padded().eval()
        model[place] = pad
        if place == 4:
            model[place].register_forward_hook(lambda module, args, y: None)  # which looks at values
        with pytest.raises(ValueError, match="no two convolutions"):
            quant.equalize(model, x)


def of_unlike_values(activation: type[nn.Module] = nn.ReLU6) -> nn.Sequential:
    """A depthwise convolution whose channels get values between a hundredth and 6."""
    torch.manual_seed(1)
    model = separable(activation).eval()
    with torch.no_grad():
        for place in (1, 4):
            model[place].weight.copy_(torch.logspace(-2.5, 0, 8))
            model[place].bias.copy_(2 * model[place].weight)
        model[3].weight.div_(model[1].weight.reshape(-1, 1, 1, 1))
        first = model[0](torch.randn(64, 3, 9, 9))
        model[1].running_mean.copy_(first.mean((0, 2, 3)))
        model[1].running_var.copy_(first.var((0, 2, 3)))
    return model


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Identity])
def test_values_before_a_depthwise_convolution_become_alike(activation: type[nn.Module]) -> None:
    model, x = of_unlike_values(activation), torch.randn(64, 3, 9, 9)
    equalized = quant.equalize(model, x, ranges="activations")
    torch.testing.assert_close(equalized(x), model(x), rtol=1e-4, atol=1e-4)
    before, after = (one[:3](x).abs().amax((0, 2, 3)) for one in (model, equalized))
    assert before.max() > 100 * before.min()
    assert after.max() < 3 * after.min()
    # Rows of weights are multiplied as wholes, so that nothing but the first norm and the depthwise weight changes.
    changed = {key for key, value in equalized.state_dict().items() if not torch.equal(value, model.state_dict()[key])}
    assert changed == {"1.weight", "1.bias", "3.weight"}


def test_int8_then_keeps_small_channels() -> None:
    model, x = of_unlike_values()[:4], torch.randn(64, 3, 9, 9)  # as far as the depthwise convolution
    equalized = quant.equalize(model, x, ranges="activations")
    noise = [
        (quant.quantize_static(one, [x], progress=False)(x) - model(x)).square().mean() for one in (model, equalized)
    ]
    assert noise[1] < noise[0] / 4  # a bit


def test_values_that_nothing_depthwise_reads_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1)).eval()
    with pytest.raises(ValueError, match="no depthwise convolution"):
        quant.equalize(model, torch.randn(2, 3, 9, 9), ranges="activations")
    with pytest.raises(ValueError, match="expected 'weights' or 'activations'"):
        quant.equalize(model, torch.randn(2, 3, 9, 9), ranges="values")


def test_what_is_no_float_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"quant\.equalize: expected an nn.Module, got str"):
        quant.equalize("model", torch.randn(2, 4))
    prepared = quant.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(ValueError, match="prepared already; equalise the float model"):
        quant.equalize(prepared, torch.randn(2, 4))


def test_it_can_be_trained_for_int8() -> None:
    torch.manual_seed(0)
    model, x = unequal(separable(nn.ReLU6)), torch.randn(8, 3, 9, 9)
    p = quant.prepare_qat(quant.equalize(model, x), x)
    for _ in range(30):
        p.train()(x).sum().backward()
    assert p[0].weight.grad is not None
    assert model[0].weight.grad is None
    assert quant.parity(p.eval(), quant.convert(p), [x]).holds

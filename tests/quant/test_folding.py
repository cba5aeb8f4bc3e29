"""Batch norms in other forms than torch.nn's modules, and numbers per channel: parts of the weight before them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import equalize, prepare, prepare_qat, quantize_static
from quant.convert import convert
from quant.folding import own_shape
from quant.graph import Graph, Kind, Node
from quant.parity import parity
from quant.report import summary
from quant.runtime.trees import Attr
from quant.static.runner import runners

from .test_convert import check, layers_of, seeded, signal_to_noise


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation, as timm writes it."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        y = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, share, self.eps
        )
        return F.relu(y)


class AskingNorm(nn.BatchNorm2d):
    """As timm writes it: it asks the tensor itself for its dimensions, and has places for what may be left out."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        return self.act(self.drop(y))


class NormThenRelu(nn.BatchNorm2d):
    """The same in torch.nn's own words."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Bare(nn.Module):
    """A functional batch norm whose module is none, with trained or frozen numbers."""

    def __init__(self, channels: int, *, frozen: bool) -> None:
        super().__init__()
        for name, value in (("scale", torch.rand(channels) + 0.5), ("shift", torch.randn(channels))):
            if frozen:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        self.register_buffer("mean", 0.1 * torch.randn(channels))
        self.register_buffer("variance", torch.rand(channels) + 0.5)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        train = self.training and not self.frozen
        return F.batch_norm(x, self.mean, self.variance, self.scale, self.shift, train, 0.3, 1e-3)


class WrittenOut(nn.Module):
    """A frozen batch norm in plain arithmetic, as torchvision writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))
        self.register_buffer("running_mean", 0.1 * torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        scale = self.weight.reshape(shape) * (self.running_var.reshape(shape) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(shape) - self.running_mean.reshape(shape) * scale)


class Scaled(nn.Module):
    """A layer scale and a sum, in an order that the caller says."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.gamma, self.kind = nn.Parameter(torch.rand(width) + 0.5), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mul":
            return self.gamma * x
        if self.kind == "one":
            return x * self.gamma[0]
        return {"add": x + self.gamma, "sub": x - self.gamma, "from": self.gamma - x}[self.kind]


def stem(norm: nn.Module, channels: int = 8) -> nn.Module:
    """A convolution with `norm` after it, and something to read the result in integers."""
    return nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), norm, nn.Conv2d(channels, 4, 3), nn.Flatten())


def agrees(model: nn.Module, x: Tensor) -> None:
    """The int8 model is near the float one, which ends in a float step."""
    q = quantize_static(model.eval(), [x], progress=False)
    with torch.no_grad():
        assert signal_to_noise(model(x), q(x)) > 30.0


IMAGES = torch.randn(6, 3, 10, 10, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormAct(8),
        lambda: AskingNorm(8),
        lambda: Bare(8, frozen=False),
        lambda: Bare(8, frozen=True),
        lambda: WrittenOut(8),
    ],
    ids=["act", "asking", "bare", "frozen", "written-out"],
)
def test_norms_are_folded_whatever_their_form(make) -> None:
    model = seeded(lambda: stem(make()))
    q = check(model, IMAGES)
    report = summary(q)
    assert report["1"].outcome == "int8"
    assert report["1"].detail == "folded into 0"
    assert report["1"].bytes_after <= report["1"].bytes_before
    assert report["(planned run)"].detail.startswith("native calls: 1,")
    assert layers_of(q) == ["0", "2"]


def test_questions_for_a_rank_do_not_split_a_planned_run() -> None:
    """Nor does an nn.Identity keep an activation out of the layer, or a sum from having its clamp."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3 if not i else 8, 8, 3, padding=1, bias=False) for i in range(4))
            self.norms, self.se = nn.ModuleList(AskingNorm(8) for _ in range(4)), nn.Identity()
            self.last = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norms[0](self.convs[0](x))
            for conv, norm in zip(self.convs[1:], self.norms[1:], strict=True):
                x = F.relu(self.se(norm(conv(x)) + x))
            return self.last(x)

    model = seeded(Blocks)
    q = check(model, IMAGES)
    assert summary(q)["(planned run)"].detail.startswith("native calls: 1,")
    [runner] = runners(prepare(model, IMAGES)).values()
    assert [step.operator.name for step in runner.fused.steps if step.integer] == ["conv", *["conv", "add"] * 3, "conv"]


def test_a_rank_that_is_another_is_still_seen() -> None:
    """The convolution takes an unbatched image too, and the norm says that it does not."""
    model = seeded(lambda: stem(AskingNorm(8)))
    q = quantize_static(model.eval(), [IMAGES], progress=False)
    for one in (model, q):
        with pytest.raises(AssertionError, match="expected 4D input"):
            one(IMAGES[0])


def test_functions_in_a_row_are_one_table() -> None:
    """An activation and the batch norm after it: rounded once, as a fraction of the steps."""

    class Mixer(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Conv2d(3, 8, 3), nn.GELU(), nn.BatchNorm2d(8), nn.Identity(), nn.Hardswish(), nn.Conv2d(8, 4, 3)
            )

    model = seeded(Mixer)
    model[2].running_mean.copy_(torch.linspace(-1, 1, 8))
    model[2].running_var.copy_(torch.linspace(0.1, 2, 8))
    q = check(model, IMAGES)
    [runner] = runners(prepare(model, IMAGES)).values()
    assert [step.operator.name for step in runner.fused.steps if step.integer] == ["conv", "lookup", "conv"]
    p = prepare_qat(model, IMAGES).train()
    for _ in range(60):
        p(IMAGES).sum().backward()
    assert parity(p.eval(), convert(p), [IMAGES]).unequal < 0.01
    assert type(q[2]) is nn.BatchNorm2d


@pytest.mark.parametrize("kind", ["mul", "one", "add", "sub", "from"])
@pytest.mark.parametrize("bias", [False, True], ids=["without-bias", "with-bias"])
def test_numbers_per_channel_go_into_a_linear_layer(kind: str, bias: bool) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 16, bias=bias), Scaled(16, kind), nn.ReLU(), nn.Linear(16, 4)))
    q = check(model, torch.randn(5, 7, 12), sqnr=30.0)
    assert summary(q)["1"].detail == "folded into 0"


def test_numbers_along_another_axis_stay_apart() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gamma = nn.Conv2d(3, 6, 3, padding=1), nn.Parameter(torch.linspace(0.1, 3.0, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.gamma  # along the width, which is as large as the number of channels

    agrees(seeded(Columns), torch.randn(2, 3, 6, 6))


def test_a_layer_that_is_called_twice_keeps_its_own_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), NormAct(4), Bare(4, frozen=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.conv(self.one(self.conv(x))))

    agrees(seeded(Twice), torch.randn(2, 4, 6, 6))


def test_a_norm_by_the_batch_is_not_folded() -> None:
    class ByBatch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, training=True)

    q = check(seeded(lambda: stem(ByBatch())), IMAGES)
    assert "batch" in str(summary(q))


def trained(model: nn.Module, steps: int = 6) -> tuple[nn.Module, list[float]]:
    """A model after some steps of training for int8, and its losses."""
    p = prepare_qat(model, IMAGES)
    optimizer = torch.optim.SGD(p.parameters(), lr=0.05)
    p.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (p(IMAGES) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return p, losses


@pytest.mark.parametrize("momentum", [0.5, None], ids=["moving", "cumulative"])
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "apart"])
def test_a_functional_norm_trains_as_the_module(momentum: float | None, folded: bool) -> None:
    def make(kind: type[nn.BatchNorm2d]) -> nn.Module:
        norm = kind(8, momentum=momentum)
        if folded:
            return seeded(lambda: stem(norm))
        return seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), norm, nn.Conv2d(8, 4, 3)))

    (one, losses), (two, expected) = trained(make(NormAct)), trained(make(NormThenRelu))
    assert losses == pytest.approx(expected, rel=1e-4)
    state, other = one.state_dict(), two.state_dict()
    for name in ("running_mean", "running_var", "num_batches_tracked", "weight", "bias"):
        key = f"{1 if folded else 2}.{name}"
        assert torch.allclose(state[key].float(), other[key].float(), rtol=1e-4, atol=1e-6), name
    assert int(state[f"{1 if folded else 2}.num_batches_tracked"]) == 6
    assert parity(one.eval(), convert(one), [IMAGES]).holds


def test_statistics_without_a_module_train_by_their_own_momentum() -> None:
    model = seeded(lambda: stem(Bare(8, frozen=False)))
    float_twin = copy.deepcopy(model).train()
    p = prepare_qat(model, IMAGES).train()
    with torch.no_grad():
        float_twin(IMAGES)
        p(IMAGES)
    assert torch.allclose(p[1].mean, float_twin[1].mean, atol=0.02)
    assert not torch.allclose(p[1].mean, model[1].mean, atol=0.02)


@pytest.mark.parametrize("make", [lambda: Bare(8, frozen=True), lambda: WrittenOut(8)], ids=["buffers", "written-out"])
def test_a_frozen_norm_stays_frozen_in_training(make) -> None:
    model = seeded(lambda: stem(make()))
    p, losses = trained(model)
    before, after = model[1].state_dict(), p[1].state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert losses[-1] < losses[0]
    assert parity(p.eval(), convert(p), [IMAGES]).holds


def test_a_norm_in_eval_mode_inside_of_a_training_model_keeps_its_statistics() -> None:
    p = prepare_qat(seeded(lambda: stem(NormAct(8))), IMAGES).train()
    p[1].eval()
    before = p[1].running_mean.clone()
    p(IMAGES)
    assert torch.equal(p[1].running_mean, before)


def test_layer_scales_are_trained_inside_of_the_weight() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 16), Scaled(16, "mul"), nn.ReLU(), nn.Linear(16, 4)))
    x = torch.randn(5, 12)
    p = prepare_qat(model, x).train()
    p(x).square().mean().backward()
    assert float(p[1].gamma.grad.abs().sum()) > 0


def test_equalize_goes_through_functional_norms() -> None:
    class Clamped(NormAct):
        pass

    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Clamped(8), nn.Conv2d(8, 4, 3), nn.ReLU()))
    with torch.no_grad():
        model[1].weight.mul_(torch.logspace(-2, 2, 8))
        equal = equalize(model, IMAGES)
        assert torch.allclose(equal(IMAGES), model(IMAGES), rtol=1e-3, atol=1e-3)
    gains = equal[1].weight.detach().abs()
    assert float(gains.max() / gains.min()) < 1e3


def test_a_wider_constant_makes_a_wider_result() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(6, 4), nn.Linear(4, 2)
            self.register_buffer("gain", torch.rand(4, dtype=torch.float64) + 1.0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(x) * self.gain
            return y, self.last(y.float())

    model, x = seeded(Wide).eval(), torch.randn(5, 6)
    q = quantize_static(model, [x], progress=False)
    with torch.no_grad():
        assert [one.dtype for one in q(x)] == [torch.float64, torch.float32]
        assert signal_to_noise(model(x), q(x)) > 30.0


def test_a_buffer_that_a_forward_writes_is_no_constant() -> None:
    graph = Graph("", [Node(0, Kind.INPUT, "x"), Node(1, Kind.METHOD, "mul_", (Attr("kept"), 0.5))], {}, None, [])
    root = nn.Module()
    root.register_buffer("kept", torch.rand(4))
    root.register_buffer("other", torch.rand(4))
    assert own_shape(graph, root, Attr("other")) == (4,)
    assert own_shape(graph, root, Attr("kept")) is None


def test_long_models_of_products_are_planned_in_no_time() -> None:
    class Deep(nn.Module):
        """Every value is read twice, so that 2**60 paths lead through it."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            for _ in range(60):
                y = (y + 0.5 * y) * y
            return y

    prepared = prepare(Deep().eval(), torch.zeros(2, 4))
    assert prepared(torch.zeros(2, 4)).shape == (2, 4)

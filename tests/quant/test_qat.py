"""Quantisation-aware training: what trains is what deploys, and the float model's names, state and batch norms stay."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import QParams
from quant.observers import FakeQuantize, NoDataSeen, _rounding
from torch import Tensor, nn

import quant
from quant.parity import parity
from quant.qat import freeze_norms, freeze_ranges, observe_only, round_values
from quant.qat.batch_norm import folding_gain, normalise
from quant.qat.runner import TrainingRunner
from quant.recipe import QConfig, Recipe, RecipeError
from quant.static.runner import runners
from quant.static.simulation import simulating


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, eps=1e-3, momentum=0.3)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depth_norm = nn.BatchNorm2d(8)
        self.clip = nn.ReLU6(inplace=True)
        self.point = nn.Conv2d(8, 8, 1, bias=False)
        self.point_norm = nn.BatchNorm2d(8, affine=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = self.clip(self.depth_norm(self.depth(x)))
        x = F.relu(self.point_norm(self.point(y)) + x)
        return self.head(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))


class Concatenated(nn.Module):
    """Values of very different sizes with one range; the first is read by another layer before the second exists."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(3, 4, 3), nn.Conv1d(3, 4, 3), nn.Conv1d(4, 4, 1)
        self.up, self.up_norm = nn.ConvTranspose1d(12, 6, 2, groups=2), nn.BatchNorm1d(6)
        self.hidden, self.hidden_norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        small = self.a(x)
        joined = torch.cat((small, 20.0 * self.b(x), self.c(small)), dim=1)
        return self.hidden_norm(self.hidden(self.up_norm(self.up(joined)).mean(dim=2)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.shared(torch.relu(self.shared(x)))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (16, 3, 8, 8)),
    "concatenated": (Concatenated, (16, 3, 9)),
    "twice": (Twice, (16, 6)),
}
RECIPES = {
    "default": QConfig(),
    "4 bits": QConfig(weight_bits=4),
    "per tensor": QConfig(per_channel=False),
    "symmetric": QConfig(activation_symmetric=True),
    "lsq": QConfig(activation_observer="lsq", weight_observer="lsq", weight_bits=4),
    "lsq per tensor": QConfig(activation_observer="lsq", weight_observer="lsq", per_channel=False),
    "lsq+": QConfig(activation_observer="lsq+", weight_observer="lsq+"),
    "pact": QConfig(activation_observer="pact"),
    "percentile": QConfig(weight_observer="percentile"),
}
every_model = pytest.mark.parametrize("name", list(MODELS))
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind(), torch.randn(shape)


def train(
    prepared: nn.Module, x: Tensor, steps: int, schedule: Any = None, optimizer: Any = None, lr: float = 0.02
) -> list[float]:
    prepared.train()
    optimizer = optimizer or torch.optim.SGD(prepared.parameters(), lr=lr, momentum=0.9)
    labels = torch.arange(len(x)) % 4
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


@every_model
@every_recipe
def test_what_trains_is_what_deploys(name: str, recipe: str) -> None:
    """In eval mode the trained model is the simulation to the bit, and the integers are within one step of it."""
    model, x = make(name)
    prepared = quant.prepare_qat(model, x, Recipe(default=RECIPES[recipe]))
    losses = train(prepared, x, 25, lr=1e-4 if recipe.startswith("lsq+") else 1e-3)
    assert losses[-1] < losses[0]
    prepared.eval()
    with torch.no_grad():
        evaluated = prepared(x)
        with simulating(prepared):
            assert torch.equal(evaluated, prepared(x))
    converted = quant.convert(prepared)
    agreement = parity(prepared, converted, [x])
    assert agreement.holds, agreement
    assert type(converted) is type(model)


def test_parity_sees_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: training arithmetic that is off by half a step is not what deploys."""
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    train(prepared, x, 25)
    prepared.eval()
    right = _rounding.round_trip

    def half_a_step_off(x: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> Any:
        shift = scale / 2 if scale.dim() == 0 else (scale / 2).reshape(-1, *[1] * (x.dim() - 1))
        return right(x + shift, scale, *args, **kwargs)

    with torch.no_grad(), simulating(prepared):
        expected = prepared(x)
    with torch.no_grad():
        assert torch.equal(prepared(x), expected)
        monkeypatch.setattr(quant.observers.fake_quantize, "round_trip", half_a_step_off)
        assert not torch.equal(prepared(x), expected)


@every_model
def test_observing_is_the_float_model(name: str) -> None:
    """Before rounding begins nothing is changed: outputs, gradients, running statistics, dropout."""
    model, x = make(name)
    model.train()
    prepared = quant.prepare_qat(model, x)
    observe_only(prepared)
    ours, theirs = dict(prepared.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for net in (model, prepared):
        torch.manual_seed(1)
        net(x).square().sum().backward()
    for key, parameter in theirs.items():
        torch.testing.assert_close(ours[key].grad, parameter.grad, rtol=1e-4, atol=1e-4)
    buffers = dict(prepared.named_buffers())
    for key, buffer in model.named_buffers():
        torch.testing.assert_close(buffers[key], buffer)
    model.eval()
    prepared.eval()
    torch.testing.assert_close(prepared(x), model(x))


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("momentum", [0.3, None], ids=["momentum", "cumulative"])
def test_batch_norm_of_a_folded_layer(affine: bool, momentum: float | None) -> None:
    """Equations 2 and 3 against nn.BatchNorm2d of the unfolded layer, with gamma positive, negative and zero."""
    torch.manual_seed(0)
    ours = nn.BatchNorm2d(6, eps=1e-2, momentum=momentum, affine=affine).double()
    if affine:
        nn.init.normal_(ours.weight)
        nn.init.normal_(ours.bias)
        with torch.no_grad():
            ours.weight[2] = 0.0
            ours.weight[3] = -0.5
    theirs = copy.deepcopy(ours)
    weight = torch.randn(6, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for seed in range(3):
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        expected = theirs(F.conv2d(x, weight, bias))
        gain = folding_gain(ours)
        got = normalise("conv", ours, F.conv2d(x, weight * gain.reshape(-1, 1, 1, 1)), gain, bias)
        torch.testing.assert_close(got, expected)
    wanted = [weight, bias]
    pull = torch.randn_like(got)
    mine = torch.autograd.grad((got * pull).sum(), [*wanted, *ours.parameters()], create_graph=True)
    right = torch.autograd.grad((expected * pull).sum(), [*wanted, *theirs.parameters()], create_graph=True)
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(mine[0].square().sum(), [weight, *ours.parameters()], allow_unused=True),
        torch.autograd.grad(right[0].square().sum(), [weight, *theirs.parameters()], allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_with_batch_norm_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    prepared.train()
    calls = []
    right = torch.conv2d

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return right(*args, **kwargs)

    from quant.ops import conv

    monkeypatch.setitem(conv._CONV, 2, counted)
    prepared(x)
    assert len(calls) == 3


def test_a_branch_that_starts_switched_off_can_learn() -> None:
    """gamma = 0, as residual branches are often begun: torch.ao divides by it."""
    model, x = make("residual")
    nn.init.zeros_(model.depth_norm.weight)
    nn.init.ones_(model.depth_norm.bias)  # within the ReLU6 after it
    prepared = quant.prepare_qat(model, x)
    train(prepared, x, 3)
    assert bool(torch.isfinite(prepared(x)).all())
    assert bool((prepared.depth_norm.weight != 0).any())


def test_frozen_norms_are_what_deploys() -> None:
    """With frozen statistics and no dropout, training mode computes what eval mode does."""
    model, x = make("residual")
    model.drop.p = 0.0
    prepared = quant.prepare_qat(model, x)
    train(prepared, x, 30)
    freeze_norms(prepared)
    freeze_ranges(prepared)
    before = copy.deepcopy(prepared.norm.state_dict())
    got = prepared(x)
    assert all(torch.equal(before[key], value) for key, value in prepared.norm.state_dict().items())
    prepared.eval()
    assert torch.equal(prepared(x), got)
    freeze_norms(prepared, False)
    prepared.train()
    assert not torch.equal(prepared(x), got)


def test_a_norm_kept_in_eval_stays_so() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x).train()
    prepared.norm.eval()
    mean = prepared.norm.running_mean.clone()
    prepared(x)
    assert torch.equal(prepared.norm.running_mean, mean)
    assert not torch.equal(prepared.depth_norm.running_mean, torch.zeros(8))


def test_gradients_are_those_of_the_rounded_layer() -> None:
    """Straight through, by the closed form: dL/dW = g^T Q(x), dL/db = sum g, dL/dx = g Q(W) inside the range of x."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(7, 5)
    prepared = quant.prepare_qat(model, x).train()
    prepared(x)
    freeze_ranges(prepared)
    x = (2 * x).requires_grad_()
    pull = torch.randn(7, 3)
    prepared(x).backward(pull)
    (runner,) = runners(prepared).values()
    known: QParams = next(iter(runner.observers.values())).qparams()
    q_x = known.dequantize(known.quantize(x.detach()))
    q_weight, scale = quant.kernels.quantize_weight(model.weight)
    low, high = known.dequantize(torch.tensor([0, 255], dtype=torch.uint8))
    inside = (x > low - known.scale / 2) & (x < high + known.scale / 2)
    assert not bool(inside.all())
    torch.testing.assert_close(prepared.weight.grad, pull.T @ q_x)
    torch.testing.assert_close(prepared.bias.grad, pull.sum(dim=0))
    torch.testing.assert_close(x.grad, torch.where(inside, pull @ (q_weight.float() * scale[:, None]), 0.0))


@every_model
@every_recipe
def test_second_gradients_agree_in_either_order(name: str, recipe: str) -> None:
    """As a gradient penalty takes them: by the input and then the parameters, or the other way round."""
    model, x = make(name)
    prepared = quant.prepare_qat(model, x, Recipe(default=RECIPES[recipe]))
    train(prepared, x, 2)
    x.requires_grad_()
    parameters = [one for key, one in prepared.named_parameters() if "_quant" not in key and one.dim() > 1]
    y = prepared(x).tanh().square().sum()
    by_x, *by_parameters = torch.autograd.grad(y, [x, *parameters], create_graph=True)
    along_x, along = torch.randn_like(x), [torch.randn_like(one) for one in parameters]
    first = torch.autograd.grad((by_x * along_x).sum(), parameters, retain_graph=True)
    [second] = torch.autograd.grad(sum((one * way).sum() for one, way in zip(by_parameters, along, strict=True)), x)  # type: ignore[arg-type]
    expected = sum(float((one * way).sum()) for one, way in zip(first, along, strict=True))
    assert expected != 0.0
    assert float((second * along_x).sum()) == pytest.approx(expected, rel=1e-3)


def test_a_gradient_penalty_is_that_of_the_rounded_layers() -> None:
    """The gradient by x of v Q(relu(Q(W) Q(x))) is (v * (Q(W) Q(x) > 0)) Q(W), and Q(W) has the gradient of W."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(7, 5)
    prepared = quant.prepare_qat(model, x).train()
    x.requires_grad_()
    [by_x] = torch.autograd.grad(prepared(x).sum(), x, create_graph=True)
    (by_x.norm(dim=1) - 1).square().mean().backward()
    weights = []
    for layer in (model[0], model[2]):
        q_weight, scale = quant.kernels.quantize_weight(layer.weight)  # type: ignore[arg-type]
        weights.append((q_weight.float() * scale[:, None]).requires_grad_())
    on = F.linear(x, weights[0], model[0].bias) > 0  # type: ignore[arg-type]
    expected = (weights[1] * on) @ weights[0]
    torch.testing.assert_close(by_x, expected)
    (expected.norm(dim=1) - 1).square().mean().backward()
    for layer, weight in zip((prepared[0], prepared[2]), weights, strict=True):  # type: ignore[index]
        torch.testing.assert_close(layer.weight.grad, weight.grad)


def test_values_that_share_a_range_are_not_averaged() -> None:
    """The range of a concatenation is that of all its inputs; one that is read elsewhere has its own as well."""
    model, x = make("concatenated")
    prepared = quant.prepare_qat(model, x).train()
    prepared(x)
    (runner,) = runners(prepared).values()
    [(whole, part)] = runner.fused.joined
    with torch.no_grad():
        small = model.a(x)
        joined = torch.cat((small, 20.0 * model.b(x)), dim=1)
    for slot, values in ((whole, joined), (part, small)):
        known = runner.qparams(slot)
        assert float(known.scale) == pytest.approx(float((values.max() - values.min()) / 255), rel=0.02)


class Scaled(nn.Module):
    """Two linear layers, with a factor between them in a program of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.first(x) * scale)


@pytest.mark.parametrize("calls", [["shown", "in training"], ["shown", "an example"], ["calibrated", "calibrated"]])
@pytest.mark.parametrize("times", [1, 40])
def test_values_that_programs_share_are_not_averaged(calls: list[str], times: int) -> None:
    """As in calibration, a shared range is that of all programs, in whatever order and number their calls come."""
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(64, 8)
    if calls[0] == "calibrated":
        calibrated = quant.prepare(model, x)
        calibrated(x), calibrated(x, 10.0)
        prepared = quant.prepare_qat(calibrated)
    else:
        prepared = quant.prepare_qat(model, x, examples=[(x, 10.0)] if "an example" in calls else [])
    prepared.train()
    with torch.no_grad():
        for _ in range(times):
            prepared(x), prepared(x, 10.0)
        prepared.eval()
        q, expected = quant.convert(prepared), model(x, 10.0)
        assert float((q(x, 10.0) - expected).norm() / expected.norm()) < 0.02
        torch.testing.assert_close(q(x, 10.0), prepared(x, 10.0), rtol=0.0, atol=1e-4)


def test_ranges_of_a_further_program_begin_as_the_switches_are() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(64, 8)
    prepared = quant.prepare_qat(model, x).train()
    prepared(x)
    before = {name: runners(prepared)[""].qparams(name) for name in runners(prepared)[""].fused.slots}
    freeze_ranges(prepared)
    prepared(x, 10.0)
    runner = runners(prepared)[""]
    assert len(runner.programs()) == 2
    assert {name: runner.qparams(name) for name in before} == before
    freeze_ranges(prepared, False)
    prepared(x, 10.0)
    assert runner.qparams("first").scale > 5 * before["first"].scale


def test_a_checkpoint_whose_programs_had_one_average_loads() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(64, 8)
    prepared, other = (quant.prepare_qat(model, x, examples=[(x, 10.0)]) for _ in range(2))
    prepared.train()(x)
    prepared(x, 10.0)
    state = prepared.state_dict()
    old = {key: value for key, value in state.items() if ".members." not in key}
    old |= {f"{key.removesuffix('low')}batches": torch.tensor(2) for key in old if key.endswith("observer.low")}
    other.load_state_dict(old)
    ours, theirs = runners(other)[""], runners(prepared)[""]
    assert {name: ours.qparams(name) for name in ours.fused.slots} == {
        name: theirs.qparams(name) for name in theirs.fused.slots
    }
    with torch.no_grad():
        other.train()(x)
    assert ours.qparams("first") == theirs.qparams("first")


def test_a_checkpoint_whose_observers_were_called_points_loads() -> None:
    model, x = make("residual")
    prepared, other = quant.prepare_qat(model, x), quant.prepare_qat(model, x)
    prepared.train()(x)
    state = prepared.state_dict()
    old = {key.replace("_quant.observers.", "_quant.points."): tensor for key, tensor in state.items()}
    assert old.keys() != state.keys()
    other.load_state_dict(old)
    assert all(torch.equal(tensor, state[key]) for key, tensor in other.state_dict().items())


def test_a_float_checkpoint_loads() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    other, _ = make("residual")
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    prepared.load_state_dict(other.state_dict())
    observe_only(prepared.eval())
    torch.testing.assert_close(prepared(x), other.eval()(x))
    added = set(prepared.state_dict()) - set(other.state_dict())
    assert added
    assert all("_quant" in key.split(".") for key in added)


def test_learned_scales_are_parameters_of_their_own() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x, Recipe(default=RECIPES["lsq"]))
    extra = {name for name, _ in prepared.named_parameters()} - {name for name, _ in model.named_parameters()}
    assert "_quant.weights.stem.scale" in extra
    assert all(name.startswith("_quant.") for name in extra)
    before = {name: one.detach().clone() for name, one in prepared.named_parameters()}
    train(prepared, x, 3)
    moved = {name for name, one in prepared.named_parameters() if not torch.equal(one, before[name])}
    assert extra <= moved


@pytest.mark.parametrize("recipe", ["default", "lsq", "pact"])
def test_a_run_that_is_resumed_equals_an_unbroken_one(recipe: str) -> None:
    def start() -> tuple[nn.Module, Any, Any, Tensor]:
        model, x = make("residual")
        prepared = quant.prepare_qat(model, x, Recipe(default=RECIPES[recipe]))
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.02, momentum=0.9)
        return prepared, optimizer, quant.QATSchedule(prepared, steps=24), x

    prepared, optimizer, schedule, x = start()
    torch.manual_seed(1)
    for stop in (2, 15, 20):  # while observing, with frozen ranges, with frozen norms
        train(prepared, x, stop - schedule.count, schedule, optimizer)
        saved = copy.deepcopy((prepared.state_dict(), optimizer.state_dict(), schedule.state_dict()))
        noise = torch.get_rng_state()
        resumed, other_optimizer, other_schedule, _ = start()
        resumed.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
        other_schedule.load_state_dict(saved[2])
        torch.set_rng_state(noise)
        unbroken = train(copied := copy.deepcopy(prepared), x, 0)
        del unbroken
        first = _continued(copied, optimizer, schedule, x, noise)
        second = _continued(resumed, other_optimizer, other_schedule, x, noise)
        assert first == second
        torch.set_rng_state(noise)


@pytest.mark.parametrize("prepare", [quant.prepare, quant.prepare_qat])
def test_a_state_of_more_kinds_of_call_says_how_to_load_it(prepare: Callable[..., nn.Module]) -> None:
    class Outer(nn.Sequential):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self[0](x, scale) if scale else x

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    for model, layer in ((Scaled().eval(), "Scaled"), (Outer(Scaled()).eval(), "Outer")):
        prepared = prepare(model, x).train()
        prepared(x), prepared(x, 10.0)
        state = prepared.state_dict()
        with pytest.raises(RuntimeError, match=rf"met 1 further kinds of call of '{layer}'.* examples=\[") as said:
            prepare(model, x).load_state_dict(state)
        assert "low" not in str(said.value)
        assert len(prepare(model, x).load_state_dict(state, strict=False).unexpected_keys) == 1
        called = prepare(model, x).train()
        called(x, 10.0)
        for other in (called, prepare(model, x, examples=[(x, 10.0)])):
            other.load_state_dict(state)
            assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
        del state[min(key for key in state if "bias" in key)]
        with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
            called.load_state_dict(state)


def _continued(prepared: nn.Module, optimizer: Any, schedule: Any, x: Tensor, noise: Tensor) -> list[Any]:
    """Losses and state of four more steps, from copies of all."""
    torch.set_rng_state(noise)
    again = torch.optim.SGD(prepared.parameters(), lr=0.02, momentum=0.9)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    goes_on = quant.QATSchedule(prepared, steps=24, observe=schedule.starts["round"])
    goes_on.load_state_dict(schedule.state_dict())
    losses = train(prepared, x, 4, goes_on, again)
    return [losses, {key: value.tolist() for key, value in prepared.state_dict().items()}]


@every_recipe
def test_copies_are_equal_and_apart(recipe: str) -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x, Recipe(default=RECIPES[recipe]))
    train(prepared, x, 2)
    average = torch.optim.swa_utils.AveragedModel(prepared)
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), average.module):
        other.eval()
        prepared.eval()
        assert torch.equal(other(x), prepared(x))
        train(other, x, 1)
        assert not torch.equal(other.stem.weight, prepared.stem.weight)
        assert runners(other)[""].root is other


def test_starts_from_calibrated_ranges() -> None:
    model, x = make("residual")
    # Training starts from the user's biases, and makes its own for the rounded weights.
    known = QConfig(activation_observer="minmax", bias_correction=False)
    prepared = quant.prepare(model.eval(), x, Recipe(default=known))
    prepared(x)
    trained = quant.prepare_qat(prepared)
    ours, theirs = runners(trained)[""], runners(prepared)[""]
    for slot in theirs.fused.slots:
        assert ours.qparams(slot) == theirs.qparams(slot)
    with simulating(prepared):
        assert torch.equal(trained.eval()(x), prepared(x))
    assert quant.QATSchedule(trained, steps=100).phases == ["observe", "round"]
    assert not isinstance(theirs, TrainingRunner)


@pytest.mark.parametrize("recipe", ["lsq", "lsq+", "pact"])
def test_learned_ranges_start_from_calibrated_ones(recipe: str) -> None:
    model, x = make("residual")
    known = RECIPES[recipe]
    prepared = quant.prepare_qat(model, x, Recipe(default=known))
    runner = runners(prepared)[""]
    for quantizer in runner.observers.values():
        if not isinstance(quantizer, FakeQuantize):
            quantizer.start(torch.tensor(0.0), torch.tensor(3.0))
            assert float(quantizer.qparams().scale) == pytest.approx(3.0 / 255)
            assert int(quantizer.qparams().zero_point) == 0


def test_bad_starts_are_refused() -> None:
    model, x = make("residual")
    with pytest.raises(TypeError, match="needs example_inputs"):
        quant.prepare_qat(model)
    with pytest.raises(TypeError, match=r"quant\.prepare_qat: expected an nn\.Module"):
        quant.prepare_qat("model", x)  # type: ignore[arg-type]
    prepared = quant.prepare(model, x)
    with pytest.raises(ValueError, match=r"observer of 'input 0' saw no data|saw no data; calibrate"):
        quant.prepare_qat(prepared)
    with pytest.raises(ValueError, match="prepared for training already"):
        quant.prepare_qat(quant.prepare_qat(model, x))
    with pytest.raises(RecipeError, match=r"layer 'stem'.*axis is 0"):
        quant.prepare_qat(model, x, Recipe(default=QConfig(weight_observer="pact")))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_batch_is_refused(bad: float) -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x).train()
    x[0, 0, 0, 0] = bad
    with pytest.raises(ValueError, match=r"layer '\(root\)': . NaN and . infinite values in its input"):
        prepared(x)


def test_a_bad_weight_is_refused_by_name() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x).train()
    with torch.no_grad():
        prepared.point.weight[0] = math.nan
    with pytest.raises(ValueError, match="layer 'point': its weight holds NaN or inf"):
        prepared(x)


def test_bad_values_within_the_model_warn_by_name() -> None:
    model, x = make("twice")
    prepared = quant.prepare_qat(model, x).train()
    with torch.no_grad():
        prepared.shared.bias[0] = 3e38
        prepared.shared.weight[0] = 3e38
    with pytest.warns(UserWarning, match="layer 'shared.*infinite values in its input"):
        prepared(x.abs())


def test_convert_before_training_is_refused() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    with pytest.raises(quant.NotCalibrated, match=r"saw no data.*stem"):
        quant.convert(prepared)
    with pytest.raises(NoDataSeen, match="has seen no finite value"):
        prepared.eval()(x)


def test_convert_of_a_model_in_training_mode_is_its_eval_mode() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    train(prepared, x, 25)
    assert prepared.training
    converted = quant.convert(prepared)
    assert prepared.training
    assert not converted.training
    with torch.no_grad():
        torch.testing.assert_close(converted(x), prepared.eval()(x), atol=0.05, rtol=0.05)


def test_convert_before_rounding_warns() -> None:
    model, x = make("twice")
    prepared = quant.prepare_qat(model, x)
    schedule = quant.QATSchedule(prepared, steps=100)
    train(prepared, x, 2, schedule)
    with pytest.warns(UserWarning, match=r"layer '\(root\)' still observes in float"):
        quant.convert(prepared)


def test_unsettled_norms_warn_by_name() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    train(prepared, x, 9)  # norm has momentum 0.3, the others 0.1
    with pytest.warns(UserWarning, match="batch norms depth_norm, point_norm are mostly"):
        quant.convert(prepared)


def test_a_range_that_collapses_warns_by_name() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    train(prepared, x, 25)
    with torch.no_grad():
        prepared.depth_norm.weight.zero_()
        prepared.depth_norm.bias.fill_(-1.0)
    runner = runners(prepared)[""]
    for name in runner.fused.slots:
        if name.startswith("depth"):
            runner.observer(name).observer.reset()
    with torch.no_grad():
        prepared(x)
    with pytest.warns(UserWarning, match="only zeros were seen at depth"):
        quant.convert(prepared)
    with pytest.warns(UserWarning, match="layer 'depth.*range that is being frozen is empty"):
        freeze_ranges(prepared)


def test_a_norm_needs_more_than_one_value() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    prepared = quant.prepare_qat(model, torch.randn(5, 4)).train()
    with pytest.raises(ValueError, match="layer '0': a batch norm needs more than one value"):
        prepared(torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"layer '0': .* got input \(0, 3\)"):
        prepared(torch.randn(0, 4))


def test_optimizer_that_holds_the_float_model_warns() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x)
    with pytest.warns(UserWarning, match="does not hold 10 parameters"):
        lost = quant.check_optimizer(prepared, torch.optim.SGD(model.parameters(), lr=0.1))
    assert lost == [name for name, _ in prepared.named_parameters()]
    assert quant.check_optimizer(prepared, torch.optim.SGD(prepared.parameters(), lr=0.1)) == []
    optimizer = torch.optim.SGD([one for name, one in prepared.named_parameters() if name != "head.bias"], lr=0.1)
    with pytest.warns(UserWarning, match=r"head\.bias"):
        quant.QATSchedule(prepared, steps=3, optimizer=optimizer)


def test_phases_by_hand() -> None:
    model, x = make("residual")
    prepared = quant.prepare_qat(model, x).train()
    observe_only(prepared)
    prepared(x)
    runner = runners(prepared)[""]
    quantizers = [one for one in runner.observers.values() if isinstance(one, FakeQuantize)]
    assert not any(bool(one.quantizing) for one in quantizers)
    round_values(prepared)
    freeze_ranges(prepared)
    ranges = [one.qparams() for one in quantizers]
    prepared(3 * x)
    assert [one.qparams() for one in quantizers] == ranges
    freeze_ranges(prepared, False)
    prepared(3 * x)
    assert [one.qparams() for one in quantizers] != ranges
    with pytest.raises(ValueError, match="got Residual"):
        observe_only(model)


def test_a_parametrised_weight_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(16, 6)
    prepared = quant.prepare_qat(model, x)
    before = {name: one.detach().clone() for name, one in prepared.named_parameters()}
    losses = train(prepared, x, 20)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(one, before[name]) for name, one in prepared.named_parameters())
    agreement = parity(prepared, quant.convert(prepared), [x])
    assert agreement.holds, agreement


def test_a_weight_that_a_hook_computes_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model[1].weight_orig = nn.Parameter(model[1].weight.detach().clone())
    del model[1]._parameters["weight"]
    model[1].register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.weight_orig * 2.0))
    model(torch.randn(5, 6))
    with pytest.raises(ValueError, match="layer '1': its weight is computed by a hook"):
        quant.prepare_qat(model, torch.randn(5, 6))
    prepared = quant.prepare_qat(model, torch.randn(5, 6), Recipe({"1": None}))
    prepared.train()(torch.randn(5, 6)).sum().backward()
    assert prepared.get_parameter("1.weight_orig").grad is not None


def test_accumulated_gradients_and_checkpointing_change_nothing() -> None:
    """Recomputing a forward observes nothing twice, and normalises as before."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(16, 6, requires_grad=True)
    one, other = quant.prepare_qat(model, x.detach()).train(), quant.prepare_qat(model, x.detach()).train()
    for part in x.chunk(2):
        one(part).square().sum().backward()
        checkpoint(other, part, use_reentrant=False).square().sum().backward()
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        # The batch moved the running variance, which folds the weight, between the forward and its recomputation.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=0.02)


class Normed(nn.Module):
    """A layer norm that integers read, and the float sum around them too: a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x * (x + self.second(F.relu(self.first(x)))).exp()


def test_what_float_steps_read_is_not_rounded_for_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    p = quant.prepare_qat(Normed(), x)
    p.train()(x)
    q = quant.convert(p.eval())
    with torch.no_grad():
        assert (p(x) - q(x)).norm() < 1e-5 * q(x).norm()
        with simulating(p):
            assert (p(x) - q(x)).norm() < 1e-5 * q(x).norm()

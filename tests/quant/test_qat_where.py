"""Where people train: autocast, gradient scaling and accumulation, torch.compile, checkpointing, averages, CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.observers import FakeQuantize, NoDataSeen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quant
from quant.ops.operator import Weighted
from quant.parity import parity
from quant.recipe import QConfig, Recipe
from quant.static.runner import runners
from quant.static.simulation import simulating

RECIPES = {
    "default": QConfig(),
    "4 bits": QConfig(weight_bits=4),
    "lsq": QConfig(activation_observer="lsq", weight_observer="lsq"),
    "lsq+": QConfig(activation_observer="lsq+", weight_observer="lsq+"),
    "pact": QConfig(activation_observer="pact"),
}


class Net(nn.Module):
    """A batch norm that is folded, a residual sum, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.twice, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.twice(F.relu(self.twice(x)))) + x
        return self.head(x.mean(dim=(2, 3)))


def made(recipe: str = "default") -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 6, 6)
    prepared = quant.prepare_qat(Net(), x, Recipe(default=RECIPES[recipe])).train()
    return prepared, x, torch.arange(16) % 4


def states(prepared: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in prepared.state_dict().items()}


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(recipe: str, dtype: torch.dtype) -> None:
    """Products run in the half type, ranges and rounding in float32; what trained so deploys in float32."""
    prepared, x, labels = made(recipe)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            y = prepared(x)
            loss = F.cross_entropy(y.float(), labels)
        assert y.dtype == dtype
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    floating = [one for one in (*prepared.parameters(), *prepared.buffers()) if one.is_floating_point()]
    assert {one.dtype for one in floating} == {torch.float32}
    agreement = parity(prepared.eval(), quant.convert(prepared), [x])
    assert agreement.holds, agreement


def test_autocast_observes_what_flows() -> None:
    """The range is that of the values as the half type has them, to the bit, and is kept in float32."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.randn(9, 5)
    prepared = quant.prepare_qat(model, x).train()
    quant.qat.observe_only(prepared)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prepared(x)
        hidden = model[0](x)
    assert hidden.dtype == torch.bfloat16
    (runner,) = runners(prepared).values()
    [found] = [p.observer for p in runner.observers.values() if isinstance(p, FakeQuantize) and p.observer.name == "0"]
    assert float(found.high) == float(hidden.detach().max())
    assert float(found.low) == float(hidden.detach().min())


def test_a_step_that_the_scaler_skips_leaves_weights_and_ranges_finite() -> None:
    prepared, x, labels = made()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    weight = prepared.get_parameter("stem.weight").detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(prepared(x), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**39
    assert torch.equal(prepared.get_parameter("stem.weight"), weight)
    assert all(bool(torch.isfinite(one).all()) for one in prepared.buffers())


def test_accumulated_gradients_are_the_sum() -> None:
    """With frozen ranges and norms two half batches are the batch; each forward counts as a batch for ranges."""
    prepared, x, labels = made()
    for _ in range(3):
        prepared(x)
    quant.qat.freeze_norms(prepared)
    (runner,) = runners(prepared).values()
    counts = [p.observer.batches.clone() for p in runner.observers.values() if isinstance(p, FakeQuantize)]
    assert {int(one) for one in counts} == {3}
    quant.qat.freeze_ranges(prepared)
    whole = torch.autograd.grad(F.cross_entropy(prepared(x), labels, reduction="sum"), list(prepared.parameters()))
    for part, one in zip(x.chunk(2), labels.chunk(2), strict=True):
        F.cross_entropy(prepared(part), one, reduction="sum").backward()
    for parameter, expected in zip(prepared.parameters(), whole, strict=True):
        # Sums in another order may round a value to the next step.
        assert float((parameter.grad - expected).abs().max()) < 0.01 * float(expected.abs().max())


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Of torch's own: it makes an instance of a Function to trace it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["default", "lsq+"])
def test_compiled_without_a_graph_break(recipe: str) -> None:
    """One graph forward and one backward; outputs, gradients, ranges and statistics are eager's. Switches recompile:
    an old graph is never run after a phase has changed."""
    eager, x, labels = made(recipe)
    eager(x)  # learned scales start at the first batch, outside the graph
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)

    def step(model: Any, owner: nn.Module) -> Tensor:
        owner.zero_grad()
        y: Tensor = model(x)
        F.cross_entropy(y, labels).backward()
        return y

    def compare() -> None:
        for _ in range(2):
            torch.testing.assert_close(step(compiled, other), step(eager, eager), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(other.parameters(), eager.parameters(), strict=True):
            if mine.grad is not None or theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        for mine, theirs in zip(other.state_dict().values(), eager.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

    compare()
    for model in (eager, other):
        quant.qat.freeze_ranges(model)
        quant.qat.freeze_norms(model)
    compare()
    with torch.no_grad():
        torch.testing.assert_close(compiled(2 * x), eager(2 * x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.eval()(x), eager.eval()(x))
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_checkpointing_observes_once(recipe: str, reentrant: bool) -> None:
    one, x, _ = made(recipe)
    one(x)
    other = copy.deepcopy(one)
    x = x.requires_grad_()
    one(x).square().sum().backward()
    checkpoint(other, x, use_reentrant=reentrant).square().sum().backward()
    for mine, theirs in zip(states(one).values(), states(other).values(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.get_parameter("stem.weight").grad is not None


def test_an_average_of_the_weights_deploys() -> None:
    """EMA: parameters and, with use_buffers, ranges are averaged; its eval mode is what convert gives."""
    prepared, x, labels = made()
    average = torch.optim.swa_utils.AveragedModel(
        prepared, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    schedule = quant.QATSchedule(prepared, 40)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(prepared(x), labels).backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(prepared)
    whole = quant.convert(average)
    assert type(whole) is type(average.module)
    agreement = parity(average, whole, [x])
    assert agreement.holds, agreement
    deployed = average.module.eval()
    with torch.no_grad():
        y = deployed(x)
        with simulating(deployed):
            assert torch.equal(deployed(x), y)
        assert torch.equal(quant.convert(deployed)(x), whole(x))
    agreement = parity(deployed, quant.convert(deployed), [x])
    assert agreement.holds, agreement


@pytest.mark.parametrize("formula", ["lerp", "sum"])
def test_an_average_that_began_without_ranges_is_named(formula: str) -> None:
    """As timm's ModelEmaV3 and ModelEmaV2 begin, before the first batch: inf and -inf stay in every average."""
    prepared, x, _ = made()
    average = copy.deepcopy(prepared).eval()

    def update() -> None:
        for mine, theirs in zip(average.state_dict().values(), prepared.state_dict().values(), strict=True):
            if not mine.is_floating_point():
                mine.copy_(theirs)
            elif formula == "lerp":
                mine.lerp_(theirs, 0.1)
            else:
                mine.copy_(0.9 * mine + 0.1 * theirs)

    for _ in range(25):  # batch norms are settled
        prepared(x)
        update()
    average.eval()
    for call in (lambda: average(x), lambda: quant.convert(average)):
        with pytest.raises(NoDataSeen, match="an average that began before the first batch"):
            call()
    average.load_state_dict(prepared.state_dict())  # as its set() does
    prepared(x)
    update()
    average.eval()
    assert parity(average, quant.convert(average), [x]).holds


def test_the_smallest_input_scale_gives_room_for_the_bias() -> None:
    """A layer that is called twice has one weight, whose bias must fit int32 at the smaller of its two input scales."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 4)

        def forward(self, x: Tensor, small: Tensor) -> Tensor:
            return self.shared(x) + self.shared(small)

    torch.manual_seed(0)
    model, x = Twice(), (torch.randn(8, 4), 1e-6 * torch.randn(8, 4))
    with torch.no_grad():
        model.shared.weight.mul_(1e-3)
        model.shared.bias.fill_(100.0)
    prepared = quant.prepare_qat(model, x).train()
    prepared(*x)
    prepared.eval()
    (runner,) = runners(prepared).values()
    [first, _] = [step for step in runner.fused.steps if isinstance(step.operator, Weighted)]
    scales = [runner.observer(runner.fused.slot_of[value.index]).qparams().scale for value in runner.graph.nodes[:2]]  # type: ignore[operator]
    assert float(scales[0]) > 1e3 * float(scales[1])
    assert float(runner._smallest(first)) == float(scales[1])
    weight_scale = runner._rounded(first, model.shared.weight, model.shared.bias)[1]
    assert bool((model.shared.bias / (weight_scale * scales[1]) < 2**31).all())
    assert not bool((model.shared.bias / (model.shared.weight.abs().amax(1) / 127 * scales[1]) < 2**31).all())
    with torch.no_grad():
        y = prepared(*x)
        with simulating(prepared):
            assert torch.equal(prepared(*x), y)


@pytest.mark.filterwarnings("ignore:quant.convert. the running statistics:UserWarning")  # 20 steps are few
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    prepared, x, labels = made()
    here = copy.deepcopy(prepared)
    there = prepared.cuda()
    for model, inputs, target in ((here, x, labels), (there, x.cuda(), labels.cuda())):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        schedule = quant.QATSchedule(model, 20)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            schedule.step()
    for key, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[key].cpu(), value, rtol=0.01, atol=1e-3, msg=key)
    back = there.cpu().eval()
    agreement = parity(back, quant.convert(back), [x])
    assert agreement.holds, agreement

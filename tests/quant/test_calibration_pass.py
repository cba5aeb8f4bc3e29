"""Calibration computes a convolution's batch norm and clamp where its output lies: with the float model's bits, the
ranges that it had before, and not where somebody would notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from quant.kernels.ops import extension_problem
from quant.observers import one_pass
from torch import Tensor, nn

import quant
from quant.static import observation

from .conftest import FunctionNames

needs_extension = pytest.mark.skipif(bool(extension_problem()), reason=extension_problem() or "built")


def block(inputs: int, outputs: int, *after: nn.Module, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False), *after)


class Net(nn.Module):
    """Every form of what follows a convolution, and one whose parts others read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8, nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.depthwise = block(8, 8, nn.BatchNorm2d(8, affine=False), nn.ReLU(), groups=8)
        self.project = block(8, 8, nn.BatchNorm2d(8))
        self.plain = block(8, 8, nn.Hardtanh(-1.0, 2.0))
        self.both = block(8, 8, nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.stem(x))
        x = F.relu(x + self.project(x))
        y = self.both[0](self.plain(x))
        return self.fc((self.both[1](y) + y).mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    model(torch.randn(8, 3, 16, 16))
    return model.eval()


def batches() -> list[Tensor]:
    return [torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) * (seed + 1) for seed in range(3)]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *, refuse: bool = False) -> Iterator[list[bool]]:
    """What `normalize_and_observe` answered; `refuse` lets everything be computed and observed one after the other."""
    answers: list[bool] = []

    def answer(*args: object) -> bool:
        answers.append(not refuse and one_pass.normalize_and_observe(*args))  # type: ignore[arg-type]
        return answers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(observation, "normalize_and_observe", answer)
        if refuse:
            patch.setattr(observation, "observe_together", lambda *_: False)
        yield answers


def calibrated(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, *, refuse: bool = False
) -> tuple[nn.Module, list[bool]]:
    prepared = quant.prepare(model, batches()[0])
    with counted(monkeypatch, refuse=refuse) as answers, torch.no_grad():
        for batch in batches():
            assert torch.equal(prepared(batch), model(batch))
    return prepared, answers


@needs_extension
def test_the_bits_of_the_float_model_and_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    (one, answers), (other, refused) = (calibrated(model, monkeypatch, refuse=refuse) for refuse in (False, True))
    assert answers == [True] * len(answers)
    assert len(answers) == 4 * len(batches()), "stem, depthwise, project, plain"
    assert refused == [False] * len(refused)
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


WATCHED: dict[str, Callable[[nn.Module], object]] = {
    "a hook on the convolution": lambda model: model.stem[0].register_forward_hook(lambda *_: None),
    "a hook on the norm": lambda model: model.stem[1].register_forward_pre_hook(lambda *_: None),
    "a hook on the activation": lambda model: model.stem[2].register_forward_hook(lambda *_: None),
    "a norm in training": lambda model: model.stem[1].train(),
}


@needs_extension
@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED.keys())
def test_what_somebody_watches_is_called(watch: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = quant.prepare(net(), batches()[0])
    watch(prepared)
    with counted(monkeypatch) as answers, torch.no_grad():
        prepared(batches()[1])
    assert sum(answers) == 3, answers


def test_hooks_see_each_call() -> None:
    prepared = quant.prepare(net(), batches()[0])
    seen: list[Tensor] = []
    prepared.stem[1].register_forward_hook(lambda module, args, output: seen.extend((*args, output.clone())))
    with torch.no_grad():
        prepared(batches()[1])
    before, after = seen
    assert torch.equal(prepared.stem[1](before), after)


@needs_extension
def test_with_gradients_torch_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    prepared = quant.prepare(model, batches()[0])
    with counted(monkeypatch) as answers:
        prepared(batches()[1]).square().sum().backward()
        model(batches()[1]).square().sum().backward()
    assert not any(answers)
    assert torch.equal(prepared.stem[0].weight.grad, model.stem[0].weight.grad)


def test_a_mode_of_torch_sees_each_function() -> None:
    prepared = quant.prepare(net(), batches()[0])
    with torch.no_grad(), FunctionNames() as names:
        prepared(batches()[1])
    assert names.seen.count("batch_norm") == 4


def test_a_norm_that_changes_between_batches_is_read_anew() -> None:
    model = net()
    prepared = quant.prepare(model, batches()[0])
    with torch.no_grad():
        prepared(batches()[0])
        for one in (model, prepared):
            one.stem[1].running_mean.add_(0.25)
            one.stem[1].weight.mul_(1.5)
        assert torch.equal(prepared(batches()[1]), model(batches()[1]))


def test_an_observer_that_was_replaced_is_shown_the_values() -> None:
    prepared = quant.prepare(net(), batches()[0])
    with torch.no_grad():
        prepared(batches()[0])
        runner = prepared._quant
        slot = next(name for name in runner.fused.slots if name.startswith("stem"))
        seen = quant.observers.MinMaxObserver()
        runner.set_observer(slot, seen)
        prepared(batches()[1])
    assert int(seen.low.numel()) == 1
    assert float(seen.high) > 0.0

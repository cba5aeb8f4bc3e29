"""The pass for all who watch a value keeps what each would keep by itself, and leaves out who does something else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import ACTIVATION_U8, QScheme
from quant.kernels.ops import extension_problem
from quant.observers import ChannelMean, HistogramObserver, MinMaxObserver, PercentileObserver
from quant.observers.one_pass import normalize_and_observe, observe_together
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(bool(extension_problem()), reason=extension_problem() or "built")

RELU = (0.0, math.inf)
PER_CHANNEL = QScheme(torch.uint8, 0, 255, symmetric=False, axis=1)


def batches() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, 6, 7) * 2**i for i in range(3)]


def states(*modules: nn.Module) -> list[Tensor]:
    return [buffer for module in modules for buffer in module.state_dict().values()]


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("axes", [[], [-3], [-3, -3], [-1]], ids=str)
@pytest.mark.parametrize("kind", [HistogramObserver, PercentileObserver])
def test_together_is_one_after_the_other(kind: type[HistogramObserver], axes: list[int]) -> None:
    observer, means = kind(), [ChannelMean(axis) for axis in axes]
    alone, others = copy.deepcopy(observer), copy.deepcopy(means)
    for x in batches():
        assert observe_together(x, observer, means)
        alone(x)
        for mean in others:
            mean(x)
    assert_same(states(observer, *means), states(alone, *others))


def frozen_norm(channels: int = 5) -> nn.BatchNorm2d:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            assert tensor is not None
            tensor.normal_()
        assert norm.running_var is not None
        norm.running_var.uniform_(0.1, 3.0)
    return norm.eval()


@torch.no_grad()
def test_a_norm_and_a_clamp_on_the_way() -> None:
    observer, means, norm = HistogramObserver(), [ChannelMean(-3)], frozen_norm()
    alone, others = copy.deepcopy(observer), copy.deepcopy(means)
    for x in batches():
        expected = norm(x).clamp(*RELU)
        assert normalize_and_observe(x, norm, RELU, observer, means)
        assert torch.equal(x, expected)
        alone(expected)
        others[0](expected)
    assert_same(states(observer, *means), states(alone, *others))


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


class Halving(HistogramObserver):
    """Looks at halves of what it is shown."""

    def _observe(self, x: Tensor) -> None:
        super()._observe(x / 2)


ALONE: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "an observer with a hook": lambda: (batches()[0], with_hook(HistogramObserver()), []),
    "a mean with a hook": lambda: (batches()[0], HistogramObserver(), [with_hook(ChannelMean(-3))]),
    "a subclass that observes otherwise": lambda: (batches()[0], Halving(), []),
    "another observer": lambda: (batches()[0], MinMaxObserver(), []),
    "a range per channel": lambda: (batches()[0], HistogramObserver(PER_CHANNEL), []),
    "means of two axes": lambda: (batches()[0], HistogramObserver(), [ChannelMean(-3), ChannelMean(-1)]),
    "an axis that is not there": lambda: (batches()[0], HistogramObserver(), [ChannelMean(-5)]),
    "float64": lambda: (batches()[0].double(), HistogramObserver(), []),
    "no values": lambda: (torch.empty(0, 5), HistogramObserver(), []),
}


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE.keys())
def test_who_looks_alone(case: Callable[[], tuple[Any, Any, Any]]) -> None:
    x, observer, means = case()
    before = [one.clone() for one in states(observer, *means)]
    assert not observe_together(x, observer, means)
    assert_same(before, states(observer, *means))


def test_a_hook_of_all_modules_is_told() -> None:
    told: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: told.append(module))
    try:
        assert not observe_together(batches()[0], HistogramObserver(), [])
    finally:
        handle.remove()


class Subclass(Tensor):
    """A tensor of somebody's own."""


def with_own(**tensors: Tensor) -> nn.Module:
    """A norm of whose parameters or buffers some are plain attributes."""
    norm = frozen_norm()
    for name, tensor in tensors.items():
        delattr(norm, name)
        setattr(norm, name, tensor)
    return norm


@torch.no_grad()
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("as_buffer", [False, True], ids=["attribute", "buffer"])
def test_a_norm_s_tensors_are_read_where_its_forward_reads_them(name: str, as_buffer: bool) -> None:
    norm = with_own(**{name: torch.linspace(0.5, 2.0, 5)})
    if as_buffer:
        value = getattr(norm, name)
        delattr(norm, name)
        norm.register_buffer(name, value)
    x = batches()[0]
    expected = norm(x)
    assert normalize_and_observe(x, norm, (-math.inf, math.inf), HistogramObserver(), [])
    assert torch.equal(x, expected)


LEFT_TO_TORCH: dict[str, Callable[[], tuple[Tensor, Any]]] = {
    "in training": lambda: (batches()[0], frozen_norm().train()),
    "without statistics": lambda: (batches()[0], nn.BatchNorm2d(5, track_running_stats=False).eval()),
    "of double": lambda: (batches()[0], frozen_norm().double()),
    "of other channels": lambda: (batches()[0], frozen_norm(4)),
    "rows": lambda: (torch.randn(3, 5), frozen_norm()),
    "statistics that are a column": lambda: (batches()[0], with_own(running_mean=torch.zeros(5, 2)[:, 0])),
    "a weight that is repeated": lambda: (batches()[0], with_own(weight=torch.ones(1).expand(5))),
    "a weight of a subclass": lambda: (batches()[0], with_own(weight=torch.ones(5).as_subclass(Subclass))),
    "an empty batch": lambda: (batches()[0][:0], frozen_norm()),
    "tiny planes": lambda: (torch.randn(3, 5, 1, 1), frozen_norm()),
    "channels last": lambda: (batches()[0].to(memory_format=torch.channels_last), frozen_norm()),
    "with a gradient": lambda: (batches()[0].requires_grad_(), frozen_norm()),
}


@pytest.mark.parametrize("case", LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH.keys())
def test_what_is_left_to_torch_is_not_touched(case: Callable[[], tuple[Tensor, Any]]) -> None:
    x, norm = case()
    before = x.detach().clone()
    assert not normalize_and_observe(x, norm, RELU, HistogramObserver(ACTIVATION_U8), [])
    assert torch.equal(x, before)

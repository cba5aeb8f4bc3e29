"""Calibration computes a float convolution by another way than torch's only where that gives torch's bits, sooner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from quant.kernels.ops import extension_problem
from torch import Tensor, nn

import quant
from quant.static import float_convolutions
from quant.static.float_convolutions import MOST_SHAPES, TRIED_AT, WAYS, FloatConvolution, Way

from .conftest import FunctionNames

POINTWISE, DEPTHWISE = WAYS
needs_extension = pytest.mark.skipif(bool(extension_problem()), reason=extension_problem() or "built")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


def pointwise() -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(6, 10, 1)


def depthwise() -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(6, 6, 3, padding=1, stride=2, groups=6, bias=False)


def image(seed: int, *, size: int = 9) -> Tensor:
    return torch.randn(2, 6, size, size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Spy:
    """A way whose calls are counted, and a clock by which it takes `seconds` where torch takes 1."""

    way: Way
    seconds: float = 0.5
    calls: int = 0
    compute: Callable[[Any, Tensor], Tensor] = lambda conv, x: conv(x)

    def __post_init__(self) -> None:
        self.way = replace(self.way, compute=self._counted)

    def _counted(self, operator: Any, conv: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.compute(conv, x)

    def timed(self, compute: Callable[..., Tensor], *args: Any) -> tuple[Tensor, float]:
        return compute(*args), self.seconds if isinstance(compute, functools.partial) else 1.0


TRIAL = 2
"""Calls of a way in a trial."""


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def calls_of(
    spy: Spy,
    conv: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    count: int = TRIED_AT + 4,
    inputs: Callable[[int], Tensor] = image,
) -> int:
    """Calibrate a network of the convolution with batches of one shape; how often the way computed one."""
    kind = POINTWISE if spy.way.takes is POINTWISE.takes else DEPTHWISE
    monkeypatch.setattr(float_convolutions, "WAYS", tuple(spy.way if way is kind else way for way in WAYS))
    monkeypatch.setattr(float_convolutions, "_timed", spy.timed)
    model = nn.Sequential(conv, nn.ReLU()).eval()
    prepared = quant.prepare(model, inputs(0))
    before = spy.calls
    with torch.no_grad():
        for seed in range(count):
            assert torch.equal(prepared(inputs(seed)), model(inputs(seed)))
    return spy.calls - before


def test_what_is_sooner_with_the_same_bits_is_taken_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(Spy(POINTWISE), pointwise(), monkeypatch) == TRIAL + 4


def test_short_calibrations_try_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(Spy(POINTWISE), pointwise(), monkeypatch, count=TRIED_AT - 1) == 0


def test_what_is_not_sooner_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of(Spy(POINTWISE, seconds=0.99), pointwise(), monkeypatch) == TRIAL


def test_other_bits_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Spy(POINTWISE, compute=lambda conv, x: conv(x) * (1 + 2.0**-23))
    assert calls_of(other, pointwise(), monkeypatch) == 1


def test_values_that_are_all_alike_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = Spy(POINTWISE)
    conv = pointwise()
    nn.init.constant_(conv.bias, 0.5)
    assert calls_of(zeros, conv, monkeypatch, inputs=lambda seed: torch.zeros(2, 6, 9, 9)) == 0


OPEN: dict[str, Callable[[nn.Module], object]] = {
    "a hook": lambda conv: conv.register_forward_hook(lambda *_: None),
    "a forward of its own": lambda conv: setattr(conv, "forward", conv.forward),
}


@pytest.mark.parametrize("watch", OPEN.values(), ids=OPEN.keys())
def test_what_somebody_watches_is_called(watch: Callable[[nn.Module], object]) -> None:
    conv = pointwise()
    with torch.no_grad():
        assert float_convolutions._is_open_to_choice(conv, image(0))
        watch(conv)
        assert not float_convolutions._is_open_to_choice(conv, image(0))


@needs_extension
def test_a_mode_of_torch_sees_each_convolution() -> None:
    prepared = quant.prepare(nn.Sequential(depthwise(), nn.ReLU()).eval(), image(0))
    with torch.no_grad():
        for seed in range(TRIED_AT + 1):
            prepared(image(seed))
        with FunctionNames() as names:
            prepared(image(1))
    assert "conv2d" in names.seen


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "doubles": lambda x: x.double(),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "one image without a batch": lambda x: x[0],
    "no samples": lambda x: x[:0],
}


@pytest.mark.parametrize("change", UNLIKE.values(), ids=UNLIKE.keys())
def test_other_inputs_are_torchs(change: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        assert not float_convolutions._is_open_to_choice(pointwise(), change(image(0)))


def test_gradients_and_autocast_are_torchs() -> None:
    assert not float_convolutions._is_open_to_choice(pointwise(), image(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not float_convolutions._is_open_to_choice(pointwise(), image(0))


KINDS: dict[str, tuple[Callable[[], nn.Conv2d], Way | None]] = {
    "1x1": (pointwise, POINTWISE),
    "1x1 by two": (lambda: nn.Conv2d(4, 4, 1, stride=2), None),
    "1x1 in groups": (lambda: nn.Conv2d(4, 8, 1, groups=2), None),
    "3x3": (lambda: nn.Conv2d(4, 4, 3), None),
    "depthwise": (depthwise, DEPTHWISE),
    "depthwise, two outputs a channel": (lambda: nn.Conv2d(4, 8, 3, groups=4), None),
    "depthwise, reflected": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="reflect"), None),
    "depthwise, same": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), DEPTHWISE),
    "depthwise, same and uneven": (lambda: nn.Conv2d(4, 4, 2, padding="same", groups=4), None),
    "1x1, same": (lambda: nn.Conv2d(4, 4, 1, padding="same"), POINTWISE),
    "depthwise, dilated far": (lambda: nn.Conv2d(4, 4, 3, dilation=400, padding=400, groups=4), None),
}


def choice_of(conv: nn.Conv2d) -> FloatConvolution | None:
    """That of calibration."""
    prepared = quant.prepare(nn.Sequential(conv).eval(), torch.randn(2, conv.in_channels, 9, 9))
    runner = prepared._quant
    nodes = {step.nodes[0]: step.operator for step in runner.fused.steps}
    return next(
        (
            choice
            for node in runner.graph.nodes
            if (choice := float_convolutions.float_convolution_of(node, nodes.get(node.index), runner.root)) is not None
        ),
        None,
    )


@needs_extension
@needs_onednn
@pytest.mark.parametrize(("make", "way"), KINDS.values(), ids=KINDS.keys())
def test_the_kinds(make: Callable[[], nn.Conv2d], way: Way | None) -> None:
    choice = choice_of(make())
    assert (None if choice is None else choice._way) is way


def test_many_samples_and_threads_take_onednn_in_torch_already() -> None:
    assert POINTWISE.differs(15)
    assert not POINTWISE.differs(16)
    torch.set_num_threads(2)
    assert not POINTWISE.differs(1)


@needs_extension
@needs_onednn
@pytest.mark.parametrize("make", [pointwise, depthwise])
def test_each_way_computes_the_convolution(make: Callable[[], nn.Conv2d]) -> None:
    conv, x = make(), image(3)
    choice = choice_of(conv)
    assert choice is not None
    with torch.no_grad():
        torch.testing.assert_close(choice._way.compute(choice._operator, conv, x), conv(x))


@needs_extension
@pytest.mark.parametrize("make", [pointwise, depthwise])
def test_by_the_clock_of_this_machine_the_bits_are_torchs(make: Callable[[], nn.Conv2d]) -> None:
    model = nn.Sequential(make(), nn.ReLU()).eval()
    prepared = quant.prepare(model, image(0))
    with torch.no_grad():
        for seed in range(TRIED_AT + 3):
            assert torch.equal(prepared(image(seed)), model(image(seed)))


@needs_onednn
def test_what_is_remembered_of_shapes_is_bounded() -> None:
    choice, root = choice_of(pointwise()), nn.Sequential(pointwise())
    assert choice is not None
    with torch.no_grad():
        for size in range(1, 2 * MOST_SHAPES):
            choice(root, image(0, size=size))
    assert len(choice._calls) <= MOST_SHAPES


@pytest.mark.parametrize("make", [pointwise, depthwise])
def test_a_weight_that_changes_between_batches_is_read_anew(
    make: Callable[[], nn.Conv2d], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float_convolutions, "WORTH", -1e9)  # whatever has the bits is taken
    model = nn.Sequential(make(), nn.ReLU()).eval()
    prepared = quant.prepare(model, image(0))
    with torch.no_grad():
        for seed in range(TRIED_AT + 1):
            prepared(image(seed))
        for one in (model, prepared):
            one[0].weight.mul_(1.5)
        assert torch.equal(prepared(image(1)), model(image(1)))

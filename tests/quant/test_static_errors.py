"""What a statically quantised model says of inputs that do not fit: the layer, what was expected and what came."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn

import quant
from quant.runtime.matching import CaptureMismatch
from quant.static.kept_graph import ATTRIBUTE


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8 * 36, 4))
    return quant.quantize_static(model.eval(), [torch.randn(4, 3, 8, 8)], progress=False)


def test_another_number_of_channels_names_the_first_layer(converted: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"layer '0' \(%2\): q_x has 4 channels, q_weight \[8, 3, 3, 3\] expects 3"):
        converted(torch.randn(1, 4, 8, 8))


def test_another_image_size_names_the_layer_that_it_does_not_fit(converted: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"layer '4' \(%\d+\): .*expected .*288"):
        converted(torch.randn(1, 3, 9, 9))


def test_another_dtype_names_the_input(converted: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"expected torch\.float32, got torch\.float64") as raised:
        converted(torch.randn(1, 3, 8, 8, dtype=torch.float64))
    assert "'input' was torch.float32 in example_inputs and is torch.float64 now" in str(raised.value.__cause__)


def test_a_good_call_after_a_bad_one_is_as_before(converted: nn.Module) -> None:
    x = torch.randn(1, 3, 8, 8)
    before = converted(x)
    with pytest.raises(ValueError):
        converted(torch.randn(1, 4, 8, 8))
    assert torch.equal(converted(x), before)


class CalledTwice(nn.Module):
    """One convolution at two places, of which only the second is followed by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.conv(x))).relu().mean((2, 3))


def test_a_batch_norm_is_not_folded_into_a_layer_that_is_called_elsewhere() -> None:
    torch.manual_seed(0)
    model = CalledTwice()
    model(torch.randn(64, 4, 8, 8) * 3 + 1)  # running statistics of its own
    model.eval()
    x = torch.randn(8, 4, 8, 8)
    with torch.no_grad():
        expected, got = model(x), quant.quantize_static(model, [x], progress=False)(x)
    assert float((got - expected).norm() / expected.norm()) < 0.03


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


X = torch.ones(2, 4)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "int8 again": (
        lambda: quant.prepare(quant.quantize_static(linear(), [torch.eye(4)], progress=False), X),
        ValueError,
        "the model is int8 already; start from the float model",
    ),
    "scripted": (
        lambda: quant.prepare(torch.jit.trace(linear(), X), X),
        TypeError,
        "is compiled .*quantise the module",
    ),
    "compiled": (lambda: quant.prepare(torch.compile(linear()), X), TypeError, "is compiled .*compile the result"),
    "meta": (lambda: quant.prepare(linear().to("meta"), X), ValueError, "0.weight, 0.bias are on the meta device"),
    "double": (
        lambda: quant.prepare(linear().double(), X.double()),
        quant.NothingQuantized,
        "its input is torch.float64, expected torch.float32",
    ),
    "a dict for a recipe": (
        lambda: quant.prepare(linear(), X, {"0": None}),  # type: ignore[arg-type]
        TypeError,
        "expected a quant.Recipe, got dict; quant.Recipe",
    ),
    "one batch": (
        lambda: quant.quantize_static(linear(), X, progress=False),
        TypeError,
        "quant.quantize_static: batches is a Tensor, expected an iterable of batches",
    ),
    "arrays": (
        lambda: quant.quantize_static(linear(), [np.ones((2, 4))], progress=False),
        TypeError,
        "the batch is a ndarray, expected a tensor",
    ),
    "load into a class": (
        lambda: quant.load("any", model=nn.Linear),  # type: ignore[arg-type]
        TypeError,
        "model is a type, expected the float nn.Module",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("call", "kind", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_quantised_is_said_with_the_way_out(
    call: Callable[[], Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_an_array_for_a_tensor_is_named_and_not_printed(converted: nn.Module) -> None:
    with pytest.raises((TypeError, AttributeError)) as raised:
        converted(np.ones((1, 3, 8, 8)))
    assert isinstance(raised.value.__cause__, CaptureMismatch)
    assert "'input' was a tensor in example_inputs and is a ndarray now" in str(raised.value.__cause__)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.layer(x if shift is None else x + shift)


def test_a_batch_that_was_cut_like_a_labelled_one_is_a_warning_that_says_so() -> None:
    prepared = quant.prepare(Shifted().eval(), (X, X))
    with pytest.warns(CalibrationWarning) as said:
        quant.calibrate.run(prepared, [(X, X)], progress=False)
    assert any(
        "the rest counts as labels" in str(one.message)
        and "meant for shift, give dicts or forward=" in str(one.message)
        for one in said
    )


class Glued(nn.Module):
    """A concatenation and a view in the middle of one native call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([self.one(x), self.two(y)], dim=1)
        return self.last(joined.reshape(-1, 4))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_an_error_names_the_step_and_its_place_in_the_program(backend: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    q = quant.quantize_static(Glued().eval(), [x], quant.Recipe(backend=backend), progress=False)
    runner: Any = q._modules["_quant"]
    [cat] = [one for one in runner.program.instructions if "cat" in one.step]
    # The plan's own words natively, torch's step by step.
    with pytest.raises((ValueError, RuntimeError), match=rf"layer '{cat.step}' \(%{cat.out}\): "):
        q(torch.randn(4, 3, 8, 8), torch.randn(4, 3, 9, 9))


class Added(nn.Module):
    """A sum of integers, in which torch finds out about sizes where no plan does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.last(self.one(x) + self.two(y))
        return out


@pytest.mark.parametrize("backend", [None, "reference"])
def test_an_error_of_torch_in_a_kernel_names_the_step_too(backend: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    q = quant.quantize_static(Added().eval(), [x], quant.Recipe(backend=backend), progress=False)
    runner: Any = q._modules["_quant"]
    [added] = [one for one in runner.program.instructions if one.kind == "add"]
    with pytest.raises((ValueError, RuntimeError), match=rf"^layer '{added.step}' \(%{added.out}\): "):
        q(torch.randn(4, 3, 8, 8), torch.randn(4, 3, 9, 9))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_program_runs_without_the_captured_graph(backend: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    prepared = quant.prepare(Glued().eval(), x)
    prepared(*x)
    q = quant.convert(prepared, backend=backend)
    before = q(*x)
    runner: Any = q._modules["_quant"]
    del runner.__dict__[ATTRIBUTE]
    assert torch.equal(q(*x), before)
    q.one = nn.Conv2d(3, 4, 3)  # a step of the user's own module, in place of the integers
    assert q(*x).shape == before.shape
    with pytest.raises(ValueError, match="Glued: its program has no captured graph beside it; convert the float model"):
        quant.compare(Glued().eval(), q, [x])


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dtype": (lambda x: x.half(), "expected torch.float32, got torch.float16: call it with x.float()"),
    "width": (lambda x: torch.cat((x, x), 1), r"input has shape .4, 32."),
    "no tensor": (lambda x: x.tolist(), "expected a tensor, got a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_layer_called_by_itself_names_itself(wrong: str, backend: str | None, tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4))).eval()

    q = quant.quantize_static(model(), [torch.randn(4, 8)], quant.Recipe(backend=backend), progress=False)
    quant.save(q, tmp_path / "q.q8")
    change, message = WRONG[wrong]
    message = rf"^layer '2\.0' \(int8 linear\): {message}"
    for other in (q, copy.deepcopy(q), quant.load(tmp_path / "q.q8", model=model())):
        with pytest.raises((TypeError, ValueError), match=message):
            other.get_submodule("2.0")(change(torch.randn(4, 16)))
    assert not any("layer_name" in name for name in q.state_dict())


def test_a_half_input_of_a_static_model_names_the_layer() -> None:
    q = quant.quantize_static(nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(4, 8)], progress=False)
    with pytest.raises(TypeError, match=r"layer '0' \(int8 linear\): expected torch.float32, got torch.float16"):
        q(torch.randn(4, 8).half())

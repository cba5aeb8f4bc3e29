"""Static quantisation in one call: what the batches may be, and that it equals the three steps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.types import CalibrationWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor, gain: float = 1.0) -> Tensor:
        return self.head(self.conv(images * gain).relu().mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def images() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, 8, 8) for _ in range(3)]


def in_steps(net: nn.Module, batches: list[Tensor]) -> nn.Module:
    prepared = quant.prepare(net, batches[0])
    quant.calibrate.run(prepared, batches, progress=False)
    return quant.convert(prepared)


FORMS: dict[str, Any] = {
    "tensors": lambda images: images,
    "generator": lambda images: (x for x in images),
    "input and label": lambda images: [(x, torch.zeros(4)) for x in images],
    "dicts": lambda images: [{"images": x} for x in images],
    "dicts with labels": lambda images: [{"images": x, "label": 0} for x in images],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_any_form_of_batches_gives_the_model_of_the_three_steps(
    net: nn.Module, images: list[Tensor], form: Any
) -> None:
    q = quant.quantize_static(net, form(images), progress=False)
    assert torch.equal(q(images[0]), in_steps(net, images)(images[0]))


@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_a_limit_ends_the_data(net: nn.Module, images: list[Tensor]) -> None:
    q = quant.quantize_static(net, images, limit=1, progress=False)
    assert torch.equal(q(images[0]), in_steps(net, images[:1])(images[0]))
    assert not torch.equal(q(images[0]), in_steps(net, images)(images[0]))


@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_the_model_is_captured_with_the_example_inputs(net: nn.Module, images: list[Tensor]) -> None:
    half = {"images": images[0], "gain": 0.5}
    both = quant.quantize_static(net, images, example_inputs=half, progress=False)
    assert torch.equal(both(images[0]), quant.quantize_static(net, images, progress=False)(images[0]))
    q = quant.quantize_static(net, [half], example_inputs=half, progress=False)
    assert torch.equal(q(**half), quant.quantize_static(net, [half], progress=False)(**half))


def test_a_forward_of_the_users_is_followed_to_its_first_call(net: nn.Module, images: list[Tensor]) -> None:
    batches = [{"pictures": x, "name": "a"} for x in images]
    q = quant.quantize_static(net, batches, forward=lambda model, batch: model(batch["pictures"]), progress=False)
    assert torch.equal(q(images[0]), in_steps(net, images)(images[0]))
    assert not net._forward_pre_hooks


def test_positional_and_keyword_arguments_go_together(net: nn.Module, images: list[Tensor]) -> None:
    q = quant.quantize_static(net, images, forward=lambda model, x: model(x, gain=2.0), progress=False)
    error = (q(images[0], gain=2.0) - net(images[0], gain=2.0)).norm() / net(images[0], gain=2.0).norm()
    assert error < 0.03


def test_no_batches_is_an_error_that_says_so(net: nn.Module) -> None:
    with pytest.raises(quant.calibrate.DataError, match="there are no batches"):
        quant.quantize_static(net, [])


def test_a_forward_that_never_calls_the_model_is_an_error(net: nn.Module, images: list[Tensor]) -> None:
    with pytest.raises(quant.calibrate.DataError, match="did not call model"):
        quant.quantize_static(net, images, forward=lambda model, batch: None)


def test_the_float_model_is_left_as_it_was(net: nn.Module, images: list[Tensor]) -> None:
    before = net(images[0])
    quant.quantize_static(net, images, progress=False)
    assert type(net.conv) is nn.Conv2d
    assert torch.equal(net(images[0]), before)


VERBS: dict[str, Any] = {
    "dynamic": lambda net, images: quant.quantize_dynamic(net),
    "static": lambda net, images: quant.quantize_static(net, images, progress=False),
    "in steps": in_steps,
    "training": lambda net, images: quant.prepare_qat(net, images[0]),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_a_model_made_in_inference_mode_is_an_ordinary_one(net: nn.Module, images: list[Tensor], verb: Any) -> None:
    with torch.inference_mode():
        made = verb(net, [x.clone() for x in images])
        made.train()(images[0])
    assert not any(tensor.is_inference() for tensor in made.state_dict().values())
    made(images[0].requires_grad_())  # autograd keeps for later what it may not keep of an inference tensor


class Star(Net):
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        self, images, *more = args
        return self.head(self.conv(images * kwargs.get("gain", 1.0)).relu().mean((2, 3))) + sum(more)


class Named(Net):
    def forward(self, images: Tensor, /, **settings: float) -> Tensor:
        return super().forward(images, **settings)


@pytest.mark.parametrize("kind", [Star, Named])
def test_arguments_that_have_no_names_go_together_with_those_that_have(kind: type[Net], images: list[Tensor]) -> None:
    torch.manual_seed(0)
    net = kind().eval()
    more = (2.0,) if kind is Star else ()
    q = quant.quantize_static(net, images, forward=lambda model, x: model(x, *more, gain=2.0), progress=False)
    assert {entry.outcome for entry in quant.summary(q) if entry.name in ("conv", "head")} == {"int8"}
    torch.testing.assert_close(q(images[0], *more, gain=2.0), net(images[0], *more, gain=2.0), rtol=0.05, atol=0.05)


def test_bound_arguments_are_an_example(images: list[Tensor]) -> None:
    net = Named().eval().bfloat16()
    example = inspect.signature(net.forward).bind(images[0].bfloat16(), gain=2.0)
    prepared = quant.prepare(net, example)
    with torch.no_grad():
        assert prepared(images[0].bfloat16(), gain=2.0).dtype == torch.bfloat16


def test_data_that_is_always_the_same_is_said_once_with_the_names_of_the_inputs(net: nn.Module) -> None:
    with pytest.warns(CalibrationWarning) as caught:
        quant.quantize_static(net, [torch.zeros(4, 3, 8, 8)] * 3, progress=False)
    [said] = [str(warning.message) for warning in caught]
    assert "every input always has one value, and no range can be right by that: mul_" in said

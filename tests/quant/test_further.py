"""Calls of other structures than the captured one: each has a program of its own, or runs as the user wrote it."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.own_forward import falling_back
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.prepared import Prepared, record_of
from quant.static.runner import GraphRunner, all_runners
from quant.types import UncapturedCall


def decibels(expected: Tensor, got: Tensor) -> float:
    return float(10 * torch.log10(expected.pow(2).sum() / (expected - got).pow(2).sum().clamp_min(1e-30)))


class Model(nn.Module):
    """Decides by an argument that may be missing, by one that is a word, and by a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.weight, self.offset = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16))
        self.block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())

    def forward(self, x: Tensor, mask: Tensor | None = None, *, mode: str = "plain") -> Tensor:
        y = self.first(x).relu()
        if mask is not None:
            y = y * mask
        if x.shape[0] > 20:
            y = y * 0.5
        y = self.block(F.linear(y, self.weight, self.offset))
        return self.last(y.tanh() if mode == "tanh" else y)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Model()
    for _ in range(20):  # batch norms that have seen something
        made(torch.randn(64, 16))
    return made.eval()


def calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = torch.randn(12, 16)
    return [((x,), {}), ((x, torch.rand(16)), {}), ((x,), {"mode": "tanh"}), ((torch.randn(30, 16),), {})]


def batches() -> list[Tensor]:
    return [torch.randn(20, 16) for _ in range(6)]


def test_calls_unlike_the_captured_one_run_with_int8_layers_and_say_so_once(model: nn.Module) -> None:
    q = quant.quantize_static(model, batches(), progress=False)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert all(decibels(model(*args, **kwargs), q(*args, **kwargs)) > 25 for args, kwargs in calls())
    assert [one.category for one in said] == [UncapturedCall]
    assert "argument 'mask': expected None" in str(said[0].message)


def test_each_structure_that_calibration_meets_has_a_program(model: nn.Module) -> None:
    prepared = quant.prepare(model, batches()[0])
    with torch.no_grad():
        for _ in range(4):
            for args, kwargs in calls():
                prepared(*args, **kwargs)
    runner = prepared._modules[RESERVED]
    assert isinstance(runner, GraphRunner)
    assert list(map(str, all_runners(prepared))) == ["", "@2", "@3", "@4"]
    other = runner.others[0]
    assert isinstance(other, GraphRunner)
    assert set(other.observers.values()) & set(runner.observers.values()), "a layer has one range in all programs"
    q = quant.convert(prepared)
    with torch.no_grad():
        for args, kwargs in calls():
            assert decibels(model(*args, **kwargs), q(*args, **kwargs)) > 25
    assert sum(type(layer).__name__ == "StaticLayer" for layer in q.modules()) == 4, "one for all programs of each"
    said = {entry.name: entry.detail for entry in quant.summary(q)}
    assert {"(planned run)", "(planned run 2)", "(planned run 3)", "(planned run 4)"} <= said.keys()
    assert said["(program 1)"] == "for calls like x: float32[20, 16]"
    assert said["(program 3)"] == "for calls like x: float32[12, 16], mode: 'tanh'"


def test_programs_that_calibration_adds_are_in_what_quantize_static_gives(model: nn.Module) -> None:
    batches = [{"x": torch.randn(rows, 16)} for rows in (12, 30, 12, 30)]
    q = quant.quantize_static(model, batches, progress=False)
    assert len(q._modules[RESERVED].programs()) == 2  # type: ignore[union-attr, operator]
    with torch.no_grad():
        for batch in batches:
            assert decibels(model(**batch), q(**batch)) > 25


def test_examples_of_other_calls_have_programs_before_any_data(model: nn.Module) -> None:
    x, mask = torch.randn(12, 16), torch.rand(16)
    prepared = quant.prepare(model, x, examples=[(x, mask), {"x": x, "mode": "tanh"}])
    assert list(map(str, all_runners(prepared))) == ["", "@2", "@3"]
    for batch in batches():
        prepared(batch)
    q = quant.convert(prepared)
    runner = q._modules[RESERVED]
    assert isinstance(runner, ProgramRunner)
    with torch.no_grad(), pytest.warns(UncapturedCall):
        assert decibels(model(x, mask), q(x, mask)) > 20, "the product's range was never seen, so it has no program"
    with torch.no_grad():
        assert decibels(model(x), q(x)) > 25


def test_all_programs_are_saved_and_copied(model: nn.Module, tmp_path: Path) -> None:
    prepared = quant.prepare(model, batches()[0])
    for _ in range(3):
        for args, kwargs in calls():
            prepared(*args, **kwargs)
    q = quant.convert(prepared)
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=Model())
    with torch.no_grad():
        for args, kwargs in calls():
            assert torch.equal(loaded(*args, **kwargs), q(*args, **kwargs))


def test_what_the_users_forward_refuses_is_its_own_error(model: nn.Module) -> None:
    q = quant.quantize_static(model, batches(), progress=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        q(torch.randn(4, 16), nonsense=1)
    with pytest.raises(RuntimeError), torch.no_grad():
        q(torch.randn(4, 16), torch.rand(7))


def test_training_takes_calls_of_two_kinds(model: nn.Module) -> None:
    x, mask = torch.randn(20, 16), torch.rand(16)
    p = quant.prepare_qat(model, x)
    schedule = quant.QATSchedule(p, steps=16)
    p.train()
    for step in range(16):
        p(torch.randn(20, 16), mask if step % 2 else None).square().mean().backward()
        schedule.step()
    p.eval()
    info = record_of(p)
    assert isinstance(info, Prepared)
    q = quant.convert(p)
    with torch.no_grad():
        assert decibels(p(x), q(x)) > 40
        assert decibels(p(x, mask), q(x, mask)) > 40


def test_a_call_that_never_came_in_training_runs_in_float_and_says_so_once(model: nn.Module) -> None:
    """As a decoder's with its cache. The converted model has no program for it."""
    x = torch.randn(20, 16)
    p = quant.prepare_qat(model, x)
    p.train()
    for _ in range(4):
        p(torch.randn(20, 16)).square().mean().backward()
    p.eval()
    with torch.no_grad(), pytest.warns(UncapturedCall, match="no call like this one came in training") as said:
        tanh = [p(x, mode="tanh") for _ in range(3)]
    assert len(said) == 1
    twin = model.train()
    twin.load_state_dict(p.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(tanh[2], twin.eval()(x, mode="tanh"))
    q = quant.convert(p)
    with torch.no_grad(), pytest.warns(UncapturedCall, match="layer by layer"):
        assert decibels(tanh[0], q(x, mode="tanh")) > 25
    with torch.no_grad():
        assert decibels(p(x), q(x)) > 40


def test_each_call_is_compared_by_the_program_that_stands_for_it(model: nn.Module) -> None:
    """A program to which no data came is in the prepared model only; a call that no program stands for is named."""
    x, mask = torch.randn(20, 16), torch.rand(16)
    p = quant.prepare(model, x, examples=[{"x": x, "mode": "tanh"}, (x, mask)])
    for batch in (x, torch.randn(20, 16)):
        p(batch)
        p(batch, mask)
    q = quant.convert(p)
    both = quant.parity(p, q, [(x, mask), (x, None)])
    assert both.holds
    assert both.outside == ()
    assert quant.compare(model, q, [(x, mask), (x, None)]).outside == ()
    with pytest.warns(UncapturedCall):
        partly = quant.parity(p, q, [x, {"x": x, "mode": "tanh"}])
    assert partly.holds
    assert partly.outside == ("(root)",)
    assert "not compared: calls of (root)" in str(partly)
    compared = quant.compare(model, q, [x, {"x": x, "mode": "tanh"}])
    assert compared.outside == ("(root)",)
    assert "not compared: calls of (root)" in str(compared)
    with pytest.raises(ValueError, match=r"no program of \(root\) stands for any of these batches"):
        quant.parity(p, q, [{"x": x, "mode": "tanh"}])


@pytest.mark.parametrize("replaced", [False, True])
def test_forwards_have_the_signature_that_the_user_gave(model: nn.Module, replaced: bool) -> None:
    """By it Hugging Face's Trainer chooses the columns of its data."""
    if replaced:
        forward = model.forward
        model.forward = lambda x, power=1: forward(x) ** power  # type: ignore[method-assign]
    p = quant.prepare(model, torch.randn(20, 16))
    p(torch.randn(20, 16))
    expected = inspect.signature(model.forward)
    for form in (p, quant.convert(p), copy.deepcopy(p), copy.deepcopy(quant.convert(p))):
        assert inspect.signature(form.forward) == expected
        assert form.forward.__self__ is form._modules[RESERVED]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.fc(y)


@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_that_is_two_arguments_is_no_call_of_two_tensors_where_one_is_written(training: bool) -> None:
    torch.manual_seed(0)
    model, x = Writes().eval(), torch.randn(20, 16)
    p = (quant.prepare_qat if training else quant.prepare)(model, (x, x.clone()))
    p.train(training)
    p(x.clone(), x.clone())
    q = quant.convert(p.eval())
    for form in (p, q):
        one, other = x.clone(), x.clone()
        with torch.no_grad(), pytest.warns(UncapturedCall, match="whose memory is another argument's too"):
            assert decibels(model(one, one), form(other, other)) > 25
        assert torch.equal(one, other)


class Cache:
    """Keys of all calls so far; none at first."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.calls = ["made"]

    def update(self, k: Tensor) -> Tensor:
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        return self.keys


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        k = cache.update(self.k(x))
        return self.o((self.q(x) @ k.transpose(1, 2)).softmax(-1) @ k), cache


def test_prefill_and_step_of_a_decoder_have_a_program_each() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    prepared = quant.prepare(model, torch.randn(2, 5, 16))
    with torch.no_grad():
        for _ in range(4):
            _, cache = prepared(torch.randn(2, 6, 16))
            for _ in range(3):
                _, cache = prepared(torch.randn(2, 1, 16), cache)
    assert list(map(str, all_runners(prepared))) == ["", "@2"]
    q = quant.convert(prepared)
    parts = [torch.randn(3, 9, 16), *(torch.randn(3, 1, 16) for _ in range(4))]
    with torch.no_grad():
        int8, real = None, None
        for part in parts:
            y, int8 = q(part, int8)
            expected, real = model(part, real)
            assert decibels(expected, y) > 22
    assert int8 is not None
    assert real is not None
    assert int8.keys.shape == real.keys.shape == (3, 13, 16)


class NormAct(nn.BatchNorm2d):
    """As timm has it: the batch norm's function, and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        )


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), NormAct(16), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        y = self.norm(self.conv(x))
        return self.head(y) * (2 if twice else 1)


def test_a_batch_norm_that_is_part_of_a_weight_is_not_computed_again() -> None:
    torch.manual_seed(0)
    model = Images()
    with torch.no_grad():
        model.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        model.norm.running_var.uniform_(0.2, 3)  # type: ignore[union-attr]
        model.norm.weight.uniform_(0.5, 2)
    model.eval()
    images = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    q = quant.quantize_static(model, images, progress=False)
    with torch.no_grad(), pytest.warns(UncapturedCall):
        got = q(images[0], twice=True)
    with torch.no_grad():
        assert decibels(model(images[0], twice=True), got) > 25
        assert decibels(model(images[0]), q(images[0])) > 25


def test_parity_compares_each_call_with_the_program_that_stands_for_it(model: nn.Module) -> None:
    prepared, inputs = quant.prepare(model, {"x": batches()[0]}), {"mode": "tanh"}
    with torch.no_grad():
        prepared(x=batches()[0], **inputs)
    found = quant.parity(prepared, quant.convert(prepared), [{"x": batches()[0], **inputs}])
    assert found.holds
    assert any("tanh" in step.name for step in found)


class Frozen(nn.Module):
    """A batch norm in plain arithmetic, from buffers, as torchvision writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("gain", torch.rand(channels) * 2 - 1)
        self.register_buffer("shift", torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.reshape(1, -1, 1, 1) + self.shift.reshape(1, -1, 1, 1)


class Functional(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)


class Kernel(nn.Conv2d):
    """A layer that is a call of a function, with a weight of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, self.weight * 1.0, self.bias)


class Skipping(nn.Module):
    """A norm that one kind of call leaves out, and a layer whose weight is read."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = conv, norm, nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor, plain: bool = False) -> Tensor:
        y = self.conv(x)
        return self.head(y if plain else self.norm(y))


FOLDED = {
    "module": lambda: (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
    "function": lambda: (nn.Conv2d(3, 8, 3, bias=False), Functional(8)),
    "written out": lambda: (nn.Conv2d(3, 8, 3), Frozen(8)),
    "weight of a function": lambda: (Kernel(3, 8, 3), Frozen(8)),
    "transposed": lambda: (nn.ConvTranspose2d(3, 8, 3), Frozen(8)),
}


@pytest.mark.parametrize("kind", FOLDED)
def test_what_is_folded_into_a_weight_is_taken_out_where_the_users_forward_runs(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Skipping(*FOLDED[kind]())
    for name, buffer in model.norm.named_buffers():
        if name.startswith("running"):
            buffer.uniform_(0.3, 2)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.uniform_(-2, 2)
    model.eval()
    images = [torch.randn(4, 3, 12, 12) for _ in range(3)]
    q = quant.quantize_static(model, images, progress=False)
    quant.save(q, tmp_path / "q.safetensors")
    for one in (q, copy.deepcopy(q), quant.load(tmp_path / "q.safetensors", model=copy.deepcopy(model))):
        with torch.no_grad(), pytest.warns(UncapturedCall):
            assert decibels(model(images[0], plain=True), one(images[0], plain=True)) > 33
        with torch.no_grad(), falling_back():
            assert decibels(model.norm(model.conv(images[0])), one.norm(one.conv(images[0]))) > 33
        with torch.no_grad():
            assert decibels(model(images[0]), one(images[0])) > 30


def test_a_channel_that_is_switched_off_stays_off_where_the_users_forward_runs() -> None:
    torch.manual_seed(0)
    model = Images()
    with torch.no_grad():
        model.norm.weight[:3] = 0.0
        model.norm.bias.uniform_(-1, 1)
    model.eval()
    images = torch.randn(4, 3, 12, 12)
    q = quant.quantize_static(model, [images], progress=False)
    with torch.no_grad(), pytest.warns(UncapturedCall):
        assert decibels(model(images, twice=True), q(images, twice=True)) > 25


class Longer(nn.Module):
    """Does something else to long inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[2] > 20 else x


class EachChild(nn.Module):
    """Goes through its children, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.longer, self.last = nn.Conv1d(4, 4, 3, padding=1), Longer(), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x * len(self._modules)


class Scaled(nn.Sequential):
    """A sequence whose output may be scaled."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self:
            x = layer(x)
        return x if scale is None else x * scale


class ScaledChildren(nn.Module):
    """As `Scaled`, through its children."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.activation, self.last = layers

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x if scale is None else x * scale


class Around(nn.Module):
    """An island that calls such a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.inner(x, scale) if float(x.sum()) < 1e6 else x


def layers_of_16() -> list[nn.Module]:
    return [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(*layers_of_16()),
        lambda: ScaledChildren(*layers_of_16()),
        lambda: Around(Scaled(*layers_of_16())),
    ],
    ids=["Sequential", "children", "in an island"],
)
@pytest.mark.parametrize("training", [False, True], ids=["calibration", "training"])
def test_a_further_program_has_the_users_children_alone(make: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model, x, scale = make().eval(), torch.randn(8, 16), torch.rand(16)
    prepared = quant.prepare_qat(model, (x,)) if training else quant.prepare(model, (x,))
    prepared.train(training)
    for call in ((x,), (x, scale)):
        prepared(*call)
    assert len([runner for runner in all_runners(prepared).values() if isinstance(runner, GraphRunner)]) == 2
    q = quant.convert(prepared.eval())
    with torch.no_grad():
        assert decibels(model(x), q(x)) > 25
        assert decibels(model(x, scale), q(x, scale)) > 25
    holder = q.get_submodule("inner") if isinstance(model, Around) else q
    assert RESERVED in holder._modules


@torch.no_grad()
def test_threads_add_programs_of_a_module_that_goes_through_its_children() -> None:
    torch.manual_seed(0)
    model, x = ScaledChildren(*layers_of_16()).eval(), torch.randn(8, 16)
    scales = [torch.rand(16), torch.rand(8, 16), torch.rand(1, 16), torch.rand(())]
    prepared = quant.prepare(model, x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda scale: prepared(x, scale), scales * 4))
    for scale, result in zip(scales * 4, results, strict=True):
        torch.testing.assert_close(result, model(x, scale))
    assert list(prepared._modules)[-1] == RESERVED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_a_sequence_in_training_takes_inputs_of_another_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers_of_16()), torch.randn(8, 16)
    prepared = quant.prepare_qat(model, x).train()
    prepared(x)
    expected = model.to(dtype)(x.to(dtype))
    assert decibels(expected.float(), prepared.to(dtype)(x.to(dtype)).float()) > 20


@pytest.mark.parametrize(
    "make",
    [EachChild, lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), Longer(), nn.Conv1d(4, 4, 1))],
    ids=["children", "Sequential"],
)
@torch.no_grad()
def test_a_forward_that_goes_through_its_children_sees_the_users_alone(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    q = quant.quantize_static(model, [torch.randn(8, 4, 10)], progress=False)
    x = torch.randn(8, 4, 30)
    with pytest.warns(UncapturedCall):
        y = q(x)
    assert decibels(model(x), y) > 25
    assert RESERVED in q._modules
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, one) for one in pool.map(q, [x] * 16))
    assert RESERVED in q._modules


class Colours(nn.Module):
    """Takes images of three channels and of one, by a layer for each."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.rgb, self.gray, self.last, self.by = nn.Conv2d(3, 8, 3), nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 1), by
        with torch.no_grad():
            self.gray.weight.mul_(40.0)

    def forward(self, x: Tensor, gray: bool = False) -> Tensor:
        layer: Any = self.gray if gray else self.rgb
        y = layer(x) if self.by == "module" else F.conv2d(x, layer.weight, layer.bias)
        return self.last(y * 2 if gray else y)


COLOURS = [{"x": torch.randn(2, 3, 9, 9)}, {"x": torch.randn(2, 1, 9, 9), "gray": True}]


@pytest.mark.filterwarnings("ignore::quant.types.CalibrationWarning")
@pytest.mark.parametrize("how", ["minmax", "lsq", "nearest", "gptq"])
def test_functions_with_other_weights_at_the_same_place_are_as_modules(how: str, tmp_path: Path) -> None:
    outputs = []
    for by in ("module", "function"):
        torch.manual_seed(0)
        model = Colours(by).eval()
        recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, weight_observer="lsq" if how == "lsq" else "minmax"))
        if how in ("minmax", "lsq"):
            prepared = quant.prepare_qat(model, COLOURS[0], recipe, examples=COLOURS[1:])
            for batch in COLOURS * 4:
                prepared.train()(**batch).square().mean().backward()
        else:
            prepared = quant.prepare(model, COLOURS[0], recipe, examples=COLOURS[1:])
            quant.calibrate.run(prepared, COLOURS * 4, progress=False)
            if how == "gptq":
                quant.learn_rounding(prepared, COLOURS * 16, "gptq", progress=False)
        q = quant.convert(prepared.eval())
        agreement = quant.parity(prepared, q, COLOURS)
        assert agreement.holds, agreement
        quant.save(q, tmp_path / by)
        loaded = quant.load(tmp_path / by, model=Colours(by), example_inputs=COLOURS[0])
        outputs.append([q(**batch) for batch in COLOURS])
        assert all(torch.equal(loaded(**one), y) for one, y in zip(COLOURS, outputs[-1], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))

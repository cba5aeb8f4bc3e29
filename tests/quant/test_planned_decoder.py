"""What decoders compute in float32 between their int8 layers, as language models write it out: native regions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.artefact.file import read
from quant.export import to_plan
from quant.runtime.program_runner import ProgramRunner

WIDTH, HEADS, SHARED = 32, 4, 2
HEAD = WIDTH // HEADS


class HandNorm(nn.Module):
    """A norm by the root mean square, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def turned(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class Decoder(nn.Module):
    """A block with rotary positions, shared key heads and a gated MLP.

    Args:
        repeats: whether key heads are repeated, by views or by one call; else attention does it.
    """

    def __init__(self, norm: Callable[[], nn.Module], *, repeats: str) -> None:
        super().__init__()
        self.first, self.second, self.repeats = norm(), norm(), repeats
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, SHARED * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("frequencies", 50.0 ** (-torch.arange(HEAD // 2) / (HEAD // 2)), persistent=False)

    def attend(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        angles = positions[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        shape = (*x.shape[:-1], -1, HEAD)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (one * cos + turned(one) * sin for one in (q, k))
        if self.repeats:
            k, v = (self.repeated(one) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=not self.repeats)
        return self.o(y.transpose(1, 2).contiguous().reshape(*x.shape[:-1], -1).contiguous())

    def repeated(self, x: Tensor) -> Tensor:
        if self.repeats == "by a call":
            return x.repeat_interleave(HEADS // SHARED, dim=1)
        batch, heads, length, width = x.shape
        x = x[:, :, None].expand(batch, heads, HEADS // SHARED, length, width)
        return x.reshape(batch, heads * (HEADS // SHARED), length, width)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.first(x), positions, mask)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def batch(length: int = 7, *, masked: bool = False) -> tuple[Any, ...]:
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
    positions = torch.arange(length, dtype=torch.float32)
    if not masked:
        return x, positions
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, length, length).clone()
    seen[0, :, :, 0] = False
    seen[0, :, 0, 0] = True
    return x, positions, seen


def converted(
    model: nn.Module, *examples: tuple[Any, ...], recipe: quant.Recipe | None = None
) -> tuple[nn.Module, ProgramRunner]:
    q = quant.quantize_static(model, list(examples), recipe=recipe, forward=lambda m, b: m(*b), progress=False)
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    return q, runner


def decoder(norm: Callable[[], nn.Module], *, repeats: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(norm, repeats=repeats).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


NORMS: dict[str, Callable[[], nn.Module]] = {
    "by hand": HandNorm,
    "torch's": lambda: nn.RMSNorm(WIDTH),
    "without a weight": lambda: nn.RMSNorm(WIDTH, elementwise_affine=False, eps=1e-6),
    "layer norm without parameters": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("repeats", ["", "by views", "by a call"], ids=["grouped", "by views", "by a call"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_a_decoder_is_one_region(norm: str, *, repeats: str, masked: bool) -> None:
    model = decoder(NORMS[norm], repeats=repeats)
    q, runner = converted(model, batch(masked=masked), batch(9, masked=masked))
    schedule = runner.program.schedule
    assert len(schedule.steps) == 1, schedule.describe()
    for length in (7, 12):
        given = batch(length, masked=masked)
        with torch.no_grad():
            got, expected = q(*given), model(*given)
            stepwise = runner.held(*given).of(runner.program.values[runner.program.output.index])
        torch.testing.assert_close(got, stepwise, rtol=1e-5, atol=1e-5)
        assert (got - expected).square().sum() / expected.square().sum() < 1e-2


RANGES_OF_EACH_CALL = {
    "8 bits": quant.QConfig(activation_observer="dynamic"),
    "4 bits in groups": quant.QConfig(activation_observer="dynamic", weight_bits=4, group_size=32),
}


@pytest.mark.parametrize("settings", RANGES_OF_EACH_CALL)
def test_layers_with_ranges_of_each_call_are_in_the_region(settings: str, tmp_path: Path) -> None:
    model, recipe = decoder(NORMS["by hand"]), quant.Recipe(default=RANGES_OF_EACH_CALL[settings])
    q, runner = converted(model, batch(), batch(9), recipe=recipe)
    schedule = runner.program.schedule
    assert len(schedule.steps) == 1, schedule.describe()
    assert quant.summary(q)["(planned run)"].detail.startswith("native calls: 1, of ")
    quant.save(q, tmp_path / "decoder.q8")
    restored = quant.load(tmp_path / "decoder.q8", model=decoder(NORMS["by hand"]))
    for length in (7, 12):
        given = batch(length)
        with torch.no_grad():
            got, expected = q(*given), model(*given)
            stepwise = runner.held(*given).of(runner.program.values[runner.program.output.index])
            assert torch.equal(restored(*given), got)
        torch.testing.assert_close(got, stepwise, rtol=1e-2, atol=2e-2)  # a rounding may turn where sums differ
        assert (got - expected).square().sum() / expected.square().sum() < (1e-2 if settings == "8 bits" else 0.1)


class Parts(nn.Module):
    """Gives one value, or two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        hidden = F.gelu(self.one(x))
        y = self.two(hidden)
        return (y, hidden) if both else y


GROUPS = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=32))
NOTHING = quant.Recipe(default=None)


def test_programs_of_a_float32_model_with_scales_in_float16_give_float32() -> None:
    q, x = quant.quantize_dynamic(Parts().eval(), GROUPS), torch.randn(3, 64)
    prepared = quant.prepare(q, x, NOTHING, examples=[(x, True)])
    with torch.no_grad():
        prepared(x), prepared(x, True)
        programs = quant.convert(prepared)
        for given in ((x,), (x, True)):
            torch.testing.assert_close(programs(*given), q(*given), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"layer .one. \(Linear\): .*(Half|float16)"):
        programs(x.half())
    prepared = quant.prepare(q, x, NOTHING)
    with torch.no_grad():
        prepared(x)
        torch.testing.assert_close(to_plan(quant.convert(prepared))(x), q(x), rtol=1e-5, atol=1e-5)


class Reads(nn.Module):
    """Its own Python decides, so that no graph stands for it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            x = -x
        return F.linear(x, self.one.weight)


def test_programs_of_an_int8_model_want_a_graph_and_a_recipe_that_asks_for_nothing() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(quant.types.NothingQuantized, match="no layer can be quantised"):
        quant.prepare(quant.quantize_dynamic(Reads().eval()), x, NOTHING)
    q = quant.quantize_dynamic(Parts().eval())
    for recipe in (None, quant.Recipe({"one": quant.QConfig(weight_bits=4)}, default=None)):
        with pytest.raises(quant.types.NothingQuantized, match=r"of which recipe=quant.Recipe\(default=None\) makes"):
            quant.prepare(q, x, recipe)


def test_hooks_of_all_modules_see_a_dynamic_layer_in_a_region() -> None:
    model, recipe = decoder(NORMS["by hand"]), quant.Recipe(default=RANGES_OF_EACH_CALL["8 bits"])
    q, _ = converted(model, batch(), batch(9), recipe=recipe)
    seen: list[nn.Module] = []
    with torch.no_grad():
        expected = q(*batch())
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
        try:
            torch.testing.assert_close(q(*batch()), expected, rtol=1e-2, atol=2e-2)
        finally:
            hook.remove()
        assert {id(q.q), id(q.down)} <= set(map(id, seen))
        assert torch.equal(q(*batch()), expected)


class Between(nn.Module):
    """Float steps between two layers."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.one, self.two, self.step = nn.Linear(12, 12), nn.Linear(12, 12), step
        self.factor = nn.Parameter(torch.linspace(0.5, 2.0, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(F.layer_norm(self.step(y, self.factor), (12,)))


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "neg": lambda y, f: -(y / f),
    "abs": lambda y, f: (y / f).abs(),
    "roots": lambda y, f: (y / f).pow(2).sqrt() + (y * y / f + 1.0).rsqrt() + (y / f) ** 2,
    "cube": lambda y, f: torch.pow(y / f, 3.0),
    "exp": lambda y, f: torch.exp(y / f),
    "tanh and sigmoid": lambda y, f: torch.tanh(y / f) * torch.sigmoid(y / f),
    "gated": lambda y, f: F.glu(torch.cat([y / f, f * y], 1), 1) + F.glu(torch.cat([y, y / f], -1)),
    "hard": lambda y, f: F.hardswish(y / f) + F.hardsigmoid(y * f),
    "addcmul": lambda y, f: torch.addcmul(f, y, f) + torch.addcmul(y, f, y) + torch.addcmul(y, y / f, y),
    "cos and sin": lambda y, f: (y / f).cos() + (y / f).sin(),
    "sums": lambda y, f: y - (y / f).sum(-1, keepdim=True) / 12 + (y / f).mean((1, 2), keepdim=True),
    "kinds": lambda y, f: (y / f).float().to("cpu").to(dtype=torch.float32, copy=False).type_as(y).cpu(),
    "empty": lambda y, f: torch.cat([torch.tensor([]), y / f], -1),
    "rms": lambda y, f: F.rms_norm(y / f, (12,), f, 1e-5),
    "rms without a weight": lambda y, f: F.rms_norm(y / f, (12,)),
}


def rows(length: int = 5) -> tuple[Tensor]:
    return (torch.randn(3, length, 12, generator=torch.Generator().manual_seed(length)),)


@pytest.mark.parametrize("name", STEPS)
def test_steps_in_a_region(name: str) -> None:
    torch.manual_seed(0)
    model = Between(STEPS[name]).eval()
    q, runner = converted(model, rows())
    assert len(runner.program.schedule.steps) == 1, runner.program.schedule.describe()
    for (x,) in (rows(), rows(8)):
        with torch.no_grad():
            stepwise = runner.held(x).of(runner.program.values[runner.program.output.index])
            torch.testing.assert_close(q(x), stepwise, rtol=1e-5, atol=1e-5)
            error = (q(x) - model(x)).square().sum() / model(x).square().sum()
        assert error < 5e-3


KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fourth power": lambda y, f: (y / f).pow(4),
    "double": lambda y, f: (y / f).to(torch.float64).float(),
    "a float64 sum": lambda y, f: (y / f).sum(-1, keepdim=True, dtype=torch.float64).float() + y,
    "the power of a tensor": lambda y, f: torch.pow(f, y / f),
}


@pytest.mark.parametrize("name", KEPT)
def test_steps_without_a_native_form_run_by_themselves(name: str) -> None:
    torch.manual_seed(0)
    model = Between(KEPT[name]).eval()
    q, runner = converted(model, rows())
    assert len(runner.program.schedule.steps) > 1
    with torch.no_grad():
        error = (q(*rows()) - model(*rows())).square().sum() / model(*rows()).square().sum()
    assert error < 5e-3


class Masked(nn.Module):
    """Choices by a mask between two layers."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.step = nn.Linear(12, 12), nn.Linear(12, 12), step
        self.other = nn.Parameter(torch.linspace(-1.0, 1.0, 12))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.two(F.layer_norm(self.step(self, self.one(x), mask), (12,)))


CHOICES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "where": lambda m, y, mask: torch.where(mask, y, y * y),
    "a number": lambda m, y, mask: torch.where(mask, y * y, -3.0),
    "a number first": lambda m, y, mask: torch.where(mask, 2, y * y),
    "a parameter": lambda m, y, mask: (y * y).where(mask, m.other),
    "filled": lambda m, y, mask: (y * y).masked_fill(mask, -1.5),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_in_a_region(name: str) -> None:
    torch.manual_seed(0)
    model = Masked(CHOICES[name]).eval()
    mask = torch.randint(0, 2, (3, 5, 1), generator=torch.Generator().manual_seed(1)).bool()
    q, runner = converted(model, (*rows(), mask))
    assert len(runner.program.schedule.steps) == 1, runner.program.schedule.describe()
    with torch.no_grad():
        stepwise = runner.held(*rows(), mask).of(runner.program.values[runner.program.output.index])
        torch.testing.assert_close(q(*rows(), mask), stepwise, rtol=1e-5, atol=1e-5)
        assert not torch.equal(q(*rows(), mask), q(*rows(), ~mask))


@pytest.mark.parametrize("norm", ["torch's", "layer norm without parameters"])
def test_norms_that_are_hooked_or_exchanged(norm: str) -> None:
    model = decoder(NORMS[norm], repeats="by views")
    q, _ = converted(model, batch())
    calls: list[int] = []
    with torch.no_grad():
        before = q(*batch())
        handle = q.get_submodule("first").register_forward_hook(lambda *given: calls.append(1))
        torch.testing.assert_close(q(*batch()), before, rtol=0.1, atol=0.1)
        handle.remove()
        assert calls == [1]
        assert torch.equal(q(*batch()), before)
        q.get_submodule("first").eps = 10.0
        assert not torch.allclose(q(*batch()), before)


@pytest.mark.parametrize("norm", ["by hand", "torch's", "layer norm without parameters"])
def test_a_file_keeps_a_decoder(norm: str, tmp_path: Any) -> None:
    model = decoder(NORMS[norm])
    q, _ = converted(model, batch(masked=True))
    quant.save(q, tmp_path / "decoder.q8")
    assert "why_none" not in read(tmp_path / "decoder.q8")[0]["programs"][""]  # so that nothing is captured again
    loaded = quant.load(tmp_path / "decoder.q8", model=model)
    with torch.no_grad():
        assert torch.equal(loaded(*batch(masked=True)), q(*batch(masked=True)))


def test_far_angles() -> None:
    """Positions beyond where the kernels' own reduction holds."""
    torch.manual_seed(0)
    model = Between(STEPS["cos and sin"]).eval()
    q, _ = converted(model, rows(), (rows()[0] * 1e8,))
    with torch.no_grad():
        assert math.isfinite(float(q(rows()[0] * 1e8).sum()))

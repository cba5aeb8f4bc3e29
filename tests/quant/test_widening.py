"""Half models whose forward goes by dtypes: the way is the user's, and what does the same in float32 is int8."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.half_precision import OwnOutputs
from quant.runtime.dtype_branches import comparing_dtypes
from quant.runtime.own_forward import falling_back


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).relu())
        return y


class Behind(nn.Module):
    """Calls a layer on what a part gives where that is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.behind = Two(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        return self.behind(y) * 5 if y.dtype == torch.float32 else y


class Doubles(Two):
    """Goes by the dtype itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.dtype in (torch.bfloat16, torch.float16) else y


class Gain(Two):
    """Takes a number by the dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if x.dtype == torch.float32 else 1.0)


class Insists(Two):
    """Takes its own type alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            raise TypeError("half precision expected")
        return super().forward(x)


class Between(nn.Module):
    """A layer in the half type between float layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x).to(self.middle.weight.dtype)).float().relu())
        return y

    def to(self, dtype: torch.dtype) -> Between:  # type: ignore[override]
        self.middle.to(dtype)
        return self


class InIsland(Behind):
    """As `Behind`, and branches on values."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if bool(y.isfinite().all()) else y.clamp(-1, 1)


KINDS = [Behind, Doubles, Gain, Insists, Between, InIsland]
PARTLY = pytest.mark.parametrize("kind", KINDS)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def made(kind: type[Any], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind().eval().to(dtype)
    if kind in (Behind, InIsland):
        model.behind.float()  # type: ignore[operator, union-attr]
    return model


def rows(kind: type[Any], dtype: torch.dtype) -> Tensor:
    x = torch.rand(64, 16) * 2 - 1
    return x if kind is Between else x.to(dtype)


def error(expected: Tensor, got: Tensor) -> float:
    assert got.dtype == expected.dtype
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def widened_parts(model: nn.Module) -> list[str]:
    return [
        name
        for name, part in model.named_modules()
        if any(isinstance(one, OwnOutputs) for one in part._forward_hooks.values())
    ]


@torch.no_grad()
@HALVES
@PARTLY
def test_the_way_is_that_of_the_half_type_and_the_layers_are_int8(
    kind: type[Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """It was that of a float32 copy: other numbers, without a word."""
    model = made(kind, dtype)
    batches = [rows(kind, dtype) for _ in range(3)]
    q = quant.quantize_static(model, batches, progress=False)
    x = rows(kind, dtype)[:5]
    assert error(model(x), q(x)) < 0.05
    reached = [entry for entry in quant.summary(q) if entry.type == "Linear" and entry.name != "behind"]
    assert {entry.outcome for entry in reached} == {"int8"}
    assert {parameter.dtype for parameter in model.parameters()} <= {dtype, torch.float32}
    assert torch.equal(copy.deepcopy(q)(x), q(x))
    comparison = quant.compare(model, q, batches)
    assert min(step.sqnr for step in comparison.steps) > 25.0
    quant.save(q, tmp_path / "half.q8")
    restored = quant.load(tmp_path / "half.q8", model=made(kind, dtype))
    assert torch.equal(restored(x), q(x))


@PARTLY
def test_training_goes_that_way_too(kind: type[Any]) -> None:
    model = made(kind, torch.bfloat16)
    x = rows(kind, torch.bfloat16)
    prepared = quant.prepare_qat(model, x)
    prepared.train()(x).float().square().mean().backward()
    with torch.no_grad():
        assert error(model(x), prepared.eval()(x)) < 0.05
        q = quant.convert(prepared)
        assert error(model(x), q(x)) < 0.05
    assert quant.parity(prepared, q, [x]).holds


class Masked(Two):
    """What decides nothing: a mask of the type's smallest number, and a cast."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.masked_fill(y < -9, torch.finfo(y.dtype).min).relu()
        y = torch.softmax(y, -1, dtype=torch.float32).to(x.dtype) if x.dtype != torch.float32 else torch.softmax(y, -1)
        out: Tensor = self.last(y)
        return out


class Guarded(Two):
    """Clamps to what the type can hold, as transformers does in float16."""

    bound = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.dtype != torch.float32:
            bound = self.bound or torch.finfo(y.dtype).max * 0.98
            y = torch.clamp(y, -bound, bound) if bool(torch.isfinite(y).all()) else y
        out: Tensor = self.last(y.relu())
        return out


class Clamped(Guarded):
    """The same with a bound that decides."""

    bound = 5.0


class Counts(Two):
    """Reads a number of values, which rounding to the half type changes: no dtype decides it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        odd = int((y * 1000).round().remainder(2).sum())
        out: Tensor = self.last(y) * (1.0 + odd * 1e-6)
        return out


@torch.no_grad()
@HALVES
@pytest.mark.parametrize("kind", [Two, Masked, Counts, Guarded])
def test_a_model_that_does_the_same_is_float32_as_a_whole(kind: type[Any], dtype: torch.dtype) -> None:
    prepared = quant.prepare(made(kind, dtype), rows(kind, dtype))
    assert widened_parts(prepared) == [""]


@torch.no_grad()
def test_a_clamp_in_the_half_type_is_no_guard_where_values_may_reach_it() -> None:
    prepared = quant.prepare(made(Clamped, torch.bfloat16), rows(Clamped, torch.bfloat16))
    assert widened_parts(prepared) == ["first", "last"]


class Tied(nn.Module):
    """Two parts with one weight, and a branch on the dtype between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.free = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = y * 2 if y.dtype != torch.float32 else y
        out: Tensor = self.free(self.other(y))
        return out


@torch.no_grad()
def test_parts_that_share_a_weight_stay_what_they_are() -> None:
    model = made(Tied, torch.bfloat16)
    q = quant.quantize_static(model, [rows(Tied, torch.bfloat16)], progress=False)
    x = rows(Tied, torch.bfloat16)
    assert error(model(x), q(x)) < 0.05
    outcomes = {entry.name: entry.outcome for entry in quant.summary(q)}
    assert (outcomes["one"], outcomes["other"], outcomes["free"]) == ("float", "float", "int8")


class Hooked(Behind):
    """Has a hook of the user's on a part, which no capture runs and each call does."""

    def __init__(self) -> None:
        super().__init__()
        self.part.register_forward_hook(lambda module, args, output: None)


@torch.no_grad()
def test_a_hook_of_the_users_beside_ours_does_not_take_it_away() -> None:
    model = made(Hooked, torch.bfloat16)
    q = quant.quantize_static(model, [rows(Hooked, torch.bfloat16)], progress=False)
    x = rows(Hooked, torch.bfloat16)
    assert error(model(x), q(x)) < 0.05


@torch.no_grad()
def test_int8_layers_keep_their_type_where_the_users_forward_runs() -> None:
    model = made(Doubles, torch.bfloat16)
    q = quant.quantize_static(model, [rows(Doubles, torch.bfloat16)], progress=False)
    x = rows(Doubles, torch.bfloat16)
    with falling_back():
        assert error(model(x), type(q).forward(q, x)) < 0.05


class Scaled(Two):
    """Goes by the dtype where it is given a scale that is not one, and else does the same in all types."""

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if shift is not None:
            y = y + shift
        if scale is None:
            return y
        return y * scale if y.dtype == torch.float32 else y - scale


@torch.no_grad()
def test_an_example_tells_of_another_way() -> None:
    model, x = made(Scaled, torch.bfloat16), rows(Scaled, torch.bfloat16)
    calls = {"x": x}, {"x": x, "scale": torch.ones(16).bfloat16()}
    prepared = quant.prepare(model, calls[0], examples=calls[1:])
    for call in calls:
        prepared(**call)
    q = quant.convert(prepared)
    assert all(error(model(**call), q(**call)) < 0.05 for call in calls)


@pytest.mark.parametrize(
    "prepare", [quant.prepare, quant.prepare_qat, lambda *args: quant.prepare_qat(calibrated(*args))]
)
def test_a_call_that_comes_later_is_refused_where_it_goes_another_way(prepare: Any) -> None:
    model, x = made(Scaled, torch.bfloat16), rows(Scaled, torch.bfloat16)
    prepared = prepare(model, {"x": x}).train()
    prepared(x, shift=torch.ones(16).bfloat16())
    with pytest.raises(
        ValueError, match=r"Scaled: a call that came after the examples does something else in torch.bf"
    ):
        prepared(x, scale=torch.ones(16).bfloat16())


def calibrated(model: nn.Module, example: dict[str, Tensor]) -> nn.Module:
    prepared = quant.prepare(model, example)
    prepared(**example)
    return prepared


class Encoded(nn.Module):
    """Takes rows, or what its encoder made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Two(), nn.Linear(16, 16)

    def forward(self, x: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.encoder(x) if hidden is None else hidden)
        return out


@torch.no_grad()
@HALVES
@pytest.mark.parametrize("alone", [False, True], ids=["as a whole", "in two"])
@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_a_part_of_a_half_model_may_be_called_alone(alone: bool, dtype: torch.dtype) -> None:
    """Its weights were float32 and its inputs were not, which torch refuses."""
    model = made(Encoded, dtype)
    prepared = quant.prepare(model, rows(Encoded, dtype))
    for _ in range(3):
        x = rows(Encoded, dtype)
        prepared(hidden=prepared.encoder(x)) if alone else prepared(x)  # type: ignore[operator]
    q = quant.convert(prepared)
    x = rows(Encoded, dtype)
    assert error(model(x), q(hidden=q.encoder(x))) < 0.05  # type: ignore[operator]


@torch.no_grad()
def test_casts_of_ours_hold_no_dtype_of_the_inputs() -> None:
    class Words(Two):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.part = nn.Embedding(9, 16), Two()

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(self.part(self.words(tokens)))

    tokens = torch.randint(9, (64,))
    q = quant.quantize_static(made(Words, torch.bfloat16), [tokens], progress=False)
    assert torch.equal(q(tokens.int()), q(tokens))


@torch.no_grad()
def test_the_report_has_no_note_of_hooks_that_cast() -> None:
    plain, hooked = made(Behind, torch.bfloat16), made(Hooked, torch.bfloat16)
    notes = [
        [
            entry.detail
            for entry in quant.summary(quant.quantize_static(one, [rows(Behind, torch.bfloat16)], progress=False))
        ]
        for one in (plain, hooked)
    ]
    assert "hook" not in " ".join(notes[0])
    assert "hook" in " ".join(notes[1])


@torch.no_grad()
def test_a_call_without_a_program_says_that_dtypes_are_others_there(tmp_path: Path) -> None:
    model, x = made(Scaled, torch.bfloat16), rows(Scaled, torch.bfloat16)
    prepared = quant.prepare(model, {"x": x})
    prepared(x)
    q = quant.convert(prepared)
    assert "compares dtypes, and finds float32 instead of torch.bfloat16" in quant.summary(q)[""].detail
    quant.save(q, tmp_path / "q.q8")
    for one in (q, quant.load(tmp_path / "q.q8", model=made(Scaled, torch.bfloat16))):
        with pytest.warns(quant.types.UncapturedCall, match="Scaled compares dtypes and may go another way"):
            assert one(x, scale=torch.ones(16).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Two, Doubles, Gain, Scaled])
def test_comparisons_of_dtypes_are_found_in_the_code(kind: type[Any]) -> None:
    model = nn.Sequential(kind())
    assert comparing_dtypes(model) == ([] if kind is Two else ["0"])

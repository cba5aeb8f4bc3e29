"""What the oracle sees: each kind of difference, each kind of error, the end of a process."""

from __future__ import annotations

import os
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import quant

from . import child
from .cases import Case, TwoLayers, rows
from .harness import CHECKS, Outcome, compare_calls, fresh_calls, is_clear, parametrized_names
from .pictures import Comparison, picture

X = torch.linspace(-1, 1, 8)


def cycle() -> Any:
    thing = SimpleNamespace(value=X)
    thing.itself = thing
    return thing


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, X + 0.3),
        (X, X.double()),
        (X, X[:, None]),
        (X, nn.Parameter(X)),
        (X, X.numpy()),
        (X, X.to_sparse()),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("inf")])),
        (1.0, 2.0),
        (1, 1.0),
        (1, True),
        ("a", "b"),
        ((X,), [X]),
        ({"a": X, "b": X}, {"b": X, "a": X}),
        ({"a": X}, OrderedDict(a=X)),
        ([X, X], [X]),
        (SimpleNamespace(a=X), SimpleNamespace(b=X)),
        (SimpleNamespace(a=X), SimpleNamespace(a=-X)),
        (cycle(), SimpleNamespace(value=X, itself=SimpleNamespace(value=X, itself=None))),
    ],
    ids=str,
)
def test_a_difference_is_seen(one: Any, other: Any) -> None:
    comparison = Comparison()
    comparison.compare(picture(one), picture(other))
    assert comparison.differences


@pytest.mark.parametrize("thing", [X, (X, [X]), cycle(), {"a": None}, float("nan"), X.to_sparse(), {1, 2}], ids=str)
def test_a_thing_is_like_itself(thing: Any) -> None:
    comparison = Comparison()
    comparison.compare(picture(thing), picture(thing))
    assert not comparison.differences


def test_noise_of_rounding_is_no_difference_and_its_size_is_told() -> None:
    comparison = Comparison(floor=20.0)
    comparison.compare(picture(X), picture(X + 0.02 * (torch.arange(8) % 2)))
    assert not comparison.differences
    assert 25 < comparison.lowest < 40


def test_a_picture_stays_what_it_was() -> None:
    x, comparison = X.clone(), Comparison()
    before = picture({"x": x})
    x.zero_()
    comparison.compare(before, picture({"x": x}))
    assert comparison.differences


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (quant.NothingQuantized("layer 'first' is float; give another"), True),
        (quant.NothingQuantized("layer 'first' is float"), False),
        (quant.NothingQuantized("nothing; give another"), False),
        (quant.NothingQuantized("layer 'first': KeyError: 3; give another"), False),
        (ValueError("layer 'first' is float; give another"), False),
        (KeyError("layer 'first' is float; give another"), False),
    ],
    ids=str,
)
def test_a_clear_error_is_ours_and_names_the_module_and_what_to_do(error: Exception, clear: bool) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    assert is_clear(caught.value, TwoLayers()) == clear


class Good(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("kind", CHECKS)
def test_an_ordinary_module_passes(kind: str, seeded_on_one_thread: None) -> None:
    outcome = CHECKS[kind](Case("ordinary", Good, rows))
    assert outcome.status == "ok", outcome.reason
    assert outcome.sqnr > 30


def beyond(batch: int, length: int, index: int) -> Any:
    """Values that calibration never saw, from the first fresh call on."""
    (x,) = rows(batch, length, index)
    return (x * (4 if index >= 100 else 1),)


@pytest.mark.parametrize("kind", CHECKS)
def test_what_is_cut_off_at_the_ends_of_ranges_is_right(kind: str, seeded_on_one_thread: None) -> None:
    outcome = CHECKS[kind](Case("ordinary, of other values", Good, beyond))
    assert outcome.status == "ok", outcome.reason


def test_what_is_cut_off_and_computed_otherwise_is_wrong(
    seeded_on_one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quant.quantize_static

    def lies(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        q = real(model, *args, **kwargs)
        q.register_forward_hook(lambda module, args, output: output.flip(1) if args[0].abs().max() > 1 else output)
        return q

    monkeypatch.setattr(quant, "quantize_static", lies)
    assert CHECKS["static"](Case("ordinary, of other values", Good, beyond)).status == "wrong"


def test_a_parameter_in_a_parametrization_of_its_layer_is_the_same_one() -> None:
    model, other = nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4)])
    other.load_state_dict(model.state_dict())
    assert not parametrized_names(model, other)
    nn.utils.parametrize.register_parametrization(other[0], "weight", nn.Identity())
    assert parametrized_names(model, other) == {"0.weight": "0.parametrizations.weight.original"}


def test_a_parameter_that_is_gone_or_has_other_values_has_no_other_name() -> None:
    model, other = nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4)])
    nn.utils.parametrize.register_parametrization(other[0], "weight", nn.Identity())
    assert not parametrized_names(model, other)
    assert not parametrized_names(model, nn.ModuleList([nn.Linear(4, 4, bias=False)]))


def test_a_module_without_layers_does_not_pass() -> None:
    outcome = CHECKS["static"](Case("no layer", nn.ReLU, rows))
    assert outcome.status in ("raw", "refused")
    assert not outcome.passes(Case("no layer", nn.ReLU, rows))


def test_the_end_of_a_child_is_the_outcome_of_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_one_child", _ends_at_the_second)
    assert child.outcomes([4, 5, 6]) == {4: Outcome("ok"), 5: Outcome("crash", "ended by SIGSEGV"), 6: Outcome("ok")}


def _ends_at_the_second(numbers: list[int]) -> tuple[dict[int, Outcome], str]:
    before = numbers[: numbers.index(5)] if 5 in numbers else numbers
    return dict.fromkeys(before, Outcome("ok")), "ended by SIGSEGV"


@pytest.mark.skipif(os.environ.get("OCTET_HOSTILE_NESTED") != "1", reason="runs in `make test-hostile` alone")
@pytest.mark.filterwarnings("ignore")
def test_every_float_module_is_like_itself(seeded_on_one_thread: None) -> None:
    """Else the oracle could not tell wrong numbers from a module that never gives the same."""
    unlike = []
    for case, kind in child.checks():
        if kind != "static":
            continue
        comparison = Comparison(floor=100.0)
        with torch.no_grad():
            compare_calls(case, case.build(), case.build(), fresh_calls(case), comparison)
        if comparison.differences:
            unlike.append(case.title)
    assert not unlike

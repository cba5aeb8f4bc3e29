"""Arithmetic with a number that changes nothing (x / 1, 0 + x): no range of its own, so no rounding and no table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quant
from quant.runtime.instructions import KernelCall
from quant.static.runner import RESERVED

KEPT = Path(__file__).parent / "artefacts"


class Residual(nn.Module):
    """A sum that `change` is applied to, between convolutions: as in diffusers, where it is divided by a setting."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.beside, self.after = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.change(self.before(x) + self.beside(x)))


NEUTRAL: dict[str, Callable[[Tensor], Tensor]] = {
    "x / 1": lambda x: x / 1.0,
    "div(1)": lambda x: x.div(1),
    "div_(1)": lambda x: x.div_(1.0),
    "div, a rounding_mode of None": lambda x: torch.div(x, 1, rounding_mode=None),
    "x * 1": lambda x: x * 1,
    "1 * x": lambda x: 1.0 * x,
    "x + 0": lambda x: x + 0,
    "0 + x": lambda x: sum([x]),  # type: ignore[arg-type, return-value]
    "x - 0": lambda x: x - 0.0,
    "two": lambda x: (x / 1) * 1,
}

OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "0 - x": lambda x: 0 - x,
    "x / 2": lambda x: x / 2,
    "x * 0": lambda x: x * 0,
    "x + 1": lambda x: x + 1,
    "rounded quotient": lambda x: torch.div(x, 1, rounding_mode="floor"),
}


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def converted(change: Callable[[Tensor], Tensor]) -> tuple[nn.Module, nn.Module]:
    """The float model and its int8 form."""
    torch.manual_seed(0)
    model = Residual(change).eval()
    return model, quant.quantize_static(model, [images()], progress=False)


def tables(q: nn.Module) -> int:
    instructions = getattr(q, RESERVED).program.instructions
    return sum(isinstance(one, KernelCall) and one.kernel == "lookup" for one in instructions)


@pytest.mark.parametrize("change", NEUTRAL.values(), ids=NEUTRAL)
def test_it_costs_nothing(change: Callable[[Tensor], Tensor]) -> None:
    _, without = converted(lambda x: x)
    _, q = converted(change)
    assert tables(q) == 0
    assert torch.equal(q(images(1)), without(images(1)))


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_changes_values_is_computed(change: Callable[[Tensor], Tensor]) -> None:
    model, q = converted(change)
    expected = model(images())
    # Of the mean: where a quotient is rounded, single values fall to the next integer.
    assert (q(images()) - expected).square().mean() < 0.03 * expected.square().mean()


class Shown(nn.Module):
    """The value, and what 1 times it is, are read by two layers each, moved about and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one = self.a(x).flip(1)
        two = 1 * one
        three = torch.relu_(0 + two)
        return self.b(one), self.c(two), self.b(three), two, three


def test_others_read_the_value_too() -> None:
    torch.manual_seed(0)
    model, x = Shown().eval(), torch.randn(6, 4)
    q = quant.quantize_static(model, [x], progress=False)
    for expected, found in zip(model(x), q(x), strict=True):
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_training_gives_the_integers() -> None:
    torch.manual_seed(0)
    p = quant.prepare_qat(Residual(lambda x: x / 1).eval(), images()).train()
    p(images()).square().mean().backward()
    p.eval()
    q = quant.convert(p)
    assert tables(q) == 0
    assert quant.parity(p, q, [images(1)]).holds


def test_a_file_that_has_a_table_for_it_keeps_it() -> None:
    """Written by a version that had one; its plan had ranges for both values."""
    q = quant.load(KEPT / "divided.q8", model=Residual(lambda x: x / 1))
    assert tables(q) == 1
    assert torch.equal(q(images(1)), load_file(KEPT / "divided.expected")["output"])

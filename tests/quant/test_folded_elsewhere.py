"""Batch norms in weights, and calls that compute something else than the weight has in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.types import UncapturedCall


class Module(nn.Module):
    """A batch norm that a call may leave out, or reach by another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.2, 3)  # type: ignore[union-attr]

    def normed(self, y: Tensor) -> Tensor:
        found: Tensor = self.norm(y)
        return found

    def forward(
        self, x: Tensor, between: Tensor | None = None, *, skip: bool = False, twice: bool = False, odd: bool = False
    ) -> Tensor:
        y = self.a(x)
        if between is not None:
            y = y + between
        y = y if skip else self.normed(y)
        y = self.normed(y) if twice else y
        y = y.relu().tanh() if odd else y.relu()
        found: Tensor = self.b(y)
        return found


class Function(Module):
    """The batch norm's function."""

    def normed(self, y: Tensor) -> Tensor:
        norm = self.norm
        return F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias)


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12)


KINDS = pytest.mark.parametrize("kind", [Module, Function])
WAYS = pytest.mark.parametrize(
    "how", [{"skip": True}, {"twice": True}, {"between": torch.randn(2, 8, 10, 10)}], ids=("skip", "twice", "between")
)


def close(q: nn.Module, model: nn.Module, **how: object) -> bool:
    x = images()
    with torch.no_grad():
        return bool((q(x, **how) - model(x, **how)).norm() < 0.05 * model(x, **how).norm())


@KINDS
@WAYS
@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_a_call_that_the_weight_does_not_fit_is_computed(kind: Callable[[], nn.Module], how: dict[str, object]) -> None:
    model = kind().eval()
    q = quant.quantize_static(model, [images() for _ in range(4)], progress=False)
    for _ in range(2):
        assert close(q, model, **how)
        assert close(q, model)
        assert close(q, model, odd=True), "whose batch norm comes right after its layer"


@KINDS
@WAYS
@pytest.mark.filterwarnings("ignore::quant.types.UncapturedCall")
def test_a_program_that_folds_otherwise_is_not_made(kind: Callable[[], nn.Module], how: dict[str, object]) -> None:
    model = kind().eval()
    prepared = quant.prepare(model, images())
    with torch.no_grad():
        for _ in range(4):
            prepared(images())
            prepared(images(), **how)
    q = quant.convert(prepared)
    assert close(q, model)
    assert close(q, model, **how)


@KINDS
def test_the_rest_of_such_a_model_says_that_it_runs_as_it_is(kind: Callable[[], nn.Module]) -> None:
    model = kind().eval()
    q = quant.quantize_static(model, [images() for _ in range(4)], progress=False)
    with pytest.warns(UncapturedCall):
        assert close(q, model, odd=True)

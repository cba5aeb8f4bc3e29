"""Parts of a converted model called by themselves, by their user or by the user's own forward of the model around."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.uncaptured import UncapturedCall

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Steps(nn.Module):
    """Goes over as many steps as there are, which a graph holds to the number that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), 32)
        for place in range(x.size(1)):
            state = torch.tanh(self.first(x[:, place]) + 0.5 * state)
        result: Tensor = self.last(state)
        return result


class Masked(nn.Module):
    """Takes a mask or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.layer(x)
        return y if mask is None else y * mask


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.behind = inner, nn.Linear(16, 16)

    def forward(self, x: Tensor, *args: Tensor | None) -> Tensor:
        y: Tensor = self.behind(self.inner(x, *args))
        return y


def decibels(got: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.pow(2).sum() / (got - expected).pow(2).sum()))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::quant.runtime.uncaptured.UncapturedCall")
def test_a_part_is_not_run_for_sizes_that_no_recording_had() -> None:
    model = Around(Steps()).eval()
    q = quant.quantize_static(model, [torch.randn(8, 6, 16) for _ in range(4)])
    for length in (6, 9, 3):
        x = torch.randn(5, length, 16)
        assert decibels(q(x), model(x)) > 20.0
        assert decibels(q.inner(x), model.inner(x)) > 20.0


@torch.no_grad()
def test_what_a_part_was_not_made_for_is_said() -> None:
    q = quant.quantize_static(Around(Steps()).eval(), [torch.randn(8, 6, 16)])
    with pytest.warns(UncapturedCall, match=r"inner: argument 'x' was of sizes \(n, 6, 16\) in example_inputs"):
        q.inner(torch.randn(5, 9, 16))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::quant.runtime.uncaptured.UncapturedCall")
def test_none_for_a_tensor_that_a_part_took() -> None:
    model, mask = Around(Masked()).eval(), torch.rand(4, 16)
    prepared = quant.prepare(model, (torch.randn(4, 16), mask))
    for _ in range(4):
        prepared(torch.randn(4, 16), mask)
    q = quant.convert(prepared)
    x = torch.randn(4, 16)
    assert decibels(q(x, mask), model(x, mask)) > 20.0
    assert decibels(q(x, None), model(x, None)) > 20.0
    assert decibels(q.inner(x, None), model.inner(x, None)) > 20.0


class Halved(nn.Module):
    """Another branch for long sequences, in which the part sees much larger values."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        y = y * 3.0 if y.shape[1] > 8 else y * 0.1 + 0.1
        result: Tensor = self.part(y)
        return result


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::quant.runtime.uncaptured.UncapturedCall")
def test_a_part_takes_a_range_of_the_call_where_no_program_stands_for_that_around_it() -> None:
    model = Halved().eval()
    q = quant.quantize_static(model, [torch.randn(8, 6, 16) for _ in range(4)])
    for length in (6, 12):
        x = torch.randn(8, length, 16)
        assert decibels(q(x), model(x)) > 28


class Branched(nn.Module):
    """Computes short sequences in another way, by a recurrent layer or by a cell step by step."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.short, self.long, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.recurrent, self.is_cell = recurrent, isinstance(recurrent, nn.RNNCellBase)

    def forward(self, x: Tensor) -> Tensor:
        y = self.long(x) if x.shape[1] > 4 else self.short(x) * 0.5
        if self.is_cell:
            state, states = None, []
            for one in y.unbind(1):
                state = self.recurrent(one, state)
                states.append(state[0] if isinstance(state, tuple) else state)
            y = torch.stack(states, 1)
        else:
            y = self.recurrent(y)[0]
        result: Tensor = self.last(y)
        return result


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.GRUCell, nn.LSTMCell])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::quant.runtime.uncaptured.UncapturedCall")
def test_a_recurrent_layer_takes_ranges_of_the_call_where_no_program_stands_for_it(kind: type[nn.Module]) -> None:
    options = {"batch_first": True} if issubclass(kind, nn.RNNBase) else {}
    model = Branched(kind(16, 16, **options)).eval()
    q = quant.quantize_static(model, [torch.randn(4, 3, 16) for _ in range(4)])
    longer = 4 * torch.randn(4, 9, 16)
    assert decibels(q(longer), model(longer)) > 38  # 5 to 7 by the ranges of the short ones

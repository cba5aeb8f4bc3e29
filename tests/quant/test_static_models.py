"""Habits of real models, each cut down to the few lines that once kept the whole from being converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from quant.artefact import load, save
from quant.compare import compare
from quant.convert import convert
from quant.parity import parity
from quant.prepare import prepare
from quant.report import summary


def check(model: nn.Module, *args: Any) -> nn.Module:
    """The int8 model, near the float one."""
    prepared = prepare(model.eval(), args)
    with torch.no_grad():
        expected = prepared(*args)
        converted = convert(prepared)
        assert (converted(*args) - expected).norm() < 0.05 * expected.norm()
    return converted


class Decoder(nn.Module):
    """A cell's first state comes through an activation, as a sequence-to-sequence decoder's does."""

    def __init__(self) -> None:
        super().__init__()
        self.bridge, self.cell, self.out = nn.Linear(8, 16), nn.GRUCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.bridge(x))
        for _ in range(3):
            state = self.cell(x, state)
        return self.out(state)


def test_an_activation_that_only_a_cells_state_reads() -> None:
    report = summary(check(Decoder(), torch.randn(4, 8)))
    assert {entry.outcome for entry in report if entry.bytes_before} == {"int8"}


class BiasTable(nn.Module):
    """Adds rows of a parameter chosen by an index, as Swin's relative positions."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.table = nn.Parameter(torch.randn(5, 8))
        self.register_buffer("index", torch.tensor([0, 3, 3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.table[self.index])


def test_rows_of_a_parameter() -> None:
    check(BiasTable(), torch.randn(4, 8))


class ConvThenRows(nn.Module):
    """Views a convolution's output as rows, for a recurrent layer in float: speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Hardtanh(0, 20))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(torch.cumsum(x.view(x.shape[0], -1, x.shape[3]).transpose(1, 2), dim=1))


def test_a_view_of_a_convolutions_output_step_by_step() -> None:
    model, x = ConvThenRows().eval(), torch.randn(2, 1, 8, 6)
    q = check(model, x)
    prepared = prepare(model, x)
    prepared(x)
    assert parity(prepared, convert(prepared), [x]).holds
    assert len(compare(model, q, [x]).steps) > 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_weight_norm_is_gone_with_the_weight_that_it_made() -> None:
    model = nn.Sequential(weight_norm(nn.Conv1d(4, 8, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    x = torch.randn(4, 4, 8)
    report = summary(q := check(model, x))
    assert type(q[0]) is nn.Conv1d
    assert report["0.parametrizations.weight"].outcome == "int8"
    assert report.bytes_after < 0.5 * report.bytes_before
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(q, x)(x), q(x))  # tracing reads every attribute, the weight too


class Bags(nn.Module):
    """Reads bags by offsets, of which the first has to be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 4)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bags(words, offsets))


class Masked(nn.Module):
    """Leaves out a mask that hides nothing, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shifted()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, None if mask.all() else mask)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.head(x if mask is None else x * mask)


class Versioned(nn.Module):
    """Refuses a state without the version that torch notes of each module, as torchvision's MNASNet does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


LOADED: dict[str, tuple[type[nn.Module], tuple[Tensor, ...]]] = {
    "offsets": (Bags, (torch.arange(9), torch.tensor([0, 4, 6]))),
    "a mask": (Masked, (torch.randn(3, 8), torch.tensor([True] * 7 + [False]))),
    "a version": (Versioned, (torch.randn(3, 8),)),
}


@pytest.mark.parametrize(("kind", "args"), LOADED.values(), ids=LOADED)
def test_loading_makes_inputs_that_the_forward_takes(
    kind: type[nn.Module], args: tuple[Tensor, ...], tmp_path: Path
) -> None:
    q = check(kind(), *args)
    save(q, tmp_path / "q")
    assert torch.equal(load(tmp_path / "q", model=kind())(*args), q(*args))

"""Models of torch.fx and torch.export: modules whose forward is generated from a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant

# Of torch's own description of arguments, which a deep copy makes again.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(16, 32), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardtanh(self.conv(self.first(x).relu()) * 0.5, -1.0, 1.0)
        out: Tensor = self.last(y.permute(0, 1, 2).flatten(1, 1)).mean(1)
        return out


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


def rows(count: int = 32) -> Tensor:
    return torch.randn(count, 4, 16)


def exported() -> nn.Module:
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(Net().eval(), (rows(),), dynamic_shapes=({0: batch},)).module()


MAKE: dict[str, Callable[[], nn.Module]] = {
    "traced": lambda: torch.fx.symbolic_trace(Net().eval()),
    "exported": exported,
    "around traced": lambda: Around(torch.fx.symbolic_trace(Net().eval())),
    "around exported": lambda: Around(exported()),
}


@pytest.fixture(params=MAKE)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MAKE[request.param]()


def relative(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).norm() / expected.norm())


def weights(q: nn.Module) -> set[str]:
    """The outcomes of modules with weights."""
    return {one.outcome for one in quant.summary(q).entries if one.bytes_before > 100}


@torch.no_grad()
def test_its_layers_are_int8_and_copies_are_whole(model: nn.Module) -> None:
    batches = [rows() for _ in range(3)]
    q, x = quant.quantize_static(model, batches, progress=False), rows(9)
    assert weights(q) == {"int8"}
    assert relative(model(x), q(x)) < 0.05
    assert torch.equal(copy.deepcopy(q)(x), q(x))
    assert torch.equal(copy.deepcopy(copy.deepcopy(q))(x), q(x))


def test_it_is_trained(model: nn.Module) -> None:
    prepared = quant.prepare_qat(model, rows())
    prepared.train()
    for _ in range(3):
        prepared(rows()).square().sum().backward()
    assert all(one.grad is not None for one in prepared.parameters())
    q, x = quant.convert(prepared), rows(9)
    assert weights(q) == {"int8"}
    with torch.no_grad():
        assert relative(copy.deepcopy(prepared).eval()(x), q(x)) < 0.01


@torch.no_grad()
def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, x = quant.quantize_static(MAKE["around traced"](), [rows()], progress=False), rows(9)
    quant.save(q, tmp_path / "q.q8")
    assert torch.equal(quant.load(tmp_path / "q.q8", model=MAKE["around traced"]())(x), q(x))


@torch.no_grad()
def test_a_hook_on_it_is_in_the_copy() -> None:
    torch.manual_seed(0)
    model, seen = torch.fx.symbolic_trace(Net().eval()), []
    model.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    prepared = quant.prepare(model, rows())
    prepared(rows())
    assert seen == [Tensor]

"""Subclasses with methods of their own keep them in int8; cells that are the whole model; scripted children."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.parity import parity
from quant.static.runner import runners


class Streaming(nn.LSTM):
    """With what users add to a layer."""

    CHUNK = 4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lag = 3

    def init(self, s: int, b: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, b, self.hidden_size), float(s)), torch.zeros(1, b, self.hidden_size)

    def steps(self, x: Tensor) -> Tensor:
        out, state = [], self.init(0, x.shape[1])
        for part in x.split(self.CHUNK):
            y, state = self(part, state)
            out.append(y)
        return torch.cat(out)

    @property
    def delay(self) -> int:
        return self.lag * self.CHUNK

    @staticmethod
    def rate() -> int:
        return 16000

    @classmethod
    def called(cls) -> str:
        return f"{cls.CHUNK}"


class Scaled(nn.Linear):
    def norms(self) -> Tensor:
        return self.weight.norm(dim=1) * self.factor()

    def factor(self) -> float:
        return 2.0


class Kernel(nn.Conv1d):
    def receptive(self) -> int:
        return self.kernel_size[0] * self.stride[0]


class First(nn.Module):
    """A layer's sequence; torch scripts an LSTM only inside of something."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


X = torch.randn(9, 2, 12, generator=torch.Generator().manual_seed(5))


def lstm() -> Streaming:
    torch.manual_seed(0)
    return Streaming(12, 16).eval()


def static(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_static(model, [x], progress=False)


@torch.no_grad()
@pytest.mark.parametrize("root", [True, False], ids=["root", "inside"])
@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_a_recurrent_subclass_keeps_what_the_user_added(how: str, root: bool, tmp_path: Path) -> None:
    make = lstm if root else lambda: nn.Sequential(lstm())
    model = make()
    whole = quant.quantize_dynamic(model) if how == "dynamic" else static(model, X)
    quant.save(whole, tmp_path / "lstm.q8")
    restored = quant.load(tmp_path / "lstm.q8", model=make())
    expected = lstm().steps(X)
    for one in (whole, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), restored):
        q: Any = one if root else one[0]
        assert (q.delay, q.rate(), q.called(), q.CHUNK, q.lag) == (12, 16000, "4", 4, 3)
        assert torch.equal(q.init(2, 5)[0], torch.full((1, 5, 16), 2.0))
        assert float((q.steps(X) - expected).norm() / expected.norm()) < 0.03
        assert torch.equal(q.steps(X), (whole if root else whole[0]).steps(X))
        assert isinstance(q, quant.nn.QuantModule)


@torch.no_grad()
@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_a_linear_subclass_keeps_its_methods(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    q = quant.quantize_dynamic(model) if how == "dynamic" else static(model, X)
    assert torch.allclose(q[0].norms(), model[0].norms(), rtol=0.02)
    assert q[0].in_features == 12
    assert torch.equal(pickle.loads(pickle.dumps(q))(X), q(X))


@torch.no_grad()
def test_a_convolution_keeps_methods_and_attributes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Kernel(2, 4, 3, stride=2), nn.ReLU(), nn.Conv1d(4, 4, 1)).eval()
    q = static(model, X)
    assert q[0].receptive() == 6
    assert (q[0].stride, q[2].kernel_size) == ((2,), (1,))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@torch.no_grad()
def test_a_subclass_is_scripted_and_has_the_names_of_its_int8_class() -> None:
    q = quant.quantize_dynamic(First(lstm()))
    assert torch.equal(torch.jit.script(q)(X), q(X))
    assert type(q.layer).__name__ == "LSTM"
    assert quant.summary(q)["layer"].type == "Streaming"


def test_a_layer_of_torchs_own_has_the_int8_class_itself() -> None:
    assert type(quant.quantize_dynamic(nn.LSTM(4, 4))) is quant.nn.LSTM


def test_names_that_the_int8_layer_needs_are_its_own() -> None:
    class Odd(nn.Linear):
        def outputs(self) -> str:
            return "mine"

        @property
        def scale(self) -> float:
            return 3.0

    q = quant.quantize_dynamic(Odd(4, 4))
    assert q.scale.shape == (4,)
    assert q(torch.randn(2, 4)).shape == (2, 4)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "GRUCell": lambda: nn.GRUCell(12, 16),
    "LSTMCell": lambda: nn.LSTMCell(12, 16),
    "RNNCell": lambda: nn.RNNCell(12, 16),
}


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_may_be_the_whole_model(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cell, x = CELLS[kind]().eval(), torch.randn(6, 12)

    def hidden(y: Any) -> Tensor:
        return y[0] if isinstance(y, tuple) else y

    prepared = quant.prepare(cell, x)
    prepared(x)
    q = quant.convert(prepared)
    assert parity(prepared, q, [x]).holds
    with torch.no_grad():
        expected = hidden(cell(x))
        assert float((hidden(q(x)) - expected).norm() / expected.norm()) < 0.02
    p = quant.prepare_qat(cell, x).train()
    hidden(p(x)).sum().backward()
    assert all(one.grad is not None for name, one in p.named_parameters() if "_quant" not in name)
    trained = quant.convert(p.eval())
    assert parity(p, trained, [x]).holds
    quant.save(trained, tmp_path / "cell.q8")
    assert torch.equal(hidden(quant.load(tmp_path / "cell.q8", model=cell)(x)), hidden(trained(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@torch.no_grad()
def test_a_scripted_child_is_left_alone() -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model, x = nn.Sequential(nn.Linear(12, 8), scripted, nn.Linear(8, 4)).eval(), X
    assert runners(model) == {}
    q = quant.quantize_dynamic(model)
    assert [quant.summary(q)[name].outcome for name in ("0", "2")] == ["int8", "int8"]
    assert float((q(x) - model(x)).norm() / model(x).norm()) < 0.03

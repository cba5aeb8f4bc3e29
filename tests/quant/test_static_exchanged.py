"""Modules put into a converted model: they are called with floats, or an error says what to do; nothing is ignored."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant


class Net(nn.Module):
    """A convolution with what is folded into it, a block that is seen through, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        return self.head(torch.relu(x + self.block(x)).mean((2, 3)))


def made() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    return model, quant.quantize_static(model, [x], progress=False), x


def same(model: nn.Module) -> nn.Module:
    return model


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ran", [False, True], ids=["never-ran", "ran"])
@pytest.mark.parametrize("copied", [same, copy.deepcopy, pickled])
def test_a_replaced_head_is_called(copied: Callable[[nn.Module], nn.Module], ran: bool, backend: str) -> None:
    model, q, x = made()
    with torch.no_grad(), quant.kernels.use(backend):
        before = q(x) if ran else copy.deepcopy(q)(x)
        q = copied(q)
        int8 = q.head
        q.head = nn.Identity()
        assert q(x).shape == (4, 8)
        q.head = nn.Linear(8, 6)
        features = model.block(model.act(model.norm(model.conv(x))))
        features = torch.relu(model.act(model.norm(model.conv(x))) + features).mean((2, 3))
        assert (q(x) - q.head(features)).norm() < 0.02 * q(x).norm()
        q.head = int8
        assert torch.equal(q(x), before)


def test_a_replaced_layer_between_integers_is_rounded_to_the_range_of_its_step() -> None:
    model, q, x = made()
    whole = copy.deepcopy(model)
    whole.conv = q.conv = nn.Conv2d(3, 8, 3)
    whole.norm = nn.Identity()  # it was folded into the layer that is gone
    with torch.no_grad():
        assert (q(x) - whole(x)).norm() < 0.05 * whole(x).norm()
        assert q.block[0].q_weight.dtype == torch.int8
        assert quant.compare(whole, q, [x])["conv"].kind == "Conv2d"


def test_a_replaced_activation_of_a_step_without_weight_is_called() -> None:
    model, q, x = made()
    model.block[1] = q.block[1] = nn.Hardsigmoid()
    with torch.no_grad():
        assert (q(x) - model(x)).norm() < 0.05 * model(x).norm()


@pytest.mark.parametrize(
    ("name", "why"),
    [("norm", "was computed together with 'conv'"), ("act", "together with 'conv'"), ("block", "is no single float")],
)
def test_what_cannot_be_replaced_is_an_error_that_says_what_to_do(name: str, why: str, backend: str) -> None:
    _, q, x = made()
    setattr(q, name, nn.BatchNorm2d(8).eval())
    with (
        quant.kernels.use(backend),
        pytest.raises(RuntimeError, match=f"layer '{name}': it was replaced after .*{why}"),
    ):
        q(x)


def test_a_replaced_recurrent_layer() -> None:
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True)).eval()
    x = torch.randn(4, 5, 8)
    q = quant.quantize_static(last, [x], progress=False)
    last[1] = q[1] = nn.GRU(8, 6, batch_first=True)
    with torch.no_grad():
        assert (q(x)[0] - last(x)[0]).norm() < 0.03 * last(x)[0].norm()


def test_the_report_says_it_and_save_refuses(tmp_path: Path) -> None:
    _, q, _ = made()
    assert quant.summary(q)["head"].outcome == "int8"
    q.head = nn.Linear(8, 6)
    entry = quant.summary(q)["head"]
    assert (entry.outcome, entry.bytes_after) == ("float", 9 * 6 * 4)
    assert entry.detail == "replaced by a Linear after the conversion; called in float"
    with pytest.raises(quant.ArtefactError, match=r"^head was replaced after quant\.convert"):
        quant.save(q, tmp_path / "int8.q8")

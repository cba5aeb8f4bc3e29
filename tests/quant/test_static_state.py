"""The state_dict of a converted model goes back into the same conversion, and into no other without a word."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant


class Branches(nn.Module):
    """Branches on a value, so that its layers are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.two = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y) if float(y.detach().sum()) < 1e9 else y


def made(kind: type[nn.Module], factor: float = 1.0, backend: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = kind() if kind is Branches else nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return quant.quantize_static(model.eval(), [factor * X], quant.Recipe(backend=backend), progress=False)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [nn.Sequential, Branches])
def test_a_state_dict_of_the_same_conversion_loads(kind: type[nn.Module], tmp_path: Path) -> None:
    q = made(kind)
    quant.save(q, tmp_path / "q.q8")
    float_model = Branches() if kind is Branches else nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    restored = quant.load(tmp_path / "q.q8", model=float_model)
    with torch.no_grad():
        expected = q(X)
        for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), made(kind), restored):
            for layer in other.modules():
                if isinstance(getattr(layer, "weight_scale", None), Tensor):
                    layer.weight_scale.mul_(2.0)
            assert str(other.load_state_dict(q.state_dict())) == "<All keys matched successfully>"
            assert torch.equal(other(X), expected)
            whole = nn.Sequential(other)
            whole.load_state_dict(nn.Sequential(q).state_dict())
        assert "_quant.ranges" in " ".join(q.state_dict())
    torch.save(q.state_dict(), tmp_path / "state.pt")
    q.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


@pytest.mark.parametrize("kind", [nn.Sequential, Branches])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_dict_of_another_calibration_is_refused_before_anything_is_loaded(
    kind: type[nn.Module], wrapped: bool
) -> None:
    one, other = made(kind), made(kind, 20.0)
    if wrapped:
        one, other = nn.Sequential(one), nn.Sequential(other)
    with torch.no_grad():
        before = other(X)
        with pytest.raises(RuntimeError, match=r"of another calibration: values of '.*' are in \[-.*quant\.load"):
            other.load_state_dict(one.state_dict())
        assert torch.equal(other(X), before)


def test_a_state_dict_without_ranges_loads_as_one_of_the_same_conversion() -> None:
    q = made(nn.Sequential)
    state = {name: one for name, one in q.state_dict().items() if "ranges" not in name}
    assert str(made(nn.Sequential).load_state_dict(state)) == "<All keys matched successfully>"


def test_another_conversion_is_refused() -> None:
    q = made(nn.Sequential)
    state = {**q.state_dict(), "_quant.ranges": torch.zeros(9, 2)}
    with pytest.raises(RuntimeError, match=r"another conversion, with 9 ranges in '\(root\)'; this one has \d:"):
        q.load_state_dict(state)

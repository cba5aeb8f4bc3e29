"""The state_dict of a converted model goes back into the same conversion, and into no other without a word."""

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


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, 2), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(676, 5)).eval()


def negate(layer: Any) -> None:
    layer.q_weight.neg_()


def add_to_bias(layer: Any) -> None:
    layer.bias.add_(5.0)


def take_other_bias(layer: Any) -> None:
    layer.bias = torch.full_like(layer.bias, 3.0)


def take_parameter(layer: Any) -> None:
    layer.bias = nn.Parameter(torch.full_like(layer.bias, 3.0))


def scale_weight(layer: Any) -> None:
    layer.weight_scale.mul_(2.0)


def take_other_scale(layer: Any) -> None:
    layer.weight_scale = layer.weight_scale * 2


def exchange_in_place(layer: Any) -> None:
    layer._buffers["bias"] = torch.full_like(layer.bias, 3.0)


def take_other_range(layer: Any) -> None:
    layer.input_scale = layer.input_scale / 2


WRITES = (
    negate, add_to_bias, take_other_bias, take_parameter, scale_weight, take_other_scale, exchange_in_place,
    take_other_range,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("layer", ["3", "6"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_write_to_a_layer_counts_in_the_next_call(
    write: Callable[[Any], None], layer: str, backend: str | None, tmp_path: Path
) -> None:
    q = quant.quantize_static(mixed(), [X], quant.Recipe(backend=backend), progress=False)
    before, alone = q(X), q.get_submodule(layer)
    inner = torch.rand(2, 8, 6, 6) if layer == "3" else torch.rand(2, 676)
    first = alone(inner)
    write(alone)
    after, second = q(X), alone(inner)
    assert not torch.equal(after, before)
    assert not torch.equal(second, first)
    quant.save(q, tmp_path / "q.q8")
    for other in (copy.deepcopy(q), quant.load(tmp_path / "q.q8", model=mixed())):
        assert torch.equal(other(X), after)
        assert torch.equal(other.get_submodule(layer)(inner), second)


def test_a_bias_is_assigned_as_it_is_read_without_the_norm_that_is_folded_in() -> None:
    q = quant.quantize_static(mixed(), [X], progress=False)
    q.get_submodule("0").bias = torch.arange(8.0)
    torch.testing.assert_close(q.get_submodule("0").bias, torch.arange(8.0))
    state = {name: value.clone() for name, value in q.state_dict().items()}
    other = quant.quantize_static(mixed(), [X], progress=False)
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(X), q(X))
    assert torch.equal(other.state_dict()["0.bias"], state["0.bias"])


def test_functional_call_takes_another_bias_for_its_call() -> None:
    q = quant.quantize_static(mixed(), [X], progress=False)
    before = q(X)
    moved = torch.func.functional_call(q, {"6.bias": q.get_submodule("6").bias + 1}, X)  # type: ignore[operator]
    torch.testing.assert_close(moved, before + 1, atol=1e-2, rtol=0)
    assert torch.equal(q(X), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_float_type_leaves_the_numbers_as_kernels_need_them(dtype: torch.dtype) -> None:
    q = made(nn.Sequential)
    before = q(X)
    q.to(dtype)
    assert torch.equal(q(X), before)
    assert torch.equal(copy.deepcopy(q)(X), before)


def test_a_model_of_inference_mode_runs() -> None:
    q = made(nn.Sequential)
    before = q(X)
    with torch.inference_mode():
        other = copy.deepcopy(q)
        other.load_state_dict({name: value.clone() for name, value in q.state_dict().items()}, assign=True)
        assert torch.equal(other(X), before)
    assert torch.equal(other(X), before)

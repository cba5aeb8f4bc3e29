"""A parameter is not restored from a layer that holds what was computed from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.restored_weights import read_restored

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


class Computed(nn.Module):
    """A layer that computes with a square weight, and a branch on a size."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.randn(8, 8)), compute

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(x, self.weight)
        return y * 2 if x.shape[1] == 5 else y


LOST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added to itself": lambda x, weight: F.linear(x, weight + weight.t()),
    "of its rows": lambda x, weight: F.linear(x, weight.softmax(1)),
    "a part of it": lambda x, weight: F.linear(x, weight[:, :4] @ weight[4:]),
}
MOVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned": lambda x, weight: F.linear(x, weight.t()),
    "reshaped": lambda x, weight: F.linear(x, weight.view(4, 2, 8).transpose(0, 1).reshape(8, 8)),
    "in three dimensions": lambda x, weight: F.linear(x, weight.view(2, 4, 8).permute(1, 0, 2).flatten(0, 1)),
    "a product": lambda x, weight: x @ weight,
    "einsum": lambda x, weight: torch.einsum("bnd,de->bne", x, weight),
    "einsum of heads": lambda x, weight: torch.einsum("bnd,hed->bneh", x, weight.view(2, 4, 8)).flatten(2),
    "einsum, two sums": lambda x, weight: torch.einsum("bnij,eij->bne", x.unflatten(2, (2, 4)), weight.view(8, 2, 4)),
}
COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normalised": lambda x, weight: F.linear(x, F.normalize(weight, dim=1)),
    "copied": lambda x, weight: F.linear(x, weight.clone()),
    "scaled": lambda x, weight: F.linear(x, weight * 0.3),
    "scaled in two calls": lambda x, weight: F.linear(x, (weight * 0.6) * 0.5),
    "divided and turned": lambda x, weight: F.linear(x, (weight / -3).t()),
}


@pytest.mark.parametrize("compute", {**MOVED, **COMPUTED}.values(), ids={**MOVED, **COMPUTED})
def test_a_call_that_no_program_stands_for_computes_with_the_parameter(
    compute: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Computed(compute).eval(), torch.randn(4, 7, 8)
    q = quant.quantize_static(model, [torch.randn(16, 5, 8)], progress=False)
    quant.save(q, tmp_path / "q.safetensors")
    for one in (q, quant.load(tmp_path / "q.safetensors", model=Computed(compute).eval())):
        with pytest.warns(quant.types.UncapturedCall), torch.no_grad():
            assert (one(x) - model(x)).norm() < 0.02 * model(x).norm()


@pytest.mark.parametrize("compute", MOVED.values(), ids=MOVED)
def test_a_rearranged_parameter_is_restored_to_the_bit(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    """What the forward computes of it is what the int8 layer holds."""
    torch.manual_seed(0)
    model = Computed(compute).eval()
    q = quant.quantize_static(model, [torch.randn(16, 5, 8)], progress=False)
    with pytest.warns(quant.types.UncapturedCall):
        q(torch.randn(4, 7, 8))
    [layer] = (one for one in q.modules() if isinstance(one, StaticLayer))
    rows = torch.eye(8).unsqueeze(0)
    assert isinstance(q.weight, Tensor)
    assert torch.equal(compute(rows, q.weight)[0], layer.weight.t())


@pytest.mark.parametrize("compute", LOST.values(), ids=LOST)
def test_a_parameter_that_cannot_be_restored_is_named(
    compute: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    q = quant.quantize_static(Computed(compute).eval(), [torch.randn(16, 5, 8)], progress=False)
    quant.save(q, tmp_path / "q.safetensors")
    for one in (q, quant.load(tmp_path / "q.safetensors", model=Computed(compute).eval())):
        with pytest.raises(
            quant.types.CaptureMismatch, match=r"fails \(.*NoneType.*\): of weight the int8 layer has only"
        ):
            one(torch.randn(4, 7, 8))


class Branches(nn.Module):
    """Two branches that compute with one weight and bias."""

    def __init__(self, out: int, compute: Compute, other: Compute) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, 8)), nn.Parameter(torch.randn(out) * 3)
        self.compute, self.other = compute, other

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return (self.other if other else self.compute)(x, self.weight, self.bias)


def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight) * 2


RESTORED: dict[str, tuple[int, Compute, Compute]] = {
    "normalised, then not": (4, lambda x, w, b: F.linear(x, F.normalize(w, dim=1)), twice),
    "one row normalised": (1, lambda x, w, b: F.linear(x, F.normalize(w, dim=1)), twice),
    "divided by its norm": (4, lambda x, w, b: F.linear(x, w / w.norm(dim=1, keepdim=True)), twice),
    "normalised whole": (4, lambda x, w, b: F.linear(x, F.rms_norm(w, (4, 8))), twice),
    "slices out of order": (4, lambda x, w, b: F.linear(x, w[2:]) + F.linear(x, w[:2]), twice),
    "one slice twice": (4, lambda x, w, b: F.linear(x, w[:2]) + F.linear(-x, w[:2]) + F.linear(x, w[2:]), twice),
    "a slice and the whole": (4, lambda x, w, b: F.linear(x, w[:2]).sum(1, keepdim=True) + F.linear(x, w), twice),
}
RESTORED |= {
    "standardised": (4, lambda x, w, b: F.linear(x, (w - w.mean(1, True)) / w.std(1, keepdim=True)), twice),
    "with a gain for each row": (8, lambda x, w, b: F.linear(x, w * b[:, None]), twice),
    "one bias": (1, lambda x, w, b: F.linear(x, w, b.exp()), lambda x, w, b: F.linear(x, w, b.exp()) * 2),
}
PARTS: dict[str, tuple[int, Compute, Compute]] = {
    "a slice": (4, lambda x, w, b: F.linear(x, w[:2]), lambda x, w, b: x.sum() * w.sum(0)),
    "a scaled slice": (4, lambda x, w, b: F.linear(x, w[1:3] * 2), lambda x, w, b: F.linear(x, w[1:3] * 2)),
    "every second row": (4, lambda x, w, b: F.linear(x, w[::2]), lambda x, w, b: F.linear(x, w[1::2])),
    "rows that overlap": (4, lambda x, w, b: F.linear(x, w[:3])[:, :1] + F.linear(x, w[1:])[:, :1], twice),
    "columns": (4, lambda x, w, b: F.linear(x[:, :4], w[:, :4]), lambda x, w, b: x[:, :4] * w.sum()),
}


@pytest.mark.parametrize(("out", "compute", "other"), RESTORED.values(), ids=RESTORED)
def test_another_branch_computes_with_the_whole_parameter(
    out: int, compute: Compute, other: Compute, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Branches(out, compute, other).eval(), torch.randn(64, 8)
    q = quant.quantize_static(model, [x], progress=False)
    quant.save(q, tmp_path / "q.safetensors")
    expected = model(x, other=True)
    for one in (q, quant.load(tmp_path / "q.safetensors", model=Branches(out, compute, other).eval())):
        with pytest.warns(quant.types.UncapturedCall), torch.no_grad():
            assert (one(x, other=True) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(("out", "compute", "other"), PARTS.values(), ids=PARTS)
def test_a_part_of_a_parameter_stands_for_no_whole(out: int, compute: Compute, other: Compute) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    q = quant.quantize_static(Branches(out, compute, other).eval(), [x], progress=False)
    with pytest.raises(quant.types.CaptureMismatch, match=r"fails \(.*NoneType.*\): of (weight|bias) the int8 layer"):
        q(x, other=True)


@pytest.mark.parametrize(
    "undo", [[["eval", [1, 0]]], [["permute", "10"]], [["divide", None]], [["divide", [1, "2"]]], 3, True]
)
def test_what_a_file_may_say_of_restoring(undo: Any) -> None:
    undos = [["permute", [1, 0]], ["divide", 0.5], ["divide", [0.5, 2.0]], ["subtract", [0.5, 2.0]]]
    assert read_restored("weight", False, "linear", True, undos).undo
    with pytest.raises((ValueError, TypeError)):
        read_restored("weight", False, "linear", True, undo)

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


@pytest.mark.parametrize("undo", [[["eval", [1, 0]]], [["permute", "10"]], [["divide", None]], 3, True])
def test_what_a_file_may_say_of_restoring(undo: Any) -> None:
    assert read_restored("weight", False, "linear", True, [["permute", [1, 0]], ["divide", 0.5]]).undo
    with pytest.raises((ValueError, TypeError)):
        read_restored("weight", False, "linear", True, undo)

"""A parameter is not restored from a layer that holds what was computed from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant


class Computed(nn.Module):
    """A layer that computes with a square weight, and a branch on a size."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.randn(8, 8)), compute

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(x, self.weight)
        return y * 2 if x.shape[1] == 5 else y


LOST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned": lambda x, weight: F.linear(x, weight.t()),
    "scaled": lambda x, weight: F.linear(x, weight * 0.3),
    "scaled in two calls": lambda x, weight: F.linear(x, (weight * 0.6) * 0.5),
}
COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normalised": lambda x, weight: F.linear(x, F.normalize(weight, dim=1)),
    "copied": lambda x, weight: F.linear(x, weight.clone()),
    "a product": lambda x, weight: x @ weight,
    "einsum": lambda x, weight: torch.einsum("bnd,de->bne", x, weight),
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
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


@pytest.mark.parametrize("compute", LOST.values(), ids=LOST)
def test_what_would_be_computed_twice_is_an_error(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    q = quant.quantize_static(Computed(compute).eval(), [torch.randn(16, 5, 8)], progress=False)
    with pytest.raises((AttributeError, TypeError), match="NoneType"):
        q(torch.randn(4, 7, 8))

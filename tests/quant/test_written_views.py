"""Forwards that change a tensor by a view of it, between a layer that read the tensor and what is folded into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant


class WritesView(nn.Module):
    """A layer reads a value, a view of the value is changed, and then the layer's own value is read."""

    def __init__(self, view: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.view, self.then = nn.Linear(8, 8), nn.Linear(8, 4), view, then

    def forward(self, x: Tensor) -> Tensor:
        z = x.erf()
        part = self.view(z)
        y = self.first(z)
        part.add_(3.0)
        return self.last(self.then(y)) + part.sum()


@pytest.mark.parametrize("then", [nn.ReLU(), nn.Identity()], ids=["clamp", "identity"])
@pytest.mark.parametrize(
    "view",
    [lambda z: z[:, :4], lambda z: z.t()[2:], lambda z: z.view(-1).view(-1, 4)],
    ids=["slice", "turned", "reshaped"],
)
def test_a_layer_reads_what_was_there_before_the_write(
    view: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model = WritesView(view, then).eval()
    q = quant.quantize_static(model, [(torch.randn(6, 8),) for _ in range(16)], progress=False)
    x = torch.randn(6, 8)
    with torch.no_grad():
        layer = model.last(then(model.first(x.erf())))
        found = q(x) - (model(x) - layer)  # without the sum of the view, which is large
    assert float((found - layer).norm() / layer.norm()) < 0.1


class BranchesInPlace(nn.Module):
    """Branches that each change their own value in place, after the other's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x, inplace=False)
        a, b = self.a(x), self.b(x)
        b = torch.relu_(b)
        return self.last(torch.relu(a) + b)  # type: ignore[no-any-return]


def test_a_write_to_another_layers_value_keeps_nothing_from_being_folded() -> None:
    torch.manual_seed(0)
    q = quant.quantize_static(BranchesInPlace().eval(), [(torch.randn(6, 8),) for _ in range(16)], progress=False)
    assert "octet.lookup" not in str(q.program)
    assert str(q.program).count("= layer") == 3


class Decays(nn.Module):
    """A buffer that each call changes, by a way that torch's version counters do not note."""

    def __init__(self, *, noted: bool) -> None:
        super().__init__()
        self.first, self.last, self.noted = nn.Linear(8, 8), nn.Linear(8, 4), noted
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        (self.gain if self.noted else self.gain.data).mul_(0.8)
        return self.last(self.first(x) * self.gain)  # type: ignore[no-any-return]


@pytest.mark.parametrize("noted", [True, False])
def test_a_buffer_that_calls_change_is_read_anew_in_each(noted: bool) -> None:
    torch.manual_seed(0)
    model = Decays(noted=noted).eval()
    q = quant.quantize_static(model, [torch.randn(16, 8) for _ in range(8)], progress=False)
    x = torch.randn(16, 8)
    for _ in range(6):
        with torch.no_grad():
            found, expected = q(x), model(x)
        assert float((found - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(q.gain, model.gain)

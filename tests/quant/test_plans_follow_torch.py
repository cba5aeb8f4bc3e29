"""Native calls give what torch would, also where dimensions, modes and types are not those of capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.arguments import bind
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region


class Between(nn.Module):
    """Two layers and what a test puts between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def int8(between: Callable[[nn.Module, Tensor], Tensor], *shape: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Between(between).eval()
    return model, quant.quantize_static(model, [torch.randn(shape) for _ in range(4)], progress=False)


def likeness(model: nn.Module, q: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        expected, given = model(x), q(x)
    assert given.shape == expected.shape
    return float(20 * torch.log10(expected.norm() / (given - expected).norm()))


@pytest.mark.parametrize(
    "between",
    [
        lambda module, y: F.softmax(torch.sin(y).squeeze(0), 1) * 3,
        lambda module, y: torch.sin(y).squeeze(0)[..., :1] + torch.sin(y).squeeze(0),
        lambda module, y: (y.squeeze(0)[..., None, :] * 2).sum(-2),
    ],
    ids=["softmax", "dots", "none"],
)
def test_dimensions_that_depend_on_a_size(between: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, q = int8(between, 1, 8, 8)
    for batch in (1, 3):
        assert likeness(model, q, torch.randn(batch, 8, 8)) > 15


def test_a_shape_that_is_changed_in_place() -> None:
    def between(module: nn.Module, y: Tensor) -> Tensor:
        z = torch.sin(y) * 1
        z.transpose_(0, 1)
        return y.reshape(z.shape[1], z.shape[0], 8)

    model, q = int8(between, 3, 5, 8)
    assert likeness(model, q, torch.randn(3, 5, 8)) > 25


def test_functional_dropout_follows_the_mode_of_its_owner() -> None:
    model, q = int8(lambda module, y: F.softmax(F.dropout(y.sin() * 2, 0.5, module.training), -1), 4, 8)
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(q(x), q(x))
        q.train()
        assert not torch.equal(q(x), q(x))
    assert likeness(model, q.eval(), x) > 20


def test_a_float_layer_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)).eval()
    p = quant.prepare(model, torch.randn(4, 8), quant.Recipe({"1": None}))
    p(torch.randn(64, 8))
    q, x = quant.convert(p), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        given = q(x)
    with torch.no_grad():
        expected = model(x)
    assert (given.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("norm", [lambda module, y: F.layer_norm(y, (8,)), lambda module, y: module.norm(y)])
def test_a_norm_without_a_weight_holds_its_size(norm: Callable[[nn.Module, Tensor], Tensor]) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1)
            self.norm = nn.LayerNorm(8, elementwise_affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(norm(self, self.first(x)))

    q = quant.quantize_static(Norm().eval(), [torch.randn(2, 3, 8) for _ in range(4)], progress=False)
    with (
        pytest.raises((RuntimeError, ValueError), match=r"its rows have not 8 values|normalized_shape=\[8\]"),
        torch.no_grad(),
    ):
        q(torch.randn(2, 3, 12))


def test_a_parameter_between_float_calls_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model = Between(lambda module, y: F.softmax(module.scale * y.sin(), -1) * module.scale)
    p = quant.prepare(model.eval(), torch.randn(4, 8), quant.Recipe({"last": None}))
    p(torch.randn(64, 8))
    q = quant.convert(p)
    q(torch.randn(4, 8)).sum().backward()
    assert q.scale.grad is not None
    assert any(isinstance(one, ProgramRunner) for one in q.modules())


def test_a_keyword_that_names_the_module_is_refused() -> None:
    class Odd(nn.Module):
        def forward(s, x: Tensor, **options: object) -> Tensor:
            return x

    assert bind(Odd(), (1,), {"more": 2}) == {"x": 1, "options": {"more": 2}}
    with pytest.raises(TypeError, match="multiple values for argument 's'"):
        bind(Odd(), (1,), {"s": 2})


def test_an_infinite_bias_is_named_in_training() -> None:
    p = quant.prepare_qat(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8))
    p(torch.randn(4, 8))
    with torch.no_grad():
        p[0].bias[0] = torch.inf
    with pytest.raises(ValueError, match="its bias holds NaN or inf"):
        p(torch.randn(4, 8))


def test_sizes_are_known_after_a_write_that_keeps_them() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            batch, length = y.shape[0], y.shape[1]
            weights = torch.arange(8).add_(1).float()  # integers, which no plan has
            return self.last((y * weights).reshape(batch * length, 8) / 8).reshape(batch, length, 8)

    torch.manual_seed(0)
    model = Sizes().eval()
    q = quant.quantize_static(model, [torch.randn(20, 30, 8), torch.randn(30, 40, 8)], progress=False)
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    assert "its shape is computed at run time" not in runner.program.schedule.describe()
    assert sum(isinstance(step, Region) for step in runner.program.schedule.steps) <= 2
    assert likeness(model, q, torch.randn(5, 2, 8)) > 25

"""Transforms of torch.func, checkpoints and parametrisations around the model's own layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from ..cases import WIDTH, TwoLayers, case, rows, two_rows


@case("vmap with in_dims and out_dims between layers", two_rows, child=True)
class VmapDims(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.vmap(torch.dot, in_dims=(0, 0))(x, y)
        outer = torch.vmap(lambda column, gain: column * gain, in_dims=(1, None), out_dims=1)(self.first(x), scores)
        return self.last((outer * 0.2).relu())


@case("vmap over a layer, with others around it", child=True)
class VmapInside(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.vmap(self.middle)(self.first(x)).relu())


class Ensemble(nn.Module):
    """The same small network with several sets of parameters, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(32, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        params, buffers = torch.func.stack_module_state(list(self.members))
        base: Any = self.members[0]
        call = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))
        found: Tensor = call(params, buffers)
        return found.permute(1, 0, 2).flatten(1)


@case("an ensemble by vmap over stacked parameters", child=True)
class Ensembled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads, self.last = nn.Linear(WIDTH, 32), Ensemble(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.heads(self.first(x).relu()))


@case("torch.func.jacrev of a function without layers", child=True)
class Jacobian(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.jacrev(lambda t: torch.tanh(t).sum(0))(x.detach())
        return self.last(self.first(slopes.diagonal(dim1=0, dim2=2).T.flip(0)[:, 0] * x).relu())


class Slope(nn.Module):
    """The slope of a potential with a layer in it, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda t: torch.tanh(self.inner(t)).sum())(x.detach())
        return found


@case("torch.func.grad through a layer", child=True)
class GradThroughLayer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.slope(x)).relu())


class Tangent(nn.Module):
    """A layer's value and its directional derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(lambda t: torch.tanh(self.inner(t)), (x.detach(),), (torch.ones_like(x),))
        return value + tangent


@case("torch.func.jvp through a layer", child=True)
class JvpThroughLayer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.tangent = Tangent()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.tangent(x)).relu())


@case("the slope of layers by autograd.grad, as a force", rows, child=True)
class LayerForce(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            energy = torch.tanh(self.first(place)).sum()
            force = torch.autograd.grad(energy, place, create_graph=self.training)[0]
        return self.last(torch.cat([force, x], 1))


@case("checkpoints with and without reentrance, in turn")
class BothCheckpoints(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: self.first(t).relu(), x, use_reentrant=False)
        found: Tensor = checkpoint(self.last, y, use_reentrant=self.training)
        return found


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.T) / 2


@case("a weight made symmetric by a parametrization")
def symmetric() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    return model


@case("a parametrization cached by parametrize.cached")
class CachedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(self.layer(x).relu())


class Doubles(nn.Module):
    """Calls itself twice the size, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


@case("a child whose __call__ doubles what forward gives")
class CallsDoubled(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Compiled(nn.Module):
    """A block that somebody compiled, with a branch on values in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        found: Tensor = y.relu() if x.mean() > 5 else y.tanh()
        return found


@case("a compiled child with a branch on values", child=True)
class CompiledIsland(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.compile(Compiled(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@case("a child compiled in place", child=True)
def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, WIDTH))
    model[1].compile(backend="eager")
    return model


@case("torch.while_loop on values", child=True)
class WhileLoop(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        halved = torch._higher_order_ops.while_loop(
            lambda t: t.abs().max() > 0.5, lambda t: (t * 0.5,), (x.detach().clone(),)
        )
        return self.last(self.first(halved[0]).relu())


@case("a graph module of torch.fx as a child")
class FxChild(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@case("gradients of a loss taken by backward inside, and dropped", child=True)
class InnerBackward(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (place * place).tanh().sum().backward()
        assert place.grad is not None
        return self.last(self.first(place.grad).relu())


@case("a layer's input is improved by steps of gradient descent", child=True)
class TestTime(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        z = x.detach() * 0.5
        for _ in range(2):
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                loss = torch.tanh(self.first(z)).square().mean()
                z = z - 0.5 * torch.autograd.grad(loss, z)[0]
        return self.last(torch.cat([z.detach(), x], 1))

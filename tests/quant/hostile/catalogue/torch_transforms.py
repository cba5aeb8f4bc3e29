"""torch's own machinery inside a forward: autograd functions, checkpoints, transforms, scripts, modes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..cases import WIDTH, TwoLayers, case


class Swish(torch.autograd.Function):
    """x sigmoid(x) that keeps its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class Reversal(torch.autograd.Function):
    """The gradient is turned round; with setup_context, as newer torch has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gain: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.gain = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.gain * gradient, None


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 64) / 64

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), (x > 0).long()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient


@case("a custom autograd function between two layers", child=True)
class AutogradFunction(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Swish.apply(self.first(x)))


@case("a gradient reversal layer with setup_context", child=True)
class GradientReversal(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Reversal.apply(self.first(x).relu(), 0.5))


@case("a straight-through estimator on the input", child=True)
class StraightThrough(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(Straight.apply(x)).relu())


@case("an autograd function with two outputs", child=True)
class AutogradTwo(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = TwoOutputs.apply(self.first(x))
        return self.last(y), TwoOutputs.apply(x)[1]


@case("a checkpointed block, without reentrance")
class Checkpoint(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: self.last(self.first(t).relu()), x, use_reentrant=False)


@case("a checkpointed block, with reentrance", child=True)
class CheckpointReentrant(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(checkpoint(F.gelu, y, use_reentrant=True))


@case("a checkpointed sequence of layers")
class CheckpointSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


@case("vmap over the rows", child=True)
class Vmap(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        scaled = torch.vmap(lambda row, peak: row / (1 + peak))(x, x.abs().amax(1))
        return self.last(self.first(scaled).relu())


@case("vmap over a layer", child=True, refusal="integers have no transforms of torch.func")
class VmapLayer(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.last(self.first(row).relu()))(x)


@case("the input's gradient by torch.func.grad", child=True)
class FunctionalGradient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda t: (t.sin() * t).sum())(x.detach())
        return self.last(self.first(slope).relu())


@case("a Jacobian-vector product inside", child=True)
class ForwardMode(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        _, tangent = torch.func.jvp(torch.tanh, (x.detach(),), (torch.ones_like(x),))
        return self.last(self.first(tangent * x).relu())


@case("an energy's force by autograd.grad inside the forward", child=True)
class Force(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad((at**3).sum(), at)
        return self.last(self.first(force / 3).relu())


@case("functional_call with other parameters", child=True)
class FunctionalCall(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        parameters = {name: value * 0.5 for name, value in self.first.named_parameters()}
        return self.last(torch.func.functional_call(self.first, parameters, (x,)).relu())


@torch.compile(backend="eager")
def compiled_gate(y: Tensor) -> Tensor:
    return y * torch.sigmoid(y)


@case("a compiled function", child=True)
class Compiled(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(compiled_gate(self.first(x)))


@case("a compiled submodule", child=True)
class CompiledModule(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


def _gate(y: Tensor) -> Tensor:
    return y * torch.sigmoid(y)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted_gate = torch.jit.script(_gate)


@case("a scripted function", child=True)
class Scripted(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(scripted_gate(self.first(x)))


@case("a scripted module as a child", child=True)
class ScriptedChild(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.gate = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


@case("a traced module as a child", child=True)
class TracedChild(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.gate = torch.jit.trace(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.zeros(2, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


@case("torch.cond on values", child=True)
class Cond(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.mean() > 5, lambda t: t.sin() * 2, lambda t: t.cos(), (x.detach(),))
        return self.last(self.first(y).relu())

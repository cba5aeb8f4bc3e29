"""Torch's own machinery inside a forward: tracers, custom operators, hooks, flags, what it tells beside values."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cases import WIDTH, TwoLayers, case, steps, uniform


@torch.library.custom_op("hostile::squashed", mutates_args=())
def squashed(y: Tensor, gain: float) -> Tensor:
    return torch.tanh(y) * gain


@squashed.register_fake
def _(y: Tensor, gain: float) -> Tensor:
    return torch.empty_like(y)


def _saved(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.gain = inputs[1]


squashed.register_autograd(
    lambda ctx, grad: (grad * ctx.gain * (1 - ctx.saved_tensors[0].tanh().square()), None), setup_context=_saved
)


@case("a custom operator of torch.library between two layers")
class CustomOperator(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(squashed(self.first(x), 1.5))


@case("layers called with torch functions disabled")
class Disabled(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            y = self.first(x).relu() * x.mean(1, keepdim=True).exp()
        return self.last(y)


@case("whether a torch function mode looks on decides")
class LooksOn(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        seen = torch.overrides.has_torch_function((x,)) or torch._C._len_torch_function_stack()
        return self.last(self.first(x).relu()) * (2 if seen else 1)


@case("whether torch is tracing, scripting or compiling decides")
class Tracing(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if torch.jit.is_scripting() or torch.jit.is_tracing() or torch.compiler.is_compiling():
            return self.last(y)
        return self.last(y.relu())


@case("torch's first seed scales the output")
class FirstSeed(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * (1 + torch.initial_seed() % 4)


@case("the states of generators are read and nothing is drawn")
class ReadsStates(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + (random.getstate()[1][0] + int(torch.get_rng_state()[:8].sum())) % 4
        return self.last(self.first(x).relu()) * gain


@case("the name of the function that made a tensor decides")
class GradFn(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        made = type(y.grad_fn).__name__ if y.grad_fn is not None else "none"
        return self.last(y) * (1 if made in ("none", "ReluBackward0") else 2)


def lying(b: int, n: int, i: int) -> tuple[Tensor, ...]:
    return (uniform(WIDTH, b).t(),) if i % 2 else (uniform(b, WIDTH),)


@case("a branch on the strides of the input", lying)
class Strides(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if x.stride(0) == 1 else y.tanh())


@case(
    "a branch on whether the input is a view, and where it begins",
    lambda b, n, i: (uniform(b + 1, WIDTH)[i % 2 :][:b],),
)
class IsView(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if x.storage_offset() else y.tanh())


@case("an output whose strides the caller reads", steps, read=lambda output: (output, output.is_contiguous()))
class LyingOutput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).transpose(0, 1)


@case("a hook on all modules of the process is put on inside")
class GlobalHook(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 0.5)
        try:
            y = self.first(x)
        finally:
            hook.remove()
        return self.last(y.relu())


@case("a backward hook of a layer is put on inside")
class BackwardHook(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hook = self.first.register_full_backward_hook(lambda module, mine, theirs: None)
        y = self.first(x)
        hook.remove()
        return self.last(y.relu())


@case("what backward keeps is packed by hooks for saved tensors")
class SavedHooks(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.double(), lambda one: one.float()):
            y = self.first(x).relu()
        return self.last(y)


@case("forward-mode differentiation by dual numbers")
class Dual(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            y, slope = torch.autograd.forward_ad.unpack_dual(torch.tanh(dual))
            y, slope = y.clone(), slope.clone()
        return self.last(self.first(y).relu() + self.first(slope))


@case("a default device is set by a context")
class DefaultDevice(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            ramp = torch.arange(32) / 32
            y = self.first(x) + ramp
        return self.last(y.relu())


@case("flags of oneDNN and of determinism set inside")
class Flags(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            y = self.first(x)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        y = y.relu().cumsum(1) / 8
        torch.use_deterministic_algorithms(before)
        return self.last(y)


@case("the number of threads is set and read inside")
class Threads(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        y = self.first(x).relu() * torch.get_num_threads()
        torch.set_num_threads(before)
        return self.last(y)


@case("fake tensors tell an output's shape")
class Fakes(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        image = x[None, None].detach()
        with torch._subclasses.FakeTensorMode() as mode:
            shape = F.unfold(mode.from_tensor(image), (1, 4)).shape
        return self.last(self.first(x).relu()) * (shape[1] / 4) + shape[2] / 100


@case("a layer is traced by torch.fx inside")
class TracedInside(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        traced = torch.fx.symbolic_trace(nn.Sequential(self.first, nn.ReLU()))
        return self.last(traced(x))


@case("a function is traced by make_fx inside")
class MakesFx(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda y: y.tanh() + y.mean())(x.detach())
        return self.last(self.first(traced(x)).relu())


@case("a child that the compiler is to leave alone")
class LeftAlone(TwoLayers):
    @torch.compiler.disable
    def inner(self, x: Tensor) -> Tensor:
        return self.first(x).relu()

    @torch.jit.unused
    def scale(self) -> float:
        return 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)) * self.scale()


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


@case("a parametrization is put on inside and taken off")
class Parametrized(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.first, "weight", Half())
        y = self.first(x)
        parametrize.remove_parametrizations(self.first, "weight", leave_parametrized=False)
        return self.last(y.relu() + self.first(x))


@case("a layer's gradients are switched off and on inside")
class Toggles(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        y = self.first(x)
        self.first.requires_grad_(True)
        return self.last(y.relu() + self.first(x) * 0.5)


@case("another state dict is loaded for one call of a layer")
class LoadsState(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        own = {name: one.clone() for name, one in self.first.state_dict().items()}
        self.first.load_state_dict({name: one * 0.5 for name, one in own.items()})
        y = self.first(x)
        self.first.load_state_dict(own)
        return self.last((y + self.first(x)).relu())


@case("anomalies are looked for")
class Anomaly(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True):
                y = self.first(x).relu()
        return self.last(y)


@case("a batch is collated from rows and mapped as a tree")
class Collates(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        batch = torch.utils.data.default_collate([{"x": row, "place": i} for i, row in enumerate(x)])
        batch = torch.utils._pytree.tree_map(lambda one: one * 0.5, batch)
        return self.last(self.first(batch["x"]).relu() + batch["place"][:, None] / 100)


@case("parameters as one vector scale the output")
class Vector(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        vector = nn.utils.parameters_to_vector(self.parameters())
        return self.last(self.first(x).relu()) * (1 + vector.norm() / 10)

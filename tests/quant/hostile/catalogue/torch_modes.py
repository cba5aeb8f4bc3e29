"""Modes of torch that are switched on inside a forward: functions, gradients, inference, autocast, defaults."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..cases import WIDTH, TwoLayers, case, steps


class Counting(TorchFunctionMode):
    """Counts calls, and changes one."""

    calls = 0

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).calls += 1
        if function is torch.tanh:
            function = torch.sigmoid
        return function(*args, **(kwargs or {}))


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@case("a torch function mode that replaces tanh by sigmoid")
class FunctionMode(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with Counting():
            return self.last(torch.tanh(self.first(x)))


@case("a torch dispatch mode around a layer")
class DispatchMode(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with Passing():
            y = self.first(x).relu()
        return self.last(y)


@case("no_grad around one layer")
class NoGrad(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x).relu()
        return self.last(y)


@case("a method decorated with no_grad")
class NoGradMethod(TwoLayers):
    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x).relu()
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


@case("inference_mode around one layer, its result cloned")
class InferenceMode(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.first(x).relu()
        return self.last(y.clone())


@case("set_grad_enabled by a value")
class SetGradEnabled(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(x.mean() > -9)):
            return self.last(self.first(x).relu())


@case("autocast to bfloat16 inside", floor=15.0)
class Autocast(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x).relu()
        return self.last(y.float())


@case("autocast switched off inside")
class NoAutocast(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.last(self.first(x.float()).relu())


@case("a random state forked and set inside", steps)
class ForksRandom(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.rand_like(x)
        return self.last(self.first(x + noise).relu())


@case("default dtype and printing options set inside")
class DefaultDtype(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            offset = torch.zeros(WIDTH).add(0.5)
        finally:
            torch.set_default_dtype(torch.float32)
        return self.last(self.first(x + offset.float()).relu())


@case("sdpa with a chosen backend", steps)
class ChosenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y[:, 0])

"""The float modules that a region computes: the line of each kind, and when the module may be computed natively.

The operator families in `quant/ops/` decide which calls of a forward become one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.module_call import ModuleCall

IDLE = (nn.Dropout, nn.Identity)
"""Classes that return their input in eval mode."""


@dataclass(frozen=True)
class IdleCall(ModuleCall):
    """A float module that returns its input in eval mode."""

    kind: ClassVar[str] = "idle"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) in IDLE and not module.training

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        return Line(self.out, "same", {"x": Register(self.reads[0])})


@dataclass(frozen=True)
class DropoutCall(IdleCall):
    """A dropout function, which follows the mode of the module whose forward calls it."""

    kind: ClassVar[str] = "dropout"

    def holds(self, module: nn.Module) -> bool:
        return not module.training


@dataclass(frozen=True)
class NormCall(ModuleCall):
    """An `nn.LayerNorm` over the last dimension."""

    kind: ClassVar[str] = "layer_norm"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) is nn.LayerNorm and len(module.normalized_shape) == 1

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        norm: Any = module
        settings = {"x": Register(self.reads[0]), **affine(norm, constant), "eps": norm.eps}
        if settings["weight"] is None:
            settings["size"] = norm.normalized_shape[0]
        return Line(self.out, "layer_norm", settings)

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        parameters: dict[str, Any] = module._parameters
        own = module.__dict__
        return [(parameters, "weight"), (parameters, "bias"), (own, "eps"), (own, "normalized_shape")]


INSTANCE_NORMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
"""Class -> the dimensions of a batch."""


@dataclass(frozen=True)
class InstanceNormCall(NormCall):
    """An instance norm of a batch by its own statistics.

    Attributes:
        rank: of its input.
    """

    kind: ClassVar[str] = "instance_norm"
    rank: int

    def holds(self, module: nn.Module) -> bool:
        own: Any = module
        batch = is_untouched(module) and INSTANCE_NORMS.get(type(own)) == self.rank
        return batch and own.running_mean is None

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        norm: Any = module
        settings = {"x": Register(self.reads[0]), **affine(norm, constant), "eps": norm.eps}
        return Line(self.out, "instance_norm", settings)

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        parameters: dict[str, Any] = module._parameters
        return [(parameters, "weight"), (parameters, "bias"), (module.__dict__, "eps")]


@dataclass(frozen=True)
class RmsNormCall(ModuleCall):
    """An `nn.RMSNorm` over the last dimension."""

    kind: ClassVar[str] = "rms_norm"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) is nn.RMSNorm and len(module.normalized_shape) == 1

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        norm: Any = module
        weight = norm._parameters["weight"]
        return Line(self.out, "rms_norm", {
            "x": Register(self.reads[0]),
            "weight": None if weight is None else constant(weight),
            "eps": EPSILON if norm.eps is None else norm.eps,
            "size": norm.normalized_shape[0],
        })  # fmt: skip

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        parameters: dict[str, Any] = module._parameters
        return [(parameters, "weight"), (module.__dict__, "eps"), (module.__dict__, "normalized_shape")]


EPSILON = torch.finfo(torch.float32).eps
"""What torch adds to the mean of squares where an RMS norm has no `eps`."""


@dataclass(frozen=True)
class GroupNormCall(NormCall):
    """An `nn.GroupNorm`."""

    kind: ClassVar[str] = "group_norm"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) is nn.GroupNorm

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        norm: Any = module
        settings = {"x": Register(self.reads[0]), "groups": norm.num_groups}
        return Line(self.out, "group_norm", {**settings, **affine(norm, constant), "eps": norm.eps})

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        parameters: dict[str, Any] = module._parameters
        own = module.__dict__
        return [(parameters, "weight"), (parameters, "bias"), (own, "eps"), (own, "num_groups")]


@dataclass(frozen=True)
class SoftmaxCall(ModuleCall):
    """An `nn.Softmax` or `nn.LogSoftmax` over the last dimension.

    Attributes:
        rank: of its input.
    """

    kind: ClassVar[str] = "softmax"
    rank: int

    def holds(self, module: nn.Module) -> bool:
        if not is_untouched(module) or type(module) not in (nn.Softmax, nn.LogSoftmax):
            return False
        dim: Any = module.dim
        return isinstance(dim, int) and dim in (-1, self.rank - 1)

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        logarithm = type(module) is nn.LogSoftmax
        return Line(self.out, "softmax", {"x": Register(self.reads[0]), "logarithm": logarithm})


@dataclass(frozen=True)
class SiluCall(ModuleCall):
    """An `nn.SiLU`."""

    kind: ClassVar[str] = "silu"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) is nn.SiLU and not module.inplace

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        return Line(self.out, "silu", {"x": Register(self.reads[0])})


FUNCTIONS: dict[type[nn.Module], str] = {nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.GELU: "gelu"}
"""Layers that are a function of one value -> its word in a plan's text."""


@dataclass(frozen=True)
class FunctionCall(ModuleCall):
    """A layer of `FUNCTIONS`."""

    kind: ClassVar[str] = "function"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) in FUNCTIONS and getattr(module, "approximate", "none") == "none"

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        return Line(self.out, "unary_f32", {"x": Register(self.reads[0]), "by": FUNCTIONS[type(module)]})


@dataclass(frozen=True)
class ReluCall(ModuleCall):
    """An `nn.ReLU`."""

    kind: ClassVar[str] = "relu"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) is nn.ReLU and not module.inplace

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        return Line(self.out, "clamp", {"x": Register(self.reads[0]), "low": 0.0, "high": math.inf})


@dataclass(frozen=True)
class AttentionCall(ModuleCall):
    """The part of `MultiheadAttention` between its projections; in training mode it drops attention weights.

    Attributes:
        whole: the line's text.
    """

    kind: ClassVar[str] = "attention"
    whole: str

    def holds(self, module: nn.Module) -> bool:
        return not module.training

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> str:
        return self.whole


def affine(module: nn.Module, constant: Callable[[Tensor], Constant]) -> dict[str, Constant | None]:
    """The weight and bias of a norm as a line's settings."""
    tensors = {name: module._parameters[name] for name in ("weight", "bias")}
    return {name: None if one is None else constant(one) for name, one in tensors.items()}


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module calls its class's forward, without hooks."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)

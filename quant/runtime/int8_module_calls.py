"""Embeddings, and int8 modules of one input, inside a region: the lines of each, and when they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everybody

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.module_call import ModuleCall
from quant.runtime.module_calls import is_untouched


def computes_itself(module: nn.Module) -> bool:
    """Whether the module's lines are what a call of it computes: no hooks, float32, and no forward of the user's."""
    if not isinstance(module, QuantModule) or not is_untouched(module):
        return False
    if everybody._global_forward_hooks or everybody._global_forward_pre_hooks:
        return False
    forward = type(module).forward.__module__
    return module.dtype is torch.float32 and not module.backend and forward.startswith(("quant.nn.", "quant.runtime."))


def sources(module: nn.Module, *names: str) -> list[tuple[dict[str, Any], str]]:
    """All tensors of a module, and those of these attributes that it has."""
    tensors: list[dict[str, Any]] = [module._buffers, module._parameters]
    return [(store, name) for store in tensors for name in store] + [
        (module.__dict__, name) for name in names if name in module.__dict__
    ]


@dataclass(frozen=True)
class EmbeddingCall(ModuleCall):
    """An `nn.Embedding`, or an int8 one that took its place."""

    kind: ClassVar[str] = "embedding"

    def holds(self, module: nn.Module) -> bool:
        if type(module) is nn.Embedding:
            return is_untouched(module) and module.max_norm is None and module.weight.dtype is torch.float32
        return isinstance(module, QuantModule) and computes_itself(module) and module.can_plan()

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        x = {"x": Register(self.reads[0])}
        if type(module) is nn.Embedding:
            return Line(self.out, "embedding", {**x, "weight": constant(module.weight)})
        return _line(self.out, x, module, constant)

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        return sources(module)


@dataclass(frozen=True)
class Int8ModuleCall(ModuleCall):
    """An int8 module of one input, whose class says its line (`QuantModule.planned`)."""

    kind: ClassVar[str] = "int8_module"

    def holds(self, module: nn.Module) -> bool:
        return isinstance(module, QuantModule) and computes_itself(module) and module.can_plan()

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        return _line(self.out, {"x": Register(self.reads[0])}, module, constant)

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        return sources(module, "activation_bits", "per_row")


def _line(out: int, x: dict[str, Any], module: Any, constant: Callable[[Tensor], Constant]) -> Line:
    operation, settings = module.planned()
    named = {name: constant(one) if isinstance(one, Tensor) else one for name, one in settings.items()}
    return Line(out, operation, {**x, **named})

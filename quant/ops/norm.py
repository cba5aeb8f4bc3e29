"""Layer norms, which stay float32; their kernel sums in another order than torch, so that the last bits differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line, Register
from quant.ops.idle import is_untouched
from quant.ops.planning import PlanCall, Unplanned
from quant.ops.registry import plans_reals
from quant.runtime.module_call import ModuleCall


@dataclass(frozen=True)
class NormCall(ModuleCall):
    """An `nn.LayerNorm` over the last dimension."""

    kind: ClassVar[str] = "layer_norm"

    def holds(self, module: nn.Module) -> bool:
        return is_untouched(module) and type(module) is nn.LayerNorm and len(module.normalized_shape) == 1

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        norm: Any = module
        tensors = {name: norm._parameters[name] for name in ("weight", "bias")}
        named = {name: None if one is None else constant(one) for name, one in tensors.items()}
        return Line(self.out, "layer_norm", {"x": Register(self.reads[0]), **named, "eps": norm.eps})

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        parameters: dict[str, Any] = module._parameters
        return [(parameters, "weight"), (parameters, "bias"), (module.__dict__, "eps")]


@plans_reals(nn.LayerNorm, exact=False)
def layer_norm(call: PlanCall) -> NormCall:
    """A layer norm whose parameters are float32."""
    module = call.module
    planned = NormCall(call.out, (call.tensor().index,), call.node.target)
    if module is None or len(call.args) != 1 or call.kwargs or not planned.holds(module):
        raise Unplanned("it is computed in float")
    if any(one is not None and one.dtype != torch.float32 for one in (module.weight, module.bias)):
        raise Unplanned("it is computed in float")
    return planned

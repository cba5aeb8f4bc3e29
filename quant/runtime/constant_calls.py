"""Lines of a plan that read parameters and buffers of the user's modules, as they are when the region runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.kernels.reference_plan import Constant
from quant.runtime.module_call import ModuleCall


@dataclass(frozen=True)
class ConstantsCall(ModuleCall):
    """An operation of which some settings are parameters or buffers of one module.

    Attributes:
        names: these parameters and buffers.
        whole: the line's text, with `{name}` for each.
    """

    kind: ClassVar[str] = "constants"
    names: tuple[str, ...]
    whole: str

    def holds(self, module: nn.Module) -> bool:
        """Not where a parameter may want its gradient, which no plan gives."""
        trains = torch.is_grad_enabled()
        return all(
            is_constant(module, name) and not (trains and _store(module, name)[name].requires_grad)
            for name in self.names
        )

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> str:
        return self._with({name: constant(_store(module, name)[name]) for name in self.names})

    def lines(self) -> list[str]:
        return [self._with(dict.fromkeys(self.names, Constant(0)))]

    def _with(self, constants: dict[str, Constant]) -> str:
        """The line; other braces stay, and make no line of it."""
        line = self.whole
        for name, value in constants.items():
            line = line.replace(f"{{{name}}}", str(value))
        return line

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        return [(_store(module, name), name) for name in self.names]


def is_constant(module: nn.Module, name: str) -> bool:
    """Whether a module's parameter or buffer can be a constant of a plan."""
    value = _store(module, name).get(name)
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.layout == torch.strided


def _store(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module keeps a parameter or buffer."""
    parameters: dict[str, Any] = module._parameters
    buffers: dict[str, Any] = module._buffers
    return parameters if name in parameters else buffers

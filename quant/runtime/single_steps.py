"""Instructions that run one by one, prepared at their first run.

Without that, a program that runs step by step spends more time on looking at its instructions than on computing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from quant.kernels.reference_ops import rescale
from quant.runtime.callee import Submodule
from quant.runtime.filling import Fill, filler
from quant.runtime.instructions import FloatCall, Guard, Instruction, IntegerMove
from quant.runtime.names import attribute
from quant.runtime.objects import holds_objects
from quant.runtime.origin import Edge, Origin
from quant.runtime.trees import settle


@dataclass
class SingleStep:
    """The part of an instruction's work that is the same in each run.

    Attributes:
        edges: the modules that it was converted from, as they were when this was prepared.
        args, kwargs: return its arguments for the registers of a call.
    """

    instruction: Instruction
    edges: list[Edge]
    args: Fill
    kwargs: Fill

    def stands(self) -> bool:
        """Whether the modules are still in their places."""
        for edge in self.edges:  # noqa: SIM110  # a generator for `all` costs more
            if edge.children.get(edge.name) is not edge.module:
                return False
        return True


def single_step(instruction: Instruction, root: nn.Module, origin: Origin | None) -> SingleStep:
    """Prepare an instruction that runs by itself."""
    edges = [] if origin is None else origin.edges(instruction)
    if not isinstance(instruction, (FloatCall, IntegerMove, Guard)):
        args, kwargs = map(filler, instruction.arguments)
        return SingleStep(instruction, edges, args, kwargs)
    args, kwargs = (filler(tree, lambda path: attribute(root, path)) for tree in instruction.arguments)
    calls_module = not isinstance(instruction, Guard) and isinstance(instruction.callee, Submodule)
    if calls_module and holds_objects(instruction.arguments):
        args, kwargs = _settled(args), _settled(kwargs)
    return SingleStep(instruction, edges, args, kwargs)


def _settled(fill: Fill) -> Fill:
    return lambda registers: settle(fill(registers), {})


def call(instruction: FloatCall, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a float call; `kwargs` may be changed."""
    if kwargs.get("training") is False and not instruction.frozen:
        # Captured in eval mode from `training=self.training`: functional dropout follows the mode of its owner.
        kwargs["training"] = attribute(root, instruction.owner).training
    return instruction.callee.call(root, args, kwargs)


def move(instruction: IntegerMove, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a call that only moves integers."""
    if instruction.callee is None:
        return args[0] if args else kwargs["input"]
    return instruction.callee.call(root, args, kwargs)


def rescaled(how: dict[int, tuple[int, float, int]], registers: dict[int, Any]) -> dict[int, Any]:
    """The registers, with some values rescaled to the range of the concatenation that reads them."""
    if not how:
        return registers
    return {**registers, **{register: rescale(registers[register], *numbers) for register, numbers in how.items()}}

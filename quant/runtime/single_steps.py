"""Instructions that run one by one, prepared at their first run.

Without that, a program that runs step by step spends more time on looking at its instructions than on computing them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quant.kernels.reference_ops import rescale
from quant.runtime.callee import Method, Submodule
from quant.runtime.filling import Fill, filler
from quant.runtime.instructions import FloatCall, Guard, Instruction, IntegerMove
from quant.runtime.matching import check_guard, check_tensor
from quant.runtime.names import attribute
from quant.runtime.objects import holds_objects
from quant.runtime.origin import Edge, Origin
from quant.runtime.trees import Ref, is_plain, settle
from quant.runtime.values import Value


@dataclass
class SingleStep:
    """The part of an instruction's work that is the same in each run.

    Attributes:
        edges: the modules that it was converted from, as they were when this was prepared.
        args, kwargs: return its arguments for the registers of a call.
        direct: returns its value for the registers of a call, where it is a call of the user's, be it of integers;
            None of other instructions, and of calls that follow their owner's mode.
    """

    instruction: Instruction
    edges: list[Edge]
    args: Fill
    kwargs: Fill
    direct: Fill | None = None

    def stands(self) -> bool:
        """Whether the modules are still in their places."""
        for edge in self.edges:  # noqa: SIM110  # a generator for `all` costs more
            if edge.children.get(edge.name) is not edge.module:
                return False
        return True


def single_step(instruction: Instruction, root: nn.Module, origin: Origin | None, value: Value) -> SingleStep:
    """Prepare an instruction that runs by itself; `value` is what the program says of its value."""
    edges = [] if origin is None else origin.edges(instruction)
    args, kwargs = (filler(tree, lambda path: attribute(root, path)) for tree in instruction.arguments)
    if not isinstance(instruction, (FloatCall, IntegerMove, Guard)):
        return SingleStep(instruction, edges, args, kwargs)
    calls_module = not isinstance(instruction, Guard) and isinstance(instruction.callee, Submodule)
    if calls_module and holds_objects(instruction.arguments):
        args, kwargs = _settled(args), _settled(kwargs)
    return SingleStep(instruction, edges, args, kwargs, _direct(instruction, args, kwargs, root, value))


def _direct(instruction: Instruction, args: Fill, kwargs: Fill, root: nn.Module, value: Value) -> Fill | None:
    """A call of the user's, or a guard, as one function of the registers.

    Half of the steps of a language model take a size, an index or an attribute: what is asked about them at each run
    must not cost more than they do.
    """
    if isinstance(instruction, Guard):
        source, expected, owner = instruction.source, instruction.expected, instruction.owner
        return lambda registers: check_guard(registers[source], expected, owner, root, value.node)
    if not isinstance(instruction, (FloatCall, IntegerMove)):
        return None
    if isinstance(instruction, IntegerMove) and (value.qparams is None or instruction.rescaled):
        return None
    if instruction.callee is None:
        return lambda registers: move(instruction, root, args(registers), kwargs(registers))
    places, named = instruction.arguments
    if "training" in named:
        return None  # `call` replaces it
    if isinstance(instruction.callee, Submodule):
        return _direct_module(instruction.callee, args, kwargs, root, value)
    if isinstance(instruction.callee, Method):
        return _direct_method(instruction.callee.name, args, kwargs, places, bool(named))
    target = instruction.callee.target
    if named:
        return lambda registers: target(*args(registers), **kwargs(registers))
    if len(places) == 1 and type(places[0]) is Ref:
        only = places[0].index
        return lambda registers: target(registers[only])
    if len(places) == 2 and type(places[0]) is Ref:
        first, second = places[0].index, places[1]
        if type(second) is Ref:
            index = second.index
            return lambda registers: target(registers[first], registers[index])
        if is_plain(second):
            return lambda registers: target(registers[first], second)
    return lambda registers: target(*args(registers))


def _direct_method(name: str, args: Fill, kwargs: Fill, places: tuple[Any, ...], named: bool) -> Fill:
    if type(places[0]) is Ref and not named and all(map(is_plain, places[1:])):
        owner, call = places[0].index, operator.methodcaller(name, *places[1:])
        return lambda registers: call(registers[owner])

    def run(registers: Mapping[int, Any]) -> Any:
        owner, *rest = args(registers)
        return getattr(owner, name)(*rest, **kwargs(registers)) if named else getattr(owner, name)(*rest)

    return run


def _direct_module(callee: Submodule, args: Fill, kwargs: Fill, root: nn.Module, value: Value) -> Fill:
    if value.dtype is None:
        return lambda registers: callee.call(root, args(registers), kwargs(registers))

    def run(registers: Mapping[int, Any]) -> Any:
        result = callee.call(root, args(registers), kwargs(registers))
        return result if type(result) is Tensor else check_tensor(result, callee.path, root, value.node)

    return run


def _settled(fill: Fill) -> Fill:
    return lambda registers: settle(fill(registers), {})


def call(instruction: FloatCall, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a float call; `kwargs` may be changed."""
    if kwargs.get("training") is False and not instruction.frozen:
        # Captured in eval mode from `training=self.training`: functional dropout follows the mode of its owner.
        kwargs["training"] = attribute(root, instruction.owner).training
    return instruction.callee.call(root, args, kwargs)


def move(instruction: FloatCall | IntegerMove, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a call that only moves integers."""
    if instruction.callee is None:
        return args[0] if args else kwargs["input"]
    return instruction.callee.call(root, args, kwargs)


def rescaled(how: dict[int, tuple[int, float, int]], registers: dict[int, Any]) -> dict[int, Any]:
    """The registers, with some values rescaled to the range of the concatenation that reads them."""
    if not how:
        return registers
    return {**registers, **{register: rescale(registers[register], *numbers) for register, numbers in how.items()}}

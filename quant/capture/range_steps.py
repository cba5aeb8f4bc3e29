"""The steps of calls `range(start, stop, step)` in a forward's code, whose stop may be a size.

Such a call counts the same for all sizes within a step, and nothing notices it: another recording shows it only where
its sizes are further away than the step.
"""

from __future__ import annotations

import dis
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from quant.capture.forward_code import own_functions

CALLS = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
"""The instruction that takes the arguments of a call; of Python 3.11 the first of two."""

UNKNOWN = math.inf
"""A step that is computed."""

FARTHEST = 96
"""The largest step that a recording with other sizes goes beyond; sizes that are counted by larger ones are held."""

Step = int | tuple[str, ...] | None
"""A constant; the attributes that lead from the module to it; or None, where it is computed."""


def largest_step(module: nn.Module, forward: Callable[..., Any]) -> float:
    """The largest step by which a forward or its helpers may count to a size; 0 where none does."""
    steps = (step for one in own_functions(module, forward) for step in _steps(one.__code__))
    return max((_value(step, module) for step in steps), default=0)


def _value(step: Step, module: nn.Module) -> float:
    if isinstance(step, tuple):
        found = functools.reduce(lambda holder, name: getattr(holder, name, None), step, module)
        step = found if isinstance(found, int) else None
    return UNKNOWN if step is None else abs(step)


@functools.lru_cache(maxsize=4096)
def _steps(code: types.CodeType) -> tuple[Step, ...]:
    instructions = list(dis.get_instructions(code))
    own = [
        _step(instructions[place + 1 :])
        for place, one in enumerate(instructions)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and one.argval == "range"
    ]
    inner = (step for constant in code.co_consts if isinstance(constant, types.CodeType) for step in _steps(constant))
    return (*(step for found in own for step in found), *inner)


def _step(following: list[dis.Instruction]) -> Iterator[Step]:
    """The step of a call of `range`, by the instructions after its name; nothing of a call without one."""
    depths: list[int] = []
    depth = 0
    for place, one in enumerate(following):
        if one.opname == CALLS and depth <= (one.arg or 0):
            if one.arg != 3 or 2 not in depths:
                return
            begin = len(depths) - depths[::-1].index(2)
            stop = following[len(depths[:begin]) - depths[:begin][::-1].index(1) : begin] if 1 in depths[:begin] else []
            if _reads_locals(stop):
                yield _as_step(following[begin:place])
            return
        if "JUMP" in one.opname or one.opname in ("RETURN_VALUE", "STORE_FAST"):
            return
        depth += dis.stack_effect(one.opcode, one.arg)
        depths.append(depth)


def _reads_locals(instructions: list[dis.Instruction]) -> bool:
    """Whether a value is computed from anything but constants and attributes of the module."""
    return any(one.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and one.argval != "self" for one in instructions)


def _as_step(instructions: list[dis.Instruction]) -> Step:
    loads = [one for one in instructions if one.opname not in ("PRECALL", "CACHE", "NOP")]
    if len(loads) == 1 and loads[0].opname == "LOAD_CONST":
        return loads[0].argval if isinstance(loads[0].argval, int) else None
    first, *others = loads
    if first.argval == "self" and others and all(one.opname == "LOAD_ATTR" for one in others):
        return tuple(str(one.argval) for one in others)
    return None

"""How often the code of a model's forwards reads an attribute of one of its modules."""

from __future__ import annotations

import dis
import functools
import itertools
import types

from torch import nn

from quant.capture.forward_code import function_of, own_functions
from quant.capture.instructions import ATTRIBUTES, ends_expression, instructions_of, is_load, is_store


def reads_of(model: nn.Module, owner: nn.Module, name: str) -> int:
    """How many places of code may read the attribute `name` of the module `owner`.

    The places in the owner's own forward and helpers that read it of `self`; and those in the forward of any module
    that read such an attribute of something else, as `self.layer.weight` does, or have its name as a text. A place that
    gives the attribute to a local, and to no call before, is as many as read that local.
    """
    reads: dict[types.CodeType, int] = {}
    for module in model.modules():
        forward = function_of(type(module).forward)
        if forward is None or (forward.__module__ or "").partition(".")[0] == __name__.partition(".")[0]:
            continue
        for function in own_functions(module, forward):
            own, others = _reads(function.__code__, name)
            code = function.__code__
            reads[code] = max(reads.get(code, 0), others + (own if module is owner else 0))
    return sum(reads.values())


@functools.lru_cache(maxsize=4096)
def _reads(code: types.CodeType, name: str) -> tuple[int, int]:
    """How often code, and functions in it, read an attribute of `self`, and of anything else or by a text."""
    own = others = 0
    instructions = instructions_of(code)
    for place, one in enumerate(instructions):
        if one.opname in ATTRIBUTES and one.argval == name:
            before = instructions[place - 1]
            is_own = is_load(before) and before.argval == "self"
            times = _uses(instructions, place)
            own, others = own + is_own * times, others + (not is_own) * times
    others += sum(constant == name for constant in code.co_consts if isinstance(constant, str))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _reads(constant, name)
            own, others = own + inner[0], others + inner[1]
    return own, others


def _uses(instructions: list[dis.Instruction], place: int) -> int:
    """How often the local is read that the value of an instruction becomes; 1 where it becomes none."""
    rest = itertools.islice(instructions, place + 1, None)
    before = list(itertools.takewhile(lambda one: not ends_expression(one), rest))
    if any(one.opname.startswith("CALL") for one in before):
        return 1
    stores = itertools.takewhile(is_store, instructions[place + 1 + len(before) :])
    names = {one.argval for one in stores}
    return max(1, sum(is_load(one) and one.argval in names for one in instructions))

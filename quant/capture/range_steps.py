"""The steps by which a forward's code may count to a size, where nothing notices it.

`range(0, n, 4)`, `range(n)[::4]`, `np.arange(0, n, 4)`, and `if i % 4 == 0` or `if i == 4` in a loop over `range(n)`,
take the same places for all sizes within a step: another recording shows them only where its sizes are further away
than the step. With a local that is no constant, or with what is computed of no size, the step may be any, so that the
sizes are held.
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from quant.capture.forward_code import PERCENT, own_functions

CALLS = {"PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD"}
"""The instructions that take the arguments of a call; of Python 3.11 the first of two."""

NAMES, ATTRIBUTES = {"LOAD_GLOBAL", "LOAD_NAME"}, {"LOAD_ATTR", "LOAD_METHOD"}
CONSTANTS, LOCALS = {"LOAD_CONST", "LOAD_SMALL_INT"}, ("LOAD_FAST", "LOAD_DEREF")

COMPARISONS = {"COMPARE_OP", "CONTAINS_OP"}
QUOTIENTS = {("BINARY_OP", "//"), ("BINARY_OP", "&"), ("BINARY_OP", ">>"), ("BINARY_FLOOR_DIVIDE", ""),
             ("BINARY_AND", ""), ("BINARY_RSHIFT", "")}  # fmt: skip
"""What is the same for a loop's variable up to some number."""

SUMS = {("BINARY_OP", "+"), ("BINARY_OP", "-"), ("BINARY_OP", "*"), ("BINARY_ADD", ""), ("BINARY_SUBTRACT", ""),
        ("BINARY_MULTIPLY", "")}  # fmt: skip
COPIES = {"COPY", "SWAP", "DUP_TOP", "ROT_THREE"}
"""The instructions that keep the middle of `a < i < b` for its second comparison."""

NOTED = {"shape", "size", "len", "numel"}
"""Names in what is computed of sizes, which are noted."""

UNKNOWN = math.inf
"""A step that is computed."""

FARTHEST = 96
"""The largest step that a recording with other sizes goes beyond; sizes that are counted by larger ones are held."""

Step = int | tuple[str, ...] | None
"""A constant; the attributes that lead from the module to it; or None, where it is computed."""


def largest_step(module: nn.Module, forward: Callable[..., Any]) -> float:
    """The largest step by which a forward or its helpers may count to a size; 0 where none does."""
    steps: list[float] = []
    for function in own_functions(module, forward):
        codes = _codes(function.__code__)
        counted = [step for code in codes for step in _counted(code)]
        steps += [_value(step, module, UNKNOWN) for step in counted]
        if counted:
            strides = [stride for code in codes for stride in _strides(code)]
            steps += [UNKNOWN if stride is None else _value(stride, module, 1) for stride in strides]
    return max(steps, default=0)


def _value(step: Step, module: nn.Module, computed: float) -> float:
    if isinstance(step, tuple):
        found: Any = module
        for name in step:
            found = getattr(found, name, None)
        step = found if isinstance(found, int) else None
    return computed if step is None else abs(step)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Code and that of the functions in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [code, *(one for constant in inner for one in _codes(constant))]


@functools.lru_cache(maxsize=4096)
def _counted(code: types.CodeType) -> tuple[Step, ...]:
    """The steps by which calls of `range` and `arange` count to values; 1 of calls without one."""
    instructions = _instructions(code)
    places = (place for place in range(len(instructions)) if _loads_counter(instructions, place))
    return tuple(step for place in places for step in _step(instructions[place + 1 :]))


def _loads_counter(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether an instruction loads Python's `range`, or an `arange` other than torch's, which notes its sizes."""
    one = instructions[place]
    if one.opname in NAMES:
        return one.argval in ("range", "arange")
    return one.opname in ATTRIBUTES and one.argval == "arange" and instructions[place - 1].argval != "torch"


def _step(following: list[dis.Instruction]) -> Iterator[Step]:
    """The step of a call, by the instructions after its name; nothing of a call that counts from and to constants."""
    depths: list[int] = []
    depth = 0
    for place, one in enumerate(following):
        count = one.arg or 0
        names = one.opname in ("CALL_FUNCTION_KW", "CALL_KW")  # which lie above the arguments
        if (one.opname in CALLS or names) and depth <= count + names:
            arguments = _arguments(following[: place - names], depths, count)
            if any(map(_reads_locals, arguments[:2])):
                yield _as_step(arguments[2]) if count > 2 else 1
            return
        if "JUMP" in one.opname or one.opname in ("RETURN_VALUE", "STORE_FAST"):
            return
        depth += dis.stack_effect(one.opcode, one.arg)
        depths.append(depth)


def _arguments(instructions: list[dis.Instruction], depths: list[int], count: int) -> list[list[dis.Instruction]]:
    """The instructions of each argument of a call, by the depths of the stack after each of them."""
    arguments, end = [], len(instructions)
    for depth in reversed(range(count)):
        begin = next((place + 1 for place in reversed(range(end)) if depths[place] == depth), 0)
        arguments.append(instructions[begin:end])
        end = begin
    return arguments[::-1]


def _reads_locals(instructions: list[dis.Instruction]) -> bool:
    """Whether a value is computed from anything but constants and attributes of the module."""
    return any(one.opname.startswith(LOCALS) and one.argval != "self" for one in instructions)


def _as_step(instructions: list[dis.Instruction]) -> Step:
    loads = [one for one in instructions if one.opname not in ("PRECALL", "CACHE", "NOP", "KW_NAMES")]
    if len(loads) == 1 and loads[0].opname in CONSTANTS:
        return loads[0].argval if isinstance(loads[0].argval, int) else None
    first, *others = loads
    if first.argval == "self" and others and all(one.opname == "LOAD_ATTR" for one in others):
        return tuple(str(one.argval) for one in others)
    return None


@functools.lru_cache(maxsize=4096)
def _strides(code: types.CodeType) -> tuple[Step, ...]:
    """The strides of slices `[::k]`, the k of remainders `% k`, and the k that a loop's variable is compared with.

    Of a constant in a comparison one more, which `>` needs. None where the loop's variable meets a local that is no
    constant, or what is computed of no local; other values that are computed are left out, since those of sizes are
    noted.
    """
    instructions = _instructions(code)
    looped, constants = _looped(instructions), _constants(instructions)
    strides: list[Step] = []
    middle: list[dis.Instruction] = []
    for place, one in enumerate(instructions):
        if one.opname == "LOAD_CONST" and isinstance(one.argval, slice):  # of Python 3.14
            strides.append(one.argval.step)
            continue
        sign = (one.opname, one.argrepr)
        is_remainder, is_slice = sign in PERCENT, one.opname == "BUILD_SLICE" and one.arg == 3
        if not is_remainder and not is_slice and sign not in QUOTIENTS and one.opname not in COMPARISONS:
            continue
        begin = place - 1
        while begin > 0 and instructions[begin].opname == "LOAD_ATTR":
            begin -= 1
        stride = _as_step(instructions[begin:place])
        if not is_slice:
            left, right = _locals_before(instructions, place, begin)
            stride = constants.get(right, None) if stride is None and right else stride
            if one.opname in COMPARISONS:
                whole = [*middle, *_expression(instructions[:place])]
                middle = whole if instructions[place - 1].opname in COPIES else []
                if left not in looped or one.opname == "CONTAINS_OP" or (stride is None and not right):
                    strides += _of_expression(whole, looped, constants)
                    continue
            if left not in looped:
                stride = stride if is_remainder else 0
            elif right and stride is None:
                strides.append(None)
            elif one.opname in COMPARISONS and isinstance(stride, int):
                stride = abs(stride) + 1
            elif one.argrepr == ">>" or one.opname == "BINARY_RSHIFT":
                stride = 1 << min(stride, 64) if isinstance(stride, int) and stride >= 0 else None
        strides += [stride] if isinstance(stride, (int, tuple)) else []
    return tuple(strides)


def _expression(before: list[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions that compute both sides of a comparison, of all before it."""
    ends = ("STORE", "POP", "RETURN", "GET_ITER", "FOR_ITER", "RESUME", "YIELD", *COMPARISONS)
    begin = len(before)
    while begin and "JUMP" not in before[begin - 1].opname and not before[begin - 1].opname.startswith(ends):
        begin -= 1
    return before[begin:]


def _of_expression(whole: list[dis.Instruction], looped: set[str], constants: dict[str, int]) -> list[Step]:
    """The steps of a comparison that has a loop's variable anywhere: none where sizes or other locals are read too."""
    locals_read = {one.argval for one in whole if _loads(one)}
    others = locals_read - looped - {"self"}
    names = {one.argval for one in whole if isinstance(one.argval, str)}
    if not locals_read & looped or names & NOTED or any((one.opname, one.argrepr) in PERCENT for one in whole):
        return []
    if swapped := _swapped(whole, looped):
        return [None] if swapped not in constants else [abs(constants[swapped]) + 1]
    if others - constants.keys():
        return []
    numbers = [abs(constants[name]) for name in others]
    for one in whole:
        given = one.argval if isinstance(one.argval, (tuple, frozenset)) and not _loads(one) else (one.argval,)
        if one.opname in CONSTANTS and all(isinstance(number, int) for number in given):
            numbers += map(abs, given)
        elif not _loads(one) and one.opname not in COPIES and (one.opname, one.argrepr) not in SUMS:
            return [None]
    return [sum(numbers) + 1] if "self" not in locals_read else [None]


def _swapped(whole: list[dis.Instruction], looped: set[str]) -> str:
    """The local before a loop's variable, where a comparison has nothing else; else ''."""
    names = [one.argval if _loads(one) else "" for one in whole]
    return names[0] if len(names) == 2 and names[1] in looped and names[0] not in looped else ""


def _looped(instructions: list[dis.Instruction]) -> set[str]:
    """The locals that are the variable of a loop."""
    pairs = itertools.pairwise(instructions)
    return {store.argval for one, store in pairs if one.opname == "FOR_ITER" and _stores(store)}


def _constants(instructions: list[dis.Instruction]) -> dict[str, int]:
    """The locals that are one int and nothing else."""
    stored: dict[str, list[Any]] = {}
    for before, one in itertools.pairwise(instructions):
        if _stores(one):
            stored.setdefault(one.argval, []).append(before.argval if before.opname in CONSTANTS else None)
    return {name: given[0] for name, given in stored.items() if len(given) == 1 and isinstance(given[0], int)}


def _locals_before(instructions: list[dis.Instruction], place: int, begin: int) -> tuple[str, str]:
    """The locals that are the operands of an instruction, '' for other operands; `begin` of the right one."""
    right = instructions[begin]
    left = instructions[begin - 1] if begin else right
    names = [one.argval if _loads(one) else "" for one in (left, right)]
    return names[0], names[1] if begin == place - 1 else ""


def _loads(one: dis.Instruction) -> bool:
    return one.opname.startswith(LOCALS)


def _stores(one: dis.Instruction) -> bool:
    return one.opname.startswith("STORE_FAST")


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions of code; those of two locals, which Python 3.13 has, as two."""
    split = []
    for one in dis.get_instructions(code):
        if not isinstance(one.argval, tuple) or "_FAST" not in one.opname:
            split.append(one)
            continue
        names = [part for part in ("LOAD", "STORE") for _ in range(one.opname.count(part))]
        for name, local in zip(sorted(names, reverse=one.opname.startswith("STORE")), one.argval, strict=True):
            opname = f"{name}_FAST"
            split.append(one._replace(opname=opname, opcode=dis.opmap[opname], argval=local))
    return split

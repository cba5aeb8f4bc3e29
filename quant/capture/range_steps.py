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
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from quant.capture.counts import Counts, Iterable, Step, has_counter, iterable_of, loads_counter
from quant.capture.forward_code import PERCENT, own_functions
from quant.capture.instructions import (
    ATTRIBUTES,
    CALLS,
    COMPARISONS,
    CONSTANTS,
    COPIES,
    DIFFERENCES,
    NAMES,
    QUOTIENTS,
    ends_expression,
    expression,
    instructions_of,
    is_load,
    is_shift,
    is_store,
    locals_read,
)  # fmt: skip

MOVES = {"SWAP", "ROT_TWO", "ROT_THREE"}
"""The instructions that put the values of `a, b = ...` in the order in which they are stored."""

LOGARITHMS, ROUNDS = {"log", "log10"}, {"floor", "ceil", "trunc", "round", "int"}
"""Names of functions of Python and numpy whose composition is the same for sizes of a factor to each other."""

UNKNOWN = math.inf
"""A step that is computed."""

FARTHEST = 96
"""The largest step that a recording with other sizes goes beyond; sizes that are counted by larger ones are held."""


def largest_step(module: nn.Module, forward: Callable[..., Any]) -> float:
    """The largest step by which a forward or its helpers may count to a size; 0 where none does."""
    steps: list[float] = []
    for function in own_functions(module, forward):
        codes = _codes(function.__code__)
        counted = [step for code, _ in codes for step in _counted(code)]
        steps += [UNKNOWN for code, _ in codes if _rounds_logarithms(code)]
        steps += [_value(step, module, UNKNOWN) for step in counted]
        if counted:
            strides = [stride for code, argument in codes for stride in _strides(code, argument)]
            steps += [UNKNOWN if stride is None else _value(stride, module, 1) for stride in strides]
            steps += [_value(start, module, 1) for code, argument in codes for start in _starts(code, argument)]
    return max(steps, default=0)


def largest_step_elsewhere(ran: Collection[types.CodeType], modules: Collection[nn.Module]) -> float:
    """The largest step by which functions that ran may count to a size, other than the forwards and helpers of modules.

    Each is an int or unknown: of a function of another file it is not known what its `self` is.
    """
    steps = {code: step for code in ran if (step := _unresolved(code)) > 1}
    if not steps:
        return 0
    for module in modules:
        for function in own_functions(module, module.forward):
            for code, _ in _codes(function.__code__):
                steps.pop(code, None)
    return max(steps.values(), default=0)


def _unresolved(code: types.CodeType) -> float:
    """The largest step of calls and slices of `range` in code."""
    steps = [*_counted(code), *_starts(code, Iterable.LOCAL)]
    return max((abs(step) if isinstance(step, int) else UNKNOWN for step in steps), default=0)


def _value(step: Step, module: nn.Module, computed: float) -> float:
    if isinstance(step, tuple):
        found: Any = module
        for name in step:
            found = getattr(found, name, None)
        step = found if isinstance(found, int) else None
    return computed if step is None else abs(step)


def _codes(code: types.CodeType, argument: Iterable | None = None) -> list[tuple[types.CodeType, Iterable]]:
    """Code and that of the functions in it; of comprehensions, functions up to Python 3.11, with what they go over."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    over = _comprehensions(code) if inner else {}
    return [(code, argument or Iterable.LOCAL), *(one for each in inner for one in _codes(each, over.get(each)))]


@functools.lru_cache(maxsize=4096)
def _comprehensions(code: types.CodeType) -> dict[types.CodeType, Iterable]:
    """The comprehensions in code, with what they go over."""
    instructions = instructions_of(code)
    found = {}
    for place, one in enumerate(instructions):
        whole = expression(instructions[:place]) if one.opname == "GET_ITER" else []
        for number, other in enumerate(whole):
            if isinstance(other.argval, types.CodeType):
                found[other.argval] = iterable_of(whole[number + 1 :], ())
    return found


@functools.lru_cache(maxsize=4096)
def _rounds_logarithms(code: types.CodeType) -> bool:
    """Whether code has `floor(log(n, 200))`: of all sizes that a recording may take it is one number."""
    if LOGARITHMS.isdisjoint(code.co_names) or ROUNDS.isdisjoint(code.co_names):
        return False
    instructions = instructions_of(code)
    for place, one in enumerate(instructions):
        if (
            one.opname in (*NAMES, *ATTRIBUTES)
            and one.argval in LOGARITHMS
            and instructions[place - 1].argval != "torch"
        ):
            before = expression(instructions[:place])
            rounds = any(other.argval in ROUNDS for other in before if other.opname in (*NAMES, *ATTRIBUTES))
            rest = list(itertools.takewhile(lambda other: not ends_expression(other), instructions[place:]))
            if rounds and reads_locals(rest):
                return True
    return False


@functools.lru_cache(maxsize=4096)
def _counted(code: types.CodeType) -> tuple[Step, ...]:
    """The steps by which calls of `range` and `arange` count to values; 1 of calls without one."""
    instructions = instructions_of(code)
    places = (place for place in range(len(instructions)) if loads_counter(instructions, place))
    return tuple(step for place in places for step in _step(instructions[place + 1 :]))


def reads_locals(instructions: list[dis.Instruction]) -> bool:
    """Whether a value is computed from anything but constants and attributes of the module."""
    return bool(locals_read(instructions) - {"self"})


def _step(following: list[dis.Instruction]) -> Iterator[Step]:
    """The step of a call, by the instructions after its name; nothing of a call that counts from and to constants."""
    arguments = _arguments_after(following)
    if any(map(reads_locals, arguments[:2])):
        yield _as_step(arguments[2]) if len(arguments) > 2 else 1


def _arguments_after(following: list[dis.Instruction]) -> list[list[dis.Instruction]]:
    """The instructions of each argument of a call, of all after the name of what is called; [] where it is no call."""
    depths: list[int] = []
    depth = 0
    if following and following[0].opname == "PUSH_NULL":  # of Python 3.13, with the name and not with the arguments
        following = following[1:]
    for place, one in enumerate(following):
        count = one.arg or 0
        names = one.opname in ("CALL_FUNCTION_KW", "CALL_KW")  # which lie above the arguments
        is_second = place > 0 and following[place - 1].opname == "PRECALL"  # whose arguments are off the stack already
        if (one.opname in CALLS or names) and not is_second and depth <= count + names:
            return _arguments(following[: place - names], depths, count)
        if "JUMP" in one.opname or one.opname in ("RETURN_VALUE", "STORE_FAST"):
            break
        depth += dis.stack_effect(one.opcode, one.arg)
        depths.append(depth)
    return []


def _arguments(instructions: list[dis.Instruction], depths: list[int], count: int) -> list[list[dis.Instruction]]:
    """The instructions of each argument of a call, by the depths of the stack after each of them."""
    arguments, end = [], len(instructions)
    for depth in reversed(range(count)):
        begin = next((place + 1 for place in reversed(range(end)) if depths[place] == depth), 0)
        arguments.append(instructions[begin:end])
        end = begin
    return arguments[::-1]


def _as_step(instructions: list[dis.Instruction]) -> Step:
    loads = [one for one in instructions if one.opname not in ("PRECALL", "CACHE", "NOP", "KW_NAMES")]
    if not loads:
        return None
    if len(loads) == 1 and loads[0].opname in CONSTANTS:
        return loads[0].argval if isinstance(loads[0].argval, int) else None
    first, *others = loads
    if first.argval == "self" and others and all(one.opname == "LOAD_ATTR" for one in others):
        return tuple(str(one.argval) for one in others)
    return None


@functools.lru_cache(maxsize=4096)
def _starts(code: types.CodeType, argument: Iterable) -> tuple[Step, ...]:
    """The sizes up to which a count has no place: the k of `range(k, n)`, `range(n - k)` and `range(n)[k:]`.

    Those that are constants or attributes of the module; of other values that are computed the sizes are noted.
    """
    instructions = instructions_of(code)
    counts = Counts(instructions, argument)
    stored = _stored(instructions)
    starts: list[Step] = []
    for place, one in enumerate(instructions):
        if loads_counter(instructions, place):
            bounds = _arguments_after(instructions[place + 1 :])[:2]
            starts += [_start(bound, stored, counts) for bound in bounds if any(map(reads_locals, bounds))]
            continue
        is_constant = one.opname == "LOAD_CONST" and isinstance(one.argval, slice)  # of Python 3.14
        if not is_constant and one.opname not in ("BUILD_SLICE", "BINARY_SLICE"):
            continue
        many = 0 if is_constant else 3 if one.opname == "BUILD_SLICE" and one.arg == 3 else 2
        sliced, *bounds = _operands(expression(instructions[:place]), many + 1)
        if not has_counter(sliced) and not locals_read(sliced) & counts.of.keys():
            continue
        if is_constant:
            starts += [bound for bound in (one.argval.start, one.argval.stop) if isinstance(bound, int)]
        starts += [_cut(bound, stored, counts) for bound in bounds[:2]]
    return tuple(start for start in starts if start is not None)


def _stored(instructions: list[dis.Instruction]) -> dict[str, list[dis.Instruction]]:
    """What computes each local, the last time that it is stored: of `a, b = ...` each its part."""
    stored: dict[str, list[dis.Instruction]] = {}
    for place, one in enumerate(instructions):
        if is_store(one) and not (place and is_store(instructions[place - 1])):
            names = [store.argval for store in itertools.takewhile(is_store, instructions[place:])]
            whole = expression(instructions[:place])
            moves: list[dis.Instruction] = []
            while whole and whole[-1].opname in MOVES:
                moves.insert(0, whole.pop())
            operands = _operands(whole, len(names))
            for move in moves if len(operands) > 1 else ():
                if move.opname == "ROT_THREE":
                    operands.insert(-2, operands.pop())
                else:
                    other = -(move.arg or 0) if move.opname == "SWAP" else -2
                    other = max(other, -len(operands))
                    operands[-1], operands[other] = operands[other], operands[-1]
            stored.update(zip(names, reversed(operands), strict=True))
    return stored


def _operands(whole: list[dis.Instruction], count: int) -> list[list[dis.Instruction]]:
    """The instructions of each of the last values that an expression leaves on the stack."""
    if not whole or whole[-1].opname == "UNPACK_SEQUENCE":
        return [whole for _ in range(count)]
    depths = list(itertools.accumulate(dis.stack_effect(one.opcode, one.arg) for one in whole))
    return _arguments(whole, [depth - depths[-1] + count for depth in depths], count)


def _cut(bound: list[dis.Instruction], stored: dict[str, list[dis.Instruction]], counts: Counts) -> Step:
    """The bound of a slice; one beyond all recordings where it is computed of no size, and None where sizes are."""
    while len(bound) == 1 and is_load(bound[0]) and bound[0].argval in stored:
        local = bound[0].argval
        if local in counts.constants:
            return counts.constants[local]
        bound, stored = stored[local], {name: whole for name, whole in stored.items() if name != local}
    step = _as_step([one for one in bound if one.opname != "UNARY_NEGATIVE"])
    computed = step is None and len(bound) > 1 and not reads_locals(bound)
    return FARTHEST + 1 if computed else step


def _start(bound: list[dis.Instruction], stored: dict[str, list[dis.Instruction]], counts: Counts) -> Step:
    """The constant of an argument of `range` by which it may have no place; None where it has none."""
    if not locals_read(bound) - {"self"} - counts.constants.keys():
        return counts.constants.get(bound[0].argval, _as_step(bound)) if len(bound) == 1 else _as_step(bound)
    if len(bound) == 1:  # n = x.shape[1] - 200
        bound = stored.get(bound[0].argval, bound)
    if not any((one.opname, one.argrepr) in DIFFERENCES for one in bound):
        return None
    loaded = [one.argval for one in bound if one.opname in CONSTANTS]
    loaded += [counts.constants.get(one.argval) for one in bound if is_load(one)]
    return sum(abs(number) for number in loaded if type(number) is int)


@functools.lru_cache(maxsize=4096)
def _strides(code: types.CodeType, argument: Iterable) -> tuple[Step, ...]:
    """The strides of slices `[::k]`, the k of remainders `% k`, and the k that a count is compared with.

    Of a constant in a comparison one more, which `>` needs. None where a count meets a local that is no constant, or
    what is computed of no local, and where what is computed of it by calls is compared or is a condition; other values
    that are computed are left out, since those of sizes are noted.

    Args:
        argument: what the code goes over, if it is a comprehension's.
    """
    instructions = instructions_of(code)
    counts = Counts(instructions, argument)
    strides: list[Step] = []
    middle: list[dis.Instruction] = []
    for place, one in enumerate(instructions):
        if one.opname == "LOAD_CONST" and isinstance(one.argval, slice):  # of Python 3.14
            strides += [one.argval.step] if isinstance(one.argval.step, int) else []
            continue
        if "JUMP" in one.opname and "_IF_" in one.opname:
            strides += counts.of_condition(expression(instructions[:place]))
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
            stride = counts.constants.get(right, None) if stride is None and right else stride
            if one.opname in COMPARISONS:
                whole = [*middle, *expression(instructions[:place])]
                middle = whole if instructions[place - 1].opname in COPIES else []
                if left not in counts.of or one.opname == "CONTAINS_OP" or (stride is None and not right):
                    strides += counts.of_comparison(whole)
                    continue
            if left not in counts.of:
                stride = stride if is_remainder else 0
            elif (right and stride is None) or counts.of[left] is None:
                strides.append(None)
            elif one.opname in COMPARISONS and isinstance(stride, int):
                stride = counts.reached(left, abs(stride) + 1)
            elif is_shift(one):
                stride = 1 << min(stride, 64) if isinstance(stride, int) and stride >= 0 else None
            if left in counts.of and isinstance(stride, int) and one.opname not in COMPARISONS:
                stride = counts.reached(left, stride)
        strides += [stride] if isinstance(stride, (int, tuple)) else []
    return tuple(strides)


def _locals_before(instructions: list[dis.Instruction], place: int, begin: int) -> tuple[str, str]:
    """The locals that are the operands of an instruction, '' for other operands; `begin` of the right one."""
    right = instructions[begin]
    left = instructions[begin - 1] if begin else right
    names = [one.argval if is_load(one) else "" for one in (left, right)]
    return names[0], names[1] if begin == place - 1 else ""

"""Instructions of Python's code, of all versions that this package runs on: what they load, store and compute."""

from __future__ import annotations

import dis
import types

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
DIFFERENCES = {("BINARY_OP", "-"), ("BINARY_SUBTRACT", "")}
COPIES = {"COPY", "SWAP", "DUP_TOP", "ROT_TWO", "ROT_THREE"}
"""The instructions that keep the middle of `a < i < b` for its second comparison, and order those of `a, b = ...`."""

NO_EFFECT = {"EXTENDED_ARG", "NOP", "NOT_TAKEN"}
"""The instructions that compute nothing: before a large argument, and of Python 3.14 after each condition."""


def instructions_of(code: types.CodeType) -> list[dis.Instruction]:
    """The instructions of code that compute something; those of two locals, which Python 3.13 has, as two."""
    split = []
    for one in dis.get_instructions(code):
        if one.opname in NO_EFFECT:
            continue
        if not isinstance(one.argval, tuple) or "_FAST" not in one.opname:
            split.append(one)
            continue
        names = [part for part in ("LOAD", "STORE") for _ in range(one.opname.count(part))]
        for name, local in zip(sorted(names, reverse=one.opname.startswith("STORE")), one.argval, strict=True):
            opname = f"{name}_FAST"
            split.append(one._replace(opname=opname, opcode=dis.opmap[opname], argval=local))
    return split


def expression(before: list[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions that compute both sides of a comparison, of all before it."""
    begin = len(before)
    while begin and not ends_expression(before[begin - 1]):
        begin -= 1
    return before[begin:]


def ends_expression(one: dis.Instruction) -> bool:
    ends = ("STORE", "POP", "RETURN", "GET_ITER", "FOR_ITER", "RESUME", "YIELD", *COMPARISONS)
    return "JUMP" in one.opname or one.opname.startswith(ends)


def locals_read(whole: list[dis.Instruction]) -> set[str]:
    return {one.argval for one in whole if is_load(one)}


def names_read(whole: list[dis.Instruction]) -> set[str]:
    """The globals and attributes that an expression reads, and its texts and locals."""
    return {one.argval for one in whole if isinstance(one.argval, str)}


def is_load(one: dis.Instruction) -> bool:
    return one.opname.startswith(LOCALS)


def is_any_load(one: dis.Instruction) -> bool:
    return one.opname.startswith("LOAD")


def is_store(one: dis.Instruction) -> bool:
    return one.opname.startswith("STORE_FAST")


def is_store_or_unpack(one: dis.Instruction) -> bool:
    return is_store(one) or one.opname == "UNPACK_SEQUENCE"


def is_shift(one: dis.Instruction) -> bool:
    return one.argrepr == ">>" or one.opname == "BINARY_RSHIFT"

"""Reads a program from its text, which `program_text.py` writes: lines, values and constants.

Calls are read by `instruction_reader.py`, nested arguments by `tree_reader.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.expected_call_text import read_call, read_input
from quant.runtime.instruction_reader import check_defined, read_dtype, read_instruction
from quant.runtime.instructions import FloatCall, Guard, Instruction, registers_in
from quant.runtime.program import Program, unread
from quant.runtime.program_text import HEADER
from quant.runtime.text_scanner import NAME, TextError
from quant.runtime.tree_reader import Reader
from quant.runtime.values import Shape, Size, Value


def parse(text: str, constants: list[Tensor] | None = None, packages: Collection[str] | None = None) -> Program:
    """Parse the text of a program.

    Args:
        text: as `print(program)` shows it.
        constants: the tensors that `$0`, `$1`, ... name; None where the text ends with them.
        packages: the packages whose classes the text may name; None for all that are imported.

    Raises:
        TextError: the text is not a program, or names something that a text may not; the message names the line.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or lines[0][1].strip() != HEADER:
        raise TextError(f"line 1: expected {HEADER!r}, as the text of a program begins")
    constants = _read_constants(lines) if constants is None else constants
    reading = _Reading()
    for number, line in lines[1:]:
        if not line.startswith(("$", "  ")):
            reading.line(Reader(line, number, constants, packages))
    return reading.program()


class _Reading:
    """The part of a program that the lines up to now define."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.call: ExpectedCall | None = None
        self.expected: dict[int, ExpectedInput] = {}
        self.values: dict[int, Value] = {}
        self.inputs: list[int] = []
        self.instructions: list[Instruction] = []
        self.output: Any = None
        self.ended = False

    def line(self, reader: Reader) -> None:
        """Add what a line defines."""
        if self.ended:
            reader.fail("expected nothing but constants after the output")
        if reader.at("%"):
            self._instruction(reader)
        elif reader.take("sizes "):
            while (name := reader.match(NAME)) is not None:
                reader.expect("=")
                self.sizes[name] = reader.integer()
        elif reader.take("call "):
            self.call = read_call(reader)
        elif reader.take("input "):
            value = self._definition(reader)
            reader.expect(";")
            self._add(reader, value, _node(reader))
            self.inputs.append(value.id)
            if self.call is not None:
                self.expected[value.id] = read_input(reader)
        elif reader.take("output "):
            self.output, self.ended = reader.value(), True
            check_defined(reader, registers_in(self.output), self.values)
        else:
            reader.expect("%")
        reader.end()

    def _instruction(self, reader: Reader) -> None:
        value = self._definition(reader)
        reader.expect("=")
        kind, fields = read_instruction(reader, value, self.values)
        reader.expect(";")
        node = _node(reader)
        origin = _read_origin(reader, value.name, kind)
        instruction = kind(out=value.id, **fields, **origin)
        check_defined(reader, instruction.reads, self.values)
        self._add(reader, value, node)
        self.instructions.append(instruction)

    def _add(self, reader: Reader, value: Value, node: int) -> None:
        if value.id in self.values:
            reader.fail(f"%{value.id} is defined twice")
        self.values[value.id] = replace(value, node=node)

    def _definition(self, reader: Reader) -> Value:
        reader.expect("%")
        place, name = reader.integer(), reader.word()
        reader.expect(":")
        dtype = read_dtype(reader)
        shape = self._shape(reader) if dtype is not None and reader.at("[") else None
        qparams = None
        if reader.take("scale="):
            scale = reader.value()
            reader.expect("zero_point=")
            qparams = (scale, reader.value())
        return Value(place, name, dtype, shape, qparams, 0)

    def _shape(self, reader: Reader) -> Shape:
        sizes: list[int | Size] = []
        reader.expect("[")
        while not reader.take("]"):
            matched = _SIZE.match(reader.text, reader.place)
            if matched is None:
                reader.fail(f"expected a size at column {reader.place + 1}")
            reader.place = matched.end()
            factor, symbol, offset, number = matched.groups()
            if symbol is not None and symbol not in self.sizes:
                reader.fail(f"size {symbol!r} is not among the sizes at the beginning")
            sizes.append(Size(symbol, int(factor or 1), int(offset or 0)) if symbol else int(number))
            reader.take(",")
            reader.skip()
        return tuple(sizes)

    def program(self) -> Program:
        """The program that all lines together define."""
        if not self.ended:
            raise TextError("the text has no line with the output")
        missing = sorted(set(range(len(self.values))) - set(self.values))
        if missing:
            raise TextError(f"no line defines %{missing[0]}; ids count up from 0")
        values = tuple(self.values[place] for place in range(len(self.values)))
        drops = unread(self.instructions, self.output)
        return Program(
            values, tuple(self.inputs), self.instructions, self.output, drops, self.sizes, self._expected_call()
        )

    def _expected_call(self) -> ExpectedCall | None:
        if self.call is None:
            return None
        named = registers_in((self.call.arguments, self.call.written))
        if not named <= set(self.inputs):
            raise TextError(f"the call names %{min(named - set(self.inputs))}, which is not an input")
        if not set(self.inputs) <= named:
            raise TextError(f"%{min(set(self.inputs) - named)} is an input that the call does not name")
        return replace(self.call, inputs=self.expected)


_SIZE = re.compile(r"(?:(?:(\d+)\*)?([A-Za-z_]\w*)([+-]\d+)?|(\d+))")


def _node(reader: Reader) -> int:
    reader.expect("#")
    return reader.integer()


def _read_origin(reader: Reader, name: str, kind: type[Instruction]) -> dict[str, Any]:
    """The step, owner and modules that an instruction comes from."""
    origin: dict[str, Any] = {"step": name}
    if reader.take("step "):
        origin["step"] = reader.word()
    if issubclass(kind, (FloatCall, Guard)) and reader.take("of "):
        origin["owner"] = reader.word()
    if issubclass(kind, FloatCall):
        origin.update({flag: True for flag in ("frozen", "writes") if reader.take(flag)})
    if reader.take("from "):
        modules = [reader.word()]
        while reader.take(","):
            modules.append(reader.word())
        origin["modules"] = tuple(modules)
    return origin


def _read_constants(lines: list[tuple[int, str]]) -> list[Tensor]:
    """The constants that a text ends with."""
    constants: list[Tensor] = []
    for place, (number, line) in enumerate(lines):
        if line.startswith("$"):
            data = itertools.takewhile(lambda one: one[1].startswith("  "), lines[place + 1 :])
            constants.append(
                _read_constant(Reader(line, number, []), len(constants), "".join(one.strip() for _, one in data))
            )
    return constants


def _read_constant(reader: Reader, place: int, data: str) -> Tensor:
    reader.expect("$")
    if reader.integer() != place:
        reader.fail(f"expected constant ${place}")
    reader.expect("=")
    dtype, shape = read_dtype(reader), reader.value()
    reader.end()
    if dtype is None or not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        reader.fail("expected a dtype and a shape")
    try:
        array = numpy.frombuffer(bytearray.fromhex(data), numpy.uint8)
        return torch.from_numpy(array.copy()).view(dtype).reshape(shape)
    except (ValueError, RuntimeError) as error:
        reader.fail(f"the lines after it do not hold such a tensor ({error})")

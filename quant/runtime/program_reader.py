"""The program of a text (`program_text.py`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from quant.runtime.callee import Callee, Function, Method, Submodule
from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.expected_call_text import read_call, read_input
from quant.runtime.instructions import (
    Conversion,
    Dequantize,
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    Quantize,
    RecurrentCall,
    TakeSequence,
    registers_in,
)
from quant.runtime.program import Program, unread
from quant.runtime.program_text import HEADER
from quant.runtime.tree_reader import NAME, Reader, TextError, is_method
from quant.runtime.trees import Ref
from quant.runtime.values import Shape, Size, Value


def parse(text: str, constants: list[Tensor] | None = None, packages: Collection[str] | None = None) -> Program:
    """The program that a text shows.

    Args:
        constants: the tensors that it names; None where they stand at its end.
        packages: whose classes it may name; None for those of all that is imported.

    Raises:
        TextError: the text is none, or names what no text may name; the message names the line.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or lines[0][1].strip() != HEADER:
        raise TextError(f"line 1: expected {HEADER!r}, as the text of a program begins")
    constants = _read_constants(lines) if constants is None else constants
    read = _Reading(constants)
    for number, line in lines[1:]:
        if not line.startswith(("$", "  ")):
            read.line(Reader(line, number, constants, packages))
    return read.program()


class _Reading:
    """A program while its lines are read."""

    def __init__(self, constants: list[Tensor]) -> None:
        self.constants = constants
        self.sizes: dict[str, int] = {}
        self.call: ExpectedCall | None = None
        self.expected: dict[int, ExpectedInput] = {}
        self.values: dict[int, Value] = {}
        self.inputs: list[int] = []
        self.instructions: list[Instruction] = []
        self.output: Any = None
        self.ended = False

    def line(self, reader: Reader) -> None:
        """Take in a line."""
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
            self._check(reader, registers_in(self.output))
        else:
            reader.expect("%")
        reader.end()

    def _instruction(self, reader: Reader) -> None:
        value = self._definition(reader)
        reader.expect("=")
        kind, fields = self._call(reader, value)
        reader.expect(";")
        node = _node(reader)
        origin = _read_origin(reader, value.name, kind)
        instruction = kind(out=value.id, **fields, **origin)
        self._check(reader, instruction.reads)
        self._add(reader, value, node)
        self.instructions.append(instruction)

    def _check(self, reader: Reader, reads: set[int]) -> None:
        unknown = reads - self.values.keys()
        if unknown:
            reader.fail(f"%{min(unknown)} is not made before")

    def _add(self, reader: Reader, value: Value, node: int) -> None:
        if value.id in self.values:
            reader.fail(f"%{value.id} is made twice")
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
            matched = SIZE.match(reader.text, reader.place)
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

    def _call(self, reader: Reader, out: Value) -> tuple[type[Instruction], dict[str, Any]]:
        """The class of an instruction, and what it has besides its origin."""
        name = reader.peek(NAME)
        if name in _CALLS:
            reader.take(name)
            return _CALLS[name](self, reader, out)
        if reader.take("octet."):
            kernel = reader.word()
            args, kwargs = reader.arguments()
            return KernelCall, {"kernel": kernel, "args": args, "kwargs": kwargs}
        callee = read_callee(reader)
        args, kwargs = reader.arguments()
        check_call(reader, callee, args, kwargs)
        return FloatCall, {"callee": callee, "args": args, "kwargs": kwargs}

    def conversion(self, reader: Reader, out: Value, kind: type[Conversion]) -> dict[str, Any]:
        """Of a value into the other form."""
        args = _given(reader, 1, 3)
        if not isinstance(args[0], Ref) or len(args) == 2:
            reader.fail(f"expected {kind.kernel}(%value) or {kind.kernel}(%value, scale, zero point)")
        source = args[0].index
        self._check(reader, {source})
        numbers = args[1:] or (out if kind is Quantize else self.values[source]).qparams
        if numbers is None:
            reader.fail("expected a scale and a zero point of the integers")
        return {"source": source, "scale": numbers[0], "zero_point": numbers[1]}

    def program(self) -> Program:
        """What the lines were."""
        if not self.ended:
            raise TextError("the text has no line with the output")
        missing = sorted(set(range(len(self.values))) - set(self.values))
        if missing:
            raise TextError(f"there is no line of %{missing[0]}; ids go from 0 on")
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
            raise TextError(f"the call names %{min(named - set(self.inputs))}, which is no input")
        return replace(self.call, inputs=self.expected)


Call = tuple[type[Instruction], dict[str, Any]]

SIZE = re.compile(r"(?:(?:(\d+)\*)?([A-Za-z_]\w*)([+-]\d+)?|(\d+))")


def _node(reader: Reader) -> int:
    reader.expect("#")
    return reader.integer()


def _read_origin(reader: Reader, name: str, kind: type[Instruction]) -> dict[str, Any]:
    """The step, the owner and the modules of an instruction."""
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


def _given(reader: Reader, least: int, most: int) -> tuple[Any, ...]:
    """Arguments without names."""
    args, kwargs = reader.arguments()
    if kwargs or not least <= len(args) <= most:
        reader.fail(f"expected {least} to {most} arguments")
    return args


def _source(reader: Reader, value: Any) -> int:
    if not isinstance(value, Ref):
        reader.fail("expected a value of the program as its first argument")
    return value.index


def _read_quantize(reading: _Reading, reader: Reader, out: Value) -> Call:
    return Quantize, reading.conversion(reader, out, Quantize)


def _read_dequantize(reading: _Reading, reader: Reader, out: Value) -> Call:
    return Dequantize, reading.conversion(reader, out, Dequantize)


def _read_layer(reading: _Reading, reader: Reader, out: Value) -> Call:
    layer = reader.word()
    args, kwargs = reader.arguments()
    if len(args) != 1 or not set(kwargs) <= {"site"}:
        reader.fail("expected layer NAME(%value) or layer NAME(%value, site=n)")
    return LayerCall, {"layer": layer, "source": _source(reader, args[0]), "site": kwargs.get("site", 0)}


def _read_recurrent(reading: _Reading, reader: Reader, out: Value) -> Call:
    path = reader.word()
    args, kwargs = reader.arguments()
    reader.expect("->")
    gives = reader.word()
    if gives not in ("uint8", "float32"):
        reader.fail("expected -> uint8 or -> float32")
    return RecurrentCall, {"path": path, "args": args, "kwargs": kwargs, "integers": gives == "uint8"}


def _read_first(reading: _Reading, reader: Reader, out: Value) -> Call:
    return TakeSequence, {"source": _source(reader, _given(reader, 1, 1)[0])}


def _read_guard(reading: _Reading, reader: Reader, out: Value) -> Call:
    source, expected = _given(reader, 2, 2)
    return Guard, {"source": _source(reader, source), "expected": expected}


def _read_move(reading: _Reading, reader: Reader, out: Value) -> Call:
    callee = read_callee(reader) if not reader.at("same(") else None
    reader.take("same")
    args, kwargs = reader.arguments()
    if callee is not None:
        check_call(reader, callee, args, kwargs)
    rescaled = reader.pairs() if reader.take("rescaled ") else {}
    numbers = {_source(reader, value): one for value, one in rescaled.items()}
    return IntegerMove, {"callee": callee, "args": args, "kwargs": kwargs, "rescaled": numbers}


_CALLS: dict[str, Callable[[_Reading, Reader, Value], Call]] = {
    "quantize": _read_quantize,
    "dequantize": _read_dequantize,
    "layer": _read_layer,
    "recurrent": _read_recurrent,
    "first": _read_first,
    "guard": _read_guard,
    "move": _read_move,
}


def read_callee(reader: Reader) -> Callee:
    """What is called."""
    if reader.take("method "):
        return Method(_method(reader))
    if reader.take("module "):
        return Submodule(reader.word())
    if reader.take("function "):
        return reader.allowed(*reader.place_of())
    name = reader.match(NAME)
    if name is None:
        reader.fail(f"expected a call at column {reader.place + 1}")
    module, _, last = name.rpartition(".")
    return reader.allowed(module, last)


def _method(reader: Reader) -> str:
    name = reader.word()
    if not is_method(name):
        reader.fail(f"{name!r} is no method of a tensor")
    return name


def check_call(reader: Reader, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what an allowed function does more than compute: private attributes lead from a value to any code."""
    if not isinstance(callee, Function):
        return
    if callee.target is getattr:
        name = args[1] if len(args) == 2 and not kwargs else None
        if not isinstance(name, str) or name.startswith("_"):
            reader.fail("expected getattr(%value, 'name'), and no private name")
    if callee.target in (max, min) and "key" in kwargs:
        reader.fail("takes no function as a key")


def read_dtype(reader: Reader) -> torch.dtype | None:
    """A dtype; None for what is no tensor."""
    name = reader.match(NAME)
    if name == "object":
        return None
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        reader.fail(f"{name!r} is no dtype")
    return dtype


def _read_constants(lines: list[tuple[int, str]]) -> list[Tensor]:
    """The tensors at the end of a text."""
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
        reader.fail(f"the lines after it are no tensor of that kind ({error})")

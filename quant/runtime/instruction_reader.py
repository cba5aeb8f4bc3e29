"""Reads the call of an instruction from a line of a program's text, and callees and dtypes from any text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quant.runtime.allowed_functions import is_method
from quant.runtime.callee import Callee, Function, Method, Submodule
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
)
from quant.runtime.keys import LayerKey
from quant.runtime.text_scanner import NAME
from quant.runtime.tree_reader import Reader
from quant.runtime.trees import Ref
from quant.runtime.values import Value

Call = tuple[type[Instruction], dict[str, Any]]
"""The class of an instruction, and its fields besides its output and origin."""


def read_instruction(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    """The call that gives `out`.

    Args:
        values: those that the lines before define, by id.

    Raises:
        TextError: the text is not a call, or one that no text may make.
    """
    name = reader.peek(NAME)
    if name in _READERS:
        reader.take(name)
        return _READERS[name](reader, out, values)
    if reader.take("octet."):
        kernel = reader.word()
        args, kwargs = reader.arguments()
        return KernelCall, {"kernel": kernel, "args": args, "kwargs": kwargs}
    callee = read_callee(reader)
    args, kwargs = reader.arguments()
    check_call(reader, callee, args, kwargs)
    return FloatCall, {"callee": callee, "args": args, "kwargs": kwargs}


def check_defined(reader: Reader, reads: set[int], values: Mapping[int, Value]) -> None:
    """Check that the lines before define the values that a line reads."""
    undefined = reads - values.keys()
    if undefined:
        reader.fail(f"%{min(undefined)} is used before it is defined")


def _positional(reader: Reader, least: int, most: int) -> tuple[Any, ...]:
    """Between `least` and `most` positional arguments."""
    args, kwargs = reader.arguments()
    if kwargs or not least <= len(args) <= most:
        reader.fail(f"expected {least} to {most} arguments")
    return args


def _source(reader: Reader, value: Any) -> int:
    if not isinstance(value, Ref):
        reader.fail("expected a value of the program as its first argument")
    return value.index


def _read_quantize(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    return Quantize, _conversion(reader, Quantize, values, out)


def _read_dequantize(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    return Dequantize, _conversion(reader, Dequantize, values)


def _conversion(
    reader: Reader, kind: type[Conversion], values: Mapping[int, Value], integers: Value | None = None
) -> dict[str, Any]:
    """The fields of a conversion; the text may leave out scale and zero point, which `integers`, or its source, has."""
    args = _positional(reader, 1, 3)
    if not isinstance(args[0], Ref) or len(args) == 2:
        reader.fail(f"expected {kind.kernel}(%value) or {kind.kernel}(%value, scale, zero point)")
    source = args[0].index
    check_defined(reader, {source}, values)
    qparams = args[1:] or (integers or values[source]).qparams
    if qparams is None:
        reader.fail("expected a scale and a zero point of the integers")
    return {"source": source, "scale": qparams[0], "zero_point": qparams[1]}


def _read_layer(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    layer = reader.word()
    args, kwargs = reader.arguments()
    if len(args) != 1 or not set(kwargs) <= {"site"}:
        reader.fail("expected layer NAME(%value) or layer NAME(%value, site=n)")
    return LayerCall, {"layer": LayerKey.read(layer), "source": _source(reader, args[0]), "site": kwargs.get("site", 0)}


def _read_recurrent(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    path = reader.word()
    args, kwargs = reader.arguments()
    reader.expect("->")
    dtype = reader.word()
    if dtype not in ("uint8", "float32"):
        reader.fail("expected -> uint8 or -> float32")
    return RecurrentCall, {"path": path, "args": args, "kwargs": kwargs, "integers": dtype == "uint8"}


def _read_first(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    return TakeSequence, {"source": _source(reader, _positional(reader, 1, 1)[0])}


def _read_guard(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    source, expected = _positional(reader, 2, 2)
    return Guard, {"source": _source(reader, source), "expected": expected}


def _read_move(reader: Reader, out: Value, values: Mapping[int, Value]) -> Call:
    callee = read_callee(reader) if not reader.at("same(") else None
    reader.take("same")
    args, kwargs = reader.arguments()
    if callee is not None:
        check_call(reader, callee, args, kwargs)
    pairs = reader.pairs() if reader.take("rescaled ") else {}
    rescaled = {_source(reader, value): qparams for value, qparams in pairs.items()}
    return IntegerMove, {"callee": callee, "args": args, "kwargs": kwargs, "rescaled": rescaled}


_READERS: dict[str, Callable[[Reader, Value, Mapping[int, Value]], Call]] = {
    "quantize": _read_quantize,
    "dequantize": _read_dequantize,
    "layer": _read_layer,
    "recurrent": _read_recurrent,
    "first": _read_first,
    "guard": _read_guard,
    "move": _read_move,
}


def read_callee(reader: Reader) -> Callee:
    """A callee: a method, a module, or a function of the allow-list."""
    if reader.take("method "):
        return Method(_method(reader))
    if reader.take("module "):
        return Submodule(reader.path())
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
        reader.fail(f"{name!r} is not a tensor method that a program may call")
    return name


def check_call(reader: Reader, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments by which an allowed function would do more than compute.

    A private attribute leads from a value to arbitrary code, and a key is a function that runs.
    """
    target = callee.target if isinstance(callee, Function) else None
    is_sort = isinstance(callee, Method) and callee.name == "sort"  # which a list has, too
    if "key" in kwargs and (is_sort or target in (max, min)):
        reader.fail("takes no function as a key")
    if target is getattr:
        name = args[1] if len(args) == 2 and not kwargs else None
        if not isinstance(name, str) or name.startswith("_"):
            reader.fail("expected getattr(%value, 'name'), and no private name")


def read_dtype(reader: Reader) -> torch.dtype | None:
    """A dtype; None for a value that is not a tensor."""
    name = reader.match(NAME)
    if name == "object":
        return None
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        reader.fail(f"{name!r} is not a dtype")
    return dtype

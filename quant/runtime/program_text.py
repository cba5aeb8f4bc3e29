"""A program as text that a person can read; `program_reader.py` reads it back.

    octet-program 1
    sizes n=4
    call encoder(x=%0)
    input %0 x_0: float32[n, 8]  ; #0 argument x float32
    %1 x_0: uint8[n, 8] scale=0.02 zero_point=128 = quantize(%0)  ; #0
    %2 fc: float32[n, 3] = layer fc(%1)  ; #1 from fc
    output %2

A line defines one value: its id, its name in the user's model, its type, scale and zero point of integers
(x = scale * (q - zero_point)), and the call that computes it. After the semicolon comes its origin: the node of the
captured graph, the step where its name differs from the value's, the module whose forward makes the call (`of`), and
the modules that the call was converted from (`from`).

`octet.NAME` is a kernel and `layer NAME` an int8 layer; `method NAME`, `module NAME` and dotted names of functions are
calls of the user's; `move` marks calls that take integers as well as floats. Tensors that are not parameters are $0,
$1, ... and come at the end. `expected_call_text.py` describes `call` and `argument`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quant.kernels.reference_ops import OPS
from quant.runtime.callee import Callee, Method, Submodule
from quant.runtime.expected_call_text import call_text, input_text
from quant.runtime.instructions import (
    Conversion,
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
from quant.runtime.names import dtype_name
from quant.runtime.tree_text import Writer, word
from quant.runtime.trees import Ref
from quant.runtime.values import Value

if TYPE_CHECKING:
    from quant.runtime.program import Program

HEADER = "octet-program 1"

DOTTED = re.compile(r"[A-Za-z_][\w.]*")
"""Functions that are written as their module and name with a dot between."""

WIDTH = 64
"""Bytes of a constant on one line."""


def program_text(program: Program) -> str:
    """A program as text, with its constants."""
    writer = Writer()
    lines = [text_without_constants(program, writer)]
    for place, tensor in enumerate(writer.constants):
        lines += _constant(place, tensor)
    return "\n".join(lines)


def text_without_constants(program: Program, writer: Writer) -> str:
    """A program as text without its constants, which are added to `writer.constants`."""
    values = program.values
    lines = [HEADER]
    if program.sizes:
        lines.append(" ".join(["sizes", *(f"{name}={size}" for name, size in program.sizes.items())]))
    if program.call is not None:
        lines.append(f"call {call_text(program.call, writer)}")
    for value in map(values.__getitem__, program.inputs):
        expected = "" if program.call is None else f" {input_text(program.call.inputs[value.id])}"
        lines.append(f"input {_definition(value)}  ; #{value.node}{expected}")
    for one in program.instructions:
        out = values[one.out]
        lines.append(f"{_definition(out)} = {_call(one, values, writer)}  ; {_origin(one, out)}")
    lines.append(f"output {writer.value(program.output)}")
    return "\n".join(lines)


def _definition(value: Value) -> str:
    numbers = "" if value.qparams is None else " scale={!r} zero_point={!r}".format(*value.qparams)
    return f"%{value.id} {word(value.name)}: {_type(value)}{numbers}"


def _type(value: Value) -> str:
    if value.dtype is None:
        return "object"
    shape = "" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return dtype_name(value.dtype) + shape


def _origin(one: Instruction, out: Value) -> str:
    parts = [f"#{out.node}"]
    if one.step != out.name:
        parts.append(f"step {word(one.step)}")
    if isinstance(one, (FloatCall, Guard)) and one.owner:
        parts.append(f"of {word(one.owner)}")
    if isinstance(one, FloatCall):
        parts += [name for name in ("frozen", "writes") if getattr(one, name)]
    if one.modules:
        parts.append(f"from {', '.join(map(word, one.modules))}")
    return " ".join(parts)


def _call(one: Instruction, values: tuple[Value, ...], writer: Writer) -> str:
    if isinstance(one, Conversion):
        known = values[one.out if isinstance(one, Quantize) else one.source].qparams
        qparams = () if known == (one.scale, one.zero_point) else (one.scale, one.zero_point)
        return one.kernel + writer.arguments((Ref(one.source), *qparams), {})
    if isinstance(one, KernelCall):
        return f"octet.{one.kernel}{writer.arguments(*one.arguments, names=_names(one.kernel))}"
    if isinstance(one, LayerCall):
        site = {"site": one.site} if one.site else {}
        return f"layer {word(str(one.layer))}{writer.arguments((Ref(one.source),), site)}"
    if isinstance(one, RecurrentCall):
        dtype = "uint8" if one.integers else "float32"
        return f"recurrent {word(one.path)}{writer.arguments(*one.arguments)} -> {dtype}"
    if isinstance(one, (TakeSequence, Guard)):
        return one.kind + writer.arguments(*one.arguments)
    if isinstance(one, FloatCall):
        return callee_text(one.callee) + writer.arguments(*one.arguments)
    assert isinstance(one, IntegerMove)
    callee = "same" if one.callee is None else callee_text(one.callee)
    by_value = {Ref(value): qparams for value, qparams in one.rescaled.items()}
    rescaled = f" rescaled {writer.pairs(by_value)}" if by_value else ""
    return f"move {callee}{writer.arguments(*one.arguments)}{rescaled}"


def callee_text(callee: Callee) -> str:
    """A callee as text."""
    if isinstance(callee, Method):
        return f"method {word(callee.name)}"
    if isinstance(callee, Submodule):
        return f"module {word(callee.path)}"
    name = f"{callee.module}.{callee.name}"
    plain = DOTTED.fullmatch(name) and callee.module and "." not in callee.name
    return name if plain else f"function {callee.module}:{callee.name}"


@functools.cache
def _names(kernel: str) -> tuple[str, ...]:
    """The names of a kernel's arguments, which are printed as comments."""
    return tuple(inspect.signature(OPS[kernel]).parameters) if kernel in OPS else ()


def _constant(place: int, tensor: Tensor) -> Iterator[str]:
    plain = tensor.detach().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    yield f"${place} = {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    for begin in range(0, len(data), WIDTH):
        yield f"  {data[begin : begin + WIDTH].hex()}"

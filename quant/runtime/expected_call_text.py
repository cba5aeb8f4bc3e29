"""Writes and reads the lines of a program's text that say which calls it stands for.

    call encoder(x=%0, mask=None)  ; writes @count, %0
    input %0 x_0: float32[n, 8]  ; #0 argument x float32 rank 2 contiguous

`writes` is followed by the buffers and inputs that are written to before the last guard is checked. An input has the
name of its argument, its type where it is not a tensor (int, float, or object for any), and the requirements of a
tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.names import dtype_name
from quant.runtime.text_scanner import NAME
from quant.runtime.tree_reader import Reader
from quant.runtime.tree_text import Writer, word


def call_text(call: ExpectedCall, writer: Writer) -> str:
    """The text after `call`."""
    text = (word(call.path) if call.path else "") + writer.arguments((), call.arguments)
    return (
        f"{text}  ; {' '.join(['writes', ', '.join(map(writer.value, call.written))])}".rstrip()
        if call.writes
        else text
    )


def input_text(expected: ExpectedInput) -> str:
    """The text after the definition of an input, in the order of the checks."""
    parts = ["argument", word(expected.name)]
    if expected.kind is not Tensor:
        parts.append(expected.kind.__name__)
    if expected.dtype is not None:
        parts.append(dtype_name(expected.dtype))
    if expected.rank is not None:
        parts.append(f"rank {expected.rank}")
    if expected.contiguous:
        parts.append("contiguous")
    return " ".join(parts)


def read_call(reader: Reader) -> ExpectedCall:
    """Read the text after `call`; inputs have lines of their own."""
    path = "" if reader.at("(") else reader.word()
    args, arguments = reader.arguments()
    if args:
        reader.fail("expected named arguments only")
    writes = reader.take(";")
    written = []
    if writes:
        reader.expect("writes")
        while reader.at("%") or reader.at("@"):
            written.append(reader.value())
            reader.take(",")
    return ExpectedCall(path, arguments, {}, writes, tuple(written))


def read_input(reader: Reader) -> ExpectedInput:
    """Read the requirements of an input."""
    reader.expect("argument")
    name, dtype, rank = reader.word(), None, None
    kind: type = Tensor
    word = reader.match(NAME)
    if word in KINDS:
        kind, word = KINDS[word], reader.match(NAME)
    if isinstance(getattr(torch, word or "", None), torch.dtype):
        dtype, word = getattr(torch, word or ""), reader.match(NAME)
    if word == "rank":
        rank, word = reader.integer(), reader.match(NAME)
    if word not in (None, "contiguous"):
        reader.fail(f"{word!r} is not a requirement of an input")
    return ExpectedInput(name, kind, dtype, rank, word == "contiguous")


KINDS: dict[str, type] = {"int": int, "float": float, "object": object}
"""The types of inputs that are not tensors, by name."""

"""The lines of a program's text that say which calls it stands for: printed, and read back.

    call encoder(x=%0, mask=None)  ; writes @count, %0
    input %0 x_0: float32[n, 8]  ; #0 argument x float32 rank 2 contiguous

Behind `writes` stand the buffers and inputs that are written to before the last guard has held. Of an input stand the
argument that it is, its type where it is no tensor (int, float, or object for anything), and what a tensor has to have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.text_scanner import NAME
from quant.runtime.tree_reader import Reader
from quant.runtime.tree_text import Writer, word


def call_text(call: ExpectedCall, writer: Writer) -> str:
    """What stands behind `call`."""
    text = (word(call.path) if call.path else "") + writer.arguments((), call.arguments)
    return (
        f"{text}  ; {' '.join(['writes', ', '.join(map(writer.value, call.written))])}".rstrip()
        if call.writes
        else text
    )


def input_text(expected: ExpectedInput) -> str:
    """What stands behind the definition of an input, in the order in which it is checked."""
    parts = ["argument", word(expected.name)]
    if expected.kind is not Tensor:
        parts.append(expected.kind.__name__)
    if expected.dtype is not None:
        parts.append(str(expected.dtype).removeprefix("torch."))
    if expected.rank is not None:
        parts.append(f"rank {expected.rank}")
    if expected.contiguous:
        parts.append("contiguous")
    return " ".join(parts)


def read_call(reader: Reader) -> ExpectedCall:
    """The call of a line, without its inputs."""
    path = "" if reader.at("(") else reader.word()
    args, arguments = reader.arguments()
    if args:
        reader.fail("expected arguments with names")
    writes = reader.take(";")
    written = []
    if writes:
        reader.expect("writes")
        while reader.at("%") or reader.at("@"):
            written.append(reader.value())
            reader.take(",")
    return ExpectedCall(path, arguments, {}, writes, tuple(written))


def read_input(reader: Reader) -> ExpectedInput:
    """What is expected of an input."""
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
        reader.fail(f"{word!r} is nothing that an input is checked for")
    return ExpectedInput(name, kind, dtype, rank, word == "contiguous")


KINDS: dict[str, type] = {"int": int, "float": float, "object": object}
"""Of inputs that are no tensors."""

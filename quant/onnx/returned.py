"""What a file returns of what a program does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quant.export.naming import named_leaves
from quant.runtime.program import Program
from quant.runtime.trees import Attr, Ref


def returned(program: Program) -> list[tuple[str, Any]]:
    """The tensors of a program's output, by name: Ref, Attr or the tensor itself."""
    return [(name, leaf) for name, leaf in named_leaves(program.output, "output_") if _is_tensor(program, leaf)]


def not_returned(program: Program) -> list[str]:
    """The flags, dtypes and numbers beside them, for the report."""
    return [
        f"a number at '{name}'" if isinstance(leaf, Ref) else f"{leaf!r} at '{name}'"
        for name, leaf in named_leaves(program.output, "output_")
        if not _is_tensor(program, leaf)
    ]


def _is_tensor(program: Program, leaf: object) -> bool:
    if isinstance(leaf, Ref):
        return program.values[leaf.index].dtype is not None
    return isinstance(leaf, (Attr, Tensor))

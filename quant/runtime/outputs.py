"""Turns the output of a graph or program into what the caller of the user's module gets."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quant.runtime.arguments import bind
from quant.runtime.names import attribute
from quant.runtime.objects import Result
from quant.runtime.trees import Attr, map_leaves, settled


def finished(output: Any, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the caller of a captured module gets: its output with objects built, after all writes."""
    output = with_attributes(output, root)
    return output if type(output) is not Result else settled(output, root, bind(root, args, kwargs))


def with_attributes(output: Any, root: nn.Module) -> Any:
    """An output with the parameters and buffers that it names by Attr."""
    if type(output) is Tensor:
        return output
    return map_leaves(lambda leaf: attribute(root, leaf.path) if type(leaf) is Attr else leaf, output)

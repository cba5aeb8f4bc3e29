"""Copies of torch.fx's modules, traced or exported, that keep all they hold.

`GraphModule.__deepcopy__` makes a module of the graph again, with what the graph names: hooks, other children and a
forward that was set on the module are lost. Copies of a prepared or converted model must have them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

SWITCHES = frozenset({"train", "eval"})
OF_ITS_CLASS = frozenset({"__dict__", "__weakref__", "__call__", "_wrapped_call"})
"""What belongs to one class; its call is nn.Module's, with a note to errors in generated code."""


def begun_graph_module(module: torch.fx.GraphModule) -> tuple[Any, dict[str, Any]]:
    """An empty copy of a module, whose copies are whole too, and its state.

    An exported module has methods of its own that refuse to switch its mode, since its graph has one; what is around it
    has to be switched.
    """
    kind = type(module)  # of this object alone, with the code of its graph
    own = {name: value for name, value in vars(kind).items() if name not in OF_ITS_CLASS}
    own |= {"__deepcopy__": _copied_whole, "__qualname__": kind.__qualname__}
    state = {name: value for name, value in vars(module).items() if name not in SWITCHES}
    return object.__new__(type(kind.__name__, kind.__bases__, own)), state


def _copied_whole(module: torch.fx.GraphModule, memo: dict[int, Any]) -> Any:
    found = object.__new__(type(module))
    memo[id(module)] = found
    found.__dict__.update(copy.deepcopy(vars(module), memo))
    return found

"""What an island gives and leaves, as its caller depends on it.

Tensors and numbers that it gives are values of the graph. Its caller may go on by anything else in them, so the form of
the rest (`runtime/forms.py`) is held by a guard; what can be changed, or has no text, only the caller's own forward can
handle. A guard that fails lets another program run the call from its beginning, and with it the island once more: after
one that keeps something of its calls no guard may stand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
from torch import Tensor, nn

from quant.capture.module_state import ModuleState
from quant.capture.places import Checked
from quant.capture.random_draws import torch_state
from quant.capture.scripted import ScriptState
from quant.capture.tape import CONSTANT, Tape
from quant.graph import Kind, Node
from quant.runtime.forms import form_of, is_literal
from quant.runtime.names import full_name
from quant.runtime.objects import Instance
from quant.runtime.trees import Ref, leaves


class IslandResults:
    """Holds what islands give, and notes which of them keep something of their calls."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.lasting: list[tuple[int, str]] = []
        """The calls of islands that leave something behind: their nodes, and their names."""

    def hold(self, node: Node, name: str, value: Any) -> None:
        """Hold an island's output, but for its tensors and numbers.

        Args:
            node: of the call.
            name: the island's.
            value: what it gave.
        """
        for leaf in _own_leaves(self.tape.opened(value)):
            if isinstance(leaf, bool):
                self.tape.problem(self.tape.owner, f"calls {name}, which gives a bool")
            elif not isinstance(leaf, Tensor) and not is_literal(leaf):
                self.tape.problem(self.tape.owner, f"calls {name}, which gives a {type(leaf).__name__}")
        if isinstance(value, Tensor):
            return  # which is looked at where it is called (`matching.check_tensor`)
        form = form_of(value)
        asked = Node(len(self.tape.nodes), Kind.FUNCTION, form_of, (Ref(node.index),), owner=self.tape.owner)
        self.tape.guard(Ref(self.tape.append(asked, form, CONSTANT)), form)

    def state_of(self, module: nn.Module, name: str) -> Any:
        """What an island may change, before it runs: random numbers, and what modules in it hold."""
        names = (full_name(name, inner) for inner, _ in module.named_modules())
        return _chance(), [self.tape.parts[one] for one in names if one in self.tape.parts]

    def note_state(self, node: Node, name: str, before: Any) -> None:
        """Note what an island has changed, by `state_of` before it ran."""
        chance, parts = before
        if chance != _chance() or not _are_as_before(parts):
            self.lasting.append((node.index, name))

    def refuse_later_guards(self) -> None:
        """Find the modules that decide anything after an island that must not run twice."""
        if not self.lasting or self.tape.root.training:
            return
        first, name = self.lasting[0]
        for node in self.tape.nodes[first:]:
            if node.kind is Kind.GUARD:
                self.tape.problem(node.owner, f"decides something after {name}, which keeps something of its calls")


def _own_leaves(opened: Any) -> Iterator[Any]:
    """The leaves of an output outside of objects: what is in those belongs to their form."""
    if type(opened) is Instance:
        return
    if type(opened) in (tuple, list):
        for one in opened:
            yield from _own_leaves(one)
    elif type(opened) is dict:
        yield from _own_leaves([*opened.values()])
    else:
        yield from leaves(opened)


def _are_as_before(parts: list[ModuleState | ScriptState]) -> bool:
    checked = Checked()
    return all(part.is_as_before(checked) for part in parts)


def _chance() -> Any:
    """What the generators of random numbers of this process are at, but for those that are somebody's own."""
    torch_states = [state.numpy().tobytes() for state in torch_state()]
    return torch_states, random.getstate(), repr(numpy.random.get_state(legacy=False))

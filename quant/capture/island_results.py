"""Guards the outputs of islands, and notes the state that islands keep.

Tensors and numbers in an island's output are values of the graph. The caller may branch on everything else in it, so a
guard compares its form (`runtime/forms.py`). An output with mutable objects, or without a form, makes the caller an
island too. When a guard fails, another program runs the call from its beginning, the island included. So no guard may
follow an island that keeps state.
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
    """Guards the outputs of islands, and notes which of them keep state."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.lasting: list[tuple[int, str]] = []
        """Calls of islands that keep state: node and name."""

    def hold(self, node: Node, name: str, value: Any) -> None:
        """Guard the form of an island's output.

        Args:
            node: the call.
            name: the island's dotted name.
            value: its output.
        """
        for leaf in _own_leaves(self.tape.opened(value)):
            if isinstance(leaf, bool):
                self.tape.problem(self.tape.owner, f"calls {name}, which gives a bool")
            elif not isinstance(leaf, Tensor) and not is_literal(leaf):
                self.tape.problem(self.tape.owner, f"calls {name}, which gives a {type(leaf).__name__}")
        if isinstance(value, Tensor):
            return  # `matching.check_tensor` checks it when the island is called
        form = form_of(value)
        asked = Node(len(self.tape.nodes), Kind.FUNCTION, form_of, (Ref(node.index),), owner=self.tape.owner)
        self.tape.guard(Ref(self.tape.append(asked, form, CONSTANT)), form)

    def state_of(self, module: nn.Module, name: str) -> Any:
        """The state that an island may change, before it runs: random generators, and the modules within it."""
        names = (full_name(name, inner) for inner, _ in module.named_modules())
        return _chance(), [self.tape.parts[one] for one in names if one in self.tape.parts]

    def note_state(self, node: Node, name: str, before: Any) -> None:
        """Note whether an island has changed its state; `before` is `state_of` before it ran."""
        chance, parts = before
        if chance != _chance() or not _are_as_before(parts):
            self.lasting.append((node.index, name))

    def refuse_later_guards(self) -> None:
        """Make islands of the modules that branch after an island with state, which must not run twice."""
        if not self.lasting or self.tape.root.training:
            return
        first, name = self.lasting[0]
        for node in self.tape.nodes[first:]:
            if node.kind is Kind.GUARD:
                self.tape.problem(node.owner, f"decides something after {name}, which keeps something of its calls")


def _own_leaves(opened: Any) -> Iterator[Any]:
    """The leaves of an output, except those inside objects, which belong to the object's form."""
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
    """The states of the global random generators of torch, Python and numpy."""
    torch_states = [state.numpy().tobytes() for state in torch_state()]
    return torch_states, random.getstate(), repr(numpy.random.get_state(legacy=False))

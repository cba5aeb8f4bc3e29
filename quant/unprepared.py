"""A captured module as it was before, in modules of their own: other calls are captured there while threads call it."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.rebinding import HOOKS, Rebinder
from quant.runtime.arguments import Arguments
from quant.runtime.programs import HIDDEN, RESERVED, runner_in
from quant.static.prepared import RECORD
from quant.waiting_forwards import waiting


def unprepared(root: nn.Module, call: Arguments) -> nn.Module | None:
    """A module to capture a call of, in place of one of a prepared model, with the user's forwards and children.

    Modules are new, and hold what the modules of `root` hold: tensors and other objects are the same. Where functions,
    lists, tuples and dictionaries refer to one of those, theirs refer to the new one. What else may refer to one, such
    as an object of the user's or of the call, would call it and not the new one: then the result is None.
    """
    modules = [part for name, part in root.named_modules() if RESERVED not in name.split(".")]
    scripted = {id(part) for one in modules if isinstance(one, torch.jit.ScriptModule) for part in one.modules()}
    modules = [part for part in modules if id(part) not in scripted]  # nothing of ours is in them
    if not all(_is_its_dictionary(type(part)) for part in modules):
        return None
    own: dict[int, nn.Module] = {id(part): object.__new__(type(part)) for part in modules}
    rebinder = Rebinder(own)
    held = [value for part in modules for value in _fill(own[id(part)], part, rebinder)]
    return None if reach([*held, call], set(own), set(map(id, own.values()))) else own[id(root)]


def _is_its_dictionary(kind: type[nn.Module]) -> bool:
    """Whether all that a module holds is in its `__dict__`: not where it is a list too, or has slots."""
    return kind.__basicsize__ == nn.Module.__basicsize__ and kind.__itemsize__ == 0


_LEFT_OUT = (HIDDEN, RECORD, "_compiled_call_impl")
"""What we put there, and what `module.compile()` calls in place of the module."""
_STORES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


def _fill(new: nn.Module, old: nn.Module, rebinder: Rebinder) -> Iterator[Any]:
    """Give a new module what an old one holds; returns what may refer to modules."""
    forward = waiting(old) or runner_in(old)
    held = dict(vars(old))
    for name in _LEFT_OUT if forward is None else (*_LEFT_OUT, "forward"):
        held.pop(name, None)
    if forward is not None and forward.own_forward is not None:
        held["forward"] = forward.own_forward
    for name, value in held.items():
        if name in _STORES:
            value = type(value)(value)  # a module changes its own
            if isinstance(value, dict) and name.endswith(HOOKS):
                value.update((key, rebinder.of(hook)) for key, hook in value.items())
        else:
            value = rebinder.of(value)
        new.__dict__[name] = value
        if name not in _STORES or name.startswith("_forward"):  # of other stores no forward asks for modules
            yield value
    children = new.__dict__["_modules"]
    children.pop(RESERVED, None)
    children.update((name, rebinder.of(child)) for name, child in children.items())


_CLOSED = (Tensor, str, bytes, int, float, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)
"""Classes of objects through which no module is reached."""
_MOST = 100_000
"""Objects that are looked through."""


def reach(held: Iterable[Any], wanted: set[int], closed: Iterable[int] = ()) -> bool:
    """Whether objects refer to one with an `id` in `wanted`, or to more others than are looked through.

    Args:
        closed: of objects through which is not looked.
    """
    rest, seen = list(held), set(closed)
    while rest:
        value = rest.pop()
        if id(value) in wanted:
            return True
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        if len(seen) > _MOST:
            return True
        rest += _referents(value)
    return False


def _referents(value: Any) -> list[Any]:
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):  # its globals reach everything
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    return gc.get_referents(value)

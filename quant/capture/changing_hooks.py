"""The user's forward hooks that are part of what a model computes: they change values, or the forward reads them.

Such hooks become a part of their module's forward while it is recorded. Hooks that look, as those that collect
activations do, are no part of a graph and do not run during capture, save in one call here, whose writes are undone.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture.near import near
from quant.capture.outer_objects import Outside
from quant.capture.recorded_modules import Hook, evaluating, users_hooks
from quant.capture.sameness import same, same_content
from quant.capture.snapshot import Snapshot
from quant.capture.writes import version_of, versions
from quant.leaves import base_layer
from quant.runtime.arguments import Arguments, copied_together
from quant.runtime.names import attribute, full_name
from quant.runtime.objects import Given, containers, content
from quant.runtime.trees import leaves


class ForwardWithHooks:
    """A module's forward with hooks around it, called as `nn.Module.__call__` calls them.

    Args:
        hooks: in torch's order.

    Attributes:
        hooks: the hooks alone.
        of_layer: whether the module is a layer, which a graph computes without a call of it.
    """

    def __init__(self, module: nn.Module, hooks: Sequence[Hook]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module, self._forward = module, module.forward
        self._before = [hook for hook in hooks if hook.is_before]
        self._after = [hook for hook in hooks if not hook.is_before]
        self.hooks = [hook.call for hook in hooks]
        self.of_layer = base_layer(module) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self._before:
            given = hook.call(self._module, args, kwargs) if hook.takes_kwargs else hook.call(self._module, args)
            if given is None:
                continue
            if hook.takes_kwargs:
                args, kwargs = given
            else:
                args = given if isinstance(given, tuple) else (given,)
        output = self._forward(*args, **kwargs)
        for hook in self._after:
            extra = (kwargs,) if hook.takes_kwargs else ()
            given = hook.call(self._module, args, *extra, output)
            output = output if given is None else given
        return output


def forwards_with_hooks(
    model: nn.Module, path: str, call: Arguments, islands: MutableMapping[str, str]
) -> dict[nn.Module, ForwardWithHooks]:
    """The forwards of modules within a model with the user's hooks that a call shows to be part of what they compute.

    Hooks of the model itself are none: whoever calls it runs them.

    Args:
        path: dotted name of the model in that of the user's.
        call: its arguments, which stay as they are.
        islands: dotted name -> the reason that a module is an island; those with hooks that hand values on beside the
            module's output are added, as these have to run in every call.

    The call runs twice, without gradients, and a third time where hooks write; what it writes is undone.
    """
    hooked = {
        module: hooks
        for module in model.modules()
        if module is not model and (hooks := users_hooks(module, type(model)))
    }
    if not hooked:
        return {}
    outside, changing = Outside(), set[int]()
    for module, hooks in hooked.items():
        outside.enter(module, ForwardWithHooks(module, hooks))
    before = Snapshot(model, outside)
    with torch.no_grad(), evaluating(model):
        try:
            with _replaced(hooked, lambda hook: _Watching(hook, changing)):
                output = _output(model, call)
            written = before.put_back()
            with _replaced(hooked, lambda hook: hook if id(hook) in changing else None):
                without = _output(model, call)
            written -= before.put_back()
            if written and output is not None:
                _output(model, call)
                after = {name: _value(model, name) for name in written}
                before.put_back()
                written = {name for name, value in after.items() if not _is_equal(value, _value(model, name))}
        finally:
            before.put_back()
    if output is None:  # the user's error, which is shown where the call is recorded
        return {}
    hand_on = bool(written) or without is None or not near(output, without)
    parts = {
        module: [hook for hook in hooks if hand_on or id(hook.call) in changing] for module, hooks in hooked.items()
    }
    names = {module: name for name, module in model.named_modules()}
    for module in parts if hand_on else ():
        islands.setdefault(full_name(path, names[module]), "its forward hook hands values on beside its output")
    return {module: ForwardWithHooks(module, hooks) for module, hooks in parts.items() if hooks}


def _output(model: nn.Module, call: Arguments) -> Any:
    """A call's output in a tuple, without the model's own hooks; None where it ends in an error."""
    args, kwargs = copied_together(call)
    with contextlib.suppress(Exception):
        return (model.forward(*args, **kwargs),)
    return None


def _value(model: nn.Module, name: str) -> Any:
    """An attribute as it is now."""
    try:
        value = attribute(model, name)
    except (AttributeError, KeyError):  # the call made it
        return None
    return value.clone() if isinstance(value, Tensor) else value


def _is_equal(one: Any, other: Any) -> bool:
    """Whether a tensor or number is what it was, as where each call computes a weight of another parameter anew."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return isinstance(one, (int, float, str)) and same(one, other)


@contextlib.contextmanager
def _replaced(hooked: Mapping[nn.Module, list[Hook]], by: Callable[[Any], Any]) -> Iterator[None]:
    """Put other hooks in the place of some, or none for None, for the time of the context."""
    before = [(module, name, module.__dict__[name]) for module, hooks in hooked.items() for name, *_ in hooks]
    try:
        for module, hooks in hooked.items():
            for hook in hooks:
                table = module.__dict__[hook.table] = OrderedDict(module.__dict__[hook.table])
                other = by(hook.call)
                if other is None:
                    del table[hook.key]
                else:
                    table[hook.key] = other
        yield
    finally:
        for module, name, table in reversed(before):
            module.__dict__[name] = table


class _Watching:
    """Calls a hook, and notes where it gives another value than it gets, or changes one."""

    def __init__(self, hook: Callable[..., Any], changes: set[int]) -> None:
        self._hook, self._changes = hook, changes

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        known = versions(values)
        clones = [(leaf, leaf.clone()) for leaf in leaves(values) if isinstance(leaf, Tensor) and leaf.is_inference()]
        objects: dict[int, tuple[Any, Given]] = {}
        containers(values, Given(""), objects, lambda leaf: isinstance(leaf, Tensor))
        contents = [(one, content(one)) for one, _ in objects.values()]
        given = self._hook(module, *values)
        # A pre-hook with keyword arguments gives both; a hook the output, which is the last of its values.
        as_it_was = given is None or any(same(given, one) for one in (values, values[0], values[-1]))
        if (
            not as_it_was
            or any(version_of(tensor) != version for tensor, version in known)
            or any(not torch.equal(tensor, clone) for tensor, clone in clones)
            or any(not same_content(was, content(one)) for one, was in contents)
        ):
            self._changes.add(id(self._hook))
        return given

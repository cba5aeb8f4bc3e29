"""Watches a model: its submodules report their calls to a recorder, and its state is restored afterwards.

Each module gets another forward for the duration of a capture. Nothing in torch is changed, so other models and other
threads are not affected.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from quant.capture.attention import stop_nesting
from quant.capture.outer_objects import Outside
from quant.capture.snapshot import Snapshot, users_modules
from quant.half_precision import OwnOutputs, WideInputs

if TYPE_CHECKING:
    from quant.capture.recorder import Recorder
    from quant.capture.undisturbed import Listener

Forward = Callable[..., Any]
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOW_CALLED = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Dictionary of hooks -> the dictionaries with their options, which have the same keys."""
OURS = (WideInputs, OwnOutputs)
"""Hooks of ours that only cast; they stay and are recorded as calls."""


class Watched:
    """The modules of one model while they are watched.

    Attributes:
        recorder: gets every call; None while nothing is recorded.
        changed: dotted names of the attributes, buffers and submodules that some forward changed.
        called_by_user: whether the user calls the model, and not a module around it.
        has_run: whether the model has run before in this capture.
        outside: the places outside of the model that forwards reach.
        unlike_in_training: dotted name of a layer -> the reason that ranges from training do not fit it in eval mode.
        with_hooks: module -> its forward with the user's hooks that are a part of it.
    """

    def __init__(
        self, model: nn.Module, *, called_by_user: bool = True, with_hooks: Mapping[nn.Module, Forward] | None = None
    ) -> None:
        self.model, self.called_by_user = model, called_by_user
        self.with_hooks = with_hooks or {}
        self.recorder: Recorder | Listener | None = None
        self.changed: set[str] = set()
        self.unlike_in_training: dict[str, str] = {}
        self.has_run = False
        self.outside = Outside()
        self._last: Snapshot | None = None

    def has_hooks_in(self, module: nn.Module) -> bool:
        """Whether hooks that belong to the model are registered on modules within `module`."""
        inside = [part for part in module.modules() if part is not module]
        hooks = (part.__dict__.get(name) or {} for part in inside for name in HOOKS)
        return any(not isinstance(hook, OURS) for registered in hooks for hook in registered.values())

    def snapshot(self) -> Snapshot:
        """The current state of the model."""
        self._last = Snapshot(self.model, self.outside, self._last)
        return self._last

    def put_back(self, before: Snapshot) -> None:
        """Restore the model, and note which attributes had changed."""
        self.changed |= before.put_back()

    @contextlib.contextmanager
    def telling(self, recorder: Recorder | Listener) -> Iterator[None]:
        """Report calls to a recorder or listener."""
        before, self.recorder = self.recorder, recorder
        recorder.outside = self.outside
        try:
            yield
        finally:
            self.recorder = before


class WatchedForward:
    """The forward of a watched module.

    A copy that a forward makes of a module has the module's own forward; the module that copies and the copied one
    become islands.
    """

    def __init__(self, watched: Watched, module: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # libraries read the signature of forward
        self._watched, self._module, self._forward = watched, module, forward
        if "forward" not in vars(module):  # the class's own forward is unchanged
            self.watches = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report the call to the recorder, which runs the module's forward."""
        recorder = self._watched.recorder
        if recorder is None:
            return self._forward(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")  # of nn.Module's call; another than ours in a shallow copy
        if isinstance(caller, nn.Module) and caller is not self._module and vars(caller).get("forward") is self:
            recorder.on_copy(self._module)
            return self._of(caller)(*args, **kwargs)
        return recorder.on_call(self._module, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._watched.recorder is not None:
            self._watched.recorder.on_copy(self._module)
        return self._of(memo[id(self._module)]) if id(self._module) in memo else self

    def _of(self, copied: nn.Module) -> Any:
        """The same forward of a copy."""
        function = getattr(self._forward, "__func__", None)
        return self._forward if function is None else types.MethodType(function, copied)


@contextlib.contextmanager
def watching(
    model: nn.Module, *, called_by_user: bool = True, with_hooks: Mapping[nn.Module, Forward] | None = None
) -> Iterator[Watched]:
    """Watch the modules of a model, in eval mode and without the user's hooks; everything is restored at the end.

    Args:
        with_hooks: module -> its forward with hooks that are a part of it.
    """
    watched = Watched(model, called_by_user=called_by_user, with_hooks=with_hooks)
    with evaluating(model), _keeping(model):
        modules = [module for _, module in users_modules(model)]
        for module in modules:
            _take_hooks(module, type(model))
            stop_nesting(module)
            if module in watched.with_hooks:
                module.__dict__["forward"] = watched.with_hooks[module]
        forwards = [(module, module.forward) for module in modules]
        for module, forward in forwards:
            module.__dict__["forward"] = WatchedForward(watched, module, forward)
        yield watched


class Hook(NamedTuple):
    """A forward hook of the user's.

    Attributes:
        table, key: the module's dictionary that holds it, and where.
        takes_kwargs: whether it is called with keyword arguments too.
    """

    table: str
    key: int
    call: Callable[..., Any]
    takes_kwargs: bool

    @property
    def is_before(self) -> bool:
        return self.table == HOOKS[1]


def users_hooks(module: nn.Module, kind: type) -> list[Hook]:
    """The user's hooks on a module of a model of the class `kind`, not those that cast or belong to that class."""
    found = []
    for name in HOOKS:
        hooks = module.__dict__.get(name) or {}
        others = {key: hook for key, hook in hooks.items() if not isinstance(hook, OURS)}
        if others and not _belongs_to_model(others, kind):
            takes_kwargs = module.__dict__.get(f"{name}_with_kwargs") or {}
            found += [Hook(name, key, hook, key in takes_kwargs) for key, hook in others.items()]
    return found


def _take_hooks(module: nn.Module, kind: type) -> None:
    """Remove the user's hooks for the time of the context; hooks that cast or belong to the model's class stay."""
    taken = {(hook.table, hook.key) for hook in users_hooks(module, kind)}
    kept: set[int] = set()
    for name in HOOKS:
        hooks = module.__dict__.get(name) or {}
        if any((name, key) in taken for key in hooks):
            module.__dict__[name] = type(hooks)((key, hooks[key]) for key in hooks if (name, key) not in taken)
        kept.update(module.__dict__.get(name) or {})
    for name in HOW_CALLED:
        flags = module.__dict__.get(name)
        if flags and not kept.issuperset(flags):
            module.__dict__[name] = type(flags)((key, flags[key]) for key in flags if key in kept)


def _belongs_to_model(hooks: Any, kind: type) -> bool:
    """Whether hooks are part of the model's computation: those of torch, and of the package that defines its class.

    torch computes weights in hooks (old weight norm, pruning); transformers collects hidden states in them. All hooks
    of one dictionary stay, or none, which keeps their order.
    """
    package, dot, _ = kind.__module__.partition(".")
    modules = [getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks.values()]
    # A hook defined in the file of the model's class is the user's; a library defines its hooks in a module apart.
    return all(
        one.startswith("torch.nn.utils") or (dot and one.startswith(f"{package}.") and one != kind.__module__)
        for one in modules
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode, and restore each module's mode at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _keeping(model: nn.Module) -> Iterator[None]:
    """Restore attributes, buffers and random states at the end."""
    before = Snapshot(model, Outside())
    try:
        yield
    finally:
        before.put_back()

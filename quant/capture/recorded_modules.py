"""A model whose submodules tell a recorder when they are called, and whose state is put back afterwards.

Each module gets a forward of its own for the time of a capture; nothing of torch is changed, so that other models and
other threads notice nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from quant.capture.attention import stop_nesting
from quant.capture.outer_objects import Outside
from quant.capture.snapshot import Snapshot
from quant.half_precision import OwnOutputs, WideInputs

if TYPE_CHECKING:
    from quant.capture.recorder import Recorder
    from quant.capture.undisturbed import Listener

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOW_CALLED = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Which hooks are called with what, by the same keys."""
OURS = (WideInputs, OwnOutputs)
"""Hooks that only cast: they are recorded as calls."""


class Watched:
    """The modules of one model while they are watched.

    Attributes:
        recorder: is told of every call, where there is one.
        changed: dotted names of the attributes, buffers and submodules that some forward changed.
        has_run: whether the model has been called before, as far as its recordings know.
        outside: what forwards reach outside of the model.
        unlike_in_training: by dotted name, why ranges from training do not serve a layer in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.recorder: Recorder | Listener | None = None
        self.changed: set[str] = set()
        self.unlike_in_training: dict[str, str] = {}
        self.has_run = False
        self.outside = Outside()
        self._last: Snapshot | None = None

    def has_hooks_in(self, module: nn.Module) -> bool:
        """Whether hooks that belong to the model are on modules inside of a module."""
        inside = [part for part in module.modules() if part is not module]
        hooks = (part.__dict__.get(name) or {} for part in inside for name in HOOKS)
        return any(not isinstance(hook, OURS) for found in hooks for hook in found.values())

    def snapshot(self) -> Snapshot:
        """What the model holds now."""
        self._last = Snapshot(self.model, self.outside, self._last)
        return self._last

    def put_back(self, before: Snapshot) -> None:
        """Let the model hold what it held, and note what had changed."""
        self.changed |= before.put_back()

    @contextlib.contextmanager
    def telling(self, recorder: Recorder | Listener) -> Iterator[None]:
        """Let calls go to a recorder or a listener."""
        before, self.recorder = self.recorder, recorder
        recorder.outside = self.outside
        try:
            yield
        finally:
            self.recorder = before


class WatchedForward:
    """What a module has as its forward while it is watched.

    Copies that the forward makes of a module get their own forward; whoever copies, and what is copied, runs as it is.
    """

    def __init__(self, watched: Watched, module: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # forwards are asked for their signatures
        self._watched, self._module, self._forward = watched, module, forward
        if "forward" not in vars(module):  # what the class says is still so
            self.watches = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, told to the recorder."""
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
def watching(model: nn.Module) -> Iterator[Watched]:
    """Watch the modules of a model, in eval mode, without the user's hooks; all is put back."""
    watched = Watched(model)
    with evaluating(model), _keeping(model):
        for module in model.modules():
            _take_hooks(module, type(model))
            stop_nesting(module)
        forwards = [(module, module.forward) for module in model.modules()]
        for module, forward in forwards:
            module.__dict__["forward"] = WatchedForward(watched, module, forward)
        yield watched


def _take_hooks(module: nn.Module, kind: type) -> None:
    """Take away the user's hooks; those that cast and those that belong to the model's class stay."""
    kept: set[int] = set()
    for name in HOOKS:
        hooks = module.__dict__.get(name) or {}
        others = {key: hook for key, hook in hooks.items() if not isinstance(hook, OURS)}
        if others and not _belongs_to_model(others, kind):
            module.__dict__[name] = type(hooks)((key, hooks[key]) for key in hooks if key not in others)
        kept.update(module.__dict__.get(name) or {})
    for name in HOW_CALLED:
        flags = module.__dict__.get(name)
        if flags and not kept.issuperset(flags):
            module.__dict__[name] = type(flags)((key, flags[key]) for key in flags if key in kept)


def _belongs_to_model(hooks: Any, kind: type) -> bool:
    """Whether hooks are a part of what the model computes: torch's own, and those of the package that has its class.

    torch computes weights in hooks (old weight norm, pruning); transformers collects hidden states in them. Of the
    hooks of one store either all stay or none, which keeps their order.
    """
    package, dot, _ = kind.__module__.partition(".")
    modules = [getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks.values()]
    # A hook that stands beside the model's class is somebody's who looks on; a library has a module for its own.
    return all(
        one.startswith("torch.nn.utils") or (dot and one.startswith(f"{package}.") and one != kind.__module__)
        for one in modules
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and each in its own again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _keeping(model: nn.Module) -> Iterator[None]:
    """Put attributes, buffers and the state of random numbers back to what they were."""
    before = Snapshot(model, Outside())
    try:
        yield
    finally:
        before.put_back()

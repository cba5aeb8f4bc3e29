"""A model whose submodules tell a recorder when they are called, and whose state is put back afterwards.

Each module gets a forward of its own for the time of a capture; nothing of torch is changed, so that other models and
other threads notice nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from quant.arguments import copyable
from quant.capture.attention import stop_nesting
from quant.capture.outside import Outside
from quant.capture.scripted import ScriptState
from quant.capture.state import same_content
from quant.capture.surroundings import generator_states
from quant.names import full_name
from quant.objects import OPAQUE, attributes_of, content, fill

if TYPE_CHECKING:
    from quant.capture.recorder import Recorder
    from quant.capture.undisturbed import Listener

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks_with_kwargs")  # fmt: skip


class Watched:
    """The modules of one model while they are watched.

    Attributes:
        recorder: is told of every call, where there is one.
        changed: dotted names of the attributes and buffers that some forward changed.
        has_run: whether the model has been called before, as far as its recordings know.
        outside: what forwards reach outside of the model.
        unlike_in_training: dotted names of the layers to which eval mode gives larger values than training does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.recorder: Recorder | Listener | None = None
        self.changed: set[str] = set()
        self.unlike_in_training: set[str] = set()
        self.has_run = False
        self.outside = Outside()

    def has_hooks_in(self, module: nn.Module) -> bool:
        """Whether hooks that belong to the model are on modules inside of a module."""
        inside = [part for part in module.modules() if part is not module]
        return any(part.__dict__.get(name) for part in inside for name in HOOKS)

    def snapshot(self) -> Callable[[], None]:
        """What puts the model's state back to what it is now, and notes what had changed."""
        put_back = self.state()
        return lambda: self.changed.update(put_back())

    def state(self) -> Callable[[], set[str]]:
        """As `snapshot`, for a change that is none of the model's: it is told, and not noted."""
        put_back, outside = snapshot(self.model), self.outside.snapshot()
        return lambda: put_back() | outside()

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
            for name in HOOKS:
                hooks = module.__dict__.get(name)
                if hooks and not _belongs_to_model(hooks, type(model)):
                    module.__dict__[name] = type(hooks)()
            stop_nesting(module)
        forwards = [(module, module.forward) for module in model.modules()]
        for module, forward in forwards:
            module.__dict__["forward"] = WatchedForward(watched, module, forward)
        watched.outside.keep_attributes(model)
        yield watched


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
    put_back = snapshot(model)
    try:
        yield
    finally:
        put_back()


STORES = ("_parameters", "_buffers", "_modules")
_VALUES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Classes of what cannot be changed."""


def snapshot(model: nn.Module) -> Callable[[], set[str]]:
    """What puts a model's state, and that of random numbers, back to what it is now, and says what differed."""
    kept = [ScriptState(name, module) if isinstance(module, torch.jit.ScriptModule) else _ModuleState(name, module)
            for name, module in model.named_modules()]  # fmt: skip
    chance, own_chance = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()), generator_states(model)

    def put_back() -> set[str]:
        changed = {name for state in kept for name in state.put_back()}
        torch.set_rng_state(chance[0])
        random.setstate(chance[1])
        numpy.random.set_state(chance[2])
        own_chance()
        return changed

    return put_back


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN is NaN."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _own_objects(value: Any) -> list[Any]:
    """An object that a module keeps state in, and the lists, dicts and queues right in it; not what lies deeper."""
    if isinstance(value, (OPAQUE, list, dict, set)) or not (isinstance(value, deque) or hasattr(value, "__dict__")):
        return []
    return [value, *(part for part in attributes_of(value).values() if isinstance(part, (list, dict, deque)))]


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator (no generator) whose place in what it goes through can be kept."""
    if isinstance(value, OPAQUE) or not (hasattr(value, "__next__") and hasattr(value, "__iter__")):
        return False
    return copyable(value)


def _has_version(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not (tensor.is_meta or tensor.is_inference())


def _copied(value: Any) -> Any:
    """A shallow copy; those of plain types are made directly, as every module has ten empty ones for its hooks."""
    return value.copy() if type(value) in (list, dict, set, OrderedDict) else copy.copy(value)


class _ModuleState:
    """The attributes of one module, what lists, dicts and sets among them hold, and the values of its buffers."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.attributes = {key: value for key, value in vars(module).items() if key not in STORES}
        self.stores = {key: dict(vars(module)[key]) for key in STORES}
        self.held: dict[str, tuple[Any, Any]] = {}
        self.iterators: dict[str, Any] = {}
        self.objects: list[tuple[str, Any, Any]] = []
        self.tensors: dict[str, tuple[Tensor, int, Tensor]] = {}
        # By version and memory alone: copies of all weights in every recording would be too much.
        self.parameters = {key: (one, one.data_ptr(), one._version)
                           for key, one in self.stores["_parameters"].items() if _has_version(one)}  # fmt: skip
        # Most of a module's attributes are plain values and empty tables of hooks: this is asked of them first, because
        # a capture takes many snapshots.
        for key, value in {**self.attributes, **self.stores["_buffers"]}.items():
            if type(value) in _VALUES:
                continue
            if isinstance(value, (list, dict, set)):
                if key in self.attributes:
                    self.held[key] = (value, _copied(value) if value else ())
            elif isinstance(value, Tensor):
                if _has_version(value):
                    self.tensors[key] = (value, value._version, value.detach().clone())
            elif _is_iterator(value):
                self.iterators[key] = copy.copy(value)
            else:
                self.objects += [(key, one, content(one)) for one in _own_objects(value)]

    def put_back(self) -> list[str]:
        own = vars(self.module)
        now = {**{key: value for key, value in own.items() if key not in STORES}, **own["_buffers"]}
        before = {**self.attributes, **self.stores["_buffers"]}
        changed = {key for key in {*now, *before} if now.get(key, self) is not before.get(key, self)}
        for key in set(own) - set(STORES) - set(self.attributes):
            del own[key]
        own.update(self.attributes)
        for key, stored in self.stores.items():
            own[key].clear()
            own[key].update(stored)
        for key, (held, items) in self.held.items():
            if (held or items) and (held != items or list(map(id, held)) != list(map(id, items))):
                changed.add(key)
                held.clear()
                held.extend(items) if isinstance(held, list) else held.update(items)
        for key, one, (attributes, items) in self.objects:
            if not same_content(content(one), (attributes, items)):
                changed.add(key)
                fill(one, attributes, items)
        for key, iterator in self.iterators.items():
            own[key] = copy.copy(iterator)
        for key, (parameter, place, version) in self.parameters.items():
            if parameter._version != version or parameter.data_ptr() != place:
                changed.add(key)
        for key, (tensor, version, values) in self.tensors.items():
            # Batch norms update their statistics without a new version.
            if tensor._version != version or not _are_equal(tensor, values):
                changed.add(key)
                with torch.no_grad():
                    tensor.copy_(values)
        return [full_name(self.name, key) for key in changed - {"forward", "training"}]

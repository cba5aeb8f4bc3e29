"""Copies of a user's model, with readable weights where a hook or a parametrization computes them.

The older `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` recompute a weight before each forward and keep it
as a plain attribute, which torch refuses to deep-copy, and which is stale where parameters were loaded since. A copy
gets the same computation as a parametrization, which capture sees and training goes through.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook, SpectralNormStateDictHook
from torch.nn.utils.weight_norm import WeightNorm

from quant.graph_modules import begun_graph_module
from quant.rebinding import rebind
from quant.recurrent_layers import is_recurrent_layer
from quant.runtime.names import child_of
from quant.uncompiled import is_compiled, stand_in_of


def copy_model(model: nn.Module, *, training: bool = False) -> nn.Module:
    """A deep copy, in which weights that hooks computed are parametrizations, with the values of their parameters now.

    Tensors with a history, as a forward may leave on a module, are copied as values.

    Args:
        training: keep the computation in recurrent layers too, which int8 has no form of: a mask must hold in training.
            Else their weights become ordinary parameters.

    Raises:
        TypeError: an attribute cannot be copied: a generator, a lock, from Python 3.14 on an iterator of itertools.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if type(value) is OrderedDict and not value and not vars(value):
                memo[id(value)] = (
                    OrderedDict()
                )  # a dozen tables of hooks a module, on which a deep copy spends most of its time
        for value in _held(vars(module)):
            memo[id(value)] = value.detach().clone()
    _begin_by_hand(model, memo)
    with torch.no_grad():  # else copies of a scripted module's parameters would have a gradient function
        try:
            copied: nn.Module = copy.deepcopy(model, memo)
        except TypeError as error:
            raise TypeError(_uncopied(model) or str(error)) from error
    _require_gradients(model, copied)
    rebind(copied, memo)
    follow_weak_references(copied, memo)
    for module in copied.modules():
        for key, hook in hooks_of(module):
            del module._forward_pre_hooks[key]
            _parametrize(module, hook)
            recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or is_recurrent_layer(module)
            if recurrent and not training:
                _unparametrize(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a GPU wants them in one piece of memory, which a copy does not keep
    return copied


def _begin_by_hand(model: nn.Module, memo: dict[int, Any]) -> None:
    """Put objects that a deep copy fails on into its memo: see `_begun`."""
    states = []
    for module in model.modules():
        begun = _begun(module)
        if begun is not None:
            memo[id(module)] = begun[0]
            states.append(begun)
    for copied, state in states:  # once all are in the memo: one may hold another
        copied.__setstate__(copy.deepcopy(state, memo))


def _uncopied(model: nn.Module) -> str:
    """What to say of the first attribute that cannot be copied; '' where each can be by itself."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if value is module._parameters or value is module._buffers or value is module._modules:
                continue
            try:
                copy_value(value)
            except TypeError as error:
                where = f"{path or '(root)'} ({type(module).__name__})"
                return (
                    f"{where}: the attribute {name!r}, a {type(value).__name__}, cannot be copied ({error}), and "
                    "int8 is made of a copy of the model; keep it outside of the module, or give it a __deepcopy__"
                )
    return ""


def _begun(module: nn.Module) -> tuple[Any, Any] | None:
    """An empty copy of a module and its state, where `copy.deepcopy` cannot copy the module.

    These are compiled modules, those of torch.fx, whose copies lose what is not in their graph, and those whose
    `__getattr__` raises another error than AttributeError.
    """
    if is_compiled(module):
        return stand_in_of(module)
    if isinstance(module, torch.fx.GraphModule):
        return begun_graph_module(module)
    try:
        getattr(module, "__deepcopy__", None)
    except Exception:  # of the user's
        reduced: Any = module.__reduce_ex__(4)
        make, arguments, state = reduced[:3]
        return make(*arguments), state
    return None


def _require_gradients(model: nn.Module, copied: nn.Module) -> None:
    """Let parameters of copied scripted modules require gradients as the model's do."""
    for module, duplicate in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(module, torch.jit.ScriptModule):
            for one, other in zip(module.parameters(), duplicate.parameters(), strict=True):
                other.requires_grad_(one.requires_grad)


def follow_weak_references(copied: nn.Module, memo: dict[int, Any]) -> None:
    """Let weak references to parts of a model, which a deep copy does not change, refer to parts of the copy.

    Args:
        memo: of the deep copy.
    """
    for module in copied.modules():
        for name, value in vars(module).items():
            if type(value) is weakref.ref and id(value()) in memo and value() is not None:
                vars(module)[name] = weakref.ref(memo[id(value())])


def copy_value(value: Any) -> Any:
    """A deep copy of an attribute's value; tensors with a history are copied as values."""
    return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in _held(value)})


def hooks_of(module: nn.Module) -> list[tuple[int, Any]]:
    """The module's hooks of torch that compute a tensor before each forward, with their keys."""
    known = (WeightNorm, SpectralNorm, prune.BasePruningMethod)
    return [(key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, known)]


def name_of(hook: Any) -> str:
    """The attribute that a hook computes."""
    name: str = hook._tensor_name if isinstance(hook, prune.BasePruningMethod) else hook.name
    return name


@torch.no_grad()
def settled(module: nn.Module) -> nn.Module:
    """The module with ordinary parameters for what torch's hooks and parametrizations compute; itself without any."""
    if not any(hooks_of(part) or _is_parametrized(part) for part in module.modules()):
        return module
    module = copy_model(module)
    for part in module.modules():
        if _is_parametrized(part):
            _unparametrize(part)
    return module


def _is_parametrized(module: nn.Module) -> bool:
    """As torch's, without calling the user's `__getattr__`."""
    return isinstance(child_of(module, "parametrizations"), nn.ModuleDict)


def _unparametrize(module: nn.Module) -> None:
    """Remove parametrizations; torch's function would also change the class that the original module shares."""
    values = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
    del module._modules["parametrizations"]
    module.__class__ = type(module).__base__  # type: ignore[assignment]
    for name, value in values.items():
        _set(module, name, nn.Parameter(value))


def _held(tree: Any) -> Iterator[Tensor]:
    """Tensors with a history in nested containers."""
    rest, seen = [tree], set[int]()
    while rest:
        value = rest.pop()
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                yield value
        elif isinstance(value, (dict, list, tuple, set)) and value and id(value) not in seen:
            seen.add(id(value))  # one may hold itself
            rest.extend(value.values() if isinstance(value, dict) else value)


def _computed(module: nn.Module, hook: Any) -> Tensor:
    """The tensor that a hook computes now, in eval mode."""
    if isinstance(hook, WeightNorm):
        value = hook.compute_weight(module)
    elif isinstance(hook, SpectralNorm):
        value = hook.compute_weight(module, do_power_iteration=False)
    else:
        value = hook.apply_mask(module)
    computed: Tensor = value.detach().clone()
    return computed


def _forget(module: nn.Module, hook: Any) -> None:
    """Remove a hook's tensors: the computed one and its sources."""
    name = name_of(hook)
    module.__dict__.pop(name, None)
    for part in ("_g", "_v", "_orig", "_u", "_mask"):
        module._parameters.pop(name + part, None)
        module._buffers.pop(name + part, None)
        module._non_persistent_buffers_set.discard(name + part)
    if isinstance(hook, SpectralNorm):
        _drop(module._state_dict_hooks, lambda one: isinstance(one, SpectralNormStateDictHook))
        _drop(
            module._load_state_dict_pre_hooks,
            lambda one: isinstance(getattr(one, "hook", one), SpectralNormLoadStateDictPreHook),
        )


def _drop(hooks: dict[int, Any], which: Callable[[Any], bool]) -> None:
    for key in [key for key, hook in hooks.items() if which(hook)]:
        del hooks[key]


def _set(module: nn.Module, name: str, value: nn.Parameter) -> None:
    """Set a module's parameter, also in the list that recurrent layers keep."""
    setattr(module, name, value)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _parametrize(module: nn.Module, hook: Any) -> None:
    """Replace a hook by a parametrization with the same computation and parameters."""
    name = name_of(hook)
    held: dict[str, Any] = {**module._parameters, **module._buffers}
    parts = {key.removeprefix(f"{name}_"): value for key, value in held.items() if key.startswith(f"{name}_")}
    value = _computed(module, hook)
    _forget(module, hook)
    _set(module, name, nn.Parameter(value))
    if isinstance(hook, WeightNorm):
        parametrizations.weight_norm(module, name, hook.dim)
        _originals(module, name, original0=parts["g"], original1=parts["v"])
    elif isinstance(hook, SpectralNorm):
        with torch.random.fork_rng(devices=[]):  # torch begins with a random vector
            parametrizations.spectral_norm(module, name, hook.n_power_iterations, hook.eps, hook.dim)
        _originals(module, name, original=parts["orig"])
        norm: Any = module.parametrizations[name][0]  # type: ignore[index]
        if "u" in parts and hasattr(norm, "_u"):
            norm._u.copy_(parts["u"])
            norm._v.copy_(parts["v"])
    else:
        parametrize.register_parametrization(module, name, Mask(parts["mask"]), unsafe=True)
        _originals(module, name, original=parts["orig"])
        module._register_load_state_dict_pre_hook(LoadsPruned(name))


def _originals(module: nn.Module, name: str, **tensors: Any) -> None:
    """Put the user's own parameters in place of those that the parametrization created."""
    holder: Any = module.parametrizations[name]  # type: ignore[index]
    for key, tensor in tensors.items():
        holder._parameters[key] = tensor


class Mask(nn.Module):
    """The parametrization of a pruned weight: multiplication by the mask."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, zero where it is pruned."""
        return weight * self.mask


class LoadsPruned:
    """Load checkpoints of the pruned float model: renames `weight_orig` and `weight_mask`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Rename the keys."""
        new = f"{prefix}parametrizations.{self.name}"
        for old, key in ((f"{self.name}_orig", f"{new}.original"), (f"{self.name}_mask", f"{new}.0.mask")):
            if prefix + old in state_dict:
                state_dict[key] = state_dict.pop(prefix + old)

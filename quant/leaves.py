"""The modules that capture records as one call: torch's own layers with their class's computation unchanged."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from quant.int8_classes import has_static_layer
from quant.kernels.registry import ClassRegistry, described, full_name_of
from quant.recurrent_layers import is_recurrent_class
from quant.runtime.layers.quant_module import QuantModule

COMPOSITE = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
             nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # fmt: skip
HARMLESS = {"__init__", "__repr__", "extra_repr", "reset_parameters", "_get_name", "__setstate__", "__getstate__",
            "__module__", "__doc__", "__annotations__", "__parameters__", "__orig_bases__", "__constants__",
            "__abstractmethods__", "_abc_impl", "__firstlineno__", "__static_attributes__", "__dict__", "__weakref__",
            "_load_from_state_dict", "_save_to_state_dict", "train", "eval"}  # fmt: skip
"""What a subclass may define without changing what its layer computes."""

DYNAMIC = (nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)
"""Layers whose int8 form needs no ranges, as recurrent ones: convert makes those dynamic that have no static form."""


def _as_leaf(kind: type, value: Any) -> type[nn.Module]:
    """A registered entry, checked to be a class of modules."""
    if value is not kind:
        raise ValueError(f"leaf {full_name_of(kind)}: expected that class, got {described(value)}")
    if not issubclass(kind, nn.Module):
        raise TypeError(f"leaf {full_name_of(kind)}: expected a subclass of torch.nn.Module")
    return kind  # type: ignore[no-any-return]


_REGISTERED: ClassRegistry[type[nn.Module]] = ClassRegistry("leaf", "octet.leaves", {}, _as_leaf)


def register_leaf(kind: type[nn.Module]) -> type[nn.Module]:
    """Record modules of this class as one opaque float call; a decorator, or a call of its own.

    This is for layers whose forward can be captured but should not be: they run as they are, in float. An installed
    package needs no call: it provides an entry point of the group "octet.leaves" with the class's full name.

    Raises:
        TypeError: it is no class of modules.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_leaf: expected a class, got an object of {described(kind)}")
    return _REGISTERED.add(kind, kind)


def base_layer(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch.nn, or the registered one with an int8 layer, whose computation the module has unchanged.

    None where there is none, or a subclass changes the computation.
    """
    own: Any = type(module)
    replaced = _methods(own).intersection(vars(module))
    if any(not hasattr(vars(module)[name], "watches") for name in replaced):
        return None  # forward, or a method that it calls, was replaced on the object
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn.modules") or is_recurrent_class(kind) or has_static_layer(kind):
            return kind
        if kind.__module__ == parametrize.__name__:
            return None
        if not _harmless(kind):
            return None
    return None


@functools.lru_cache(maxsize=1024)
def _methods(kind: Any) -> frozenset[str]:
    """The names of a class's methods; cached, as it is needed at every captured call."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def _harmless(kind: type) -> bool:
    parents = kind.__mro__[1:]
    changed = [name for name in vars(kind) if name not in HARMLESS]
    # A parent's forward never calls a method that no parent has.
    return not any(hasattr(parent, name) for name in changed for parent in parents)


def is_registered(module: nn.Module) -> bool:
    """Whether the module's class or one above it is registered as a leaf, or is int8 already."""
    return isinstance(module, QuantModule) or _REGISTERED.nearest(type(module)) is not None


def is_dynamic(module: nn.Module) -> bool:
    """Whether convert leaves the module to dynamic quantisation."""
    base = base_layer(module)
    return base is not None and (base in DYNAMIC or is_recurrent_class(base)) and not is_registered(module)


def is_attention(module: nn.Module) -> bool:
    """Whether capture sees the module's projections one by one (`attention.py`)."""
    if base_layer(module) is not nn.MultiheadAttention or is_registered(module):
        return False
    known: Any = module
    return known.bias_k is None and not known.add_zero_attn and "parametrizations" not in known._modules


def is_leaf(module: nn.Module) -> bool:
    """Whether capture takes a call of the module as one node."""
    if is_registered(module):
        return True
    base = base_layer(module)
    if base is None or issubclass(base, COMPOSITE) or base is nn.Module:
        return False
    if base is nn.MultiheadAttention and is_attention(module):
        return False
    return "parametrizations" not in module._modules

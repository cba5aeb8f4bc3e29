"""The float classes that have an int8 layer of somebody's, and which of them have one for static quantisation too.

`quant/nn/registry.py` fills in those of torch, and has what users call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from quant.kernels.registry import ClassRegistry, described, full_name_of
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.static_module import StaticQuantModule

Maker: TypeAlias = "Callable[[Any, Any], QuantModule]"
"""(float module, its `QConfig`) -> the int8 module that stands in for it."""


def _as_maker(kind: type, value: Any) -> Maker:
    """What was registered, as what makes the int8 module."""
    what = f"int8 layer of {full_name_of(kind)}"
    if not issubclass(kind, nn.Module):
        raise TypeError(f"{what}: expected a subclass of torch.nn.Module")
    if isinstance(value, type) and not issubclass(value, QuantModule):
        raise TypeError(f"{what}: expected a subclass of quant.nn.QuantModule, got {described(value)}")
    if not callable(value):
        raise TypeError(f"{what}: expected a class or a function of a module and a QConfig, got {described(value)}")
    if isinstance(value, type) and issubclass(value, StaticQuantModule):
        for name in ("dynamic", "static"):
            if getattr(value, name) is getattr(StaticQuantModule, name):
                raise TypeError(f"{what}: {described(value)} has no {name}, which quant.nn.StaticQuantModule describes")
    return getattr(value, "from_float", value)  # type: ignore[no-any-return]


LAYERS: ClassRegistry[Maker] = ClassRegistry("int8 layer", "octet.layers", {}, _as_maker)
"""What makes the int8 layer of a class, but for recurrent ones (`recurrent_layers.py`)."""


def static_layer(kind: type) -> type[StaticQuantModule] | None:
    """The int8 class for static quantisation that is registered for this very class; None where there is none."""
    make: Any = LAYERS.get(kind)
    made = make if isinstance(make, type) else getattr(make, "__self__", None)  # `from_float` is bound to its class
    return made if isinstance(made, type) and issubclass(made, StaticQuantModule) else None


def has_static_layer(kind: type) -> bool:
    """Whether modules of this very class are one int8 layer in static quantisation and training."""
    return static_layer(kind) is not None

"""Registered int8 layers of float modules: how they are made, and what they compute in a simulation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.int8_classes import Maker
from quant.kernels.registry import described, full_name_of
from quant.nn.base import adopt
from quant.recipe import QConfig
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.static_module import StaticQuantModule
from quant.runtime.names import attribute, full_name
from quant.runtime.programs import RESERVED


def registered_layer(module: nn.Module, qconfig: QConfig, make: Maker) -> StaticQuantModule:
    """The int8 layer of a float module, which may be one that runs a graph.

    Args:
        make: what is registered for the module's class.

    Raises:
        ValueError: a parameter is not finite, or the layer does not tell the real values of one.
    """
    module = _plain(module)
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"its {name} holds NaN or inf, expected finite values; check the training")
    layer = make(module, qconfig)
    if not isinstance(layer, StaticQuantModule):
        raise ValueError(f"{described(make)} returned a {described(layer)}, expected a quant.nn.StaticQuantModule")
    for name, parameter in module.named_parameters():
        value = _real(layer, name)
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            raise ValueError(
                f"{full_name_of(type(layer))} has {_told(value)} as {name!r}, expected the real values of the float "
                f"layer's parameter of that name, shape {tuple(parameter.shape)}, which simulation and training use"
            )
    return layer


def placed(layer: StaticQuantModule, module: nn.Module, name: str, backend: str | None) -> StaticQuantModule:
    """The layer with what is the user's of the float module that it stands for."""
    adopt(layer, module, name)
    layer.__dict__.pop("forward", None)  # of a module that was captured by itself
    layer._modules.pop(RESERVED, None)
    for inner, part in layer.named_modules():
        if isinstance(part, QuantModule):
            part.backend, part.layer_name = backend or "", full_name(name, inner)
    return layer


def simulated_registered(
    module: nn.Module,
    qconfig: QConfig | None,
    make: Maker,
    x: Tensor,
    through: Callable[[Tensor, Tensor], Tensor] = lambda parameter, value: value,
) -> Tensor:
    """What a registered layer's int8 form gives before it rounds to its output's range.

    Args:
        module, qconfig, make: as for `registered_layer`.
        x: rounded to the range of its input.
        through: (parameter, its real value in int8) -> the value, with a gradient to the parameter in training.
    """
    assert qconfig is not None
    with torch.no_grad():
        layer = registered_layer(module, qconfig, make)
        values = {name: _real(layer, name) for name, _ in module.named_parameters()}
    rounded = {name: through(parameter, values[name]) for name, parameter in module.named_parameters()}
    return layer.simulated(_with_parameters(_plain(module), rounded), x)


def _plain(module: nn.Module) -> nn.Module:
    """The user's module without the runner of one that is captured by itself."""
    plain = copy.copy(module)
    plain.__dict__.pop("forward", None)
    plain.__dict__["_modules"] = dict(module._modules)
    plain._modules.pop(RESERVED, None)
    return plain


def _with_parameters(module: nn.Module, values: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """A shallow copy of a module with other tensors as its parameters, by their dotted names."""
    other = copy.copy(module)
    other.__dict__["_parameters"] = {
        name: values.get(full_name(prefix, name), own) for name, own in module._parameters.items()
    }
    other.__dict__["_modules"] = {
        name: child if child is None else _with_parameters(child, values, full_name(prefix, name))
        for name, child in module._modules.items()
    }
    return other


def _real(layer: nn.Module, name: str) -> Any:
    try:
        return attribute(layer, name)
    except AttributeError:
        return None


def _told(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"

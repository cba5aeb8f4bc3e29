"""Buffers that no file has, because the model computes them when it is made: tables of rotary embeddings.

On the meta device they have no values. Models of transformers compute them again in `initialize_weights`, which is how
`from_pretrained` fills them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import full_name


class NoValues(ValueError):
    """A buffer on the meta device has no values anywhere."""


@torch.no_grad()
def fill_derived(model: nn.Module) -> None:
    """Let the model compute its non-persistent buffers on the meta device.

    Raises:
        NoValues: it has no way to.
    """
    for module in list(model.modules()):  # the outermost that can first
        if not callable(getattr(type(module), "initialize_weights", None)):  # of the class: `__getattr__` is the user's
            continue
        initialize: Any = module.initialize_weights
        holders = [part for part in module.modules() if _without_values(part)]
        if holders and _takes_nothing(initialize):
            _initialize(module, initialize, holders)
    left = [full_name(name, key) for name, module in model.named_modules() for key in _without_values(module)]
    if left:
        raise NoValues(
            f"buffer {left[0]!r} is on the meta device and not persistent, so that no file has its values; "
            "make the model with its buffers on the CPU and its parameters alone on the meta device, for "
            "instance by accelerate.init_empty_weights(include_buffers=False)"
        )


def _initialize(model: nn.Module, initialize: Any, holders: Sequence[nn.Module]) -> None:
    """Call transformers' method, which passes over marked modules; what it does not write becomes meta again."""
    for module in model.modules():
        module._is_hf_initialized = module not in holders  # type: ignore[assignment]
    empty: dict[tuple[nn.Module, str], tuple[Tensor, Tensor, int]] = {}
    for module in holders:
        for key in _without_values(module):
            buffer = module._buffers[key]
            assert buffer is not None
            real = torch.empty_like(buffer, device="cpu")
            real.fill_(float("nan") if real.is_floating_point() else 1)
            module._buffers[key] = real
            empty[module, key] = buffer, real, real._version
    with _set_aside(holders):
        initialize()
    for (module, key), (buffer, real, version) in empty.items():
        filled = module._buffers[key]
        assert filled is not None
        if filled is real and (bool(torch.isnan(real).any()) or (real._version == version and bool((real == 1).all()))):
            module._buffers[key] = buffer
    for module in model.modules():
        del module._is_hf_initialized


@contextlib.contextmanager
def _set_aside(holders: Iterable[nn.Module]) -> Iterator[None]:
    """Put meta tensors in place of what these modules have loaded: the method draws parameters anew beside buffers, as
    those of a table with a buffer that scales it.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in {part for holder in holders for part in holder.modules()}:
        held: list[tuple[dict[str, Any], set[str]]] = [(module._parameters, set())]
        if not isinstance(module, QuantModule):  # its weight is computed from its buffers at each read, and is a copy
            held.append((module._buffers, module._non_persistent_buffers_set))
        kept.extend(
            (own, key, one) for own, but in held for key, one in own.items() if one is not None and key not in but
        )
    try:
        for own, key, one in kept:
            empty = torch.empty_like(one, device="meta")
            own[key] = nn.Parameter(empty, one.requires_grad) if isinstance(one, nn.Parameter) else empty
        yield
    finally:
        for own, key, one in kept:
            own[key] = one


def _takes_nothing(method: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments, as transformers' is; models of others have methods of that name."""
    needed = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    return all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed)


def _without_values(module: nn.Module) -> list[str]:
    names = module._non_persistent_buffers_set
    return [
        key for key, one in module._buffers.items() if key in names and one is not None and one.device.type == "meta"
    ]

"""Buffers that no checkpoint has, because the model computes them when it is made: tables of rotary embeddings.

On the meta device they have no values. Models of transformers compute them again in `initialize_weights`, which is how
`from_pretrained` fills them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.runtime.names import full_name
from quant.shards.reader import ShardError


@torch.no_grad()
def fill_derived(model: nn.Module) -> None:
    """Let the model compute its non-persistent buffers on the meta device.

    Raises:
        ShardError: it has no way to.
    """
    holders = {name: module for name, module in model.named_modules() if _without_values(module)}
    if not holders:
        return
    initialize = getattr(model, "initialize_weights", None)
    if initialize is not None:
        _initialize(model, initialize, holders)
    left = [full_name(name, key) for name, module in holders.items() for key in _without_values(module)]
    if left:
        raise ShardError(
            f"buffer {left[0]!r} is on the meta device and not persistent, so that no checkpoint has its values; "
            "make the model with its buffers on the CPU and its parameters alone on the meta device, for "
            "instance by accelerate.init_empty_weights(include_buffers=False)"
        )


def _initialize(model: nn.Module, initialize: Any, holders: dict[str, nn.Module]) -> None:
    """Call transformers' method, which passes over marked modules; what it does not write becomes meta again."""
    for module in model.modules():
        module._is_hf_initialized = module not in holders.values()  # type: ignore[assignment]
    empty: dict[tuple[nn.Module, str], Tensor] = {}
    for module in holders.values():
        for key in _without_values(module):
            buffer = module._buffers[key]
            assert buffer is not None
            empty[module, key] = buffer
            real = torch.empty_like(buffer, device="cpu")
            module._buffers[key] = real.fill_(float("nan")) if real.is_floating_point() else real.fill_(_UNWRITTEN)
    initialize()
    for (module, key), buffer in empty.items():
        filled = module._buffers[key]
        assert filled is not None
        unwritten = torch.isnan(filled) if filled.is_floating_point() else filled == _UNWRITTEN
        if bool(unwritten.any()):
            module._buffers[key] = buffer
    for module in model.modules():
        del module._is_hf_initialized


_UNWRITTEN = 85
"""Stands in integer buffers for a value that was not written."""


def _without_values(module: nn.Module) -> list[str]:
    names = module._non_persistent_buffers_set
    return [
        key for key, one in module._buffers.items() if key in names and one is not None and one.device.type == "meta"
    ]

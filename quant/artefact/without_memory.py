"""A float model on the meta device, as `load` may be given it: memory for what a file holds, and for nothing else.

A layer that the file has as integers gets its float weights for as long as an int8 one is made in its place. They are
zeros, which take memory only where something is written.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quant.derived_buffers import fill_derived


def give_memory(modules: Iterable[nn.Module]) -> None:
    """Put zeros on the CPU in place of parameters and persistent buffers on the meta device; tied ones stay one."""
    given: dict[Tensor, Tensor] = {}
    for module in modules:
        for key, held in list(module._parameters.items()):
            if held is not None and held.is_meta:
                if held not in given:
                    given[held] = nn.Parameter(_zeros(held), held.requires_grad)
                module._parameters[key] = given[held]  # type: ignore[assignment]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta and key not in module._non_persistent_buffers_set:
                module._buffers[key] = given.setdefault(buffer, _zeros(buffer))


def finish(model: nn.Module) -> None:
    """Give memory to what stays float, and let the model compute the buffers that are in no file.

    Raises:
        NoValues: it has no way to.
    """
    give_memory(model.modules())
    fill_derived(model)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, device="cpu")

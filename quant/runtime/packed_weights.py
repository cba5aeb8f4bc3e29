"""The packed weights of a model, which no buffer of it holds: bytes of them by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from quant.kernels.packed import packed_bytes
from quant.runtime.layers.weighted import StaticLayer


def packed_weights(model: nn.Module) -> Mapping[str, int]:
    """Dotted name of a module -> bytes of the packed weights that this process holds for it, where there are any.

    A tensor of several modules counts at the first.
    """
    found: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for name, module in model.named_modules():
        new = {(one.data_ptr(), one.nbytes): one for one in _int8_tensors(module)}
        size = packed_bytes(one for place, one in new.items() if place not in seen)
        seen |= new.keys()
        if size:
            found[name] = size
    return found


def _int8_tensors(module: nn.Module) -> Iterator[Tensor]:
    """What a module itself may give to a kernel as a weight."""
    own = (*module.buffers(recurse=False), *module.parameters(recurse=False))
    derived = module.derived_weights() if isinstance(module, StaticLayer) else ()
    for one in (*own, *derived):
        if (
            one.dtype in (torch.int8, torch.uint8) and one.device.type == "cpu" and type(one.detach()) is Tensor
        ):  # no stand-in
            yield one

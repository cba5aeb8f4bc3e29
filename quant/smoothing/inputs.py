"""What the linear layers and convolutions of a float model get for some batches: extremes by channel, and some rows.

Layers that are called one after another with the same tensor (query, key and value; gate and up) form a group: their
input is scaled once for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 128
"""Rows of a linear layer's input that are kept. The error of an output is a mean over them."""

SAMPLES = 8
"""Samples of a convolution's input that are kept."""


@dataclass
class Seen:
    """The inputs of a group of layers.

    Attributes:
        layers: their names.
        low, high: of linear layers the extremes of each channel, float32 (in,); of convolutions those of all, ().
        kept: some rows (n, in); of convolutions the first sample of some calls.
        apart: whether some call showed that its layers have not always the same input.
    """

    layers: list[str]
    low: Tensor
    high: Tensor
    kept: list[Tensor] = field(default_factory=list)
    apart: bool = False


class Watch:
    """Notes the inputs of layers while a model runs.

    Attributes:
        names: of the layers, by the id of the module.
    """

    def __init__(self, names: Mapping[int, str], calls: int) -> None:
        """`calls`: how many batches will come; each gives its share of the rows."""
        self.names, self._share = names, max(ROWS // calls, 1)
        self._group_of: dict[str, Seen] = {}
        self._last: tuple[Tensor, Seen] | None = None

    def groups(self) -> list[Seen]:
        """The groups of layers, in the order of their first calls."""
        return list({id(seen): seen for seen in self._group_of.values()}.values())

    def note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before a layer's forward."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or not x.numel():
            return
        name, last = self.names[id(module)], self._last
        known = self._group_of.get(name)
        if last is not None and last[0] is x and isinstance(module, nn.Linear):
            self._join(name, known, last[1])
            return
        if known is not None and known.layers[0] != name:
            known.apart = True
        if known is None:
            zeros = x.new_zeros(x.shape[-1] if isinstance(module, nn.Linear) else ())
            known = self._group_of[name] = Seen([name], zeros, zeros)
        self._last = (x, known) if isinstance(module, nn.Linear) else None
        self._observe(x.detach(), known, module)

    def _join(self, name: str, known: Seen | None, group: Seen) -> None:
        """Take a layer that was called with the tensor of the call before into the group of that call's layer."""
        if known is None:
            group.layers.append(name)
            self._group_of[name] = group
        elif known is not group:
            known.apart = group.apart = True

    def _observe(self, x: Tensor, seen: Seen, module: Any) -> None:
        if not isinstance(module, nn.Linear):
            low, high = torch.aminmax(x)
            if len(seen.kept) < SAMPLES:
                seen.kept.append((x[:1] if x.dim() == module.weight.dim() else x[None]).clone())
        else:
            rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
            low, high = torch.aminmax(rows, dim=0)
            count = min(self._share, len(rows), ROWS - sum(map(len, seen.kept)))
            if count > 0:
                seen.kept.append(rows[torch.linspace(0, len(rows) - 1, count).long()])
        seen.low, seen.high = torch.minimum(seen.low, low), torch.maximum(seen.high, high)


@contextlib.contextmanager
def watching(model: nn.Module, names: list[str], calls: int) -> Iterator[Watch]:
    """Note what the named layers of a model get, as long as this lasts."""
    modules = [model.get_submodule(name) for name in names]
    watch = Watch({id(module): name for module, name in zip(modules, names, strict=True)}, calls)
    hooks = [module.register_forward_pre_hook(watch.note, with_kwargs=True) for module in modules]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()

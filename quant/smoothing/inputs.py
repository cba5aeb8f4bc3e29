"""What the linear layers and convolutions of a float model get for some batches: extremes by channel, and some rows.

Layers that are called one after another with the same tensor (query, key and value; gate and up) form a group: their
input is scaled once for all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 128
"""Rows of a linear layer's input that are kept. The error of an output is a mean over them."""

SAMPLES = 8
"""Samples of a convolution's input that are kept, of large ones fewer."""

KEPT = 2**25
"""Elements of all convolutions' inputs together that are kept, 128 MiB: each has the same share. Where a single sample
is larger, the middle of it is kept."""


@dataclass
class Seen:
    """The inputs of a group of layers.

    Attributes:
        layers: their names.
        low, high: of linear layers the extremes of each channel, float32 (in,); of convolutions those of all, ().
        kept: some rows (n, in); of convolutions the first sample of some calls.
        apart: whether some call showed that its layers have not always the same input, or that a weight is written to.
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
        self.names, self._share = names, max(ROWS // max(calls, 1), 1)
        self._elements = KEPT // max(len(names), 1)
        self._group_of: dict[str, Seen] = {}
        self._last: tuple[Tensor, int, Seen] | None = None

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
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside of vmap its values cannot be kept
            if known is not None:
                known.apart = True
            return
        if last is not None and last[0] is x and last[1] == _version(x) and isinstance(module, nn.Linear):
            self._join(name, known, last[2])
            return
        if known is not None and known.layers[0] != name:
            known.apart = True
        if known is None:
            zeros = x.new_zeros(x.shape[-1] if isinstance(module, nn.Linear) else ())
            known = self._group_of[name] = Seen([name], zeros, zeros)
        self._last = (x, _version(x), known) if isinstance(module, nn.Linear) else None
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
            sample = x[:1] if x.dim() == module.weight.dim() else x[None]
            if len(seen.kept) < min(SAMPLES, max(self._elements // sample.numel(), 1)):
                seen.kept.append(_middle(sample, self._elements, module).clone())
        else:
            rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
            low, high = torch.aminmax(rows, dim=0)
            count = min(self._share, len(rows), ROWS - sum(map(len, seen.kept)))
            if count > 0:
                seen.kept.append(rows[torch.linspace(0, len(rows) - 1, count).long()])
        seen.low, seen.high = torch.minimum(seen.low, low), torch.maximum(seen.high, high)


def _version(x: Tensor) -> int:
    """A number that changes with each write to the tensor; tensors of inference mode have none."""
    return 0 if x.is_inference() else x._version


def _middle(sample: Tensor, elements: int, module: Any) -> Tensor:
    """The middle of a convolution's sample (1, in, ...), of about so many elements, and no smaller than the kernel."""
    share = (elements / sample.numel()) ** (1 / (sample.dim() - 2))
    for dim, (kernel, dilation) in enumerate(zip(module.kernel_size, module.dilation, strict=True), start=2):
        size = sample.shape[dim]
        length = min(max(math.floor(size * share), dilation * (kernel - 1) + 1), size)
        sample = sample.narrow(dim, (size - length) // 2, length)
    return sample


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

"""Buffers that hold statistics: they stay float32, and take their shape from the state that is loaded.

Two things torch.nn.Module does to every buffer are wrong for statistics. `model.half()` would round a range to 11 bits
and turn 70000 into inf; and a buffer with a row per channel, whose number is only known after the first batch, could
not be loaded into a fresh module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everybody


class Stateful(nn.Module):
    """A module whose floating buffers keep their dtype and whose first dimension is adopted on loading.

    Attributes:
        name: of the layer observed, for messages. Set by whoever inserts the module; not in state_dict.
    """

    name: str = ""

    def _where(self) -> str:
        """How messages begin: the class, and the layer when its name is known."""
        kind = type(self).__name__
        return f"{kind} of layer {self.name!r}" if self.name else kind

    def is_untouched(self) -> bool:
        """Whether a call of it is its class's forward alone: no hooks, its own or everybody's, and no other forward."""
        return not (
            self._forward_hooks
            or self._forward_pre_hooks
            or "forward" in self.__dict__
            or everybody._global_forward_hooks
            or everybody._global_forward_pre_hooks
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Stateful:
        dtypes = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != dtype:
                self._buffers[name] = exact[name].to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self._buffers.items():
            stored = state_dict.get(prefix + name)
            if buffer is None or not isinstance(stored, Tensor) or stored.shape == buffer.shape:
                continue
            # Only the number of rows may differ; another number of bins is an error that torch words well.
            if self._rows_may_change and stored.dim() == buffer.dim() > 0 and stored.shape[1:] == buffer.shape[1:]:
                self._buffers[name] = buffer.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _rows_may_change(self) -> bool:
        raise NotImplementedError


def fresh(like: Tensor, shape: tuple[int, ...], fill: float | int, device: torch.device) -> Tensor:
    """A new buffer of `like`'s dtype.

    Made outside inference mode: a buffer born inside it could never be updated again outside.
    """
    if not torch.is_inference_mode_enabled():
        return torch.full(shape, fill, dtype=like.dtype, device=device)
    with torch.inference_mode(False):
        return torch.full(shape, fill, dtype=like.dtype, device=device)


def buffers_of(module: nn.Module, *names: str) -> list[Tensor]:
    """Buffers by their names: an attribute of a module takes ten times as long, which a small layer notices."""
    known = module._buffers
    return [known[name] for name in names]  # type: ignore[misc]

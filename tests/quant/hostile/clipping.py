"""What fixed ranges leave of a float model: its layers read nothing that lies outside of what calibration brought them.

A few calls do not show every value that comes later. Whatever cuts values off at the ends of the ranges is as far from
float as this is, and as near to this as rounding lets it be; a model that computes something else is far from both.
The user's own forward runs here, so it knows nothing of what a capture made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Ranges = dict[str, tuple[float, float]]
"""Smallest and largest value that each layer read, by its name."""


def ranges_read(model: nn.Module, run: Callable[[], None]) -> Ranges:
    """What the layers of `model` read while `run` calls it."""
    found: Ranges = {}

    def look(name: str, x: Tensor) -> Tensor:
        low, high = found.get(name, (0.0, 0.0))
        finite = x.detach()[torch.isfinite(x)]
        if finite.numel():
            found[name] = min(low, float(finite.min())), max(high, float(finite.max()))
        return x

    with _reading(model, look):
        run()
    return found


@contextmanager
def clipping(model: nn.Module, ranges: Ranges) -> Iterator[None]:
    """Let the layers of `model` read what lies in `ranges`, and the ends of these for what does not."""

    def clip(name: str, x: Tensor) -> Tensor:
        return x.clamp(*ranges[name]) if name in ranges else x

    with _reading(model, clip):
        yield


@contextmanager
def _reading(model: nn.Module, read: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Let each layer with parameters take what `read` makes of its first argument."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
            plain = bool(args) and type(args[0]) is Tensor and args[0].is_floating_point() and args[0].numel() > 0
            return (read(name, args[0]), *args[1:]) if plain else None

        return before

    with ExitStack() as undo:
        for name, module in model.named_modules():
            if type(module).__module__.startswith("torch.nn.modules.") and [*module.parameters(recurse=False)]:
                undo.callback(module.register_forward_pre_hook(hook(name)).remove)
        yield

"""The user's own forward of a module, run as it is around int8 layers."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.graph import CaptureMismatch

_falling_back: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("octet_falling_back", default=None)
"""While a user's forward runs as it is, the outputs of layers whose weight has a batch norm that has yet to come."""

_watched: contextvars.ContextVar[tuple[Tensor, ...]] = contextvars.ContextVar("octet_watched_norms", default=())
"""Running means that a `NormWatch` further out looks for."""

FOLDED = (
    "a batch norm is a part of the int8 weight of the layer before it, and this call leaves it out or computes "
    "something between the two; leave the layer float by the recipe, or prepare the model with such calls alone"
)


def is_falling_back() -> bool:
    """Whether this call comes from a user's forward that runs as it is, around int8 layers."""
    return not torch.compiler.is_compiling() and _falling_back.get() is not None


@contextlib.contextmanager
def falling_back() -> Iterator[None]:
    """Let parts of the model that the user's forward calls run as they are where they have no program of their own.

    Raises:
        CaptureMismatch: a layer gave an output with its batch norm in it that no batch norm took.
    """
    outer = _falling_back.get()
    waiting: list[Tensor] = [] if outer is None else outer
    token = _falling_back.set(waiting)
    try:
        yield
    finally:
        _falling_back.reset(token)
    if outer is None and waiting:
        raise CaptureMismatch(FOLDED)


def gives_normed(y: Tensor) -> None:
    """Note the output of a layer that has its batch norm in its weight."""
    waiting = _falling_back.get()
    if waiting is not None:
        waiting.append(y)


def takes_normed(x: Tensor) -> None:
    """Hold what comes to a batch norm that is a part of a weight against what the layer gave.

    Raises:
        CaptureMismatch: it is something else.
    """
    waiting = _falling_back.get()
    if waiting is None:
        return
    place = next((place for place, one in enumerate(waiting) if one is x), None)
    if place is None:
        raise CaptureMismatch(FOLDED)
    del waiting[place]


class FoldedNorm(nn.Identity):
    """Stands where a batch norm was that is a part of a weight now."""

    def forward(self, input: Tensor) -> Tensor:
        """The input."""
        if is_falling_back():
            takes_normed(input)
        return input


class NormWatch(TorchFunctionMode):
    """Sees the calls of F.batch_norm on statistics that do nothing any more, because a weight has them.

    Args:
        statistics: running means.
    """

    def __init__(self, statistics: Sequence[Tensor]) -> None:
        super().__init__()
        self.statistics = statistics

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = {**dict(zip(("input", "running_mean"), args, strict=False)), **kwargs}
            if any(given.get("running_mean") is one for one in self.statistics):
                takes_normed(given["input"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def _watching(statistics: Sequence[Tensor]) -> Iterator[None]:
    """A `NormWatch` for what none further out looks for."""
    known = _watched.get()
    new = [one for one in statistics if not any(one is other for other in known)]
    if not new:
        yield
        return
    token = _watched.set((*known, *new))
    try:
        with NormWatch(new):
            yield
    finally:
        _watched.reset(token)


def run_own_forward(
    root: nn.Module,
    own: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mismatch: CaptureMismatch,
    statistics: Sequence[Tensor] = (),
) -> Any:
    """The forward that the user's module has: its class's, or one that was set on it.

    What it raises has the mismatch as its cause: a call that no program stands for may be one that nobody meant.

    Args:
        statistics: running means of batch norms that weights have in them, for `NormWatch`.
    """
    with falling_back(), _watching(statistics):
        try:
            return type(root).forward(root, *args, **kwargs) if own is None else own(*args, **kwargs)
        except CaptureMismatch:
            raise
        except Exception as error:
            raise error from mismatch

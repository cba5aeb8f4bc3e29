"""Forwards of modules of a prepared model that wait for a call, to add a program for it."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from quant.runtime.arguments import parameters_of, signature_of


class WaitingForward:
    """What a module has as its forward until a call of it is captured.

    Attributes:
        own_forward: the forward that the user had set on the module itself, if any.
        watches: the module, whose class still says what it computes (`leaves.base_layer`).
        simulates: whether it knows what a converted model computes here, so that it stays in simulations.
    """

    simulates: ClassVar[bool] = False

    def __init__(self, module: nn.Module) -> None:
        self.watches = module
        self.own_forward = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, or that of a shallow copy of it, whose attributes are its own."""
        caller = sys._getframe(1).f_locals.get("self")  # of nn.Module's call
        if isinstance(caller, nn.Module) and caller is not self.watches and vars(caller).get("forward") is self:
            return self.as_it_is(args, kwargs, of=caller)
        return self.called(args, kwargs)

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, where the module itself is called."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the user's forward, which libraries ask for."""
        if self.own_forward is not None:
            return inspect.signature(self.own_forward)
        return signature_of(self.watches).replace(parameters=parameters_of(self.watches))

    def as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, of: nn.Module | None = None) -> Any:
        """Run the user's forward, of the module or `of` a copy."""
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        module = self.watches if of is None else of
        return type(module).forward(module, *args, **kwargs)

    def add_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Capture a call; afterwards the program runs in place of this forward, unless there can be none."""
        raise NotImplementedError


def waiting(module: nn.Module) -> WaitingForward | None:
    """The forward that waits for calls of a module, or None."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, WaitingForward) else None


def stop_waiting(model: nn.Module, *, simulates: bool = False) -> dict[nn.Module, WaitingForward]:
    """Let modules of a model run the user's own forwards; returns the forwards that waited for calls.

    Args:
        simulates: leave those that stay in simulations.
    """
    stopped: dict[nn.Module, WaitingForward] = {}
    for module in model.modules():
        forward = waiting(module)
        if forward is not None and not (simulates and forward.simulates):
            stopped[module] = forward
            remove(module)
    return stopped


def remove(module: nn.Module) -> None:
    """Let a module that waits run the user's own forward."""
    forward = module.__dict__.pop("forward")
    if forward.own_forward is not None:
        module.__dict__["forward"] = forward.own_forward


@contextlib.contextmanager
def not_waiting(model: nn.Module, *, simulates: bool = False) -> Iterator[None]:
    """As `stop_waiting`, within a context."""
    stopped = stop_waiting(model, simulates=simulates)
    try:
        yield
    finally:
        for module, forward in stopped.items():
            module.__dict__["forward"] = forward

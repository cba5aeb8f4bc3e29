"""Operators inside of the transforms of torch.func: `grad`, `vjp` and `jvp` are refused, as no derivative goes through
integers and zeros would come out; values that are constants to such a transform pass, and so does `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

KEY = "FuncTorchDynamicLayerBackMode"
"""Where torch comes by when a call leaves the innermost transform; calls outside of transforms never do."""

OF_TRAINING = ("fake_quantize", "masked_gradient")
"""Operators within a `torch.autograd.Function`, which has their gradient."""


def refuse_derivatives(library: torch.library.Library, names: Iterable[str]) -> None:
    """Let operators say that they have no derivatives, where torch.func asks for them."""
    for name in names:
        if name not in OF_TRAINING:
            library.impl(name, _refusing(name), KEY)


def _refusing(name: str) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

    def call(*args: Any) -> Any:
        arguments = [constants(one, name) for one in args]
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return getattr(torch.ops.octet, name)(*arguments)

    return call


def constants(argument: Any, name: str) -> Any:
    """An argument without the wrappers of transforms, which are constants to all of them.

    Raises:
        TypeError: a transform differentiates by it.
    """
    if isinstance(argument, (list, tuple)):
        return [constants(one, name) for one in argument]
    if torch.compiler.is_compiling():
        return argument
    while isinstance(argument, Tensor) and torch._C._functorch.is_gradtrackingtensor(argument):
        if argument.requires_grad or forward_ad.unpack_dual(argument).tangent is not None:
            raise TypeError(
                "it is called inside of a transform of torch.func that differentiates (grad, vjp, jvp, ...), and "
                f"octet::{name} has no derivatives: differentiate the float model, or one of quant.prepare_qat, or "
                "give the integers values that do not depend on what is differentiated by"
            )
        argument = torch._C._functorch.get_unwrapped(argument)
    return argument

"""Calls inside of the transforms of torch.func, for which operators on integers and observers have no rules."""

from __future__ import annotations

from typing import Any

import torch


def explain_transform(error: RuntimeError, who: str) -> None:
    """Say in words what failed where a program fails inside of a transform; else nothing.

    Raises:
        TypeError: from `error`.
    """
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()  # torch declares it as never None
    if interpreter is None:
        return
    name = interpreter.key().name.lower()
    raise TypeError(
        f"{who}: it is called inside of torch.func.{name}, expected a plain call: observers and int8 operators have no "
        f"rules for transforms; call it with the whole batch, or apply {name} to the float model"
    ) from error

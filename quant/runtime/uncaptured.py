"""The warning of a call that no captured program stands for, once per module."""

from __future__ import annotations

import warnings

from torch import nn

from quant.runtime.matching import CaptureMismatch


class UncapturedCall(UserWarning):
    """No captured program of a prepared or converted model stands for this call; it runs by the user's own forward."""


def warn_once(
    warned: set[str], path: str, root: nn.Module, mismatch: CaptureMismatch, how: str, refused: str = ""
) -> None:
    """Warn, once per model and module, that a call runs outside of the module's programs.

    Args:
        warned: paths that a warning was given for; `path` is added.
        path: dotted name of the module, '' for the model.
        root: the module.
        mismatch: the reason that the first program does not stand for the call.
        how: how the call runs instead.
        refused: the reason that the call cannot have a program of its own; '' where it can.
    """
    if path in warned:
        return
    warned.add(path)
    hint = "quant.prepare(model, examples=[..., inputs like this call]) gives it a program of its own"
    if refused:
        hint = f"It can have no program of its own, because {refused}"
    warnings.warn(
        f"{path or type(root).__name__}: a call is unlike those it was prepared with, so it runs {how}: {mismatch}. "
        f"{hint}",
        UncapturedCall,
        stacklevel=4,
    )

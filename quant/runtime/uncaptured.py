"""Calls that no captured program stands for: the warning, once for each module."""

from __future__ import annotations

import warnings

from torch import nn

from quant.runtime.matching import CaptureMismatch


class UncapturedCall(UserWarning):
    """A call of a converted or prepared model that none of its captured programs stands for; it runs all the same."""


def warn_once(
    said: set[str], path: str, root: nn.Module, mismatch: CaptureMismatch, how: str, refused: str = ""
) -> None:
    """Say once per model and module that a call runs outside of its programs, and why; `refused`: it can have none."""
    if path in said:
        return
    said.add(path)
    hint = "quant.prepare(model, examples=[..., inputs like this call]) gives it a program of its own"
    if refused:
        hint = f"It can have no program of its own, because {refused}"
    warnings.warn(
        f"{path or type(root).__name__}: a call is unlike those it was prepared with, so it runs {how}: {mismatch}. "
        f"{hint}",
        UncapturedCall,
        stacklevel=4,
    )

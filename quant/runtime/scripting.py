"""The refusal of torch.jit.script, which cannot compile what runs a static model."""

from __future__ import annotations

from typing import NoReturn


def refuse_scripting(what: str) -> NoReturn:
    """Raise TypeError with the ways that there are.

    Args:
        what: the class of the user's module, or a name of the layer's kind.
    """
    raise TypeError(
        f"torch.jit.script: {what} is quantised statically and runs a program that TorchScript cannot compile; "
        "expected a model of quant.quantize_dynamic. Use torch.export.export(model, example), which torch recommends, "
        "or torch.jit.trace(model, example)"
    )

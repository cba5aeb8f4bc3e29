"""Recurrent layers called on packed sequences, whose sizes torch does not check: it reads past the end of a state."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence


def check_packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse states and inputs that do not fit a recurrent layer; nothing is checked of any other call.

    The proof calls layers with other sizes, and learns from their errors which sizes belong together.

    Raises:
        RuntimeError: by torch, as for a sequence that is not packed.
    """
    if not isinstance(module, nn.RNNBase):
        return
    given = [*args, *kwargs.values()]
    packed = next((one for one in given if isinstance(one, PackedSequence)), None)
    states = kwargs.get("hx", args[1] if len(args) > 1 else None)
    if packed is not None and states is not None:
        module.check_forward_args(packed.data, states, packed.batch_sizes)

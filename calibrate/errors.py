"""What can go wrong, as types that a caller can tell apart, and how messages list names."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 5
"""How many names a message lists before it counts the rest."""


class CalibrationError(RuntimeError):
    """The model failed on a batch, or another rank failed; the message names the batch, and the cause is chained."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or belongs to another model, other data or another number of processes. Nothing
    was changed by it."""


class DataError(ValueError):
    """Data that cannot be read as batches: the file, the line or the option at fault, and the way out."""


class CalibrationWarning(UserWarning):
    """What makes ranges doubtful: values that are not finite, layers that saw nothing, batches read by guess."""


def listed(names: Sequence[object]) -> str:
    """Names, or numbers, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more

"""The errors and warnings of calibration, and how messages list names."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 5
"""Most names that a message lists; further ones are counted."""


class CalibrationError(RuntimeError):
    """The model failed on a batch, or another rank failed; the message names the batch, and the cause is chained."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or belongs to another model, other data or another number of processes. Nothing
    was changed by it."""


class DataError(ValueError):
    """Data cannot be read as batches; the message names the file, line or option, and what to do."""


class CalibrationWarning(UserWarning):
    """Ranges may be wrong: values that are not finite, layers without data, batches of ambiguous structure."""


def listed(names: Sequence[object]) -> str:
    """Names, or numbers, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more

"""The one exception of the command line."""

from __future__ import annotations


class UserError(Exception):
    """What the user can put right: one line that says what is wrong and the way out, shown without a traceback."""

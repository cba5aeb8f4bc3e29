"""The one exception of the command line, and the errors of others in one line."""

from __future__ import annotations

import sys


class UserError(Exception):
    """What the user can put right: one line that says what is wrong and the way out, shown without a traceback."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, the kernels or torch's allocator on the CPU, whose error is a RuntimeError, found no memory."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def one_line(error: BaseException) -> str:
    """The message of an error and, where the user's own code raised it, the file and line."""
    place = _users_line(error)
    text = " ".join(str(error).split())
    return f"{text} (at {place})" if place else text


def with_type(error: BaseException) -> str:
    """An error in one line: its type, where the user's own code raised it, and its message."""
    place = _users_line(error)
    return f"{type(error).__name__}{' at ' * bool(place)}{place}: {' '.join(str(error).split())}"


def _users_line(error: BaseException) -> str:
    """File and line of the user's own code that raised the error or its cause: neither ours, torch's nor Python's."""
    place = ""
    link: BaseException | None = error
    while link is not None:
        trace = link.__traceback__
        while trace is not None:
            name = str(trace.tb_frame.f_globals.get("__name__", ""))
            if name.partition(".")[0] not in {"quant", "torch", *sys.stdlib_module_names}:
                place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        link = link.__cause__
    return place

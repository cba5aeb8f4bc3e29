"""The keys of programs and of int8 layers in them: typed in the process, texts in files, programs and reports.

A key is read from its text once and written once. What a user may call a module stands in them, so that the texts have
a way to say what they do not mean: a module "y@2" is no second program, and a module "/x" no functional call.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple


class ProgramKey(NamedTuple):
    """One program of a captured module.

    Attributes:
        path: dotted name of the module.
        place: among its programs, from 1.
    """

    path: str
    place: int = 1

    def __str__(self) -> str:
        """ "encoder"; "encoder@2" of a further program."""
        plain = self.place == 1 and _FURTHER.fullmatch(self.path) is None
        return self.path if plain else f"{self.path}@{self.place}"

    @classmethod
    def read(cls, text: str) -> ProgramKey:
        """The key of a text."""
        found = _FURTHER.fullmatch(text)
        return cls(text) if found is None else cls(found[1], int(found[2]))


class LayerKey(NamedTuple):
    """An int8 layer that a program calls.

    Attributes:
        name: dotted name of the user's module; of a functional call its name in the runner's `layers`.
        functional: whether it is one of a call such as F.linear, which has no module.
    """

    name: str
    functional: bool = False

    def __str__(self) -> str:
        """ "encoder.fc"; "/encoder/linear" of a functional call."""
        if self.functional:
            return f"/{self.name}"
        return f"./{self.name}" if self.name.startswith("/") else self.name

    @classmethod
    def read(cls, text: str) -> LayerKey:
        """The key of a text."""
        if text.startswith("/"):
            return cls(text[1:], functional=True)
        return cls(text.removeprefix("./"))


def module_of(step: str, modules: Container[str]) -> str | None:
    """The module that a step calls, which it is named as, with the number of the call after the first; None of others.

    Args:
        step: its full name.
        modules: the full names that there are.
    """
    if step in modules:
        return step
    repeated = _FURTHER.fullmatch(step)
    return repeated[1] if repeated is not None and repeated[1] in modules else None


_FURTHER = re.compile(r"(.*)@([1-9][0-9]*)", re.DOTALL)
"""A name with a number behind it: of a further program of a module, or of a further call."""

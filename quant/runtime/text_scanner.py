"""Reads the tokens of one line of a program's text: signs, numbers, names, and errors that name the line."""

from __future__ import annotations

import ast
import re
from typing import NoReturn

from quant.runtime.tree_text import BARE

NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?![\w.])")
STRING = re.compile(r"""b?(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
INTEGER = re.compile(r"\d+")
NAME = re.compile(r"[A-Za-z_][\w.]*")


class TextError(ValueError):
    """The text is not a valid program; the message names the line."""


class UnknownClass(TextError):
    """The text names a class that is not imported, or whose package it may not name."""


class TextScanner:
    """A line of text and the place up to which it is read.

    Args:
        text: the line.
        number: its number, for errors.
    """

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number = text, number
        self.place = 0

    def fail(self, why: str, kind: type[TextError] = TextError) -> NoReturn:
        """Raise an error that names the line."""
        raise kind(f"line {self.number}: {why}: {self.text.strip()!r}")

    def skip(self) -> None:
        """Skip spaces."""
        while self.text.startswith(" ", self.place):
            self.place += 1

    def at(self, sign: str) -> bool:
        """Whether `sign` comes next, after spaces."""
        if self.text.startswith(" ", self.place):
            self.skip()
        return self.text.startswith(sign, self.place)

    def take(self, sign: str) -> bool:
        """Skip `sign` if it comes next; returns whether it did."""
        if not self.at(sign):
            return False
        self.place += len(sign)
        return True

    def peek(self, pattern: re.Pattern[str]) -> str:
        """The text that `pattern` matches here, without skipping it; '' where it does not match."""
        self.skip()
        matched = pattern.match(self.text, self.place)
        return "" if matched is None else matched.group()

    def expect(self, sign: str) -> None:
        """Skip `sign`.

        Raises:
            TextError: something else comes next.
        """
        if not self.take(sign):
            self.fail(f"expected {sign!r} at column {self.place + 1}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Skip and return the text that `pattern` matches here; None where it does not match."""
        self.skip()
        matched = pattern.match(self.text, self.place)
        if matched is None:
            return None
        self.place = matched.end()
        return matched.group()

    def end(self) -> None:
        """Check that the line ends here.

        Raises:
            TextError: more text follows.
        """
        self.skip()
        if self.place < len(self.text):
            self.fail(f"expected nothing more at column {self.place + 1}")

    def integer(self) -> int:
        """An unsigned integer."""
        digits = self.match(INTEGER)
        if digits is None:
            self.fail(f"expected a number at column {self.place + 1}")
        return int(digits)

    def word(self) -> str:
        """A name, bare or in quotes."""
        quoted = self.match(STRING)
        word = self.match(BARE) if quoted is None else ast.literal_eval(quoted)
        if not isinstance(word, str):
            self.fail(f"expected a name at column {self.place + 1}")
        return word

"""Reads nested arguments from their text, which `tree_text.py` writes.

A class is looked up in modules that are already imported, and for the text of a file in given packages only; a function
must be on the allow-list (`allowed_functions.py`). So reading a text runs only constructors of dataclasses, tuples and
mappings.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant.runtime.allowed_functions import is_allowed
from quant.runtime.callee import Function, named
from quant.runtime.objects import Given, Instance, Result, Write
from quant.runtime.text_scanner import NAME, NUMBER, STRING, TextScanner, UnknownClass
from quant.runtime.trees import Attr, PackedParts, Ref, Sizes

PLAIN = frozenset((
    bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, slice, range, type(None), OrderedDict,
    deque, defaultdict, Tensor, torch.Size, torch.dtype, torch.device, torch.nn.Parameter, PackedSequence,
))  # fmt: skip
"""Classes that any text may name."""


class Reader(TextScanner):
    """Reads nested values from a line of a program's text.

    Args:
        text: the line.
        number: its number, for errors.
        constants: the tensors that `$0`, `$1`, ... name.
        packages: the packages whose classes the line may name besides PLAIN ones; None for all that are imported.
    """

    def __init__(
        self, text: str, number: int, constants: list[Tensor], packages: Collection[str] | None = None
    ) -> None:
        super().__init__(text, number)
        self.constants, self.packages = constants, packages

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments in parentheses; a name before a colon is a comment."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for _ in self._until("(", ")"):
            begin = self.place
            name = self.match(STRING) or self.match(NAME)
            if name is not None and self.take("="):
                kwargs[ast.literal_eval(name) if name[0] in "'\"" else name] = self.value()
                continue
            if name is None or name[0] in "'\"" or not self.take(": "):
                self.place = begin
            args.append(self.value())
        return tuple(args), kwargs

    def _until(self, opening: str, closing: str) -> Any:
        """Yield before each item of a list in brackets, separated by commas."""
        self.expect(opening)
        while not self.take(closing):
            yield
            if not self.take(","):
                self.expect(closing)
                return

    def _several(self, opening: str, closing: str) -> list[Any]:
        return [self.value() for _ in self._until(opening, closing)]

    def _tuple(self) -> Any:
        begin = self.place
        items = self._several("(", ")")
        if len(items) == 1 and not self.text[begin : self.place].rstrip(" )").endswith(","):
            self.fail("a tuple of one value has a comma in it")
        return tuple(items)

    def pairs(self) -> dict[Any, Any]:
        """A dictionary in braces."""
        pairs = {}
        for _ in self._until("{", "}"):
            key = self.value()
            self.expect(":")
            pairs[key] = self.value()
        return pairs

    def value(self) -> Any:
        """The value that comes next, of any kind."""
        self.skip()
        read = _READERS.get(self.text[self.place : self.place + 1])
        if read is not None:
            return read(self)
        number = self.match(NUMBER)
        if number is not None:
            return int(number) if number.lstrip("-").isdigit() else float(number)
        text = self.match(STRING)
        return self._named() if text is None else ast.literal_eval(text)

    def _named(self) -> Any:
        name = self.match(NAME)
        if name in _NAMES:
            return _NAMES[name]
        if name is not None and name in _CONSTRUCTORS:
            return self._constructed(name)
        constant = getattr(torch, name.removeprefix("torch."), None) if name and name.startswith("torch.") else None
        if not isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            self.fail(f"expected a value at column {self.place + 1}" if name is None else f"{name!r} is not a value")
        return constant

    def _constructed(self, name: str) -> Any:
        parts = self._several("(", ")")
        try:
            return _CONSTRUCTORS[name](*parts)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            self.fail(f"{name}: {error}")

    def reference(self) -> Ref:
        """A value of the program, as `%3`."""
        self.expect("%")
        return Ref(self.integer())

    def attribute(self) -> Attr:
        """A parameter or buffer, as `@fc.weight`."""
        self.expect("@")
        return Attr(self.path())

    def path(self) -> str:
        """The dotted name of a module or of its attribute.

        Raises:
            TextError: a part begins with two underscores; such attributes of Python's lead to arbitrary code.
        """
        path = self.word()
        if "__" in path and any(part.startswith("__") for part in path.split(".")):
            self.fail(f"{path!r} leads through a private attribute")
        return path

    def ellipsis(self) -> Any:
        """An ellipsis."""
        self.expect("...")
        return ...

    def constant(self) -> Tensor:
        """A constant tensor, as `$0`."""
        self.expect("$")
        place = self.integer()
        if place >= len(self.constants):
            self.fail(f"there is no constant ${place}")
        return self.constants[place]

    def opaque(self) -> NoReturn:
        """Refuse `?module:name`, which stands for an object that has no text."""
        self.expect("?")
        self.fail(f"holds an object of class {self.place_of()[1]}, which no text stands for")

    def function(self) -> Any:
        """A function passed as an argument, as `&torch:relu`."""
        self.expect("&")
        module, name = self.place_of()
        target = self.allowed(module, name).target
        if target is getattr:
            self.fail("getattr is no argument of a call")
        return target

    def allowed(self, module: str, name: str) -> Function:
        """The function `name` of `module`.

        Raises:
            TextError: it is not on the allow-list.
        """
        target = named(sys.modules.get(module), name)
        if module.startswith("torch.ops."):
            target = named(torch.ops, f"{module.removeprefix('torch.ops.')}.{name}")
        if target is None or not is_allowed(module, name, target):
            self.fail(
                f"{module}.{name} is not a function that a program may name; allowed are torch's functions of tensors, "
                "those of operator and math, builtins that compute, and this package's own"
            )
        return Function(module, name, target)

    def place_of(self) -> tuple[str, str]:
        """A module and a name in it, as `torch.nn:Linear`."""
        module = self.match(NAME) or ""
        self.expect(":")
        return module, self.match(re.compile(r"[\w.<>]+")) or ""

    def class_or_object(self) -> Any:
        """A class, as `!module:name`; or an object of it, where arguments, a member or pairs follow."""
        self.expect("!")
        module, name = self.place_of()
        kind = named(sys.modules.get(module), name)
        if not isinstance(kind, type):
            self.fail(f"class {name} is not known; import {module} first", UnknownClass)
        if not self._is_known(kind):
            self.fail(f"class {name} of {module} is none of the model's packages", UnknownClass)
        if self.text.startswith("[", self.place) and issubclass(kind, enum.Enum):
            [member] = self._several("[", "]")
            return kind[member]
        if self.text.startswith("{", self.place) and issubclass(kind, Mapping):
            pairs: Any = self.pairs()
            return kind(pairs)  # type: ignore[call-arg]
        return self._object(kind) if self.text.startswith("(", self.place) else kind

    def _is_known(self, kind: type) -> bool:
        """Whether the text may name a class: it is of the given packages, or a plain one.

        What a module of these imports is of another package: `mymodel:subprocess.Popen` is no class of mymodel.
        """
        package = kind.__module__.partition(".")[0]
        if self.packages is None or package in self.packages:
            return True
        return kind in PLAIN or (package == "torch" and hasattr(kind, "n_sequence_fields"))

    def _object(self, kind: Any) -> Any:
        args, kwargs = self.arguments()
        if issubclass(kind, (tuple, list)) and not kwargs:
            return kind(*args) if hasattr(kind, "_fields") else kind(args)
        if args or not dataclasses.is_dataclass(kind):
            self.fail(f"{kind.__name__} is neither a dataclass nor a tuple or list")
        constructor: Any = kind
        return constructor(**kwargs)


def _numpy(dtype: str, value: Any) -> Any:
    kind = numpy.dtype(dtype)
    if kind.kind in "SVO" and not isinstance(value, bytes):
        raise ValueError(f"{value!r:.80} is no value of {kind}")  # of a number numpy would make as many bytes
    return kind.type(value)


def _array(dtype: str, shape: tuple[int, ...], data: str) -> Any:
    return numpy.frombuffer(bytes.fromhex(data), numpy.dtype(dtype)).reshape(shape).copy()


_NAMES = {"None": None, "True": True, "False": False}

_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "device": torch.device,
    "slice": slice,
    "range": range,
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "Size": lambda *items: torch.Size(items),
    "Sizes": lambda *items: Sizes(items),
    "PackedSequence": lambda *items: PackedSequence._make(items),
    "PackedParts": PackedParts,
    "Given": Given,
    "Instance": Instance,
    "Write": Write,
    "Result": Result,
    "numpy": _numpy,
    "ndarray": _array,
}

_READERS: dict[str, Callable[[Reader], Any]] = {
    "%": Reader.reference,
    "@": Reader.attribute,
    "$": Reader.constant,
    "?": Reader.opaque,
    "&": Reader.function,
    "!": Reader.class_or_object,
    ".": Reader.ellipsis,
    "(": Reader._tuple,
    "[": lambda reader: reader._several("[", "]"),
    "{": Reader.pairs,
}

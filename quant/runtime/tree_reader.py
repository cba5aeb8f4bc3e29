"""Nested arguments from their text (`tree_text.py`).

Classes are looked up in modules that are imported already, of a file's text only in given packages, and functions in an
allow-list: to read a text runs nothing of it but constructors of dataclasses, tuples and mappings.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import math
import operator
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.utils.rnn import PackedSequence

from quant.runtime import calls, forms
from quant.runtime.callee import Function, named
from quant.runtime.objects import Given, Instance, Result, Write
from quant.runtime.tree_text import BARE
from quant.runtime.trees import Attr, PackedParts, Ref, Sizes

NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?![\w.])")
STRING = re.compile(r"""b?(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
INTEGER = re.compile(r"\d+")
NAME = re.compile(r"[A-Za-z_][\w.]*")


PLAIN = frozenset((
    bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, slice, range, type(None), OrderedDict,
    deque, defaultdict, Tensor, torch.Size, torch.dtype, torch.device, torch.nn.Parameter, PackedSequence,
))  # fmt: skip
"""Classes that any text may name."""


class TextError(ValueError):
    """A text that is no program; the message names the line."""


class UnknownClass(TextError):
    """A text that names a class which is not there, or of a package whose classes it may not name."""


class Reader:
    """Reads values from a line.

    Args:
        text: the line.
        number: of the line, for errors.
        constants: the tensors that values name by their places.
        packages: whose classes it may name besides plain ones; None for those of all that is imported.
    """

    def __init__(
        self, text: str, number: int, constants: list[Tensor], packages: Collection[str] | None = None
    ) -> None:
        self.text, self.number, self.constants, self.packages = text, number, constants, packages
        self.place = 0

    def fail(self, why: str, kind: type[TextError] = TextError) -> NoReturn:
        """Raise an error that names the line."""
        raise kind(f"line {self.number}: {why}: {self.text.strip()!r}")

    def skip(self) -> None:
        """Go over spaces."""
        while self.text.startswith(" ", self.place):
            self.place += 1

    def at(self, sign: str) -> bool:
        """Whether a sign comes next."""
        if self.text.startswith(" ", self.place):
            self.skip()
        return self.text.startswith(sign, self.place)

    def take(self, sign: str) -> bool:
        """Go over a sign, if it comes next."""
        if not self.at(sign):
            return False
        self.place += len(sign)
        return True

    def peek(self, pattern: re.Pattern[str]) -> str:
        """What a pattern takes, and go over nothing; '' where it takes nothing."""
        self.skip()
        matched = pattern.match(self.text, self.place)
        return "" if matched is None else matched.group()

    def expect(self, sign: str) -> None:
        """Go over a sign.

        Raises:
            TextError: something else comes next.
        """
        if not self.take(sign):
            self.fail(f"expected {sign!r} at column {self.place + 1}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Go over what a pattern takes; None where it takes nothing."""
        self.skip()
        matched = pattern.match(self.text, self.place)
        if matched is None:
            return None
        self.place = matched.end()
        return matched.group()

    def end(self) -> None:
        """Raise an error where the line goes on."""
        self.skip()
        if self.place < len(self.text):
            self.fail(f"expected nothing more at column {self.place + 1}")

    def integer(self) -> int:
        """A number without a point."""
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

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, in brackets."""
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
        """A round for each part between brackets."""
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
        """Keys with their values."""
        pairs = {}
        for _ in self._until("{", "}"):
            key = self.value()
            self.expect(":")
            pairs[key] = self.value()
        return pairs

    def value(self) -> Any:
        """Any nested value."""
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
        if name is not None and name in _MAKERS:
            return self._made(name)
        constant = getattr(torch, name.removeprefix("torch."), None) if name and name.startswith("torch.") else None
        if not isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            self.fail(f"expected a value at column {self.place + 1}" if name is None else f"{name!r} is no value")
        return constant

    def _made(self, name: str) -> Any:
        parts = self._several("(", ")")
        try:
            return _MAKERS[name](*parts)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            self.fail(f"{name}: {error}")

    def reference(self) -> Ref:
        """A value of the program."""
        self.expect("%")
        return Ref(self.integer())

    def attribute(self) -> Attr:
        """A parameter or buffer."""
        self.expect("@")
        return Attr(self.path())

    def path(self) -> str:
        """The dotted name of a module or of its attribute; private ones of Python's lead to any code."""
        found = self.word()
        if "__" in found and any(part.startswith("__") for part in found.split(".")):
            self.fail(f"{found!r} leads through a private attribute")
        return found

    def ellipsis(self) -> Any:
        """Three dots."""
        self.expect("...")
        return ...

    def constant(self) -> Tensor:
        """A tensor by its place."""
        self.expect("$")
        place = self.integer()
        if place >= len(self.constants):
            self.fail(f"there is no constant ${place}")
        return self.constants[place]

    def opaque(self) -> NoReturn:
        """What was printed for an object that no text stands for."""
        self.expect("?")
        self.fail(f"holds an object of class {self.place_of()[1]}, which no text stands for")

    def function(self) -> Any:
        """A function that is an argument."""
        self.expect("&")
        module, name = self.place_of()
        target = self.allowed(module, name).target
        if target is getattr:
            self.fail("getattr is no argument of a call")
        return target

    def allowed(self, module: str, name: str) -> Function:
        """A function of the allow-list."""
        target = named(sys.modules.get(module), name)
        if module.startswith("torch.ops."):
            target = named(torch.ops, f"{module.removeprefix('torch.ops.')}.{name}")
        if target is None or not _is_allowed(module, name, target):
            self.fail(
                f"{module}.{name} is no function that a program may name; those are torch's of tensors, operator's, "
                "math's, builtins that compute, and this package's own"
            )
        return Function(module, name, target)

    def place_of(self) -> tuple[str, str]:
        """A module and a name in it."""
        module = self.match(NAME) or ""
        self.expect(":")
        return module, self.match(re.compile(r"[\w.<>]+")) or ""

    def class_or_object(self) -> Any:
        """A class, or an object of it."""
        self.expect("!")
        module, name = self.place_of()
        kind = named(sys.modules.get(module), name)
        if not isinstance(kind, type):
            self.fail(f"class {name} is not known; import {module} first", UnknownClass)
        if not self._is_known(module, kind):
            self.fail(f"class {name} of {module} is none of the model's packages", UnknownClass)
        if self.text.startswith("[", self.place) and issubclass(kind, enum.Enum):
            [member] = self._several("[", "]")
            return kind[member]
        if self.text.startswith("{", self.place) and issubclass(kind, Mapping):
            pairs: Any = self.pairs()
            return kind(pairs)  # type: ignore[call-arg]
        return self._object(kind) if self.text.startswith("(", self.place) else kind

    def _is_known(self, module: str, kind: type) -> bool:
        """Whether a text may name a class: one of the given packages, or a plain one."""
        package = module.partition(".")[0]
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
    return numpy.dtype(dtype).type(value)


def _array(dtype: str, shape: tuple[int, ...], data: str) -> Any:
    return numpy.frombuffer(bytes.fromhex(data), numpy.dtype(dtype)).reshape(shape).copy()


_NAMES = {"None": None, "True": True, "False": False}

_MAKERS: dict[str, Callable[..., Any]] = {
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

_OPERATORS = frozenset(operator.__all__) - {"attrgetter", "call", "itemgetter", "methodcaller"}
_BUILTINS = frozenset(
    ("abs", "bool", "complex", "divmod", "float", "getattr", "int", "len", "list", "max", "min", "pow", "reversed",
     "round", "slice", "sum", "tuple", "zip", "range", "isinstance", "enumerate")
)  # fmt: skip
_OURS = frozenset(
    (one.__module__, one.__name__)
    for one in (calls.with_items, calls.write_items, calls.attend, calls.attention_weights, forms.form_of)
)


_REFUSED = frozenset(
    ("apply_", "map_", "map2_", "from_file", "register_hook", "register_post_accumulate_grad_hook", "__reduce_ex__",
     "__setstate__", "__deepcopy__", "__array__", "__array_wrap__", "__format__", "__dlpack__", "__dlpack_device__")
)  # fmt: skip
"""Functions of tensors that take functions or files, or that make something else of a tensor."""
_PRIVATE = frozenset({"_weight_norm", "_pack_padded_sequence", "_pad_packed_sequence"})
"""Of torch's private functions those that its own modules call."""
_OPERATIONS = frozenset({"aten", "torchvision"})
"""Whose operations a text may name."""


def _is_allowed(module: str, name: str, target: Any) -> bool:
    """Whether a text may name a function: one that computes, and touches no files."""
    last = name.rpartition(".")[2]
    if last in _REFUSED or (last.startswith("_") and not last.startswith("__") and last not in _PRIVATE):
        return False
    if module == "operator":
        return name in _OPERATORS
    if module == builtins.__name__:
        return name in _BUILTINS
    if module == math.__name__ or (module, name) in _OURS:
        return callable(target)
    if module.startswith("torch.ops."):
        return module.split(".")[2] in _OPERATIONS and isinstance(target, (OpOverload, OpOverloadPacket))
    if module == torch._C._nn.__name__:
        return isinstance(target, types.BuiltinFunctionType)
    return module.partition(".")[0] == "torch" and id(target) in of_tensors()


def is_method(name: str) -> bool:
    """Whether a text may call a method of this name: one of tensors."""
    method = getattr(torch.Tensor, name, None)
    if name.startswith("__"):
        return id(method) in of_tensors() and name not in _REFUSED
    return callable(method) and not name.startswith("_") and name not in _REFUSED


@functools.lru_cache(maxsize=1)
def of_tensors() -> frozenset[int]:
    """The functions of torch that take tensors, or make them, by identity."""
    known = torch.overrides.get_overridable_functions()
    overridable = {id(one) for functions in known.values() for one in functions}
    makers = (getattr(torch, name, None) for name in dir(torch._C._VariableFunctions))
    return frozenset(overridable | {id(one) for one in makers if isinstance(one, types.BuiltinFunctionType)})

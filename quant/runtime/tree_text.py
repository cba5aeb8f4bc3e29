"""Writes nested arguments as text, as between the parentheses of a printed call; `tree_reader.py` reads it.

Numbers are read back bit for bit. An object without a text is printed as a question mark and its class.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant.runtime.callee import Function, function
from quant.runtime.objects import Given, Instance, Result, Write, has_own_form
from quant.runtime.trees import Attr, PackedParts, Ref, Sizes

BARE = re.compile(r"[\w./@-]+")
"""Names that are written without quotes."""

LABEL = re.compile(r"[A-Za-z_]\w*")
"""Names of arguments that are written without quotes."""


def word(name: str) -> str:
    """A name, in quotes where it has characters other than those of BARE."""
    return name if BARE.fullmatch(name) else repr(name)


class Writer:
    """Writes values as text.

    Attributes:
        constants: the tensors written up to now, which the text names `$0`, `$1`, ...
    """

    def __init__(self) -> None:
        self.constants: list[Tensor] = []
        self._places: dict[int, int] = {}  # the list keeps the tensors, and so their ids

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...] = ()) -> str:
        """The arguments of a call in parentheses; positional ones after their `names`, where these are known."""
        labels = [f"{name}: " for name in names] + [""] * len(args)
        parts = [f"{label}{self.value(arg)}" for label, arg in zip(labels, args, strict=False)]
        parts += [f"{name if LABEL.fullmatch(name) else repr(name)}={self.value(arg)}" for name, arg in kwargs.items()]
        return f"({', '.join(parts)})"

    def value(self, tree: Any) -> str:
        """A nested value."""
        kind = type(tree)
        if kind in _WRITERS:
            return _WRITERS[kind](self, tree)
        if isinstance(tree, enum.Enum):
            return f"{_class(kind)}[{tree.name!r}]"
        if isinstance(tree, type):
            return _class(tree)
        if isinstance(tree, numpy.generic) and tree.dtype.kind in "biufc":
            return f"numpy({tree.dtype.name!r}, {self.value(tree.item())})"
        if isinstance(tree, (types.FunctionType, types.BuiltinFunctionType)):
            return callable_text(function(tree))
        return self._object(tree, kind)

    def items(self, items: Any) -> str:
        """Values separated by commas."""
        return ", ".join(map(self.value, items))

    def pairs(self, pairs: Mapping[Any, Any]) -> str:
        """A dictionary in braces."""
        return "{" + ", ".join(f"{self.value(key)}: {self.value(one)}" for key, one in pairs.items()) + "}"

    def constant(self, tensor: Tensor) -> str:
        """A tensor, by its index in `constants`."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return f"?{_class(type(tensor))[1:]}"
        place = self._places.get(id(tensor))
        if place is None:
            place = self._places[id(tensor)] = len(self.constants)
            self.constants.append(tensor)
        return f"${place}"

    def array(self, array: Any) -> str:
        """An array of numbers, as its bytes."""
        if array.dtype.kind not in "biufc":
            return "?numpy:ndarray"
        data = numpy.ascontiguousarray(array).tobytes().hex()
        return f"ndarray({array.dtype.name!r}, {self.value(array.shape)}, {data!r})"

    def _object(self, tree: Any, kind: type) -> str:
        """An object of any other class: a named tuple, dataclass or mapping; else a question mark and the class."""
        if not has_own_form(kind):
            return f"?{_class(kind)[1:]}"
        if dataclasses.is_dataclass(kind):
            fields = {item.name: getattr(tree, item.name) for item in dataclasses.fields(kind) if item.init}
            return _class(kind) + self.arguments((), fields)
        return _class(kind) + (self.pairs(tree) if issubclass(kind, Mapping) else f"({self.items(tree)})")


def _tuple(writer: Writer, tree: tuple[Any, ...]) -> str:
    return f"({writer.items(tree)},)" if len(tree) == 1 else f"({writer.items(tree)})"


def _call(name: str, parts: Callable[[Any], tuple[Any, ...]]) -> Callable[[Writer, Any], str]:
    return lambda writer, tree: f"{name}({writer.items(parts(tree))})"


def _class(kind: type) -> str:
    return f"!{kind.__module__}:{kind.__qualname__}"


def callable_text(function: Function) -> str:
    """A function as an argument of a call."""
    return f"&{function.module}:{function.name}"


def _literal(writer: Writer, tree: Any) -> str:
    return repr(tree)


_WRITERS: dict[type, Callable[[Writer, Any], str]] = {
    **dict.fromkeys((type(None), bool, int, float, str, bytes), _literal),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), lambda writer, tree: str(tree)),
    Ref: lambda writer, tree: f"%{tree.index}",
    Attr: lambda writer, tree: f"@{word(tree.path)}",
    type(...): lambda writer, tree: "...",
    complex: _call("complex", lambda tree: (tree.real, tree.imag)),
    torch.device: _call("device", lambda tree: (str(tree),)),
    slice: _call("slice", lambda tree: (tree.start, tree.stop, tree.step)),
    range: _call("range", lambda tree: (tree.start, tree.stop, tree.step)),
    set: lambda writer, tree: f"set({', '.join(sorted(map(writer.value, tree)))})",
    frozenset: lambda writer, tree: f"frozenset({', '.join(sorted(map(writer.value, tree)))})",
    tuple: _tuple,
    list: lambda writer, tree: f"[{writer.items(tree)}]",
    dict: Writer.pairs,
    torch.Size: _call("Size", tuple),
    Sizes: _call("Sizes", tuple),
    PackedSequence: _call("PackedSequence", tuple),
    PackedParts: _call("PackedParts", tuple),
    Given: _call("Given", lambda tree: (tree.argument, tree.path)),
    Instance: _call("Instance", lambda tree: (tree.kind, tree.attributes, tree.items)),
    Write: _call("Write", lambda tree: (tree.target, tree.value)),
    Result: _call("Result", lambda tree: (tree.value, tree.writes)),
    Tensor: Writer.constant,
    numpy.ndarray: Writer.array,
}

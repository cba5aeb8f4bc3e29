"""Checks whether a captured graph or program stands for a call: its arguments, and the guards on its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quant.runtime.objects import OPAQUE, Instance, attributes_of, compares_itself, items_of
from quant.runtime.trees import PLAIN, Attr, Ref


class CaptureMismatch(RuntimeError):
    """The captured graph does not stand for this call: its arguments differ, or a branch goes another way.

    Attributes:
        place: the node at which the difference shows; the nodes before it have run.
    """

    def __init__(self, message: str, place: int = 0) -> None:
        super().__init__(message)
        self.place = place


def match_arguments(expected: Any, given: Any, where: str, bind: Callable[[int, Any], None]) -> None:
    """Compare the arguments of a call with the captured ones, and bind its tensors.

    Args:
        expected: the captured arguments, nested, with a Ref in the place of each tensor.
        given: the arguments of the call.
        where: the name of the arguments in errors.
        bind: called with the index of each Ref and the call's value for it.

    Raises:
        CaptureMismatch: nesting, type or a constant differs from what was captured.
    """
    if isinstance(expected, Ref):
        bind(expected.index, given)
    elif expected is given and isinstance(expected, PLAIN):
        return
    elif isinstance(expected, (tuple, list)):
        if not isinstance(given, (tuple, list)) or len(given) != len(expected):
            raise _mismatch(where, f"{type(expected).__name__} of {len(expected)}", given)
        for index, (one, other) in enumerate(zip(expected, given, strict=True)):
            match_arguments(one, other, f"{where}[{index}]", bind)
    elif isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or set(given) != set(expected):
            raise _mismatch(where, f"keys {list(expected)}", given)
        for key in expected:
            match_arguments(expected[key], given[key], f"{where}[{key!r}]", bind)
    elif type(expected) is Instance:
        if type(given) is not expected.kind:
            raise _mismatch(where, expected.kind.__name__, given)
        match_arguments(expected.attributes, attributes_of(given), where, bind)
        match_arguments(expected.items, items_of(given), where, bind)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        if type(given) is not type(expected):
            raise _mismatch(where, type(expected).__name__, given)
        for item in dataclasses.fields(expected):
            match_arguments(getattr(expected, item.name), getattr(given, item.name), f"{where}.{item.name}", bind)
    elif isinstance(expected, Attr):
        return  # a parameter of the model's own, which the graph reads anew
    elif isinstance(given, Tensor):
        raise _mismatch(where, _shown(expected), given)
    elif not _same(expected, given):
        _match_objects(expected, given, where, bind)


def _match_objects(expected: Any, given: Any, where: str, bind: Callable[[int, Any], None]) -> None:
    """Compare two objects of a class without `__eq__` by their attributes."""
    if (
        compares_itself(type(expected))
        or isinstance(expected, OPAQUE)
        or type(expected) is not type(given)
        or where.count(".") > 8
    ):
        raise _mismatch(where, _shown(expected), given)
    one, other = attributes_of(expected), attributes_of(given)
    if not one or set(one) != set(other):
        raise _mismatch(where, _shown(expected), given)
    for name in one:
        match_arguments(one[name], other[name], f"{where}.{name}", bind)


def _shown(expected: Any) -> str:
    return repr(expected) if isinstance(expected, PLAIN) else f"the same {type(expected).__name__}"


def _same(expected: Any, given: Any) -> bool:
    if expected is given or isinstance(expected, Tensor):
        return expected is given
    try:
        return type(expected) is type(given) and bool(expected == given)
    except Exception:  # a comparison of the user's own class may raise, or return an array
        return False


def _mismatch(where: str, expected: str, given: Any) -> CaptureMismatch:
    return CaptureMismatch(
        f"{where}: expected {expected}, as in example_inputs, got {said(given)}; prepare the model with example_inputs "
        "like this call"
    )


def said(value: Any) -> str:
    """A value as errors show it: in full only where it is short."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def check_tensor(given: Any, path: str, root: nn.Module, place: int) -> Any:
    """Check that a module whose output was a tensor at capture returns a tensor now.

    Args:
        given: the module's output, which is returned.
        path: dotted name of the module in `root`.
        place: the node of the call.
    """
    if not isinstance(given, Tensor):
        raise CaptureMismatch(
            f"{type(root).__name__}: {path or 'its forward'} gave a tensor for example_inputs and gives {said(given)} "
            "now, so the captured graph does not stand for this call; prepare the model with example_inputs like this "
            "call",
            place,
        )
    return given


def check_guard(given: Any, expected: Any, owner: str, root: nn.Module, place: int) -> Any:
    """Check that a value is the one with which the model's branch was captured.

    Args:
        given: the value, which is returned.
        expected: the captured value.
        owner: dotted name of the module in `root` that branches on it.
        place: the node of the value.
    """
    if given != expected:
        what, like = "a size", "of this size"
        if isinstance(expected, bool):
            what, like = "a condition", "like this call"
        elif isinstance(expected, str):  # `forms.form_of`
            what, like = "what a part gives that runs as it is", "like this call"
        raise CaptureMismatch(
            f"{type(root).__name__}{'.' + owner if owner else ''} decides by {what}: it was {expected!r} for "
            f"example_inputs and is {given!r} now, so the captured graph does not stand for this call; prepare the "
            f"model with example_inputs {like}",
            place,
        )
    return given

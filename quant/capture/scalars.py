"""Numbers in a call's arguments as inputs of a graph: a step counter, an offset, a scale.

They are recorded as sizes are (`numbers.py`): guarded where the forward branches on them, free where calls only compute
with them. A number that the proof cannot vary, because the module refuses other values, is held to its value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from quant.runtime.arguments import Arguments, parameters_of

NUMBER, ROUNDED = -1, -2
"""In place of the dimension in a `Limit`: of a number that the caller gave, and of one that arithmetic rounded."""

MOST_NUMBERS = 16
"""Most numbers of a call that become inputs; where it has more, they are a list of data and stay constants."""

LOSING = (operator.floordiv, operator.mod, math.ceil, math.floor, math.trunc, round)


@dataclass(frozen=True)
class Limit:
    """A size that is held to what it was, of a tensor by its place among those of the call (`recorder.tensors_in`).

    With `dim` NUMBER it is a number, by its place in `with_numbers`, and with ROUNDED one by its place in
    `Recorder.rounded`.
    """

    place: int
    dim: int


def loses(function: Callable[..., Any]) -> bool:
    """Whether arithmetic has the same result for different operands, so that another size may not show its use."""
    return function in LOSING


def with_numbers(module: nn.Module, call: Arguments, change: Callable[[str, Any], Any]) -> Arguments:
    """A call with other numbers: those that the caller gives by themselves or in tuples, lists and dicts of Python's.

    Args:
        change: of an argument's name and each number in it the new number; called in order. A number that is the
            argument's default is not asked for: that is how most calls are.
    """
    args, kwargs = call
    parameters = parameters_of(module)
    defaults = {one.name: one.default for one in parameters}
    rest = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "args")
    places = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = [*places[: len(args)], *[rest] * (len(args) - len(places))]
    arguments = [*zip(named, args, strict=True), *kwargs.items()]
    if sum(1 for _, value in arguments for _ in _numbers(value)) > MOST_NUMBERS:
        return call

    def changed(name: str, value: Any) -> Any:
        if _is_number(value) and type(defaults.get(name)) is type(value) and defaults[name] == value:
            return value
        return _changed(value, lambda number: change(name, number))

    replaced = [changed(name, value) for name, value in arguments]
    return tuple(replaced[: len(args)]), dict(zip(kwargs, replaced[len(args) :], strict=True))


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if _is_number(value):
        return change(value)
    if not any(True for _ in _numbers(value)):
        return value  # the same object
    if type(value) is dict:
        return {key: _changed(item, change) for key, item in value.items()}
    return type(value)([_changed(item, change) for item in value])


def _numbers(value: Any) -> Iterator[Any]:
    if _is_number(value):
        yield value
    elif type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _numbers(item)


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))

"""The tensors and numbers of a call by the values that stand for them, and whether it is a call that was captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.runtime.arguments import ONE_MEMORY, bind, places_of, share_memory
from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.matching import CaptureMismatch, match_arguments, said
from quant.runtime.trees import Ref, is_plain


def bound_values(
    expected: ExpectedCall, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Any]:
    """The tensors and numbers of a call, by the values that stand for them.

    Raises:
        CaptureMismatch: the call is not of the kind that was captured.
    """
    return matched_values(expected, bind(root, args, kwargs), type(root).__name__)


def matched_values(expected: ExpectedCall, bound: Mapping[str, Any], who: str) -> dict[int, Any]:
    """As `bound_values`, of arguments by name; errors call the module `who`."""
    values: dict[int, Any] = {}

    def take(value: int, given: Any) -> None:
        one = expected.inputs[value]
        unlike = _unlike(one, given)
        if unlike:
            raise CaptureMismatch(
                f"{who}: argument '{one.name}' {unlike}; prepare the model with example_inputs like this call"
            )
        values[value] = given

    for name, tree in expected.arguments.items():
        match_arguments(tree, bound[name], f"{who}: argument '{name}'", take)
    tensors = [value for value in values.values() if isinstance(value, Tensor)]  # numbers may be inputs too
    if expected.writes and share_memory(tensors):
        raise CaptureMismatch(f"{who}: {ONE_MEMORY}")
    return values


def refuse_other_devices(expected: ExpectedCall, values: Mapping[int, Any], root: nn.Module) -> None:
    """Raise TypeError for an input that is not on the CPU."""
    for index, value in values.items():
        if isinstance(value, Tensor) and not value.is_cpu:
            where = f"{type(root).__name__}: argument '{expected.inputs[index].name}'"
            raise TypeError(f"{where} is on {value.device}; int8 layers run on the CPU: call it with x.cpu()")


def _unlike(expected: ExpectedInput, given: Any) -> str:
    """How an input is of another kind, dtype, rank or layout than was captured; '' where it is not."""
    if expected.kind is object:
        return ""
    if expected.kind is not Tensor:
        name = expected.kind.__name__
        return "" if type(given) is expected.kind else f"was of type {name} in example_inputs and is {said(given)} now"
    if not isinstance(given, Tensor):
        return f"was a tensor in example_inputs and is {said(given)} now"
    if expected.dtype is not None and given.dtype != expected.dtype:
        was, now = str(expected.dtype), str(given.dtype)
    elif expected.rank is not None and given.dim() != expected.rank:
        was, now = f"of {expected.rank} dimensions", f"of {given.dim()}"
    elif expected.contiguous and given.layout == torch.strided and not given.is_contiguous():
        was, now = "contiguous (the forward writes in place)", "not"
    else:
        return ""
    return f"was {was} in example_inputs and is {now} now"


class _Place(NamedTuple):
    """What is expected of one argument: a tensor for a value of the program, or, where that is -1, the constant."""

    register: int
    dtype: torch.dtype | None = None
    constant: Any = None
    rank: int = -1
    """Of the tensor, where it is checked; else -1."""


class QuickBinding:
    """`bound_values` of the most frequent calls, in a tenth of its time: all arguments are tensors or plain constants.

    What is expected where is worked out once for each form of call, that is how many arguments are positional and
    which are named. It never says that a call does not fit: `bound_values` looks again, and has the words.
    """

    def __init__(self, expected: ExpectedCall) -> None:
        self.expected = expected
        self._always_slow = expected.writes or any(one.contiguous for one in expected.inputs.values())
        self._forward: Any = None
        self._forms: dict[tuple[Any, ...], list[_Place] | None] = {}

    def registers(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any] | None:
        """The call's tensors by the values that stand for them; None where `bound_values` has to look."""
        forward = type(root).forward
        if forward is not self._forward:
            self._forward, self._forms = forward, {}
        form = (len(args), *kwargs)
        try:
            places = self._forms[form]
        except KeyError:
            places = self._forms[form] = self._places(forward, len(args), list(kwargs))
        if places is None:
            return None
        registers = {}
        for (register, dtype, constant, rank), value in zip(
            places, (*args, *kwargs.values()) if kwargs else args, strict=True
        ):
            if register < 0:
                if value is not constant and not _same(value, constant):
                    return None
                continue
            if type(value) is not Tensor or (dtype is not None and value.dtype is not dtype) or not value.is_cpu:
                return None
            if rank >= 0 and value.dim() != rank:
                return None
            registers[register] = value
        return registers

    def make_ready(self, root: nn.Module) -> None:
        """Work out the likeliest form of call: by position, and without what has its default."""
        forward = type(root).forward
        expected, known = self.expected.arguments, None if isinstance(forward, property) else places_of(forward)
        if known is None:
            return
        names, defaults, needed = known
        count = needed
        for place, name in enumerate(names[needed:], needed):
            if name in expected and not (is_plain(expected[name]) and _same(expected[name], defaults[name])):
                count = place + 1
        self._forward, self._forms = forward, {(count,): self._places(forward, count, [])}

    def _places(self, forward: Any, count: int, named: list[str]) -> list[_Place] | None:
        known = places_of(forward)
        if known is None or self._always_slow:
            return None
        names, defaults, _ = known
        bound = [*names[:count], *named]
        expected = self.expected.arguments
        if len(set(bound)) != count + len(named) or not set(bound) <= set(expected) or set(names) != set(expected):
            return None
        for name in set(names) - set(bound):
            if not (is_plain(expected[name]) and _same(expected[name], defaults[name])):
                return None
        places = [self._place(expected[name]) for name in bound]
        registers = [place.register for place in places if place is not None and place.register >= 0]
        distinct = len(registers) == len(set(registers))
        return [place for place in places if place is not None] if distinct and None not in places else None

    def _place(self, tree: Any) -> _Place | None:
        if not isinstance(tree, Ref):
            return _Place(-1, constant=tree) if is_plain(tree) else None
        expected = self.expected.inputs[tree.index]
        rank = -1 if expected.rank is None else expected.rank
        return _Place(tree.index, expected.dtype, rank=rank) if expected.kind is Tensor else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_forward": None, "_forms": {}}


def _same(one: Any, constant: Any) -> bool:
    """Whether a value is the plain constant."""
    return type(one) is type(constant) and bool(one == constant)

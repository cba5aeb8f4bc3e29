"""The tensors and numbers of a call by the nodes that stand for them, and whether the graph stands for the call."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.graph import Graph
from quant.runtime.arguments import ONE_MEMORY, bind, places_of, share_memory
from quant.runtime.matching import CaptureMismatch, match_arguments, said
from quant.runtime.trees import Ref, is_plain


def bound_values(
    graph: Graph,
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    quantized: Container[int] = (),
) -> dict[int, Any]:
    """The tensors and numbers of a call, by the nodes that stand for them.

    Args:
        quantized: values that become integers, which only float32 does.

    Raises:
        CaptureMismatch: the call is not of the kind that was captured.
    """
    values: dict[int, Any] = {}

    def take(index: int, value: Any) -> None:
        number = graph.nodes[index].number
        if number is not None:
            if type(value) is not number:
                raise CaptureMismatch(
                    f"{type(root).__name__}: argument '{graph.nodes[index].target}' was of type {number.__name__} "
                    f"in example_inputs and is {said(value)} now; prepare the model with example_inputs like this call"
                )
            values[index] = value
            return
        check_tensor(graph, index, value, quantized, f"{type(root).__name__}: argument '{graph.nodes[index].target}'")
        values[index] = value

    bound = bind(root, args, kwargs)
    for name, expected in graph.arguments.items():
        match_arguments(expected, bound[name], f"{type(root).__name__}: argument '{name}'", take)
    if graph.writes and share_memory(list(values.values())):
        raise CaptureMismatch(f"{type(root).__name__}: {ONE_MEMORY}")
    return values


def check_tensor(graph: Graph, index: int, value: Any, quantized: Container[int], where: str) -> None:
    """Raise CaptureMismatch where something is not such a tensor as the graph was captured with.

    Args:
        index: the node that stands for it.
        where: how it is called in the error.
    """
    if isinstance(value, Tensor):
        unlike = _unlike(graph, index, value, _dtype(graph, index, quantized))
    else:
        unlike = f"was a tensor in example_inputs and is {said(value)} now"
    if unlike:
        raise CaptureMismatch(f"{where} {unlike}; prepare the model with example_inputs like this call")


def _unlike(graph: Graph, index: int, value: Tensor, dtype: torch.dtype | None) -> str:
    """How an input is of another dtype, rank or layout than the graph stands for; '' where it is not.

    Args:
        dtype: that it has to have; None where any will do.
    """
    meta = graph.nodes[index].meta
    if dtype is not None and value.dtype != dtype:
        was, now = str(dtype), str(value.dtype)
    elif graph.ranked and meta is not None and value.dim() != len(meta.shape):
        was, now = f"of {len(meta.shape)} dimensions", f"of {value.dim()}"
    elif graph.contiguous and meta is not None and value.layout == torch.strided and not value.is_contiguous():
        was, now = "contiguous (the forward writes in place)", "not"
    else:
        return ""
    return f"was {was} in example_inputs and is {now} now"


def _dtype(graph: Graph, index: int, quantized: Container[int]) -> torch.dtype | None:
    """The dtype that an input has to have; None where any will do."""
    meta = graph.nodes[index].meta
    return meta.dtype if meta is not None and (graph.typed or index in quantized) else None


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

    Args:
        quantized: values that become integers, as for `bound_values`.
        ids: of the program's inputs, by the nodes that stand for them.
    """

    def __init__(self, graph: Graph, quantized: Container[int], ids: Mapping[int, int]) -> None:
        self.graph, self.quantized, self.ids = graph, quantized, ids
        self._forward: Any = None
        self._forms: dict[tuple[Any, ...], list[_Place] | None] = {}

    def registers(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any] | None:
        """The call's tensors by the ids of the program's inputs; None where `bound_values` has to look."""
        forward = type(root).forward
        if forward is not self._forward:
            self._forward, self._forms = forward, {}
        form = (len(args), *kwargs)
        try:
            places = self._forms[form]
        except KeyError:
            places = self._forms[form] = self._places(forward, len(args), list(kwargs))
        if places is None or self.graph.contiguous or self.graph.writes:
            return None
        found = {}
        for (register, dtype, constant, rank), value in zip(
            places, (*args, *kwargs.values()) if kwargs else args, strict=True
        ):
            if register < 0:
                if value is not constant and not _same(value, constant):
                    return None
                continue
            if type(value) is not Tensor or (dtype is not None and value.dtype is not dtype):
                return None
            if rank >= 0 and value.dim() != rank:
                return None
            found[register] = value
        return found

    def _places(self, forward: Any, count: int, named: list[str]) -> list[_Place] | None:
        known = places_of(forward)
        if known is None:
            return None
        names, defaults, _ = known
        given = [*names[:count], *named]
        expected = self.graph.arguments
        if len(set(given)) != count + len(named) or not set(given) <= set(expected) or set(names) != set(expected):
            return None
        for name in set(names) - set(given):
            if not (is_plain(expected[name]) and _same(expected[name], defaults[name])):
                return None
        places = [self._place(expected[name]) for name in given]
        registers = [place.register for place in places if place is not None and place.register >= 0]
        distinct = len(registers) == len(set(registers))
        return [place for place in places if place is not None] if distinct and None not in places else None

    def _place(self, expected: Any) -> _Place | None:
        if isinstance(expected, Ref):
            meta = self.graph.nodes[expected.index].meta
            rank = len(meta.shape) if self.graph.ranked and meta is not None else -1
            return _Place(self.ids[expected.index], _dtype(self.graph, expected.index, self.quantized), rank=rank)
        return _Place(-1, constant=expected) if is_plain(expected) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_forward": None, "_forms": {}}


def _same(one: Any, constant: Any) -> bool:
    """Whether a value is the plain constant."""
    return type(one) is type(constant) and bool(one == constant)

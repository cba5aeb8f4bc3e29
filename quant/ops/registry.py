"""Which captured calls are which operators: tables that `recognises` and `plans_reals` fill in the operators' files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from quant.graph import Graph, Kind, Node
from quant.leaves import base_layer, is_registered
from quant.ops.call import Call, StaysFloat, called
from quant.ops.operator import Operator
from quant.ops.planning import PlanCall, Planned
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import attribute


@dataclass(frozen=True)
class Recognised:
    """A recognised call: its operator, and the values that it reads as activations."""

    operator: Operator
    inputs: tuple[int, ...]


Recogniser: TypeAlias = Callable[[Call], Recognised]
"""Reads one kind of call, or raises StaysFloat."""

Target: TypeAlias = "type[nn.Module] | Callable[..., Any] | str"

R = TypeVar("R", bound=Recogniser)

_MODULES: dict[type[nn.Module], Recogniser] = {}
_FAMILIES: list[tuple[Callable[[type[nn.Module]], bool], Recogniser]] = []
_FUNCTIONS: dict[Callable[..., Any], Recogniser] = {}
_METHODS: dict[str, Recogniser] = {}


@dataclass(frozen=True)
class RealForm:
    """How a float call between integers is computed natively.

    Attributes:
        plan: gives its lines, or raises Unplanned.
        exact: whether its bits are torch's. Inexact calls are native in single steps too, so that bits never differ.
        moves: whether it is a view, which torch computes without a copy.
    """

    plan: Callable[[PlanCall], Planned]
    exact: bool = True
    moves: bool = False


_REAL_FORMS: dict[Any, RealForm] = {}


def recognises(*targets: Target) -> Callable[[R], R]:
    """A decorator for the function that reads calls of some targets.

    Args:
        targets: layers of torch.nn by their class (subclasses count where they compute the same), functions, and
            methods of a tensor by their name.

    Raises:
        ValueError: another function reads one of them already.
    """

    def register(recogniser: R) -> R:
        for target in targets:
            table = _table(target)
            if table.setdefault(target, recogniser) is not recogniser:
                raise ValueError(f"{target}: expected one function to recognise it, {table[target].__module__} does")
        return recogniser

    return register


def recognises_family(belongs: Callable[[type[nn.Module]], bool]) -> Callable[[R], R]:
    """A decorator for the function that reads calls of an open family of layer classes.

    Args:
        belongs: whether a class is one of them.
    """

    def register(recogniser: R) -> R:
        _FAMILIES.append((belongs, recogniser))
        return recogniser

    return register


P = TypeVar("P", bound=Callable[[PlanCall], Planned])


def plans_reals(*targets: Target, exact: bool = True, moves: bool = False) -> Callable[[P], P]:
    """A decorator for the function that plans float calls of some targets; see `RealForm`.

    Args:
        targets: as `recognises` takes them.

    Raises:
        ValueError: another function plans one of them already.
    """

    def register(plan: P) -> P:
        for target in targets:
            form = _REAL_FORMS.setdefault(target, RealForm(plan, exact, moves))
            if form.plan is not plan:
                raise ValueError(f"{target}: expected one function to plan it, {form.plan.__module__} does")
        return plan

    return register


def real_form(node: Node, root: nn.Module) -> RealForm | None:
    """How a float call is computed natively; None where no family defines it."""
    if node.kind is Kind.MODULE:
        module = attribute(root, node.target)
        if isinstance(module, QuantModule):
            return next((_REAL_FORMS[kind] for kind in type(module).__mro__ if kind in _REAL_FORMS), None)
        return _REAL_FORMS.get(base_layer(module))
    return _REAL_FORMS.get(node.target) if node.kind in (Kind.FUNCTION, Kind.METHOD) else None


def _table(target: Target) -> dict[Any, Recogniser]:
    if isinstance(target, str):
        return _METHODS
    return _MODULES if isinstance(target, type) and issubclass(target, nn.Module) else _FUNCTIONS


def recognise(node: Node, graph: Graph, root: nn.Module, dtype: torch.dtype = torch.float32) -> Recognised:
    """The integer operator of a call.

    Args:
        dtype: of the values that it reads.

    Raises:
        StaysFloat: there is none, with the reason.
    """
    call = Call(node, graph, root, dtype)
    if node.kind not in (Kind.MODULE, Kind.METHOD, Kind.FUNCTION):
        raise StaysFloat("not a computation")
    recogniser = _recogniser(call)
    if recogniser is None:
        raise StaysFloat(f"{called(node, root)} has no int8 kernel")
    return recogniser(call)


def _recogniser(call: Call) -> Recogniser | None:
    if call.module is None:
        return (_METHODS if call.node.kind is Kind.METHOD else _FUNCTIONS).get(call.node.target)
    if is_registered(call.module):
        raise StaysFloat("registered as a layer of its own; it runs as it is")
    base = base_layer(call.module)
    if base is None or base in _MODULES:
        return None if base is None else _MODULES[base]
    return next((recogniser for belongs, recogniser in _FAMILIES if belongs(base)), None)

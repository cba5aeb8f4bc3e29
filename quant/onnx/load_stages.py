"""What computes a file: plans, and between them steps of torch, of what no plan has.

Nodes come in the file's order. Each belongs to the first stage in which all that it reads is there, so that a network
is few plans: masks are computed before the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.kernels.plan_sizes import Arithmetic, number_of
from quant.kernels.reference_plan import Line, PlanText, Register
from quant.onnx.load_values import ShapeOf, Sizes

Operand = int | Tensor | Sizes | ShapeOf | None
"""A register, a constant, whole numbers, a shape, or an input that is left out."""


@dataclass(frozen=True)
class TorchStep:
    """A node that torch computes.

    Attributes:
        outs: the registers that it writes.
        name: of the node, for people.
        function: of tensors, one for each operand; gives a tensor, or a tuple of them.
    """

    outs: tuple[int, ...]
    name: str
    function: Callable[..., Any]
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{', '.join(f'%{out}' for out in self.outs)} = {self.name}"

    def run(self, registers: dict[int, Tensor]) -> None:
        """Compute it.

        Raises:
            ValueError: torch refuses the shapes or numbers; with the node's name.
        """
        tensors = [_tensor(one, registers) for one in self.operands]
        try:
            results = self.function(*tensors)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors if one is not None)
            raise ValueError(f"{self.name} cannot be computed for inputs of shapes {shapes}: {error}") from error
        registers.update(zip(self.outs, results if isinstance(results, tuple) else (results,), strict=True))


@dataclass(frozen=True)
class PlanStage:
    """Lines that the kernels run as one call.

    Attributes:
        text: of the plan.
        steps: the node that each line is of.
        inputs, outputs: registers, in the order of the text.
    """

    text: str
    steps: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Stage = PlanStage | TorchStep


def staged(
    items: Sequence[Line | TorchStep],
    inputs: Sequence[int],
    outputs: Sequence[int],
    names: Mapping[int, str],
    checks: Sequence[int] = (),
) -> tuple[Stage, ...]:
    """The stages of a file: steps of torch in even places of an order, lines of plans in odd ones.

    Args:
        names: register -> the node that it is of.
        checks: registers whose lines are kept though nothing reads them.
    """
    items = _live(items, [*outputs, *checks])
    level = dict.fromkeys(inputs, 0)
    places: list[list[Line | TorchStep]] = []
    for item in items:
        first = max([level[one] for one in reads(item)], default=0)
        place = first if first % 2 == isinstance(item, Line) else first + 1
        level.update(dict.fromkeys(writes(item), place))
        places.extend([] for _ in range(place + 1 - len(places)))
        places[place].append(item)
    return tuple(stage for place in _stages(places, outputs, names) for stage in place)


def _stages(
    places: Sequence[Sequence[Line | TorchStep]], outputs: Sequence[int], names: Mapping[int, str]
) -> Iterator[Sequence[Stage]]:
    written_in = {one: place for place, items in enumerate(places) for item in items for one in writes(item)}
    wanted: list[list[int]] = [[] for _ in places]  # what later places read of each
    for place, items in enumerate(places):
        for one in dict.fromkeys(one for item in items for one in reads(item)):
            if written_in.get(one, place) != place:
                wanted[written_in[one]].append(one)
    for one in outputs:
        if one in written_in:
            wanted[written_in[one]].append(one)
    for place, items in enumerate(places):
        lines = tuple(item for item in items if isinstance(item, Line))
        if not lines:
            yield [item for item in items if isinstance(item, TorchStep)]
            continue
        read = dict.fromkeys(one for item in lines for one in reads(item) if written_in.get(one) != place)
        given = tuple(dict.fromkeys(wanted[place]))
        steps = tuple(names.get(line.out, "") for line in lines)
        yield [PlanStage(str(PlanText(tuple(read), lines, given)), steps, tuple(read), given)]


def _live(items: Sequence[Line | TorchStep], outputs: Sequence[int]) -> list[Line | TorchStep]:
    """Those whose results are read."""
    needed, kept = set(outputs), []
    for item in reversed(items):
        if needed.intersection(writes(item)):
            kept.append(item)
            needed.update(reads(item))
    return kept[::-1]


def writes(item: Line | TorchStep) -> tuple[int, ...]:
    """The registers that it writes."""
    return (item.out,) if isinstance(item, Line) else item.outs


def reads(item: Line | TorchStep) -> Iterator[int]:
    """The registers that it reads, or whose sizes it reads."""
    if isinstance(item, Line):
        for value in item.settings.values():
            yield from _registers(value)
        return
    for operand in item.operands:
        if isinstance(operand, int):
            yield operand
        elif isinstance(operand, ShapeOf):
            yield operand.register
        elif isinstance(operand, Sizes):
            yield from _registers(operand.numbers)


def _registers(value: Any) -> Iterator[int]:
    if isinstance(value, Register):
        yield value.index
    elif isinstance(value, Arithmetic):
        yield from _registers((value.left, value.right))
    elif isinstance(value, tuple):
        for one in value:
            yield from _registers(one)


def _tensor(operand: Operand, registers: Mapping[int, Tensor]) -> Tensor | None:
    if isinstance(operand, ShapeOf):
        return torch.tensor(registers[operand.register].shape[operand.start : operand.end])
    if isinstance(operand, Sizes):
        numbers = [number_of(one, lambda size: registers[size.index].shape[size.dim]) for one in operand.numbers]
        return torch.tensor(numbers[0] if operand.scalar else numbers, dtype=torch.int64)
    return registers[operand] if isinstance(operand, int) else operand

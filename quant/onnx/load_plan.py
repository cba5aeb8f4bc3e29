"""Writes an ONNX file with quantised values (QDQ) as plans; `load_operators.py` has the operators.

A node is a line of a plan where it can be, and else a step that torch computes in float (`load_torch.py`). What has
neither form is refused with the node's name: a file runs as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant.kernels.reference_plan import Constant, Line, Register
from quant.onnx.file import Node, OnnxFile
from quant.onnx.load_ranks import Rank, rank_of_line, rank_of_step
from quant.onnx.load_registry import ATTRIBUTES, OF_REALS
from quant.onnx.load_stages import Operand, Stage, TorchStep, staged
from quant.onnx.load_torch import MOST, TORCH, affordable, shape_of_result
from quant.onnx.load_values import (
    ChannelIntegers,
    ChannelRange,
    Dequantized,
    Held,
    Integers,
    Range,
    Real,
    ShapeOf,
    Sizes,
    Value,
    Waiting,
    Weight,
)

Translate = Callable[["PlanWriter", Node], "Value | tuple[Value, ...]"]

OWN = -1
"""In the settings of a move, the register of the value that it moves, which a value that waits does not have yet."""

DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Whose operators are read: ONNX's, and those of ONNX Runtime, which have the same names for the same things."""

WEIGHT_MOVES = ("Transpose", "Identity")
"""What keeps a quantised constant one."""


class NotTranslated(ValueError):
    """A node has no form here."""


QUANTISES = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class FilePlan:
    """What computes a file.

    Attributes:
        stages: in order.
        constants: what the texts call $0, $1, ...
        inputs, outputs: registers, in the file's order.
    """

    stages: tuple[Stage, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class PlanWriter:
    """Turns the nodes of a file into lines of plans, and steps of torch between them.

    Attributes:
        file: what is read; its constants grow by those that are computed of them.
        values: by name, so far.
        names: register -> the node that its line is of.
        ranks: dimensions of each register, where they are known.
        items, constants: of the plans, so far.
        checks: registers that nothing reads, and whose lines refuse sizes that the file does not take.
    """

    file: OnnxFile
    values: dict[str, Value] = field(default_factory=dict)
    items: list[Line | TorchStep] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    _node: str = ""
    _held: int = 0
    _computed: int = 0
    ranks: list[Rank] = field(default_factory=list)
    _places: dict[int, tuple[Tensor, Constant]] = field(default_factory=dict)
    _finished: dict[Any, int] = field(default_factory=dict)
    _moved_of: dict[tuple[int, Range | None], int] = field(default_factory=dict)
    _in_float: dict[tuple[str, ...], Value | tuple[Value, ...]] = field(default_factory=dict)

    def write(self, operators: Mapping[str, Translate]) -> FilePlan:
        """The stages and constants.

        Args:
            operators: what each of ONNX's operators becomes.

        Raises:
            NotTranslated: a node has no form; with its name.
        """
        self.file = dataclasses.replace(self.file, constants=dict(self.file.constants))
        self._held = sum(one.numel() for one in self.file.constants.values())
        inputs = tuple(self.new(self._rank_of_input(name)) for name in self.file.inputs)
        for name, register in zip(self.file.inputs, inputs, strict=True):
            kind = self.file.kinds.get(name)
            dtype = torch.float32 if kind is None else kind.dtype
            self.values[name] = Real(register) if dtype == torch.float32 else Held(register, dtype)
        for node in self.file.nodes:
            self._check(node, operators)
            self._node = node.name
            if not self._folded(node):
                value = self._translated(node, operators)
                values = value if isinstance(value, tuple) else (value,)
                self.values.update({name: one for name, one in zip(node.outputs, values, strict=False) if one})
        outputs = tuple(self._output(name) for name in self.file.outputs)
        return FilePlan(
            staged(self.items, inputs, outputs, self.names, self.checks), tuple(self.constants), inputs, outputs
        )

    def _rank_of_input(self, name: str) -> Rank:
        shape = self.file.kinds[name].shape if name in self.file.kinds else None
        return None if shape is None else len(shape)

    def _output(self, name: str) -> int:
        if name in self.file.constants:
            raise NotTranslated(f"output {name!r} is the same for all inputs")
        if name not in self.values:
            raise NotTranslated(f"output {name!r} is the output of no node")
        value = self.values[name]
        return value.register if isinstance(value, Held) else self.real(value, f"output {name!r}")

    def _check(self, node: Node, operators: Mapping[str, Translate]) -> None:
        if node.domain not in DOMAINS:
            raise NotTranslated(f"{node} is of the domain {node.domain!r}, expected an operator of ONNX")
        if node.op not in operators and node.op not in TORCH:
            known = ", ".join(sorted({*operators, *TORCH}))
            raise NotTranslated(f"{node} has no integer form here; known are {known}")
        unknown = sorted(node.attributes.keys() - ATTRIBUTES.get(node.op, frozenset()))
        if unknown:
            raise NotTranslated(f"{node} has the attribute {unknown[0]!r}, which is not known here")

    def _folded(self, node: Node) -> bool:
        """Compute a node of constants here and now, if it is one."""
        moves_weight = node.op in WEIGHT_MOVES and isinstance(self.values.get(node.inputs[0]), Weight)
        if node.op not in TORCH or node.op in QUANTISES or moves_weight or not all(map(self.is_constant, node.inputs)):
            return False
        inputs = [self.constant_named(name) for name in node.inputs]
        with _rules_of(node):
            affordable(shape_of_result(node.op, node.attributes, [one for one in inputs if one is not None]))
            results = TORCH[node.op].function(node.attributes, *inputs)
        tensors = results if isinstance(results, tuple) else (results,)
        self._computed += sum(one.numel() for one in tensors)
        if self._computed > MOST + 4 * self._held:
            raise NotTranslated(f"{node}: the constants that are computed hold {self._computed} values by now")
        self.file.constants.update(zip(node.outputs, [one.contiguous() for one in tensors], strict=False))
        return True

    def is_constant(self, name: str) -> bool:
        """Whether an input is a constant, or left out."""
        return not name or name in self.file.constants or isinstance(self.values.get(name), Weight)

    def constant_named(self, name: str) -> Tensor | None:
        """A constant as numbers; None for an input that is left out."""
        value = self.values.get(name)
        return value.reals() if isinstance(value, Weight) else self.file.constants.get(name)

    def _translated(self, node: Node, operators: Mapping[str, Translate]) -> Value | tuple[Value, ...]:
        with _rules_of(node):
            if node.op not in operators:
                return self.in_float(node)
            try:
                value = operators[node.op](self, node)
                if isinstance(value, Waiting) and not value.node:
                    return dataclasses.replace(value, node=node.name)
                return value
            except NotTranslated as error:
                if node.op not in TORCH or node.op in QUANTISES:
                    raise
                return self._in_float_instead(node, error)

    def _in_float_instead(self, node: Node, reason: NotTranslated) -> Value | tuple[Value, ...]:
        """A node on reals; where its inputs are none either, the first reason is the better one."""
        try:
            return self.in_float(node)
        except NotTranslated:
            raise reason from None

    # Registers, lines and constants.

    def new(self, rank: Rank = None) -> int:
        """A new register."""
        self.ranks.append(rank)
        return len(self.ranks) - 1

    def emit(self, op: str, **settings: Any) -> int:
        """Add a line; gives its register."""
        out = self.new(rank_of_line(op, settings, self.ranks, self.constants))
        self.items.append(Line(out, op, settings))
        self.names[out] = self._node
        return out

    def constant(self, tensor: Tensor) -> Constant:
        """Add a constant, once."""
        if id(tensor) not in self._places:
            self.constants.append(tensor.contiguous())
            self._places[id(tensor)] = tensor, Constant(len(self.constants) - 1)
        return self._places[id(tensor)][1]

    # Values.

    def keeps_rank(self, register: int, number: Tensor) -> bool:
        """Whether a constant of one value, broadcast to a register, gives the result no further dimensions."""
        rank = self.ranks[register]
        return number.dim() <= (1 if rank is None else rank)

    def value(self, node: Node, place: int) -> Value:
        """An input of a node, which is computed."""
        name = node.inputs[place]
        if name not in self.values:
            what = "a constant that is not quantised" if name in self.file.constants else "not there yet"
            raise NotTranslated(f"{node}: its input {name!r} is {what}, expected a quantised value")
        return self.values[name]

    def array(self, node: Node, place: int, default: Tensor | None = None) -> Tensor | None:
        """A constant input of a node; the default where it is left out."""
        name = node.inputs[place] if place < len(node.inputs) else ""
        if not name:
            return default
        if name not in self.file.constants:
            raise NotTranslated(f"{node}: its input {name!r} is computed, expected a constant")
        return self.file.constants[name]

    def integers(self, node: Node, place: int) -> Integers:
        """An input of a node as integers; a constant is rounded to those that it came from.

        Raises:
            NotTranslated: it is not quantised.
        """
        value = self.value(node, place)
        if isinstance(value, Weight) and value.scale.numel() == 1 and value.values.dtype == torch.int8:
            range_ = Range(float(value.scale), int(value.zero_point) + 128)
            return self.round(Real(self.emit("constant", value=self.constant(value.reals()))), range_, node)
        return self.integer_form(value, node, f"its input {node.inputs[place]!r}")

    def integer_form(self, value: Value, node: Node, what: str = "its input") -> Integers:
        """Integers, or those that reals stand for."""
        if isinstance(value, Integers):
            return value
        if isinstance(value, Dequantized) and value.function is None:
            return value.integers
        raise NotTranslated(f"{node}: {what} is not quantised, and has to be here")

    def any_register(self, value: Value, node: Node) -> int:
        """A register that has the shape of a value."""
        if isinstance(value, (Real, Held, Integers)):
            return value.register
        if isinstance(value, Dequantized):
            return value.integers.register
        return self.real(value, node)

    def weight(self, node: Node, place: int) -> Weight:
        """A constant input of a node as int8 integers with the zero point 0."""
        value = self.value(node, place)
        if not isinstance(value, Weight):
            raise NotTranslated(f"{node}: its input {node.inputs[place]!r} is computed, expected a quantised constant")
        if not value.symmetric:
            raise NotTranslated(f"{node}: its weight {node.inputs[place]!r} has a zero point, expected int8 with 0")
        return value

    def round_channels(self, value: Value, to: ChannelRange, node: Node) -> ChannelIntegers:
        """A product as integers with a range for each channel."""
        if not isinstance(value, Waiting) or not value.by_channel or value.moves:
            raise NotTranslated(f"{node}: has {len(to.scale)} scales, expected one, or the output of a convolution")
        return ChannelIntegers(self._finished_as(value, to), to)

    def round(self, value: Value, to: Range, node: Node) -> Integers:
        """A value as integers of a range."""
        if isinstance(value, Waiting) and (value.finish, value.low, value.high, None) in self._finished:
            value = Real(self.real(value, node))  # which is there, since another node reads its shape or its reals
        if isinstance(value, Real):
            return Integers(self.emit("quantize", x=Register(value.register), scale=to.scale,
                                      zero_point=to.zero_point), to)  # fmt: skip
        if isinstance(value, Dequantized):
            if value.function is None and value.integers.range == to:
                return value.integers
            return Integers(self._look_up(value, to), to)
        if isinstance(value, Waiting):
            return Integers(self._finish(value, to), to)
        raise NotTranslated(f"{node}: rounds {type(value).__name__.lower()} values, expected reals")

    def _look_up(self, value: Dequantized, to: Range) -> int:
        return self.emit("lookup", q=Register(value.integers.register), table=self.constant(value.table(to)))

    def real(self, value: Value, where: object) -> int:
        """The register of a value as float32."""
        if isinstance(value, Real):
            return value.register
        if isinstance(value, Dequantized):
            own = value.integers
            reals = self._once(("dequantize", own), lambda: self.emit(
                "dequantize", q=Register(own.register), scale=own.range.scale, zero_point=own.range.zero_point
            ))  # fmt: skip
            if value.function is None:
                return reals
            function = value.function
            return self._once((function, reals), lambda: self.step(str(where), function, (reals,), self.ranks[reals]))
        if isinstance(value, Waiting):
            return self._finish(value, None)
        if isinstance(value, Weight):
            held = value.reals()
            return self._once(id(value), lambda: self.emit("constant", value=self.constant(held)))
        raise NotTranslated(f"{where}: is {type(value).__name__.lower()}, expected reals")

    def _once(self, key: Any, emit: Callable[[], int]) -> int:
        if key not in self._finished:
            self._finished[key] = emit()
        return self._finished[key]

    def _finish(self, value: Waiting, to: Range | None) -> int:
        if (id(value), to) not in self._moved_of:
            key = value.finish, value.low, value.high, to
            out = self._once(key, lambda: self._finished_as(value, to))
            for op, settings in value.moves:
                out = self._moved(op, out, dict(settings))
            self._moved_of[id(value), to] = out
        return self._moved_of[id(value), to]

    def _finished_as(self, value: Waiting, to: Range | ChannelRange | None) -> int:
        """The lines of a value, which are of its own node and not of the one that rounds it."""
        rounds, self._node = self._node, value.node or self._node
        out = value.finish(to, value.low, value.high)
        self._node = rounds
        return out

    # Moves.

    def move(self, value: Value, node: Node, op: str, **settings: Any) -> Value:
        """A value reshaped by an operation of plans that keeps its numbers."""
        if isinstance(value, Waiting):
            moves = (*value.moves, (op, tuple(settings.items())))
            return dataclasses.replace(value, moves=moves, with_bias=None)
        if isinstance(value, Real):
            return Real(self._moved(op, value.register, settings))
        if isinstance(value, Integers):
            return dataclasses.replace(value, register=self._moved(op, value.register, settings))
        if isinstance(value, Dequantized):
            own = value.integers
            return Dequantized(Integers(self._moved(op, own.register, settings), own.range), value.function)
        raise NotTranslated(f"{node}: reshapes a constant, or whole numbers")

    def _moved(self, op: str, register: int, settings: Mapping[str, Any]) -> int:
        placed = {name: _placed(value, register) for name, value in settings.items()}
        return self.emit(op, x=Register(register), **placed)

    def require_size(self, value: Value, axis: int, size: int) -> None:
        """Refuse a call in which a dimension has another size, of which plans would take a part or nothing away.

        What is left of it from `size - 1` on has to be one value, since no other size becomes 1.
        """
        held = value.integers if isinstance(value, Dequantized) else value
        if not isinstance(held, (Real, Integers, ChannelIntegers)) or size < 1:
            return
        register, rank = held.register, self.ranks[held.register]
        if rank is None:
            return
        if size > 1:
            register = self.emit("slice", x=Register(register), dim=axis, start=size - 1, end=None, step=1)
        shape = tuple(1 if place == axis % rank else -1 for place in range(rank))
        self.checks.append(self.emit("expand", x=Register(register), shape=shape))

    # Floats.

    def in_float(self, node: Node) -> Value | tuple[Value, ...]:
        """A node on reals: lines of a plan where it has such, else a step of torch.

        Raises:
            NotTranslated: an input is not there.
        """
        if node.outputs not in self._in_float:
            self._in_float[node.outputs] = self._as_lines(node) or self._as_step(node)
        return self._in_float[node.outputs]

    def _as_lines(self, node: Node) -> Value | tuple[Value, ...] | None:
        try:
            return OF_REALS[node.op](self, node) if node.op in OF_REALS else None
        except NotTranslated:
            return None

    def _as_step(self, node: Node) -> Value | tuple[Value, ...]:
        operation = TORCH[node.op]
        operands = [self._operand(node, place) for place in range(len(node.inputs))]
        inspect.signature(operation.function).bind(node.attributes, *operands)
        ranks = [self._rank_of(one) for one, _ in operands]
        rank = rank_of_step(node.op, node.attributes, ranks, [one for one, _ in operands])
        attributes, count = node.attributes, 1
        if node.op == "Split":
            count = len(node.outputs)
            attributes = {"num_outputs": count, **attributes}
            if attributes["num_outputs"] != count:
                raise NotTranslated(f"{node}: has {count} outputs, and its num_outputs says another number")
        function = functools.partial(operation.function, attributes)
        outs = self._step(str(node), function, [one for one, _ in operands], [rank] * count)
        dtype = operation.dtype(node.attributes, [dtype for _, dtype in operands])
        values = tuple(Real(out) if dtype == torch.float32 else Held(out, dtype) for out in outs)
        return values if len(values) > 1 else values[0]

    def _rank_of(self, operand: Operand) -> Rank:
        if isinstance(operand, Sizes):
            return 0 if operand.scalar else 1
        if isinstance(operand, ShapeOf):
            return 1
        return self.ranks[operand] if isinstance(operand, int) else None if operand is None else operand.dim()

    def step(self, name: str, function: Callable[..., Tensor], operands: Sequence[Operand], rank: Rank = None) -> int:
        """Add a step of torch; gives its register."""
        return self._step(name, function, operands, [rank])[0]

    def _step(
        self, name: str, function: Callable[..., Any], operands: Sequence[Operand], ranks: Sequence[Rank]
    ) -> list[int]:
        outs = [self.new(rank) for rank in ranks]
        self.items.append(TorchStep(tuple(outs), name, function, tuple(operands)))
        return outs

    def _operand(self, node: Node, place: int) -> tuple[Operand, torch.dtype | None]:
        """An input of a node for torch, and its dtype."""
        name = node.inputs[place]
        if self.is_constant(name):
            held = self.constant_named(name)
            return held, None if held is None else held.dtype
        value = self.value(node, place)
        if isinstance(value, Held):
            return value.register, value.dtype
        if isinstance(value, (Sizes, ShapeOf)):
            return value, torch.int64
        return self.real(value, f"{node}: its input {name!r}"), torch.float32


@contextlib.contextmanager
def _rules_of(node: Node) -> Iterator[None]:
    """What breaks while a node is read is said with its name."""
    try:
        yield
    except NotTranslated:
        raise
    except AttributeError as error:  # of None
        raise NotTranslated(f"{node} breaks the rules of its operator (an input is left out)") from error
    except (ArithmeticError, AssertionError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error) or "an input is left out"
        raise NotTranslated(f"{node} breaks the rules of its operator ({reason})") from error


def _placed(value: Any, register: int) -> Any:
    """A setting with a register in the place of OWN."""
    if isinstance(value, tuple):
        return tuple(_placed(one, register) for one in value)
    return Register(register, value.dim) if isinstance(value, Register) and value.index == OWN else value

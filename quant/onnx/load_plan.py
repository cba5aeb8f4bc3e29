"""Writes an ONNX file with quantised values (QDQ) as the text of one plan; `load_operators.py` has the operators.

What has no integer form is refused with the node's name: a file runs as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quant.kernels.reference_plan import Constant, Line, PlanText, Register
from quant.onnx.file import Node, OnnxFile
from quant.onnx.load_values import Dequantized, Integers, Range, Real, Value, Waiting, Weight

Translate = Callable[["PlanWriter", Node], "Value | tuple[Value, ...]"]

OWN = -1
"""In the settings of a move, the register of the value that it moves, which a value that waits does not have yet."""

DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Whose operators are read: ONNX's, and those of ONNX Runtime, which have the same names for the same things."""


class NotTranslated(ValueError):
    """A node has no integer form here."""


@dataclass
class PlanWriter:
    """Turns the nodes of a file into lines.

    Attributes:
        file: what is read.
        values: by name, so far.
        lines, constants: of the plan, so far.
    """

    file: OnnxFile
    values: dict[str, Value] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    _registers: int = 0
    _finished: dict[tuple[int, Any], int] = field(default_factory=dict)

    def write(self, operators: Mapping[str, Translate]) -> tuple[str, list[Tensor]]:
        """The plan's text and constants.

        Args:
            operators: what each of ONNX's operators becomes.

        Raises:
            NotTranslated: a node has no integer form; with its name.
        """
        inputs = [self.new() for _ in self.file.inputs]
        self.values.update({name: Real(index) for name, index in zip(self.file.inputs, inputs, strict=True)})
        for node in self.file.nodes:
            value = self._translated(node, operators)
            for name, one in zip(node.outputs, value if isinstance(value, tuple) else (value,), strict=False):
                self.values[name] = one
        missing = [name for name in self.file.outputs if name not in self.values]
        if missing:
            raise NotTranslated(f"output {missing[0]!r} is the output of no node")
        outputs = [self.real(self.values[name], f"output {name!r}") for name in self.file.outputs]
        return str(PlanText(tuple(inputs), tuple(self.lines), tuple(outputs))), self.constants

    def _translated(self, node: Node, operators: Mapping[str, Translate]) -> Value | tuple[Value, ...]:
        if node.domain not in DOMAINS:
            raise NotTranslated(f"{node} is of the domain {node.domain!r}, expected an operator of ONNX")
        translate = operators.get(node.op)
        if translate is None:
            raise NotTranslated(f"{node} has no integer form here; known are {', '.join(sorted(operators))}")
        try:
            return translate(self, node)
        except NotTranslated:
            raise
        except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error) or "an input is left out"
            raise NotTranslated(f"{node} breaks the rules of its operator ({reason})") from error

    def new(self) -> int:
        """A new register."""
        self._registers += 1
        return self._registers - 1

    def emit(self, op: str, **settings: Any) -> int:
        """Add a line; gives its register."""
        out = self.new()
        self.lines.append(Line(out, op, settings))
        return out

    def constant(self, tensor: Tensor) -> Constant:
        """Add a constant."""
        self.constants.append(tensor.contiguous())
        return Constant(len(self.constants) - 1)

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
        """An input of a node as integers.

        Raises:
            NotTranslated: it is not quantised.
        """
        value = self.value(node, place)
        if not isinstance(value, Dequantized) or value.function is not None:
            raise NotTranslated(f"{node}: its input {node.inputs[place]!r} is not quantised, and has to be here")
        return value.integers

    def integer_form(self, value: Value, node: Node) -> Integers:
        """Integers, or those that reals stand for."""
        if isinstance(value, Integers):
            return value
        if isinstance(value, Dequantized) and value.function is None:
            return value.integers
        raise NotTranslated(f"{node}: its input is not quantised, and has to be here")

    def any_register(self, value: Value, node: Node) -> int:
        """A register that has the shape of a value."""
        if isinstance(value, (Real, Integers)):
            return value.register
        if isinstance(value, Dequantized):
            return value.integers.register
        return self.real(value, node)

    def weight(self, node: Node, place: int) -> Weight:
        """A constant input of a node as integers."""
        value = self.value(node, place)
        if not isinstance(value, Weight):
            raise NotTranslated(f"{node}: its input {node.inputs[place]!r} is computed, expected a quantised constant")
        return value

    def round(self, value: Value, to: Range, node: Node) -> Integers:
        """A value as integers of a range."""
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
        if isinstance(value, Dequantized) and value.function is None:
            own = value.integers
            return self.emit("dequantize", q=Register(own.register), scale=own.range.scale,
                             zero_point=own.range.zero_point)  # fmt: skip
        if isinstance(value, Waiting):
            return self._finish(value, None)
        raise NotTranslated(f"{where}: is read as float32, and is a function of integers that nobody rounds")

    def _finish(self, value: Waiting, to: Range | None) -> int:
        key = id(value), to
        if key not in self._finished:
            out = value.finish(to, value.low, value.high)
            for op, settings in value.moves:
                out = self._moved(op, out, dict(settings))
            self._finished[key] = out
        return self._finished[key]

    def move(self, value: Value, node: Node, op: str, **settings: Any) -> Value:
        """A value reshaped by an operation of plans that keeps its numbers."""
        if isinstance(value, Waiting):
            moves = (*value.moves, (op, tuple(settings.items())))
            return Waiting(value.finish, value.low, value.high, moves)
        if isinstance(value, Real):
            return Real(self._moved(op, value.register, settings))
        if isinstance(value, Integers):
            return Integers(self._moved(op, value.register, settings), value.range)
        if isinstance(value, Dequantized):
            own = value.integers
            return Dequantized(Integers(self._moved(op, own.register, settings), own.range), value.function)
        raise NotTranslated(f"{node}: reshapes a constant")

    def _moved(self, op: str, register: int, settings: Mapping[str, Any]) -> int:
        placed = {name: _placed(value, register) for name, value in settings.items()}
        return self.emit(op, x=Register(register), **placed)


def _placed(value: Any, register: int) -> Any:
    """A setting with a register in the place of OWN."""
    if isinstance(value, tuple):
        return tuple(_placed(one, register) for one in value)
    return Register(register, value.dim) if isinstance(value, Register) and value.index == OWN else value

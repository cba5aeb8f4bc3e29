"""Int8 recurrent networks and cells inside a region, static or dynamic: the lines of each, and when they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.int8_module_calls import computes_itself, sources
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.layers.recurrent_module import Int8Cell, Int8Direction, Int8Sequence
from quant.runtime.module_call import ModuleCall

RECURRENT = 1 << 40
"""The first register for values inside of recurrent layers."""

SPAN = 1 << 12
"""Registers of one recurrent layer."""


def _is_planned(direction: Any) -> bool:
    """Whether plans have an operation for a direction."""
    return bool(direction._kind.native) and not direction.has_groups()


@dataclass(frozen=True)
class RecurrentLines(ModuleCall):
    """A recurrent network over a whole sequence, static or dynamic: a line for each layer and direction.

    `reads` are its input and, where they are given, its first states. What it gives stands in three registers, of which
    a kind without a cell state has two; the module's own register holds a tuple, and no line writes it.

    Attributes:
        rank: of its input.
        integers: whether the sequence that it gives is uint8.
    """

    kind: ClassVar[str] = "recurrent"
    rank: int
    integers: bool

    @property
    def outs(self) -> tuple[int, ...]:
        first = RECURRENT + self.out * SPAN
        return first, first + 1, first + 2

    def holds(self, module: nn.Module) -> bool:
        if not computes_itself(module) or not isinstance(module, Int8Sequence) or module.training:
            return False
        return all(map(_is_planned, module.directions)) and self.rank in (2, 3)

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> str:
        assert isinstance(module, Int8Sequence)
        return "\n".join(map(str, _Walk(self, module, constant).lines()))

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        inner = [source for one in module.directions for source in sources(one, "activation_bits", "per_row")]  # type: ignore[union-attr]
        return inner + ([(module.__dict__, "_numbers")] if isinstance(module, StaticRecurrent) else [])


class _Writer:
    """Lines that write the registers `outs`, with registers of their own between."""

    def __init__(self, outs: tuple[int, ...], constant: Callable[[Tensor], Constant]) -> None:
        self.outs, self.constant = outs, constant
        self._next = outs[-1] + 1
        self._lines: list[Line] = []

    def _emit(self, operation: str, **settings: Any) -> Register:
        self._next += 1
        return self._give_to(self._next, operation, settings)

    def _give_to(self, out: int, operation: str, settings: dict[str, Any]) -> Register:
        self._lines.append(Line(out, operation, settings))
        return Register(out)

    def _give(self, place: int, operation: str, settings: dict[str, Any]) -> None:
        self._give_to(self.outs[place], operation, settings)

    def _joined(self, parts: list[Register], dim: int, *, integers: bool = False) -> Register:
        return self._emit("cat" if integers else "cat_f32", tensors=tuple(parts), dim=dim)

    def _static_layer(self, one: Any, inputs: dict[str, Any], **ranges: tuple[float, int]) -> Register:
        """One direction of a layer with static ranges: of its input, its states and what is projected."""
        numbers = {f"{name}_scale": scale for name, (scale, _) in ranges.items()}
        numbers.update({f"{name}_zero_point": zero for name, (_, zero) in ranges.items()})
        return self._emit("rnn_static", **inputs, **numbers, **self._weights(one))

    def _dynamic_layer(self, one: Any, inputs: dict[str, Any]) -> Register:
        """One direction of a layer with a range per row and step."""
        if one.terms == 2:
            inputs = {**inputs, "x": self._joined([inputs["x"], inputs["x"]], 2)}
        columns = self._constant(one.columns_ih)
        numbers = {"columns_ih": columns, "bits": one.activation_bits, "per_row": one.per_row}
        return self._emit("rnn_dynamic", **inputs, **numbers, **self._weights(one))

    def _weights(self, one: Int8Direction) -> dict[str, Any]:
        names = ("q_weight_ih", "scale_ih", "q_weight_hh", "scale_hh", "bias_ih", "bias_hh", "q_weight_hr", "scale_hr")
        tensors = {name: self._constant(getattr(one, name)) for name in names}
        return {**tensors, "mode": one.mode, "reverse": one.reverse}

    def _constant(self, tensor: Tensor | None) -> Constant | None:
        return None if tensor is None else self.constant(tensor)


class _Walk(_Writer):
    """Writes the lines of a recurrent network, as `recurrent_walk.run_layers` and `RecurrentSequence` compute it."""

    def __init__(self, call: RecurrentLines, module: Int8Sequence, constant: Callable[[Tensor], Constant]) -> None:
        super().__init__(call.outs, constant)
        self.call, self.module = call, module
        self.two_states = bool(module.directions[0]._kind.has_cell)

    def lines(self) -> list[Line]:
        """All lines; the last ones write what the network gives."""
        x, *states = (Register(one) for one in self.call.reads)
        x, states = self._time_major(x), [self._with_batch(one) for one in states]
        finals: list[list[Register]] = []
        ways = self.module.num_directions
        for layer in range(self.module.num_layers):
            outputs = [self._direction(layer * ways + way, x, states) for way in range(ways)]
            finals += [self._finals(y) for y in outputs]
            x = outputs[0] if ways == 1 else self._joined(outputs, 2, integers=self._gives_integers(layer))
        self._give(0, *self._as_given(x))
        for place in range(2 if self.two_states else 1):
            self._stack([one[place] for one in finals], place + 1)
        return self._lines

    def _time_major(self, x: Register) -> Register:
        if self.call.rank == 2:
            return self._emit("unsqueeze", x=x, dim=1)
        return self._emit("transpose", x=x, dim0=0, dim1=1) if self.module.batch_first else x

    def _with_batch(self, state: Register) -> Register:
        return self._emit("unsqueeze", x=state, dim=1) if self.call.rank == 2 else state

    def _as_given(self, y: Register) -> tuple[str, dict[str, Any]]:
        if self.call.rank == 2:
            return "squeeze", {"x": y, "dim": 1}
        if self.module.batch_first:
            return "transpose", {"x": y, "dim0": 0, "dim1": 1}
        return "same", {"x": y}

    def _stack(self, finals: list[Register], place: int) -> None:
        """The final states of all layers and directions as one tensor."""
        rows = [self._emit("unsqueeze", x=one, dim=0) for one in finals]
        whole = rows[0] if len(rows) == 1 else self._joined(rows, 0)
        self._give(place, *(("squeeze", {"x": whole, "dim": 1}) if self.call.rank == 2 else ("same", {"x": whole})))

    def _finals(self, y: Register) -> list[Register]:
        return [self._emit("final_state", y=y, of=one) for one in ("h", "c")[: 2 if self.two_states else 1]]

    def _gives_integers(self, layer: int) -> bool:
        static = isinstance(self.module, StaticRecurrent)
        return static and (self.call.integers or layer + 1 < self.module.num_layers)

    def _direction(self, place: int, x: Register, states: list[Register]) -> Register:
        """The states of all steps of one layer in one direction."""
        one: Any = self.module.directions[place]
        first = [self._emit("select", x=state, dim=0, index=place) for state in states]
        h, c = [*first, None, None][:2]
        if isinstance(self.module, StaticRecurrent):
            layer = place // self.module.num_directions
            known = self.module.numbers()
            return self._static_layer(
                one,
                {"q_x": x, "h": h, "c": c, "quantized": self._gives_integers(layer)},
                x=known.states[layer - 1] if layer else known.input,
                h=known.states[layer],
                m=known.products[layer] if known.products else (1.0, 0),
            )
        return self._dynamic_layer(one, {"x": x, "h": h, "c": c})


@dataclass(frozen=True)
class CellLines(ModuleCall):
    """A recurrent cell, static or dynamic: a sequence of one step. `reads` are its input and, where given, its states.

    Attributes:
        rank: of its input.
        states: how many it gives; where two, its own register holds a tuple, and no line writes it.
    """

    kind: ClassVar[str] = "cell"
    rank: int
    states: int

    @property
    def outs(self) -> tuple[int, ...]:
        first = RECURRENT + self.out * SPAN
        return (self.out,) if self.states == 1 else (first, first + 1)

    def holds(self, module: nn.Module) -> bool:
        if not computes_itself(module) or not isinstance(module, Int8Cell) or module.training:
            return False
        return _is_planned(module.direction) and self.rank in (1, 2)

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> str:
        assert isinstance(module, Int8Cell)
        return "\n".join(map(str, _Step(self, module, constant).lines()))

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        inner = sources(module.direction, "activation_bits", "per_row")  # type: ignore[arg-type]
        return inner + ([(module.__dict__, "_numbers")] if isinstance(module, StaticCell) else [])


class _Step(_Writer):
    """Writes the lines of a cell, as `recurrent_walk.run_cell` and `RecurrentCell` compute it."""

    def __init__(self, call: CellLines, module: Int8Cell, constant: Callable[[Tensor], Constant]) -> None:
        super().__init__((RECURRENT + call.out * SPAN, RECURRENT + call.out * SPAN + 1), constant)
        self.call, self.module, self.outs = call, module, call.outs

    def lines(self) -> list[Line]:
        """All lines; the last ones write the states."""
        x, *states = map(self._with_batch, self.call.reads)
        h, c = [*states, None, None][:2]
        inputs, one = {"h": h, "c": c}, self.module.direction
        x = self._emit("unsqueeze", x=x, dim=0)
        if isinstance(self.module, StaticCell):
            known = self.module.numbers()
            ranges = {"x": known.input, "h": known.states[0], "m": (1.0, 0)}
            y = self._static_layer(one, {"q_x": x, **inputs, "quantized": False}, **ranges)
        else:
            y = self._dynamic_layer(one, {"x": x, **inputs})
        for place, of in enumerate(("h", "c")[: self.call.states]):
            if self.call.rank == 2:
                self._give(place, "final_state", {"y": y, "of": of})
            else:
                self._give(place, "squeeze", {"x": self._emit("final_state", y=y, of=of), "dim": 0})
        return self._lines

    def _with_batch(self, register: int) -> Register:
        one = Register(register)
        return self._emit("unsqueeze", x=one, dim=0) if self.call.rank == 1 else one

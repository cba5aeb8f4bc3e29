"""Embeddings, and int8 modules that quantise as they go, inside a region: the lines of each, and when they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.kernels.reference_plan import Constant, Line, Register
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.recurrent import StaticRecurrent
from quant.runtime.layers.recurrent_module import Int8Direction, Int8Sequence
from quant.runtime.module_call import ModuleCall
from quant.runtime.module_calls import is_untouched

RECURRENT = 1 << 40
"""The first register for values inside of recurrent layers."""

SPAN = 1 << 12
"""Registers of one recurrent layer."""


def computes_itself(module: nn.Module) -> bool:
    """Whether the module's lines are what a call of it computes: no hooks, float32, and no forward of the user's."""
    if not isinstance(module, QuantModule) or not is_untouched(module):
        return False
    forward = type(module).forward.__module__
    return module.dtype is torch.float32 and not module.backend and forward.startswith(("quant.nn.", "quant.runtime."))


def _sources(module: nn.Module, *names: str) -> list[tuple[dict[str, Any], str]]:
    """All tensors of a module, and those of these attributes that it has."""
    tensors: list[dict[str, Any]] = [module._buffers, module._parameters]
    return [(store, name) for store in tensors for name in store] + [
        (module.__dict__, name) for name in names if name in module.__dict__
    ]


@dataclass(frozen=True)
class EmbeddingCall(ModuleCall):
    """An `nn.Embedding`, or an int8 one that took its place."""

    kind: ClassVar[str] = "embedding"

    def holds(self, module: nn.Module) -> bool:
        if type(module) is nn.Embedding:
            return is_untouched(module) and module.max_norm is None and module.weight.dtype is torch.float32
        return computes_itself(module) and module.can_plan()

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        x = {"x": Register(self.reads[0])}
        if type(module) is nn.Embedding:
            return Line(self.out, "embedding", {**x, "weight": constant(module.weight)})
        return _line(self.out, x, module, constant)

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        return _sources(module)


@dataclass(frozen=True)
class Int8ModuleCall(ModuleCall):
    """An int8 module of one input, whose class says its line (`QuantModule.planned`)."""

    kind: ClassVar[str] = "int8_module"

    def holds(self, module: nn.Module) -> bool:
        return computes_itself(module) and module.can_plan()

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> Line:
        return _line(self.out, {"x": Register(self.reads[0])}, module, constant)

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        return _sources(module, "activation_bits", "per_row")


def _line(out: int, x: dict[str, Any], module: Any, constant: Callable[[Tensor], Constant]) -> Line:
    operation, settings = module.planned()
    named = {name: constant(one) if isinstance(one, Tensor) else one for name, one in settings.items()}
    return Line(out, operation, {**x, **named})


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
        return all(one._kind.native and one.can_plan() for one in module.directions) and self.rank in (2, 3)

    def line(self, module: nn.Module, constant: Callable[[Tensor], Constant]) -> str:
        assert isinstance(module, Int8Sequence)
        return "\n".join(map(str, _Walk(self, module, constant).lines()))

    def numbers(self, module: nn.Module) -> list[tuple[dict[str, Any], str]]:
        inner = [source for one in module.directions for source in _sources(one, "activation_bits", "per_row")]  # type: ignore[union-attr]
        return inner + ([(module.__dict__, "_numbers")] if isinstance(module, StaticRecurrent) else [])


class _Walk:
    """Writes the lines of a recurrent network, as `recurrent_walk.run_layers` and `RecurrentSequence` compute it."""

    def __init__(self, call: RecurrentLines, module: Int8Sequence, constant: Callable[[Tensor], Constant]) -> None:
        self.call, self.module, self.constant = call, module, constant
        self.two_states = bool(module.directions[0]._kind.has_cell)
        self._next = call.outs[-1] + 1
        self._lines: list[Line] = []

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

    def _emit(self, operation: str, **settings: Any) -> Register:
        self._next += 1
        return self._give_to(self._next, operation, settings)

    def _give_to(self, out: int, operation: str, settings: dict[str, Any]) -> Register:
        self._lines.append(Line(out, operation, settings))
        return Register(out)

    def _give(self, place: int, operation: str, settings: dict[str, Any]) -> None:
        self._give_to(self.call.outs[place], operation, settings)

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

    def _joined(self, parts: list[Register], dim: int, *, integers: bool = False) -> Register:
        return self._emit("cat" if integers else "cat_f32", tensors=tuple(parts), dim=dim)

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
            return self._emit("rnn_static", **self._static(one, layer, x, h, c))
        if one.terms == 2:
            x = self._joined([x, x], 2)
        return self._emit(
            "rnn_dynamic",
            x=x,
            h=h,
            c=c,
            columns_ih=self._constant(one.columns_ih),
            bits=one.activation_bits,
            per_row=one.per_row,
            **self._weights(one),
        )

    def _static(self, one: Any, layer: int, x: Register, h: Any, c: Any) -> dict[str, Any]:
        known = self.module.numbers()
        names = ("x", known.states[layer - 1] if layer else known.input), ("h", known.states[layer])
        ranges = dict([*names, ("m", known.products[layer] if known.products else (1.0, 0))])
        numbers = {f"{name}_scale": scale for name, (scale, _) in ranges.items()}
        numbers.update({f"{name}_zero_point": zero for name, (_, zero) in ranges.items()})
        return {"q_x": x, "h": h, "c": c, **numbers, **self._weights(one), "quantized": self._gives_integers(layer)}

    def _weights(self, one: Int8Direction) -> dict[str, Any]:
        names = ("q_weight_ih", "scale_ih", "q_weight_hh", "scale_hh", "bias_ih", "bias_hh", "q_weight_hr", "scale_hr")
        tensors = {name: self._constant(getattr(one, name)) for name in names}
        return {**tensors, "mode": one.mode, "reverse": one.reverse}

    def _constant(self, tensor: Tensor | None) -> Constant | None:
        return None if tensor is None else self.constant(tensor)

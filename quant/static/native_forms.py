"""Which instructions have a plan: each as lines of a plan's text, or the reason why not.

Nothing here depends on single operators: an int8 layer or a kernel has a line where the plan's table has its kernel,
and other operators define their lines in `quant/ops/` (`ops/planning.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch import nn

from quant.graph import Graph, Node, written_arguments, written_origin
from quant.kernels import plan_check
from quant.kernels.plan_sizes import dimensions_in
from quant.kernels.reference_ops import OPS
from quant.kernels.reference_plan import Line, Register
from quant.ops import planning, recurrent
from quant.ops.call import StaysFloat
from quant.ops.planning import (
    NumberOf,
    Opened,
    PartsOf,
    PlacesOf,
    PlanCall,
    QuotientOf,
    RankCheck,
    RankOf,
    Symbol,
    TupleOf,
    Unplanned,
    fixed,
)
from quant.ops.registry import real_form, recognise
from quant.ops.shapes import planned_shape
from quant.ops.views import View
from quant.runtime.chained_lines import Lines, chained
from quant.runtime.constant_calls import ConstantsCall, is_constant
from quant.runtime.instructions import (
    Conversion,
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    RecurrentCall,
    TakeSequence,
)
from quant.runtime.int8_layer import Int8Layer
from quant.runtime.keys import LayerKey
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.module_call import ModuleCall
from quant.runtime.names import has_submodule, submodule
from quant.runtime.trees import Attr, Ref, map_leaves
from quant.static.assembly import Assembled

Piece: TypeAlias = "Line | LayerCall | ModuleCall"
"""A line of text, or a call that becomes one at run time with a layer's or module's current numbers."""


@dataclass(frozen=True)
class Planned:
    """An instruction's form in a native call.

    Attributes:
        pieces: in order; none where there is a symbol.
        symbol: the symbolic value, where it is no tensor.
        exact: whether its bits are those of the instruction by itself.
        moves_reals: whether it is a float view or reads a shape, which torch also does without a copy.
        count: the number of values of a float view, as captured.
        in_order: whether it is a float view that keeps the order of the values.
        reads_rank: whether the captured number of dimensions of a tensor decided what it is.
        rank_by_size: whether its own number of dimensions depends on a size.
        int8: whether it is a call of the user's that integers compute.
        indices: whether it is a view of int64, which a plan reads and does not give out.
    """

    pieces: tuple[Piece, ...] = ()
    symbol: Symbol | None = None
    exact: bool = True
    moves_reals: bool = False
    count: int = 0
    in_order: bool = False
    reads_rank: bool = False
    rank_by_size: bool = False
    int8: bool = False
    indices: bool = False

    @property
    def stays_inside(self) -> bool:
        """Whether what is read from outside of a native call is computed once more there."""
        return self.symbol is not None or self.indices


class Planner:
    """Plans instructions of one captured module.

    Attributes:
        symbols: by id, of the instructions planned so far in this region.
        kept_tuples: calls whose tuple is read by others than what opens it at once.
    """

    def __init__(
        self, assembled: Assembled, graph: Graph, root: nn.Module, layer: Callable[[LayerKey], Int8Layer]
    ) -> None:
        self.program, self.operators = assembled.program, assembled.operators
        self.graph, self.root, self.layer = graph, root, layer
        self.symbols: dict[int, Symbol] = {}
        self._written = views_written_to(graph)
        writing = (node for node in graph.nodes if node.writes)
        self._changed = [written_origin(graph, one) for node in writing for one in written_arguments(node)]
        self.kept_tuples: set[int] = set()
        self._read_shape = False

    def plan(self, instruction: Instruction) -> Planned:
        """The instruction's form in a native call.

        Raises:
            Unplanned: it has none; the message says why.
        """
        self._read_shape = False
        planned, operator = self._form(instruction), self.operators.get(instruction.out)
        by_size = isinstance(operator, View) and operator.rank_by_size
        return replace(planned, reads_rank=self._read_shape, rank_by_size=by_size)

    def _form(self, instruction: Instruction) -> Planned:
        if isinstance(instruction, LayerCall):
            return self._layer(instruction)
        if isinstance(instruction, (FloatCall, Guard)):
            return self._float(instruction)
        if isinstance(instruction, RecurrentCall):
            call = self._call(instruction)
            return self._planned(call, recurrent.planned(call, instruction.integers))
        if isinstance(instruction, TakeSequence):
            return self._sequence(instruction)
        if isinstance(instruction, IntegerMove):
            call = self._call(instruction)
            call.rescaled = instruction.rescaled
            return self._planned(call, self.operators[instruction.out].plan(call))
        if isinstance(instruction, (KernelCall, Conversion)) and instruction.kernel in plan_check.table():
            return Planned((Line(instruction.out, instruction.kernel, self._settings(instruction)),))
        raise Unplanned(f"{instruction.kind} has no native kernel")

    def _sequence(self, instruction: TakeSequence) -> Planned:
        known = self.symbols.get(instruction.source)
        if not isinstance(known, TupleOf):
            raise Unplanned("the recurrent layer has no native call")
        states = known.part(0)
        assert not isinstance(states, TupleOf)
        return Planned(tuple(_pieces(instruction.out, states)))

    def keep_symbols_of(self, registers: Collection[int]) -> None:
        """Forget symbols of other registers, and ranks, which a region checks of its own inputs alone."""
        for index, symbol in list(self.symbols.items()):
            sources = {symbol.source}
            if isinstance(symbol, NumberOf):
                sources = {one.index for one in dimensions_in(symbol.number)}
            elif isinstance(symbol, QuotientOf):
                sources = {one.index for side in (symbol.left, symbol.right) for one in dimensions_in(side)}
            if isinstance(symbol, (RankOf, RankCheck, TupleOf, PlacesOf)) or not sources <= set(registers):
                del self.symbols[index]

    def rounds_otherwise(self, instruction: Instruction) -> bool:
        """Whether a kernel computes a float call of the user's with other last bits than torch."""
        form = real_form(self._node(instruction), self.root)
        return form is not None and not form.exact

    def _node(self, instruction: Instruction) -> Node:
        """The captured call that an instruction computes."""
        return self.graph.nodes[self.program.values[instruction.out].node]

    def _layer(self, instruction: LayerCall) -> Planned:
        layer: object = self.layer(instruction.layer)
        if not isinstance(layer, StaticLayer):
            raise Unplanned(f"{type(layer).__name__} computes by itself")
        product = layer.product
        if not product.plans:
            raise Unplanned(f"{product.name} with a dilation has no plan")
        self.tensor(Ref(instruction.source))
        return Planned((instruction,))

    def _settings(self, instruction: KernelCall | Conversion) -> dict[str, Any]:
        """The arguments by the parameter names of the operator's reference."""
        args, kwargs = instruction.arguments
        bound = inspect.signature(OPS[instruction.kernel]).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name))
        known = plan_check.table()[instruction.kernel]
        settings = {
            name: value for name, value in arguments.items() if name in known or not (value is None or value is False)
        }
        return {name: self._setting(instruction.kernel, name, value, known) for name, value in settings.items()}

    def _setting(self, kernel: str, name: str, value: Any, known: Mapping[str, plan_check.Setting]) -> Any:
        """A value for the text, if the plan's table accepts it."""
        if name not in known or not known[name].has_word(value):
            raise Unplanned(f"{kernel} with {name}={value} has no native kernel")
        if known[name].takes_sizes:
            return map_leaves(self._extent, value)
        if not known[name].is_register:
            return fixed(name, value)
        if not isinstance(value, Ref):
            raise Unplanned("an operand is no activation")
        return self.tensor(value)

    def _extent(self, value: Any) -> Any:
        """A size among the settings of a kernel: a number, or one that is read from a tensor."""
        known = self.symbols.get(value.index) if isinstance(value, Ref) else None
        if isinstance(known, NumberOf):
            return known.number
        return fixed("size", value)

    def tensor(self, value: Ref) -> Register:
        """Raise Unplanned for dtypes other than uint8 and float32; the user's own calls may have any."""
        if value.index in self.symbols:
            raise Unplanned("it reads a size or a tuple as a tensor")
        held = self.program.values[value.index]
        if held.dtype is None or (held.qparams is None and held.dtype != torch.float32):
            raise Unplanned("it reads what is no float32 tensor")
        return Register(value.index)

    def indices(self, value: Ref) -> Register:
        """Raise Unplanned for other dtypes than int64."""
        if value.index in self.symbols or self.program.values[value.index].dtype is not torch.int64:
            raise Unplanned("its indices are not int64")
        return Register(value.index)

    def holds_bytes(self, value: Ref) -> bool:
        """Not a value of this library's, whose bytes stand for other numbers."""
        held = self.program.values[value.index]
        return held.qparams is None and held.dtype in (torch.uint8, torch.bool)

    def constant(self, value: Attr) -> Attr:
        """Raise Unplanned for what is no float32 parameter or buffer, or is written to."""
        owner, _, name = value.path.rpartition(".")
        if not has_submodule(self.root, owner) or not is_constant(submodule(self.root, owner), name):
            raise Unplanned("it reads what is no float32 parameter or buffer")
        if value in self._changed:
            raise Unplanned("it reads what the forward writes")
        return value

    def symbol(self, value: Ref) -> Symbol | None:
        """The symbolic content of a register that holds no tensor; None where it is unknown."""
        return self.symbols.get(value.index)

    def size(self, index: int) -> Symbol | None:
        """The same for a float value of the graph."""
        values = self.program.values
        reals = {values[place].node: one for place, one in self.symbols.items() if values[place].qparams is None}
        return reals.get(index)

    def shape(self, register: Register) -> tuple[int, ...]:
        """The shape of a tensor, as captured; a plan that depends on it holds for this number of dimensions."""
        self._read_shape = True
        return self.captured_shape(register.index)

    def captured_shape(self, index: int) -> tuple[int, ...]:
        """The shape that a tensor had at capture."""
        shape = self.program.shape(index)
        assert shape is not None
        return shape

    def dtype(self, register: Register) -> torch.dtype | None:
        """The dtype of a value, as captured; None where it is no tensor."""
        return self.program.values[register.index].dtype

    def _float(self, instruction: FloatCall | Guard) -> Planned:
        """A call in float."""
        call, operator = self._call(instruction), self.operators.get(instruction.out)
        known = call.symbol()
        if isinstance(known, TupleOf) and call.node.target is getitem and isinstance(call.args[1], int):
            return self._planned(call, known.part(call.args[1]))
        if operator is not None and call.node.index not in self._written:
            with suppress(Unplanned):
                lines = operator.plan_real(call)
                if lines is not None:
                    return self._planned(call, lines)
        shape = planned_shape(call)
        if shape is not None:
            return self._planned(call, shape, moves_reals=True)
        if self._reads_indices(call):
            return self._view_of_indices(call)
        form = real_form(call.node, self.root)
        copies = call.node.index not in self._written
        if form is not None and (copies or not form.moves):
            planned = self._planned(call, form.plan(call), exact=form.exact, moves_reals=form.moves)
            return replace(planned, int8=isinstance(call.module, QuantModule))
        if not isinstance(operator, View) or not operator.planned_in_reals or not copies:
            raise Unplanned("it is computed in float")
        return self._planned(call, operator.plan(call), moves_reals=True)

    def _reads_indices(self, call: PlanCall) -> bool:
        """Whether a call's first operand is a tensor of int64, or parts of one, and what it gives is that too."""
        if self.program.values[call.out].dtype not in (torch.int64, None):
            return False
        x, known = call.argument(0, "input"), call.symbol()
        source = known.source if isinstance(known, PartsOf) else x.index if isinstance(x, Ref) else None
        return source is not None and self.program.values[source].dtype is torch.int64

    def _view_of_indices(self, call: PlanCall) -> Planned:
        """A part of indices, or these in another shape."""
        call.moves_indices = True
        form = real_form(call.node, self.root)
        if form is not None and form.moves:
            return self._planned(call, form.plan(call), moves_reals=True)
        try:
            operator = recognise(call.node, self.graph, self.root, torch.int64).operator
        except StaysFloat as reason:
            raise Unplanned(str(reason)) from None
        if not isinstance(operator, View) or not operator.planned_in_reals:
            raise Unplanned("it is computed of indices")
        return self._planned(call, operator.plan(call), moves_reals=True)

    def _call(self, instruction: FloatCall | Guard | IntegerMove | RecurrentCall) -> PlanCall:
        node, (args, kwargs) = self._node(instruction), instruction.arguments
        return PlanCall(self, node, self.root, instruction.out, args, kwargs)

    def _planned(
        self, call: PlanCall, planned: planning.Planned, *, exact: bool = True, moves_reals: bool = False
    ) -> Planned:
        if isinstance(planned, Opened):
            if call.out in self.kept_tuples:
                raise Unplanned("what it gives goes on as a tuple")
            self.symbols[call.out] = planned.parts
            return Planned((planned.call,), planned.parts)
        if isinstance(planned, Symbol):
            self.symbols[call.out] = planned
            return Planned(symbol=planned, moves_reals=moves_reals)
        pieces = (planned,) if isinstance(planned, ModuleCall) else tuple(_pieces(call.out, planned))
        count = math.prod(self.captured_shape(call.out)) if moves_reals and self._is_tensor(call.out) else 0
        operator = self.operators.get(call.out)
        in_order = moves_reals and isinstance(operator, View) and operator.keeps_order
        indices = self.program.values[call.out].dtype is torch.int64
        return Planned(pieces, None, exact, moves_reals, count, in_order, indices=indices)

    def _is_tensor(self, index: int) -> bool:
        return self.program.values[index].dtype is not None


def _pieces(out: int, operations: Lines) -> list[Piece]:
    """A call as operations over new registers of the text."""
    if len(operations) > MOST_LINES:
        raise Unplanned(f"it takes more than {MOST_LINES} operations")
    pieces: list[Piece] = []
    for line in chained(operations, out, CHAINED + out * MOST_LINES):
        constants = {name: value for name, value in line.settings.items() if isinstance(value, Attr)}
        pieces.append(_with_attributes(line, constants) if constants else line)
    return pieces


def _with_attributes(line: Line, constants: Mapping[str, Attr]) -> ConstantsCall:
    """A line of which some settings are parameters or buffers, all of one module."""
    paths = [one.path.rpartition(".") for one in constants.values()]
    [owner, *others] = {owner for owner, _, _ in paths}
    if others:
        raise Unplanned("it reads parameters of several modules")
    named = {setting: f"{{{name}}}" for setting, (_, _, name) in zip(constants, paths, strict=True)}
    reads = [one.index for one in line.settings.values() if isinstance(one, Register)]
    whole = str(Line(line.out, line.op, {**line.settings, **named}))
    return ConstantsCall(line.out, tuple(reads), owner, tuple(dict.fromkeys(name for _, _, name in paths)), whole)


MOST_LINES = 8
"""Operations that one call becomes at most."""

CHAINED = 1 << 24
"""The first register for values between the operations of one call."""


def views_written_to(graph: Graph) -> set[int]:
    """The values through which some call of the graph writes to a tensor that outlives the run.

    A planned run copies where torch creates a view, so a write to the copy would not reach the input or buffer. Writes
    to other tensors do not show: a captured graph reads no value after another one that shares its memory was changed.
    """
    written: set[int] = set()
    for node in graph.nodes:
        waiting = [*node.refs] if node.writes else []
        if node.writes and node.args and isinstance(node.args[0], (Ref, Attr)):
            waiting = [node.args[0].index] if isinstance(node.args[0], Ref) else []
        while waiting:
            index = waiting.pop()
            if index not in written:
                written.add(index)
                waiting += graph.nodes[index].refs
    return written

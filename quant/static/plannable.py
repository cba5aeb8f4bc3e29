"""Which instructions have a plan: each as lines of a plan's text, or the reason why not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quant.graph import Graph, Node, Ref, leaves
from quant.kernels.reference_ops import OPS
from quant.kernels.reference_plan import Line, Register
from quant.ops.call import StaysFloat, reads_only_rank, what
from quant.ops.pad import Pad
from quant.ops.registry import recognise
from quant.static.instructions import Conversion, FloatCall, Guard, Instruction, IntegerMove, KernelCall, LayerCall
from quant.static.layers import StaticLayer
from quant.static.plannable_moves import MOVES, Move, Symbol, numbers
from quant.static.plannable_reals import BEFORE, REALS, ModuleCall, Unplanned, module_call, writes_in_place
from quant.static.plannable_reals import MOVES as REAL_MOVES

if TYPE_CHECKING:
    from quant.static.program import Program


class Planner:
    """Plans instructions of one captured module.

    Attributes:
        symbols: by id, of the instructions planned so far in this region.
        rounded: float values that are only read to be quantised.
    """

    def __init__(self, program: Program, graph: Graph, root: nn.Module, layer: Callable[[str], StaticLayer]) -> None:
        self.program, self.graph, self.root, self.layer = program, graph, root, layer
        self.symbols: dict[int, Symbol] = {}
        self._views_are_safe = not writes_in_place(graph, root)
        self.rounded: set[int] = set()

    def plan(self, instruction: Instruction) -> list[Line] | LayerCall | ModuleCall | Symbol:
        """Lines of text; the instruction itself for a layer, whose numbers are read when it runs; a call of a float
        module, likewise; or a symbol.

        Raises:
            Unplanned: with the reason.
        """
        if isinstance(instruction, LayerCall):
            return self._layer(instruction)
        if isinstance(instruction, (FloatCall, Guard)):
            return self._call(instruction)
        if isinstance(instruction, IntegerMove):
            return self._move(instruction)
        if not isinstance(instruction, (KernelCall, Conversion)) or instruction.kernel not in PLANNED:
            raise Unplanned(f"{instruction.kind} has no native kernel")
        return [Line(instruction.out, instruction.kernel, self._settings(instruction))]

    def _layer(self, instruction: LayerCall) -> LayerCall:
        op = self.layer(instruction.layer).op
        if op not in ("linear", "conv"):
            raise Unplanned(f"{op} has no plan")
        self.check_tensor(Ref(instruction.source))
        return instruction

    def _settings(self, instruction: KernelCall | Conversion) -> dict[str, Any]:
        """The arguments by the names that the operator's reference has for them."""
        args, kwargs = instruction.arguments
        bound = inspect.signature(OPS[instruction.kernel]).bind(*args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        settings.update(settings.pop("options", {}))
        if instruction.kernel == "interpolate":
            _check_interpolate(settings)
        for name, value in settings.items():
            settings[name] = self._registers(value) if name in OPERANDS else numbers(name, value)
        return settings

    def _registers(self, value: Any) -> Any:
        if isinstance(value, Ref):
            self.check_tensor(value)
            return Register(value.index)
        raise Unplanned("an operand is no activation")

    def check_tensor(self, ref: Ref) -> None:
        """Regions take uint8 and float32; what the user computed in float may be anything."""
        if ref.index in self.symbols:
            raise Unplanned("it reads a size or a tuple as a tensor")
        value = self.program.values[ref.index]
        if value.dtype is None or (value.qparams is None and value.dtype != torch.float32):
            raise Unplanned("it reads what is no float32 tensor")

    def _node(self, instruction: Instruction) -> Node:
        """The captured call that an instruction was made of."""
        return self.graph.nodes[self.program.values[instruction.out].node]

    def _pad(self, instruction: FloatCall | Guard) -> Line:
        """Reals with zeros around them, which the plan may as well put around the integers."""
        node = self._node(instruction)
        module = self.root.get_submodule(node.target) if node.kind == "module" else None
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise Unplanned("it has hooks")
        try:
            known = recognise(node, self.graph, self.root)
        except StaysFloat as reason:
            raise Unplanned(str(reason)) from None
        pad = known.operator
        if not isinstance(pad, Pad) or pad.mode != "constant" or not all(map(_is_width, leaves(pad.widths))):
            raise Unplanned("it is computed in float")
        [source] = [one for one in instruction.reads if self.program.values[one].node == known.inputs[0]]
        self.check_tensor(Ref(source))
        settings = {"q": Register(source), "widths": pad.widths, "mode": "constant", "fill": 0}
        return Line(instruction.out, "pad", settings)

    def _call(self, instruction: FloatCall | Guard) -> list[Line] | ModuleCall | Symbol:
        """A call in float."""
        if instruction.out in self.rounded:
            with suppress(Unplanned):
                return [self._pad(instruction)]
        try:
            return self._symbol(instruction)
        except Unplanned:
            node, (args, kwargs) = self._node(instruction), instruction.arguments
            name = what(node, self.root)
            moves = self._views_are_safe and name in REAL_MOVES
            if not moves and name not in REALS and node.kind != "module":
                raise
        made = Move(self, node, args, kwargs, name)
        if node.kind == "module" and not moves:
            return module_call(made, instruction.out)
        done = (MOVES if moves else REALS)[name](made)
        if isinstance(done, Symbol):
            self.symbols[instruction.out] = done
            return done
        lines = _chain(instruction.out, done)
        if kwargs.get("dropout"):
            return ModuleCall(instruction.out, args[0].index, node.owner, "attention", lines[0])
        return lines

    def shape(self, register: Register) -> tuple[int, ...]:
        """Of a tensor, as captured."""
        shape = self.program.shape(register.index)
        assert shape is not None
        return shape

    def dtype(self, register: Register) -> torch.dtype | None:
        """Of a value, as captured; None where it is no tensor."""
        return self.program.values[register.index].dtype

    def _symbol(self, instruction: FloatCall | Guard) -> Symbol:
        """A call that reads a shape, where it costs nothing to know it."""
        node = self._node(instruction)
        args, kwargs = instruction.arguments
        if kwargs or not args or not isinstance(args[0], Ref):
            raise Unplanned("it is computed in float")
        name, rest = what(node, self.root), list(args[1:])
        made = self._rank(node, args)
        if (node.kind == "function" and name == "getattr" and rest == ["shape"]) or (name == "size" and not rest):
            made = Symbol("shape", args[0].index)
        elif name == "size" and node.kind == "method" and len(rest) == 1 and isinstance(rest[0], int):
            made = Symbol("size", args[0].index, rest[0])
        elif name == "getitem" and len(rest) == 1 and isinstance(rest[0], int):
            shape = self.symbols.get(args[0].index)
            if shape is not None and shape.kind == "shape":
                made = Symbol("size", shape.source, rest[0])
        if made is None:
            raise Unplanned("it is computed in float")
        self.check_tensor(Ref(made.source))
        self.symbols[instruction.out] = made
        return made

    def _rank(self, node: Node, args: tuple[Any, ...]) -> Symbol | None:
        """A look at the number of dimensions, which that of the region's inputs decides."""
        if reads_only_rank(node):
            return Symbol("rank", args[0].index)
        before = self.symbols.get(args[0].index)
        if before is None or before.kind != "rank" or any(isinstance(arg, Ref) for arg in args[1:]):
            return None
        compares = node.kind == "function" and getattr(node.target, "__module__", "") == "_operator"
        kind = "check" if node.kind == "guard" else "rank"
        return Symbol(kind, before.source) if compares or kind == "check" else None

    def _move(self, instruction: IntegerMove) -> list[Line] | Symbol:
        node = self._node(instruction)
        args, kwargs = instruction.arguments
        name = what(node, self.root)
        handler = MOVES.get(name)
        if handler is None:
            raise Unplanned(f"{name} has no native kernel")
        move = Move(self, node, args, kwargs, name)
        move.rescaled = instruction.rescaled
        made = handler(move)
        if isinstance(made, Symbol):
            self.symbols[instruction.out] = made
            return made
        return _chain(instruction.out, made)


def _chain(out: int, made: list[tuple[str, dict[str, Any]]]) -> list[Line]:
    """A call as operations: `BEFORE` is the one before, over registers of the text's own."""
    lines = []
    for place, (op, settings) in enumerate(made):
        last = place == len(made) - 1
        own = out if last else CHAINED + out * 8 + place
        before = Register(CHAINED + out * 8 + place - 1)
        settings = {name: before if value == BEFORE else value for name, value in settings.items()}
        lines.append(Line(own, op, settings))
    return lines


CHAINED = 1 << 24
"""Registers from here on hold what is between the operations of one move."""

PLANNED = ("quantize", "dequantize", "lookup", "add", "mul", "max_pool", "avg_pool", "adaptive_avg_pool",
           "adaptive_max_pool", "mean", "interpolate", "pad")  # fmt: skip
"""Operators of `reference_ops.OPS` that csrc/core/plan has, besides the layers."""

OPERANDS = ("x", "q", "q_a", "q_b")
"""Names of arguments that are activations."""


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _check_interpolate(settings: dict[str, Any]) -> None:
    if settings.get("mode") not in ("nearest", "nearest-exact"):
        raise Unplanned(f"interpolation {settings.get('mode')!r} has no native kernel")
    for name in ("align_corners", "antialias"):
        if settings.pop(name, None):
            raise Unplanned(f"interpolation with {name} has no native kernel")

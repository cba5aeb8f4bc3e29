"""Which instructions have a plan: each as lines of a plan's text, or the reason why not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.graph import Graph, Node, Ref, leaves
from quant.kernels.reference_ops import OPS
from quant.kernels.reference_plan import Line, Register
from quant.static.layers import StaticLayer
from quant.static.lower import Instruction
from quant.static.meaning import StaysFloat, what
from quant.static.plannable_reals import MOVES as REAL_MOVES
from quant.static.plannable_reals import REALS, ModuleCall, Unplanned, module_call, writes_in_place
from quant.static.recognise import recognise


@dataclass(frozen=True)
class Symbol:
    """A register that holds no tensor: what it is in terms of a tensor's register.

    Attributes:
        kind: "shape", "size" (one number of a shape, at `detail`) or "parts" (chunks: (count, dimension) in `detail`).
    """

    kind: str
    source: int
    detail: Any = None


class Planner:
    """Plans instructions of one captured module.

    Attributes:
        symbols: by register, of the instructions planned so far in this region.
        rounded: float registers that are only read to be quantised.
    """

    def __init__(self, graph: Graph, root: nn.Module, layer: Callable[[str], StaticLayer]) -> None:
        self.graph, self.root, self.layer = graph, root, layer
        self.symbols: dict[int, Symbol] = {}
        self._views_are_safe = not writes_in_place(graph, root)
        self.rounded: set[int] = set()

    def plan(self, instruction: Instruction) -> list[Line] | Instruction | ModuleCall | Symbol:
        """Lines of text; the instruction itself for a layer, whose numbers are read when it runs; a call of a float
        module, likewise; or a symbol.

        Raises:
            Unplanned: with the reason.
        """
        if instruction.op == "layer":
            return self._layer(instruction)
        if instruction.op == "call":
            return self._call(instruction)
        if instruction.op == "move":
            return self._move(instruction)
        if instruction.op not in PLANNED:
            raise Unplanned(f"{instruction.op} has no native kernel")
        return [Line(instruction.out, instruction.op, self._settings(instruction))]

    def _layer(self, instruction: Instruction) -> Instruction:
        op = self.layer(instruction.target).op
        if op not in ("linear", "conv"):
            raise Unplanned(f"{op} has no native kernel")
        self.check_tensor(instruction.args[0])
        return instruction

    def _settings(self, instruction: Instruction) -> dict[str, Any]:
        """The arguments by the names that the operator's reference has for them."""
        bound = inspect.signature(OPS[instruction.op]).bind(*instruction.args, **instruction.kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        settings.update(settings.pop("options", {}))
        if instruction.op == "interpolate":
            _check_interpolate(settings)
        for name, value in settings.items():
            settings[name] = self._registers(value) if name in OPERANDS else _numbers(name, value)
        return settings

    def _registers(self, value: Any) -> Any:
        if isinstance(value, Ref):
            self.check_tensor(value)
            return Register(value.index)
        raise Unplanned("an operand is no activation")

    def check_tensor(self, ref: Ref) -> None:
        """Regions take uint8 and float32: an even register may hold anything that the user computed."""
        if ref.index in self.symbols:
            raise Unplanned("it reads a size or a tuple as a tensor")
        meta = self.graph.nodes[ref.index // 2].meta
        if meta is None or (ref.index % 2 == 0 and meta.dtype != torch.float32):
            raise Unplanned("it reads what is no float32 tensor")

    def _pad(self, instruction: Instruction) -> Line:
        """Reals with zeros around them, which the plan may as well put around the integers."""
        node = self.graph.nodes[instruction.target]
        module = self.root.get_submodule(node.target) if node.kind == "module" else None
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise Unplanned("it has hooks")
        try:
            meaning = recognise(node, self.graph, self.root)
        except StaysFloat as reason:
            raise Unplanned(str(reason)) from None
        widths = leaves(meaning.attrs.get("widths"))
        if meaning.op != "pad" or meaning.attrs["mode"] != "constant" or not all(map(_is_width, widths)):
            raise Unplanned("it is computed in float")
        source = Ref(2 * meaning.inputs[0])
        self.check_tensor(source)
        settings = {"q": Register(source.index), "widths": meaning.attrs["widths"], "mode": "constant", "fill": 0}
        return Line(instruction.out, "pad", settings)

    def _call(self, instruction: Instruction) -> list[Line] | ModuleCall | Symbol:
        """A call in float."""
        if instruction.out in self.rounded:
            with suppress(Unplanned):
                return [self._pad(instruction)]
        try:
            return self._symbol(instruction)
        except Unplanned:
            node, (args, kwargs) = self.graph.nodes[instruction.target], instruction.args
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
        meta = self.graph.nodes[register.index // 2].meta
        assert meta is not None
        return tuple(meta.shape)

    def _symbol(self, instruction: Instruction) -> Symbol:
        """A call that reads a shape, where it costs nothing to know it."""
        node = self.graph.nodes[instruction.target]
        args, kwargs = instruction.args
        if kwargs or not args or not isinstance(args[0], Ref):
            raise Unplanned("it is computed in float")
        name, rest = what(node, self.root), list(args[1:])
        made: Symbol | None = None
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

    def _move(self, instruction: Instruction) -> list[Line] | Symbol:
        node = self.graph.nodes[instruction.target]
        args, kwargs = instruction.args
        name = what(node, self.root)
        handler = MOVES.get(name)
        if handler is None:
            raise Unplanned(f"{name} has no native kernel")
        made = handler(Move(self, node, args, kwargs, name))
        if isinstance(made, Symbol):
            self.symbols[instruction.out] = made
            return made
        return _chain(instruction.out, made)


def _chain(out: int, made: list[tuple[str, dict[str, Any]]]) -> list[Line]:
    """A move as operations: each reads the one before, over registers of the text's own."""
    lines = []
    for place, (op, settings) in enumerate(made):
        last = place == len(made) - 1
        own = out if last else CHAINED + out * 8 + place
        if place:
            settings = {**settings, "x": Register(CHAINED + out * 8 + place - 1)}
        lines.append(Line(own, op, settings))
    return lines


CHAINED = 1 << 24
"""Registers from here on hold what is between the operations of one move."""

PLANNED = ("quantize", "dequantize", "lookup", "add", "mul", "max_pool", "avg_pool", "adaptive_avg_pool",
           "adaptive_max_pool", "mean", "interpolate", "pad")  # fmt: skip
"""Operators of `reference_ops.OPS` that csrc/plan*.cpp has, besides the layers."""

OPERANDS = ("x", "q", "q_a", "q_b")
"""Names of arguments that are activations."""


def _is_width(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _numbers(name: str, value: Any) -> Any:
    if any(isinstance(leaf, Ref) for leaf in leaves(value)):
        raise Unplanned(f"its {name} is computed at run time")
    return value


def _check_interpolate(settings: dict[str, Any]) -> None:
    if settings.get("mode") not in ("nearest", "nearest-exact"):
        raise Unplanned(f"interpolation {settings.get('mode')!r} has no native kernel")
    for name in ("align_corners", "antialias"):
        if settings.pop(name, None):
            raise Unplanned(f"interpolation with {name} has no native kernel")


class Move:
    """A call that moves values, with its arguments by place or name."""

    def __init__(self, planner: Planner, node: Node, args: Any, kwargs: Any, name: str) -> None:
        self.planner, self.node, self.args, self.kwargs, self.name = planner, node, args, kwargs, name
        self.module: Any = planner.root.get_submodule(node.target) if node.kind == "module" else None

    def source(self) -> Register:
        """The tensor that is moved."""
        if not self.args or not isinstance(self.args[0], Ref):
            raise Unplanned("its operand is no activation")
        self.planner.check_tensor(self.args[0])
        return Register(self.args[0].index)

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """A setting that is no activation."""
        value = self.args[place] if place < len(self.args) else self.kwargs.get(name, default)
        return _numbers(name, value)

    def rest(self) -> Sequence[Any]:
        """The settings after the tensor, given one by one or as one list."""
        if self.kwargs:
            raise Unplanned(f"{self.name} with named arguments has no plan")
        rest = self.args[1:]
        return rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest


Made = list[tuple[str, dict[str, Any]]]


def _same(move: Move) -> Made:
    return [("same", {"x": move.source()})]


def _reshape(move: Move) -> Made:
    shape: list[Any] = []
    for size in move.rest():
        symbol = move.planner.symbols.get(size.index) if isinstance(size, Ref) else None
        if symbol is not None and symbol.kind == "size":
            shape.append(Register(symbol.source, symbol.detail))
        elif isinstance(size, int) and not isinstance(size, bool):
            shape.append(size)
        else:
            raise Unplanned("its shape is computed at run time")
    if not shape:
        raise Unplanned(f"{move.name} to no dimensions has no plan")
    return [("reshape", {"x": move.source(), "shape": tuple(shape)})]


def _flatten(move: Move) -> Made:
    if move.module is not None:
        start, end = move.module.start_dim, move.module.end_dim
    else:
        start, end = move.get(1, "start_dim", 0), move.get(2, "end_dim", -1)
    return [("flatten", {"x": move.source(), "start": start, "end": end})]


def _unflatten(move: Move) -> Made:
    """A reshape with the other sizes as they are."""
    if move.module is not None:
        dim, sizes = move.module.dim, move.module.unflattened_size
    else:
        dim, sizes = move.get(1, "dim"), move.get(2, "sizes")
    source = move.source()
    rank = len(move.planner.shape(source))
    if not isinstance(dim, int) or not all(isinstance(size, int) for size in sizes):
        raise Unplanned("its sizes are computed at run time")
    dim %= rank
    before, after = ([Register(source.index, d) for d in part] for part in (range(dim), range(dim + 1, rank)))
    return [("reshape", {"x": source, "shape": (*before, *sizes, *after)})]


def _permute(move: Move) -> Made:
    return [("permute", {"x": move.source(), "dims": tuple(_numbers("dims", list(move.rest())))})]


def _transpose(move: Move) -> Made:
    return [("transpose", {"x": move.source(), "dim0": move.get(1, "dim0"), "dim1": move.get(2, "dim1")})]


def _unsqueeze(move: Move) -> Made:
    return [("unsqueeze", {"x": move.source(), "dim": move.get(1, "dim")})]


def _squeeze(move: Move) -> Made:
    dim = move.get(1, "dim")
    if not isinstance(dim, int):
        raise Unplanned("squeeze without one dimension has no plan")
    return [("squeeze", {"x": move.source(), "dim": dim})]


def _narrow(move: Move) -> Made:
    start, length = move.get(2, "start"), move.get(3, "length")
    if start < 0:
        raise Unplanned("narrow from the end has no plan")
    place = {"dim": move.get(1, "dim"), "start": start, "end": start + length, "step": 1}
    return [("slice", {"x": move.source(), **place})]


def _chunk(move: Move) -> Symbol:
    return Symbol("parts", move.source().index, (move.get(1, "chunks"), move.get(2, "dim", 0)))


def _getitem(move: Move) -> Made:
    place = move.get(1, "index")
    symbol = move.planner.symbols.get(move.args[0].index) if isinstance(move.args[0], Ref) else None
    if symbol is not None:
        if symbol.kind != "parts" or not isinstance(place, int):
            raise Unplanned("this use of a tuple has no plan")
        chunks, dim = symbol.detail
        settings = {"x": Register(symbol.source), "chunks": chunks, "dim": dim, "index": place}
        return [("chunk", settings)]
    source, made, dim = move.source(), [], 0
    for one in place if isinstance(place, tuple) else (place,):
        if isinstance(one, int) and not isinstance(one, bool):
            made.append(("select", {"x": source, "dim": dim, "index": one}))
        elif isinstance(one, slice) and (one.step is None or one.step > 0):
            if one != slice(None):
                settings = {"dim": dim, "start": one.start, "end": one.stop, "step": one.step or 1}
                made.append(("slice", {"x": source, **settings}))
            dim += 1
        else:
            raise Unplanned("this index has no plan")
    return made or [("same", {"x": source})]


def _cat(move: Move) -> Made:
    tensors = move.args[0] if move.args else None
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(one, Ref) for one in tensors):
        raise Unplanned("it joins what is no activation")
    for one in tensors:
        move.planner.check_tensor(one)
    dim = move.get(1, "dim", move.kwargs.get("axis", 0))
    return [("cat", {"tensors": tuple(Register(one.index) for one in tensors), "dim": dim})]


MOVES: dict[str, Callable[[Move], Made | Symbol]] = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "Dropout", "Dropout1d", "Dropout2d",
         "Dropout3d", "AlphaDropout", "Identity", "contiguous", "detach", "clone"),
        _same,
    ),
    **dict.fromkeys(("view", "reshape"), _reshape),
    **dict.fromkeys(("flatten", "Flatten"), _flatten),
    **dict.fromkeys(("unflatten", "Unflatten"), _unflatten),
    "permute": _permute,
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "narrow": _narrow,
    "chunk": _chunk,
    "getitem": _getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
}  # fmt: skip
"""Moves by what the user called."""

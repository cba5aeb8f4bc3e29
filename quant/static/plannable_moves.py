"""Which moves of values have a plan: views, slices, joins, and what is known of shapes without computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.graph import Node, Ref, leaves
from quant.kernels.reference_plan import Register
from quant.static.plannable_reals import BEFORE, Unplanned

if TYPE_CHECKING:
    from quant.static.plannable import Planner


@dataclass(frozen=True)
class Symbol:
    """A register that holds no tensor: what it is in terms of a tensor's register.

    Attributes:
        kind: "shape", "size" (one number of a shape, at `detail`), "parts" (chunks: (count, dimension) in `detail`),
            "rank" (the number of dimensions, or what follows from it) or "check" (a guard on that).
    """

    kind: str
    source: int
    detail: Any = None


class Move:
    """A call that moves values, with its arguments by place or name.

    Attributes:
        rescaled: of a concatenation, as in the instruction's kwargs (`lower.py`).
    """

    def __init__(self, planner: Planner, node: Node, args: Any, kwargs: Any, name: str) -> None:
        self.planner, self.node, self.args, self.kwargs, self.name = planner, node, args, kwargs, name
        self.rescaled: dict[int, tuple[int, float, int]] = {}
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
        return numbers(name, value)

    def rest(self) -> Sequence[Any]:
        """The settings after the tensor, given one by one or as one list."""
        if self.kwargs:
            raise Unplanned(f"{self.name} with named arguments has no plan")
        rest = self.args[1:]
        return rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest


def numbers(name: str, value: Any) -> Any:
    """`value`, a setting, which no activation is part of."""
    if any(isinstance(leaf, Ref) for leaf in leaves(value)):
        raise Unplanned(f"its {name} is computed at run time")
    return value


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
    return [("permute", {"x": move.source(), "dims": tuple(numbers("dims", list(move.rest())))})]


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
    source, dim = move.source(), 0
    made: Made = []
    for one in place if isinstance(place, tuple) else (place,):
        if isinstance(one, int) and not isinstance(one, bool):
            made.append(("select", {"x": BEFORE if made else source, "dim": dim, "index": one}))
        elif isinstance(one, slice) and (one.step is None or one.step > 0):
            if one != slice(None):
                settings = {"dim": dim, "start": one.start, "end": one.stop, "step": one.step or 1}
                made.append(("slice", {"x": BEFORE if made else source, **settings}))
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
    settings = {"tensors": tuple(Register(one.index) for one in tensors), "dim": dim}
    return [("cat", {**settings, **_rescaling([one.index for one in tensors], move.rescaled)})]


def _rescaling(registers: list[int], rescaled: dict[int, tuple[int, float, int]]) -> dict[str, Any]:
    """How each part of a concatenation becomes one of its range; nothing where all have it."""
    if not rescaled:
        return {}
    [output_zero_point] = {numbers[2] for numbers in rescaled.values()}
    numbers = [rescaled.get(register, (output_zero_point, 1.0, output_zero_point)) for register in registers]
    zero_points, multipliers, _ = zip(*numbers, strict=True)
    return {"zero_points": zero_points, "multipliers": multipliers, "output_zero_point": output_zero_point}


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

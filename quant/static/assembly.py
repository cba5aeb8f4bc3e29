"""Assembles a program from a fused graph's steps: instructions with conversions between float and uint8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind, Node
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import Operator, ShapeOnly
from quant.ops.step import Step, is_recurrent, operator_of
from quant.ops.views import View
from quant.runtime.callee import Callee, Method, Submodule, function
from quant.runtime.expected_call import ExpectedCall
from quant.runtime.instructions import (
    Conversion,
    Dequantize,
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    Quantize,
    RecurrentCall,
    TakeSequence,
    renumbered,
)
from quant.runtime.keys import LayerKey
from quant.runtime.program import Program, live, unread
from quant.runtime.trees import Ref, map_leaves
from quant.runtime.values import Size, Value
from quant.static.symbolic_shapes import SymbolicShapes


class OutOfReach(Exception):
    """A part of the graph needs a value that is computed outside of it; the message names it."""


@dataclass(kw_only=True)
class AssemblyContext(Context):
    """The context in which a program is assembled.

    Attributes:
        shapes: of the graph's values.
    """

    shapes: SymbolicShapes


@dataclass(frozen=True)
class Site:
    """The int8 layer of a step, and the number of this call."""

    layer: LayerKey
    index: int


@dataclass(frozen=True)
class Assembled:
    """A program before it is planned.

    Attributes:
        operators: id of a float call's value -> its operator.
    """

    program: Program
    operators: Mapping[int, Operator]


def assemble(
    fused: FusedGraph,
    steps: list[Step],
    call: ExpectedCall,
    output: Any,
    context: AssemblyContext,
    sites: dict[int, Site],
) -> Assembled:
    """The program of some consecutive steps.

    Args:
        call: the calls that it stands for, by values of the graph; the inputs exist in float before the first step.
        output: nested, with Ref to values of the graph; returned in float.
        sites: output of a weighted step -> its layer and site.
    """
    assembler = _Assembler(fused, context, sites, sorted(call.inputs))
    for step in steps:
        assembler.step(step)
    tree = map_leaves(lambda leaf: Ref(assembler.real(leaf.index)) if isinstance(leaf, Ref) else leaf, output)
    return _numbered(assembler, call, live(assembler.instructions, tree), tree)


def _numbered(assembler: _Assembler, call: ExpectedCall, instructions: list[Instruction], output: Any) -> Assembled:
    """A program of some instructions, with their values only, renumbered."""
    ids = {old: new for new, old in enumerate(dict.fromkeys([*assembler.given, *(one.out for one in instructions)]))}
    values = tuple(replace(assembler.values[old], id=new) for old, new in ids.items())
    symbols = {size.symbol for value in values for size in value.shape or () if isinstance(size, Size)}
    sizes = {name: size for name, size in assembler.context.shapes.sizes.items() if name in symbols}
    numbered, tree = [one.renumbered(ids) for one in instructions], renumbered(output, ids)
    operators = {ids[old]: operator for old, operator in assembler.operators.items() if old in ids}
    inputs = tuple(ids[one] for one in assembler.given)
    expected = call.renumbered({values[one].node: one for one in inputs})
    return Assembled(Program(values, inputs, numbered, tree, unread(numbered, tree), sizes, expected), operators)


class _Assembler:
    """Emits instructions, with a conversion wherever a value is needed in the other form.

    Attributes:
        given: ids of the inputs.
        operators: id of a float call's value -> its operator.
    """

    def __init__(self, fused: FusedGraph, context: AssemblyContext, sites: dict[int, Site], inputs: list[int]) -> None:
        self.fused, self.sites = fused, sites
        self.context = replace(context, forms=self)
        self.values: list[Value] = []
        self.instructions: list[Instruction] = []
        self.operators: dict[int, Operator] = {}
        self._ids: dict[tuple[int, bool], int] = {}
        self.given = [self._id(node, quantized=False) for node in inputs]
        self._ready = set(self.given)

    def _id(self, node: int, *, quantized: bool) -> int:
        """The id of the program's uint8 or float value for a value of the graph; a new one where there is none."""
        key = node, quantized
        if key not in self._ids:
            self._ids[key] = len(self.values)
            self.values.append(self._value(node, quantized=quantized))
        return self._ids[key]

    def _value(self, node: int, *, quantized: bool) -> Value:
        held, context = self.fused.graph.nodes[node], self.context
        qparams = (context.scale(node), context.zero_point(node)) if quantized else None
        dtype = None if held.meta is None else torch.uint8 if quantized else held.meta.dtype
        return Value(len(self.values), held.label, dtype, context.shapes.shape(node), qparams, node)

    def emit(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Conversion):
            self.values[instruction.out] = replace(self.values[instruction.out], name=instruction.step)
        self.instructions.append(replace(instruction, modules=self._modules(instruction)))
        self._ready.add(instruction.out)

    def _modules(self, instruction: Instruction) -> tuple[str, ...]:
        """The modules that a step's calls name or belong to, from its value back to its inputs."""
        reads = {self.values[one].node for one in instruction.reads}
        names: set[str] = set()
        waiting = [self.values[instruction.out].node]
        while waiting:
            index = waiting.pop()
            node = self.fused.graph.nodes[index]
            if index in reads or node.kind is Kind.INPUT:
                continue
            names |= {node.owner, node.target} if node.kind is Kind.MODULE else {node.owner}
            waiting += [] if instruction.own else node.refs
        return tuple(sorted(names - {""}))

    def real(self, node: int) -> int:
        """The program's float value for a value of the graph, dequantised where there is none yet."""
        value = self._id(node, quantized=False)
        if value in self._ready:
            return value
        held = self.fused.graph.nodes[node]
        if held.meta is None and self._ids.get((node, True)) in self._ready:
            # A tuple of parts: its source exists in integers, and is split once more in float.
            [operator] = [step.operator for step in self.fused.steps if step.output == node]
            self._call(held, self.real, held.label, operator)
        else:
            self._convert(Dequantize, node)
        return value

    def integer(self, node: int) -> int:
        """The program's uint8 value for a value of the graph, quantised where there is none yet."""
        value = self._id(node, quantized=True)
        if value not in self._ready:
            self._convert(Quantize, node)
        return value

    def any_form(self, node: int) -> int:
        """The program's value for a value of the graph, in the form that exists."""
        for quantized in (False, True):
            value = self._ids.get((node, quantized))
            if value in self._ready:
                return value
        raise OutOfReach(self.fused.graph.nodes[node].label)

    def _convert(self, kind: type[Quantize] | type[Dequantize], node: int) -> None:
        source = self._ids.get((node, kind is Dequantize))
        if source is None or source not in self._ready:
            raise OutOfReach(self.fused.graph.nodes[node].label)
        scale, zero_point = self.context.scale(node), self.context.zero_point(node)
        out, name = self._id(node, quantized=kind is Quantize), self.fused.slot_of[node]
        self.emit(kind(out=out, step=name, source=source, scale=scale, zero_point=zero_point))

    def step(self, step: Step) -> None:
        nodes = self.fused.graph.nodes
        if nodes[step.output].kind is Kind.INPUT:
            return
        if step.integer:
            for value in () if step.reads_two_bytes else step.inputs:
                self.integer(value)
            self._integer_step(step)
            return
        form = self.any_form if isinstance(step.operator, ShapeOnly) else self.real
        for index in step.nodes:
            self._call(nodes[index], form, step.name, operator_of(step))

    def _call(self, node: Node, form: Callable[[int], int], name: str, operator: Operator) -> None:
        """Emit a node as a float call; `form` returns the program's value for each value that it reads."""
        args, kwargs = _with_values(node, {index: form(index) for index in node.refs})
        out = self._id(node.index, quantized=False)
        self.operators[out] = operator
        if node.kind is Kind.GUARD:
            self.emit(Guard(out=out, step=name, source=args[0].index, expected=args[1], owner=node.owner))
            return
        how: Any = {"owner": node.owner, "frozen": node.frozen, "writes": node.writes}
        self.emit(FloatCall(out=out, step=name, callee=callee_of(node), args=args, kwargs=kwargs, **how))

    def _recurrent_step(self, step: Step) -> None:
        node, emits = self.fused.graph.nodes[step.nodes[0]], self.fused.emits_integers(step)
        input, rest = _input_and_rest(node)
        # One value may be the input and a state: the state is read as a float.
        first = {index: self.integer(index) if index in step.inputs else self.real(index) for index in input.refs}
        (x,), _ = _with_values(input, first)
        states, kwargs = _with_values(rest, {index: self.real(index) for index in rest.refs})
        args, out = (x, *states), self._id(node.index, quantized=False)
        self.emit(RecurrentCall(out=out, step=step.name, path=node.target, args=args, kwargs=kwargs, integers=emits))
        if step.output != node.index:
            self.emit(TakeSequence(out=self._id(step.output, quantized=emits), step=step.name, source=out))

    def _integer_step(self, step: Step) -> None:
        if is_recurrent(step):
            self._recurrent_step(step)
            return
        out = self._id(step.output, quantized=self.fused.emits_integers(step))
        if step.output in self.sites:
            form = self.real if step.reads_two_bytes else self.integer
            site, source = self.sites[step.output], form(step.inputs[0])
            self.emit(LayerCall(out=out, step=step.name, source=source, layer=site.layer, site=site.index))
            return
        kernel = step.operator.lower(step, self.context)
        if isinstance(kernel, Kernel):
            self.emit(KernelCall(out=out, step=step.name, kernel=kernel.name, args=kernel.args, kwargs=kernel.kwargs))
            return
        node = self.fused.graph.nodes[step.output]
        moved = {index: self.integer(index) if index in step.inputs else self.any_form(index) for index in node.refs}
        idle = isinstance(step.operator, View) and step.operator.idle
        if idle:  # it gives this, whatever its other arguments
            node = replace(node, args=(Ref(step.inputs[0]),), kwargs={})
        args, kwargs = _with_values(node, moved)
        self.operators[out] = step.operator
        how: Any = {"callee": callee_of(node), "args": args, "kwargs": kwargs, "rescaled": kernel.rescaled}
        if isinstance(step.operator, View):
            moving, how["kwargs"] = step.operator.on_integers(node, kwargs)
            how["callee"] = None if idle else callee_of(moving)
        self.emit(IntegerMove(out=out, step=step.name, **how))


def callee_of(node: Node) -> Callee:
    """The callee of a node."""
    if node.kind is Kind.FUNCTION:
        return function(node.target)
    return Method(node.target) if node.kind is Kind.METHOD else Submodule(node.target)


def _input_and_rest(node: Node) -> tuple[Node, Node]:
    """A recurrent layer's call with its input alone, which may be given by name, and with its other arguments."""
    if node.args:
        return replace(node, args=node.args[:1], kwargs={}), replace(node, args=node.args[1:])
    others = dict(node.kwargs)
    return replace(node, args=(others.pop("input"),), kwargs={}), replace(node, kwargs=others)


def _with_values(node: Node, ids: dict[int, int]) -> tuple[Any, ...]:
    """A node's (args, kwargs) with values of the program in place of those of the graph."""
    moved: tuple[Any, ...] = renumbered((node.args, node.kwargs), ids)
    return moved

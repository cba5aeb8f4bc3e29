"""A converted graph as a list of operator calls, and the module that runs it in place of the user's forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.fuse import Plan, Step, is_recurrent
from quant.graph import Attr, CaptureMismatch, Graph, Node, Ref, attribute, evaluate, leaves, map_leaves
from quant.kernels.reference_ops import OpTable, rescale
from quant.static import nonfinite, ops
from quant.static.arguments import copied
from quant.static.exchanged import Origin
from quant.static.fallback import WeightsToRestore, warn_once
from quant.static.layers import StaticLayer
from quant.static.lower import Context, Instruction, lower
from quant.static.meaning import what
from quant.static.native import Schedule, schedule
from quant.static.own_forward import is_falling_back, run_own_forward
from quant.static.plannable import Planner
from quant.static.region import Region
from quant.static.runner import bound_values, finished
from quant.static.undo import undone_at_mismatch, written_before_guards


@dataclass
class Program:
    """Instructions in order, the registers that the inputs fill, and the output as a tree of registers.

    Attributes:
        inputs: values of the graph that are given, in float.
        output: nested, with Ref to registers.
        drops: per instruction the registers that nobody reads after it.
        schedule: the same instructions in native calls; made by `ProgramRunner.schedule`.
    """

    instructions: list[Instruction]
    output: Any
    drops: list[list[int]]
    schedule: Schedule | None = field(default=None, repr=False, compare=False)


class OutOfReach(Exception):
    """A part of the graph needs a value that is made outside of it; the message names it."""


@dataclass(frozen=True)
class Site:
    """Where the layer of a weighted step is: its key among the runner's layers, and which of its calls this is."""

    layer: str
    index: int


def assemble(
    plan: Plan, steps: list[Step], given: set[int], output: Any, context: Context, sites: dict[int, Site]
) -> Program:
    """The program of some consecutive steps.

    Args:
        given: values that are there, in float, before the first step.
        output: nested, with Ref to values of the graph; wanted in float.
        sites: of weighted steps, by their output.
    """
    made = _Assembler(plan, context, sites, {2 * value for value in given})
    for step in steps:
        made.step(step)
    tree = map_leaves(lambda leaf: Ref(made.real(leaf.index)) if isinstance(leaf, Ref) else leaf, output)
    instructions = _live(made.instructions, tree, plan.graph)
    return Program(instructions, tree, _drops(instructions, tree))


class _Assembler:
    """Emits instructions, with a conversion wherever a value is not there in the form that is wanted."""

    def __init__(self, plan: Plan, context: Context, sites: dict[int, Site], ready: set[int]) -> None:
        self.plan, self.context, self.sites, self.ready = plan, context, sites, ready
        self.instructions: list[Instruction] = []

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.ready.add(instruction.out)

    def real(self, value: int) -> int:
        """The float register of a value, filled."""
        if 2 * value in self.ready:
            return 2 * value
        if self.plan.graph.nodes[value].meta is None and 2 * value + 1 in self.ready:
            # A tuple of parts: what was split is there in integers, and is split as reals once more.
            self._call(value, self.real, self.plan.graph.nodes[value].label)
        else:
            self._convert("dequantize", value, 2 * value + 1, 2 * value)
        return 2 * value

    def integer(self, value: int) -> int:
        """The uint8 register of a value, filled."""
        if 2 * value + 1 not in self.ready:
            self._convert("quantize", value, 2 * value, 2 * value + 1)
        return 2 * value + 1

    def any_form(self, value: int) -> int:
        """A register of a value in whichever form it is there."""
        for register in (2 * value, 2 * value + 1):
            if register in self.ready:
                return register
        raise OutOfReach(self.plan.graph.nodes[value].label)

    def _convert(self, op: str, value: int, source: int, out: int) -> None:
        if source not in self.ready:
            raise OutOfReach(self.plan.graph.nodes[value].label)
        numbers = (self.context.scale(value), self.context.zero_point(value))
        name = self.plan.slot_of[value]
        self.emit(Instruction(op, (Ref(source), *numbers), out, step=name))

    def step(self, step: Step) -> None:
        graph = self.plan.graph
        if graph.nodes[step.output].kind == "input":
            return
        if step.integer:
            for value in step.inputs:
                self.integer(value)
            self._integer_step(step)
            return
        for index in step.nodes:
            self._call(index, self.any_form if step.op == "shape" else self.real, step.name)

    def _call(self, index: int, form: Callable[[int], int], name: str) -> None:
        """A node in the user's own arithmetic; `form` gives the register of a value that it reads."""
        node = self.plan.graph.nodes[index]
        registers = {value: form(value) for value in node.refs}
        self.emit(Instruction("call", _registers(node, registers), 2 * index, index, step=name))

    def _recurrent_step(self, step: Step) -> None:
        node, emits = self.plan.graph.nodes[step.nodes[0]], self.plan.emits_integers(step)
        taken = {value: self.integer(value) if value in step.inputs else self.real(value) for value in node.refs}
        args, kwargs = _registers(node, taken)
        self.emit(Instruction("recurrent", (args, kwargs, emits), 2 * node.index, node.target, step=step.name))
        if step.output != node.index:
            self.emit(Instruction("first", (Ref(2 * node.index),), 2 * step.output + emits, step=step.name))

    def _integer_step(self, step: Step) -> None:
        if is_recurrent(step):
            self._recurrent_step(step)
            return
        if step.output in self.sites:
            site = self.sites[step.output]
            out = 2 * step.output + self.plan.emits_integers(step)
            args = (Ref(2 * step.inputs[0] + 1), site.index)
            self.emit(Instruction("layer", args, out, site.layer, step=step.name))
            return
        made = lower(step, self.context)
        if made.op == "move":
            node = self.plan.graph.nodes[step.output]
            moved = {value: 2 * value + 1 if value in step.inputs else self.any_form(value) for value in node.refs}
            made = Instruction("move", _registers(node, moved), made.out, step.output, made.kwargs, step.name)
        self.emit(made)


def _registers(node: Node, registers: dict[int, int]) -> tuple[Any, ...]:
    """A node's (args, kwargs) with registers in place of values."""
    moved: tuple[Any, ...] = map_leaves(
        lambda leaf: Ref(registers[leaf.index]) if isinstance(leaf, Ref) else leaf, (node.args, node.kwargs)
    )
    return moved


def _live(instructions: list[Instruction], output: Any, graph: Graph) -> list[Instruction]:
    """The instructions that somebody reads, and those that check or may do something besides."""
    needed = registers_in(output)
    kept = []
    for instruction in reversed(instructions):
        node = graph.nodes[instruction.target] if instruction.op == "call" else None
        acts = node is not None and (node.writes or node.kind in ("guard", "module"))
        if acts or instruction.out in needed:
            kept.append(instruction)
            needed |= registers_in((instruction.args, instruction.kwargs))
    return kept[::-1]


def registers_in(tree: Any) -> set[int]:
    """The registers that nested arguments name."""
    return {leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)}


def _drops(instructions: list[Instruction], output: Any) -> list[list[int]]:
    kept = registers_in(output)
    drops: list[list[int]] = []
    for instruction in reversed(instructions):
        read = registers_in((instruction.args, instruction.kwargs)) | {instruction.out}
        drops.append(sorted(read - kept))
        kept |= read
    return drops[::-1]


class ProgramRunner(nn.Module):
    """Runs a program in place of a captured module's forward.

    Attributes:
        graph: what was captured; float calls are evaluated from it.
        ranges: scale and zero point of the values that are uint8.
        layers: int8 layers of functional calls, which have no module of the user's.
        others: runners of further programs of the same module.
        own_forward: the forward that the user had set on the module itself, if any.
        weights: what the user's forward needs besides int8 layers, where it has to run.
        origin: the modules that the program was made of; set when the conversion is done.
    """

    root: nn.Module

    def __init__(
        self,
        root: nn.Module,
        graph: Graph,
        program: Program,
        ranges: dict[int, tuple[float, int]],
        backend: str | None,
    ) -> None:
        super().__init__()
        self.graph, self.program, self.ranges, self.backend = graph, program, ranges, backend
        self.layers = nn.ModuleDict()
        self.others = nn.ModuleList()
        self.own_forward: Callable[..., Any] | None = None
        self.weights: WeightsToRestore | None = None
        self.said: set[str] = set()
        self._singles: dict[int, Region | None] = {}
        self._written = written_before_guards(graph)
        self.origin: Origin | None = None
        object.__setattr__(self, "root", root)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The captured module's forward."""
        try:
            return self.run_program(args, kwargs)
        except CaptureMismatch as mismatch:
            return self._run_unlike(mismatch, args, kwargs)

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this program.

        Raises:
            CaptureMismatch: it does not stand for such a call.
        """
        values = bound_values(self.graph, self.root, args, kwargs, self.ranges)
        registers = {2 * value: given for value, given in values.items()}
        if self._written:
            run = functools.partial(self.execute, self.program, registers)
            output = undone_at_mismatch(self._written, self.root, values, run)
        else:
            output = self.execute(self.program, registers)
        return finished(output, self.root, args, kwargs)

    def _run_unlike(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that this program does not stand for: by another one, or by the user's own forward."""
        for other in self.others:
            assert isinstance(other, ProgramRunner)
            with contextlib.suppress(CaptureMismatch):
                return other.run_program(args, kwargs)
        return self.run_as_it_is(self.root, self.own_forward, mismatch, args, kwargs)

    def run_as_it_is(
        self, module: nn.Module, own: Any, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the user's forward of the root, or of a module in it, with int8 layers in it and floats between."""
        if torch.compiler.is_compiling():
            raise mismatch
        for runner in (self, *self.others):
            assert isinstance(runner, ProgramRunner)
            if runner.weights is not None and runner.weights.problem:
                raise CaptureMismatch(f"{mismatch}; it cannot run as it is either: {runner.weights.problem}")
            if runner.weights is not None:
                runner.weights.restore(self.root, runner.layers)  # type: ignore[arg-type]
        known = [one.weights for one in (self, *self.others) if isinstance(one, ProgramRunner) and one.weights]
        statistics = [attribute(self.root, path) for weights in known for path in weights.watched]
        output = run_own_forward(module, own, args, kwargs, mismatch, statistics)
        if not is_falling_back():
            warn_once(self.said, self.graph.path, self.root, mismatch, "layer by layer, in float between int8 layers")
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`."""
        return self.run(*args, **kwargs)

    def registers(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """Every register that a call fills, none dropped: value v in float at 2 * v, in uint8 at 2 * v + 1.

        Each as it was when it was filled: a float step after it may write into the tensor.
        """
        values = bound_values(self.graph, self.root, *copied((args, kwargs)))
        registers = {2 * value: given for value, given in values.items()}
        kept = {register: copied(given) for register, given in registers.items()}
        for instruction in self.program.instructions:
            self._steps([instruction], [[]], registers)
            kept[instruction.out] = copied(registers[instruction.out])
        return kept

    def float_parameters(self) -> set[str]:
        """Dotted names of the parameters and buffers that float calls still read."""
        nodes = [self.graph.nodes[one.target] for one in self.program.instructions if one.op == "call"]
        places = [*((node.args, node.kwargs) for node in nodes), self.program.output]
        return {leaf.path for place in places for leaf in leaves(place) if isinstance(leaf, Attr)}

    def layer(self, key: str) -> StaticLayer:
        """An int8 layer, by the name of the user's module or by the name of the functional call."""
        if key.startswith("/"):
            return self.layers[key[1:]]  # type: ignore[return-value]
        return self.root.get_submodule(key)  # type: ignore[return-value]

    def schedule(self, program: Program) -> Schedule:
        """A program's instructions in native calls where they have plans."""
        if program.schedule is None:
            planner = Planner(self.graph, self.root, self.layer)
            program.schedule = schedule(program.instructions, program.drops, program.output, planner)
        return program.schedule

    def execute(self, program: Program, registers: dict[int, Any]) -> Any:
        """Run a program on filled registers."""
        backend = ops.plans(self.backend)
        if backend is None:
            self._steps(program.instructions, program.drops, registers)
        else:
            planned, given = self.schedule(program), dict(registers)
            try:
                self._steps(planned.steps, planned.drops, registers, backend)
            except (TypeError, ValueError):
                # A native call knows its lines, not the user's layers; step by step the error gets a name.
                self._steps(program.instructions, program.drops, given)
                raise
        if type(program.output) is Ref:
            output = registers[program.output.index]
        else:
            output = map_leaves(lambda leaf: registers[leaf.index] if isinstance(leaf, Ref) else leaf, program.output)
        return nonfinite.spoiled(output, registers) if nonfinite.LOST in registers else output

    def _steps(
        self,
        steps: Sequence[Instruction | Region],
        drops: list[list[int]],
        registers: dict[int, Any],
        backend: str = "",
    ) -> None:
        table: OpTable = {}
        for step, gone in zip(steps, drops, strict=True):
            if isinstance(step, Region) and not step.run(registers, self, backend):
                self._steps(step.instructions, [[] for _ in step.instructions], registers)
            for instruction in step.tail if isinstance(step, Region) else (step,):
                table = table or ops.table(self.backend)
                registers[instruction.out] = self._execute(instruction, registers, table, planned=bool(backend))
            for register in gone:
                registers.pop(register, None)

    def _native(self, instruction: Instruction) -> Region | None:
        """A float call as its kernel computes it where calls are planned, so that its bits are the same by itself."""
        if ops.compiled(self.backend) is None:
            return None
        if instruction.target not in self._singles:
            planner = Planner(self.graph, self.root, self.layer)
            regions = schedule([instruction], [[]], Ref(instruction.out), planner).regions
            self._singles[instruction.target] = regions[0] if regions else None
        return self._singles[instruction.target]

    def _execute(self, instruction: Instruction, registers: dict[int, Any], table: OpTable, *, planned: bool) -> Any:
        if self.origin is not None and self.origin.changed(instruction):
            return self.origin.run(instruction, registers, self.ranges, table)
        if instruction.op == "call" or instruction.op == "move":
            node = self.graph.nodes[instruction.target]
            native = self._native(instruction) if instruction.op == "call" and not planned else None
            if native is not None and self._run_native(native, node, registers):
                return registers[instruction.out]
            args, kwargs = instruction.args
            if instruction.op == "move":
                return move(node, args, kwargs, self.root, _rescaled(instruction.kwargs, registers))
            return evaluate(_with(node, args, kwargs), self.root, registers.__getitem__)
        args = [_filled(arg, registers) for arg in instruction.args]
        if instruction.op == "quantize":
            nonfinite.note(args[0], registers)
        elif instruction.op == "recurrent":
            (x, *states), named, _ = args
            nonfinite.note_recurrent(self.root.get_submodule(instruction.target), x, (states, named), registers)
        try:
            found = self._integers(instruction, args, registers, table)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer '{instruction.step}': {error}") from error
        # A kernel may put channels last, where the user's view() would find no view of the float.
        return found.contiguous() if instruction.out % 2 == 0 and isinstance(found, Tensor) else found

    def _run_native(self, native: Region, node: Node, registers: dict[int, Any]) -> bool:
        try:
            return native.run(registers, self, ops.compiled(self.backend) or "")
        except (TypeError, ValueError) as error:
            raise type(error)(f"'{node.label}': {error}") from error

    def _integers(self, instruction: Instruction, args: list[Any], registers: dict[int, Any], table: OpTable) -> Any:
        if instruction.op == "layer":
            return self.layer(instruction.target).compute(*args)
        if instruction.op == "first":
            return args[0][0]
        if instruction.op == "recurrent":
            found: Any = self.root.get_submodule(instruction.target)
            positional, named, quantized = args
            return found.compute(*positional, **named, quantized=quantized)
        return table[instruction.op](*args, **_filled(instruction.kwargs, registers))


def _filled(tree: Any, registers: dict[int, Any]) -> Any:
    """An argument with values in place of registers."""
    if type(tree) is Ref:
        return registers[tree.index]
    if type(tree) in (tuple, list, dict) and tree:
        return map_leaves(lambda leaf: registers[leaf.index] if type(leaf) is Ref else leaf, tree)
    return tree


def _rescaled(how: dict[int, tuple[int, float, int]], registers: dict[int, Any]) -> dict[int, Any]:
    """The registers, some of them in the range of what they are joined to."""
    if not how:
        return registers
    return {**registers, **{register: rescale(registers[register], *numbers) for register, numbers in how.items()}}


def _with(node: Node, args: Any, kwargs: Any, **changes: Any) -> Node:
    kind, target = changes.get("kind", node.kind), changes.get("target", node.target)
    return Node(node.index, kind, target, args, kwargs, node.owner, node.site, node.meta)


DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "Dropout", "Dropout1d", "Dropout2d",
            "Dropout3d", "AlphaDropout", "Identity", "contiguous", "detach")  # fmt: skip
"""Calls that change nothing at inference."""


def move(node: Node, args: Any, kwargs: Any, root: nn.Module, registers: dict[int, Any]) -> Any:
    """A call that only moves values, on integers."""
    name = what(node, root)
    if name in DROPOUTS:
        return registers[args[0].index]
    if node.kind == "method" and name in ("view", "view_as"):
        # The integers may lie in another memory format than the reals did, where a view would not be possible.
        return evaluate(
            _with(node, args, kwargs, target="reshape" if name == "view" else "reshape_as"), root, registers.__getitem__
        )
    found: Tensor = evaluate(_with(node, args, kwargs), root, registers.__getitem__)
    return found

"""A converted graph as a list of operator calls, and the module that runs it in place of the user's forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.fuse import Plan, is_recurrent
from quant.graph import Attr, CaptureMismatch, Graph, Node, Ref, call, leaves, map_leaves
from quant.kernels import dispatch
from quant.kernels.reference_ops import OpTable
from quant.names import submodule
from quant.objects import Result
from quant.ops.lowering import Context, Kernel
from quant.ops.operator import ShapeOnly
from quant.ops.step import Step
from quant.static import nonfinite
from quant.static.arguments import copied
from quant.static.binding import QuickBinding, bound_values
from quant.static.exchanged import Origin
from quant.static.fallback import WeightsToRestore, warn_once
from quant.static.filling import Fill, filler
from quant.static.instructions import (
    Conversion,
    Dequantize,
    FloatCall,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    Quantize,
    RecurrentCall,
    TakeSequence,
    registers_in,
)
from quant.static.layers import StaticLayer
from quant.static.native import Schedule, schedule
from quant.static.own_forward import is_falling_back, run_own_forward
from quant.static.plannable import Planner
from quant.static.programs import Programs
from quant.static.region import Region
from quant.static.runner import finished
from quant.static.single_steps import SingleStep, move, rescaled, single_step
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
    _fill: Fill | None = field(default=None, repr=False, compare=False)

    def filled(self, registers: dict[int, Any]) -> Any:
        """The output, from the registers as they are at the end."""
        fill = self._fill
        if fill is None:
            fill = self._fill = filler(self.output)
        return fill(registers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fill": None}


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
            self._convert(Dequantize, value, 2 * value + 1, 2 * value)
        return 2 * value

    def integer(self, value: int) -> int:
        """The uint8 register of a value, filled."""
        if 2 * value + 1 not in self.ready:
            self._convert(Quantize, value, 2 * value, 2 * value + 1)
        return 2 * value + 1

    def any_form(self, value: int) -> int:
        """A register of a value in whichever form it is there."""
        for register in (2 * value, 2 * value + 1):
            if register in self.ready:
                return register
        raise OutOfReach(self.plan.graph.nodes[value].label)

    def _convert(self, kind: type[Quantize] | type[Dequantize], value: int, source: int, out: int) -> None:
        if source not in self.ready:
            raise OutOfReach(self.plan.graph.nodes[value].label)
        scale, zero_point = self.context.scale(value), self.context.zero_point(value)
        name = self.plan.slot_of[value]
        self.emit(kind(out=out, step=name, source=source, scale=scale, zero_point=zero_point))

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
            self._call(index, self.any_form if isinstance(step.operator, ShapeOnly) else self.real, step.name)

    def _call(self, index: int, form: Callable[[int], int], name: str) -> None:
        """A node in the user's own arithmetic; `form` gives the register of a value that it reads."""
        node = self.plan.graph.nodes[index]
        registers = {value: form(value) for value in node.refs}
        args, kwargs = _registers(node, registers)
        self.emit(FloatCall(out=2 * index, step=name, node=index, args=args, kwargs=kwargs))

    def _recurrent_step(self, step: Step) -> None:
        node, emits = self.plan.graph.nodes[step.nodes[0]], self.plan.emits_integers(step)
        taken = {value: self.integer(value) if value in step.inputs else self.real(value) for value in node.refs}
        args, kwargs = _registers(node, taken)
        out = 2 * node.index
        self.emit(RecurrentCall(out=out, step=step.name, path=node.target, args=args, kwargs=kwargs, integers=emits))
        if step.output != node.index:
            self.emit(TakeSequence(out=2 * step.output + emits, step=step.name, source=out))

    def _integer_step(self, step: Step) -> None:
        if is_recurrent(step):
            self._recurrent_step(step)
            return
        out = 2 * step.output + self.plan.emits_integers(step)
        if step.output in self.sites:
            site = self.sites[step.output]
            source = 2 * step.inputs[0] + 1
            self.emit(LayerCall(out=out, step=step.name, source=source, layer=site.layer, site=site.index))
            return
        kernel = step.operator.lower(step, self.context)
        if isinstance(kernel, Kernel):
            self.emit(KernelCall(out=out, step=step.name, kernel=kernel.name, args=kernel.args, kwargs=kernel.kwargs))
            return
        node = self.plan.graph.nodes[step.output]
        moved = {value: 2 * value + 1 if value in step.inputs else self.any_form(value) for value in node.refs}
        args, kwargs = _registers(node, moved)
        rescaled = kernel.rescaled
        self.emit(IntegerMove(out=out, step=step.name, node=node.index, args=args, kwargs=kwargs, rescaled=rescaled))


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
        node = graph.nodes[instruction.node] if isinstance(instruction, FloatCall) else None
        acts = node is not None and (node.writes or node.kind in ("guard", "module"))
        if acts or instruction.out in needed:
            kept.append(instruction)
            needed |= instruction.reads
    return kept[::-1]


def names_more_than_registers(output: Any) -> bool:
    """Whether an output names parameters, or holds objects or writes, which `runner.finished` is for."""
    return isinstance(output, Result) or any(isinstance(leaf, Attr) for leaf in leaves(output))


def _drops(instructions: list[Instruction], output: Any) -> list[list[int]]:
    kept = registers_in(output)
    drops: list[list[int]] = []
    for instruction in reversed(instructions):
        read = instruction.reads | {instruction.out}
        drops.append(sorted(read - kept))
        kept |= read
    return drops[::-1]


class ProgramRunner(Programs):
    """Runs a program in place of a captured module's forward.

    Attributes:
        graph: what was captured; float calls are evaluated from it.
        ranges: scale and zero point of the values that are uint8.
        layers: int8 layers of functional calls, which have no module of the user's.
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
        self.weights: WeightsToRestore | None = None
        self._singles: dict[int, Region | None] = {}
        self._steps_known: dict[int, SingleStep] = {}
        self._binding = QuickBinding(graph, ranges)
        self._plain = not names_more_than_registers(program.output)
        self._written = written_before_guards(graph)
        self.origin: Origin | None = None
        object.__setattr__(self, "root", root)

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        registers = None if torch.compiler.is_compiling() else self._binding.registers(self.root, args, kwargs)
        if registers is None:
            values = bound_values(self.graph, self.root, args, kwargs, self.ranges)
            registers = {2 * value: given for value, given in values.items()}
        if self._written:
            output = self._execute_or_undo(registers)
        else:
            output = self.execute(self.program, registers)
        return output if self._plain else finished(output, self.root, args, kwargs)

    def _execute_or_undo(self, registers: dict[int, Any]) -> Any:
        """The program's output; where it finds out that it does not stand for the call, nothing is written."""
        run = functools.partial(self.execute, self.program, registers)
        given = {place // 2: value for place, value in registers.items()}
        return undone_at_mismatch(self._written, self.root, given, run)

    def run_unlike(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By the user's own forward."""
        return self.run_as_it_is(self.root, self.own_forward, mismatch, args, kwargs)

    def run_as_it_is(
        self, module: nn.Module, own: Any, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the user's forward of the root, or of a module in it, with int8 layers in it and floats between."""
        if torch.compiler.is_compiling():
            raise mismatch
        for runner in self.programs():
            if runner.weights is not None:
                runner.weights.restore(self.root, runner.layers)  # type: ignore[arg-type]
        output = run_own_forward(module, own, args, kwargs, mismatch)
        if not is_falling_back():
            warn_once(self.said, self.graph.path, self.root, mismatch, "layer by layer, in float between int8 layers")
        return output

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

    def registers_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ProgramRunner, dict[int, Any]] | None:
        """The program that stands for a call, this or a further one, and its registers; None where none does."""
        for one in self.programs():
            with contextlib.suppress(CaptureMismatch):
                return one, one.registers(*args, **kwargs)
        return None

    def float_parameters(self) -> set[str]:
        """Dotted names of the parameters and buffers that float calls still read."""
        nodes = [self.graph.nodes[one.node] for one in self.program.instructions if isinstance(one, FloatCall)]
        places = [*((node.args, node.kwargs) for node in nodes), self.program.output]
        return {leaf.path for place in places for leaf in leaves(place) if isinstance(leaf, Attr)}

    def layer(self, key: str) -> StaticLayer:
        """An int8 layer, by the name of the user's module or by the name of the functional call."""
        if key.startswith("/"):
            return self.layers[key[1:]]  # type: ignore[return-value]
        return submodule(self.root, key)  # type: ignore[return-value]

    def schedule(self, program: Program) -> Schedule:
        """A program's instructions in native calls where they have plans."""
        if program.schedule is None:
            planner = Planner(self.graph, self.root, self.layer)
            program.schedule = schedule(program.instructions, program.drops, program.output, planner)
        return program.schedule

    def execute(self, program: Program, registers: dict[int, Any]) -> Any:
        """Run a program on filled registers."""
        backend = dispatch.current(self.backend)
        if not backend.plans:
            self._steps(program.instructions, program.drops, registers)
        else:
            planned, given = program.schedule or self.schedule(program), registers.copy()
            try:
                self._steps(planned.steps, planned.drops, registers, backend.name)
            except (TypeError, ValueError):
                # A native call knows its lines, not the user's layers; step by step the error gets a name.
                self._steps(program.instructions, program.drops, given)
                raise
        if type(program.output) is Ref:
            output = registers[program.output.index]
        else:
            output = program.filled(registers)
        return nonfinite.spoiled(output, registers) if nonfinite.LOST in registers else output

    def _steps(
        self,
        steps: Sequence[Instruction | Region],
        drops: list[list[int]],
        registers: dict[int, Any],
        backend: str = "",
    ) -> None:
        table: OpTable = {}
        eager = not torch.compiler.is_compiling()
        for step, gone in zip(steps, drops, strict=True):
            singles: Sequence[Instruction]
            if isinstance(step, Region):
                if not step.run(registers, self, backend):
                    self._steps(step.instructions, [[] for _ in step.instructions], registers)
                singles = step.tail
            else:
                singles = (step,)
            for instruction in singles:
                table = table or dispatch.current(self.backend).operators
                registers[instruction.out] = self._execute(instruction, registers, table, bool(backend), eager)
            for register in gone:
                registers.pop(register, None)

    def _native(self, instruction: FloatCall) -> Region | None:
        """A float call as its kernel computes it where calls are planned, so that its bits are the same by itself."""
        if not dispatch.current(self.backend).computes_reals:
            return None
        if instruction.node not in self._singles:
            planner = Planner(self.graph, self.root, self.layer)
            regions = schedule([instruction], [[]], Ref(instruction.out), planner).regions
            self._singles[instruction.node] = regions[0] if regions else None
        return self._singles[instruction.node]

    def _execute(
        self, instruction: Instruction, registers: dict[int, Any], table: OpTable, planned: bool, eager: bool
    ) -> Any:
        known = self._steps_known if eager else None  # torch.compile follows no table by identity
        step = None if known is None else known.get(id(instruction))
        if step is None or not step.stands():
            if self.origin is not None and self.origin.changed(instruction):
                return self.origin.run(instruction, registers, self.ranges, table)
            step = single_step(instruction, self.graph, self.root, self.origin)
            if known is not None:
                known[id(instruction)] = step
        if isinstance(instruction, IntegerMove):
            seen = rescaled(instruction.rescaled, registers)
            return move(self.graph.nodes[instruction.node], step.args(seen), step.kwargs(seen), self.root)
        if isinstance(instruction, FloatCall):
            node = self.graph.nodes[instruction.node]
            native = self._native(instruction) if not planned else None
            if native is not None and self._run_native(native, node, registers):
                return registers[instruction.out]
            return call(node, self.root, step.args(registers), step.kwargs(registers))
        args, kwargs = step.args(registers), step.kwargs(registers)
        if isinstance(instruction, Quantize):
            nonfinite.note(args[0], registers)
        elif isinstance(instruction, RecurrentCall):
            x, *states = args
            given = (states, kwargs) if states or kwargs else None
            nonfinite.note_recurrent(submodule(self.root, instruction.path), x, given, registers)
        try:
            found = self._integers(instruction, args, kwargs, table)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer '{instruction.step}': {error}") from error
        # A kernel may put channels last, where the user's view() would find no view of the float.
        return found if instruction.gives_integers or not isinstance(found, Tensor) else found.contiguous()

    def _run_native(self, native: Region, node: Node, registers: dict[int, Any]) -> bool:
        try:
            return native.run(registers, self, dispatch.current(self.backend).name)
        except (TypeError, ValueError) as error:
            raise type(error)(f"'{node.label}': {error}") from error

    def _integers(self, instruction: Instruction, args: Any, kwargs: Any, table: OpTable) -> Any:
        if isinstance(instruction, LayerCall):
            return self.layer(instruction.layer).compute(*args)
        if isinstance(instruction, TakeSequence):
            return args[0][0]
        if isinstance(instruction, RecurrentCall):
            layer: Any = submodule(self.root, instruction.path)
            return layer.compute(*args, **kwargs, quantized=instruction.integers)
        assert isinstance(instruction, (KernelCall, Conversion))
        return table[instruction.kernel](*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What is known of steps holds functions, and is of this object's modules.
        return {**self.__dict__, "_steps_known": {}}

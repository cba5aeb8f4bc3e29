"""Which runs of a program's instructions one native call can compute, and the text of each (kernels/reference_plan.py).

A region is a maximal run of neighbouring instructions that all have a plan. Instructions between regions run one by
one, and `Schedule.reasons` says why. One that reads nothing of the run before it, such as a lookup of indices or a
mask, runs ahead of it, and the run goes on. The schedule is plain data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant.kernels.plan_sizes import Arithmetic, dimensions_in
from quant.kernels.reference_plan import Constant, Line, Register
from quant.ops.planning import RankCheck, Unplanned
from quant.runtime.callee import Submodule
from quant.runtime.instructions import (
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    LayerCall,
    RecurrentCall,
    registers_in,
)
from quant.runtime.module_call import ModuleCall
from quant.runtime.program import Program
from quant.runtime.region import Region
from quant.runtime.schedule import Schedule
from quant.runtime.trees import Ref
from quant.runtime.values import Value
from quant.static.changing_calls import changes_something, may_reshape
from quant.static.native_forms import Piece, Planned, Planner

SMALL = 1 << 14
"""The number of float values up to which a native call copies them in less time than a step of its own takes."""


def schedule(program: Program, planner: Planner) -> Schedule:
    """Group a program's instructions; `planner` decides which have a plan."""
    grouped = _grouped(program.instructions, program.output, planner)
    if _ends_in_views(grouped):
        whole = whole_schedule(program, planner)
        if len(whole.steps) == 1 and whole.regions:
            grouped.whole = whole.regions[0]
    for one in program.instructions:
        if one.own and planner.rounds_otherwise(one):
            for region in _grouped([one], Ref(one.out), planner).regions:
                grouped.singles[one.out] = region
    return grouped


@dataclass(frozen=True)
class Unscheduled:
    """A program whose schedule waits until the layers in it are final, as those are that become dynamic.

    Attributes:
        entry: the report's name for how it runs; '' of a program that the report does not have.
    """

    program: Program
    planner: Planner
    entry: str = ""

    def schedule(self) -> str | None:
        """Give the program its schedule; what the report says of it, if anything."""
        self.program.schedule = planned = schedule(self.program, self.planner)
        return planned.describe() if self.entry and (planned.regions or planned.reasons) else None


def whole_schedule(program: Program, planner: Planner) -> Schedule:
    """The same without regard to what torch does faster: for a process without torch."""
    return _grouped(program.instructions, program.output, planner, whole=True)


def _ends_in_views(grouped: Schedule) -> bool:
    """Whether there is one native call, and nothing around it but calls of the user's without a reason to be there."""
    around = [one for one in grouped.steps if isinstance(one, Instruction)]
    return len(grouped.regions) == 1 and bool(around) and not grouped.reasons and all(one.own for one in around)


def _grouped(instructions: list[Instruction], output: Any, planner: Planner, *, whole: bool = False) -> Schedule:
    grouped = Schedule([], [], {})
    given = registers_in(output)
    run = _Run(given, whole)
    planner.kept_tuples = _kept_tuples(instructions, output, program_values=planner.program.values)
    later = _read_later(instructions, output)
    there = set().union(*later[:1]) - {one.out for one in instructions}
    for index, instruction in enumerate(instructions):
        try:
            run.add(instruction, planner)
        except Unplanned as reason:
            ahead = run.gives_way(instruction, planner)
            if ahead is None:
                there |= run.close(grouped, later[index])
                run = _Run(given, whole)
                planner.keep_symbols_of(() if may_reshape(instruction) else there)
            grouped.steps += [*(ahead or ()), instruction]
            there.update(one.out for one in (*(ahead or ()), instruction))
            if not instruction.own:
                grouped.reasons[instruction.step or instruction.kind] = str(reason)
    run.close(grouped, given)
    planner.keep_symbols_of(())
    grouped.drops = _drops(grouped.steps, output)
    for region in grouped.regions:
        region.booleans = [planner.dtype(Register(index)) is torch.bool for index in region.inputs]
        if region.ranks is not None:
            region.ranks = [len(planner.captured_shape(index)) for index in region.inputs]
    return grouped


def _drops(steps: Sequence[Instruction | Region], output: Any) -> list[list[int]]:
    """For each step, the registers that no later one reads.

    What a region's instructions read counts, beside what its text does: they may have to run as they are.
    """
    kept = registers_in(output)
    drops = []
    for step in reversed(steps):
        if isinstance(step, Region):
            inside = {one.out for one in step.instructions}
            read = {*step.inputs, *step.outputs}.union(*({one.out, *one.reads} for one in step.tail))
            read |= set().union(*(one.reads for one in step.instructions)) - inside
            step.drops = sorted(read - kept)
        else:
            read = step.reads | {step.out}
        drops.append(sorted(read - kept))
        kept |= read
    return drops[::-1]


def _kept_tuples(instructions: list[Instruction], output: Any, program_values: Sequence[Value]) -> set[int]:
    """What modules give as tuples that are read elsewhere than in the calls that follow at once."""
    kept = set()
    for place, one in enumerate(instructions):
        of_module = isinstance(one, FloatCall) and isinstance(one.callee, Submodule)
        if not (of_module or isinstance(one, RecurrentCall)) or program_values[one.out].dtype is not None:
            continue
        inside, end = {one.out}, place + 1
        while end < len(instructions) and instructions[end].reads and instructions[end].reads <= inside:
            if program_values[instructions[end].out].dtype is None:
                inside.add(instructions[end].out)
            end += 1
        later = registers_in(output).union(*(other.reads for other in instructions[end:]))
        if inside & later:
            kept |= inside
    return kept


def _read_later(instructions: list[Instruction], output: Any) -> list[set[int]]:
    """Per instruction, the registers that it or a later one reads."""
    read = registers_in(output)
    later = []
    for instruction in reversed(instructions):
        read = read | instruction.reads
        later.append(read)
    return later[::-1]


@dataclass(frozen=True)
class _Part:
    """An instruction with its plan."""

    instruction: Instruction
    planned: Planned

    @property
    def costs_little(self) -> bool:
        """Whether it is one call of torch by itself; a native call of one step costs less than other steps."""
        if isinstance(self.instruction, IntegerMove):
            return not self.instruction.rescaled
        return self.instruction.own and not self.planned.int8


class _Run:
    """A region while it grows.

    Attributes:
        given: the registers that the program gives out.
        whole: whether all that can be is in the region, if torch does it faster or not.
    """

    def __init__(self, given: set[int], whole: bool = False) -> None:
        self.parts: list[_Part] = []
        self.given, self.whole = given, whole

    def add(self, instruction: Instruction, planner: Planner) -> None:
        """Add an instruction.

        Raises:
            Unplanned: it has no plan; nothing was changed.
        """
        planned = planner.plan(instruction)
        checks = planned.reads_rank or isinstance(planned.symbol, RankCheck)
        if checks and any(part.planned.rank_by_size for part in self.parts):
            planner.symbols.pop(instruction.out, None)
            raise Unplanned("it depends on a number of dimensions that depends on a size")
        self.parts.append(_Part(instruction, planned))

    def gives_way(self, instruction: Instruction, planner: Planner) -> list[Instruction] | None:
        """Let an instruction that runs by itself run ahead of the run, and with it the views of indices that it reads.

        Returns:
            These views, which are no part of the run any more. None, and nothing changed, where the instruction reads
            what else the run gives, changes something, or might fail in a call that a guard of the run finds out to be
            another one.
        """
        if not self.parts or any(isinstance(part.instruction, Guard) for part in self.parts):
            return None
        if not isinstance(instruction, (FloatCall, Guard)) or changes_something(instruction, planner.root):
            return None
        read = set(instruction.reads)
        ahead: list[_Part] = []
        kept: list[_Part] = []
        for part in reversed(self.parts):
            moves = part.instruction.out in read
            if moves and not part.planned.indices:
                return None
            if moves:
                read |= part.instruction.reads
            (ahead if moves else kept).append(part)
        self.parts = kept[::-1]
        return [part.instruction for part in reversed(ahead)]

    def close(self, schedule: Schedule, wanted: set[int]) -> set[int]:
        """Add the run to the schedule: as a region without costly float views at its ends, or one by one if none of it
        is an integer step or a conversion.

        Returns:
            The registers that later steps can read.
        """
        begin, end = self._edges(wanted)
        inside, after = self.parts[begin:end], self.parts[end:]
        if not self.whole and all(part.planned.exact and part.costs_little for part in inside):
            inside, after = [], self.parts[begin:]
        before = self.parts[:begin]
        schedule.steps += [part.instruction for part in before]
        there = {part.instruction.out for part in [*before, *after]}
        if inside:
            region = _region(inside, wanted.union(*(part.instruction.reads for part in after)))
            schedule.steps.append(region)
            there.update(region.outputs, (one.out for one in region.tail))
        schedule.steps += [part.instruction for part in after]
        return there

    def _edges(self, wanted: set[int]) -> tuple[int, int]:
        """Where the region begins and ends.

        Torch gives a view without a copy, and a region copies what it gives out: large views of its inputs that others
        read, and large ones in another order that it would end with, stay out, as do those that the program gives out:
        they have torch's strides, and a view of an input its memory. Shapes that are read between stay in.
        """
        begin, end = 0, len(self.parts)
        if self.whole:
            return begin, end
        for place, part in enumerate(self.parts):
            if not part.planned.moves_reals:
                break
            seen = part.planned.count > SMALL or part.instruction.out in self.given
            begin = place + 1 if part.instruction.out in wanted and seen else begin
        for place in range(len(self.parts) - 1, begin - 1, -1):
            planned = self.parts[place].planned
            small = planned.count <= SMALL and self.parts[place].instruction.out not in self.given
            if not planned.moves_reals or (planned.symbol is None and (planned.in_order or small)):
                break
            end = end if planned.symbol is not None else place
        return begin, end


def _region(parts: list[_Part], wanted: set[int]) -> Region:
    """One call for all parts; `wanted` are the registers that others read."""
    pieces: list[str | LayerCall | ModuleCall] = []
    constants: list[Tensor] = []
    inputs: dict[int, None] = {}
    known: set[int] = set()
    symbolic = {part.instruction.out: part.instruction for part in parts if part.planned.stays_inside}
    for part in _needed(parts):
        planned = part.planned.pieces
        pieces += [str(_with_constants(one, constants)) if isinstance(one, Line) else one for one in planned]
        inputs.update(dict.fromkeys(register for register in _tensors(planned) if register not in known))
        known.update(out for piece in planned for out in _outs(piece))
    instructions = [part.instruction for part in parts]
    tail, wanted = _tail(symbolic, wanted)
    outputs = [one.out for one in instructions if one.out in wanted and one.out not in symbolic]
    checks = any(part.planned.reads_rank or isinstance(part.planned.symbol, RankCheck) for part in parts)
    return Region(
        pieces, constants, list(inputs), outputs, tail, [], len(parts), instructions, ranks=[] if checks else None
    )


def _needed(parts: Sequence[_Part]) -> list[_Part]:
    """The parts without views of indices that no other part reads."""
    read: set[int] = set()
    needed = []
    for part in reversed(parts):
        if not part.planned.indices or part.instruction.out in read:
            read.update(_tensors(part.planned.pieces))
            needed.append(part)
    return needed[::-1]


def _with_constants(line: Line, constants: list[Tensor]) -> Line:
    settings = dict(line.settings)
    for name, value in settings.items():
        if isinstance(value, Tensor):
            settings[name] = Constant(len(constants))
            constants.append(value)
    return Line(line.out, line.op, settings)


def _tail(symbolic: dict[int, Instruction], wanted: set[int]) -> tuple[list[Instruction], set[int]]:
    """The symbolic instructions that are read from outside, and all registers that are then read from the region."""
    tail: list[Instruction] = []
    wanted = set(wanted)
    for instruction in reversed(list(symbolic.values())):
        if instruction.out in wanted:
            tail.insert(0, instruction)
            wanted |= instruction.reads
    return tail, wanted


def _registers_in(setting: Any) -> Iterator[Register]:
    """The registers that a setting of a line names, be it for their sizes."""
    for part in dimensions_in(setting) if isinstance(setting, Arithmetic) else [setting]:
        if isinstance(part, Register):
            yield part


def _outs(piece: Piece) -> tuple[int, ...]:
    return piece.outs if isinstance(piece, ModuleCall) else (piece.out,)


def _tensors(pieces: Sequence[Piece]) -> list[int]:
    """The registers whose tensors a plan reads."""
    registers: list[int] = []
    own = {out for piece in pieces for out in _outs(piece)}
    for piece in pieces:
        if isinstance(piece, ModuleCall):
            registers += piece.reads
        elif isinstance(piece, LayerCall):
            registers.append(piece.source)
        else:
            for value in piece.settings.values():
                parts = value if isinstance(value, (tuple, list)) else (value,)
                registers += [one.index for part in parts for one in _registers_in(part)]
    return [register for register in registers if register not in own]

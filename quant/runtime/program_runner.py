"""The module that runs a converted program in place of the user's forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quant.kernels import dispatch
from quant.kernels.backend import Backend
from quant.kernels.reference_ops import OpTable
from quant.runtime import nonfinite
from quant.runtime.arguments import copied
from quant.runtime.binding import QuickBinding, bound_values, refuse_other_devices
from quant.runtime.callee import Submodule
from quant.runtime.dtype_branches import comparing_dtypes
from quant.runtime.instructions import (
    NAMED,
    Conversion,
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    Quantize,
    RecurrentCall,
    TakeSequence,
    said_of,
)
from quant.runtime.int8_layer import Int8Layer
from quant.runtime.keys import LayerKey
from quant.runtime.matching import CaptureMismatch, check_guard, check_tensor
from quant.runtime.names import full_name, submodule
from quant.runtime.objects import Result
from quant.runtime.outputs import finished
from quant.runtime.own_forward import is_falling_back, run_own_forward, without_runner
from quant.runtime.program import Program
from quant.runtime.programs import Programs
from quant.runtime.region import Region
from quant.runtime.restored_weights import WeightsToRestore
from quant.runtime.schedule import Schedule
from quant.runtime.single_steps import SingleStep, call, move, rescaled, single_step
from quant.runtime.step_runs import Joined, StepRun, joined
from quant.runtime.trees import Attr, Ref, leaves
from quant.runtime.uncaptured import warn_once
from quant.runtime.user_replacements import ProgramOrigin
from quant.runtime.values import Held
from quant.runtime.write_rollback import undone_at_mismatch


class StepTimer(Protocol):
    """What `execute_timed` tells the times."""

    def add(self, instruction: Instruction, operation: str, seconds: float, *, ends: bool) -> None:
        """An operation of a native call, which is a part of the instruction; `ends`: the last one."""

    def measure(self, instruction: Instruction) -> AbstractContextManager[None]:
        """The context in which an instruction runs by itself."""


def names_more_than_registers(output: Any) -> bool:
    """Whether an output holds parameters, objects or writes, which `outputs.finished` turns into the user's."""
    return isinstance(output, Result) or any(isinstance(leaf, Attr) for leaf in leaves(output))


HALVES = (torch.bfloat16, torch.float16)


class ProgramRunner(Programs):
    """Runs a program in place of a captured module's forward.

    Attributes:
        expected: the calls that the program stands for.
        ranges: node of a uint8 value -> its scale and zero point.
        layers: int8 layers of functional calls, for which the user has no module.
        weights: parameters that the user's forward reads and that int8 layers have replaced.
        half_type: the half type of the user's model, where this computes in float32 what that does in it; else None.
        origin: the modules that the program was converted from; set at the end of the conversion.
    """

    root: nn.Module

    def __init__(
        self,
        root: nn.Module,
        program: Program,
        ranges: dict[int, tuple[float, int]],
        backend: str | None,
    ) -> None:
        super().__init__()
        assert program.call is not None, "a program that runs as a module's forward says which calls it stands for"
        self.expected = program.call
        self.program, self.ranges, self.backend = program, ranges, backend
        self.layers = nn.ModuleDict()
        self.weights: WeightsToRestore | None = None
        self.half_type: torch.dtype | None = None
        self._steps_known: dict[int, SingleStep] = {}
        self._joined: dict[int, tuple[Schedule, Joined]] = {}
        self._binding = QuickBinding(program.call)
        self._plain = not names_more_than_registers(program.output)
        self.origin: ProgramOrigin | None = None
        object.__setattr__(self, "root", root)

    def make_ready(self) -> None:
        """Prepare everything for a call that does not depend on its inputs; plans for their shapes come with the call.

        Every call checks it against the model, as it checks what an earlier call has prepared.
        """
        self._binding.make_ready(self.root)
        planned = self._schedule(self.program, dispatch.current(self.backend))
        for step in self.program.instructions if planned is None else planned.steps:
            if isinstance(step, Region):
                step.text(self)
            for instruction in step.tail if isinstance(step, Region) else (step,):
                self._known_step(self.program, instruction, self._steps_known)
        if planned is not None:
            self._with_runs(self.program, planned)

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        registers = None if torch.compiler.is_compiling() else self._binding.registers(self.root, args, kwargs)
        if registers is None:
            registers = bound_values(self.expected, self.root, args, kwargs)
            refuse_other_devices(self.expected, registers, self.root)
        if self.expected.written:
            output = self._execute_or_undo(registers)
        else:
            output = self.execute(self.program, registers)
        return output if self._plain else finished(output, self.root, args, kwargs)

    def _execute_or_undo(self, registers: dict[int, Any]) -> Any:
        """Run the program; where a guard in it fails, its writes are undone."""
        run = functools.partial(self.execute, self.program, registers)
        return undone_at_mismatch(self.expected.written, self.root, registers, run)

    def run_unlike(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the user's own forward."""
        with without_runner(self):
            return self.run_as_it_is(self.root, self.own_forward, mismatch, args, kwargs)

    def run_as_it_is(
        self, module: nn.Module, own: Any, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the user's forward of the root, or of a module in it, with int8 layers and float32 between them."""
        if torch.compiler.is_compiling():
            raise mismatch
        weights = [(runner.weights, runner.layers) for runner in self.programs() if runner.weights is not None]
        for one, layers in weights:
            one.restore(self.root, layers)
        lost = [name for one, _ in weights for name in one.lost(self.root)]
        output = run_own_forward(module, own, args, kwargs, mismatch, lost)
        if not is_falling_back():
            how = "layer by layer, in float between int8 layers"
            if self.expected.path not in self.warned:
                how += self._other_way()
            warn_once(self.warned, self.expected.path, self.root, mismatch, how)
        return output

    def _other_way(self) -> str:
        """What a warning adds where the user's forward finds other dtypes than in the user's model."""
        names = [] if self.half_type is None else comparing_dtypes(self.root)
        if not names:
            return ""
        listed = ", ".join(full_name(self.expected.path, name) or type(self.root).__name__ for name in names[:4])
        return f", with float32 where the model has {self.half_type}; {listed} compares dtypes and may go another way"

    def held(self, *args: Any, **kwargs: Any) -> Held:
        """Run a call and keep all its values.

        Each is a copy from the time it was computed, since a later float step may write into the tensor.
        """
        program, values = self.program, Held()
        registers = bound_values(self.expected, self.root, *copied((args, kwargs)))
        for register, given in registers.items():
            values.keep(program.values[register], copied(given))
        for instruction in program.instructions:
            self._steps(program, [instruction], [[]], registers)
            values.keep(program.values[instruction.out], copied(registers[instruction.out]))
        return values

    def held_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ProgramRunner, Held] | None:
        """The program that stands for a call, this or a further one, and the call's values; None where none does."""
        for one in self.programs():
            with contextlib.suppress(CaptureMismatch):
                return one, one.held(*args, **kwargs)
        return None

    def float_parameters(self) -> set[str]:
        """Dotted names of the parameters and buffers that float calls still read."""
        places = [*(one.arguments for one in self.program.instructions if one.own), self.program.output]
        return {leaf.path for place in places for leaf in leaves(place) if isinstance(leaf, Attr)}

    def layer(self, key: LayerKey) -> Int8Layer:
        """An int8 layer of the program."""
        if key.functional:
            return self.layers[key.name]  # type: ignore[return-value]
        return submodule(self.root, key.name)  # type: ignore[return-value]

    @staticmethod
    def _schedule(program: Program, backend: Backend) -> Schedule | None:
        """What is computed in one call each; None where the instructions are run one by one."""
        return program.schedule if backend.plans else None

    def execute(self, program: Program, registers: dict[int, Any]) -> Any:
        """Run a program; `registers` holds its inputs and receives all other values."""
        backend = dispatch.current(self.backend)
        planned = self._schedule(program, backend)
        if planned is None:
            self._steps(program, program.instructions, program.drops, registers)
        elif len(planned.steps) == 1 and isinstance(region := planned.steps[0], Region) and not region.tail:
            self._run_region(program, region, registers, backend.name)  # the loop costs a tenth of a small model's call
        else:
            steps, drops = self._with_runs(program, planned)
            self._steps(program, steps, drops, registers, backend.name)
        return self._output(program, registers)

    def execute_timed(self, program: Program, registers: dict[int, Any], timer: StepTimer) -> Any:
        """As `execute`; `timer` is told of each instruction, and of each operation of a native call, with its time."""
        backend = dispatch.current(self.backend)
        planned = self._schedule(program, backend)
        steps, drops = (program.instructions, program.drops) if planned is None else (planned.steps, planned.drops)
        for step, gone in zip(steps, drops, strict=True):
            singles: Sequence[Instruction] = () if isinstance(step, Region) else (step,)
            if isinstance(step, Region):
                lines = step.run_timed(registers, self, backend.name)
                singles = step.tail if lines is not None else (*step.instructions, *step.tail)
                for line in lines or ():
                    timer.add(line.instruction, line.operation, line.seconds, ends=line.ends)
            for instruction in singles:
                with timer.measure(instruction):
                    self._steps(program, [instruction], [[]], registers, backend.name if planned else "")
            for register in gone:
                registers.pop(register, None)
        return self._output(program, registers)

    @staticmethod
    def _output(program: Program, registers: dict[int, Any]) -> Any:
        if type(program.output) is Ref:
            output = registers[program.output.index]
        else:
            output = program.filled(registers)
        return nonfinite.spoiled(output, registers) if nonfinite.LOST in registers else output

    def _with_runs(self, program: Program, planned: Schedule) -> Joined:
        """The steps and drops of a schedule, neighbouring calls joined; as they are under torch.compile."""
        if torch.compiler.is_compiling():
            return planned.steps, planned.drops
        ready = self._joined.get(id(planned))
        if ready is None:
            known = self._steps_known

            def single(instruction: Instruction) -> SingleStep:
                return known.get(id(instruction)) or self._known_step(program, instruction, known)

            ready = self._joined[id(planned)] = planned, joined(self.root, planned.steps, planned.drops, single)
        return ready[1]

    def _steps(
        self,
        program: Program,
        steps: Sequence[Instruction | Region | StepRun],
        drops: list[list[int]],
        registers: dict[int, Any],
        backend: str = "",
    ) -> None:
        table: OpTable = {}
        eager = not torch.compiler.is_compiling()
        # Where regions are run, a float call that runs by itself has no native form.
        known = self._steps_known if eager and backend else {}
        for step, gone in zip(steps, drops, strict=True):
            singles: Sequence[Instruction]
            if isinstance(step, StepRun):
                if not step.run(registers):
                    self._joined = {}  # the next call looks where the modules are now
                    self._steps(program, step.instructions, step.drops, registers, backend)
                continue
            if isinstance(step, Region):
                self._run_region(program, step, registers, backend)
                singles = step.tail
            else:
                singles = (step,)
            for instruction in singles:
                ready = known.get(id(instruction))
                if ready is not None and ready.direct is not None and ready.stands():
                    registers[instruction.out] = ready.direct(registers)
                    continue
                table = table or dispatch.current(self.backend).operators
                registers[instruction.out] = self._execute(program, instruction, registers, table, bool(backend), eager)
            for register in gone:
                registers.pop(register, None)

    def _run_region(self, program: Program, region: Region, registers: dict[int, Any], backend: str) -> None:
        if not region.run(registers, self, backend):
            self._steps(program, region.instructions, [[] for _ in region.instructions], registers)

    def _native(self, program: Program, instruction: FloatCall) -> Region | None:
        """The native form of a float call that runs by itself, with the bits that it has in a region; or None."""
        if program.schedule is None or not dispatch.current(self.backend).computes_reals:
            return None
        return program.schedule.singles.get(instruction.out)

    def _execute(
        self,
        program: Program,
        instruction: Instruction,
        registers: dict[int, Any],
        table: OpTable,
        planned: bool,
        eager: bool,
    ) -> Any:
        known = self._steps_known if eager else None  # torch.compile follows no table by identity
        step = None if known is None else known.get(id(instruction))
        if step is None:
            step = self._known_step(program, instruction, known)
        if not step.stands():
            if self.origin is not None and self.origin.changed(instruction):
                return self.origin.run(instruction, program.values, registers, self.ranges, table)
            step = self._known_step(program, instruction, known)
        if instruction.own:
            return self._own(program, instruction, step, registers, planned)
        try:
            result = self._integers(instruction, step, registers, table)
        except NAMED as error:
            if type(error) not in NAMED:  # a subclass, whose constructor may take other arguments
                raise
            raise type(error)(f"{said_of(instruction)}: {error}") from error
        # A kernel may put channels last, where the user's view() would fail.
        real = program.values[instruction.out].qparams is None
        return result.contiguous() if real and isinstance(result, Tensor) else result

    def _known_step(
        self, program: Program, instruction: Instruction, known: dict[int, SingleStep] | None
    ) -> SingleStep:
        step = single_step(instruction, self.root, self.origin, program.values[instruction.out])
        if known is not None:
            known[id(instruction)] = step
        return step

    def _own(
        self, program: Program, instruction: Instruction, step: SingleStep, registers: dict[int, Any], planned: bool
    ) -> Any:
        """The value of a float call or guard."""
        if isinstance(instruction, Guard):
            [given, expected], place = step.args(registers), program.values[instruction.out].node
            return check_guard(given, expected, instruction.owner, self.root, place)
        assert isinstance(instruction, FloatCall)
        native = self._native(program, instruction) if not planned else None
        if native is not None and native.run(registers, self, dispatch.current(self.backend).name):
            return registers[instruction.out]
        result = call(instruction, self.root, step.args(registers), step.kwargs(registers))
        value, callee = program.values[instruction.out], instruction.callee
        if value.dtype is not None and isinstance(callee, Submodule):
            check_tensor(result, callee.path, self.root, value.node)
        return result

    def _integers(self, instruction: Instruction, step: SingleStep, registers: dict[int, Any], table: OpTable) -> Any:
        """The value of an integer step or a conversion."""
        if isinstance(instruction, IntegerMove):
            seen = rescaled(instruction.rescaled, registers)
            return move(instruction, self.root, step.args(seen), step.kwargs(seen))
        args, kwargs = step.args(registers), step.kwargs(registers)
        if isinstance(instruction, LayerCall):
            x, site = args
            if x.dtype != torch.uint8:  # a layer with 16-bit activations
                x = x.float() if x.dtype in HALVES else x
                nonfinite.note(x, registers)
            return self.layer(instruction.layer).compute(x, site)
        if isinstance(instruction, TakeSequence):
            return args[0][0]
        if isinstance(instruction, RecurrentCall):
            layer: Any = submodule(self.root, instruction.path)
            x, *states = args
            nonfinite.note_recurrent(layer, x, (states, kwargs) if states or kwargs else None, registers)
            return layer.compute(*args, **kwargs, quantized=instruction.integers)
        if isinstance(instruction, Quantize):
            nonfinite.note(args[0], registers)
            if args[0].dtype in HALVES:  # as a native call takes them: a float layer gives them under autocast
                args = (args[0].float(), *args[1:])
        assert isinstance(instruction, (KernelCall, Conversion))
        return table[instruction.kernel](*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # The compiled steps hold functions, and belong to this object's modules.
        return {**self.__dict__, "_steps_known": {}, "_joined": {}}

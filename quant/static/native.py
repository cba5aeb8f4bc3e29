"""Which runs of a program's instructions one native call can compute, and the text of each (kernels/reference_plan.py).

A region is a maximal run of neighbouring instructions that all have a plan. What stands between regions runs step by
step, and `Schedule.reasons` says why. The schedule is plain data; the text of a region is made from its layers' numbers
when it first runs, and again when a layer's buffers were replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant.graph import Ref, leaves
from quant.kernels.reference_plan import HEADER, Constant, Line, Register
from quant.static.layers import StaticLayer
from quant.static.lower import Instruction
from quant.static.plannable import Planner, Symbol, Unplanned

SHORTEST = 2
"""Instructions from which one call is worth more than the steps themselves."""


@dataclass
class Region:
    """Instructions that are computed in one call.

    Attributes:
        pieces: lines as text, and calls of layers, whose numbers are read when the region runs.
        constants: tensors that the lines name as $0, $1, ...; those of layers follow.
        inputs, outputs: registers.
        tail: instructions that look at an output's shape or cut it into a tuple, for what comes after the region.
        drops: registers that nobody reads after it.
        steps: how many instructions it stands for.
    """

    pieces: list[str | Instruction]
    constants: list[Tensor]
    inputs: list[int]
    outputs: list[int]
    tail: list[Instruction]
    drops: list[int]
    steps: int
    _text: _Text | None = field(default=None, repr=False, compare=False)

    def text(self, layer: Callable[[str], StaticLayer]) -> tuple[str, list[Tensor]]:
        """The program text and the constants it names."""
        if self._text is None or not self._text.current():
            self._text = _Text(self, layer)
        return self._text.program, self._text.constants

    def run(self, registers: dict[int, Any], layer: Callable[[str], StaticLayer], backend: str) -> None:
        """Fill the registers that others read."""
        program, constants = self.text(layer)
        made = torch.ops.octet.run_plan([registers[index] for index in self.inputs], constants, program, backend)
        for index, value in zip(self.outputs, made, strict=True):
            registers[index] = value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_text": None}


class _Text:
    """A region's text as of now, with what it was made from."""

    def __init__(self, region: Region, layer: Callable[[str], StaticLayer]) -> None:
        self.constants = list(region.constants)
        self.sources: list[tuple[StaticLayer, int, Any, Tensor]] = []
        lines = [HEADER, " ".join(["inputs", *(f"%{index}" for index in region.inputs)])]
        for piece in region.pieces:
            lines += (
                [piece] if isinstance(piece, str) else self._layer(piece, layer(piece.target), LAYERED + len(lines))
            )
        lines.append(" ".join(["outputs", *(f"%{index}" for index in region.outputs)]))
        self.program = "\n".join(lines)

    def _layer(self, instruction: Instruction, layer: StaticLayer, spare: int) -> list[str]:
        """The lines that do what `StaticLayer.compute` does."""
        source, site = instruction.args
        known = layer.site(site)
        self.sources.append((layer, site, known, layer.q_weight))
        lines = []
        x = Register(source.index)
        if known.pad is not None:
            widths, mode, fill = known.pad
            lines.append(Line(spare, "pad", {"q": x, "widths": tuple(widths), "mode": mode, "fill": fill}))
            x = Register(spare)
        settings: dict[str, Any] = {
            "q_x": x,
            "zero_point": known.input_zero_point,
            "q_weight": self._constant(layer.q_weight),
        }
        settings["q_bias"] = None if known.q_bias is None else self._constant(known.q_bias)
        settings.update(zip(("stride", "padding", "dilation", "groups"), known.places, strict=False))
        settings["multiplier"] = self._constant(known.multiplier)
        clamp = layer.clamps[site]
        if known.limits is not None:
            low, high = known.limits
            settings.update(output_zero_point=known.output_zero_point, quant_min=low, quant_max=high)
            lines.append(Line(instruction.out, f"{layer.op}_u8s8_u8", settings))
        elif clamp is None:
            lines.append(Line(instruction.out, f"{layer.op}_u8s8_f32", settings))
        else:
            lines.append(Line(spare + 1, f"{layer.op}_u8s8_f32", settings))
            ends = {"x": Register(spare + 1), "low": clamp[0], "high": clamp[1]}
            lines.append(Line(instruction.out, "clamp", ends))
        return [str(line) for line in lines]

    def _constant(self, tensor: Tensor) -> Constant:
        self.constants.append(tensor)
        return Constant(len(self.constants) - 1)

    def current(self) -> bool:
        """Whether the layers are still those that the text was made from."""
        for layer, site, known, weight in self.sources:
            if not layer.knows(site, known) or layer._buffers["q_weight"] is not weight:
                return False
        return True


LAYERED = 1 << 20
"""Registers from here on hold what is between the operations of one layer."""


@dataclass
class Schedule:
    """A program's instructions, some of them as regions.

    Attributes:
        steps: in order.
        drops: per step the registers that nobody reads after it.
        reasons: per instruction that is computed step by step, by its step's name, why.
    """

    steps: list[Instruction | Region]
    drops: list[list[int]]
    reasons: dict[str, str]

    @property
    def regions(self) -> list[Region]:
        """The native calls."""
        return [step for step in self.steps if isinstance(step, Region)]

    def describe(self) -> str:
        """What is computed together, and why the rest is not, for the report."""
        single = sum(isinstance(step, Instruction) for step in self.steps)
        inside = [region.steps for region in self.regions]
        calls = f"native calls: {len(inside)}, of {' + '.join(map(str, inside))} steps" if inside else "no native call"
        reasons = "; ".join(f"{step}: {reason}" for step, reason in self.reasons.items())
        return f"{calls}; step by step: {single}" + (f" ({reasons})" if reasons else "")


def schedule(instructions: list[Instruction], drops: list[list[int]], output: Any, planner: Planner) -> Schedule:
    """Group a program's instructions.

    Args:
        instructions, drops, output: of a `Program`.
        planner: says what has a plan.
    """
    made = Schedule([], [], {})
    run = _Run()
    planner.rounded = _only_rounded(instructions, output)
    later = _read_later(instructions, output)
    for index, instruction in enumerate(instructions):
        try:
            run.add(instruction, drops[index], planner)
        except Unplanned as reason:
            run.close(made, later[index])
            run = _Run()
            planner.symbols.clear()
            made.steps.append(instruction)
            made.drops.append(drops[index])
            if instruction.op != "call":
                made.reasons[instruction.step or instruction.op] = str(reason)
    run.close(made, _registers(output))
    planner.symbols.clear()
    return made


def _only_rounded(instructions: list[Instruction], output: Any) -> set[int]:
    """The registers that nobody reads but to quantise them."""
    rounded = {one.args[0].index for one in instructions if one.op == "quantize"}
    others = [(one.args, one.kwargs) for one in instructions if one.op != "quantize"]
    return rounded - _registers(others) - _registers(output)


def _read_later(instructions: list[Instruction], output: Any) -> list[set[int]]:
    """Per instruction, the registers that it or anything after it reads."""
    read = _registers(output)
    found = []
    for instruction in reversed(instructions):
        read = read | _registers((instruction.args, instruction.kwargs))
        found.append(read)
    return found[::-1]


def _registers(tree: Any) -> set[int]:
    return {leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)}


class _Run:
    """A region while it grows."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.drops: list[list[int]] = []
        self.pieces: list[str | Instruction] = []
        self.constants: list[Tensor] = []
        self.inputs: dict[int, None] = {}
        self.made: set[int] = set()
        self.symbolic: dict[int, Instruction] = {}

    def add(self, instruction: Instruction, drops: list[int], planner: Planner) -> None:
        """Take an instruction in.

        Raises:
            Unplanned: it has no plan; nothing was changed.
        """
        planned = planner.plan(instruction)
        if isinstance(planned, Symbol):
            self.symbolic[instruction.out] = instruction
        else:
            for line in planned if isinstance(planned, list) else []:
                self.pieces.append(str(self._with_constants(line)))
            if isinstance(planned, Instruction):
                self.pieces.append(planned)
            for register in _tensors(planned):
                if register not in self.made:
                    self.inputs[register] = None
        self.made.add(instruction.out)
        self.instructions.append(instruction)
        self.drops.append(drops)

    def _with_constants(self, line: Line) -> Line:
        settings = dict(line.settings)
        for name, value in settings.items():
            if isinstance(value, Tensor):
                settings[name] = Constant(len(self.constants))
                self.constants.append(value)
        return Line(line.out, line.op, settings)

    def close(self, made: Schedule, wanted: set[int]) -> None:
        """Put the run into the schedule: as a region, or as it was where it is too short."""
        if len(self.pieces) < SHORTEST:
            made.steps += self.instructions
            made.drops += self.drops
            return
        tail, wanted = self._tail(wanted)
        outputs = [one.out for one in self.instructions if one.out in wanted and one.out not in self.symbolic]
        held = {*self.inputs, *outputs, *(one.out for one in tail)}
        drops = sorted({register for part in self.drops for register in part} & held)
        steps = len(self.instructions)
        made.steps.append(Region(self.pieces, self.constants, list(self.inputs), outputs, tail, drops, steps))
        made.drops.append(drops)

    def _tail(self, wanted: set[int]) -> tuple[list[Instruction], set[int]]:
        """The symbolic instructions that somebody outside reads, and all that is then read of the region."""
        tail: list[Instruction] = []
        wanted = set(wanted)
        for instruction in reversed(list(self.symbolic.values())):
            if instruction.out in wanted:
                tail.insert(0, instruction)
                wanted |= _registers((instruction.args, instruction.kwargs))
        return tail, wanted


def _tensors(planned: list[Line] | Instruction) -> list[int]:
    """The registers whose tensors a plan reads."""
    if isinstance(planned, Instruction):
        return [planned.args[0].index]
    found: list[int] = []
    own = {line.out for line in planned}
    for line in planned:
        for value in line.settings.values():
            parts = value if isinstance(value, (tuple, list)) else (value,)
            found += [part.index for part in parts if isinstance(part, Register) and part.index not in own]
    return found

"""Writes and reads a schedule as text: which instructions of a program are one native call, and the lines of each.

    octet-schedule 1
    single(%1, drops=[%0])
    native([%2, %3], inputs=[%1], outputs=[%3], drops=[%1], booleans=[False])
      layer %2
      %3 = max_pool q=%2 kernel=2,2 stride=2 padding=0 dilation=1 ceil_mode=False

`single` is an instruction that runs by itself. `native` is a region, with its instructions by the ids of their values.
Below it are its lines: a line of a plan, an int8 layer or float module whose line is written when the region first
runs. `alone native` is the native form of a float call that runs by itself, `whole native` that of all instructions
where views at the ends run by themselves, and `reason` says why a step does. A text belongs to one program and is
checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from quant.kernels.reference_plan import parse_line
from quant.runtime import (  # noqa: F401 - they register the kinds of calls
    constant_calls,
    int8_module_calls,
    module_calls,
    places_call,
    recurrent_lines,
)
from quant.runtime.instructions import Instruction, LayerCall, registers_in
from quant.runtime.module_call import ModuleCall
from quant.runtime.program import Program
from quant.runtime.region import LAYERED, Region
from quant.runtime.schedule import Schedule
from quant.runtime.text_scanner import NAME, TextError
from quant.runtime.tree_reader import Reader
from quant.runtime.tree_text import Writer
from quant.runtime.trees import Ref

HEADER = "octet-schedule 1"


def schedule_text(schedule: Schedule, writer: Writer) -> str:
    """A schedule as text; the tensors in it are added to `writer.constants`."""
    lines = [HEADER]
    for step, drops in zip(schedule.steps, schedule.drops, strict=True):
        if isinstance(step, Region):
            lines += _region(step, writer)
        else:
            lines.append(f"single{writer.arguments((Ref(step.out),), _nonempty(drops=_refs(drops)))}")
    for region in schedule.singles.values():
        begin, *rest = _region(region, writer)
        lines += [f"alone {begin}", *rest]
    if schedule.whole is not None:
        begin, *rest = _region(schedule.whole, writer)
        lines += [f"whole {begin}", *rest]
    lines += [f"reason{writer.arguments(pair, {})}" for pair in schedule.reasons.items()]
    return "\n".join(lines)


def _region(region: Region, writer: Writer) -> list[str]:
    settings = _nonempty(
        inputs=_refs(region.inputs),
        outputs=_refs(region.outputs),
        tail=_refs([one.out for one in region.tail]),
        drops=_refs(region.drops),
        booleans=region.booleans,
        constants=region.constants,
        ranks=region.ranks,
    )
    outs = _refs([one.out for one in region.instructions])
    return [f"native{writer.arguments((outs,), settings)}", *(f"  {_piece(one, writer)}" for one in region.pieces)]


def _piece(piece: str | LayerCall | ModuleCall, writer: Writer) -> str:
    if isinstance(piece, str):
        return piece
    if isinstance(piece, LayerCall):
        return f"layer %{piece.out}"
    rest = [getattr(piece, item.name) for item in fields(piece)[3:]]
    return f"{piece.kind}{writer.arguments((Ref(piece.out), _refs(piece.reads), piece.path, *rest), {})}"


def _refs(ids: Any) -> list[Ref]:
    return [Ref(one) for one in ids]


def _nonempty(**settings: Any) -> dict[str, Any]:
    """The settings that are not empty."""
    return {name: value for name, value in settings.items() if value or (name == "ranks" and value is not None)}


def parse_schedule(text: str, program: Program, constants: list[Tensor]) -> Schedule:
    """Parse the text of a schedule.

    Args:
        text: as `schedule_text` writes it.
        program: the program whose instructions it groups.
        constants: the tensors that `$0`, `$1`, ... name.

    Raises:
        TextError: the text is not a schedule, or not one of this program; the message names the line.
    """
    rows = text.split("\n")
    if rows[0] != HEADER:
        raise TextError(f"line 1: expected {HEADER!r}, got {rows[0]!r}: the schedule was written by another version")
    reading = _Reading(program)
    place = 1
    while place < len(rows):
        end = next((one for one in range(place + 1, len(rows)) if not rows[one].startswith("  ")), len(rows))
        readers = [Reader(row, number + 1, constants) for number, row in enumerate(rows[place:end], place)]
        reading.entry(readers[0], readers[1:])
        place = end
    return reading.schedule()


class _Reading:
    """The part of a schedule that the lines up to now define.

    Attributes:
        by_id: the program's instructions by the ids of their values.
        result: the schedule.
        there: ids of the values that exist after the last line.
        order: ids of the instructions up to now, which are not always in the program's order.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.by_id: Mapping[int, Instruction] = {one.out: one for one in program.instructions}
        self.result = Schedule([], [], {})
        self.there = set(program.inputs)
        self.order: list[int] = []

    def entry(self, reader: Reader, pieces: list[Reader]) -> None:
        """Add a step, with the lines below it."""
        if reader.take("reason"):
            step, why = _given(reader, 2)
            self.result.reasons[_string(reader, step)] = _string(reader, why)
        elif reader.take("alone "):
            region = self._region(reader, pieces)
            if len(region.instructions) != 1:
                reader.fail("expected one instruction")
            self.result.singles[region.instructions[0].out] = region
        elif reader.take("whole "):
            self.result.whole = self._region(reader, pieces)
            if {one.out for one in self.result.whole.instructions} != set(self.by_id):
                reader.fail("expected all instructions of the program")
        elif reader.take("single"):
            out, settings = _call(reader)
            [instruction] = self._instructions(reader, [out])
            self._run(reader, [instruction], {instruction.out})
            self._drop(_ids(reader, settings.pop("drops", [])))
            self.result.steps.append(instruction)
            if settings:
                reader.fail("expected single(%value, drops=[...])")
        else:
            region = self._region(reader, pieces)
            left = {*region.outputs, *(one.out for one in region.tail)}
            missing = set(region.inputs).union(*(one.reads for one in region.tail)) - self.there - left
            if missing:
                reader.fail(f"reads %{min(missing)}, which does not exist at this point")
            self._run(reader, region.instructions, left)
            self._drop(region.drops)
            self.result.steps.append(region)
        reader.end()

    def _run(self, reader: Reader, instructions: list[Instruction], left: set[int]) -> None:
        """Note that instructions run; of their values, `left` exist afterwards."""
        there = set(self.there)
        for one in instructions:
            missing = one.reads - there
            if missing:
                reader.fail(f"%{one.out} reads %{min(missing)}, which does not exist at this point")
            there.add(one.out)
            self.order.append(one.out)
        self.there |= left

    def _drop(self, drops: list[int]) -> None:
        self.there -= set(drops)
        self.result.drops.append(drops)

    def _region(self, reader: Reader, pieces: list[Reader]) -> Region:
        reader.expect("native")
        outs, settings = _call(reader)
        instructions = self._instructions(reader, outs)
        defined = {one.out for one in instructions}
        lists = {name: _ids(reader, settings.pop(name, [])) for name in ("inputs", "outputs", "drops")}
        if not set(lists["outputs"]) <= defined:
            reader.fail("has an output that none of its instructions defines")
        tail = self._instructions(reader, settings.pop("tail", []))
        constants, ranks = settings.pop("constants", []), settings.pop("ranks", None)
        booleans = settings.pop("booleans", [])
        if settings or not _is_list(booleans, bool) or not _is_list(constants, Tensor):
            reader.fail("is not a region of a schedule")
        wrong = len(booleans) != len(lists["inputs"])
        if wrong or (ranks is not None and (not _is_list(ranks, int) or len(ranks) != len(booleans))):
            reader.fail("expected a number of dimensions and a boolean for each input")
        lines = [self._piece(one, defined) for one in pieces]
        return Region(
            lines,
            constants,
            lists["inputs"],
            lists["outputs"],
            tail,
            lists["drops"],
            len(instructions),
            instructions,
            ranks,
            booleans,
        )

    def _piece(self, reader: Reader, defined: set[int]) -> str | LayerCall | ModuleCall:
        if reader.at("%"):
            return _plan_line(reader, reader.text.strip())
        if reader.take("layer "):
            reader.expect("%")
            call = self.by_id.get(reader.integer())
            if not isinstance(call, LayerCall) or call.out not in defined:
                reader.fail("is not a layer of this region")
            return call
        kind = ModuleCall.kinds.get(reader.match(NAME) or "")
        if kind is None:
            reader.fail("is not a plan's line, nor a layer or module that a region can hold")
        out, reads, path, *rest = _given(reader, len(fields(kind)))
        if not isinstance(out, Ref) or (out.index not in defined and out.index < LAYERED):
            reader.fail("is not a module of this region")
        types = [item.type for item in fields(kind)[3:]]
        more = [_field(reader, value, str(kind)) for value, kind in zip(rest, types, strict=True)]
        read = kind(out.index, tuple(_ids(reader, reads)), _string(reader, path), *more)
        for line in read.lines():
            _plan_line(reader, line)
        return read

    def _instructions(self, reader: Reader, outs: Any) -> list[Instruction]:
        ids = _ids(reader, outs)
        unknown = [one for one in ids if one not in self.by_id]
        if unknown:
            reader.fail(f"no instruction defines %{unknown[0]}")
        return [self.by_id[one] for one in ids]

    def schedule(self) -> Schedule:
        """The schedule that all lines together define."""
        if sorted(self.order) != sorted(self.by_id):  # that each comes after what it reads was checked on the way
            raise TextError("the schedule does not have all instructions of its program, each once")
        lost = registers_in(self.program.output) - self.there
        if lost:
            raise TextError(f"the schedule drops %{min(lost)}, which the program returns")
        return self.result


def _call(reader: Reader) -> tuple[Any, dict[str, Any]]:
    """The one positional argument, and the keyword arguments."""
    args, kwargs = reader.arguments()
    if len(args) != 1:
        reader.fail("expected one positional argument")
    return args[0], kwargs


def _given(reader: Reader, count: int) -> tuple[Any, ...]:
    args, kwargs = reader.arguments()
    if kwargs or len(args) != count:
        reader.fail(f"expected {count} values")
    return args


def _ids(reader: Reader, values: Any) -> list[int]:
    if not _is_list(values, Ref):
        reader.fail("expected a list of values of the program")
    return [one.index for one in values]


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(one, kind) for one in values)


def _string(reader: Reader, value: Any) -> str:
    if not isinstance(value, str):
        reader.fail("expected a text")
    return value


def _field(reader: Reader, value: Any, kind: str) -> Any:
    """A further field of a call of a module, by the name of its type."""
    if kind not in _FIELDS:
        return _string(reader, value)
    expected, words = _FIELDS[kind]
    named = not isinstance(value, tuple) or all(isinstance(one, str) for one in value)
    if type(value) is not expected or not named:
        reader.fail(f"expected {words}")
    return value


_FIELDS: dict[str, tuple[type, str]] = {
    "int": (int, "a number"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": (tuple, "a tuple of names"),
}
"""Type of a field, by its name -> the class of its values, and what it is; others are texts."""


def _plan_line(reader: Reader, line: str) -> str:
    try:
        parse_line(line)
    except (ValueError, IndexError) as error:
        reader.fail(str(error))
    return line

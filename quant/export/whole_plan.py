"""A converted model as one plan: the text of its only native call, its constants, and its inputs and outputs by name.

What runs without Python has nothing but a plan. So a model that is more than one native call is refused here, with the
steps outside of it and the reasons that the schedule has for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.export.naming import listed, named_leaves
from quant.export.output_text import form_of
from quant.half_precision import OwnOutputs
from quant.kernels import narrow
from quant.kernels.reference_plan import HEADER
from quant.runtime.instructions import Instruction
from quant.runtime.layers.narrow_bytes import HasGroups, refuse_groups, with_bytes
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import child_of, dtype_name
from quant.runtime.objects import Result
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.region import Region
from quant.runtime.schedule import Schedule
from quant.runtime.trees import Ref
from quant.runtime.values import Size, Value

DTYPES = {torch.float32: "float32", torch.uint8: "uint8", torch.bool: "bool", torch.int64: "int64"}
"""The dtypes of inputs and outputs, by their names in files."""


class ExportError(ValueError):
    """The model cannot run without Python; the message names the step and the reason."""


@dataclass(frozen=True)
class PlanValue:
    """An input or output of a plan.

    Attributes:
        name: in the user's model.
        dtype: a name of DTYPES.
        shape: at export, with a text for each size that may differ between calls; None where it is not known.
        fixed_rank: whether another number of dimensions is refused.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None
    fixed_rank: bool = False


@dataclass(frozen=True)
class WholePlan:
    """A model as one plan.

    Attributes:
        text: as kernels/reference_plan.py defines it; its inputs and outputs are in the order of those below.
        steps: for each operation of the text, the name of the user's step that it is of.
        constants: the tensors that the text names $0, $1, ...
        returns: how the outputs stand in what the model returns (`output_text.py`).
    """

    text: str
    steps: tuple[str, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[PlanValue, ...]
    outputs: tuple[PlanValue, ...]
    returns: Any


def whole_plan(model: nn.Module, example_inputs: Any = None, *, in_bytes: bool = True) -> WholePlan:
    """The plan of a quantised model.

    Args:
        in_bytes: whether narrow weights (`quant.kernels.narrow`) become int8, of which every reader of plans knows.
        example_inputs: what a model without static programs, of `quant.quantize_dynamic`, is captured with: a tensor, a
            tuple of positional arguments, or a dict of keyword arguments. Others have shown theirs.

    Raises:
        ExportError: the model is not one plan; the message says which step is outside of it, and why.
    """
    runner = runner_of(model, example_inputs, in_bytes=in_bytes)
    region = _only_region(runner.program, type(model).__name__)
    outputs = _outputs(runner.program, type(model).__name__)
    with torch.no_grad():  # where gradients may be wanted, no plan stands for parameters that want one
        text = region.text(runner)
    if text is None:
        raise ExportError(f"{type(model).__name__}: {_changed(model)}; export the model as quant.convert returned it")
    inputs = [index for index in runner.program.inputs if index in region.inputs]
    if set(inputs) != set(region.inputs):
        raise ExportError(f"{type(model).__name__}: the native call reads a value that is no input of the model")
    _, _, *lines, _ = text.program.split("\n")
    whole = "\n".join([HEADER, _row("inputs", inputs), *lines, _row("outputs", outputs.values())])
    return WholePlan(
        whole,
        tuple(_steps(lines, region)),
        tuple(_in_bytes(one) if in_bytes else one for one in (each.detach().contiguous() for each in text.constants)),
        _named_apart([_input(index, runner, region) for index in inputs]),
        tuple(_value(name, runner.program.values[index]) for name, index in outputs.items()),
        form_of(runner.program.output),
    )


def _in_bytes(constant: Tensor) -> Tensor:
    """A constant whose narrow weight, uint8 of three dimensions, is int8."""
    return narrow.as_bytes(constant) if constant.dim() == 3 and narrow.is_narrow(constant) else constant


def _units(model: nn.Module) -> list[str]:
    """The names of the modules that have a static program."""
    return [name for name, module in model.named_modules() if isinstance(child_of(module, RESERVED), ProgramRunner)]


def runner_of(model: nn.Module, example_inputs: Any = None, *, in_bytes: bool = True) -> ProgramRunner:
    """The runner of a quantised model that is one program; arguments and errors as of `whole_plan`."""
    units = _units(model)
    try:
        if units:
            if in_bytes:
                refuse_groups(model)
            return _only_runner(model, units)
        return _captured(with_bytes(model) if in_bytes else model, example_inputs)
    except HasGroups as error:
        raise ExportError(str(error)) from error


def _only_runner(model: nn.Module, units: list[str]) -> ProgramRunner:
    """The runner of a model that is one static program, from the modules that have one."""
    kind, runner = type(model).__name__, child_of(model, RESERVED)
    if units != [""] or not isinstance(runner, ProgramRunner):
        raise ExportError(
            f"{kind} is not one program: its own Python runs around {listed([name or '(root)' for name in units])}; "
            "quant.summary names the islands"
        )
    programs = len(list(runner.programs()))
    if programs > 1:
        raise ExportError(
            f"{kind} has {programs} programs for calls of several kinds, expected one: prepare it with one kind of "
            "call (quant.summary lists them)"
        )
    _check_hooks(model)
    return _check_writes(runner, kind)


def _captured(model: nn.Module, example_inputs: Any) -> ProgramRunner:
    """The runner of a model whose dynamic layers are all that is int8 of it, captured for this."""
    alone = [name for name, module in model.named_modules() if isinstance(module, StaticLayer)]
    if alone == [""]:
        raise ExportError(
            f"{type(model).__name__} is an int8 layer with calibrated ranges, and no program says what runs around it: "
            "quantise nn.Sequential(layer), or the model that it is part of"
        )
    if alone:
        raise ExportError(
            f"{type(model).__name__} is not one program: its own Python runs around {listed(alone)}; quant.summary "
            "names the islands"
        )
    if not any(isinstance(module, QuantModule) for module in model.modules()):
        raise ExportError(f"{type(model).__name__} holds no int8 module; quantise it first")
    if example_inputs is None:
        raise ExportError(
            f"{type(model).__name__} has int8 layers and no program of its whole forward: give example_inputs, with "
            "which it is captured"
        )
    _check_hooks(model)
    from quant.export.captured_program import NotOneGraph, captured_program  # a process that saves needs no capture

    try:
        return _check_writes(captured_program(model, example_inputs), type(model).__name__)
    except NotOneGraph as error:
        raise ExportError(str(error)) from error


def _check_writes(runner: ProgramRunner, kind: str) -> ProgramRunner:
    assert runner.expected is not None
    if runner.expected.writes or (isinstance(runner.program.output, Result) and runner.program.output.writes):
        raise ExportError(f"{kind} writes to a buffer, an attribute or an argument in its forward, which a plan cannot")
    return runner


def _check_hooks(model: nn.Module) -> None:
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
    halves = [hook.half for hook in hooks if isinstance(hook, OwnOutputs)]
    if halves:
        raise ExportError(
            f"{type(model).__name__} is a model in {dtype_name(halves[0])}, and plans take and give "
            "float32: convert model.float()"
        )
    if hooks:
        raise ExportError(
            f"{type(model).__name__} has a forward hook, which only Python runs: remove it before the export"
        )


def _changed(model: nn.Module) -> str:
    """What keeps the native call from standing for the modules of its program."""
    touched = [
        name
        for name, one in model.named_modules()
        if name and (one.training or one._forward_hooks or one._forward_pre_hooks)
    ]
    return (
        f"{listed(touched)} is in training mode or has hooks, which only Python heeds" if touched else "it has changed"
    )


def _only_region(program: Program, kind: str) -> Region:
    """The native call that is the whole program."""
    schedule = program.schedule
    if schedule is None:
        raise ExportError(f"{kind} has no native call: its program was never scheduled")
    if schedule.whole is not None:
        return schedule.whole
    outside = list(_outside(schedule, program))
    regions = len(schedule.regions)
    if outside or regions != 1:
        calls = "no native call" if not regions else "one native call" if regions == 1 else f"{regions} native calls"
        raise ExportError(
            f"{kind} is {calls} and {len(outside)} further step{'s' * (len(outside) != 1)}, expected one native call "
            f"of everything; outside is {listed(outside)}"
        )
    return schedule.regions[0]


def _outside(schedule: Schedule, program: Program) -> Iterator[str]:
    """Each step outside of the native calls, with its reason; what computes real numbers before what counts sizes."""

    def described(one: Instruction) -> str:
        value = program.values[one.out]
        kind = "float" if value.dtype is None or value.dtype is torch.float32 else dtype_name(value.dtype)
        by_torch = "no tensor" if value.dtype is None else f"computed by torch in {kind}"
        return f"'{one.step or value.name}' ({schedule.reasons.get(one.step or one.kind) or by_torch})"

    def computes(one: Instruction) -> int:
        dtype = program.values[one.out].dtype
        return 0 if dtype is torch.float32 else 2 if dtype is None else 1

    outside: list[Instruction] = []
    for step in schedule.steps:
        outside += [step] if isinstance(step, Instruction) else step.tail
    yield from map(described, sorted(outside, key=computes))


def _outputs(program: Program, kind: str) -> dict[str, int]:
    """The registers of what a model returns, by name."""
    outputs: dict[str, int] = {}
    for name, index in _named_outputs(program.output, program, kind):
        if outputs.setdefault(name, index) != index:
            raise ExportError(
                f"{kind} returns two values that a plan would both name '{name}'; give them other keys (a key and its "
                "place in the output make the name)"
            )
    return outputs


def _named_outputs(output: Any, program: Program, kind: str) -> Iterator[tuple[str, int]]:
    """The tensors of an output by their names in it."""
    for name, leaf in named_leaves(output):
        if isinstance(leaf, Ref):
            dtype = program.values[leaf.index].dtype
            if dtype is not torch.float32:
                raise ExportError(
                    f"{kind} returns a value that is no float32 tensor ({dtype or 'a number'}), which no plan gives"
                )
            yield name, leaf.index
        elif not isinstance(leaf, (bool, int, float, str)):
            raise ExportError(f"{kind} returns a {type(leaf).__name__} at '{name}', which no plan gives")


def _steps(lines: list[str], region: Region) -> Iterator[str]:
    """The name of each line's step: the lines between those of two instructions belong to the latter."""
    names = {one.out: one.step or one.kind for one in region.instructions}
    step = "(end)"
    reversed_names = []
    for line in reversed(lines):
        step = names.get(int(line[1 : line.index(" ")]), step)
        reversed_names.append(step)
    return reversed(reversed_names)


def _input(index: int, runner: ProgramRunner, region: Region) -> PlanValue:
    expected = runner.expected.inputs[index]
    value = _value(expected.name, runner.program.values[index])
    held = region.ranks is not None or expected.rank is not None
    return dataclasses.replace(value, fixed_rank=held and value.shape is not None)


def _named_apart(inputs: Sequence[PlanValue]) -> tuple[PlanValue, ...]:
    """Inputs by names of their own: the tensors in one argument, a list or a dictionary, have its name."""
    own, taken = {one.name for one in inputs}, set[str]()
    named = []
    for one in inputs:
        name, count = one.name, 1
        while name in taken or (count > 1 and name in own):
            count += 1
            name = f"{one.name}_{count}"
        taken.add(name)
        named.append(dataclasses.replace(one, name=name))
    return tuple(named)


def _value(name: str, value: Value) -> PlanValue:
    dtype = DTYPES.get(value.dtype) if value.dtype is not None else None
    if dtype is None:
        raise ExportError(f"'{name}' is {value.dtype}, and plans take and give {', '.join(DTYPES.values())}")
    shape = None if value.shape is None else tuple(str(one) if isinstance(one, Size) else one for one in value.shape)
    return PlanValue(name, dtype, shape)


def _row(title: str, indices: Any) -> str:
    return " ".join([title, *(f"%{index}" for index in indices)])

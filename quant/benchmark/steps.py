"""The time of each step of a model's call: of the operations in native calls, of instructions that run by themselves,
and of layers that the user's own forward calls.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.benchmark.result import StepTime
from quant.kernels.race import Clock
from quant.leaves import is_attention, is_leaf
from quant.runtime.callee import Function, Method
from quant.runtime.instructions import FloatCall, Instruction, LayerCall
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import child_of, full_name
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED

NATIVE, SINGLE, LAYER = "native", "single", "layer"
"""Where a step runs: in a native call, by itself from a program, or called by the user's forward."""


@dataclass(frozen=True)
class _Key:
    name: str
    where: str


@dataclass
class Recorder:
    """What the steps of the calls of one thread took.

    Attributes:
        clock: returns seconds.
        thread: the only one whose calls are recorded.
        spent: step -> seconds of the call that is under way; in the order of the steps.
        operations: step -> its operations, with the seconds of each.
        counts: step -> how often it ran in the call.
    """

    clock: Clock
    thread: int = field(default_factory=threading.get_ident)
    spent: dict[_Key, float] = field(default_factory=dict)
    operations: dict[_Key, dict[str, float]] = field(default_factory=dict)
    counts: dict[_Key, int] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)

    @property
    def here(self) -> bool:
        """Whether this thread's calls are recorded, and not one that torch.compile traces."""
        return threading.get_ident() == self.thread and not torch.compiler.is_compiling()

    def add(self, key: _Key, operation: str, seconds: float) -> None:
        """Add the time of a part of a step."""
        self.spent[key] = self.spent.get(key, 0.0) + seconds
        kinds = self.operations.setdefault(key, {})
        kinds[operation] = kinds.get(operation, 0.0) + seconds
        if self._inner:
            self._inner[-1] += seconds

    def enter(self) -> float:
        """Begin a step, within another perhaps."""
        self._inner.append(0.0)
        return self.clock()

    def leave(self, begin: float, key: _Key, operation: str) -> None:
        """End it: its time without that of the steps within it."""
        taken = self.clock() - begin
        inside = self._inner.pop()
        self.add(key, operation, taken - inside)
        if self._inner:
            self._inner[-1] += inside
        self.counts[key] = self.counts.get(key, 0) + 1


@dataclass
class _OfProgram:
    """Tells a recorder of a program's instructions."""

    recorder: Recorder
    path: str

    def add(self, instruction: Instruction, operation: str, seconds: float, *, ends: bool) -> None:
        key = self._key(instruction, NATIVE)
        self.recorder.add(key, operation, seconds)
        self.recorder.counts[key] = self.recorder.counts.get(key, 0) + ends

    @contextlib.contextmanager
    def measure(self, instruction: Instruction) -> Iterator[None]:
        begin = self.recorder.enter()
        try:
            yield
        finally:
            self.recorder.leave(begin, self._key(instruction, SINGLE), _operation(instruction))

    def _key(self, instruction: Instruction, where: str) -> _Key:
        return _Key(full_name(self.path, instruction.step), where)


def _operation(instruction: Instruction) -> str:
    """What an instruction that runs by itself computes."""
    if isinstance(instruction, FloatCall):
        callee = instruction.callee
        return callee.name if isinstance(callee, (Method, Function)) else "module"
    return "int8 layer" if isinstance(instruction, LayerCall) else instruction.kind


def time_steps(
    model: nn.Module, call: Callable[[], object], calls: int, clock: Clock
) -> tuple[tuple[StepTime, ...], float]:
    """The steps of a call in their order, and the seconds of all of it: the sum of their medians and of the rest's."""
    recorder = Recorder(clock)
    rest: list[float] = []
    seconds: dict[_Key, list[float]] = {}
    operations: dict[_Key, dict[str, float]] = {}
    counts: dict[_Key, int] = {}
    with _recorded(model, recorder):
        call()  # builds what the timed form needs
        for _ in range(calls):
            recorder.spent, recorder.operations, recorder.counts = {}, {}, {}
            begin = clock()
            call()
            rest.append(clock() - begin - sum(recorder.spent.values()))
            for key, spent in recorder.spent.items():
                seconds.setdefault(key, []).append(spent)
                operations[key], counts[key] = recorder.operations[key], recorder.counts[key]
    medians = {key: statistics.median(taken) for key, taken in seconds.items()}
    whole = sum(medians.values()) + statistics.median(rest)
    steps = []
    for key, median in medians.items():
        kinds = operations[key]
        kind = max(kinds, key=lambda one: kinds[one])
        steps.append(StepTime(key.name, kind, key.where, counts[key], median, median / whole if whole else 0.0))
    return tuple(steps), whole


@contextlib.contextmanager
def _recorded(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """The model tells the recorder of its steps, in the recorder's thread, until the context is left."""
    with contextlib.ExitStack() as undo:
        for path, module in model.named_modules():
            if isinstance(module, ProgramRunner):
                _watch_program(module, _above(path), recorder, undo)
        for path, module in _called_layers(model, ""):
            _watch_layer(module, path, recorder, undo)
        yield


def _above(path: str) -> str:
    """The name of the module whose program stands at `path`."""
    names = path.split(".")
    return ".".join(names[: names.index(RESERVED)]) if RESERVED in names else path


def _watch_program(runner: ProgramRunner, path: str, recorder: Recorder, undo: contextlib.ExitStack) -> None:
    timer = _OfProgram(recorder, path)
    plain = runner.execute

    def execute(program: Program, registers: dict[int, Any]) -> Any:
        return runner.execute_timed(program, registers, timer) if recorder.here else plain(program, registers)

    runner.__dict__["execute"] = execute
    undo.callback(runner.__dict__.pop, "execute")


def _called_layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers that the user's forward calls; those of a program are called by the program."""
    if isinstance(child_of(module, RESERVED), ProgramRunner) or isinstance(module, torch.jit.ScriptModule):
        return
    if isinstance(module, QuantModule) or not module._modules or is_leaf(module) or is_attention(module):
        if path:
            yield path, module
        return
    for name, child in module.named_children():
        yield from _called_layers(child, full_name(path, name))


def _watch_layer(module: nn.Module, path: str, recorder: Recorder, undo: contextlib.ExitStack) -> None:
    begun: list[float] = []
    key = _Key(path, LAYER)

    def before(*_: Any) -> None:
        if recorder.here:
            begun.append(recorder.enter())

    def after(*_: Any) -> None:
        if recorder.here and begun:
            recorder.leave(begun.pop(), key, type(module).__name__)

    undo.callback(module.register_forward_pre_hook(before, prepend=True).remove)
    undo.callback(module.register_forward_hook(after, always_call=True).remove)

"""Modules that an island calls, but did not call on the example inputs: another branch by values, another expert.

Such a module waits for its first call by `examples` or in calibration, which tells the outermost island around it. When
the island's call has ended, that call is recorded once more, by which the module is captured like those that the
examples showed; in calibration its observers then see what the island gave it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.capture.snapshot import Snapshot, snapshot
from quant.capture.unrecordable import read_once
from quant.further_programs import Extender
from quant.leaves import is_leaf
from quant.runtime.arguments import Arguments, copied, copied_together
from quant.runtime.own_forward import is_falling_back
from quant.runtime.programs import RESERVED
from quant.static.examples import encode
from quant.static.runner import GraphRunner, is_replaying
from quant.waiting_forwards import WaitingForward, remove, waiting


class LaterCalls:
    """The modules of one model that wait for a first call, and what islands call of them.

    Attributes:
        model: prepared.
        extender: makes their programs.
        running: thread -> the calls of modules that wait, since the outermost island began that runs there. A call in a
            thread without one is taken for a call of each that runs.
    """

    def __init__(self, model: nn.Module, extender: Extender) -> None:
        self.model, self.extender = model, extender
        self.running: dict[int, list[LaterCall]] = {}

    def watch(self) -> None:
        """Let modules in islands wait that nothing has called."""
        names = [name for name, module in self.model.named_modules() if not isinstance(module, torch.jit.ScriptModule)]
        islands = [name for name in self.extender.islands if name in names and RESERVED not in name.split(".")]
        modules = dict(_uncalled(self.model, islands, self.extender.called))
        for name, module in modules.items():
            module.__dict__["forward"] = CalledLater(module, name, self)
        for island in islands:
            module = self.model.get_submodule(island)
            if waiting(module) is None and any(_is_in(name, island) for name in modules):
                module.__dict__["forward"] = IslandOfWaiting(module, island, self)


class CalledLater(WaitingForward):
    """The forward of a module that no example called."""

    def __init__(self, module: nn.Module, path: str, later: LaterCalls) -> None:
        super().__init__(module)
        self.path, self.later = path, later

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, noted where an island calls it."""
        if self.later.running and not _is_fixed():
            known = self.later.running.copy()
            own = known.get(threading.get_ident())
            call = LaterCall(self, copied((args, kwargs)), own is not None)
            for calls in known.values() if own is None else [own]:
                calls.append(call)
        return self.as_it_is(args, kwargs)

    def add_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphRunner | None:
        """Capture a call by itself, as of a model that is loaded: which island makes it is not known then."""
        remove(self.watches)
        added = self.later.extender.inside(self.later.model, self.path, (args, kwargs))
        return next((one for one in added if one.graph.path == self.path), None)


@dataclass(frozen=True)
class LaterCall:
    """A call of a module that waits.

    Attributes:
        forward: the module's.
        is_own: whether it came in the thread of the island that it is taken for a call of.
    """

    forward: CalledLater
    arguments: Arguments
    is_own: bool


class IslandOfWaiting(WaitingForward):
    """The forward of an island in which modules wait."""

    def __init__(self, module: nn.Module, path: str, later: LaterCalls) -> None:
        super().__init__(module)
        self.path, self.later = path, later
        self._last: Snapshot | None = None

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The island's forward; what it calls that waits gets a program afterwards."""
        running, thread = self.later.running, threading.get_ident()
        if thread in running or _is_fixed() or read_once((args, kwargs)):
            return self.as_it_is(args, kwargs)
        call = copied_together((args, kwargs))
        before = None if self.later.extender.training else snapshot(self.watches, self._last)
        self._last, running[thread] = before, []
        try:
            output = self.as_it_is(args, kwargs)
        finally:
            calls = running.pop(thread)
        if calls:
            self._add(calls, call, before)
        return output

    def _add(self, calls: list[LaterCall], example: Arguments, before: Snapshot | None) -> None:
        """Capture the modules that were called; `before` is what the island held before its call, the `example`."""
        extender = self.later.extender
        runners = {id(one.root): one for one in extender.inside(self.later.model, self.path, example, before)}
        for call in calls:
            module = call.forward.watches
            if id(module) in runners:
                runner, (args, kwargs) = runners[id(module)], call.arguments
                runner.alone, runner.example = True, encode(call.arguments)
                if not is_replaying():  # an example, which shows calls and not their ranges
                    runner.observe(args, kwargs)
            elif waiting(module) is call.forward and (call.is_own or call.forward.path in extender.called):
                remove(module)  # it has no graph; else another thread called it, and it goes on waiting

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def _is_fixed() -> bool:
    """Whether this is no call of calibration, nor of an example, that may add programs."""
    return torch.compiler.is_compiling() or is_falling_back()


def _uncalled(model: nn.Module, islands: Collection[str], called: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters in islands that no example called, by their names."""
    known = {id(module) for name, module in model.named_modules(remove_duplicate=False) if name in called}
    layers = tuple(f"{name}." for name, module in model.named_modules() if is_leaf(module))
    for name, module in model.named_modules():
        inside = any(_is_in(name, island) for island in islands)
        if not inside or id(module) in known or name.startswith(layers) or RESERVED in name.split("."):
            continue
        computes = type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)
        if computes and waiting(module) is None and any(True for _ in module.parameters()):
            yield name, module


def _is_in(name: str, island: str) -> bool:
    return not island or name.startswith(f"{island}.")

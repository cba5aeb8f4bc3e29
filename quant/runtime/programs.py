"""The base of what runs in place of a captured module's forward: one program, and further ones for unlike calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from quant.runtime.matching import CaptureMismatch
from quant.runtime.names import child_of
from quant.runtime.scripting import refuse_scripting
from quant.runtime.transforms import explain_transform

P = TypeVar("P", bound="Programs")

RESERVED = "_quant"
"""The name of the child that runs a captured module; the only name that prepare adds to a model."""

HIDDEN = f"{RESERVED}_hidden"
"""The attribute of a captured module that holds its runner while that is no child."""


class Programs(nn.Module):
    """One program of a captured module; a module's first program holds the others.

    Attributes:
        others: further programs of the module, of the same class as this.
        root: the captured module.
        own_forward: the forward that the user had set on the module itself, if any.
        hidden: how many calls run the user's own forward, for which this is no child of the module.
        warned: paths of modules for which UncapturedCall was warned of.
    """

    root: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList()
        self.own_forward: Callable[..., Any] | None = None
        self.hidden = 0
        self.warned: set[str] = set()

    def programs(self: P) -> list[P]:
        """This program and the further ones."""
        return [self, *self.others]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The captured module's forward. Libraries bind its function to the module, as they may any forward's."""
        if not isinstance(self, Programs):
            return runner_of(self).run(*args, **kwargs)  # type: ignore[unreachable]
        try:
            return self.run_program(args, kwargs)
        except CaptureMismatch as mismatch:
            return self._run_other(mismatch, args, kwargs)
        except RuntimeError as error:
            explain_transform(error, type(self.root).__name__)
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`; the module calls its runner by that name."""
        return self.run(*args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script asks every module for, before it compiles any.

        Raises:
            TypeError: a program is data, which TorchScript cannot compile.
        """
        refuse_scripting(type(self.root).__name__)

    def run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this program.

        Raises:
            CaptureMismatch: it does not stand for such a call.
        """
        raise NotImplementedError

    def run_unlike(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that no program stands for; `mismatch` says why the first one does not."""
        raise NotImplementedError

    def _run_other(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for other in self.programs()[1:]:
            with contextlib.suppress(CaptureMismatch):
                return other.run_program(args, kwargs)
        return self.run_unlike(mismatch, args, kwargs)


def runner_of(module: nn.Module) -> Programs:
    """What runs a captured module, also while another thread has it hidden from the children."""
    runner = runner_in(module)
    if runner is None:
        raise AttributeError(
            f"{type(module).__name__} has no '{RESERVED}', which ran it; it was removed after quantisation"
        )
    return runner


def runner_in(module: nn.Module) -> Programs | None:
    """As `runner_of`; None where nothing of ours runs the module."""
    for find in (_shown, _hidden, _shown):  # it may be shown again while it is looked for where it was hidden
        runner = find(module)
        if isinstance(runner, Programs):
            return runner
    return None


def _shown(module: nn.Module) -> Any:
    return child_of(module, RESERVED)


def _hidden(module: nn.Module) -> Any:
    return module.__dict__.get(HIDDEN)

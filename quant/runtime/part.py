"""A part of a converted model that is called by itself: float in, float out, as before the conversion."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quant.runtime.arguments import bind
from quant.runtime.binding import matched_values
from quant.runtime.matching import CaptureMismatch
from quant.runtime.own_forward import is_falling_back
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import settle
from quant.runtime.values import Shape


class Part:
    """The forward of a part: its stretch of the surrounding program, with float inputs and outputs.

    A part that the model calls twice uses the ranges of the first call. Called by the user's own forward, for a call
    that no program stands for, it runs as it is.

    Attributes:
        path: dotted name of the part in the captured module.
        program: its program, or the reason that it has none.
        runner: runs the captured module.
    """

    def __init__(self, module: nn.Module, path: str, program: Program | str, runner: ProgramRunner) -> None:
        self.module, self.path, self.program, self.runner = module, path, program, runner
        self.own_forward = module.__dict__.get("forward")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The part's forward.

        Raises:
            RuntimeError: the part has no program of its own; the message says why.
        """
        try:
            return self._run_program(args, kwargs)
        except CaptureMismatch as mismatch:
            return self.runner.run_as_it_is(self.module, self.own_forward, mismatch, args, kwargs)

    def _run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = self.program
        if is_falling_back():  # as its layers, which take a range of the call: what comes from there no calibration saw
            raise CaptureMismatch(f"{self.path}: no program stands for the call around it")
        if isinstance(program, str):
            raise RuntimeError(
                f"{self.path}: cannot be called by itself after conversion, because {program}; call the "
                "module around it, or leave it float by the recipe"
            )
        assert program.call is not None
        bound = bind(self.module, args, kwargs)
        registers = matched_values(program.call, bound, self.path)
        for register, value in registers.items():
            shape = program.values[register].shape
            if shape is not None:
                _check_sizes(shape, value, f"{self.path}: argument '{program.call.inputs[register].name}'")
        return settle(self.runner.execute(program, registers), bound)


def _check_sizes(shape: Shape, tensor: Tensor, where: str) -> None:
    """Raise CaptureMismatch for sizes that no recording had.

    The guards on sizes belong to the arguments of the model, so a part's own calls do not check them.
    """
    if len(shape) != tensor.dim() or any(
        isinstance(size, int) and size != now for size, now in zip(shape, tensor.shape, strict=True)
    ):
        was = ", ".join(map(str, shape))
        raise CaptureMismatch(f"{where} was of sizes ({was}) in example_inputs and is of {tuple(tensor.shape)} now")

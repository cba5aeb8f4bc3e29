"""A part of a converted model called by itself: float in, float out, like the user's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Span
from quant.runtime.arguments import bind
from quant.runtime.binding import check_tensor
from quant.runtime.instructions import registers_in
from quant.runtime.matching import CaptureMismatch, match_arguments
from quant.runtime.own_forward import is_falling_back
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import Ref, settle
from quant.runtime.values import Shape
from quant.static.assembly import AssemblyContext, OutOfReach, Site, assemble
from quant.static.native import schedule
from quant.static.native_forms import Planner


class Part:
    """The forward of a submodule that was seen through: its stretch of the program, between floats.

    A submodule that the model calls twice answers with the ranges of the first call.

    Attributes:
        program: or why there is none.
    """

    def __init__(self, module: nn.Module, span: Span, program: Program | str, runner: ProgramRunner) -> None:
        self.module, self.span, self.program, self.runner = module, span, program, runner
        self.own_forward = module.__dict__.get("forward")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The submodule's forward."""
        try:
            return self._run_program(args, kwargs)
        except CaptureMismatch as mismatch:
            return self.runner.run_as_it_is(self.module, self.own_forward, mismatch, args, kwargs)

    def _run_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.program, str):
            if is_falling_back():  # whoever calls it computes what it is computed together with
                raise CaptureMismatch(f"{self.span.path}: {self.program}")
            raise RuntimeError(
                f"{self.span.path}: cannot be called by itself after conversion, because {self.program}; call the "
                "module around it, or leave it float by the recipe"
            )
        registers: dict[int, Any] = {}
        ids, values, where = self.program.input_of, self.program.values, ""

        def take(index: int, value: Any) -> None:
            shape = values[ids[index]].shape
            if shape is not None:
                check_tensor(self.runner.graph, index, value, self.runner.ranges, where)
                _check_sizes(shape, value, where)
            registers[ids[index]] = value

        bound = bind(self.module, args, kwargs)
        for name, expected in self.span.arguments.items():
            where = f"{self.span.path}: argument '{name}'"
            match_arguments(expected, bound[name], where, take)
        return settle(self.runner.execute(self.program, registers), bound)


def _check_sizes(shape: Shape, tensor: Tensor, where: str) -> None:
    """Raise CaptureMismatch for sizes that no recording had.

    The guards that hold a size stand where the model takes its arguments, which is before the part's own calls.
    """
    if len(shape) != tensor.dim() or any(
        isinstance(size, int) and size != now for size, now in zip(shape, tensor.shape, strict=True)
    ):
        was = ", ".join(map(str, shape))
        raise CaptureMismatch(f"{where} was of sizes ({was}) in example_inputs and is of {tuple(tensor.shape)} now")


def add_parts(
    root: nn.Module, fused: FusedGraph, context: AssemblyContext, sites: dict[int, Site], runner: ProgramRunner
) -> None:
    """Give every submodule that was seen through a forward of its own stretch of the program."""
    done: set[int] = set()
    for span in sorted(fused.graph.spans, key=lambda span: span.start):
        module = root.get_submodule(span.path)
        if id(module) not in done:
            done.add(id(module))
            part = Part(module, span, _program(span, fused, context, sites, runner), runner)
            module.__dict__["forward"] = part.run


def _program(
    span: Span, fused: FusedGraph, context: AssemblyContext, sites: dict[int, Site], runner: ProgramRunner
) -> Program | str:
    inside = range(span.start, span.end)
    steps = [step for step in fused.steps if all(index in inside for index in step.nodes)]
    inputs = {leaf.index for leaf in _refs(span.arguments)}
    try:
        assembled = assemble(fused, steps, inputs, span.output, context, sites)
    except OutOfReach as value:
        return f"{value} is computed together with what lies outside of it"
    assembled.program.schedule = schedule(assembled.program, Planner(assembled, fused.graph, runner.root, runner.layer))
    return assembled.program


def _refs(tree: Any) -> list[Ref]:
    return [Ref(index) for index in sorted(registers_in(tree))]

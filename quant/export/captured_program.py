"""A model that quantises as it goes, as one program: its forward captured on an example, with int8 modules as calls.

What `quant.quantize_dynamic` returns has no program, as no capture goes before it. Only the export needs one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quant.capture import capture
from quant.copying import copy_model
from quant.fusion.fuse import fuse
from quant.graph import Graph, expected_call
from quant.recipe import Recipe
from quant.runtime.names import has_attribute
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.assembly import AssemblyContext, assemble
from quant.static.kept_graph import keep_graph
from quant.static.native import whole_schedule
from quant.static.native_forms import Planner
from quant.static.symbolic_shapes import SymbolicShapes


class NotOneGraph(ValueError):
    """A forward that no single graph stands for; the message names the islands in it."""


@torch.inference_mode(False)
def captured_program(model: nn.Module, example_inputs: Any) -> ProgramRunner:
    """The forward of a model as a program, scheduled as one native call as far as operations have one.

    Args:
        model: int8 and float modules; left as it is.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Raises:
        NotOneGraph: Python runs around or between its modules.
    """
    own = copy_model(model).eval()
    if has_attribute(own, RESERVED):
        raise NotOneGraph(f"{type(model).__name__} has an attribute '{RESERVED}'")
    captured = capture(own, example_inputs)
    if list(captured.graphs) != [""] or captured.islands:
        reasons = [f"'{name or '(root)'}' ({why})" for name, why in captured.islands.items()]
        raise NotOneGraph(
            f"{type(model).__name__} is not one graph: its own Python runs in {', '.join(reasons) or 'its forward'}"
        )
    return _scheduled(captured.graphs[""], own)


def _scheduled(graph: Graph, root: nn.Module) -> ProgramRunner:
    fused = fuse(graph, root, Recipe({}, default=None))
    context = AssemblyContext(graph, root, {}, set(), {}, shapes=SymbolicShapes(graph))
    assembled = assemble(fused, fused.steps, expected_call(graph), graph.output, context, {})
    runner = ProgramRunner(root, assembled.program, {}, None)
    keep_graph(runner, graph)
    runner.eval()
    assembled.program.schedule = whole_schedule(assembled.program, Planner(assembled, graph, root, runner.layer))
    return runner

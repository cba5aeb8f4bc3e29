"""Notes in a static report about hooks that do not run."""

from __future__ import annotations

from collections.abc import Mapping

from quant.graph import Kind
from quant.half_precision import hooks_of_others
from quant.ops.operator import Weighted
from quant.ops.registered import Registered
from quant.runtime.keys import ProgramKey
from quant.runtime.names import full_name
from quant.static.runner import GraphRunner


def silenced(programs: Mapping[ProgramKey, GraphRunner]) -> list[str]:
    """Modules whose forward hooks a converted model does not run: containers that are seen through, and int8 layers.

    Hooks that were recorded with the forward of such a module are in its program.

    Args:
        programs: the runners of a prepared model.
    """
    names = []
    for key, runner in programs.items():
        inner = {span.path for span in runner.graph.spans if not span.has_hooks}
        nodes = [
            runner.graph.nodes[step.nodes[0]]
            for step in runner.fused.steps
            if isinstance(step.operator, (Weighted, Registered))
        ]
        inner |= {node.target for node in nodes if node.kind is Kind.MODULE}
        for name, module in runner.root.named_modules():
            if name and name in inner and hooks_of_others(module):
                names.append(full_name(key.path, name))
    return names

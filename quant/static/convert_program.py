"""Converts one program of a captured module: its int8 layers, its instructions, and the regions that run natively."""

from __future__ import annotations

from torch import nn

from quant.graph import expected_call
from quant.half_precision import carry
from quant.kernels import QParams
from quant.runtime.as_forward import as_forward
from quant.runtime.keys import LayerKey, ProgramKey
from quant.runtime.names import full_name, replace_modules
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.assembly import AssemblyContext, assemble
from quant.static.dynamic_fallback import is_lone_dynamic
from quant.static.int8_layers import Built, int8_layers
from quant.static.kept_graph import keep_graph
from quant.static.module_replacement import remove_folded
from quant.static.native import Unscheduled
from quant.static.native_forms import Planner
from quant.static.part_calls import add_parts
from quant.static.report_entries import Entries, note_floats
from quant.static.runner import GraphRunner
from quant.static.symbolic_shapes import SymbolicShapes
from quant.static.weights_to_restore import weights_to_restore

PLANNED = "(planned run)"
"""The report's entry that says which steps of a captured module are computed in one native call."""


def convert_program(
    model: nn.Module,
    key: ProgramKey,
    runner: GraphRunner,
    ranges: dict[str, QParams],
    backend: str | None,
    built: Built,
    entries: Entries,
    *,
    further: bool,
) -> nn.Module:
    """Convert one program of a captured module, and put its layers and its runner in place.

    Args:
        model: the model, whose captured modules before this one are converted.
        key: which program of which module.
        runner: runs the program's graph.
        ranges: slot -> scale and zero point.
        backend: for all its layers; None for the dispatcher's choice.
        built: the int8 layers up to now; those of this program are added, and the programs without a schedule.
        entries: lines of the report; those of this program are added.
        further: whether the module's first program is in place already.

    Returns:
        the model; the int8 layer in its stead where the model is a layer itself.
    """
    fused, root = runner.fused, runner.root
    by_value = {value: ranges[slot] for value, slot in fused.slot_of.items()}
    emitted = {step.output for step in fused.steps if fused.emits_integers(step)}
    shapes = SymbolicShapes(fused.graph)
    context = AssemblyContext(fused.graph, root, by_value, emitted, runner.tables, shapes=shapes)
    shown: Entries = {} if further else entries  # the first program has reported the layers
    layers, sites = int8_layers(runner, ranges, backend, built, shown, key)
    note_floats(fused, shown, key.path)
    steps = fused.steps
    assembled = assemble(
        fused, steps, expected_call(fused.graph, fused.slot_of, ranked=fused.ranked), fused.graph.output, context, sites
    )
    remove_folded(fused, root, layers, sites, built.called)
    if not further:
        del root._modules[RESERVED]
        del root.__dict__["forward"]
    if is_lone_dynamic(runner):
        return model
    whole = layers.get(LayerKey(""))
    if whole is not None:
        if further:
            return model
        carry(root, whole)
        return replace_modules(model, {root: whole})
    replaced = {built.originals[key, one.name]: layer for one, layer in layers.items() if not one.functional}
    for original, layer in replaced.items():
        carry(original, layer)
    replace_modules(root, replaced)
    numbers = {value: (context.scale(value), context.zero_point(value)) for value in fused.slot_of}
    program_runner = ProgramRunner(root, assembled.program, numbers, backend)
    keep_graph(program_runner, fused.graph)
    program_runner.own_forward, program_runner.weights = runner.own_forward, weights_to_restore(fused, root, model)
    program_runner.eval()
    for one, layer in layers.items():
        if one.functional:
            program_runner.layers[one.name] = layer
    entry = full_name(fused.graph.path, PLANNED if not further else PLANNED.replace("run", f"run {key.place}"))
    planner = Planner(assembled, fused.graph, root, program_runner.layer)
    built.unscheduled.append(Unscheduled(assembled.program, planner, entry))
    if further:
        first = root._modules.get(RESERVED)
        if isinstance(first, ProgramRunner):  # else the module is a layer, and takes its calls itself
            first.others.append(program_runner)
        return model
    root._modules[RESERVED] = program_runner
    root.__dict__["forward"] = as_forward(program_runner.run, root, runner.own_forward)
    built.unscheduled += add_parts(root, fused, context, sites, program_runner)
    return model

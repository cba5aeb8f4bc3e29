"""The report of a static conversion: how each layer computes, which steps stay float and why, and the bytes."""

from __future__ import annotations

import torch
from torch import nn

from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind, Node
from quant.kernels import QParams
from quant.kernels.registry import full_name_of
from quant.nn.recurrent import interpreted_steps
from quant.ops.operator import Float, Weighted
from quant.ops.step import Step, is_recurrent
from quant.report import Report, ReportEntry, bytes_of, is_quantized, own_bytes, storage, summary
from quant.runtime.callee import Submodule
from quant.runtime.dtype_branches import comparing_dtypes
from quant.runtime.instructions import FloatCall
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.trees import Attr, leaves
from quant.static.call_text import call_text
from quant.static.kept_graph import graph_of
from quant.static.module_replacement import folded_parameters
from quant.static.prepared import Prepared
from quant.static.routes import routes

Entries = dict[str, tuple[str, str]]
"""Outcome and detail of a `ReportEntry`, by the full name of a module or of a step."""


def weighted_entry(step: Step, x: QParams, y: QParams | None, layer: nn.Module, backend: str | None) -> tuple[str, str]:
    """The entry of a weighted layer; `x` and `y` are the ranges of its input and output, None for a float output."""
    outcome, ranges = _weight_and_ranges(step, x, y)
    width = "16-bit " if step.reads_two_bytes else ""
    detail = f"static {step.operator.name}, {width}{ranges}, {routes(layer, backend)}"
    return outcome, _with_storage(detail, layer, step)


def note_weighted(step: Step, node: Node, entries: Entries, path: str, entry: tuple[str, str]) -> None:
    """Add the entry of the weighted step of `node`, for its module, or for the module that calls a function."""
    if node.kind is Kind.MODULE:
        entries[full_name(path, node.target)] = entry
        return
    name = full_name(path, node.owner)
    outcome, detail = entry
    entries[name] = (outcome, f"{entries[name][1]}; {detail}" if name in entries else detail)
    weight = step.weighted.weight
    holder = weight.path.rpartition(".")[0] if isinstance(weight, Attr) else node.owner
    if holder != node.owner:
        entries[full_name(path, holder)] = (outcome, f"its weight is a part of {node.owner or '(root)'}")


def recurrent_entry(
    step: Step, fused: FusedGraph, ranges: dict[str, QParams], layer: nn.Module, backend: str | None
) -> tuple[str, str]:
    """The entry of a recurrent layer, with the ranges of its input and states."""
    states = [f"{name} [{_ends(ranges[slot])}]" for name, slot in fused.inner_slots(step).items()]
    output = "uint8" if fused.emits_integers(step) else "float"
    x = _ends(ranges[fused.slot_of[step.inputs[0]]])
    bits = step.qconfig.weight_bits if step.qconfig else 8
    detail = f"static {step.operator.name}, input [{x}], states {', '.join(states)}, {output} output"
    steps = interpreted_steps(layer)
    detail = _with_storage(f"{detail}, {routes(layer, backend)}", layer, step)
    return f"int{bits}", detail + (f"; {steps}" if steps else "")


def registered_entry(
    step: Step, x: QParams, y: QParams | None, layer: nn.Module, backend: str | None
) -> tuple[str, str]:
    """The entry of a registered layer, by its class; `x` and `y` as for `weighted_entry`."""
    outcome, ranges = _weight_and_ranges(step, x, y)
    return outcome, f"static {full_name_of(type(layer))}, {ranges}, {routes(layer, backend)}"


def _with_storage(detail: str, layer: nn.Module, step: Step) -> str:
    weights = [one for name, one in layer.named_buffers() if name.rpartition(".")[2].startswith("q_weight")]
    stored = storage(weights, step.qconfig.weight_bits if step.qconfig else 8)
    return f"{detail}, {stored}" if stored else detail


def _weight_and_ranges(step: Step, x: QParams, y: QParams | None) -> tuple[str, str]:
    bits = step.qconfig.weight_bits if step.qconfig else 8
    return f"int{bits}", f"input [{_ends(x)}], " + (f"output [{_ends(y)}]" if y else "float output")


def _ends(qparams: QParams) -> str:
    low, high = qparams.dequantize(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    return f"{low:.4g}, {high:.4g}"


def note_folded(step: Step, fused: FusedGraph, entries: Entries, path: str) -> None:
    """Add entries for modules that are folded into a step, such as batch norms."""
    for index in step.nodes[1:]:
        node = fused.graph.nodes[index]
        if node.kind is Kind.MODULE:
            entries[full_name(path, node.target)] = ("int8", f"folded into {step.name}")
    holders = {name.rpartition(".")[0] for name in folded_parameters(step.weighted, fused)}
    for name in holders:
        entries.setdefault(full_name(path, name), ("int8", f"folded into {step.name}"))


def note_floats(fused: FusedGraph, entries: Entries, path: str) -> None:
    """Add the reasons of float steps that are modules or lie beside integer steps."""
    beside = _beside_integers(fused)
    for step in fused.steps:
        node = fused.graph.nodes[step.nodes[0]]
        name = full_name(path, node.target if node.kind is Kind.MODULE else step.name)
        if isinstance(step.operator, Float) and (node.kind is Kind.MODULE or step.output in beside):
            entries.setdefault(name, ("float", step.reason))
        elif step.integer and node.kind is Kind.MODULE and not isinstance(step.operator, Weighted):
            entries.setdefault(name, ("int8", step.operator.name))


def note_programs(model: nn.Module, entries: Entries) -> None:
    """Add the calls that each program of a module with several programs is for."""
    for path, module in model.named_modules():
        first = child_of(module, RESERVED)
        if not isinstance(first, ProgramRunner) or not len(first.others):
            continue
        for place, one in enumerate(first.programs(), 1):
            name = full_name(path, f"(program {place})")
            entries[name] = ("int8", f"for calls like {call_text(graph_of(one), one.root)}")


def note_dtypes(model: nn.Module, entries: Entries) -> None:
    """Add the modules of a half model that compare dtypes, which are float32 where no program stands for a call."""
    for path, module in model.named_modules():
        first = child_of(module, RESERVED)
        if not isinstance(first, ProgramRunner) or first.half_type is None:
            continue
        for inner in comparing_dtypes(first.root):
            name = full_name(path, inner)
            outcome, detail = entries.get(name, ("float", "seen through: its forward is a part of the program"))
            note = f"it compares dtypes, and finds float32 instead of {first.half_type} in calls without a program"
            entries[name] = outcome, f"{detail}; {note}"


def _beside_integers(fused: FusedGraph) -> set[int]:
    """The outputs of float steps that read or feed an integer step."""
    makers = {index: step for step in fused.steps for index in step.nodes}
    beside: set[int] = set()
    for step in fused.steps:
        refs = {ref for index in step.nodes for ref in fused.graph.nodes[index].refs}
        for maker in (makers[ref] for ref in refs):
            if isinstance(step.operator, Float) and maker.integer and not _takes_state(step, maker, fused):
                beside.add(step.output)
            # not the computation of a weight
            if step.integer and isinstance(maker.operator, Float) and maker.output in step.inputs:
                beside.add(maker.output)
    return beside


def _takes_state(step: Step, maker: Step, fused: FusedGraph) -> bool:
    """Whether a step picks an item of a recurrent layer's result, which is no float step between integers."""
    picked = fused.graph.nodes[step.nodes[0]].refs
    return is_recurrent(maker) and maker.nodes[0] in picked and fused.graph.nodes[maker.nodes[0]].meta is None


def make_report(
    model: nn.Module,
    tensors: dict[str, dict[int, int]],
    kinds: dict[str, str],
    entries: Entries,
    info: Prepared,
) -> Report:
    """The report: an entry per module with parameters, and per float step beside integer steps.

    Args:
        model: converted.
        tensors: `own_tensors` of every module before, by every name it has. kinds: its class, likewise.
        entries: what the conversion noted; the rest stays float.
        info: of the prepared model.
    """
    now = dict(model.named_modules(remove_duplicate=False))
    same = {id(now[name]): name for name, (outcome, _) in entries.items() if is_quantized(outcome) and name in now}
    wholes = tuple(f"{name}." for name, module in now.items() if isinstance(module, QuantModule))
    readers = _readers(model)
    listed: Entries = {}
    for name, own in tensors.items():
        if RESERVED in name.split(".") or not (any(own.values()) or name in entries or name in info.islands):
            continue
        if name.startswith(wholes):
            continue
        outcome, detail = entries.get(name, ("float", ""))
        same_layer = same.get(id(now.get(name)), name)
        if same_layer != name and not is_quantized(outcome):
            outcome, detail = entries[same_layer][0], f"the same layer as {same_layer}"
        if name in info.islands or not detail:
            detail = _why(name, info, readers)
        if name in info.measured and is_quantized(outcome):
            detail = f"{detail}; {info.measured[name]}"
        listed[name] = outcome, detail
    earlier = {entry.name: entry for entry in summary(model) if entry.quantized}  # int8 layers that came with the model
    listed.update({name: ("int8", "") for name in listed.keys() & earlier.keys() if not is_quantized(listed[name][0])})
    sizes = _sizes(model, tensors, listed)
    lines = [
        ReportEntry(name, kinds[name], *entry, *sizes[name]) if entry[1] else earlier[name]
        for name, entry in listed.items()
    ]
    lines += [ReportEntry(name, "function", *entry, 0, 0) for name, entry in entries.items() if name not in listed]
    return Report(tuple(lines))


def _sizes(model: nn.Module, tensors: dict[str, dict[int, int]], listed: Entries) -> dict[str, tuple[int, int]]:
    """Bytes before and after of the listed modules.

    A shared tensor counts once, at a module that stays float if there is one.
    """
    now = dict(model.named_modules(remove_duplicate=False))
    before: set[int] = set()
    after: set[int] = set()
    functional = _functional_bytes(model, after)
    sizes = {}
    for name in sorted(listed, key=lambda name: is_quantized(listed[name][0])):
        module, parts = now.get(name), [tensors[name]]
        inside = [] if module is None else [module]
        if isinstance(module, QuantModule):  # with its children, which have no entries of their own
            prefix = f"{name}." if name else ""
            parts += [
                own
                for inner, own in tensors.items()
                if inner.startswith(prefix) and inner != name and RESERVED not in inner.split(".")  # observers
            ]
            inside = list(module.modules())
        sizes[name] = (
            sum(bytes_of(part, before) for part in parts),
            functional.get(name, 0) + sum(own_bytes(part, after) for part in inside),
        )
    return sizes


def _functional_bytes(model: nn.Module, counted: set[int]) -> dict[str, int]:
    """Bytes of the int8 layers of functional calls, by the module whose forward makes the call."""
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        runner = child_of(module, RESERVED)
        if not isinstance(runner, ProgramRunner):
            continue
        for key, layer in runner.layers.items():
            owner = full_name(path, key.replace("/", ".").rpartition(".")[0])
            sizes[owner] = sizes.get(owner, 0) + own_bytes(layer, counted)
    return sizes


def _readers(model: nn.Module) -> dict[str, str]:
    """The modules that compute in float with the parameters of other modules, by the names of these."""
    readers: dict[str, str] = {}
    for path, module in model.named_modules():
        runner = child_of(module, RESERVED)
        if not isinstance(runner, ProgramRunner):
            continue
        for one in runner.program.instructions:
            if not isinstance(one, FloatCall):
                continue
            for leaf in leaves(one.arguments):
                if isinstance(leaf, Attr):
                    readers.setdefault(full_name(path, leaf.path.rpartition(".")[0]), full_name(path, one.owner))
            if isinstance(one.callee, Submodule):
                readers.setdefault(full_name(path, one.callee.path), full_name(path, one.callee.path))
    return readers


def _why(name: str, info: Prepared, readers: dict[str, str]) -> str:
    if name in info.islands:
        inside = any(one.startswith(f"{name}." if name else "") for one in info.called if one != name)
        return f"an island: {info.islands[name]}" + ("; its layers are handled one by one" if inside else "")
    if name in info.called:
        return "its own parameters are used in float"
    if name in readers:
        return f"its parameters are read by {readers[name] or '(root)'}, which computes with them in float"
    around = [name.rpartition(".")[0]]
    while around[-1]:
        around.append(around[-1].rpartition(".")[0])
    whole = next((one for one in around if readers.get(one) == one and one), "")
    if whole:
        return f"a part of {whole}, which is called as it is, in float"
    island = next((one for one in around if one in info.islands), None)
    if island is not None:
        return (
            f"called by no example and no batch of data; {island or '(root)'}, an island, calls it for other values, "
            "or computes with it in float"
        )
    return "not called on the example inputs"

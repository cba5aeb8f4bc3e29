"""Convert: a calibrated model into int8 layers under the user's names, and a program that keeps uint8 between them."""

from __future__ import annotations

import copy
import glob
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.calibrate import CalibrationWarning
from quant.dynamic import quantize_dynamic
from quant.fuse import FLOAT, SHAPE, Plan, Step, is_recurrent, make_plan
from quant.graph import Attr, Ref, attribute, leaves
from quant.kernels import QParams
from quant.kernels.tables import TABLE_BITS
from quant.nn.base import QuantModule, adopt
from quant.observers import NoDataSeen
from quant.prepare import RESERVED, GraphRunner, Prepared, runners
from quant.qat.checks import check_trained
from quant.recipe import Pattern, QConfig, Recipe
from quant.report import Report, ReportEntry, attach_report, own_bytes, summary
from quant.static.beyond import beyond_eight_bits, beyond_one_range
from quant.static.layers import StaticLayer
from quant.static.leaves import is_dynamic
from quant.static.lower import Context
from quant.static.notes import silenced, substitute
from quant.static.parts import add_parts
from quant.static.program import ProgramRunner, Site, assemble
from quant.static.rebuild import DESCRIPTION, make_description
from quant.static.recognise import OPERATORS
from quant.static.rnn import static_recurrent
from quant.static.signature import signature
from quant.static.weights import quantized


class NotCalibrated(ValueError):
    """Observers that saw no data; the message lists every one."""


def convert(prepared: nn.Module, backend: str | None = None) -> nn.Module:
    """The int8 form of a calibrated model: same classes and names, real integer arithmetic.

    Args:
        prepared: from `prepare`, after data went through it; left as it is.
        backend: a name of `quant.kernels.available()`, or None for the recipe's, or the fastest that is exact here.

    Raises:
        ValueError: `prepared` was not made by `prepare`.
        NotCalibrated: some observers saw no data; all are listed.

    Warns:
        CalibrationWarning: a layer stays float because 8 bits cannot hold the range that calibration saw.
    """
    if not runners(prepared):
        raise ValueError("quant.convert: expected a model from quant.prepare, with data run through it")
    _calibrated(prepared)
    check_trained(prepared)
    info: Prepared = prepared.__dict__[RESERVED + "_prepared"]
    backend = backend or info.recipe.backend
    model = copy.deepcopy(prepared)
    model.eval()
    dynamic = _leave_float(model, info)
    ranges = _calibrated(model)
    sizes = {name: own_bytes(module) for name, module in model.named_modules(remove_duplicate=False)}
    kinds = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
    found = runners(model)
    hooked = silenced(found)
    calls = {path: signature(runner.graph, runner.root) for path, runner in found.items()}
    made = _Made(found, ranges)
    entries: dict[str, tuple[str, str]] = {}
    with torch.no_grad():
        # A unit that is nothing but a layer comes last: it is put wherever no unit has a form of its own of that layer.
        for path, runner in sorted(found.items(), key=lambda unit: _is_layer(unit[1])):
            model = _convert_unit(model, path, runner, ranges[path], backend, made, entries)
    for made_layer in made.layers.values():
        made_layer.derive()  # type: ignore[operator]
    layers = _settings(found)
    dynamic = {**_shared(model, found), **dynamic}
    model = _make_rest_dynamic(model, info, backend, entries, layers, dynamic)
    description = make_description(info.example, ranges, calls, layers, backend)
    model.__dict__[DESCRIPTION] = {**description, "dynamic": dynamic}
    for name in hooked:
        outcome, detail = entries.get(name, ("float", "seen through: its forward is a part of the program"))
        entries[name] = (outcome, f"{detail}; its forward hooks do not run")
    attach_report(model, _report(model, sizes, kinds, entries, info))
    return model


def _calibrated(prepared: nn.Module) -> dict[str, dict[str, QParams]]:
    """The ranges of every runner, or one error that lists what saw no data."""
    ranges: dict[str, dict[str, QParams]] = {}
    missing: list[str] = []
    for path, runner in runners(prepared).items():
        ranges[path] = {}
        for name in runner.plan.slots:
            try:
                ranges[path][name] = runner.qparams(name)
            except NoDataSeen:
                missing.append(".".join(part for part in (path, name) if part))
    if missing:
        raise NotCalibrated(
            f"quant.convert: {len(missing)} observers saw no data: {', '.join(missing)}; run calibration batches "
            "through the prepared model first, or leave these layers float by the recipe"
        )
    return ranges


def _shared(model: nn.Module, found: dict[str, GraphRunner]) -> dict[str, str]:
    """Why plans leave layers float that several units call, by the first names of the modules."""
    first = {id(module): name for name, module in model.named_modules()}
    return {
        first[id(attribute(runner.root, name))]: reason
        for runner in found.values()
        for name, reason in runner.plan.floats.items()
        if id(attribute(runner.root, name)) in first
    }


def _leave_float(model: nn.Module, info: Prepared) -> dict[str, str]:
    """Plan anew without the layers that 8 bits cannot hold, and say which.

    Returns:
        the recurrent ones among them, by full name, and why: dynamic quantisation takes those.
    """
    dynamic: dict[str, str] = {}
    for path, runner in runners(model).items():
        recurrent = beyond_one_range(runner)
        floats = {**beyond_eight_bits(runner), **recurrent}
        if not floats:
            continue
        plan = make_plan(runner.graph, runner.root, info.recipe, {**runner.plan.floats, **floats})
        plan.shared = runner.plan.shared
        points = {name: runner.point(runner.plan.slot_like(slot)) for name, slot in plan.slots.items()}
        runner.replan(plan, points)
        for name, reason in floats.items():
            full = ".".join(part for part in (path, name) if part)
            becomes = "becomes dynamic" if name in recurrent else "stays float"
            dynamic.update({full: reason} if name in recurrent else {})
            warnings.warn(f"quant.convert: layer {full!r} {becomes}: {reason}", CalibrationWarning, stacklevel=3)
    return dynamic


def _convert_unit(
    model: nn.Module,
    path: str,
    runner: GraphRunner,
    ranges: dict[str, QParams],
    backend: str | None,
    made: _Made,
    entries: dict[str, tuple[str, str]],
) -> nn.Module:
    """Put the integers of one captured module in place; returns the model, another one where it was a layer itself."""
    plan, root = runner.plan, runner.root
    context = Context(plan, root, ranges, runner.tables)
    layers, sites = _layers(runner, ranges, backend, made, entries, path)
    _note_floats(plan, root, entries, path)
    steps = plan.steps
    given = {node.index for node in plan.graph.nodes if node.kind == "input"}
    program = assemble(plan, steps, given, plan.graph.output, context, sites)
    _remove_folded(plan, root)
    del root._modules[RESERVED]
    del root.__dict__["forward"]
    if "" in layers:
        return _replace(model, root, layers[""])
    for name, layer in layers.items():
        if not name.startswith("/"):
            _replace(root, made.originals[path, name], layer)
    numbers = {value: (context.scale(value), context.zero_point(value)) for value in plan.slot_of}
    program_runner = ProgramRunner(root, plan.graph, program, numbers, backend)
    program_runner.eval()
    for name, layer in layers.items():
        if name.startswith("/"):
            program_runner.layers[name[1:]] = layer
    root.add_module(RESERVED, program_runner)
    root.__dict__["forward"] = program_runner.run
    add_parts(root, plan, context, sites, program_runner)
    planned = program_runner.schedule(program_runner.program)
    if planned.regions or planned.reasons:
        entries[".".join(part for part in (path, PLANNED) if part)] = ("int8", planned.describe())
    _remove_replaced(plan, root, program_runner)
    return model


PLANNED = "(planned run)"
"""The entry of the report that says which steps of a captured module are computed together."""


class _Made:
    """The float layers of all captured units as they were, and the int8 ones made of them so far.

    Attributes:
        originals: by unit and name within it.
        layers: int8 ones by what they were made of.
        smallest: of the scales of the inputs that a weighted module is called with, by its id, over all units.
    """

    def __init__(self, found: dict[str, GraphRunner], ranges: dict[str, dict[str, QParams]]) -> None:
        self.originals: dict[tuple[str, str], nn.Module] = {}
        self.layers: dict[int, nn.Module] = {}
        self.smallest: dict[int, torch.Tensor] = {}
        for path, runner in found.items():
            for step in runner.plan.steps:
                node = runner.graph.nodes[step.nodes[0]]
                if not step.integer or node.kind != "module":
                    continue
                module = self.originals[path, node.target] = attribute(runner.root, node.target)
                if OPERATORS[step.op].weighted:
                    scale = ranges[path][runner.plan.slot_of[step.inputs[0]]].scale
                    self.smallest[id(module)] = torch.minimum(scale, self.smallest.get(id(module), scale))


def _is_layer(runner: GraphRunner) -> bool:
    """Whether a captured unit is itself a layer that becomes int8."""
    nodes = (runner.graph.nodes[step.nodes[0]] for step in runner.plan.steps if step.integer)
    return any(node.kind == "module" and not node.target for node in nodes)


def _layers(
    runner: GraphRunner,
    ranges: dict[str, QParams],
    backend: str | None,
    made: _Made,
    entries: dict[str, tuple[str, str]],
    path: str,
) -> tuple[dict[str, nn.Module], dict[int, Site]]:
    """An int8 layer per weighted or recurrent module (or functional call), with a site per call."""
    plan, root = runner.plan, runner.root
    layers: dict[str, nn.Module] = {}
    sites: dict[int, Site] = {}
    for step in plan.steps:
        if is_recurrent(step):
            key = plan.graph.nodes[step.nodes[0]].target
            name = ".".join(part for part in (path, key) if part)
            recurrent: Any = _recurrent_layer(step, plan, root, ranges, made, name)
            recurrent.backend = backend or ""
            layers[key] = recurrent
            entries[name] = _recurrent_entry(step, plan, ranges)
        if not (step.integer and OPERATORS[step.op].weighted):
            continue
        node = plan.graph.nodes[step.nodes[0]]
        key = node.target if node.kind == "module" else "/" + step.name.replace(".", "/")
        # Two captured units may call one module, with its batch norm folded in one of them only: two weights then.
        original = made.originals[path, key] if node.kind == "module" else None
        identity = id(step) if original is None else hash((id(original), step.attrs.get("batch_norm")))
        x = ranges[plan.slot_of[step.inputs[0]]]
        if identity not in made.layers:
            settings = {name: value for name, value in step.attrs.items() if name not in NOT_SETTINGS}
            smallest = x.scale if original is None else made.smallest[id(original)]
            weight = quantized(step, plan.graph, root, smallest, runner.learned(step), runner.mean(step))
            made.layers[identity] = StaticLayer(step.op, weight, settings, backend)
        layers[key] = made.layers[identity]
        layer: Any = made.layers[identity]
        y = ranges[plan.slot_of[step.output]] if plan.emits_integers(step) else None
        sites[step.output] = Site(key, layer.add_site(x, y, step.attrs.get("clamp")))
        if not key:
            layer.own = sites[step.output].index
        bits = step.qconfig.weight_bits if step.qconfig else 8
        detail = f"static {step.op}, input [{_ends(x)}], " + (f"output [{_ends(y)}]" if y else "float output")
        detail += substitute(backend)
        module = key if node.kind == "module" else node.owner
        entries[".".join(part for part in (path, module) if part)] = (f"int{bits}", detail)
        _note_folded(step, plan, entries, path)
    return layers, sites


def _recurrent_layer(
    step: Step, plan: Plan, root: nn.Module, ranges: dict[str, QParams], made: _Made, name: str
) -> nn.Module:
    module = attribute(root, plan.graph.nodes[step.nodes[0]].target)
    if id(module) not in made.layers:
        assert step.qconfig is not None
        inner = {one: ranges[slot] for one, slot in plan.inner_slots(step).items()}
        try:
            layer = static_recurrent(module, step.qconfig, ranges[plan.slot_of[step.inputs[0]]], inner)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from error
        adopt(layer, module, name)
        layer.__dict__.pop("forward", None)  # of a layer that was captured by itself
        layer._modules.pop(RESERVED, None)
        made.layers[id(module)] = layer
    return made.layers[id(module)]


def _recurrent_entry(step: Step, plan: Plan, ranges: dict[str, QParams]) -> tuple[str, str]:
    states = [f"{name} [{_ends(ranges[slot])}]" for name, slot in plan.inner_slots(step).items()]
    output = "uint8" if plan.emits_integers(step) else "float"
    x = _ends(ranges[plan.slot_of[step.inputs[0]]])
    bits = step.qconfig.weight_bits if step.qconfig else 8
    return f"int{bits}", f"static {step.op}, input [{x}], states {', '.join(states)}, {output} output"


NOT_SETTINGS = {"weight", "bias", "batch_norm", "clamp"}


def _ends(qparams: QParams) -> str:
    low, high = qparams.dequantize(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    return f"{low:.4g}, {high:.4g}"


def _note_folded(step: Step, plan: Plan, entries: dict[str, tuple[str, str]], path: str) -> None:
    for index in step.nodes[1:]:
        node = plan.graph.nodes[index]
        if node.kind == "module":
            entries[".".join(part for part in (path, node.target) if part)] = ("int8", f"folded into {step.name}")


def _note_floats(plan: Plan, root: nn.Module, entries: dict[str, tuple[str, str]], path: str) -> None:
    """Say of each step that stays float why, where integers lie beside it or it is a module."""
    beside = _beside_integers(plan)
    for step in plan.steps:
        node = plan.graph.nodes[step.nodes[0]]
        name = ".".join(
            part for part in (path, step.name.split("@")[0] if node.kind == "module" else step.name) if part
        )
        if step.op == FLOAT and (node.kind == "module" or step.output in beside):
            entries.setdefault(name if name != "(root)" else "", ("float", step.reason))
        elif step.op not in (FLOAT, SHAPE) and node.kind == "module" and not OPERATORS[step.op].weighted:
            entries.setdefault(name, ("int8", step.op))


def _beside_integers(plan: Plan) -> set[int]:
    """The outputs of float steps that read what integers gave, or give what integers read."""
    makers = {index: step for step in plan.steps for index in step.nodes}
    found: set[int] = set()
    for step in plan.steps:
        refs = {ref for index in step.nodes for ref in plan.graph.nodes[index].refs}
        for maker in (makers[ref] for ref in refs):
            if step.op == FLOAT and maker.integer and not _takes_state(step, maker, plan):
                found.add(step.output)
            if step.integer and maker.op == FLOAT:
                found.add(maker.output)
    return found


def _takes_state(step: Step, maker: Step, plan: Plan) -> bool:
    """Whether a step picks from the tuple that a recurrent layer gives, which is no float edge between integers."""
    picked = plan.graph.nodes[step.nodes[0]].refs
    return is_recurrent(maker) and maker.nodes[0] in picked and plan.graph.nodes[maker.nodes[0]].meta is None


def _remove_folded(plan: Plan, root: nn.Module) -> None:
    for step in plan.steps:
        if step.integer and "batch_norm" in step.attrs:
            _replace(root, attribute(root, plan.graph.nodes[step.attrs["batch_norm"]].target), nn.Identity())


def _remove_replaced(plan: Plan, root: nn.Module, program: ProgramRunner) -> None:
    """Take away the float parameters of functional layers, where nothing in float still reads them."""
    wanted = program.float_parameters()
    for step in plan.steps:
        if not (step.integer and OPERATORS[step.op].weighted) or plan.graph.nodes[step.nodes[0]].kind == "module":
            continue
        for path in _paths((step.attrs["weight"], step.attrs["bias"]), plan) - wanted:
            owner, _, name = path.rpartition(".")
            module = root.get_submodule(owner)
            for store in (module._parameters, module._buffers):
                if name in store:
                    store[name] = None


def _paths(tree: object, plan: Plan) -> set[str]:
    """The parameters that a weight is, or is computed from."""
    found: set[str] = set()
    for leaf in leaves(tree):
        if isinstance(leaf, Attr):
            found.add(leaf.path)
        elif isinstance(leaf, Ref):
            node = plan.graph.nodes[leaf.index]
            found |= _paths((node.args, node.kwargs), plan)
    return found


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` where root has `old`, under every name; returns the root, which may be what was replaced."""
    if root is old:
        return new
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return root


def _settings(found: dict[str, GraphRunner]) -> dict[str, QConfig]:
    """The QConfig of every weighted module, or owner of functional layers, by its full name."""
    settings: dict[str, QConfig] = {}
    for path, runner in found.items():
        for step in runner.plan.steps:
            if step.integer and step.qconfig is not None:
                node = runner.graph.nodes[step.nodes[0]]
                name = node.target if node.kind == "module" else node.owner
                settings[".".join(part for part in (path, name) if part)] = step.qconfig
    return settings


def _make_rest_dynamic(
    model: nn.Module,
    info: Prepared,
    backend: str | None,
    entries: dict[str, tuple[str, str]],
    layers: dict[str, QConfig],
    reasons: dict[str, str],
) -> nn.Module:
    """Attention, embeddings and what ranges cannot hold have no static form; their weights become int8 all the same."""
    rest: dict[str, QConfig] = {}
    for name, module in model.named_modules():
        qconfig = info.recipe.resolve(name, module)[0] if name in info.called and is_dynamic(module) else None
        if qconfig is not None:
            rest[name] = replace(qconfig, weight_observer="minmax", activation_symmetric=False)
            layers[name] = qconfig
    modules = dict(model.named_modules())
    while True:
        try:
            made = _dynamic(model, rest, backend)
            break
        except ValueError as error:  # where some cannot, the others are not to pay for it
            problems = {name: _why_not_dynamic(modules[name], qconfig) for name, qconfig in rest.items()}
            problems = {name: why for name, why in problems.items() if why} or dict.fromkeys(rest, str(error))
        for name, problem in problems.items():
            entries[name] = ("float", problem)
            del rest[name], layers[name]
    for name in rest:
        why = reasons.get(name, "no static kernel")
        entries[name] = (summary(made)[name].outcome, f"{why}, so dynamic: {summary(made)[name].detail}")
    return made


def _dynamic(model: nn.Module, settings: dict[str, QConfig], backend: str | None) -> nn.Module:
    if not settings:
        return model
    rules: dict[Pattern, QConfig | None] = {glob.escape(name): qconfig for name, qconfig in settings.items()}
    return quantize_dynamic(model, Recipe(rules, default=None), backend=backend, inplace=True)


def _why_not_dynamic(module: nn.Module, qconfig: QConfig) -> str:
    """What quantize_dynamic says of a module by itself; '' where it can be done."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and qconfig.weight_bits not in TABLE_BITS:
        return f"tables have 8 or 4 bits, the recipe asks for {qconfig.weight_bits}"
    try:
        quantize_dynamic(nn.Sequential(module), Recipe({"0": qconfig}, default=None))
    except ValueError as error:
        return str(error).removeprefix(f"layer '0' ({type(module).__name__}): ")
    return ""


def _report(
    model: nn.Module,
    sizes: dict[str, int],
    kinds: dict[str, str],
    entries: dict[str, tuple[str, str]],
    info: Prepared,
) -> Report:
    """One line per module with parameters, and per float step among integers."""
    now = dict(model.named_modules(remove_duplicate=False))
    functional = _functional_bytes(model)
    same = {id(now[name]): name for name, (outcome, _) in entries.items() if outcome != "float" and name in now}
    wholes = tuple(f"{name}." for name, module in now.items() if isinstance(module, QuantModule))
    lines = []
    for name, size in sizes.items():
        if RESERVED in name.split(".") or not (size or name in entries or name in info.islands):
            continue
        if name.startswith(wholes):
            continue
        outcome, detail = entries.get(name, ("float", ""))
        twin = same.get(id(now.get(name)), name)
        if outcome == "float" and twin != name:
            outcome, detail = entries[twin][0], f"the same layer as {twin}"
        if name in info.islands or not detail:
            detail = _why(name, info)
        after = functional.get(name, 0) + (own_bytes(now[name]) if name in now else 0)
        if isinstance(now.get(name), QuantModule):  # with its parts, which have no entries of their own
            size = sum(other for inner, other in sizes.items() if inner == name or inner.startswith(f"{name}."))
            after = sum(own_bytes(part) for part in now[name].modules())
        lines.append(ReportEntry(name, kinds[name], outcome, detail, size, after))
    listed = {line.name for line in lines}
    for name, (outcome, detail) in entries.items():
        if name not in listed:
            lines.append(ReportEntry(name, "function", outcome, detail, 0, 0))
    return Report(tuple(lines))


def _functional_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the int8 layers of functional calls, by the module whose forward makes the call."""
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        runner = module._modules.get(RESERVED)
        if not isinstance(runner, ProgramRunner):
            continue
        for key, layer in runner.layers.items():
            owner = ".".join(part for part in (path, key.replace("/", ".").rpartition(".")[0]) if part)
            sizes[owner] = sizes.get(owner, 0) + own_bytes(layer)
    return sizes


def _why(name: str, info: Prepared) -> str:
    if name in info.islands:
        return f"an island: {info.islands[name]}; its layers are handled one by one"
    if name not in info.called:
        return "not called on the example inputs"
    return "its own parameters are used in float"

"""Convert: a calibrated model into int8 layers under the user's names, and a program that keeps uint8 between them.

This file has the order of the steps. The steps are in `quant/static/`: one program (`convert_program.py`), its layers
(`int8_layers.py`) and instructions (`assembly.py`), the modules that they replace (`module_replacement.py`), modules
that become dynamic instead (`dynamic_fallback.py`) and the report (`report_entries.py`). `quant/runtime/` runs the
result.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from quant import forward_state
from quant.calibrate import CalibrationWarning
from quant.copying import copy_model
from quant.devices import tensors_on
from quant.graph import Kind
from quant.half_precision import note_half, sizes_before
from quant.kernels import QParams
from quant.observers import NoDataSeen, Observer
from quant.observers.base import EmptyAverage
from quant.pretrained import refuse_to_save
from quant.qat.checks import check_trained
from quant.recipe import QConfig
from quant.report import attach_report
from quant.runtime.keys import ProgramKey
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.scaled_linear import ScaledLinear, columns_of
from quant.runtime.names import attribute, full_name, has_submodule, submodule
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.shown_programs import show_programs
from quant.runtime.state import keep_ranges
from quant.static.call_text import call_text
from quant.static.convert_program import convert_program
from quant.static.description import DESCRIPTION, by_text, make_description
from quant.static.dynamic_fallback import make_rest_dynamic
from quant.static.fingerprint import fingerprint
from quant.static.folds import agree
from quant.static.int8_layers import Built, is_layer
from quant.static.kept_graph import graph_of
from quant.static.module_replacement import remove_unread
from quant.static.outlier_check import float_norms, leave_float
from quant.static.prepared import Prepared, is_prepared, record_of
from quant.static.recurrent_ranges import agree_on_recurrent
from quant.static.removed_tensors import remove_parametrizations
from quant.static.replaceable_steps import origin_of
from quant.static.report_entries import Entries, make_report, note_dtypes, note_programs
from quant.static.report_notes import silenced
from quant.static.runner import (
    GraphRunner,
    all_runners,
    first_programs,
    keep_programs,
    remove_programs,
    runners,
    unwrapped,
)
from quant.static.signature import guards, signature
from quant.waiting_forwards import stop_waiting

CPU = torch.device("cpu")
"""Where integers are computed, wherever a model was calibrated or trained."""


class NotCalibrated(ValueError):
    """Observers that saw no data; the message lists every one."""


def convert(prepared: nn.Module, backend: str | None = None) -> nn.Module:
    """The int8 form of a calibrated model: same classes and names, real integer arithmetic.

    Args:
        prepared: from `prepare`, after data went through it, or from `prepare_qat`; left as it is. Of an average of
            models (`torch.optim.swa_utils.AveragedModel`) and of data-parallel wrappers the model in them is taken.
        backend: a name of `quant.kernels.available()`, or None for the recipe's, or the fastest that is exact here.

    Returns:
        a copy, on the CPU; its attribute `program` prints what it computes, call by call.

    Raises:
        ValueError: `prepared` does not come from `prepare`, or only a part of it does.
        NotCalibrated: some observers saw no data; all are listed.
        NoDataSeen: a range is an average that began before the first batch, as of timm's ModelEmaV3.

    Warns:
        CalibrationWarning: a layer stays float because 8 bits cannot hold the range that calibration saw.
    """
    with torch.inference_mode(False), tensors_on(CPU):
        return _converted(unwrapped(prepared), backend)


def _converted(prepared: nn.Module, backend: str | None) -> nn.Module:
    if not runners(prepared):
        raise ValueError("quant.convert: expected a model from quant.prepare, with data run through it")
    _check_whole(prepared)
    info = record_of(prepared)
    backend = backend or info.recipe.backend
    model = copy_model(prepared)
    own = record_of(model)
    forward_state.put_back(
        own.state, model
    )  # hidden states, counters and layers that were replaced, as before any data
    stop_waiting(model)
    model.to(CPU)
    model.eval()  # which reads the switches that an average of models has as buffers
    unseen = _drop_unseen(model)
    for one in all_runners(model).values():
        one.known = {}  # a search of its histogram for each range, which many steps ask for
    _calibrated(model)
    _say_non_finite(prepared, model)
    check_trained(model)
    dynamic = _leave_float(model, info)
    agree_on_recurrent(all_runners(model).values())
    ranges = _calibrated(model)
    tensors = sizes_before(model)
    float_model, scaled = fingerprint(model), list(columns_of(model))
    earlier = [name for name, one in model.named_modules() if isinstance(one, QuantModule)]
    kinds = {name: _kind(module) for name, module in model.named_modules(remove_duplicate=False)}
    programs = all_runners(model)
    hooked = silenced(programs)
    calls = {key: signature(runner.graph, runner.root) for key, runner in programs.items()}
    built = Built(programs, ranges)
    entries: Entries = dict.fromkeys(unseen, ("float", "an example calls it, and no batch of data"))
    firsts = first_programs(model)
    added = {key: one for key, one in programs.items() if firsts[id(one)] is not one}
    odd = {key for key, one in added.items() if not agree(one, firsts[id(one)])}
    removed: list[str] = []
    with torch.no_grad():
        # A unit that is nothing but a layer comes last: it is put wherever no unit has a form of its own of that layer.
        for key, runner in sorted(programs.items(), key=lambda unit: is_layer(unit[1])):
            if key in odd:
                continue  # what another program has in a weight cannot be left out; such calls run as they are
            model = convert_program(model, key, runner, ranges[key], backend, built, entries, further=key in added)
        called = _called(model, programs)
        for key, runner in programs.items():
            if key not in added:
                removed += _remove_unread(model, runner, called, entries)
    for layer in built.layers.values():
        layer.derive()  # type: ignore[operator]
    layers, rules = _settings(programs), next(iter(programs.values())).fused.rules
    dynamic = {**_shared(model, programs), **dynamic}
    model = make_rest_dynamic(model, info, backend, entries, layers, dynamic)
    for unscheduled in built.unscheduled:
        said = unscheduled.schedule()
        if said is not None:
            entries[unscheduled.entry] = ("int8", said)
    description = make_description(info.example, ranges, calls, layers, backend, rules)
    description["islands"] = {name: str(why) for name, why in info.islands.items()}
    description["norms"] = by_text({key: float_norms(one) for key, one in programs.items()})
    further = {key: one for key, one in programs.items() if key in added or one.promoted}
    description["further"] = by_text({key: one.example for key, one in further.items()})
    description["guards"] = by_text({key: guards(one.graph) for key, one in further.items()})
    description["said"] = by_text({key: call_text(one.graph, one.root) for key, one in further.items()})
    alone = {key: one.example for key, one in programs.items() if one.alone and key not in added}
    description["alone"] = by_text(alone)
    description.update(dynamic=dynamic, removed=removed, fingerprint=float_model)
    if scaled:
        description["scaled"] = scaled
    if earlier:
        description["earlier"] = earlier
    model.__dict__[DESCRIPTION] = description
    note_programs(model, entries)
    for name in hooked:
        outcome, detail = entries.get(name, ("float", "seen through: its forward is a part of the program"))
        entries[name] = (outcome, f"{detail}; its forward hooks do not run")
    entries = {name: one for name, one in entries.items() if name.rpartition(".")[0] not in scaled}
    note_half(model)
    note_dtypes(model, entries)
    for module in model.modules():
        if isinstance(module, ProgramRunner):
            module.origin = origin_of(module, graph_of(module))
            module.make_ready()
    keep_ranges(model)
    show_programs(model)
    attach_report(model, make_report(model, tensors, kinds, entries, info))
    refuse_to_save(model, "is a static int8 model")
    return model


def _kind(module: nn.Module) -> str:
    """The class of the user's module, as the report calls it."""
    return nn.Linear.__name__ if isinstance(module, ScaledLinear) else type(module).__name__


def _check_whole(prepared: nn.Module) -> None:
    """Refuse a model that was put together from prepared and other parts, and name these."""
    if is_prepared(prepared):
        return
    parts = [name for name, module in prepared.named_modules() if is_prepared(module)]
    if not parts:
        raise ValueError(
            f"quant.convert: {type(prepared).__name__} is a part of a prepared model; convert the model that "
            "quant.prepare returned"
        )
    raise ValueError(
        f"quant.convert: {type(prepared).__name__} is not from quant.prepare, its part {parts[0]!r} is; convert the "
        f"part and put it back: model.{parts[0]} = quant.convert(model.{parts[0]})"
    )


def _drop_unseen(model: nn.Module) -> list[str]:
    """Drop programs to which no data came, where a module has others, or an example alone brought it; their calls run
    as they are.

    Returns:
        the modules in those without any program left.
    """
    left: list[str] = []
    for path, runner in runners(model).items():
        programs = runner.programs()
        seen = [one for one in programs if one.has_seen()] if len(programs) > 1 or runner.alone else []
        if seen and len(seen) < len(programs):
            keep_programs(runner, seen)
        elif runner.alone and not seen:
            left += [full_name(path, name) for name, _ in runner.root.named_modules() if RESERVED not in name]
            remove_programs(runner)
    return left


def _say_non_finite(prepared: nn.Module, model: nn.Module) -> None:
    """Warn once of NaN and infinities that calibration left out of ranges, where nobody has said so.

    Args:
        model: a copy of `prepared`, without programs that are not converted.
    """
    named = {name: one for name, one in observers_of(prepared).items() if isinstance(one, Observer)}
    kept = observers_of(model)
    odd = {
        one.name or name: one
        for name, one in named.items()
        if name in kept and not one.told_of_non_finite and int(one.nan_count + one.inf_count)
    }
    for one in odd.values():
        one.told_of_non_finite = True
    if odd:
        (name, first), more = next(iter(odd.items())), f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        warnings.warn(
            f"quant.convert: layer {name!r}{more}: {int(first.nan_count)} NaN and {int(first.inf_count)} infinite "
            "values came in calibration; they are left out of its range, and int8 gives NaN for such samples",
            CalibrationWarning,
            stacklevel=3,
        )


def observers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The observers of all programs of a prepared model, by program and slot."""
    return {
        f"{path}/{key}": one for path, runner in all_runners(model).items() for key, one in runner.observers.items()
    }


def _calibrated(prepared: nn.Module) -> dict[ProgramKey, dict[str, QParams]]:
    """The ranges of every runner, or one error that lists what saw no data."""
    ranges: dict[ProgramKey, dict[str, QParams]] = {}
    missing: list[str] = []
    for key, runner in all_runners(prepared).items():
        ranges[key] = {}
        with runner.settled():
            for name in runner.fused.slots:
                try:
                    ranges[key][name] = runner.qparams(name)
                except EmptyAverage:
                    raise  # says more than that there was no data
                except NoDataSeen:
                    missing.append(full_name(str(key), name))
    if missing:
        raise NotCalibrated(
            f"quant.convert: {len(missing)} observers saw no data: {', '.join(missing)}; run calibration batches "
            "through the prepared model first, or leave these layers float by the recipe"
        )
    return ranges


def _shared(model: nn.Module, programs: dict[ProgramKey, GraphRunner]) -> dict[str, str]:
    """Why layers stay float that several units call, by the first names of the modules."""
    first = {id(module): name for name, module in model.named_modules()}
    return {
        first[id(attribute(runner.root, name))]: reason
        for runner in programs.values()
        for name, reason in runner.fused.floats.items()
        if has_submodule(runner.root, name) and id(attribute(runner.root, name)) in first
    }


def _leave_float(model: nn.Module, info: Prepared) -> dict[str, str]:
    """Fuse again with the layers in float that 8 bits cannot hold, and say which.

    Returns:
        the recurrent ones among them, by full name, and why: dynamic quantisation takes those.
    """
    dynamic: dict[str, str] = {}
    for path, first in runners(model).items():
        floats, recurrent = leave_float(first.programs(), info.recipe)
        for name, reason in floats.items():
            full = full_name(path, name)
            becomes = "becomes dynamic" if name in recurrent else "stays float"
            dynamic.update({full: reason} if name in recurrent else {})
            warnings.warn(f"quant.convert: layer {full!r} {becomes}: {reason}", CalibrationWarning, stacklevel=4)
    return dynamic


def _called(model: nn.Module, programs: dict[ProgramKey, GraphRunner]) -> set[nn.Module]:
    """The modules that some program calls as a whole: int8 layers by now, float ones, and islands."""
    names = {
        full_name(key.path, node.target)
        for key, runner in programs.items()
        for node in runner.graph.nodes
        if node.kind is Kind.MODULE
    }
    return {submodule(model, name) for name in names}


def _remove_unread(model: nn.Module, runner: GraphRunner, called: set[nn.Module], entries: Entries) -> list[str]:
    """Remove what no program of a module reads, once all are built; returns the removed tensors' names."""
    root, path = runner.root, runner.graph.path
    first = root._modules.get(RESERVED)
    if not isinstance(first, ProgramRunner):  # a unit that was a layer itself
        return []
    programs = first.programs()
    gone = set().union(*(remove_unread(one.fused, root, model, programs, called) for one in runner.programs()))
    for name in remove_parametrizations(root):
        entries[full_name(path, name)] = ("int8", "part of an int8 weight")
    return [full_name(path, name) for name in sorted(gone)]


def _settings(programs: dict[ProgramKey, GraphRunner]) -> dict[str, QConfig]:
    """The QConfig of every weighted module, or owner of functional layers, by its full name."""
    settings: dict[str, QConfig] = {}
    for runner in programs.values():
        for step in runner.fused.steps:
            if step.integer and step.qconfig is not None:
                node = runner.graph.nodes[step.nodes[0]]
                name = node.target if node.kind is Kind.MODULE else node.owner
                settings[full_name(runner.graph.path, name)] = step.qconfig
    return settings

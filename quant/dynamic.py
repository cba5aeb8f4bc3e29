"""`quantize_dynamic`: int8 weights now, activation ranges at run time, no data and no capture.

Everything is decided and checked (`dynamic_decisions.py`) and then built before the first module is replaced, so an
error leaves the model unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.driver import Forward
from quant.copying import copy_model, settled
from quant.dynamic_decisions import (
    TABLES,
    Decision,
    base_type,
    check_rules,
    check_something,
    check_weights,
    decide,
)
from quant.dynamic_rounding import SAMPLES, check_rounding, round_by_data
from quant.kernels import dispatch, narrow
from quant.kernels.backend import Backend
from quant.kernels.registry import described
from quant.kernels.tables import groups_of_rows
from quant.nn import Embedding, EmbeddingBag, Linear, QuantModule, TiedEmbedding
from quant.nn.attention import leave_fast_paths
from quant.nn.base import QuantizedWeight, adopt
from quant.nn.recurrent import Direction, RecurrentCell, RecurrentSequence, interpreted_steps
from quant.nn.registry import is_own, maker
from quant.pretrained import let_it_save
from quant.recipe import QConfig, Recipe, RecipeError
from quant.report import Report, ReportEntry, attach_report, own_bytes, storage, summary
from quant.rounding.methods import NEAREST
from quant.runtime.names import full_name, put_module


@torch.inference_mode(False)
def quantize_dynamic(
    model: nn.Module,
    recipe: Recipe | None = None,
    backend: str | None = None,
    inplace: bool = False,
    *,
    batches: Iterable[Any] | None = None,
    rounding: str = NEAREST,
    forward: Forward | None = None,
    samples: int = SAMPLES,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Replace every supported module of a float model, the root included, by its int8 stand-in.

    Weights become int8 per output channel (embeddings: 8 to 2 bits per row); activations are quantised when they come,
    each row by its own range. Inputs and outputs keep the model's type, float32, bfloat16 or float16. Names, hooks,
    tied weights and train/eval flags stay.
    No gradient goes through int8 layers. torch's encoder layers leave their fused float path, so what a padding mask
    hides comes out as the ordinary path computes it, not as zeros.

    Args:
        model: a float model on the CPU, of float32 or a half type.
        recipe: which modules and how; default: every supported one, 8 bits.
        backend: a name of `quant.kernels.available()` for every layer; default: the recipe's, else the fastest that is
            exact on the machine that runs the model.
        inplace: change `model` itself rather than a copy. A supported root cannot be changed in place: use the result.
        batches: inputs as for `quant.quantize_static`, by which the weights of linear and recurrent layers are rounded.
            Of 4 bits and fewer their scales then follow from the error of the output.
        rounding: of these weights, with batches: "nearest"; or, by what rounding does to a layer's output behind the
            rounded ones before it, "gptq" (Frantar et al. 2022) or "adaround" (Nagel et al. 2020).
        forward: called with (model, batch) where the model is not simply called with its inputs.
        samples: the most samples of `batches` that are used.
        checkpoint: a file that rounding writes after each block of layers and goes on from, to the same bits.
        progress: of rounding, a bar on standard error, two lines where that is no terminal.

    Returns:
        The quantised model; `quant.summary` of it says what became of each module.

    Raises:
        NothingQuantized: no module was quantised.
        RecipeError: a rule of the recipe that matches nothing, or asks for what does not exist.
        BackendUnavailable: the backend does not exist or cannot be used here.
        TypeError: a module to quantise holds anything but float32, bfloat16 and float16, or is on another device than
            the CPU.
        ValueError: a weight holds NaN or inf; or `rounding` is unknown, or has no batches.
        DataError, CalibrationError, CheckpointError: there are no batches; the model failed on one; as the checkpoint
            of `quant.learn_rounding`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_dynamic: expected an nn.Module, got {type(model).__name__}")
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"quantize_dynamic: expected a quant.Recipe, got {type(recipe).__name__}")
    check_rounding(rounding, batches, checkpoint)
    chosen = backend or recipe.backend or ""
    used = dispatch.find(chosen) if chosen else dispatch.current()
    decisions = decide(model, recipe)
    check_rules(model, recipe, decisions)
    check_weights(decisions, recipe)
    if not inplace:
        model = copy_model(model)
    decisions = decide(model, recipe)
    check_something(decisions)
    build(decisions, chosen)
    if batches is not None:
        round_by_data(
            model, decisions, batches, rounding, forward=forward, samples=samples, checkpoint=checkpoint,
            progress=progress,
        )  # fmt: skip
    report = report_of(decisions, used, summary(model))
    result = put_in(model, decisions)
    leave_fast_paths(result)
    attach_report(result, report)
    let_it_save(result, recipe)
    return result


def build(decisions: Iterable[Decision], backend: str) -> None:
    """Build every int8 module; `backend`: its name for all of them, or ''. Weights that were one tensor stay one."""
    owners: dict[int, Decision] = {}
    # Linears first: a tied embedding reads the Linear's weight, not the other way round.
    for decision in sorted(decisions, key=lambda decision: not isinstance(decision.module, nn.Linear)):
        if decision.qconfig is None:
            continue
        try:
            decision.module = settled(decision.module)
            decision.replacement = _make(decision, owners)
            adopt(decision.replacement, decision.module, decision.names[0])
        except ValueError as error:
            raise type(error)(f"{decision.where}: {error}") from error
        for name, child in decision.replacement.named_modules():
            if isinstance(child, QuantModule):
                child.backend = backend
                child.layer_name = full_name(decision.names[0], name)


def _make(decision: Decision, owners: dict[int, Decision]) -> QuantModule:
    """The int8 module for one decision; `owners`: id of a weight -> the first decision with it."""
    module, qconfig = decision.module, decision.qconfig
    assert qconfig is not None
    base = base_type(module)
    assert base is not None
    if base in (nn.Linear, *TABLES):
        owner = owners.setdefault(id(module.weight), decision)
        if owner is not decision:
            tied = _make_tied(decision, owner)
            if tied is not None:
                decision.tied_to = owner.names[0]
                return tied
    return stand_in(module, base, qconfig)


def stand_in(module: nn.Module, base: type[nn.Module], qconfig: QConfig) -> QuantModule:
    """The int8 module that the registered maker of class `base` builds for a module.

    Raises:
        ValueError: the maker returned something else.
    """
    make = maker(base)
    assert make is not None
    layer = make(module, qconfig)
    if not isinstance(layer, QuantModule):
        raise ValueError(f"{described(make)} returned a {described(layer)}, expected a quant.nn.QuantModule")
    return layer


def _make_tied(decision: Decision, owner: Decision) -> QuantModule | None:
    """The int8 module that shares the weight of `owner`'s; None where the two cannot share it."""
    module, qconfig, first = decision.module, decision.qconfig, owner.replacement
    assert qconfig is not None
    assert owner.qconfig is not None
    settings = ["weight_bits", "group_size", "weight_symmetric"]
    if not isinstance(module, TABLES):
        settings += ["per_channel", "activation_bits", "weight_observer", "weight_options"]
    for setting in settings:
        mine, other = getattr(qconfig, setting), getattr(owner.qconfig, setting)
        if mine != other:
            raise RecipeError(
                f"its weight is also that of {owner.names[0]!r}, but the recipe asks for {setting} {mine} here and "
                f"{other} there"
            )
    if isinstance(first, Linear):
        weight = QuantizedWeight(first.q_weight, first.scale, first.columns, first.activation_bits)
        if isinstance(module, nn.Linear):
            return Linear(weight, module.bias, per_row=qconfig.ranges_per_row)
        return TiedEmbedding(module, weight) if isinstance(module, nn.Embedding) else None
    if isinstance(first, (Embedding, EmbeddingBag)):
        if isinstance(module, nn.Embedding):
            return Embedding(module, qconfig, tied_to=first)
        if isinstance(module, nn.EmbeddingBag):
            return EmbeddingBag(module, qconfig, tied_to=first)
    return None


def put_in(model: nn.Module, decisions: Iterable[Decision]) -> nn.Module:
    """The model with the int8 modules that were built in it; where the root itself is one, that."""
    for decision in decisions:
        if decision.replacement is not None:
            for name in decision.names:
                model = put_module(model, name, decision.replacement)
    return model


def report_of(decisions: Iterable[Decision], used: Backend, before: Report) -> Report:
    """The report of the decisions; modules that were quantised earlier keep their entries of `before`."""
    entries = []
    counted: set[int] = set()
    earlier = {entry.name: entry for entry in before if entry.quantized}
    for decision in decisions:
        name, kind = decision.names[0], type(decision.module).__name__
        also = f"; also {', '.join(decision.names[1:])}" if len(decision.names) > 1 else ""
        if decision.replacement is not None:
            after = sum(own_bytes(module, counted) for module in decision.replacement.modules())
            outcome, detail = _describe(decision, decision.replacement, used)
            if decision.tied_to is not None:
                detail += f"; shares its weight with {decision.tied_to or '(root)'}"
            detail += f"; {decision.rounding}" if decision.rounding else ""
            entries.append(ReportEntry(name, kind, outcome, detail + also, decision.bytes_before, after))
        elif isinstance(decision.module, QuantModule):
            size = sum(own_bytes(module) for module in decision.module.modules())
            entries.append(earlier.get(name) or ReportEntry(name, kind, "int8", decision.reason, size, size))
        elif decision.bytes_before or base_type(decision.module):
            entries.append(
                ReportEntry(name, kind, "float", decision.reason + also, decision.bytes_before, decision.bytes_before)
            )
    return Report(tuple(entries))


def _describe(decision: Decision, module: QuantModule, used: Backend) -> tuple[str, str]:
    qconfig = decision.qconfig
    bits = 8 if qconfig is None else qconfig.weight_bits
    if isinstance(module, (Embedding, EmbeddingBag)):
        groups = groups_of_rows(module.rows.shape[1], module.embedding_dim, bits)
        scales = "row" if groups == 1 else f"group of {module.embedding_dim // groups}"
        return f"int{bits}", f"{bits} bits a value, a scale per {scales}"
    if isinstance(module, TiedEmbedding):
        rows = f"{bits}-bit" if narrow.is_narrow(module.q_weight) else "int8"
        return f"int{bits}", f"reads {rows} rows"
    routes = sorted({used.route(weight) for weight in _weights(module)})
    if not (is_own(module) or isinstance(module, (RecurrentSequence, RecurrentCell))):
        by = f"{used.name} ({', '.join(routes)})" if routes else "no product of a backend's"
        return f"int{bits}", "; ".join(filter(None, [f"{described(module)}, {by}", getattr(module, "described", "")]))
    ranges = "per row" if qconfig is None or qconfig.ranges_per_row else "per tensor"
    scales = "per channel" if qconfig is None or qconfig.per_channel else "per tensor"
    if qconfig is not None and qconfig.group_size is not None:
        scales = f"per group of {qconfig.group_size}"
    by_outputs = decision.rounding and qconfig is not None and qconfig.group_size is not None
    if qconfig is not None and qconfig.clips_weights and not by_outputs:
        scales += f" ({qconfig.weight_observer})"
    text = f"weights {scales}, activation ranges {ranges}, {used.name} ({', '.join(routes)})"
    unusual = [
        f"{name + ': ' if name else ''}input projection with {child.described}"
        for name, child in module.named_modules()
        if isinstance(child, Direction) and child.described
    ]
    if isinstance(module, Linear) and module.described:
        unusual.append(module.described)
    unusual += [interpreted_steps(module), storage(_weights(module), bits)]
    return f"int{bits}", "; ".join([text, *filter(None, unusual)])


def _weights(module: nn.Module) -> list[Tensor]:
    buffers = [tensor for name, tensor in module.named_buffers() if name.rpartition(".")[2].startswith("q_weight")]
    return [tensor for tensor in buffers if tensor.dim() == 2 or narrow.is_narrow(tensor)]

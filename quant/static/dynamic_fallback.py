"""Makes the modules of a static conversion that have no static form dynamic, where they have a dynamic one."""

from __future__ import annotations

import copy
import glob
from dataclasses import replace

from torch import nn

from quant.capture.called import AloneReason
from quant.dynamic import quantize_dynamic
from quant.dynamic_decisions import base_type
from quant.fusion.recognised_steps import PER_CALL_REASON
from quant.graph import Kind
from quant.kernels.tables import TABLE_BITS
from quant.leaves import is_dynamic, is_registered
from quant.ops.operator import Float
from quant.recipe import STATIC_SETTINGS, Pattern, QConfig, Recipe
from quant.report import summary
from quant.runtime.names import child_of
from quant.runtime.programs import RESERVED
from quant.static.prepared import Prepared
from quant.static.report_entries import Entries
from quant.static.runner import GraphRunner


def make_rest_dynamic(
    model: nn.Module,
    info: Prepared,
    backend: str | None,
    entries: Entries,
    layers: dict[str, QConfig],
    reasons: dict[str, str],
) -> nn.Module:
    """Quantise dynamically what has no static form: attention, embeddings, and layers with values that no range holds.

    Args:
        model: converted except for these.
        info: the record of `prepare`.
        backend: for the dynamic layers; None for the dispatcher's choice.
        entries: those of the report; one per layer is added.
        layers: full name -> settings; those of the new layers are added.
        reasons: full name of a layer with a static form -> the reason that it does not get it.

    Returns:
        the model; the int8 layer in its stead where the model is such a layer itself.
    """
    chosen = dynamic_settings(model, info)
    layers.update(chosen)
    rest = {name: dynamic_part(qconfig) for name, qconfig in chosen.items()}
    modules = dict(model.named_modules())
    while True:
        try:
            quantized = _dynamic(model, rest, backend)
            break
        except ValueError as error:  # where some cannot, the others are not to pay for it
            problems = {name: _why_not_dynamic(modules[name], qconfig) for name, qconfig in rest.items()}
            problems = {name: why for name, why in problems.items() if why} or dict.fromkeys(rest, str(error))
        for name, problem in problems.items():
            entries[name] = ("float", problem)
            del rest[name], layers[name]
    for name in rest:
        why = PER_CALL_REASON if chosen[name].per_call else reasons.get(name, "no static kernel")
        entries[name] = (summary(quantized)[name].outcome, f"{why}, so dynamic: {summary(quantized)[name].detail}")
    return quantized


def dynamic_settings(model: nn.Module, info: Prepared) -> dict[str, QConfig]:
    """Name -> settings by the recipe, for the layers that become dynamic: for want of a static form, or as asked."""
    settings: dict[str, QConfig] = {}
    for name, module in model.named_modules():
        own = without_runner(module)
        read = info.islands.get(name) is AloneReason.OTHER_PARAMETERS  # by whoever puts others in their place
        if name not in info.called or read or base_type(own) is None:
            continue
        qconfig = info.recipe.resolve(name, own)[0]
        if qconfig is not None and (qconfig.per_call or is_dynamic(own)) and not is_registered(own):
            settings[name] = qconfig
    return settings


def is_lone_dynamic(runner: GraphRunner) -> bool:
    """Whether a captured module is itself a layer that becomes dynamic, such as an embedding that an island calls, or
    a layer that the recipe wants so."""
    steps = [step for step in runner.fused.steps if runner.graph.nodes[step.output].kind is not Kind.INPUT]
    nodes = [runner.graph.nodes[index] for step in steps for index in step.nodes]
    if not nodes or nodes[0].kind is not Kind.MODULE or nodes[0].target or any(step.integer for step in steps):
        return False
    own = without_runner(runner.root)
    first = steps[0].operator
    if isinstance(first, Float) and first.per_call:  # other nodes take its output and state apart
        return base_type(own) is not None
    return len(nodes) == 1 and is_dynamic(own)


def without_runner(module: nn.Module) -> nn.Module:
    """The user's module of a captured one, which runs a graph; other modules unchanged."""
    if not isinstance(child_of(module, RESERVED), GraphRunner):
        return module
    own = copy.copy(module)
    own.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
    own._modules = {name: child for name, child in module._modules.items() if name != RESERVED}
    return own


def dynamic_part(qconfig: QConfig) -> QConfig:
    """The settings without those of static layers; `recipe_check` has checked that some layer uses these."""
    usual = QConfig()
    return replace(qconfig, **{name: getattr(usual, name) for name in STATIC_SETTINGS})


def _dynamic(model: nn.Module, settings: dict[str, QConfig], backend: str | None) -> nn.Module:
    if not settings:
        return model
    rules: dict[Pattern, QConfig | None] = {glob.escape(name): qconfig for name, qconfig in settings.items()}
    return quantize_dynamic(model, Recipe(rules, default=None), backend=backend, inplace=True)


def _why_not_dynamic(module: nn.Module, qconfig: QConfig) -> str:
    """The reason that quantize_dynamic refuses a module by itself; '' where it does not."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and qconfig.weight_bits not in TABLE_BITS:
        return f"tables have 8, 4, 3 or 2 bits, the recipe asks for {qconfig.weight_bits}"
    try:
        quantize_dynamic(nn.Sequential(module), Recipe({"0": qconfig}, default=None))
    except ValueError as error:
        return str(error).removeprefix(f"layer '0' ({type(module).__name__}): ")
    return ""

"""The rest of a static conversion: what has no static form becomes dynamic, each module of it that can."""

from __future__ import annotations

import copy
import glob
from dataclasses import replace

from torch import nn

from quant.capture.called import AloneReason
from quant.dynamic import quantize_dynamic
from quant.graph import Kind
from quant.kernels.tables import TABLE_BITS
from quant.leaves import is_dynamic
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
    """Attention, embeddings and what ranges cannot hold have no static form; their weights become int8 all the same.

    Args:
        model: converted but for these.
        entries: of the report; a line per layer is added. layers: settings by full name; likewise.
        reasons: why layers that have a static form are none, by full name.

    Returns:
        the model, another one where it was such a layer itself.
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
        why = reasons.get(name, "no static kernel")
        entries[name] = (summary(quantized)[name].outcome, f"{why}, so dynamic: {summary(quantized)[name].detail}")
    return quantized


def dynamic_settings(model: nn.Module, info: Prepared) -> dict[str, QConfig]:
    """The layers of a model, by name, that become dynamic where they have no static form, and what the recipe says."""
    settings: dict[str, QConfig] = {}
    for name, module in model.named_modules():
        own = without_runner(module)
        read = info.islands.get(name) is AloneReason.OTHER_PARAMETERS  # by whoever puts others in their place
        wanted = name in info.called and is_dynamic(own) and not read
        qconfig = info.recipe.resolve(name, own)[0] if wanted else None
        if qconfig is not None:
            settings[name] = qconfig
    return settings


def is_lone_dynamic(runner: GraphRunner) -> bool:
    """Whether a captured unit is nothing but a layer that becomes dynamic, as an embedding that an island calls."""
    steps = [step for step in runner.fused.steps if runner.graph.nodes[step.output].kind is not Kind.INPUT]
    nodes = [runner.graph.nodes[index] for step in steps for index in step.nodes]
    lone = len(nodes) == 1 and nodes[0].kind is Kind.MODULE and not nodes[0].target and not steps[0].integer
    return lone and is_dynamic(without_runner(runner.root))


def without_runner(module: nn.Module) -> nn.Module:
    """The user's module behind one that is captured by itself, and so runs a graph; other modules as they are."""
    if not isinstance(child_of(module, RESERVED), GraphRunner):
        return module
    own = copy.copy(module)
    own.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
    own._modules = {name: child for name, child in module._modules.items() if name != RESERVED}
    return own


def dynamic_part(qconfig: QConfig) -> QConfig:
    """The settings without those that only static layers have; `recipe_check` has seen that some layer uses them."""
    usual = QConfig()
    return replace(qconfig, **{name: getattr(usual, name) for name in STATIC_SETTINGS})


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

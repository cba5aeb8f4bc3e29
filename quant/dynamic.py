"""`quantize_dynamic`: int8 weights now, activation ranges at run time, no data and no capture.

A module is replaced where its type is one of SUPPORTED and its forward is that type's own; everything is checked and
built before anything is replaced, so that an error changes nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.kernels import dispatch
from quant.kernels.tables import TABLE_BITS
from quant.nn import (
    GRU,
    LSTM,
    RNN,
    Embedding,
    EmbeddingBag,
    GRUCell,
    Linear,
    LSTMCell,
    MultiheadAttention,
    QuantModule,
    RNNCell,
    TiedEmbedding,
)
from quant.nn.base import QuantizedWeight, adopt
from quant.nn.rnn import Direction
from quant.recipe import NO_RULE, QConfig, Recipe, RecipeError, Rule
from quant.report import Report, ReportEntry, attach_report, own_bytes

SUPPORTED: dict[type[nn.Module], Callable[..., QuantModule]] = {
    nn.Linear: Linear.from_float,
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
    nn.MultiheadAttention: MultiheadAttention,
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
}
"""Float type -> what makes its int8 stand-in from (module, qconfig)."""

TABLES = (nn.Embedding, nn.EmbeddingBag)


class NothingQuantized(ValueError):
    """No module of the model was quantised; the message names the types found and the types supported."""


@dataclass
class _Plan:
    """What will become of one module, and why."""

    module: nn.Module
    names: list[str]
    qconfig: QConfig | None
    reason: str
    bytes_before: int
    replacement: QuantModule | None = None


def quantize_dynamic(
    model: nn.Module, recipe: Recipe | None = None, backend: str | None = None, inplace: bool = False
) -> nn.Module:
    """Replace every supported module of a float model, the root included, by its int8 stand-in.

    Weights become int8 per output channel (embeddings: 8 or 4 bits per row); activations are quantised when they come,
    each row by its own range. Inputs and outputs stay float32. Names, hooks, tied weights and train/eval flags stay.

    Args:
        model: a float32 model on the CPU.
        recipe: which modules and how; default: every supported one, 8 bits.
        backend: a name of `quant.kernels.available()` for every layer; default: the recipe's, else the fastest that is
            exact on the machine that runs the model.
        inplace: change `model` itself rather than a copy. A supported root cannot be changed in place: use the result.

    Returns:
        The quantised model; `quant.summary` of it says what became of each module.

    Raises:
        NothingQuantized: no module was quantised.
        RecipeError: a rule of the recipe that matches nothing, or asks for what does not exist.
        BackendUnavailable: the backend does not exist or cannot be used here.
        TypeError: a module to quantise holds anything but float32, or is on another device than the CPU.
        ValueError: a weight holds NaN or inf.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_dynamic: expected an nn.Module, got {type(model).__name__}")
    recipe = Recipe() if recipe is None else recipe
    chosen = backend or recipe.backend or ""
    used = dispatch.find(chosen) if chosen else dispatch.current()
    _check_rules(model, recipe)
    _check_weights(_plan(model, recipe), recipe)
    if not inplace:
        model = copy.deepcopy(model)
    plans = _plan(model, recipe)
    _check_something(plans)
    _build(plans, chosen)
    result = _replace(model, plans)
    attach_report(result, _report(plans, used))
    return result


def _plan(model: nn.Module, recipe: Recipe) -> list[_Plan]:
    """Decide for every module; children of a module that is replaced go with it."""
    plans: dict[int, _Plan] = {}
    inside: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in inside):
            continue
        known = plans.get(id(module))
        if known is not None:
            known.names.append(name)
            continue
        qconfig, rule = recipe.resolve(name, module)
        reason = _why_float(module, qconfig, rule, recipe)
        size = sum(own_bytes(child) for child in module.modules()) if not reason else own_bytes(module)
        plans[id(module)] = _Plan(module, [name], None if reason else qconfig, reason, size)
        if not reason or isinstance(module, QuantModule):
            inside.append(f"{name}." if name else "")
            if not name:
                break
    return list(plans.values())


def base_type(module: nn.Module) -> type[nn.Module] | None:
    """The supported type that `module` is, if its forward is that type's own."""
    for base in SUPPORTED:
        if isinstance(module, base):
            return base if type(module).forward is base.forward else None
    return None


def _why_float(module: nn.Module, qconfig: QConfig | None, rule: int, recipe: Recipe) -> str:
    """'' for a module to quantise, else why it stays as it is."""
    if isinstance(module, QuantModule):
        return "already quantised"
    base = base_type(module)
    if base is None:
        named = next((base.__name__ for base in SUPPORTED if isinstance(module, base)), None)
        if named:
            return f"{type(module).__name__} overrides {named}'s forward, which int8 would skip"
        return f"{type(module).__name__} is not quantised dynamically"
    if qconfig is None:
        return "left float by the recipe's default" if rule == NO_RULE else f"left float by rule {recipe.rules[rule]}"
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        return "its lazy parameters are not initialised; run one batch first"
    if any(type(hook).__name__ in ("WeightNorm", "SpectralNorm") for hook in module._forward_pre_hooks.values()):
        return "a hook recomputes its weight at every call; remove it first (torch.nn.utils.remove_weight_norm)"
    if isinstance(module, TABLES) and module.max_norm is not None:
        return "max_norm rewrites the rows at every look-up"
    if isinstance(module, TABLES) and module.num_embeddings * module.embedding_dim == 0:
        return "the table is empty"
    return ""


def _check_rules(model: nn.Module, recipe: Recipe) -> None:
    modules = list(model.named_modules())
    missed = recipe.unmatched(modules)
    if missed:
        names = ", ".join(name or "(root)" for name, _ in modules[:20])
        raise RecipeError(
            f"rule {missed[0]} matches no module of {type(model).__name__}; its modules are {names}"
            f"{', ...' if len(modules) > 20 else ''}"
        )
    for rule in recipe.rules:
        if rule.qconfig is not None:
            _check_rule(rule, modules)


def _check_rule(rule: Rule, modules: list[tuple[str, nn.Module]]) -> None:
    """A rule that quantises must reach something that can be."""
    hit = [(name, module) for name, module in modules if rule.matches(name, module)]
    if any(base_type(module) or isinstance(module, QuantModule) for _, module in hit):
        return
    name, module = hit[0]
    raise RecipeError(
        f"rule {rule} matches {name or '(root)'!r} ({type(module).__name__}), which cannot be quantised dynamically; "
        f"supported are {_supported_names()}"
    )


def _supported_names() -> str:
    return ", ".join(base.__name__ for base in SUPPORTED)


def _check_something(plans: list[_Plan]) -> None:
    if any(plan.qconfig is not None for plan in plans):
        return
    done = [plan.names[0] or "(root)" for plan in plans if isinstance(plan.module, QuantModule)]
    if done:
        raise NothingQuantized(f"already quantised: {', '.join(done)}; no other module can be")
    found = Counter(type(plan.module).__name__ for plan in plans)
    types = ", ".join(f"{name} ({count})" for name, count in found.items())
    reasons = sorted({plan.reason for plan in plans if base_type(plan.module)})
    why = f" Supported modules were left: {'; '.join(reasons)}." if reasons else ""
    raise NothingQuantized(
        f"no module was quantised. The model holds {types}; quantised dynamically are {_supported_names()}.{why}"
    )


def _check_weights(plans: list[_Plan], recipe: Recipe) -> None:
    for plan in plans:
        if plan.qconfig is None:
            continue
        where = f"layer {plan.names[0] or '(root)'!r} ({type(plan.module).__name__})"
        for name, tensor in plan.module.named_parameters():
            _check_tensor(f"{where}: {name}", tensor)
        if isinstance(plan.module, TABLES) and plan.qconfig.weight_bits not in TABLE_BITS:
            _, rule = recipe.resolve(plan.names[0], plan.module)
            asked = "the recipe's default" if rule == NO_RULE else f"rule {recipe.rules[rule]}"
            raise RecipeError(f"{where}: tables have 8 or 4 bits, {asked} asks for {plan.qconfig.weight_bits}")


def _check_tensor(what: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise TypeError(f"{what} is on the meta device and has no values; load the weights first")
    if tensor.device.type != "cpu":
        raise TypeError(f"{what} is on {tensor.device}; int8 layers run on the CPU: model.cpu() first")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{what} is {tensor.dtype}, expected torch.float32: model.float() first")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{what} holds NaN or inf, which no integer stands for")


def _build(plans: list[_Plan], backend: str) -> None:
    """Make every stand-in. Weights that were one tensor stay one."""
    linears: dict[int, Linear] = {}
    # Linears first: a tied embedding reads the Linear's weight, not the other way round.
    for plan in sorted(plans, key=lambda plan: not isinstance(plan.module, nn.Linear)):
        if plan.qconfig is None:
            continue
        plan.replacement = _make(plan.module, plan.qconfig, linears)
        adopt(plan.replacement, plan.module, plan.names[0])
        for name, child in plan.replacement.named_modules():
            if isinstance(child, QuantModule):
                child.backend = backend
                child.layer_name = ".".join(part for part in (plan.names[0], name) if part)


def _make(module: nn.Module, qconfig: QConfig, linears: dict[int, Linear]) -> QuantModule:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        tied = linears.get(id(module.weight))
        if tied is not None:
            weight = QuantizedWeight(tied.q_weight, tied.scale, tied.columns, tied.activation_bits)
            if isinstance(module, nn.Embedding):
                return TiedEmbedding(module, weight)
            return Linear(weight, module.bias, per_row=qconfig.per_row)
    base = base_type(module)
    assert base is not None
    made = SUPPORTED[base](module, qconfig)
    if isinstance(module, nn.Linear) and isinstance(made, Linear):
        linears[id(module.weight)] = made
    return made


def _replace(model: nn.Module, plans: list[_Plan]) -> nn.Module:
    for plan in plans:
        if plan.replacement is None:
            continue
        for name in plan.names:
            if not name:
                return plan.replacement
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plan.replacement)
    return model


def _report(plans: list[_Plan], used: dispatch.Backend) -> Report:
    entries = []
    for plan in plans:
        name, kind = plan.names[0], type(plan.module).__name__
        also = f"; also {', '.join(plan.names[1:])}" if len(plan.names) > 1 else ""
        if plan.replacement is not None:
            after = sum(own_bytes(module) for module in plan.replacement.modules())
            outcome, detail = _describe(plan.replacement, plan.qconfig, used)
            entries.append(ReportEntry(name, kind, outcome, detail + also, plan.bytes_before, after))
        elif isinstance(plan.module, QuantModule):
            size = sum(own_bytes(module) for module in plan.module.modules())
            entries.append(ReportEntry(name, kind, "int8", plan.reason, size, size))
        elif plan.bytes_before or base_type(plan.module):
            entries.append(ReportEntry(name, kind, "float", plan.reason + also, plan.bytes_before, plan.bytes_before))
    return Report(tuple(entries))


def _describe(module: QuantModule, qconfig: QConfig | None, used: dispatch.Backend) -> tuple[str, str]:
    bits = 8 if qconfig is None else qconfig.weight_bits
    if isinstance(module, (Embedding, EmbeddingBag)):
        return f"int{bits}", f"{bits} bits a value, a scale per row"
    if isinstance(module, TiedEmbedding):
        return f"int{bits}", "reads the int8 weight of the Linear that it is tied to"
    routes = sorted({used.route(weight) for weight in _weights(module)})
    ranges = "per row" if qconfig is None or qconfig.per_row else "per tensor"
    scales = "per channel" if qconfig is None or qconfig.per_channel else "per tensor"
    text = f"weights {scales}, activation ranges {ranges}, {used.name} ({', '.join(routes)})"
    unusual = [
        f"{name + ': ' if name else ''}input projection with {child.described}"
        for name, child in module.named_modules()
        if isinstance(child, Direction) and child.described
    ]
    if isinstance(module, Linear) and module.described:
        unusual.append(module.described)
    return f"int{bits}", "; ".join([text, *unusual])


def _weights(module: nn.Module) -> list[Tensor]:
    return [tensor for name, tensor in module.named_buffers() if name.rpartition(".")[2].startswith("q_weight")]

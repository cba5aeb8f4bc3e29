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
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from quant.kernels import dispatch
from quant.kernels.backend import Backend
from quant.kernels.tables import TABLE_BITS
from quant.names import full_name
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
from quant.nn.attention import leave_fast_paths
from quant.nn.base import QuantizedWeight, adopt
from quant.nn.rnn import Direction
from quant.recipe import NO_RULE, QConfig, Recipe, RecipeError, Rule
from quant.report import Report, ReportEntry, attach_report, own_bytes, summary

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

PARAMETERS = ("weight", "bias", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "in_proj_weight", "in_proj_bias")
"""What the supported types call their parameters; sequences number theirs (`_flat_weights_names`)."""


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
    tied_to: str | None = None

    @property
    def where(self) -> str:
        """The module as errors call it."""
        return f"layer {self.names[0] or '(root)'!r} ({type(self.module).__name__})"


@torch.inference_mode(False)
def quantize_dynamic(
    model: nn.Module, recipe: Recipe | None = None, backend: str | None = None, inplace: bool = False
) -> nn.Module:
    """Replace every supported module of a float model, the root included, by its int8 stand-in.

    Weights become int8 per output channel (embeddings: 8 or 4 bits per row); activations are quantised when they come,
    each row by its own range. Inputs and outputs stay float32. Names, hooks, tied weights and train/eval flags stay.
    No gradient goes through int8 layers. torch's encoder layers leave their fused float path, so what a padding mask
    hides comes out as the ordinary path computes it, not as zeros.

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
    if not isinstance(recipe, Recipe):
        raise TypeError(f"quantize_dynamic: expected a quant.Recipe, got {type(recipe).__name__}")
    chosen = backend or recipe.backend or ""
    used = dispatch.find(chosen) if chosen else dispatch.current()
    plans = _plan(model, recipe)
    _check_rules(model, recipe, plans)
    _check_weights(plans, recipe)
    if not inplace:
        model = copy.deepcopy(model)
    plans = _plan(model, recipe)
    _check_something(plans)
    _build(plans, chosen)
    report = _report(plans, used, summary(model))
    result = _replace(model, plans)
    leave_fast_paths(result)
    attach_report(result, report)
    return result


def _plan(model: nn.Module, recipe: Recipe) -> list[_Plan]:
    """Decide for every module; children of a module that is replaced go with it."""
    plans: dict[int, _Plan] = {}
    inside: list[str] = []
    counted: set[int] = set()
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in inside) or id(module) in plans:
            continue
        qconfig, rule = _resolve(module, names[id(module)], recipe)
        reason = _why_float(module, qconfig, rule, recipe)
        parts = [module] if reason else list(module.modules())
        size = sum(own_bytes(part, counted) for part in parts)
        plans[id(module)] = _Plan(module, names[id(module)], None if reason else qconfig, reason, size)
        if not reason or isinstance(module, QuantModule):
            inside.append(f"{name}." if name else "")
            if not name:
                break
    return list(plans.values())


def _resolve(module: nn.Module, names: list[str], recipe: Recipe) -> tuple[QConfig | None, int]:
    """The settings of a module by the first rule that matches any of its names."""
    found = [recipe.resolve(name, module) for name in names]
    return min(found, key=lambda each: len(recipe.rules) if each[1] == NO_RULE else each[1])


def base_type(module: nn.Module) -> type[nn.Module] | None:
    """The supported type that `module` is, if its forward is that type's own."""
    if isinstance(module, NonDynamicallyQuantizableLinear) or "forward" in module.__dict__:
        return None
    for base in SUPPORTED:
        if isinstance(module, base):
            return base if type(module).forward is base.forward else None
    return None


def _why_float(module: nn.Module, qconfig: QConfig | None, rule: int, recipe: Recipe) -> str:
    """'' for a module to quantise, else why it stays as it is."""
    if isinstance(module, QuantModule):
        return "already quantised"
    base = base_type(module)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "MultiheadAttention reads its weight without calling it, so it goes with the whole or not at all"
    if base is None:
        named = next((base.__name__ for base in SUPPORTED if isinstance(module, base)), None)
        if named and "forward" in module.__dict__:
            return "its forward was replaced on the object, which int8 would skip"
        if named:
            return f"{type(module).__name__} overrides {named}'s forward, which int8 would skip"
        return f"{type(module).__name__} is not quantised dynamically"
    if qconfig is None:
        return "left float by the recipe's default" if rule == NO_RULE else f"left float by rule {recipe.rules[rule]}"
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        return "its lazy parameters are not initialised; run one batch first"
    if parametrize.is_parametrized(module):
        return "its parameters are computed at every call; torch.nn.utils.parametrize.remove_parametrizations first"
    names = getattr(module, "_flat_weights_names", PARAMETERS)
    if any(isinstance(module.__dict__.get(name), Tensor) for name in names):
        return "a hook computes its weight at every call; torch.nn.utils.remove_weight_norm or prune.remove first"
    if isinstance(module, TABLES) and module.max_norm is not None:
        return "max_norm rewrites the rows at every look-up"
    if isinstance(module, TABLES) and module.num_embeddings * module.embedding_dim == 0:
        return "the table is empty"
    return ""


def _check_rules(model: nn.Module, recipe: Recipe, plans: list[_Plan]) -> None:
    modules = list(model.named_modules(remove_duplicate=False))
    missed = recipe.unmatched(modules)
    if missed:
        names = ", ".join(name or "(root)" for name, _ in modules[:20])
        raise RecipeError(
            f"rule {missed[0]} matches no module of {type(model).__name__}; its modules are {names}"
            f"{', ...' if len(modules) > 20 else ''}"
        )
    wholes = {id(plan.module) for plan in plans}
    for rule in recipe.rules:
        _check_rule(rule, modules, wholes)


def _check_rule(rule: Rule, modules: list[tuple[str, nn.Module]], wholes: set[int]) -> None:
    """A rule must reach a module that is decided on by itself, and one that quantises something that can be."""
    hit = [(name, module) for name, module in modules if rule.matches(name, module)]
    name, module = hit[0]
    if not any(id(module) in wholes for _, module in hit):
        raise RecipeError(f"rule {rule} matches only parts of modules that are quantised as a whole: {name!r}")
    if rule.qconfig is None or any(base_type(module) or isinstance(module, QuantModule) for _, module in hit):
        return
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
        for name, tensor in plan.module.named_parameters():
            _check_tensor(f"{plan.where}: {name}", tensor)
        _, rule = _resolve(plan.module, plan.names, recipe)
        asked = "the recipe's default" if rule == NO_RULE else f"rule {recipe.rules[rule]}"
        if isinstance(plan.module, TABLES) and plan.qconfig.weight_bits not in TABLE_BITS:
            raise RecipeError(f"{plan.where}: tables have 8 or 4 bits, {asked} asks for {plan.qconfig.weight_bits}")
        for setting in ("weight_observer", "activation_symmetric"):
            value = getattr(plan.qconfig, setting)
            if value != getattr(QConfig(), setting):
                raise RecipeError(f"{plan.where}: dynamic quantisation has no {setting}, {asked} asks for {value!r}")


def _check_tensor(what: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise TypeError(f"{what} is on the meta device and has no values; load the weights first")
    if tensor.device.type != "cpu":
        raise TypeError(f"{what} is on {tensor.device}; int8 layers run on the CPU: model.cpu() first")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{what} is {tensor.dtype}, expected torch.float32: model.float() first")
    if not bool(torch.isfinite(tensor.detach()).all()):
        raise ValueError(f"{what} holds NaN or inf, which no integer stands for")


def _build(plans: list[_Plan], backend: str) -> None:
    """Make every stand-in. Weights that were one tensor stay one."""
    owners: dict[int, _Plan] = {}
    # Linears first: a tied embedding reads the Linear's weight, not the other way round.
    for plan in sorted(plans, key=lambda plan: not isinstance(plan.module, nn.Linear)):
        if plan.qconfig is None:
            continue
        try:
            plan.replacement = _make(plan, owners)
            adopt(plan.replacement, plan.module, plan.names[0])
        except ValueError as error:
            raise type(error)(f"{plan.where}: {error}") from error
        for name, child in plan.replacement.named_modules():
            if isinstance(child, QuantModule):
                child.backend = backend
                child.layer_name = full_name(plan.names[0], name)


def _make(plan: _Plan, owners: dict[int, _Plan]) -> QuantModule:
    """The stand-in of one module; `owners` is who came first with a weight, by the weight's id."""
    module, qconfig = plan.module, plan.qconfig
    assert qconfig is not None
    if isinstance(module, (nn.Linear, *TABLES)):
        owner = owners.setdefault(id(module.weight), plan)
        if owner is not plan:
            tied = _make_tied(plan, owner)
            if tied is not None:
                plan.tied_to = owner.names[0]
                return tied
    base = base_type(module)
    assert base is not None
    return SUPPORTED[base](module, qconfig)


def _make_tied(plan: _Plan, owner: _Plan) -> QuantModule | None:
    """The stand-in that shares the weight of `owner`'s, or None where the two cannot."""
    module, qconfig, first = plan.module, plan.qconfig, owner.replacement
    assert qconfig is not None
    assert owner.qconfig is not None
    settings = ("weight_bits",) if isinstance(module, TABLES) else ("weight_bits", "per_channel", "activation_bits")
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
            return Linear(weight, module.bias, per_row=qconfig.per_row)
        return TiedEmbedding(module, weight) if isinstance(module, nn.Embedding) else None
    if isinstance(first, (Embedding, EmbeddingBag)):
        if isinstance(module, nn.Embedding):
            return Embedding(module, qconfig, tied_to=first)
        if isinstance(module, nn.EmbeddingBag):
            return EmbeddingBag(module, qconfig, tied_to=first)
    return None


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


def _report(plans: list[_Plan], used: Backend, before: Report) -> Report:
    """What became of each plan; what was quantised earlier stays as `before` tells it."""
    entries = []
    counted: set[int] = set()
    earlier = {entry.name: entry for entry in before if entry.outcome != "float"}
    for plan in plans:
        name, kind = plan.names[0], type(plan.module).__name__
        also = f"; also {', '.join(plan.names[1:])}" if len(plan.names) > 1 else ""
        if plan.replacement is not None:
            after = sum(own_bytes(module, counted) for module in plan.replacement.modules())
            outcome, detail = _describe(plan.replacement, plan.qconfig, used)
            if plan.tied_to is not None:
                detail += f"; shares its weight with {plan.tied_to or '(root)'}"
            entries.append(ReportEntry(name, kind, outcome, detail + also, plan.bytes_before, after))
        elif isinstance(plan.module, QuantModule):
            size = sum(own_bytes(module) for module in plan.module.modules())
            entries.append(earlier.get(name) or ReportEntry(name, kind, "int8", plan.reason, size, size))
        elif plan.bytes_before or base_type(plan.module):
            entries.append(ReportEntry(name, kind, "float", plan.reason + also, plan.bytes_before, plan.bytes_before))
    return Report(tuple(entries))


def _describe(module: QuantModule, qconfig: QConfig | None, used: Backend) -> tuple[str, str]:
    bits = 8 if qconfig is None else qconfig.weight_bits
    if isinstance(module, (Embedding, EmbeddingBag)):
        return f"int{bits}", f"{bits} bits a value, a scale per row"
    if isinstance(module, TiedEmbedding):
        return f"int{bits}", "reads int8 rows"
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

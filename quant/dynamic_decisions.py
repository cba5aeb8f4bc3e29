"""The decisions of `quantize_dynamic` for each module, before anything is built: its settings, or why it stays float.

A module is replaced where its type has an int8 layer (`nn/registry.py`) and its forward is that type's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quant.copying import hooks_of, name_of
from quant.kernels.row_slices import all_finite
from quant.kernels.tables import TABLE_BITS
from quant.nn import QuantModule
from quant.nn.base import check_groups
from quant.nn.registry import inputs_of, maker, supported
from quant.observers import LEARNED, OBSERVERS, PER_CALL, MSEObserver
from quant.recipe import NO_RULE, RANGES_OF_DATA, QConfig, Recipe, RecipeError, Rule
from quant.recurrent_layers import is_recurrent_layer, parameter_names
from quant.report import own_bytes
from quant.runtime.layers.quant_module import HALVES

TABLES = (nn.Embedding, nn.EmbeddingBag)

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
STATIC = "quant.quantize_static makes it int8, by ranges from some hundred samples"
"""The way out for layers that have a static form alone."""

PARAMETERS = ("weight", "bias", "in_proj_weight", "in_proj_bias")
"""Names of the parameters of supported types, except recurrent ones."""


class NothingQuantized(ValueError):
    """No module of the model was quantised; the message names the types found and the types supported."""


@dataclass
class Decision:
    """The decision for one module, and the reason.

    Attributes:
        tied_to: the module whose weight it shares.
        rounding: for the report, how data chose its integers.
    """

    module: nn.Module
    names: list[str]
    qconfig: QConfig | None
    reason: str
    bytes_before: int = 0
    replacement: QuantModule | None = None
    tied_to: str | None = None
    rounding: str = ""

    @property
    def where(self) -> str:
        """The module's name in errors."""
        return f"layer {self.names[0] or '(root)'!r} ({type(self.module).__name__})"


def decide(model: nn.Module, recipe: Recipe) -> list[Decision]:
    """Decide for every module; children of a replaced module are not decided on."""
    decisions: dict[int, Decision] = {}
    inside: list[str] = []
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(prefix) for prefix in inside) or id(module) in decisions:
            continue
        qconfig, rule = _resolve(module, names[id(module)], recipe)
        reason = _why_float(module, qconfig, rule, recipe)
        decisions[id(module)] = Decision(module, names[id(module)], None if reason else qconfig, reason)
        if not reason or isinstance(module, QuantModule):
            inside.append(f"{name}." if name else "")
            if not name:
                break
    _count(decisions.values())
    return list(decisions.values())


def _count(decisions: Iterable[Decision]) -> None:
    """Set the bytes of each decision; a shared tensor counts once, at a module that stays float if there is one."""
    counted: set[int] = set()
    for decision in sorted(decisions, key=lambda decision: not decision.reason):
        parts = [decision.module] if decision.reason else decision.module.modules()
        decision.bytes_before = sum(own_bytes(part, counted) for part in parts)


def _resolve(module: nn.Module, names: list[str], recipe: Recipe) -> tuple[QConfig | None, int]:
    """The settings of a module by the first rule that matches any of its names."""
    resolved = [recipe.resolve(name, module) for name in names]
    return min(resolved, key=lambda each: len(recipe.rules) if each[1] == NO_RULE else each[1])


def base_type(module: nn.Module) -> type[nn.Module] | None:
    """The supported type that `module` is, if its forward is that type's own."""
    if isinstance(module, NonDynamicallyQuantizableLinear) or "forward" in module.__dict__:
        return None
    return class_with_dynamic_form(type(module))


def class_with_dynamic_form(one: type[nn.Module]) -> type[nn.Module] | None:
    """The supported type that a class is, or inherits the forward of."""
    for base in one.__mro__:
        if issubclass(base, nn.Module) and maker(base) is not None:
            return base if one.forward is base.forward else None
    return None


def _why_float(module: nn.Module, qconfig: QConfig | None, rule: int, recipe: Recipe) -> str:
    """The reason that a module stays float; '' for one to quantise."""
    if isinstance(module, QuantModule):
        return "already quantised"
    base = base_type(module)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "MultiheadAttention reads its weight without calling it, so it goes with the whole or not at all"
    if base is None:
        named = next((base.__name__ for base in supported() if isinstance(module, base)), None)
        if named and "forward" in module.__dict__:
            return "its forward was replaced on the object, which int8 would skip"
        if named:
            return f"{type(module).__name__} overrides {named}'s forward, which int8 would skip"
        static = f"; {STATIC}" if isinstance(module, CONVOLUTIONS) else ""
        return f"{type(module).__name__} is not quantised dynamically{static}"
    if qconfig is None:
        return "left float by the recipe's default" if rule == NO_RULE else f"left float by rule {recipe.rules[rule]}"
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        return "its lazy parameters are not initialised; run one batch first"
    names = parameter_names(module) if is_recurrent_layer(module) else PARAMETERS
    settled = {name_of(hook) for _, hook in hooks_of(module)}  # what torch's own hooks compute becomes a parameter
    if any(isinstance(module.__dict__.get(name), Tensor) and name not in settled for name in names):
        return "a hook of yours computes its weight at every call; make it an ordinary parameter first"
    if isinstance(module, TABLES) and module.max_norm is not None:
        return "max_norm rewrites the rows at every look-up"
    if isinstance(module, TABLES) and module.num_embeddings * module.embedding_dim == 0:
        return "the table is empty"
    return ""


def check_rules(model: nn.Module, recipe: Recipe, decisions: list[Decision]) -> None:
    """Raise RecipeError for a rule that matches no module, or none that it can apply to."""
    modules = list(model.named_modules(remove_duplicate=False))
    missed = recipe.unmatched(modules)
    if missed:
        names = ", ".join(name or "(root)" for name, _ in modules[:20])
        raise RecipeError(
            f"rule {missed[0]} matches no module of {type(model).__name__}; its modules are {names}"
            f"{', ...' if len(modules) > 20 else ''}"
        )
    wholes = {id(decision.module) for decision in decisions}
    for rule in recipe.rules:
        _check_rule(rule, modules, wholes)


def _check_rule(rule: Rule, modules: list[tuple[str, nn.Module]], wholes: set[int]) -> None:
    """Check that a rule matches a module decided on by itself and, where it quantises, one that can be quantised."""
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
    return ", ".join(base.__name__ for base in supported())


def check_something(decisions: list[Decision]) -> None:
    """Raise NothingQuantized where every module stays float."""
    if any(decision.qconfig is not None for decision in decisions):
        return
    done = [decision.names[0] or "(root)" for decision in decisions if isinstance(decision.module, QuantModule)]
    if done:
        raise NothingQuantized(f"already quantised: {', '.join(done)}; no other module can be")
    counts = Counter(type(decision.module).__name__ for decision in decisions)
    types = ", ".join(f"{name} ({count})" for name, count in counts.items())
    reasons = sorted({decision.reason for decision in decisions if isinstance(decision.module, tuple(supported()))})
    why = f" Supported modules were left: {'; '.join(reasons)}." if reasons else ""
    raise NothingQuantized(
        f"no module was quantised. The model holds {types}; quantised dynamically are {_supported_names()}.{why}"
    )


def check_weights(decisions: list[Decision], recipe: Recipe) -> None:
    """Raise TypeError, ValueError or RecipeError for weights that cannot be quantised as the recipe asks."""
    for decision in decisions:
        if decision.qconfig is not None:
            for name, tensor in decision.module.named_parameters():
                check_tensor(f"{decision.where}: {name}", tensor)
    check_settings(decisions, recipe)


def check_settings(decisions: list[Decision], recipe: Recipe) -> None:
    """Raise RecipeError for settings that dynamic layers do not have; looks at no values."""
    for decision in decisions:
        if decision.qconfig is None:
            continue
        _, rule = _resolve(decision.module, decision.names, recipe)
        asked = recipe.rule_text(rule)
        if isinstance(decision.module, TABLES) and decision.qconfig.weight_bits not in TABLE_BITS:
            raise RecipeError(
                f"{decision.where}: tables have 8, 4, 3 or 2 bits, {asked} asks for {decision.qconfig.weight_bits}"
            )
        inputs = inputs_of(decision.module)
        if inputs is not None:
            try:
                check_groups(inputs, decision.qconfig)
            except RecipeError as error:
                raise RecipeError(f"{decision.where}: {error}") from None
        for setting, value in decision.qconfig.changed().items():
            if setting in RANGES_OF_DATA and value != PER_CALL:
                raise RecipeError(
                    f"{decision.where}: dynamic quantisation has no {setting}, {asked} asks for {value!r}"
                )
        if decision.qconfig.clips_weights:
            _check_weight_observer(decision, asked)


def _check_weight_observer(decision: Decision, asked: str) -> None:
    """Raise RecipeError where a layer's weight cannot have another range than that of its values."""
    assert decision.qconfig is not None
    kind = decision.qconfig.weight_observer
    asks = f"{decision.where}: {asked} asks for weight_observer {kind!r}"
    if kind in LEARNED:
        raise RecipeError(
            f"{asks}, which is learned in training (quant.prepare_qat); dynamic layers take {', '.join(OBSERVERS)}"
        )
    if isinstance(decision.module, TABLES):
        raise RecipeError(f"{asks}, and rows of tables have the range of their values; leave it out for this layer")
    if decision.qconfig.group_size is None:
        return
    if OBSERVERS[kind] is not MSEObserver:
        raise RecipeError(f"{asks}, and groups of inputs take 'minmax' or 'mse'; choose one, or leave group_size out")
    if decision.qconfig.weight_options:
        raise RecipeError(
            f"{asks} with {dict(decision.qconfig.weight_options)}, and groups of inputs are searched without a "
            "histogram; leave weight_options out"
        )


def check_tensor(what: str, tensor: Tensor) -> None:
    """Raise TypeError or ValueError for a tensor, called `what`, that has no values on the CPU to quantise."""
    if tensor.device.type == "meta":
        raise TypeError(f"{what} is on the meta device and has no values; load the weights first")
    if tensor.device.type != "cpu":
        raise TypeError(f"{what} is on {tensor.device}; int8 layers run on the CPU: model.cpu() first")
    if tensor.dtype not in (torch.float32, *HALVES):
        raise TypeError(
            f"{what} is {tensor.dtype}, expected torch.float32, torch.bfloat16 or torch.float16: model.float() first"
        )
    if not all_finite(tensor):
        raise ValueError(f"{what} holds NaN or inf, which no integer stands for")

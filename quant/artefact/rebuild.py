"""A static conversion made again from its description and the float model, without data (`static/description.py`).

Capture runs again on example inputs of the same shapes, the ranges are the stored ones, and the weights come from a
state_dict. What capture gave at first is stored as text, so that another model is refused even where its tensors would
fit.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.rebuild_programs import match_programs
from quant.capture.called import AloneReason
from quant.convert import convert
from quant.fusion.fuse import fuse_again
from quant.fusion.fused_graph import RULES
from quant.kernels import ACTIVATION_U8, QParams
from quant.observers import PER_CALL
from quant.prepare import make_runner, planned, slot_observer
from quant.recipe import QConfig, Recipe, UnmatchedRules
from quant.runtime.keys import ProgramKey
from quant.runtime.names import full_name, has_attribute
from quant.static.description import DESCRIPTION, VERSION, captured_runners, table_text
from quant.static.dynamic_fallback import without_runner
from quant.static.examples import CannotRebuild, decode
from quant.static.prepared import record_of
from quant.static.runner import GraphRunner, all_runners
from quant.static.signature import same_call, signature


def rebuild(
    model: nn.Module,
    description: Mapping[str, Any],
    tables: Mapping[str, Tensor],
    example_inputs: Any = None,
    backend: str | None = None,
    examples: Sequence[Any] = (),
) -> nn.Module:
    """The converted model that `description` is of, all its weights 1: load its state_dict afterwards.

    Args:
        model: the float model, of the same code; left as it is, and its weights do not matter.
        description: from `describe`.
        tables: from `tables`.
        example_inputs: as for `prepare`; None takes tensors of ones in the shapes that the description has, or
            with zeros for integers and booleans where ones do not fit.
        backend: instead of the description's.
        examples: calls of further programs, as for `prepare`; of those that the description has no example of.

    Raises:
        CannotRebuild: the model's layers, calls or ranges are not those of the description.
    """
    if description.get("version") != VERSION:
        raise CannotRebuild(f"description has version {description.get('version')!r}, expected {VERSION}")
    if not 1 <= description.get("rules", 1) <= RULES:
        raise CannotRebuild(
            f"its graphs were fused by rules {description['rules']!r}, this version knows 1 to {RULES}; use the "
            "version of octet-quant that wrote it, or a later one"
        )
    prepared = _fitting(model, description, example_inputs, examples)
    _forget_weights(prepared)
    for key, runner in all_runners(prepared).items():
        for name, (scale, zero_point) in description["ranges"][str(key)].items():
            runner.set_observer(name, Known(scale, zero_point))
        texts = {step.name: table_text(key, step.name) for step in runner.fused.steps}
        runner.tables = {step: tables[text] for step, text in texts.items() if text in tables}
    result = convert(prepared, backend or description["backend"])
    own = result.__dict__[DESCRIPTION]
    # What was seen of the float model is of this one: the file's may have had other code, or none noted.
    seen = {name: own[name] for name in ("removed", "fingerprint")}
    result.__dict__[DESCRIPTION] = {**description, **seen, "backend": backend or description["backend"]}
    result.__dict__[DESCRIPTION].pop("backends", None)
    if backend is None:
        _retune(result, description.get("backends", {}))
    return result


def _retune(converted: nn.Module, backends: Mapping[str, str | None]) -> None:
    """The choices that `kernels.autotune` made, for captured units and their layers."""
    for key, runner in captured_runners(converted):
        if str(key) in backends:
            modules: list[Any] = [runner, *converted.get_submodule(key.path).modules()]
            for module in modules:
                if has_attribute(module, "backend"):
                    module.backend = backends[str(key)]


def _fitting(
    model: nn.Module, description: Mapping[str, Any], example_inputs: Any, examples: Sequence[Any]
) -> nn.Module:
    """The prepared model whose calls are the description's."""
    if example_inputs is not None:
        return _prepared(model, description, example_inputs, examples)
    try:
        return _prepared(model, description, decode(description["example"]), examples)
    except CannotRebuild:
        # The offsets of bags begin with 0, and a mask that hides nothing is no mask to Hugging Face's models.
        with contextlib.suppress(CannotRebuild):
            return _prepared(model, description, decode(description["example"], fill=0), examples)
        raise


def _prepared(
    model: nn.Module, description: Mapping[str, Any], example_inputs: Any, examples: Sequence[Any]
) -> nn.Module:
    # Weights are forgotten and ranges stored, so how they were chosen does not matter; min-max costs least.
    anything = {"weight_observer": "minmax", "weight_options": {}, "activation_options": {}}
    layers = {
        glob.escape(name): QConfig.from_dict({**data, **anything, "activation_observer": _observer(data)})
        for name, data in description["layers"].items()
    }
    try:
        recipe = Recipe(layers, default=None)
        # Some are islands in training alone, or by the values of the inputs that the model was captured with.
        islands = {name: AloneReason.read(why) for name, why in description.get("islands", {}).items()}
        prepared = planned(
            model, example_inputs, recipe, make_runner, "quant.load", examples=examples, islands=islands,
            rules=description.get("rules", 1),
        )  # fmt: skip
    except UnmatchedRules as error:
        absent = [name for name in description["layers"] if glob.escape(name) in error.patterns]
        own = [name for name, _ in model.named_children()]
        raise CannotRebuild(
            f"the int8 model has the layers {', '.join(absent[:8])}, which {type(model).__name__} does not have; its "
            f"children are {', '.join(own[:8]) or 'none'}. Give the float model that was converted"
        ) from error
    except Exception as error:  # the user's forward runs here, and may raise anything on another's inputs
        raise CannotRebuild(f"{type(model).__name__} does not fit the description: {error}") from error
    match_programs(prepared, description)
    _leave_dynamic(prepared, description.get("dynamic", {}))
    _leave_norms(prepared, description.get("norms", {}))
    _check_units(model, all_runners(prepared), description)
    return prepared


def _observer(settings: Mapping[str, Any]) -> str:
    """The cheapest observer; that of layers with ranges of each call makes them what they are."""
    return PER_CALL if settings["activation_observer"] == PER_CALL else "minmax"


def _leave_dynamic(prepared: nn.Module, dynamic: Mapping[str, str]) -> None:
    """Leave the recurrent layers float that convert left dynamic because of its data."""
    info = record_of(prepared)
    for runner in all_runners(prepared).values():
        path = runner.graph.path
        inside = {name.removeprefix(f"{path}."): why for name, why in dynamic.items() if _is_in(name, path)}
        if inside:
            floats = inside if path not in inside else {"": inside[path]}
            _fuse_again(runner, info.recipe, floats)


def _leave_norms(prepared: nn.Module, norms: Mapping[str, Mapping[str, str]]) -> None:
    """Leave the batch norms float, by unit, that convert left float because of its data."""
    info = record_of(prepared)
    for key, runner in all_runners(prepared).items():
        if norms.get(str(key)):
            _fuse_again(runner, info.recipe, norms[str(key)])


def _fuse_again(runner: GraphRunner, recipe: Recipe, floats: Mapping[str, str]) -> None:
    fused = fuse_again(runner.fused, without_runner(runner.root), recipe, floats)
    runner.use(fused, {name: slot_observer(slot) for name, slot in fused.slots.items()})


def _is_in(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _check_units(model: nn.Module, units: Mapping[ProgramKey, GraphRunner], description: Mapping[str, Any]) -> None:
    hint = "is it the model that was converted? Where its forward depends on the data, give example_inputs"
    known = set(map(ProgramKey.read, description["ranges"]))
    if set(units) != known:
        names = ", ".join(str(key) or "(root)" for key in sorted(set(units) ^ known))
        raise CannotRebuild(f"{type(model).__name__}: {names} was captured in one of the two and not in both; {hint}")
    for key, runner in units.items():
        unit = str(key)
        where = full_name(type(model).__name__, unit)
        pairs = zip_longest(description["calls"][unit], signature(runner.graph, runner.root), fillvalue="nothing more")
        for index, (expected, got) in enumerate(pairs):
            if not same_call(expected, got):
                raise CannotRebuild(f"{where}: call {index} is {got}, expected {expected}; {hint}")
        have, slots = set(runner.fused.slots), set(description["ranges"][unit])
        if have != slots:
            raise CannotRebuild(f"{where}: ranges differ from the description's in {sorted(have ^ slots)}; {hint}")


def _forget_weights(model: nn.Module) -> None:
    """Ones for whatever a state_dict brings: a model that was made without values may hold NaN, or none that fold."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.fill_(1.0)


class Known(nn.Module):
    """Stands where an observer stood, with a range that is decided."""

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        scales, zero_points = torch.tensor(scale, dtype=torch.float32), torch.tensor(zero_point, dtype=torch.int32)
        self.known = QParams(scales, zero_points, ACTIVATION_U8)

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def qparams(self) -> QParams:
        """The range."""
        return self.known

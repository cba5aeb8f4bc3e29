"""`smooth`: a float model whose outliers of activations sit in the weights, and which layers need 16 bits instead.

The function of the model is the same up to the rounding of float32: each layer scales its own input and holds the
weight that fits it (`runtime/layers/scaled_linear.py`), so that nothing hangs on what makes the input or reads it too.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import Caller, check_batches
from quant.calibrate.driver import Forward
from quant.capture.outer_objects import Outside
from quant.capture.random_draws import undrawn
from quant.capture.recorded_modules import evaluating
from quant.capture.snapshot import Snapshot
from quant.copying import copy_model
from quant.leaves import base_layer
from quant.recipe import QConfig, Recipe
from quant.runtime.arguments import copied_together
from quant.runtime.layers.scaled_linear import scale_inputs
from quant.runtime.trees import leaves
from quant.smoothing.choice import Choice, choose, choose_bits
from quant.smoothing.inputs import Seen, watching

SHARE, MOST = 8, 32
"""One in so many batches is looked at, and so many at most: calibration looks at all of them."""

AS_IT_IS = QConfig().activation_bits
"""In place of a layer's bits, by which layers of one input may differ."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Smoothed:
    """What was decided for a model.

    Attributes:
        model: with the scaled layers in place; the user's own where there are none.
        recipe: with a rule in front for each layer that takes 16 bits.
        notes: by the layer's name, for the report.
    """

    model: nn.Module
    recipe: Recipe
    notes: dict[str, str] = field(default_factory=dict)


@torch.inference_mode(False)
def smooth(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    *,
    forward: Forward | None = None,
) -> nn.Module:
    """A float copy with the same outputs, in which outliers of linear layers' inputs are scaled into the weights.

    `quantize_static` does this by itself. For `prepare`, `prepare_qat` and what else begins with a float model:
    ``prepare_qat(smooth(model, batches), example_inputs)`` trains from there.

    Args:
        model: a float module; left as it is.
        batches: as for `quantize_static`; a few are enough.
        recipe: that the model is to be quantised by: layers that it leaves float stay as they are.
        forward: called with (model, batch) where the model is not simply called with its inputs.

    Returns:
        a copy, in which layers that gain by it are `ScaledLinear`; those where the measured gain is small are not.
    """
    check_batches(batches, "quant.smoothing.smooth")
    some, _ = some_batches(batches, None)
    smoothed = smoothed_model(model, some, recipe or Recipe(), forward)
    return copy_model(model) if smoothed.model is model else smoothed.model


def some_batches(batches: Iterable[Any], limit: int | None) -> tuple[list[Any] | First, Iterable[Any]]:
    """The batches to look at, and all of them with none lost: of a sequence some from everywhere, else the first.

    Of an iterable that gives its batches anew each time none is held in memory.
    """
    known = _count(batches)
    known = known if limit is None else min(known, limit)
    count = max(1, min(MOST, known // SHARE))
    if isinstance(batches, Sequence):
        return [batches[place * known // count] for place in range(count if known > 0 else 0)], batches
    if not isinstance(batches, Iterator):
        return First(batches, count), batches
    first = list(itertools.islice(batches, count))
    return first, itertools.chain(first, batches)


def _count(batches: Iterable[Any]) -> int:
    """How many batches there are; a guess where they do not say, as a DataLoader of a stream."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return 2 * SHARE


@dataclass(frozen=True)
class First:
    """The first batches of an iterable that gives them anew each time, and draws them from its generators as before."""

    batches: Iterable[Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        with undrawn(self.batches):
            yield from itertools.islice(self.batches, self.count)


@torch.no_grad()
def smoothed_model(
    model: nn.Module, batches: list[Any] | First, recipe: Recipe, forward: Forward | None = None
) -> Smoothed:
    """Decide for each group of layers that read one input."""
    settings = dict(_layers(model, recipe))
    if not settings:
        return Smoothed(model, recipe)
    columns: dict[str, Tensor] = {}
    fine: list[tuple[str, QConfig]] = []
    notes: dict[str, str] = {}
    for seen in _seen(model, list(settings), batches, forward):
        choice = _choice(model, seen, settings)
        if choice is None:
            continue
        if choice.takes_two_bytes:
            fine += [(glob.escape(name), replace(settings[name], activation_bits=16)) for name in seen.layers]
        elif choice.columns is None:
            continue
        if choice.columns is not None:
            columns.update(dict.fromkeys(seen.layers, choice.columns))
        notes.update(dict.fromkeys(seen.layers, str(choice)))
    if fine:
        rules: list[Any] = [*fine, *recipe.rules]
        recipe = Recipe(rules, default=recipe.default, backend=recipe.backend)
    scaled = scale_inputs(copy_model(model), columns) if columns else model
    return Smoothed(scaled, recipe, notes)


def _layers(model: nn.Module, recipe: Recipe) -> Iterator[tuple[str, QConfig]]:
    """The layers that may be changed, with their settings."""
    owners = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    for name, module in model.named_modules():
        plain = type(module) in (nn.Linear, *CONVOLUTIONS) and base_layer(module) is type(module)
        if not plain or module._forward_hooks or module._forward_pre_hooks:
            continue
        weight = module._parameters["weight"]
        if weight is None or weight.dtype != torch.float32 or owners[id(weight)] > 1 or not weight.numel():
            continue
        qconfig, _ = recipe.resolve(name, module)
        if qconfig is None or qconfig.per_call:
            continue
        if qconfig.activation_bits == 16 and not isinstance(module, nn.Linear):  # whose input is never scaled
            continue
        if bool(torch.isfinite(weight).all()):
            yield name, qconfig


def _seen(model: nn.Module, names: list[str], batches: list[Any] | First, forward: Forward | None) -> list[Seen]:
    """The inputs of the layers for some batches, which leave no trace on model, data, generators or globals."""
    probe = copy_model(model)
    with evaluating(probe), _put_back(probe), watching(probe, names, len(batches)) as watch:
        try:
            caller = Caller(model)
            for batch in batches:
                if any(isinstance(leaf, Iterator) for leaf in leaves(batch)):
                    return []  # which can be read once, by calibration
                batch = copied_together(batch)
                if forward is not None:
                    forward(probe, batch)
                    continue
                args, kwargs = caller.arguments(batch)
                probe(*args, **kwargs)
        except Exception:  # calibration meets it too, and says at which batch
            return []
        for seen in watch.groups():
            if any(_is_written(model.get_submodule(name), probe.get_submodule(name)) for name in seen.layers):
                seen.apart = True
    return watch.groups()


@contextlib.contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Restore what forwards change on a model and outside of it."""
    outside = Outside()
    for module in model.modules():
        outside.enter(module, module.forward)
    before = Snapshot(model, outside)
    try:
        yield
    finally:
        before.put_back()


def _is_written(layer: nn.Module, probed: nn.Module) -> bool:
    """Whether a forward has changed a layer's weight: a write to the weight of a scaled layer would be lost."""
    before, now = layer._parameters["weight"], probed._parameters.get("weight")
    return before is None or now is None or not torch.equal(before, now)


def _choice(model: nn.Module, seen: Seen, settings: dict[str, QConfig]) -> Choice | None:
    """The choice for one group; None where its layers have different settings or inputs, or none that are finite."""
    configs = {replace(settings[name], activation_bits=AS_IT_IS) for name in seen.layers}
    ends = torch.stack([seen.low, seen.high])
    if seen.apart or len(configs) > 1 or not seen.kept or not bool(torch.isfinite(ends).all()) or not bool(ends.any()):
        return None
    qconfig = min((settings[name] for name in seen.layers), key=lambda one: one.activation_bits == 16)
    modules: list[Any] = [model.get_submodule(name) for name in seen.layers]
    weights = [module.weight.detach() for module in modules]
    if isinstance(modules[0], nn.Linear):
        return choose(torch.cat(seen.kept), seen.low, seen.high, weights, qconfig)
    [module] = modules
    same = all(one.shape == seen.kept[0].shape for one in seen.kept)
    x = torch.cat(seen.kept) if same else seen.kept[0]
    return choose_bits(
        lambda x, weight: module._conv_forward(x, weight, None), x, seen.low, seen.high, weights[0], qconfig
    )

"""Integers of dynamic linear layers by what they do to the layers' outputs, from data (equation R1, `quant/rounding/`).

Needs no capture: hooks on the float layers see their inputs. As with GPTQ's own models, a group of layers (those of one
block, by their names) is solved at a time, and runs on its rounded weights while the inputs of later ones are looked
at. Activations are rounded per row when they come and lose little, so in this they stay float.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from quant.calibrate import CalibrationError, DataError
from quant.calibrate.batches import Caller, check_batches, count_samples, describe
from quant.calibrate.driver import Forward, evaluating
from quant.dynamic_decisions import Decision
from quant.kernels import narrow
from quant.nn import Linear
from quant.recipe import RecipeError
from quant.rounding import least_error_scale
from quant.rounding.checkpoint import Checkpoint, identity
from quant.rounding.gptq import DAMPING
from quant.rounding.methods import METHODS, NEAREST, choose_integers
from quant.runtime.layers.weighted import QWeight

FEW_BITS = 4
"""The most bits of weights whose scales are chosen by the layer's output."""

SAMPLES = 256
"""Samples that are used by default."""

WHO = "quant.quantize_dynamic"


def check_rounding(rounding: str, batches: Any, checkpoint: Any) -> None:
    """Raise ValueError or TypeError for arguments that do not go together."""
    if rounding not in (NEAREST, *METHODS):
        legal = ", ".join(map(repr, (NEAREST, *METHODS)))
        raise ValueError(f"{WHO}: rounding is {rounding!r}, expected one of {legal}")
    if batches is not None:
        check_batches(batches, WHO)
    elif rounding != NEAREST:
        raise ValueError(f"{WHO}: rounding={rounding!r} needs batches=, some hundred samples of real inputs")
    if checkpoint is not None and rounding == NEAREST:
        raise ValueError(f"{WHO}: checkpoint keeps what rounding='gptq' or 'adaround' chose; 'nearest' chooses nothing")


def round_by_data(
    model: nn.Module,
    decisions: Sequence[Decision],
    batches: Iterable[Any],
    method: str,
    *,
    forward: Forward | None,
    samples: int,
    checkpoint: str | os.PathLike[str] | None,
    progress: bool,
) -> None:
    """Give the int8 linear layers of `decisions` integers by a method; `model` still has the float ones.

    Raises:
        DataError: there are no batches.
        CalibrationError: the model failed on one.
        CheckpointError: as for `quant.learn_rounding`.
    """
    layers = [one for one in decisions if isinstance(one.replacement, Linear) and one.tied_to is None]
    if not layers:
        return
    chosen = _taken(batches, samples)
    path = None if checkpoint is None else Path(checkpoint)
    kept = Checkpoint(path, {} if path is None else identity(model, chosen, {"method": method, "samples": samples}))
    groups = [list(group) for _, group in itertools.groupby(layers, lambda one: _block(one.names[0]))]
    if method == NEAREST:
        groups = [layers]
    run = forward or _by_rule(model)
    weights = {id(one): _weight(one.module) for one in layers}
    bar = tqdm(total=len(layers), desc=f"rounding ({method})", unit="layer", file=sys.stderr, disable=not progress)
    with contextlib.ExitStack() as undo, bar, evaluating(model), torch.no_grad():
        for one in layers:
            before = weights[id(one)].detach().clone()
            undo.callback(weights[id(one)].data.copy_, before)
        for group in groups:
            fresh = [one for one in group if one.names[0] not in kept.done]
            moments = _moments(model, fresh, chosen, run) if fresh else {}
            for one in group:
                name = one.names[0]
                if one in fresh and moments[id(one)].rows:
                    kept.done[name] = _rounded(one, moments[id(one)], method)
                _take(one, weights[id(one)], *kept.done.get(name, (None, [])))
                bar.update()
            if fresh:
                kept.write()


def _block(name: str) -> str:
    """The block that a layer belongs to: its name up to the first number, so that each layer of a stack is one."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: place + 1])


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


class _Seen:
    """The second moments of what a layer reads."""

    def __init__(self) -> None:
        self.rows = 0
        self.total: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        rows = args[0].detach().to(torch.float32).reshape(-1, args[0].shape[-1])
        sound = torch.isfinite(rows).all(1)
        rows = rows if bool(sound.all()) else rows[sound]
        product = (rows.t() @ rows).double()
        self.total = product if self.total is None else self.total + product
        self.rows += len(rows)

    def hessian(self) -> Tensor:
        """float32 (K, K)."""
        assert self.total is not None
        return (self.total / self.rows).to(torch.float32)


def _moments(model: nn.Module, group: Sequence[Decision], batches: Sequence[Any], run: Forward) -> dict[int, _Seen]:
    seen = {id(one): _Seen() for one in group}
    hooks = [one.module.register_forward_pre_hook(seen[id(one)]) for one in group]
    try:
        for index, batch in enumerate(batches):
            try:
                run(model, batch)
            except Exception as error:
                what = f"{WHO}: batch {index}, {describe(batch)}: {type(error).__name__}: {error}"
                raise CalibrationError(what) from error
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _rounded(one: Decision, seen: _Seen, method: str) -> tuple[QWeight, list[float]]:
    """The integers of a layer, and its error with rounding to nearest and with these."""
    layer, qconfig = one.replacement, one.qconfig
    assert isinstance(layer, Linear)
    assert qconfig is not None
    if qconfig.group_size is not None:
        raise RecipeError(
            f"{WHO}: rounding={method!r} with group_size={qconfig.group_size}, and {one.where} would keep one "
            "scale per output; leave one of the two out"
        )
    rows = _weight(one.module).detach().to(torch.float32)
    rows = rows if rows.shape == (layer.out_features, layer.in_features) else rows.t()  # Conv1D's lies the other way
    hessian = seen.hessian()
    if layer.columns is not None:
        rows, hessian = rows / layer.columns, hessian * layer.columns * layer.columns[:, None]
    bits, scale = qconfig.weight_bits, layer.scale
    if bits <= FEW_BITS:
        flat = rows if qconfig.per_channel else rows.reshape(1, -1)
        importance = hessian.diagonal().repeat(flat.shape[1] // rows.shape[1])
        scale = least_error_scale(flat, importance, bits=bits).expand(len(rows)).contiguous()
    damped = hessian + torch.eye(len(hessian)) * (DAMPING * hessian.diagonal().mean()).clamp(min=1e-12)
    choice = choose_integers(method, rows, scale, damped, bits=bits)
    return QWeight(choice.q.to(torch.int8).contiguous(), scale, None), [choice.nearest, choice.error]


def _take(one: Decision, weight: Tensor, q: QWeight | None, errors: list[float]) -> None:
    """Give a layer its integers, and its float module the weight that they stand for."""
    if q is None:
        one.rounding = "rounded to nearest: the batches do not call it"
        return
    layer = one.replacement
    assert isinstance(layer, Linear)
    bits = one.qconfig.weight_bits if one.qconfig is not None else 8
    is_narrow = narrow.is_narrow(layer.q_weight)
    layer.q_weight.copy_(narrow.pack(q.q_weight + (1 << (bits - 1)), bits) if is_narrow else q.q_weight)
    layer.scale.copy_(q.scale)
    real = layer.weight.detach()
    weight.data.copy_(real if real.shape == weight.shape else real.t())
    nearest, chosen = errors
    if nearest > chosen:
        one.rounding = f"rounded by its outputs, with {chosen / nearest:.2f} of the error of rounding to nearest"


def _taken(batches: Iterable[Any], samples: int) -> list[Any]:
    chosen, counted = [], 0
    for batch in batches:
        if count_samples(batch):
            chosen.append(batch)
            counted += count_samples(batch)
        if counted >= samples:
            break
    if not chosen:
        raise DataError(f"{WHO}: there are no batches; give some hundred samples of real inputs")
    return chosen


def _by_rule(model: nn.Module) -> Forward:
    caller = Caller(model)

    def forward(called: nn.Module, batch: Any) -> Any:
        args, kwargs = caller.arguments(batch)
        return called(*args, **kwargs)

    return forward

"""Integers of dynamic linear layers by what they do to the layers' outputs, from data (equation R1, `quant/rounding/`).

Needs no capture: hooks on the float layers see their inputs. As with GPTQ's own models, a group of layers (those of one
block, by their names) is solved at a time, and runs on its rounded weights while the inputs of later ones are looked
at. Activations are rounded per row when they come and lose little, so in this they stay float.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate import CalibrationError, DataError
from quant.calibrate.batches import Caller, check_batches, count_samples, describe
from quant.calibrate.checkpoint import check_folder
from quant.calibrate.driver import Forward, evaluating
from quant.dynamic_decisions import Decision
from quant.kernels import QScheme, narrow, weight_scheme
from quant.kernels.progress import progress_of
from quant.kernels.scheme import weight_scale
from quant.nn import Linear
from quant.nn.linear import Conv1D
from quant.recipe import QConfig
from quant.rounding.checkpoint import Checkpoint, identity
from quant.rounding.descent import output_error
from quant.rounding.gptq import DAMPING
from quant.rounding.methods import METHODS, NEAREST, choose_in_groups, choose_integers
from quant.rounding.scales import FEW_BITS, scale_by_output
from quant.runtime.layers.weighted import QWeight

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
    check_folder(checkpoint, WHO)


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
    bar = progress_of(f"rounding ({method})", unit="layer", total=len(layers), shown=progress)
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
                if name in kept.done:
                    _take(one, weights[id(one)], *kept.done[name])
                else:
                    why = "no finite values came to it" if moments[id(one)].calls else "the batches do not call it"
                    one.rounding = f"rounded to nearest: {why}"
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
    """The second moments of what a layer reads, in `rows` finite rows of some `calls`."""

    def __init__(self) -> None:
        self.rows = self.calls = 0
        self.total: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before the layer's forward."""
        x = next(iter((*args, *kwargs.values())))
        rows = x.detach().to(torch.float32).reshape(-1, x.shape[-1])
        self.calls += 1
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
    hooks = [one.module.register_forward_pre_hook(seen[id(one)], with_kwargs=True) for one in group]
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
    """The tensors of a layer, and its error with rounding to nearest and with these."""
    layer, qconfig = one.replacement, one.qconfig
    assert isinstance(layer, Linear)
    assert qconfig is not None
    rows = _weight(one.module).detach().to(torch.float32)
    # Conv1D keeps its weight the other way round.
    rows = rows if not isinstance(layer, Conv1D) else rows.t()
    hessian, bits = seen.hessian(), qconfig.weight_bits
    if layer.columns is not None:
        rows, hessian = rows / layer.columns, hessian * layer.columns * layer.columns[:, None]
    damped = hessian + torch.eye(len(hessian)) * (DAMPING * hessian.diagonal().mean()).clamp(min=1e-12)
    if qconfig.group_size is not None:
        return _in_groups(layer, rows, damped, qconfig, method)
    scale = weight_scale(rows if qconfig.per_channel else rows.reshape(1, -1), bits=bits).expand(len(rows)).contiguous()
    if bits <= FEW_BITS:
        scale = scale_by_output(rows, hessian, bits=bits, per_row=qconfig.per_channel)
    choice = choose_integers(method, rows, scale, damped, bits=bits)
    q_weight = choice.q.to(torch.int8).contiguous()
    if narrow.is_narrow(layer.q_weight):
        q_weight = narrow.pack(q_weight + 2 ** (bits - 1), bits)
    return QWeight(q_weight, scale, None), [choice.nearest, choice.error]


def _in_groups(
    layer: Linear, rows: Tensor, hessian: Tensor, qconfig: QConfig, method: str
) -> tuple[QWeight, list[float]]:
    """As `_rounded`, of a layer with a scale for each group of inputs."""
    assert qconfig.group_size is not None
    bits, before = qconfig.weight_bits, QWeight(layer.q_weight, layer.scale, None)
    nearest = float(output_error(rows, narrow.dequantize(layer.q_weight, layer.scale), hessian).sum())
    if method == NEAREST:
        return before, [nearest, nearest]
    scheme = weight_scheme(bits) if qconfig.weight_symmetric else QScheme(torch.uint8, 0, 2**bits - 1, symmetric=False)
    q, scale, zero = choose_in_groups(method, rows, hessian, scheme, qconfig.group_size, bits=bits)
    middle = 2 ** (bits - 1) if qconfig.weight_symmetric else 0
    own_zero = None if qconfig.weight_symmetric else zero
    q_weight, stored = narrow.store(q.to(torch.int16) + middle, scale, own_zero, bits)
    error = float(output_error(rows, narrow.dequantize(q_weight, stored), hessian).sum())
    return (QWeight(q_weight, stored, None), [nearest, error]) if error < nearest else (before, [nearest, nearest])


def _take(one: Decision, weight: Tensor, q: QWeight, errors: list[float]) -> None:
    """Give a layer its integers, and its float module the weight that they stand for."""
    layer = one.replacement
    assert isinstance(layer, Linear)
    layer.q_weight.copy_(q.q_weight)
    layer.scale.copy_(q.scale)
    real = layer.weight.detach()
    weight.data.copy_(real)
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

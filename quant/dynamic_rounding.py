"""Integers of dynamic layers by what they do to the layers' outputs, from data (equation R1, `quant/rounding/`): of
linear layers, and of recurrent ones, by their inputs and by the states that their steps give.

Needs no capture: hooks on the float layers see their inputs. As with GPTQ's own models, a group of layers (those of one
block, by their names) is solved at a time, and runs on its rounded weights while the inputs of later ones are looked
at. Activations are rounded per row when they come and lose little, so in this they stay float.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from quant.nn import Linear
from quant.nn.base import chosen_scale
from quant.nn.linear import Conv1D
from quant.nn.recurrent import Direction, RecurrentCell, RecurrentSequence
from quant.recipe import QConfig
from quant.recurrent_layers import Tensors, directions_of, tensors_of
from quant.rounding.block_runs import BlockRuns
from quant.rounding.checkpoint import Checkpoint, identity
from quant.rounding.descent import output_error
from quant.rounding.gptq import DAMPING
from quant.rounding.methods import METHODS, NEAREST, choose_in_groups, choose_integers
from quant.rounding.scales import FEW_BITS, scale_by_output
from quant.runtime.layers.weighted import QWeight
from quant.runtime.names import full_name

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
    """Give the int8 linear and recurrent layers of `decisions` integers by a method; `model` has the float ones.

    Raises:
        DataError: there are no batches.
        CalibrationError: the model failed on one.
        CheckpointError: as for `quant.learn_rounding`.
    """
    parts = [part for one in decisions if one.tied_to is None for part in _parts(one)]
    if not parts:
        return
    chosen = _taken(batches, samples)
    path = None if checkpoint is None else Path(checkpoint)
    kept = Checkpoint(path, {} if path is None else identity(model, chosen, {"method": method, "samples": samples}))
    groups = [list(group) for _, group in itertools.groupby(parts, lambda one: _block(one.decision.names[0]))]
    if method == NEAREST:
        groups = [parts]
    runs = _runs(model, groups, chosen, forward or _by_rule(model))
    bar = progress_of(f"rounding ({method})", unit="weight", total=len(parts), shown=progress)
    with contextlib.ExitStack() as undo, bar, evaluating(model), torch.no_grad():
        for one in parts:
            undo.callback(one.real.data.copy_, one.real.detach().clone())
        for group in groups:
            fresh = [one for one in group if one.name not in kept.done]
            moments = _moments(fresh, runs) if fresh else {}
            for one in group:
                if one in fresh and moments[one.name].rows:
                    kept.done[one.name] = _rounded(one, moments[one.name], method)
                if one.name in kept.done:
                    kept.check_fits(one.name, q_weight=one.held("q_weight"), scale=one.held("scale"))
                    one.take(kept.done[one.name][0])
                bar.update()
            runs.finish(_block(group[0].decision.names[0]))
            if fresh:
                kept.write()
            for decision, own in itertools.groupby(group, lambda one: one.decision):
                decision.rounding = _said(list(own), kept, moments)


@dataclass(eq=False)
class _Part:
    """A weight of a linear layer, or of a recurrent one.

    Attributes:
        decision: of its layer.
        name: of the weight's layer, or of the weight where the layer has several.
        real: the float parameter.
        layer: the int8 module that holds the integers.
        suffix: of the names of its buffers.
        reads_states: whether it is multiplied with the states of a recurrent layer, not with its input.
    """

    decision: Decision
    name: str
    real: Tensor
    layer: Linear | Direction
    suffix: str = ""
    reads_states: bool = False

    def held(self, name: str) -> Any:
        """Its q_weight, scale or columns; states have no columns."""
        return getattr(self.layer, name + self.suffix, None)

    def rows(self) -> Tensor:
        """The float weight, (out, in)."""
        real = self.real.detach().to(torch.float32)
        return real.t() if isinstance(self.layer, Conv1D) else real  # which keeps its weight the other way round

    def take(self, q: QWeight) -> None:
        """Take integers, and let the float layer have the weight that they stand for."""
        self.held("q_weight").copy_(q.q_weight)
        self.held("scale").copy_(q.scale)
        stands_for = (
            self.layer.weight if isinstance(self.layer, Linear) else self.layer.float_tensor(f"weight{self.suffix}")
        )
        assert stands_for is not None
        self.real.data.copy_(stands_for)


def _parts(one: Decision) -> list[_Part]:
    """The weights of a layer that are rounded by data: no projection of a state, whose inputs stay within the kernel,
    and no input projection in two int8 terms, which has nothing to gain."""
    layer, name = one.replacement, one.names[0]
    if isinstance(layer, Linear):
        return [_Part(one, name, _weight(one.module), layer)]
    places: list[tuple[str, nn.Module, Tensors]]
    if isinstance(layer, RecurrentCell):
        places = [("", layer.direction, tensors_of(one.module, 0, False))]
    elif isinstance(layer, RecurrentSequence):
        places = [
            (f"_l{depth}{'_reverse' * reverse}", direction, tensors_of(one.module, depth, reverse))
            for direction, (depth, reverse) in zip(layer.directions, directions_of(one.module), strict=True)
        ]
    else:
        return []
    parts = []
    for end, direction, tensors in places:
        assert isinstance(direction, Direction)
        if direction.terms == 1:
            parts.append(_Part(one, full_name(name, f"weight_ih{end}"), tensors.weight_ih, direction, "_ih"))
        parts.append(
            _Part(one, full_name(name, f"weight_hh{end}"), tensors.weight_hh, direction, "_hh", reads_states=True)
        )
    return parts


def _said(parts: Sequence[_Part], kept: Checkpoint, moments: dict[str, _Seen]) -> str:
    """For the report: what rounding by data did to a layer."""
    done = [kept.done[one.name][1] for one in parts if one.name in kept.done]
    if not done:
        return "rounded to nearest: " + (
            "no finite values came to it"
            if any(moments[one.name].calls for one in parts)
            else "the batches do not call it"
        )
    nearest, chosen = (sum(numbers[place] for numbers in done) for place in (0, 1))
    if nearest <= chosen:
        return ""
    return f"rounded by its outputs, with {chosen / nearest:.2f} of the error of rounding to nearest"


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
        self.add(next(iter((*args, *kwargs.values()))))

    def states(self, module: nn.Module, args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        """A hook behind a recurrent direction: of the states that its steps give, and so read."""
        self.add(outputs[0])

    def add(self, x: Tensor) -> None:
        """Add the rows of (..., K)."""
        rows = x.detach().to(torch.float32).reshape(-1, x.shape[-1])
        self.calls += 1
        sound = torch.isfinite(rows).all(1)
        rows = rows if bool(sound.all()) else rows[sound]
        product = (rows.t() @ rows).double()
        self.total = product if self.total is None else self.total + product
        self.rows += len(rows)

    def equals(self, other: _Seen) -> bool:
        """Whether both have seen the same."""
        if self.total is None or other.total is None:
            return self.total is other.total
        return (self.calls, self.rows) == (other.calls, other.rows) and torch.equal(self.total, other.total)

    def hessian(self) -> Tensor:
        """float32 (K, K)."""
        assert self.total is not None
        return (self.total / self.rows).to(torch.float32)


def _runs(model: nn.Module, groups: Sequence[Sequence[_Part]], batches: Sequence[Any], run: Forward) -> BlockRuns:
    def on(index: int) -> None:
        try:
            run(model, batches[index])
        except Exception as error:
            what = f"{WHO}: batch {index}, {describe(batches[index])}: {type(error).__name__}: {error}"
            raise CalibrationError(what) from error

    blocks = list(dict.fromkeys(_block(group[0].decision.names[0]) for group in groups))
    return BlockRuns(model, blocks, on, len(batches))


def _moments(group: Sequence[_Part], runs: BlockRuns) -> dict[str, _Seen]:
    """The second moments of what weights read, by name.

    By short runs where the first batch gives the same by one as by all blocks before it.
    """
    block = _block(group[0].decision.names[0])
    if runs.may_begin_before(block):
        with _watching(group) as expected:
            runs.one_whole(block)
        with _watching(group) as seen, contextlib.closing(runs.short(block)) as behind, contextlib.suppress(Exception):
            if next(behind) == 0 and all(one.equals(expected[name]) for name, one in seen.items()):
                for _ in behind:
                    pass
                return seen
    with _watching(group) as seen:
        runs.whole(block)
    return seen


@contextlib.contextmanager
def _watching(group: Sequence[_Part]) -> Iterator[dict[str, _Seen]]:
    """Take the moments of what weights read in this context; inner layers of a recurrent one read what int8 ones before
    them give."""
    seen = {one.name: _Seen() for one in group}
    hooks = []
    for one in group:
        read_by = one.decision.module if isinstance(one.layer, Linear) else one.layer
        if one.reads_states:
            hooks.append(read_by.register_forward_hook(seen[one.name].states))
        else:
            hooks.append(read_by.register_forward_pre_hook(seen[one.name], with_kwargs=True))
    for decision in {id(one.decision): one.decision for one in group}.values():
        if not isinstance(decision.replacement, Linear):
            hooks.append(decision.module.register_forward_pre_hook(_calling(decision), with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _calling(decision: Decision) -> Callable[..., None]:
    """A hook of a float layer that calls the int8 one with what it gets."""
    layer = decision.replacement
    assert layer is not None

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with evaluating(layer):
            layer.forward(*args, **kwargs)  # hooks are the float layer's own, this one among them

    return call


def _rounded(one: _Part, seen: _Seen, method: str) -> tuple[QWeight, list[float]]:
    """The tensors of a weight, and its error with rounding to nearest and with these."""
    qconfig = one.decision.qconfig
    assert qconfig is not None
    rows, columns = one.rows(), one.held("columns")
    hessian, bits = seen.hessian(), qconfig.weight_bits
    if columns is not None:
        rows, hessian = rows / columns, hessian * columns * columns[:, None]
    damped = hessian + torch.eye(len(hessian)) * (DAMPING * hessian.diagonal().mean()).clamp(min=1e-12)
    if qconfig.group_size is not None:
        return _in_groups(one, rows, damped, qconfig, method)
    scale = chosen_scale(rows, qconfig, compares=True)
    if bits <= FEW_BITS and not qconfig.clips_weights:
        scale = scale_by_output(rows, hessian, bits=bits, per_row=qconfig.per_channel)
    choice = choose_integers(method, rows, scale, damped, bits=bits)
    q_weight = choice.q.to(torch.int8).contiguous()
    if narrow.is_narrow(one.held("q_weight")):
        q_weight = narrow.pack(q_weight + 2 ** (bits - 1), bits)
    return QWeight(q_weight, scale, None), [choice.nearest, choice.error]


def _in_groups(one: _Part, rows: Tensor, hessian: Tensor, qconfig: QConfig, method: str) -> tuple[QWeight, list[float]]:
    """As `_rounded`, of a layer with a scale for each group of inputs."""
    assert qconfig.group_size is not None
    bits, before = qconfig.weight_bits, QWeight(one.held("q_weight").clone(), one.held("scale").clone(), None)
    nearest = float(output_error(rows, narrow.dequantize(before.q_weight, before.scale), hessian).sum())
    if method == NEAREST:
        return before, [nearest, nearest]
    scheme = weight_scheme(bits) if qconfig.weight_symmetric else QScheme(torch.uint8, 0, 2**bits - 1, symmetric=False)
    q, scale, zero = choose_in_groups(method, rows, hessian, scheme, qconfig.group_size, bits=bits)
    middle = 2 ** (bits - 1) if qconfig.weight_symmetric else 0
    own_zero = None if qconfig.weight_symmetric else zero
    q_weight, stored = narrow.store(q.to(torch.int16) + middle, scale, own_zero, bits)
    error = float(output_error(rows, narrow.dequantize(q_weight, stored), hessian).sum())
    return (QWeight(q_weight, stored, None), [nearest, error]) if error < nearest else (before, [nearest, nearest])


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

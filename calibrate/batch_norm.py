"""`reestimate_batch_norm`: the statistics of batch norms once more, of what the layers before them give now.

Training for int8 leaves running averages that lag behind: of weights that went to and fro between two integers (Nagel
et al. 2022, arXiv:2203.11086, section 5.1), of a model that is the average of others, or of norms that were frozen
early. Here the statistics are those of all calls together: per channel, with m_i and v_i the mean and variance of call
i of the norm, and n_i its rows (of a batch that calls it once, the batch's samples),

    mean = sum_i n_i m_i / sum_i n_i,    variance = sum_i n_i (v_i + m_i**2) / sum_i n_i - mean**2

v_i is what a call divides by, the mean square around its own m_i. A running variance is k / (k - 1) of that, of k
values per channel: added up with the spread of the m_i it would count that spread twice, half too much for batches of
two rows. The factor of all values together comes last, so that one batch gives torch's running variance. Of a norm that
is folded in training k is not known, and v_i is the running variance.

A norm that one batch calls several times normalises all these calls by one mean and variance, so those are of the
mixture. Training's running averages leave out how far the means of the calls lie apart.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from quant.calibrate.batches import check_batches, check_limit, count_samples, describe
from quant.calibrate.checkpoint import observers_of
from quant.calibrate.driver import Forward, by_rule, evaluating, total_of
from quant.calibrate.errors import CalibrationError
from quant.kernels.progress import progress_of
from torch import Tensor, nn

WHO = "calibrate.reestimate_batch_norm"

FROZEN = "norms_frozen"
"""The switch of a module in training for int8 that keeps its norms at their running statistics."""

Norm = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class BatchNormEstimate:
    """The result of `reestimate_batch_norm`.

    Attributes:
        norms: names of the batch norms whose statistics are new.
        left: of those that the batches did not reach, or whose own `train` keeps them in eval mode; they keep theirs.
        batches, samples: that were taken.
        seconds: that it took.
    """

    norms: tuple[str, ...]
    left: tuple[str, ...]
    batches: int
    samples: int
    seconds: float


@runtime_checkable
class _Freezes(Protocol):
    """A module that trains for int8."""

    def is_on(self, name: str) -> bool: ...

    def switch(self, name: str, on: bool) -> None: ...


@torch.inference_mode(False)
@torch.no_grad()
def reestimate_batch_norm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> BatchNormEstimate:
    """Take the running statistics of a model's batch norms anew, from data; nothing else changes.

    Their count of batches (`num_batches_tracked`) begins again at 0: they are averages of no training any more.

    Of a model from `quant.prepare_qat`, after training and before `quant.convert`: layers are rounded as they will be,
    and ranges stay. Frozen norms get new statistics too, and are frozen again. A float model's are taken in float, as
    before `quant.prepare`.

    Args:
        model: changed in place. It runs in eval mode, but for its batch norms, which normalise by each batch.
        batches: as for `run`: training data as they come in training, some thousand samples in large batches.
        forward: called with (model, batch) where the model is not simply called with its inputs.
        limit: how many batches to take; None for all.
        progress: a bar on standard error, two lines where that is no terminal.

    Raises:
        ValueError: no batch norm with running statistics; `batches` is empty or reaches none of them; a statistic is
            not finite, with the norm's name; one batch uses a norm several times other than by calling the module; or
            the model is from `quant.prepare`, where batch norms are those of the float model. The model is then as it
            was.
        CalibrationError: the model failed on a batch, which the message describes, or called a norm that took no
            statistics of its input. The model is then as it was.
    """
    began = time.perf_counter()
    check_batches(batches, WHO)
    check_limit(limit, WHO)
    norms = _norms(model)
    run = forward or by_rule(model)
    before = {name: _state(norm) for name, norm in norms.items()}
    sums = {name: _Sums() for name in norms}
    batches_taken = samples = 0
    bar = progress_of("batch norms", unit="batch", total=total_of(batches, limit), shown=progress)
    try:
        with bar, evaluating(model), _by_batch(model, norms.values()), _noting_calls(norms, sums) as taking:
            for index, batch in enumerate(itertools.islice(batches, limit)):
                for norm in taking.values():
                    norm.reset_running_stats()
                try:
                    run(model, batch)
                except Exception as error:
                    what = f"{WHO}: batch {index}, {describe(batch)}: {type(error).__name__}: {error}"
                    raise CalibrationError(what) from error
                for name, norm in taking.items():
                    sums[name].add_uncalled(name, norm, count_samples(batch))
                batches_taken, samples = batches_taken + 1, samples + count_samples(batch)
                bar.update()
        new = {name: one.statistics() for name, one in sums.items() if one.samples}
        _check_statistics(new, batches_taken)
    finally:
        for name, norm in norms.items():
            _put(norm, *before[name])
    for name, (mean, variance) in new.items():
        _put(norms[name], mean, variance, torch.zeros_like(before[name][2]))
    left = tuple(name for name in norms if name not in new)
    return BatchNormEstimate(tuple(new), left, batches_taken, samples, time.perf_counter() - began)


class _Sums:
    """Of a norm's statistics, over calls."""

    def __init__(self) -> None:
        self.samples = self.values = 0
        self.mean: Any = 0.0
        self.square: Any = 0.0

    def add_uncalled(self, name: str, norm: Any, samples: int) -> None:
        """Add what the norm's buffers say of a batch that used it without calling the module, as where it is folded.

        Raises:
            ValueError: it was used several times, so that the buffers hold means of several calls' statistics.
        """
        uses = int(norm.num_batches_tracked)
        if uses > 1:
            raise ValueError(
                f"{WHO}: '{name}' is used {uses} times in a batch, in other ways than by calling the module, so that "
                "its statistics are not those of all values together; call the norm itself in forward, or give each "
                "place a norm of its own"
            )
        if uses:
            self.add(norm, samples)

    def add(self, norm: Any, samples: int, values: int = 0) -> None:
        """Add what the norm's buffers say of one call.

        Args:
            values: in the call, per channel; 0 where that is not known, and the variance stays the running one.
        """
        mean, variance = norm.running_mean.double(), norm.running_var.double()
        if values:
            variance = variance * ((values - 1) / values)
        self.samples += samples
        self.values += values
        self.mean = self.mean + samples * mean
        self.square = self.square + samples * (variance + mean.square())

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, float64 (channels,)."""
        mean = self.mean / self.samples
        variance = (self.square / self.samples - mean.square()).clamp(min=0.0)
        return mean, variance * (self.values / (self.values - 1)) if self.values else variance


def _norms(model: nn.Module) -> dict[str, Any]:
    """The batch norms with running statistics, by name.

    Raises:
        ValueError: there are none, or they are not to be changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{WHO}: model is a {type(model).__name__}, expected an nn.Module")
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Norm) and module.running_mean is not None
    }
    if not norms:
        raise ValueError(
            f"{WHO}: {type(model).__name__} has no batch norm with running statistics; in a converted model they are "
            "folded into the layers before them: take them anew before quant.convert"
        )
    if observers_of(model) and not any(FROZEN in module._buffers for module in model.modules()):
        raise ValueError(
            f"{WHO}: {type(model).__name__} is from quant.prepare, and its batch norms are those of the float model, "
            "whose values calibration saw; take them anew before quant.prepare or in a model from quant.prepare_qat, "
            "or correct scales and biases behind rounded layers by quant.learn_rounding"
        )
    return norms


@contextlib.contextmanager
def _noting_calls(norms: dict[str, Any], sums: dict[str, _Sums]) -> Iterator[dict[str, Any]]:
    """Add the statistics of each call of a norm by itself, of which its buffers then know nothing.

    Gives the norms that take statistics: those in training mode, which a norm's own `train` may not let it be in.
    """

    def noting(name: str) -> Any:
        def note(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not int(norm.num_batches_tracked):
                raise ValueError(
                    f"'{name}' was called and took no statistics of its input: its forward, or the model's, keeps it "
                    "in eval mode; let it follow train(), or let its train() keep it in eval mode to leave it out"
                )
            x: Tensor = next(iter((*args, *kwargs.values())))
            sums[name].add(norm, len(x), x.numel() // norm.num_features)
            norm.reset_running_stats()

        return note

    taking = {name: norm for name, norm in norms.items() if norm.training}
    with contextlib.ExitStack() as hooks:
        for name, norm in taking.items():
            hooks.callback(norm.register_forward_hook(noting(name), with_kwargs=True).remove)
        yield taking


@contextlib.contextmanager
def _by_batch(model: nn.Module, norms: Iterable[Any]) -> Iterator[None]:
    """Let norms alone be in training mode, with buffers that hold the mean over the uses since they were reset."""
    every = list(norms)
    settings = [(norm.momentum, norm.track_running_stats) for norm in every]
    frozen = [one for one in model.modules() if FROZEN in one._buffers and isinstance(one, _Freezes)]
    frozen = [one for one in frozen if one.is_on(FROZEN)]
    try:
        for norm in every:
            norm.momentum, norm.track_running_stats = None, True  # False would leave the buffers as they are
            norm.train()
        for one in frozen:
            one.switch(FROZEN, False)
        yield
    finally:
        for norm, (momentum, tracked) in zip(every, settings, strict=True):
            norm.momentum, norm.track_running_stats = momentum, tracked
        for one in frozen:
            one.switch(FROZEN, True)


def _state(norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()


def _put(norm: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    norm.num_batches_tracked.copy_(count)


def _check_statistics(new: dict[str, tuple[Tensor, Tensor]], batches: int) -> None:
    if not batches:
        raise ValueError(f"{WHO}: batches is empty: nothing was seen (a generator can be read only once)")
    if not new:
        raise ValueError(f"{WHO}: the batches reach no batch norm that takes statistics; nothing was changed")
    for name, (mean, variance) in new.items():
        if not bool((torch.isfinite(mean) & torch.isfinite(variance)).all()):
            raise ValueError(f"{WHO}: '{name}' was given NaN or infinite values; nothing was changed")

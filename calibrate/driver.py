"""`run`: run data through a model with observers, with progress, checkpoints and ranks; observers choose the ranges.

The model runs in eval mode under no_grad. Not under inference_mode: a buffer that a model makes inside it (a cache, a
positional table) could never be trained with again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quant.calibrate import checkpoint as checkpoints
from quant.calibrate import distributed
from quant.calibrate.batches import (
    Caller,
    check_batches,
    check_limit,
    count_samples,
    describe,
    fingerprint_of_tensors,
    value_bytes,
)
from quant.calibrate.errors import CalibrationError, CalibrationWarning, CheckpointError, listed
from quant.calibrate.report import suspicions, unseen
from quant.kernels.progress import progress_of
from quant.observers import Observer
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]
"""(model, batch) -> a result that is not used."""

CHECKPOINT_SECONDS = 10.0
"""Seconds between two checkpoints. Writing one of 100 histograms takes about 20 ms."""


@dataclass(frozen=True)
class Calibration:
    """The result of `run`. Under torch.distributed, batches and samples are those of all ranks.

    Attributes:
        batches, samples: seen, those before a resumption included.
        resumed: batches that a checkpoint already covers, on this rank.
        seconds: that this call took.
        warnings: the text of every warning on this rank, and what the extremes of values show to be suspicious (the
            table of `calibrate.ranges` shows clipping too); Python warns of that once, and only where every input
            always has one value.
    """

    batches: int
    samples: int
    resumed: int
    seconds: float
    warnings: tuple[str, ...]


@torch.inference_mode(False)
def run(
    prepared: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    limit: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: float = CHECKPOINT_SECONDS,
) -> Calibration:
    """Run data through `prepared`, whose observers collect statistics.

    Args:
        prepared: any module with quant.observers.Observer modules in it, as `quant.prepare` returns. Its observers go
            on from what they have seen. Its modules' `training` flags are as before afterwards, also after an error.
        batches: tensors, tuples or dicts, from any iterable; of an (input, label) pair the input is used. batches.py
            has the rule. Under torch.distributed each rank gives its own shard, which may be empty; every rank must
            call, and at the end all hold the same statistics: those of all shards.
        forward: runs the model on one batch instead of that rule, as in `lambda model, batch: model(batch["x"])`.
        limit: how many batches to take (on each rank); None for all.
        progress: a bar on standard error, with rate and remaining time, or a line at the start and one at the end
            where that is no terminal; on rank 0.
        checkpoint: a file to write from time to time and, if it is there, to go on from: the batches it has seen are
            read and not run, and the statistics end as they would have in one run, bit for bit. So `batches` must be
            the same in the same order, which is checked (of tensors and arrays a part of the values, texts and numbers
            whole, of other objects the class). With several ranks each has a file, named after this one.
        checkpoint_every: seconds between two checkpoints; 0 writes one after each batch.

    Raises:
        CalibrationError: the model failed on a batch, which the message describes; or another rank failed.
        CheckpointError: the file is damaged or belongs to something else. Nothing was changed.
        TypeError, ValueError: an argument; `batches` is empty (on all ranks); `prepared` has no observers.
    """
    _check(prepared, batches, limit)
    checkpoints.check_folder(checkpoint, "calibrate.run")
    began = time.perf_counter()
    path = None if checkpoint is None else _path_of_rank(Path(checkpoint))
    this = _Run(prepared, forward or by_rule(prepared), path, checkpoint_every)
    if distributed.world()[1] == 1:
        this.drive(batches, limit, progress)
        counted, samples = this.batches, this.samples
    else:
        counted, samples = _drive_ranks(this, batches, limit, progress)
    if counted == 0:
        raise ValueError("calibrate.run: batches is empty: nothing was observed (a generator can be read only once)")
    this.warn_of_unseen()
    this.note_suspicions()
    return Calibration(counted, samples, this.resumed, time.perf_counter() - began, tuple(this.warnings))


class _Run:
    """One call of `run` on one rank: the counters, and whether they and the observers agree."""

    def __init__(self, prepared: nn.Module, forward: Forward, path: Path | None, every: float) -> None:
        self.prepared, self.forward, self.path, self.every = prepared, forward, path, every
        self.observers = checkpoints.observers_of(prepared)
        self.identity = checkpoints.identity(prepared)
        self.batches = self.samples = self.resumed = 0
        self.warnings: list[str] = []
        self._data, self._values = hashlib.sha256(), hashlib.sha256()
        self._written_at = 0.0
        self._warned: set[str] = set()
        self._not_finite = _not_finite(self.observers)
        # False while a batch is under way, or skipped batches wait for their statistics: then nothing may be saved.
        self._consistent = True

    def drive(self, batches: Iterable[Any], limit: int | None, progress: bool) -> None:
        saved = self._open_checkpoint(limit)
        done = saved.progress.batches if saved else 0
        self._consistent = done == 0
        shown = progress and distributed.world()[0] == 0
        bar = progress_of("calibrating", unit="batch", total=total_of(batches, limit), shown=shown, initial=done)
        try:
            with bar, evaluating(self.prepared):
                for batch in itertools.islice(_read(batches), limit):
                    if saved is not None and self.batches < done:
                        self._skip(batch, saved)
                        bar.unpause()  # the time it took says nothing about the rate
                    else:
                        self._feed(batch)
                        bar.update()
                        self._save(final=False)
            if self.batches < done:
                raise CheckpointError(f"{self.path} has seen {done} batches, and there are only {self.batches} now")
            self._save(final=True)
        except BaseException:
            if self._consistent:
                with contextlib.suppress(OSError):
                    self._save(final=True)
            raise

    def warn_of_unseen(self) -> None:
        names = unseen(self.observers)
        if names:
            self._warn(f"calibrate.run: {len(names)} observers saw no finite value: {', '.join(names)}")

    def note_suspicions(self) -> None:
        found = suspicions(self.observers)
        for one in found:
            text = f"calibrate.run: layer {one.layer!r}: {one.text}"
            if text not in self.warnings:
                self.warnings.append(text)
        grave = [one for one in found if one.grave]
        if grave:
            layers = listed(list(dict.fromkeys(one.layer for one in grave)))
            text = f"calibrate.run: every input always has one value, and no range can be right by that: {layers}"
            warnings.warn(f"{text}; give data like the real data", CalibrationWarning, stacklevel=4)

    def _feed(self, batch: Any) -> None:
        index = self.batches
        self._consistent = False
        try:
            with torch.no_grad():
                if self.path is not None:
                    self._note(batch)
                self.forward(self.prepared, batch)
        except Exception as error:
            doubts = "; ".join(["", *self.forward.doubts()]) if isinstance(self.forward, _ByRule) else ""
            raise CalibrationError(
                f"calibrate.run: batch {index}, {describe(batch)}: {type(error).__name__}: {error}{doubts}"
            ) from error
        self.samples += count_samples(batch)
        self.batches += 1
        self._consistent = True
        self._warn_of_not_finite(index)
        if isinstance(self.forward, _ByRule):
            for doubt in self.forward.doubts():
                self._warn(f"calibrate.run: {doubt}")

    def _note(self, batch: Any) -> None:
        """Take a batch into the digests, by which a checkpoint knows the data."""
        self._data.update(fingerprint_of_tensors(batch))
        self._values.update(value_bytes(batch))

    def _skip(self, batch: Any, saved: checkpoints.Saved) -> None:
        self._consistent = False
        self._note(batch)
        self.batches += 1
        if self.batches < saved.progress.batches:
            return
        values = saved.progress.values
        if self._data.hexdigest() != saved.progress.data or values not in (None, self._values.hexdigest()):
            raise CheckpointError(
                f"{self.path} has seen other batches, or in another order, than the first {self.batches} of these: "
                "give the same without shuffling (or shuffled with the same seed), or delete the file to begin anew"
            )
        saved.restore(self.observers)
        self.samples, self.resumed = saved.progress.samples, self.batches
        self.warnings += [text for text in saved.progress.warnings if text not in self.warnings]
        self._not_finite = _not_finite(self.observers)
        self._consistent = True

    def _open_checkpoint(self, limit: int | None) -> checkpoints.Saved | None:
        if self.path is None:
            return None
        if not self.path.exists():
            self._save(final=True)  # known before the work rather than after, that the file can be written
            return None
        saved = checkpoints.read(self.path, self.observers, self.identity)
        if limit is not None and saved.progress.batches > limit:
            raise CheckpointError(f"{self.path} has seen {saved.progress.batches} batches, more than limit={limit}")
        return saved

    def _save(self, *, final: bool) -> None:
        if self.path is None or not (final or time.monotonic() - self._written_at >= self.every):
            return
        data, values = self._data.hexdigest(), self._values.hexdigest()
        progress = checkpoints.Progress(self.batches, self.samples, data, tuple(self.warnings), values)
        # A forward may write to buffers; who goes on in the same process has what it wrote.
        buffers = sorted({*self.identity["buffers"], checkpoints.digest_of_buffers(self.prepared)})
        checkpoints.write(self.path, self.observers, {**self.identity, "buffers": buffers}, progress)
        self._written_at = time.monotonic()

    def _warn_of_not_finite(self, batch: int) -> None:
        now = _not_finite(self.observers)
        more = now - self._not_finite
        self._not_finite = now
        for (name, observer), (nan, inf) in zip(self.observers.items(), more.tolist(), strict=True):
            if (nan or inf) and name not in self._warned:
                self._warned.add(name)
                observer.told_of_non_finite = True
                self._warn(
                    f"calibrate.run: layer {observer.name or name!r}: {nan} NaN and {inf} infinite values in batch "
                    f"{batch}; they are left out of its range, and int8 gives NaN for such samples"
                )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(text, CalibrationWarning, stacklevel=4)


def _drive_ranks(this: _Run, batches: Iterable[Any], limit: int | None, progress: bool) -> tuple[int, int]:
    """`drive` on every rank, then one set of statistics for all; returns the batches and samples of all ranks.

    What the observers had seen before is set aside, the same on all ranks, or it would be counted once per rank.
    """
    distributed.sync(this.prepared)
    failure: Exception | None = None
    with set_aside(this.observers):
        try:
            this.drive(batches, limit, progress)
        except Exception as error:  # told to the other ranks, which would wait for this one until a timeout
            failure = error
        mine = {"batches": this.batches, "samples": this.samples, "error": repr(failure) if failure else ""}
        everyone: list[dict[str, int]] = []
        try:
            everyone = distributed.exchange(mine)
        except CalibrationError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        distributed.merge_ranks(this.observers)
    return sum(rank["batches"] for rank in everyone), sum(rank["samples"] for rank in everyone)


def _read(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; an error of the system in a loader with workers says what the workers need."""
    workers = getattr(batches, "num_workers", 0)
    try:
        yield from batches
    except OSError as error:
        if not workers:
            raise
        what = error.strerror or error
        way = "they share memory in /dev/shm: make it larger (docker run --shm-size), or take num_workers=0"
        text = f"calibrate.run: reading batches from a loader with {workers} workers: {what}; {way}"
        raise OSError(error.errno or 0, text) from error


class _ByRule:
    """The default `forward`: the rule of batches.py."""

    def __init__(self, model: nn.Module) -> None:
        self.caller = Caller(model)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        args, kwargs = self.caller.arguments(batch)
        return model(*args, **kwargs)

    def doubts(self) -> list[str]:
        return self.caller.doubts


def by_rule(model: nn.Module) -> Forward:
    """The default `forward` of a model."""
    return _ByRule(model)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; each module's own flag is put back, which `model.train()` would not do for a frozen part."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextlib.contextmanager
def set_aside(observers: Mapping[str, Observer]) -> Iterator[None]:
    """Observers that have seen nothing; what they had seen before is merged back at the end, also after an error."""
    before = {name: copy.deepcopy(observer) for name, observer in observers.items()}
    for observer in observers.values():
        observer.reset()
    try:
        yield
    finally:
        for name, observer in observers.items():
            before[name].merge(observer)
            observer.load_state_dict(before[name].state_dict())


def _check(prepared: nn.Module, batches: object, limit: int | None) -> None:
    if not isinstance(prepared, nn.Module):
        raise TypeError(f"calibrate.run: prepared is a {type(prepared).__name__}, expected an nn.Module")
    if not checkpoints.observers_of(prepared):
        raise ValueError(
            f"calibrate.run: {type(prepared).__name__} has no observers; quant.prepare(model, example_inputs) puts "
            "them in, where values have static ranges: dynamic layers need no calibration"
        )
    check_batches(batches, "calibrate.run")
    check_limit(limit, "calibrate.run")


def _path_of_rank(path: Path) -> Path:
    rank, ranks = distributed.world()
    return path if ranks == 1 else path.with_name(f"{path.stem}.rank{rank}of{ranks}{path.suffix}")


def total_of(batches: Iterable[Any], limit: int | None) -> int | None:
    """How many batches will be taken; None where nobody knows."""
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError:  # a generator, or a DataLoader over an IterableDataset
        return limit
    return length if limit is None else min(length, limit)


def _not_finite(observers: Mapping[str, Observer]) -> Tensor:
    """(observers, 2): NaN and infinite values seen so far; one tensor, as reading 200 scalars costs 0.2 ms a batch."""
    counts = [torch.stack((observer.nan_count, observer.inf_count)).cpu() for observer in observers.values()]
    return torch.stack(counts)

"""One architecture measured: quantised, run on inputs that calibration has not seen, and held against float.

    static    quantize_static, against float and against an independent simulation (simulation.py)
    dynamic   quantize_dynamic, likewise
    qat       prepare_qat, a few steps of training, convert; against the trained model in eval mode
    runner    quantize_static, saved for the torch-free runner: its bits are Python's, or a step is named (in_runner.py)
    onnx      quantize_static, as an ONNX file in ONNX Runtime: as near to float, or a step is named (in_onnx.py)

A row says "ok", "wrong: ..." where the structure or the numbers differ by more than they may, or "fails: ...".
"""

from __future__ import annotations

import copy
import math
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import quant

from . import in_onnx, in_runner, reasons
from .entry import Batch, Entry
from .reasons import MOST, OTHER_RANGES, SLACK, reached, shortfall
from .simulation import WEIGHTED, all_integers_rounded, has_dynamic_form, is_layer, layers_rounded
from .trees import Likeness, difference, likeness, matched_boxes, tensors_of

MODES = ("static", "qat", "dynamic", "runner", "onnx")

OVERLAP_SLACK = 0.15
"""By which the boxes of a detector may be found again less well than the simulation's."""

ENOUGH = 512
"""Values of an output, in all batches of a size, from which its SQNR varies by less than half a dB between draws."""

MOST_DRAWS = 16
"""Batches of each size at most."""

TRAINING_STEPS = 8
CALIBRATION_BATCHES = 4
SPEED_ROUNDS = 9

Row = dict[str, Any]


def measure(entry: Entry, mode: str, *, speed: bool = False) -> Row:
    """The row of `entry` in one of MODES. What it raises is caught, and is the row's verdict."""
    row: Row = {"name": entry.name, "mode": mode}
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _MEASURES[mode](entry, row, speed)
        row["warnings"] = sorted({_head(str(w.message)) for w in caught if "quant" in w.filename})
    except Exception as error:
        row["verdict"] = f"fails: {type(error).__name__}: {_head(str(error))}"
        row["traceback"] = traceback.format_exc()
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _head(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


class Broken(Exception):
    """The float model does not run: a fault of the catalogue, not of the library."""


def _build(entry: Entry) -> nn.Module:
    try:
        return entry.build()
    except Exception as error:
        raise Broken(f"the float model: {type(error).__name__}: {error}") from error


def _fresh(entry: Entry) -> list[Batch]:
    """Inputs of other values than calibration had, of its batch size and of another."""
    return _drawn(entry, 1)


def _drawn(entry: Entry, times: int) -> list[Batch]:
    return [entry.draw(100 + i, (entry.size, entry.other_size)[i % 2]) for i in range(2 * times)]


def _enough(entry: Entry, model: nn.Module) -> list[Batch]:
    """As `_fresh`, and as many more as make the smallest real output ENOUGH values: the noise of a few is any."""
    if entry.detects:
        return _fresh(entry)
    sizes = [
        tensor.numel()
        for tensor in tensors_of(_run(entry, model, _fresh(entry))).values()
        if tensor.is_floating_point() and tensor.numel()
    ]
    return _drawn(entry, min(MOST_DRAWS, math.ceil(ENOUGH / min(sizes, default=ENOUGH))))


def _run(entry: Entry, model: nn.Module, batches: list[Batch]) -> list[Any]:
    with torch.inference_mode():
        return [entry.run(model, batch) for batch in batches]


@dataclass
class Trial:
    """A float model, what it is quantised by, and what is asked of it: runs of it and of its simulations.

    Attributes:
        fresh: inputs that calibration has not seen.
        quantize: the int8 form of a model, by calibration batches.
        has_ranges: whether calibration decides by what ranges activations are rounded.
    """

    entry: Entry
    model: nn.Module
    calibration: list[Batch]
    fresh: list[Batch]
    quantize: Callable[[nn.Module, list[Batch]], nn.Module]
    has_ranges: bool

    def run(self, model: nn.Module, batches: list[Batch] | None = None) -> Any:
        """Outputs for `fresh`, or for other batches."""
        return _run(self.entry, model, self.fresh if batches is None else batches)

    def simulated(self, wider: float = 1.0, batches: list[Batch] | None = None) -> Any:
        """The simulation's."""
        with layers_rounded(self.model, lambda: self.run(self.model, self.calibration), wider):
            return self.run(self.model, batches)

    def all_rounded(self, batches: list[Batch] | None = None) -> Any:
        """Those of the simulation that also rounds between layers."""
        with all_integers_rounded(self.model, lambda: self.run(self.model, self.calibration)):
            return self.run(self.model, batches)

    def int8(self, *more: Batch) -> nn.Module:
        """The model under test; calibrated with more batches, where any are given."""
        return self.quantize(self.model, [copy.deepcopy(batch) for batch in (*self.calibration, *more)])

    def seen(self, q: nn.Module, path: str) -> tuple[float, float]:
        """dB of the int8 model at an output on the batches of its calibration, and what is attainable there."""
        expected, path = self.run(self.model, self.calibration), "[0]" + path.partition("]")[2]
        runs = (
            self.run(q, self.calibration),
            self.simulated(batches=self.calibration),
            self.all_rounded(self.calibration),
        )
        int8, simulation, bound = (likeness(expected, outputs, kinds=1) for outputs in runs)
        return reached(int8, path), reasons.attainable(simulation, bound, path)


def _static(entry: Entry, row: Row, speed: bool) -> None:
    def quantize(model: nn.Module, batches: list[Batch]) -> nn.Module:
        return quant.quantize_static(model, batches, forward=entry.call, progress=False)

    _post_training(entry, row, speed, quantize, has_ranges=True)


def _dynamic(entry: Entry, row: Row, speed: bool) -> None:
    try:
        _post_training(entry, row, speed, lambda model, _: quant.quantize_dynamic(model), has_ranges=False)
    except quant.NothingQuantized as error:
        if any(has_dynamic_form(module) for module in entry.build().modules()):
            raise
        row["verdict"], row["reason"] = "ok", f"no layer has a dynamic form: {_head(str(error))}"


def _post_training(entry: Entry, row: Row, speed: bool, quantize: Any, *, has_ranges: bool) -> None:
    """Quantise by a function of a model and calibration batches, and judge the result beside simulations."""
    model = _build(entry)
    calibration = [entry.draw(i, entry.size) for i in range(CALIBRATION_BATCHES)]
    trial = Trial(entry, model, calibration, _enough(entry, model), quantize, has_ranges)
    expected = trial.run(model)
    q = trial.int8()
    note_report(row, model, q)
    _judge(trial, row, expected, q)
    if speed:
        row["speed"] = speed_ratio(entry, model, q)


def _qat(entry: Entry, row: Row, speed: bool) -> None:
    model = _build(entry)
    example = entry.draw(0, entry.size)
    prepared = quant.prepare_qat(model, copy.deepcopy(entry.example(example) if entry.example else example))
    row["losses"] = train(entry, prepared)
    prepared.eval()
    fresh = _fresh(entry)
    expected = _run(entry, prepared, fresh)
    q = quant.convert(prepared)
    note_report(row, model, q)
    found = _run(entry, q, fresh)
    _judge_training(entry, row, expected, found, prepared, q, fresh)
    if speed:
        row["speed"] = speed_ratio(entry, model, q)


def _runner(entry: Entry, row: Row, speed: bool) -> None:
    calibration = [entry.draw(i, entry.size) for i in range(CALIBRATION_BATCHES)]
    q = quant.quantize_static(_build(entry), calibration, forward=entry.call, progress=False)
    row["verdict"], refusal = in_runner.verdict(entry, q, _fresh(entry))
    if refusal:
        row["reason"] = refusal


def _onnx(entry: Entry, row: Row, speed: bool) -> None:
    model, calibration = _build(entry), [entry.draw(i, entry.size) for i in range(CALIBRATION_BATCHES)]
    q = quant.quantize_static(model, calibration, forward=entry.call, progress=False)
    with torch.no_grad():
        row.update(in_onnx.verdict(entry, model, q, _fresh(entry)))


_MEASURES = {"static": _static, "dynamic": _dynamic, "qat": _qat, "runner": _runner, "onnx": _onnx}


def train(entry: Entry, prepared: nn.Module) -> list[float]:
    """Some steps that make the outputs smaller, through all phases of the schedule."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4)
    schedule = quant.QATSchedule(prepared, steps=TRAINING_STEPS, optimizer=optimizer)
    prepared.train()
    losses = []
    for step in range(TRAINING_STEPS):
        batch = copy.deepcopy(entry.draw(200 + step, entry.size, training=True))
        optimizer.zero_grad()
        outputs = prepared(*batch) if entry.training_batch else entry.call(prepared, batch)
        loss = loss_of(outputs)
        loss.backward()
        nn.utils.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(round(float(loss.detach()), 4))
    return losses


def loss_of(outputs: Any) -> Tensor:
    """The mean square of every output that a gradient comes from."""
    parts = [
        (t.abs() if t.is_complex() else t).float().square().mean()
        for t in tensors_of(outputs).values()
        if t.requires_grad and t.numel()
    ]
    if not parts:
        raise RuntimeError("no output of the prepared model has a gradient")
    return torch.stack(parts).sum()


def note_report(row: Row, model: nn.Module, q: nn.Module) -> None:
    """Which weighted modules became integers, which did not and why, and which modules run as they are."""
    entries = {entry.name: entry for entry in quant.summary(q)}
    attention = [name + "." for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    weighted = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, WEIGHTED) or is_layer(module)) and not name.startswith(tuple(attention))
    ]
    integer = [name for name in weighted if name in entries and entries[name].outcome != "float"]
    row["weighted"], row["int8"] = len(weighted), len(integer)
    row["float_layers"] = {
        name: entries[name].detail[:200] if name in entries else "not in the report"
        for name in weighted
        if name not in integer
    }
    left = [entry for entry in entries.values() if entry.outcome == "float" and entry.name not in weighted]
    row["islands"] = {entry.name or "(root)": entry.detail[:200] for entry in left if "island" in entry.detail}
    row["float_steps"] = sum("island" not in entry.detail for entry in left)


def _judge(trial: Trial, row: Row, expected: Any, q: nn.Module) -> None:
    found = trial.run(q)
    problem = difference(expected, found, lengths=not trial.entry.detects)
    if problem:
        row["verdict"] = f"wrong: {problem}"
        return
    simulated = trial.simulated()
    if trial.entry.detects:
        _judge_boxes(row, expected, found, simulated)
        return
    int8, simulation = likeness(expected, found, kinds=2), likeness(expected, simulated, kinds=2)
    row["db"], row["sim_db"] = round(int8.first, 1), round(simulation.first, 1)
    path, gap = shortfall(int8, simulation)
    row["gap"] = round(gap, 1)
    if gap <= SLACK:
        row["verdict"] = "ok"
        return
    place = f"{gap:.1f} dB below the simulation at output{path}"
    reason = reasons.chaos(simulation, path) or reasons.choices(int8, simulation, path)
    if not reason and gap <= MOST:
        reason = _reason(trial, row, expected, q, int8, simulation, path)
    row["verdict"] = "ok" if reason else f"wrong: {place}"
    if reason:
        row["reason"] = f"{place}; {reason}"


def _reason(
    trial: Trial, row: Row, expected: Any, q: nn.Module, int8: Likeness, simulation: Likeness, path: str
) -> str:
    """What further runs say of an output that lies below the simulation, the cheapest first; '' where nothing is known.
    Their dB are kept in the row."""
    bound = likeness(expected, trial.all_rounded(), kinds=2)
    row["all_db"] = round(reached(bound, path), 1)
    reason = reasons.rounding_between(int8, bound, path)
    if reason or path not in int8.decibels:
        return reason
    others = [reached(likeness(expected, trial.simulated(wider), kinds=2), path) for wider in OTHER_RANGES]
    row["luck_db"] = [round(db, 1) for db in others]
    reason = reasons.luck(reached(int8, path), [reached(simulation, path), *others])
    if reason or not trial.has_ranges:
        return reason
    informed = reached(likeness(expected, trial.run(trial.int8(*trial.fresh)), kinds=2), path)
    row["informed_db"] = round(informed, 1)
    return reasons.new_values(trial.seen(q, path), (informed, reasons.attainable(simulation, bound, path)))


def _judge_boxes(row: Row, expected: Any, found: Any, simulated: Any) -> None:
    pairs = [(matched_boxes(e, f), matched_boxes(e, s)) for e, f, s in zip(expected, found, simulated, strict=True)]
    row["overlap"], row["sim_overlap"] = (round(statistics.mean(values), 3) for values in zip(*pairs, strict=True))
    short = row["sim_overlap"] - row["overlap"]
    row["verdict"] = (
        "ok" if short <= OVERLAP_SLACK else f"wrong: boxes overlap by {short:.2f} less than the simulation's"
    )


def _judge_training(
    entry: Entry, row: Row, expected: Any, found: Any, prepared: nn.Module, q: nn.Module, fresh: list[Batch]
) -> None:
    problem = difference(expected, found, lengths=not entry.detects)
    if problem:
        row["verdict"] = f"wrong: {problem}"
        return
    like = likeness(expected, found)
    if entry.detects:
        row["overlap"] = round(statistics.mean(matched_boxes(e, f) for e, f in zip(expected, found, strict=True)), 3)
    else:
        row["db"] = round(like.first, 1)
    try:
        batches = [copy.deepcopy(entry.example(batch) if entry.example else batch) for batch in fresh]
        parity = quant.parity(prepared, q, batches)
    except Exception as error:
        row["verdict"] = f"fails: parity: {type(error).__name__}: {_head(str(error))}"
        row["traceback"] = traceback.format_exc()
        return
    row["unequal"] = round(parity.unequal, 6)
    bad = [step for step in parity if not step.holds]
    row["verdict"] = "ok"
    if bad:
        row["verdict"] = f"wrong: parity at {bad[0].name}: {bad[0].difference()} ({len(bad)} of {len(parity)} steps)"


def speed_ratio(entry: Entry, model: nn.Module, q: nn.Module) -> float:
    """Float time over int8 time of one sample: the median over rounds that time both."""
    batch = entry.draw(300, 1)
    ratios = []
    with torch.inference_mode(), _one_thread():
        for round_number in range(SPEED_ROUNDS + 2):
            times = []
            for one in (model, q):
                inputs = copy.deepcopy(batch)
                start = time.perf_counter()
                entry.call(one, inputs)
                times.append(time.perf_counter() - start)
            if round_number >= 2:
                ratios.append(times[0] / times[1])
    return round(statistics.median(ratios), 2)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

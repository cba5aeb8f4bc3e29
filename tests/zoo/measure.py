"""One architecture measured: quantised, run on inputs that calibration has not seen, and held against float.

    static    quantize_static, against float and against an independent simulation (simulation.py)
    dynamic   quantize_dynamic, likewise
    qat       prepare_qat, a few steps of training, convert; against the trained model in eval mode

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
from typing import Any

import torch
from torch import Tensor, nn

import quant

from .entry import Batch, Entry
from .simulation import WEIGHTED, all_integers_rounded, is_layer, layers_rounded
from .trees import EXACT, Likeness, difference, likeness, matched_boxes, tensors_of

MODES = ("static", "qat", "dynamic")

SLACK = 1.5
"""dB that an int8 model may lie below the simulation."""

CLEAR = 45.0
"""dB above which differences do not count: about what a single rounding to 8 bits leaves, as of an embedding's rows or
of an output, which the simulation leaves float."""

OVERLAP_SLACK = 0.15
"""By which the boxes of a detector may be found again less well than the simulation's."""

MOST = 6.0
"""dB below the simulation that rounding between the layers can be the reason for, however low that goes."""

OTHER_RANGES = (1.01, 1.02, 1.03, 1.04, 1.05)
"""By which the simulation's ranges are multiplied, to see how many of its dB are luck: no step grows by half a dB, and
every value is rounded otherwise. A deep network with random weights blows the difference up to several dB."""

CHAOS = 6.0
"""dB under which the simulation itself says nothing: rounding decides the outputs of a random network."""

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


def _static(entry: Entry, row: Row, speed: bool) -> None:
    def quantize(model: nn.Module, calibration: list[Batch]) -> nn.Module:
        batches = [copy.deepcopy(batch) for batch in calibration]
        return quant.quantize_static(model, batches, forward=entry.call, progress=False)

    _post_training(entry, row, speed, quantize)


def _dynamic(entry: Entry, row: Row, speed: bool) -> None:
    _post_training(entry, row, speed, lambda model, _: quant.quantize_dynamic(model))


def _post_training(
    entry: Entry, row: Row, speed: bool, quantize: Callable[[nn.Module, list[Batch]], nn.Module]
) -> None:
    """Quantise by a function of the model and calibration batches, and judge the result beside both simulations."""
    model = _build(entry)
    calibration = [entry.draw(i, entry.size) for i in range(CALIBRATION_BATCHES)]
    fresh = _enough(entry, model)
    expected = _run(entry, model, fresh)
    q = quantize(model, calibration)
    note_report(row, model, q)
    found = _run(entry, q, fresh)
    with layers_rounded(model, lambda: _run(entry, model, calibration)):
        simulated = _run(entry, model, fresh)

    def with_all_rounded() -> Any:
        with all_integers_rounded(model, lambda: _run(entry, model, calibration)):
            return _run(entry, model, fresh)

    def with_other_ranges() -> Iterator[Any]:
        for wider in OTHER_RANGES:
            with layers_rounded(model, lambda: _run(entry, model, calibration), wider):
                yield _run(entry, model, fresh)

    _judge(entry, row, expected, found, simulated, with_all_rounded, with_other_ranges)
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


_MEASURES = {"static": _static, "dynamic": _dynamic, "qat": _qat}


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


def _judge(
    entry: Entry,
    row: Row,
    expected: Any,
    found: Any,
    simulated: Any,
    with_all_rounded: Callable[[], Any],
    with_other_ranges: Callable[[], Iterator[Any]],
) -> None:
    problem = difference(expected, found, lengths=not entry.detects)
    if problem:
        row["verdict"] = f"wrong: {problem}"
        return
    if entry.detects:
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
    bound = likeness(expected, with_all_rounded(), kinds=2)
    row["all_db"] = round(limit := _reached(bound, path), 1)
    reason = _reason(int8, simulation, path, limit if gap <= MOST else -EXACT)
    if not reason and gap <= MOST and path in int8.decibels:
        others = [_reached(likeness(expected, other, kinds=2), path) for other in with_other_ranges()]
        row["luck_db"] = [round(db, 1) for db in others]
        reason = luck(_reached(int8, path), [_reached(simulation, path), *others])
    row["verdict"] = "ok" if reason else f"wrong: {place}"
    if reason:
        row["reason"] = f"{place}; {reason}"


def _reached(like: Likeness, path: str) -> float:
    return like.decibels.get(path, like.equal.get(path, EXACT))


def _reason(int8: Likeness, simulation: Likeness, path: str, limit: float) -> str:
    """Why an output may lie below the simulation; '' where nothing is known.

    Args:
        limit: dB of the simulation that rounds between layers too, where that may be the reason.
    """
    if simulation.decibels.get(path, EXACT) < CHAOS:
        return f"the simulation itself has under {CHAOS:.0f} dB"
    if (differing := choices(int8, simulation, path)) is not None:
        return f"{differing} of its integers fell otherwise, which decide the rest"
    if limit >= CHAOS and _reached(int8, path) >= limit - SLACK:
        return f"with all that goes from layer to layer in 8 bits the simulation has {limit:.1f} dB"
    return ""


def luck(reached: float, simulated: list[float]) -> str:
    """Whether the simulation itself falls as low where its ranges are a few hundredths wider, in words."""
    low, high = min(simulated), max(simulated)
    if low < CHAOS or reached < low - SLACK:
        return ""
    return f"with ranges up to {max(OTHER_RANGES) - 1:.0%} wider the simulation has from {low:.1f} to {high:.1f} dB"


def shortfall(int8: Likeness, simulation: Likeness) -> tuple[str, float]:
    """By how many dB the output that lies deepest below the simulation does so, and its path. Equal integers count
    as well: one in a hundred that differs where the simulation's agree counts as one dB."""
    gaps = {path: min(CLEAR, simulation.decibels[path]) - min(CLEAR, db) for path, db in int8.decibels.items()}
    gaps |= {path: 100 * (simulation.equal[path] - equal) for path, equal in int8.equal.items()}
    path = max(gaps, key=lambda key: gaps[key], default="")
    return path, gaps.get(path, 0.0)


def choices(int8: Likeness, simulation: Likeness, path: str) -> str | None:
    """The share of integers (codes, indices) that differ in the batch of `path`, where the model puts some out, few of
    them differ, and the simulation's stay no more equal in all batches: what follows from them says nothing."""
    shares = [share for key, share in int8.equal.items() if key.partition("]")[0] == path.partition("]")[0]]
    if not shares or min(shares) == 1 or min(shares) < 0.9 or min(simulation.equal.values()) == 1:
        return None
    return f"{1 - min(shares):.1%}"


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

"""`autoquant`: from the user's metric and what it may lose to a converted model."""

from __future__ import annotations

import math
import numbers
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from quant.autoquant.candidates import FLOAT, NARROW, Form, Plan
from quant.autoquant.costs import default_clock
from quant.autoquant.records import Records, identity, weights_of
from quant.autoquant.result import LATENCY, SIZE, Autoquantized
from quant.autoquant.search import Search
from quant.autoquant.trials import Bench, Trial, score_in, score_out
from quant.calibrate.checkpoint import check_folder
from quant.calibrate.driver import Forward
from quant.kernels.progress import progress_of
from quant.kernels.race import Clock
from quant.metric import Evaluate, Metric, MetricWarning
from quant.prepare import check_model
from quant.recipe import Recipe
from quant.report import summary
from quant.sensitivity.measure import harms
from quant.variants import Calibrated

VERB = "quant.autoquant"

NAMED = 5
"""Layers that are named where the budget is missed."""


@torch.inference_mode(False)
def autoquant(
    model: nn.Module,
    data: Iterable[Any],
    evaluate: Evaluate,
    *,
    max_drop: float,
    objective: Literal["latency", "size"] = "latency",
    recipe: Recipe | None = None,
    max_evaluations: int = 30,
    checkpoint: str | os.PathLike[str] | None = None,
    forward: Forward | None = None,
    example_inputs: Any = None,
    limit: int | None = None,
    progress: bool = True,
    clock: Clock | None = None,
) -> Autoquantized:
    """The fastest, or the smallest, model that loses at most `max_drop` of the user's own metric.

    Layers may be int8 with ranges of calibration or of each call, have 16-bit activations where there are kernels, have
    4-bit weights where size counts, or stay float. Each model that is tried is built, scored by `evaluate` and timed
    here beside the float model, which is itself a candidate: what comes back keeps the budget and is never slower.

    Args:
        model: any float module, unedited; left as it is.
        data: batches to calibrate with, as for `quantize_static`.
        evaluate: called with a model in eval mode; returns a number of which more is better, on data that `data` has
            not. Or it returns a score for each sample (a tensor, a list), whose mean is the metric; then the drop's
            upper end at 95 % is held against the budget, so that it holds for other samples too.
        max_drop: what the metric may lose, in its own unit: 0.005 is half a point of an accuracy.
        objective: what is made small: "latency", the time of a call with `example_inputs`, or "size", the bytes of
            parameters and buffers.
        recipe: how layers are quantised that are; what it leaves float stays float.
        max_evaluations: models that are scored, at most.
        checkpoint: a file in which every measurement is kept, and found again by another call: one that was killed goes
            on, and one with another budget scores only what is new. It begins with the float model's score once `data`
            is calibrated: one that was killed before begins anew.
        forward: called with (model, batch) in calibration, where the model is not simply called with its inputs.
        example_inputs: what the model is captured and timed with; None takes the first call.
        limit: batches of `data` to take at most.
        progress: show a progress bar with the best so far; two lines without a terminal.
        clock: returns seconds; None takes this thread's time where torch has one thread, else the time of the wall.

    Returns:
        the model, with the recipe that makes it again, the reason for each layer that is not int8, and every trial.
        Ctrl-C ends the search, and gives the best so far; before the float model is measured it ends the process.

    Raises:
        DataError: there are no batches, or the model does not take them.
        MetricError: `evaluate` gives no number, or less for better models.
        CheckpointError: the checkpoint is damaged, or belongs to another model, data or machine. Nothing was changed.
        NothingQuantized, RecipeError: as `prepare`.

    Warns:
        MetricWarning: `evaluate` gives another number in a second call with the float model, or a score for each of
            too few samples to show that a model holds the budget.
    """
    began = time.perf_counter()
    _check(max_drop, objective, max_evaluations)
    check_model(model, VERB)
    check_folder(checkpoint, VERB)
    metric = Metric(evaluate, VERB)
    weights = weights_of(model)
    path = None if checkpoint is None else Path(checkpoint)
    begin: dict[str, dict[str, Any]] = {}
    if path is None or not path.exists():
        begin = {"scores": {Plan(Form.FLOAT).key: score_out(metric.of_float(model))}, "metric": {"noise": metric.noise}}
    calibrated = Calibrated(
        model, data, VERB, recipe, forward=forward, example_inputs=example_inputs, limit=limit, progress=progress
    )
    belongs_to = identity(weights, calibrated.data, calibrated.own_recipe, calibrated.example)
    records = Records(path, belongs_to, calibrated.layers, begin)
    score = score_in(records.get("scores", Plan(Form.FLOAT).key, lambda: score_out(metric.of_float(model))))
    metric.noise = records.get("metric", "noise", lambda: metric.noise)
    bar = progress_of("autoquant", unit="model", total=max_evaluations, shown=progress)

    def told(trial: Trial, best: Trial) -> None:
        bar.update()
        ratio = f"{best.cost.ratio:.2f} of float's time" if best.plan.form is not Form.FLOAT else "1"
        bar.set_postfix_str(f"best: {best.plan.says}, loses {best.drop:.3g}, {ratio}")

    bench = Bench(calibrated, metric, score, records, clock or default_clock())
    by_size = objective == SIZE
    search = Search(bench, max_drop, by_size, max_evaluations, told, lambda settings: harms(calibrated, settings))
    with bar:
        search.begin()
        interrupted = _interrupted(search.run)
        if not interrupted and search.best.plan.form is not Form.FLOAT:
            interrupted = _interrupted(lambda: bench.tuned_seconds(search.best.plan))
    _say_few_samples(search)
    return _result(search, objective, began, interrupted)


def _say_few_samples(search: Search) -> None:
    """Warn where no int8 model keeps the budget, and one misses it only since few samples were scored."""
    samples = search.bench.score.samples or ()
    missed = [one for one in search.trials[1:] if one.drop <= search.max_drop < one.sure_drop]
    if not missed or search.nearest is None or search.holds(search.nearest):
        return
    nearest = min(missed, key=lambda one: one.sure_drop)
    times = _times_the_samples(search.max_drop - nearest.drop, nearest.sure_drop - nearest.drop, nearest.rare)
    enough = f"score some {math.ceil(len(samples) * times)}" if times else "no number of samples can: allow more"
    warnings.warn(
        f"{VERB}: {nearest.plan.says} loses {nearest.drop:.3g} over {len(samples)} samples, by which others may lose "
        f"{nearest.sure_drop:.2g} (at 95 %), and max_drop={search.max_drop:g} is not held; {enough}, or return the "
        "mean, which is held against the budget as it is",
        MetricWarning,
        stacklevel=4,
    )


def _times_the_samples(room: float, doubt: float, rare: float) -> float | None:
    """How many times the samples bring a doubt of the mean down to the room that the budget leaves; None without room.

    Of the doubt, the spread falls with the root of the samples, and what few differences hide with their number.
    """
    if room <= 0:
        return None
    spread = doubt - rare
    return ((spread + math.sqrt(spread**2 + 4 * rare * room)) / (2 * room)) ** 2


def _interrupted(work: Callable[[], object]) -> bool:
    """Whether some work was ended from the keyboard."""
    try:
        work()
    except KeyboardInterrupt:
        return True
    return False


def _check(max_drop: Any, objective: Any, max_evaluations: Any) -> None:
    if isinstance(max_drop, bool) or not isinstance(max_drop, numbers.Real) or not float(max_drop) >= 0:
        raise ValueError(f"{VERB}: max_drop is {max_drop!r}, expected a number from 0 up, in the metric's unit")
    if objective not in (LATENCY, SIZE):
        raise ValueError(f"{VERB}: objective is {objective!r}, expected {LATENCY!r} or {SIZE!r}")
    if type(max_evaluations) is not int or max_evaluations < 1:
        raise ValueError(f"{VERB}: max_evaluations is {max_evaluations!r}, expected a whole number from 1 up")


def _result(search: Search, objective: str, began: float, interrupted: bool) -> Autoquantized:
    bench, best, nearest = search.bench, search.best, search.nearest
    is_float = best.plan.form is Form.FLOAT
    model = bench.finished(best.plan)
    seconds = bench.records.known("tuned", best.plan.key) or best.cost.seconds
    missed = 0.0 if nearest is None or search.holds(nearest) else nearest.sure_drop - search.max_drop
    return Autoquantized(
        model=model,
        recipe=None if is_float else bench.recipe(best.plan),
        form=best.plan.form.value,
        chosen=best,
        trials=tuple(search.all_trials()),
        seconds=seconds,
        max_drop=float(search.max_drop),
        objective=objective,
        reasons=_reasons(search, model, best),
        missed=missed,
        held_back=_held_back(search, nearest) if missed else {},
        evaluations=search.evaluations,
        metric_calls=bench.metric.calls,
        minutes=(time.perf_counter() - began) / 60,
        noise=bench.metric.noise,
        interrupted=interrupted,
        nearest=nearest,
    )


def _reasons(search: Search, model: nn.Module, best: Trial) -> dict[str, str]:
    """Why layers are not int8: by the search, or by the conversion."""
    if best.plan.form is Form.FLOAT:
        return {}
    chosen = dict(best.plan.choices)
    reasons = {name: _reason(name, choice, search) for name, choice in chosen.items()}
    for entry in summary(model):
        if not entry.quantized and entry.name in search.bench.calibrated.layers:
            reasons.setdefault(entry.name, entry.detail)
    return reasons


def _reason(name: str, choice: str, search: Search) -> str:
    if choice == NARROW.name:
        return f"{choice}: smaller, and the budget holds"
    harm = search.harm.get(name)
    if harm is None:
        return f"{choice}: faster so than in int8 here"
    alone = f"{-10 * math.log10(harm):.1f} dB" if harm > 0 else "no error"
    share = harm / (sum(search.harm.values()) or 1.0)
    return f"{choice}: in int8 it alone leaves the output {alone}, {share:.0%} of the error of all layers"


def _held_back(search: Search, nearest: Trial | None) -> Mapping[str, float]:
    """The layers that harm most in the nearest int8 model, with their shares of the error."""
    lifted = {name for name, choice in nearest.plan.choices if choice == FLOAT.name} if nearest is not None else set()
    left = {name: harm for name, harm in search.harm.items() if name not in lifted}
    whole = sum(search.harm.values()) or 1.0
    return {name: left[name] / whole for name in sorted(left, key=lambda name: -left[name])[:NAMED]}

"""Trials: models of the search that were built, timed and scored."""

from __future__ import annotations

import glob
import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quant.autoquant.candidates import CANDIDATES, INT8, NARROW, Form, Plan
from quant.autoquant.costs import Cost, cost_of, layer_seconds
from quant.autoquant.records import Records
from quant.dynamic import quantize_dynamic
from quant.dynamic_decisions import NothingQuantized
from quant.kernels.autotune import autotune
from quant.kernels.race import Clock
from quant.kernels.tuning import Tuning
from quant.metric import Metric, Score
from quant.recipe import QConfig, Recipe
from quant.report import summary
from quant.static.dynamic_fallback import dynamic_part
from quant.submodule_calls import evaluating
from quant.variants import Calibrated

SURE = 1.645
"""One-sided 95 % of a normal distribution, by which the drop of paired samples is bounded."""


@dataclass(frozen=True)
class Trial:
    """A model of the search, and what it was found to be.

    Attributes:
        plan: which model.
        metric: of the user's function; -inf where that is no number.
        drop: what it loses against float.
        sure_drop: the bound that is held against the budget: where the metric gives a score for each sample, the drop's
            upper end at 95 %, also where few samples differ or none does (`beyond_normal`); else the drop.
        cost: measured here.
        rare: the part of `sure_drop` that is there because few samples differ.
    """

    plan: Plan
    metric: float
    drop: float
    sure_drop: float
    cost: Cost
    rare: float = 0.0


@dataclass
class Bench:
    """Builds models of plans, and measures each once.

    Attributes:
        calibrated: the float model, and its calibration.
        metric: the user's function.
        score: of the float model.
        records: what was measured.
        clock: of the timings.
    """

    calibrated: Calibrated
    metric: Metric
    score: Score
    records: Records
    clock: Clock
    _built: tuple[Plan, nn.Module] | None = field(default=None, repr=False)

    def trial(self, plan: Plan) -> Trial:
        """The plan's trial, from the records where it stands there."""
        score = score_in(self.records.get("scores", plan.key, lambda: score_out(self.metric(self.model(plan)))))
        cost = self.cost(plan)
        value = score.value if math.isfinite(score.value) else -math.inf
        drop, rare = self.score.value - value, 0.0 if plan.form is Form.FLOAT else _rare(self.score, score)
        return Trial(plan, value, drop, drop + _spread(self.score, score) + rare, cost, rare)

    def earlier(self) -> list[Trial]:
        """The trials that the records have, whoever made them; no more is measured."""
        plans = map(Plan.read, self.records.names("scores", "costs"))
        known = self.calibrated.layers.keys() | {""}
        return [self.trial(one) for one in plans if {name for name, _ in one.choices} <= known]

    def cost(self, plan: Plan) -> Cost:
        """The plan's cost, from the records where it stands there."""
        measured = self.records.get(
            "costs",
            plan.key,
            lambda: cost_of(self._timed(plan), self.calibrated.probe, self.calibrated.example, self.clock).to_dict(),
        )
        return Cost(**measured)

    def layer_seconds(self, names: list[str]) -> dict[str, float]:
        """The time of each layer in the float model."""
        calibrated = self.calibrated
        measured: dict[str, float] = self.records.get(
            "layers", "seconds", lambda: layer_seconds(calibrated.probe, names, calibrated.example, self.clock)
        )
        return measured

    def model(self, plan: Plan) -> nn.Module:
        """The plan's model; the last one is kept."""
        if self._built is None or self._built[0] != plan:
            self._built = plan, self._build(plan)
        return self._built[1]

    def _timed(self, plan: Plan) -> nn.Module:
        return self.calibrated.probe if plan.form is Form.FLOAT else self.model(plan)

    def recipe(self, plan: Plan) -> Recipe:
        """The recipe by which `quantize_static` or `quantize_dynamic` gives the plan's model."""
        calibrated = self.calibrated
        if plan.form is Form.DYNAMIC:
            own = calibrated.own_recipe
            rules = [(rule.pattern, _dynamic(rule.qconfig)) for rule in own]
            chosen: list[Any] = [
                (glob.escape(name), _dynamic(self.settings(name, choice))) for name, choice in plan.choices
            ]
            return Recipe([*chosen, *rules], default=_dynamic(own.default), backend=own.backend)
        return calibrated.recipe_with({name: self.settings(name, choice) for name, choice in plan.choices})

    def settings(self, name: str, choice: str) -> QConfig | None:
        """A layer's settings as a candidate."""
        return CANDIDATES[choice].settings(self.calibrated.layers[name])

    def possible(self, choice: str) -> set[str]:
        """The layers that would compute in integers as a candidate."""
        if choice == INT8.name:
            return set(self.calibrated.layers)
        fits = CANDIDATES[choice].fits
        settings = {name: self.settings(name, choice) for name, layer in self.calibrated.layers.items() if fits(layer)}
        return self.calibrated.integer_layers(self.calibrated.recipe_with(settings)) & settings.keys()

    def narrow_settings(self) -> dict[str, QConfig]:
        """The settings of the layers that may have 4-bit weights."""
        settings = {name: self.settings(name, NARROW.name) for name in sorted(self.possible(NARROW.name))}
        return {name: one for name, one in settings.items() if one is not None}

    def _build(self, plan: Plan) -> nn.Module:
        if plan.form is Form.FLOAT:
            return self.calibrated.model
        if plan.form is Form.STATIC:
            return self.calibrated.converted(self.recipe(plan))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return quantize_dynamic(self.calibrated.model, self.recipe(plan)).eval()

    def advice(self, plan: Plan) -> list[str]:
        """The layers of a plan's model that the autotuner found faster in float; none where that would be all."""

        def measured() -> list[str]:
            return sorted(self._tuning(plan, self.calibrated.probe).float_rules())

        slower = [name for name in self.records.get("advice", plan.key, measured) if name in self.calibrated.layers]
        if not slower:
            return []
        int8 = {entry.name for entry in summary(self.model(plan)).quantized} & self.calibrated.layers.keys()
        return slower if int8 - set(slower) else []

    def tuned(self, plan: Plan) -> nn.Module:
        """The plan's model, each layer on the backend that the autotuner found fastest here."""

        def measured() -> dict[str, str]:
            self._tuning(plan, None)
            return backends_of(self.model(plan))

        chosen = self.records.get("backends", plan.key, measured)
        return _with_backends(self.model(plan), chosen)

    def finished(self, plan: Plan) -> nn.Module:
        """The plan's model as it is given to the user: never called, so that buffers are as conversion leaves them."""
        if plan.form is Form.FLOAT:
            return self.calibrated.model
        chosen = self.records.known("backends", plan.key) or {}  # none where the tuning was interrupted
        return _with_backends(self._build(plan), chosen)

    def tuned_seconds(self, plan: Plan) -> float:
        """The time of a call of `tuned`."""

        def measured() -> float:
            return cost_of(self.tuned(plan), self.calibrated.probe, self.calibrated.example, self.clock).seconds

        seconds: float = self.records.get("tuned", plan.key, measured)
        return seconds

    def _tuning(self, plan: Plan, float_model: nn.Module | None) -> Tuning:
        model = self.model(plan)
        with evaluating(self.calibrated.probe):
            try:
                return autotune(
                    model, self.calibrated.example, float_model=float_model, progress=False, clock=self.clock
                )
            except ValueError:  # no layer to tune
                return Tuning((), (), 1, "")

    def has_dynamic_form(self) -> bool:
        """Whether some layer can be dynamic."""
        try:
            self.model(Plan(Form.DYNAMIC))
        except (NothingQuantized, ValueError, TypeError):
            return False
        return True


def backends_of(model: nn.Module) -> dict[str, str]:
    """The backends that were chosen for a model's parts, by name."""
    chosen = {name: getattr(module, "backend", None) for name, module in model.named_modules()}
    return {name: backend for name, backend in chosen.items() if backend}


def _with_backends(model: nn.Module, chosen: Mapping[str, str]) -> nn.Module:
    for name, module in model.named_modules():
        if name in chosen:
            module.backend = chosen[name]
    return model


def _dynamic(qconfig: QConfig | None) -> QConfig | None:
    return None if qconfig is None else dynamic_part(qconfig)


def score_out(score: Score) -> dict[str, Any]:
    """A score for the records."""
    return {"value": score.value, "samples": score.samples}


def score_in(data: Mapping[str, Any]) -> Score:
    """A score from the records."""
    return Score(data["value"], None if data["samples"] is None else tuple(data["samples"]))


def _differences(of_float: Score, other: Score) -> list[float]:
    """What each sample loses, where both have finite scores for the same ones, and several; else nothing."""
    if of_float.samples is None or other.samples is None or len(of_float.samples) != len(other.samples):
        return []
    differences = [one - two for one, two in zip(of_float.samples, other.samples, strict=True)]
    return differences if len(differences) > 1 and all(map(math.isfinite, differences)) else []


def _spread(of_float: Score, other: Score) -> float:
    """The upper end of the mean of the differences, at 95 % of a normal distribution, over their mean."""
    differences = _differences(of_float, other)
    return SURE * statistics.stdev(differences) / math.sqrt(len(differences)) if differences else 0.0


def _rare(of_float: Score, other: Score) -> float:
    """What few differences may hide: the largest, or where none differs the largest score (1 where all are 0), as often
    as `beyond_normal` says."""
    differences = _differences(of_float, other)
    if not differences:
        return 0.0
    largest = max(map(abs, differences)) or max(map(abs, of_float.samples or ())) or 1.0
    return largest * beyond_normal(sum(map(bool, differences))) / len(differences)


def beyond_normal(events: int) -> float:
    """What the upper end of a count at 95 % has beyond the normal distribution's, events + SURE sqrt(events).

    Where few samples differ their spread says little, and nothing where none does: of n samples without a difference,
    up to 3 / n of all others may have one. The count's upper end is that of a Poisson distribution, by Wilson and
    Hilferty's approximation of its quantiles (1931), which is within 1 %.
    """
    above = events + 1.0
    upper = above * (1.0 - 1.0 / (9.0 * above) + SURE / (3.0 * math.sqrt(above))) ** 3
    return upper - events - SURE * math.sqrt(events)

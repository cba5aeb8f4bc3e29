"""The search: few models are scored, the most promising first, and the cheapest one within the budget is kept.

1. All layers int8, static and dynamic. Usually one of them keeps the budget, and that is all.
2. Else the layers of the static model are lifted to a dearer candidate in the order of harm per cost, harm being the
   power of the error that the layer alone makes at the output, and cost its time (or bytes) in the float model.
   Errors of different layers add up nearly independently, so the metric falls along this chain, and bisection finds
   its first model within the budget in log2(layers) evaluations.
   A layer is lifted to ranges of each call, to 16-bit activations, and only where neither keeps the budget to float;
   of the first two the cheaper model goes on.
3. Layers of that model go back to int8, what was lifted last first, as long as the budget holds and evaluations are
   left.
4. Where size counts, layers of the smallest model within the budget get 4-bit weights, those first that harm least for
   what they save: as many as the budget holds, by bisection again.

The autotuner's advice, which layers are faster in float, is a model to try beside each of the first two. Every step is
a function of what was measured (`records.py`), so that a search which is repeated on the same measurements makes the
same ones. Models that an earlier search with the same checkpoint measured are among those to choose from: a larger
budget never gives a dearer model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quant.autoquant.candidates import DYNAMIC, FLOAT, NARROW, WIDE, Form, Plan
from quant.autoquant.trials import Bench, Trial
from quant.kernels.race import WORTH
from quant.recipe import QConfig


class Spent(Exception):
    """No evaluation is left."""


@dataclass
class Search:
    """A search for the cheapest model within a budget.

    Attributes:
        bench: builds and measures models.
        max_drop: what the metric may lose.
        by_size: the cost is bytes; else time.
        max_evaluations: calls of the metric with models, at most.
        told: called with each new trial, and the best.
        measure_harm: the power of the error that each layer alone makes at the output, over that of the output; of
            layers with such settings, or as calibrated.
        trials: in order, the float model first.
        harm: as measured, where layers had to be lifted.
    """

    bench: Bench
    max_drop: float
    by_size: bool
    max_evaluations: int
    told: Callable[[Trial, Trial], None]
    measure_harm: Callable[[dict[str, QConfig] | None], dict[str, float]]
    trials: list[Trial] = field(default_factory=list)
    harm: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Measure the float model, which is what an interrupted search has at least."""
        self.trials.append(self.bench.trial(Plan(Form.FLOAT)))

    def run(self) -> None:
        """Fill `trials`; a search that is interrupted leaves those that it has."""
        with contextlib.suppress(Spent):
            self._search()

    @property
    def evaluations(self) -> int:
        """Models that were scored, now or by the run that this one goes on from."""
        return len(self.trials) - 1

    @property
    def best(self) -> Trial:
        """The cheapest trial within the budget, the float model if there is no other."""
        return min(filter(self.keeps, self.all_trials()), key=lambda one: (self.cost(one), one.plan.key))

    @property
    def nearest(self) -> Trial | None:
        """The cheapest trial of int8 layers within the budget; where there is none, the one that loses least."""
        int8 = [one for one in self.all_trials() if one.plan.form is not Form.FLOAT]
        inside = [one for one in int8 if self.holds(one)]
        if inside:
            return min(inside, key=lambda one: (self.cost(one), one.plan.key))
        return min(int8, key=lambda one: (one.sure_drop, one.plan.key), default=None)

    def all_trials(self) -> list[Trial]:
        """The trials, and those of earlier searches with the same checkpoint."""
        tried = {one.plan for one in self.trials}
        return [*self.trials, *(one for one in self.bench.earlier() if one.plan not in tried)]

    def keeps(self, trial: Trial) -> bool:
        """Whether a trial keeps the budget and is not slower than float."""
        if trial.plan.form is Form.FLOAT:
            return True
        faster = not trial.cost.slower if self.by_size else trial.cost.ratio < 1 - WORTH
        return faster and self.holds(trial)

    def holds(self, trial: Trial) -> bool:
        """Whether a trial keeps the budget."""
        return trial.sure_drop <= self.max_drop

    def cost(self, trial: Trial) -> float:
        """What is made small."""
        if self.by_size:
            return float(trial.cost.bytes)
        return 1.0 if trial.plan.form is Form.FLOAT else trial.cost.ratio

    def _search(self) -> None:
        static = self._tried(Plan(Form.STATIC))
        if self.bench.records.get("forms", "dynamic", self.bench.has_dynamic_form):
            self._tried(Plan(Form.DYNAMIC))
        for tried in self.trials[1:] if not self.by_size else ():
            self._take_advice(tried)
        if not self.holds(static):
            self._lift()
        if self.by_size:
            self._narrow()

    def _take_advice(self, trial: Trial) -> None:
        """Try a model with the layers in float that the autotuner found faster so, where it would be worth having."""
        slower = self.bench.advice(trial.plan) if self.holds(trial) else []
        if slower:
            self._tried(Plan.of(trial.plan.form, {**dict(trial.plan.choices), **dict.fromkeys(slower, FLOAT.name)}))

    def _tried(self, plan: Plan) -> Trial:
        known = next((one for one in self.trials if one.plan == plan), None)
        if known is not None:
            return known
        if self.evaluations >= self.max_evaluations:
            raise Spent
        trial = self.bench.trial(plan)
        self.trials.append(trial)
        self.told(trial, self.best)
        return trial

    def _lift(self) -> None:
        """Lift layers to dearer candidates until the budget holds, to float where nothing else suffices."""
        self.harm = self.bench.records.get("layers", "harm", lambda: self.measure_harm(None))
        order = self._order()
        dynamic, wide = self.bench.possible(DYNAMIC.name), self.bench.possible(WIDE.name)
        finest = {name: WIDE.name if name in wide else FLOAT.name for name in order}
        ladders = [finest] if wide else []
        if dynamic & set(order):
            ladders.insert(0, {name: DYNAMIC.name if name in dynamic else finest[name] for name in order})
        lifted = [self._first_that_holds(order, ladder) for ladder in ladders]
        found = [one for one in lifted if one]
        if not found:
            found = [one for one in [self._first_that_holds(order, dict.fromkeys(order, FLOAT.name))] if one]
        if found:
            self._lower(min(found, key=lambda choices: self.cost(self._tried(Plan.of(Form.STATIC, choices)))))

    def _first_that_holds(self, order: list[str], ladder: Mapping[str, str]) -> dict[str, str] | None:
        """The shortest beginning of `order` whose lifting keeps the budget, by bisection; None where none does.

        The longest is tried first, which for float is all layers but the last: a budget that only the float model keeps
        costs one evaluation.
        """

        def trial(count: int) -> Trial:
            return self._tried(Plan.of(Form.STATIC, {name: ladder[name] for name in order[:count]}))

        to_float = set(ladder.values()) == {FLOAT.name}
        fails, holds = 0, len(order) - to_float
        if holds == fails or not self.holds(trial(holds)):
            return None
        while holds - fails > 1:
            middle = self._guess(order, fails, holds)
            if self.holds(trial(middle)):
                holds = middle
            else:
                fails = middle
        return {name: ladder[name] for name in order[:holds]}

    def _guess(self, order: list[str], fails: int, holds: int) -> int:
        """Where to try next: the middle by the logarithm of the error that is left, which the metric follows."""
        left = [sum(self.harm[name] for name in order[count:]) for count in range(len(order) + 1)]
        low, high = left[fails], max(left[holds], left[fails] * 1e-6)
        middle = math.sqrt(low * high) if low > 0 else 0.0
        inside = range(fails + 1, holds)
        return min(inside, key=lambda count: abs(math.log((left[count] + 1e-300) / (middle + 1e-300))))

    def _lower(self, lifted: dict[str, str]) -> None:
        """Take layers back to int8, those that were lifted last first: they harm least for what they cost."""
        kept = lifted
        for name in reversed(lifted):
            fewer = {one: choice for one, choice in kept.items() if one != name}
            if fewer and self.holds(self._tried(Plan.of(Form.STATIC, fewer))):
                kept = fewer

    def _narrow(self) -> None:
        """Give layers of the smallest model that keeps the budget 4-bit weights, as many as it holds."""
        best = self.best
        settings = self.bench.narrow_settings()
        if best.plan.form is Form.FLOAT or not settings:
            return
        chosen = dict(best.plan.choices)
        harm = self.bench.records.get("layers", "harm of 4 bits", lambda: self.measure_harm(settings))
        layers = self.bench.calibrated.layers
        order = sorted(
            harm.keys() - chosen.keys(), key=lambda name: (harm[name] / (layers[name].weight_bytes or 1), name)
        )

        def holds(count: int) -> bool:
            narrow = dict.fromkeys(order[:count], NARROW.name)
            return self.holds(self._tried(Plan.of(best.plan.form, {**chosen, **narrow})))

        most, fails = 0, len(order) + 1
        while fails - most > 1:
            middle = len(order) if fails > len(order) else (most + fails) // 2  # all of them first
            if holds(middle):
                most = middle
            else:
                fails = middle

    def _order(self) -> list[str]:
        """The layers, what harms most for what it costs first."""
        costs = self._costs()
        least = max(costs.values(), default=0.0) * 1e-3 or 1.0
        return sorted(self.harm, key=lambda name: (-self.harm[name] / max(costs[name], least), name))

    def _costs(self) -> dict[str, float]:
        layers = self.bench.calibrated.layers
        if self.by_size:
            return {name: float(layers[name].weight_bytes) for name in self.harm}
        return self.bench.layer_seconds(list(self.harm))

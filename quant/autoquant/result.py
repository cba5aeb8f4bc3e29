"""What `quant.autoquant` returns: the model, its recipe, and what else was tried."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from quant.autoquant.candidates import Form
from quant.autoquant.trials import Trial
from quant.calibrate.whole_files import replace_file
from quant.page.scales import Point, drawn_points
from quant.recipe import Recipe
from quant.sensitivity.result import finite


@dataclass(frozen=True)
class Autoquantized:
    """The cheapest model within the budget, and how it was found. Printable, and JSON.

    Attributes:
        model: converted, with the backends that are fastest here; the user's float model where no int8 model keeps the
            budget and is worth having.
        recipe: by which `quantize_static`, or `quantize_dynamic` where `form` is "dynamic", gives it again; None of the
            float model.
        form: "static", "dynamic" or "float".
        chosen: the trial of `model`; `trials[0]` is the float model.
        trials: every model that was scored, those of the checkpoint included.
        seconds: of a call of `model` at the example's shape, with those backends.
        max_drop: the budget.
        objective: "latency" or "size".
        reasons: layer -> why it is not int8.
        missed: by how much the nearest int8 model misses the budget; 0.0 where one keeps it.
        held_back: the layers that harm most in that model, and their share of the error that all make alone.
        evaluations: models that were scored, those of the checkpoint included.
        metric_calls: how often the metric was called in this process.
        minutes: that this process took.
        noise: the difference of two calls of the metric with the float model.
        interrupted: whether the search was ended from the keyboard.
    """

    model: nn.Module
    recipe: Recipe | None
    form: str
    chosen: Trial
    trials: tuple[Trial, ...]
    seconds: float
    max_drop: float
    objective: str
    reasons: Mapping[str, str]
    missed: float
    held_back: Mapping[str, float]
    evaluations: int
    metric_calls: int
    minutes: float
    noise: float = 0.0
    interrupted: bool = False
    nearest: Trial | None = field(default=None, repr=False)

    @property
    def metric(self) -> float:
        """The metric of the model."""
        return self.chosen.metric

    @property
    def float_metric(self) -> float:
        """The metric of the float model."""
        return self.trials[0].metric

    @property
    def drop(self) -> float:
        """What the metric loses."""
        return self.chosen.drop

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: the recipe, the numbers, the reasons and every trial.

        Numbers that are not finite, as the metric of a model where that is no number, are None.

        Raises:
            RecipeError: the recipe that the search was given has a rule by a class or a function.
        """
        data = {
            "form": self.form,
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
            "metric": self.metric,
            "float_metric": self.float_metric,
            "drop": self.drop,
            "max_drop": self.max_drop,
            "objective": self.objective,
            "seconds": self.seconds,
            "reasons": dict(self.reasons),
            "missed": self.missed,
            "held_back": dict(self.held_back),
            "evaluations": self.evaluations,
            "metric_calls": self.metric_calls,
            "minutes": self.minutes,
            "noise": self.noise,
            "interrupted": self.interrupted,
            "trials": [_trial(one) for one in self.trials],
        }
        return {name: finite(value) for name, value in data.items()}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same as text, which is also written to `path`, if any."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            replace_file(path, text + "\n", "quant.autoquant: to_json")
        return text

    def pareto(self) -> tuple[Trial, ...]:
        """The trials that no other beats in both cost and metric, the cheapest first."""
        front: list[Trial] = []
        for one in sorted(self.trials, key=lambda one: (self._cost(one), -one.metric)):
            if not front or one.metric > front[-1].metric:
                front.append(one)
        return tuple(front)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a drawing of every trial: its time or size against the metric, with the budget as a line.

        Args:
            path: of an .svg file, which browsers show.

        Raises:
            ValueError: another suffix.
        """
        unit = "milliseconds" if self.objective == LATENCY else "KiB of parameters and buffers"
        scale = 1e3 if self.objective == LATENCY else 1 / 1024
        points = [
            Point(
                self._cost(one) * scale, one.metric, f"{one.plan.says}: {one.metric:.5g}", one.plan == self.chosen.plan
            )
            for one in self.trials
        ]
        title = f"metric against {unit}; the line is the budget, {self.max_drop:g} below float"
        drawn_points(path, title, (unit, "metric"), points, floor=self.float_metric - self.max_drop)

    def _cost(self, trial: Trial) -> float:
        """In seconds of the same float model, or bytes."""
        if self.objective != LATENCY:
            return float(trial.cost.bytes)
        return trial.cost.ratio * self.trials[0].cost.float_seconds

    def __str__(self) -> str:
        cost, base = self.chosen.cost, self.trials[0].cost
        head = f"{self.chosen.plan.says}: metric {self.metric:.6g} of {self.float_metric:.6g} in float"
        lines = [
            f"{head} (loses {self.drop:.3g}, at most {self.max_drop:g})",
            f"{self.seconds * 1e3:.3g} ms of {cost.float_seconds * 1e3:.3g}, "
            f"{cost.bytes / 1024:.0f} KiB of {base.bytes / 1024:.0f}",
            f"{self.evaluations} models scored, {self.metric_calls} calls of the metric, {self.minutes:.1f} minutes",
        ]
        if self.interrupted:
            lines.append("ended from the keyboard: the best so far")
        if self.noise:
            lines.append(f"two calls of the metric with the float model differ by {self.noise:.3g}")
        lines += self._why_float()
        lines += [f"not int8: {name or '(root)'}: {why}" for name, why in self.reasons.items()]
        return "\n".join(lines)

    def _why_float(self) -> list[str]:
        if self.form != Form.FLOAT.value:
            return []
        if self.nearest is None:
            return ["no int8 model was scored"]
        if not self.missed:
            ratio = self.nearest.cost.ratio
            return [
                f"int8 keeps the budget and is no better: {self.nearest.plan.says} takes {ratio:.2f} of float's time"
            ]
        layers = ", ".join(f"{name or '(root)'} ({share:.0%} of the error)" for name, share in self.held_back.items())
        return [
            f"no int8 model keeps the budget: the nearest, {self.nearest.plan.says}, misses it by {self.missed:.3g}"
            + (f"; held back by {layers}" if layers else "")
        ]


LATENCY, SIZE = "latency", "size"


def _trial(trial: Trial) -> dict[str, Any]:
    data = {
        "form": trial.plan.form.value,
        "choices": dict(trial.plan.choices),
        "metric": trial.metric,
        "drop": trial.drop,
        "sure_drop": trial.sure_drop,
        **asdict(trial.cost),
    }
    return {name: finite(value) for name, value in data.items()}

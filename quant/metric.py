"""The user's own metric: called with a model, it gives a number of which more is better.

What it gives is checked once, on the float model: that it is a number, that it is the same in two calls, and that the
float model scores better than one whose outputs are all zero.
"""

from __future__ import annotations

import copy
import math
import numbers
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from quant.runtime.trees import map_leaves
from quant.submodule_calls import evaluating

Evaluate: TypeAlias = Callable[[nn.Module], Any]
"""Model -> a number, or a score for each sample, whose mean is the metric; more is better."""


class MetricError(ValueError):
    """The metric gives no number, or less for better models."""


class MetricWarning(UserWarning):
    """The metric gives other numbers for the same model, or does not look at its outputs."""


@dataclass(frozen=True)
class Score:
    """What a metric gave for a model.

    Attributes:
        value: the metric.
        samples: the score of each sample, where the metric gives these.
    """

    value: float
    samples: tuple[float, ...] | None = None


class Metric:
    """The user's function, checked.

    Attributes:
        calls: how often it was called.
        noise, float_seconds: the difference of two calls with the float model, and the time of the second; 0.0 before
            `of_float`.
    """

    def __init__(self, evaluate: Evaluate, verb: str) -> None:
        if not callable(evaluate):
            raise TypeError(
                f"{verb}: evaluate is a {type(evaluate).__name__}, expected a function of a model that returns a "
                "number, of which more is better"
            )
        self.evaluate, self.verb = evaluate, verb
        self.calls, self.noise, self.float_seconds, self._seconds = 0, 0.0, 0.0, 0.0

    def __call__(self, model: nn.Module) -> Score:
        """The score of a model in eval mode; nan where its outputs give no number."""
        self.calls += 1
        began = time.perf_counter()
        with evaluating(model), torch.no_grad():
            score = score_of(self.evaluate(model), self.verb)
        self._seconds = time.perf_counter() - began
        return score

    def of_float(self, model: nn.Module) -> Score:
        """The score of the float model, after all checks.

        Raises:
            MetricError: it is no finite number, or that of a constant model is better.

        Warns:
            MetricWarning: two calls differ, or a constant model has the same score.
        """
        score, again = self(model), self(model)
        self.float_seconds = self._seconds
        if not math.isfinite(score.value):
            raise MetricError(f"{self.verb}: evaluate returned {score.value} for the float model, expected a number")
        self.noise = abs(score.value - again.value)
        if self.noise:
            self._warn(
                f"evaluate returned {score.value:.6g} and then {again.value:.6g} for the same float model: what "
                f"differs by less than {self.noise:.2g} is chance; seed it, and let it use the same samples each time"
            )
        self._check_direction(model, score)
        return score

    def _check_direction(self, model: nn.Module, score: Score) -> None:
        try:
            constant = self(_constant(model)).value
        except Exception:  # a metric may refuse such outputs, and need not be able to score them
            return
        if constant > score.value + self.noise:
            raise MetricError(
                f"{self.verb}: evaluate gives the float model {score.value:.6g} and a model whose outputs are all zero "
                f"{constant:.6g}: more must be better; of a loss or an error rate return its negative"
            )
        if constant == score.value:
            self._warn(
                f"evaluate gives the float model and a model whose outputs are all zero the same, {constant:.6g}: it "
                "does not use what model(...) returns, or calls another model than its argument",
                deeper=1,
            )

    def _warn(self, text: str, deeper: int = 0) -> None:
        warnings.warn(f"{self.verb}: {text}", MetricWarning, stacklevel=5 + deeper)


def score_of(result: Any, verb: str) -> Score:
    """What a metric returned, as a score.

    Raises:
        MetricError: it is neither a number nor numbers.
    """
    if isinstance(result, (np.ndarray, np.generic)) and result.dtype.kind in "biuf":
        result = torch.as_tensor(result)
    if isinstance(result, list) and result and all(map(_is_number, result)):
        result = torch.tensor([float(one) for one in result], dtype=torch.float64)
    if isinstance(result, Tensor) and not result.is_complex() and result.numel():
        values = result.detach().cpu().double()
        if values.dim():
            return _of_samples(tuple(values.flatten().tolist()))
        if result.dtype is not torch.bool:
            return Score(values.item())
    elif _is_number(result) and not isinstance(result, bool):
        return Score(float(result))
    raise MetricError(
        f"{verb}: evaluate returned {_said(result)}, expected a number, or a score for each sample, of which more is "
        "better"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (numbers.Real, np.bool_))


def _of_samples(samples: tuple[float, ...]) -> Score:
    finite = all(map(math.isfinite, samples))  # fsum raises for inf and -inf together
    return Score(math.fsum(samples) / len(samples) if finite else math.nan, samples)


def _said(result: Any) -> str:
    if result is None:
        return "None"
    if isinstance(result, Sequence) and not result:
        return f"an empty {type(result).__name__}"
    if isinstance(result, (Tensor, np.ndarray)):
        return f"a {type(result).__name__} of {result.dtype}"
    return f"a {type(result).__name__}"


def _constant(model: nn.Module) -> nn.Module:
    """The model as one that returns zeros; the model itself, which a metric may hold, does not."""

    def zeros(module: nn.Module, args: Any, output: Any) -> Any:
        return map_leaves(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, output)

    constant = copy.copy(model)
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        constant.__dict__[name] = OrderedDict(model.__dict__[name])  # a shallow copy has the model's own
    constant.register_forward_hook(zeros)
    return constant

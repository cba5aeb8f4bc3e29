"""When training observes, rounds and freezes: one object with a `step()`, like a learning-rate scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quant.observers import NoDataSeen
from quant.qat.checks import check_gradients, check_new_parameters, check_optimizer
from quant.qat.ranks import several
from quant.qat.switches import (
    fake_quantizers,
    freeze_norms,
    freeze_ranges,
    observe_only,
    round_values,
    sync_ranges,
)
from quant.qat.tracked import tracked_ranges

OBSERVE, RANGES, NORMS = 0.05, 0.6, 0.75
"""Where in the training the phases begin, as shares of its steps: rounding, frozen ranges, frozen batch norms. Early
enough that the weights still have time to settle on the integers that will be deployed."""


class QATSchedule:
    """Four phases of a training: observe only, round, freeze ranges, freeze batch norm statistics.

        schedule = quant.QATSchedule(p, steps=epochs * len(loader))
        for x, y in loader:
            ...
            optimizer.step()
            schedule.step()

    What it does to the model is in the model's state_dict; its own holds the number of steps. A training that is
    resumed builds the schedule again, with the same arguments, and loads both.

    Attributes:
        count: how often `step` was called.
        phases: the phases that have begun, of "observe", "round", "freeze_ranges", "freeze_norms".

    Args:
        prepared: from `prepare_qat`.
        steps: how often `step` will be called.
        observe: number of steps in float that ranges begin with: by default a twentieth of `steps`, or 0 where the
            model has ranges, as from calibration.
        freeze_ranges_at, freeze_norms_at: after how many steps: by default 0.6 and 0.75 of `steps`; `steps` or more
            for never.
        optimizer: checked to hold every parameter, see `check_optimizer`; once more when calls in training have brought
            learned ranges.
        sync: take ranges of the joint batch of all ranks; None does so where there are several.
        log: called with the ends of all ranges, {"<layer>/low": ..., "<layer>/high": ..., "phase": 0 to 3}, and the
            number of steps, after each `log_every` steps and where a phase begins; for any logger.
        log_every: steps.

    Raises:
        TypeError: `log` cannot be called.
        ValueError: `prepared` is not from prepare_qat, or the numbers are not in order; or it is wrapped in a
            DistributedDataParallel that expects a gradient of every parameter, and learned ranges will have none.
    """

    def __init__(
        self,
        prepared: nn.Module,
        steps: int,
        *,
        observe: int | None = None,
        freeze_ranges_at: int | None = None,
        freeze_norms_at: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        sync: bool | None = None,
        log: Callable[[dict[str, float], int], object] | None = None,
        log_every: int = 100,
    ) -> None:
        if log is not None and not callable(log):
            raise TypeError(f"QATSchedule: log is {log!r}, expected a function of the ranges and the step")
        if log_every < 1:
            raise ValueError(f"QATSchedule: log_every is {log_every}, expected a number of steps, at least 1")
        if steps < 1:
            raise ValueError(f"QATSchedule: steps is {steps}, expected how often step() will be called, at least 1")
        self.prepared, self.steps, self.count = prepared, steps, 0
        self._log, self._log_every = log, log_every
        self._optimizer, self._checked = optimizer, {id(one) for one in prepared.parameters()}
        if observe is None:
            observe = 0 if _has_ranges(prepared) else math.ceil(OBSERVE * steps)
        self.starts = {
            "observe": 0,
            "round": observe,
            "freeze_ranges": math.ceil(RANGES * steps) if freeze_ranges_at is None else freeze_ranges_at,
            "freeze_norms": math.ceil(NORMS * steps) if freeze_norms_at is None else freeze_norms_at,
        }
        if not 0 <= observe <= min(self.starts["freeze_ranges"], self.starts["freeze_norms"]):
            raise ValueError(
                f"QATSchedule: phases begin at {self.starts}, expected 0 <= observe <= freeze_ranges_at and "
                "observe <= freeze_norms_at"
            )
        if optimizer is not None:
            check_optimizer(prepared, optimizer)
        check_gradients(prepared)
        if sync is not None or several():
            sync_ranges(prepared, sync is not False)
        self._apply()

    @property
    def phases(self) -> list[str]:
        return [name for name, start in self.starts.items() if start <= self.count]

    def step(self) -> None:
        """Call after each step of the optimiser.

        Warns:
            UserWarning: calls of another kind brought learned ranges that the optimiser does not hold.
        """
        if self._optimizer is not None:
            self._check_new(self._optimizer)
        before = self.phases
        self.count += 1
        begins = self.phases != before
        if begins:
            self._apply()
        if self._log is not None and (begins or self.count % self._log_every == 0):
            self._log({**tracked_ranges(self.prepared), "phase": len(self.phases) - 1}, self.count)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps done; JSON-ready."""
        return {"count": self.count, "starts": dict(self.starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved schedule was; load the model's own state too, before or after.

        Raises:
            ValueError: the saved schedule had other phases.
        """
        if state["starts"] != self.starts:
            raise ValueError(
                f"QATSchedule: the saved schedule's phases begin at {state['starts']}, this one's at {self.starts}; "
                "build it with the same arguments"
            )
        self.count = int(state["count"])
        self._apply()

    def __repr__(self) -> str:
        return f"QATSchedule(step {self.count} of {self.steps}, now {self.phases[-1]}; begin at {self.starts})"

    def _check_new(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the parameters that the model has got since the last check."""
        now = {id(one) for one in self.prepared.parameters()}
        if now != self._checked:
            check_new_parameters(self.prepared, optimizer, now - self._checked)
            self._checked = now

    def _apply(self) -> None:
        phases = self.phases
        (round_values if "round" in phases else observe_only)(self.prepared)
        freeze_norms(self.prepared, "freeze_norms" in phases)
        if "freeze_ranges" in phases:
            freeze_ranges(self.prepared)


def _has_ranges(prepared: nn.Module) -> bool:
    try:
        for one in fake_quantizers(prepared):
            one.qparams()
    except NoDataSeen:
        return False
    return True

"""Quantisation-aware training under the Hugging Face Trainer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from quant.qat import QATSchedule
from quant.qat.schedule import OBSERVE
from quant.qat.switches import training_runners


class QATCallback(TrainerCallback):  # type: ignore[misc]
    """Drives a QATSchedule for the model that the Trainer trains; one step for each of the optimiser's.

        p = quant.prepare_qat(model, example_inputs)
        Trainer(p, args, train_dataset=data, callbacks=[QATCallback()]).train()
        q = quant.convert(p)

    A training that is resumed from a checkpoint goes on where the Trainer's own count of steps is.

    Attributes:
        schedule: the QATSchedule, from the start of `train` on.

    Args:
        options: keywords of QATSchedule; the number of steps is the Trainer's own. The optimiser is checked.
    """

    def __init__(self, **options: Any) -> None:
        self.schedule: QATSchedule | None = None
        self._options = options

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None
        options = {"optimizer": optimizer, **self._options}
        if state.global_step and "observe" not in options:
            # The loaded model has ranges either way; its switch says whether the training began by observing.
            usual = math.ceil(OBSERVE * state.max_steps)
            rounds = training_runners(model)[0].is_on("rounding")
            options["observe"] = 0 if rounds and state.global_step < usual else usual
        self.schedule = QATSchedule(model, state.max_steps, **options)
        if state.global_step:
            self.schedule.load_state_dict({"count": state.global_step, "starts": self.schedule.starts})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.schedule is not None
        self.schedule.step()

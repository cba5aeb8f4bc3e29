"""Quantisation-aware training under Lightning's Trainer."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.swa_utils import AveragedModel

from quant.qat import QATSchedule, check_optimizer
from quant.qat.checks import check_gradients
from quant.qat.switches import training_runners


class QATCallback(Callback):  # type: ignore[misc]
    """Drives a QATSchedule for the prepared model within a LightningModule; one step for each of the optimiser's.

        self.net = quant.prepare_qat(net, example)  # in the LightningModule, before configure_optimizers
        Trainer(max_epochs=3, callbacks=[QATCallback()]).fit(module, loader)
        q = quant.convert(module.net)

    It begins before Lightning's validation check, which would otherwise round with ranges that saw no data. Its state
    goes into Lightning's checkpoints, and a training that is resumed goes on in the phase in which it was.

    Attributes:
        schedule: the QATSchedule, from the start of `fit` on.

    Args:
        options: keywords of QATSchedule; the number of steps is Lightning's own.

    Raises:
        ValueError: at the start of `fit`, where the number of steps is not finite or no module is from prepare_qat; or
            the strategy's DDP expects gradients that learned ranges will not have.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.schedule: QATSchedule | None = None
        self._options = options
        self._saved: dict[str, Any] = {}
        self._seen = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError("QATCallback: the Trainer has no last step; give it max_epochs or max_steps")
        options = dict(self._options)
        if self._saved:
            starts = self._saved["starts"]
            options |= {"observe": starts["round"]}
            options |= {f"{name}_at": starts[name] for name in ("freeze_ranges", "freeze_norms")}
        self.schedule = QATSchedule(pl_module, int(steps), **options)
        if self._saved:
            self.schedule.load_state_dict(self._saved)
            self._saved = {}
        else:
            for average in _averages(trainer):
                average.module.load_state_dict(pl_module.state_dict())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen = trainer.global_step
        check_gradients(trainer.model)  # the schedule was made before the strategy wrapped the module
        if len(trainer.optimizers) == 1:
            check_optimizer(pl_module, trainer.optimizers[0])

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        """Lightning writes an average into the module after its eval(): the integers among it are averaged badly."""
        if batch_idx == 0:
            for runner in training_runners(pl_module):
                runner.train(runner.training)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != self._seen:  # not where gradients are still being accumulated
            assert self.schedule is not None
            self.schedule.step()
            self._seen = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {} if self.schedule is None else self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)


def _averages(trainer: Trainer) -> list[AveragedModel]:
    """What callbacks of averages keep: copies of the module from before the schedule set its switches."""
    values = [value for callback in trainer.callbacks for value in vars(callback).values()]
    return [value for value in values if isinstance(value, AveragedModel)]

"""What tests/quant/test_integrations.py runs: trainings under Lightning on two processes, whose states are saved.

python lightning_ranks.py FOLDER    # starts itself a second time, as Lightning's DDP does
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import quant
from quant.integrations.lightning import QATCallback
from quant.recipe import QConfig, Recipe

LEARNED = Recipe(default=QConfig(weight_observer="lsq", activation_observer="lsq"))


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Every second sample, which is rank 1's, is ten times as large. No batch norm: each rank has its own values."""

    def __init__(self, batch: int, recipe: Recipe | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        scales = torch.tensor([0.1, 1.0]).repeat(48).unsqueeze(1)
        self.data, self.batch = TensorDataset(torch.randn(96, 6) * scales, torch.arange(96) % 4), batch
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.net = quant.prepare_qat(net, self.data[:8][0], recipe)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("loss", self.training_step(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        # Lightning's own sampler shuffles where there are several ranks, and only there.
        sampler = DistributedSampler(self.data, shuffle=False) if self.trainer.world_size > 1 else None
        return DataLoader(self.data, batch_size=self.batch, sampler=sampler)

    val_dataloader = train_dataloader


def fit(
    epochs: int = 3,
    *,
    strategy: str = "ddp",
    devices: int = 2,
    recipe: Recipe | None = None,
    save: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Train on `devices` processes, on the same joint batches of 16; what came of it."""
    module, callback = Module(16 // devices, recipe), QATCallback(observe=1, freeze_ranges_at=11, freeze_norms_at=14)
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=[callback], logger=False, accelerator="cpu", devices=devices, strategy=strategy,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
    )  # fmt: skip
    try:
        trainer.fit(module, ckpt_path=resume)
    except ValueError as error:
        return {"refused": str(error)}
    if save is not None:
        trainer.save_checkpoint(save)
    assert callback.schedule is not None
    with torch.inference_mode():
        y = quant.convert(module.net)(module.data[:4][0])
    return {"model": module.net.state_dict(), "schedule": callback.schedule.state_dict(), "y": y}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")  # Lightning's of workers and loggers
    file = folder / "one.ckpt"
    states = {
        "refused": fit(1, recipe=LEARNED),
        "plain": fit(),
        "first": fit(1, save=file),
        "resumed": fit(resume=file),
        "learned": fit(strategy="ddp_find_unused_parameters_true", recipe=LEARNED),
    }
    torch.save(states, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

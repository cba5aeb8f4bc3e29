"""Callbacks drive the schedule under the real trainers; skipped where those are not installed."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant

# What the trainers themselves warn of: workers, loggers, devices, their own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")


def made() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(96, 6)
    return quant.prepare_qat(model, x), x, torch.arange(96) % 4


def test_quant_imports_no_trainer() -> None:
    code = "import quant, sys; sys.exit(any(one in sys.modules for one in ('lightning', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd="/").returncode == 0


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from quant.integrations.lightning import QATCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.x, self.labels = made()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(self.x, self.labels)
            return torch.utils.data.DataLoader(data, batch_size=8)

        val_dataloader = train_dataloader

    def fit(epochs: int, checkpoint: str | None = None) -> tuple[Any, Any, Any]:
        module, callback = Module(), QATCallback(observe=1, freeze_ranges_at=8, freeze_norms_at=10)
        trainer = lightning.Trainer(
            max_epochs=epochs, accumulate_grad_batches=3, callbacks=[callback], logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=2,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=checkpoint)
        return module, callback, trainer

    module, callback, _ = fit(3)
    assert callback.schedule.count == 12  # 12 batches an epoch, 3 of them a step
    assert callback.schedule.phases[-1] == "freeze_norms"
    quant.convert(module.net)
    _, _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, second, _ = fit(3, str(tmp_path / "one.ckpt"))
    assert second.schedule.count == 12
    for key, value in module.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[key], value), key


@pytest.mark.parametrize("first", [True, False], ids=["average first", "schedule first"])
def test_lightning_validates_the_average_that_it_leaves(first: bool) -> None:
    """From the sanity check on, which comes before the average has seen a range."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this lightning has no EMAWeightAveraging")
    from quant.integrations.lightning import QATCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            # Ranges that are not symmetric, so that zero points move.
            self.x, self.labels = torch.randn(96, 6) + 1.0, torch.arange(96) % 4
            self.net = quant.prepare_qat(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), self.x)
            self.seen: list[Tensor] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.seen.append(self.net(batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(self.x, self.labels)
            return torch.utils.data.DataLoader(data, batch_size=8)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x, self.labels), batch_size=96)

    module, average = Module(), callbacks.EMAWeightAveraging(decay=0.9)
    both = [average, QATCallback(observe=1)]
    lightning.Trainer(
        max_epochs=4, callbacks=both if first else both[::-1], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
    ).fit(module)  # fmt: skip
    module.net.eval()
    with torch.inference_mode():
        y = module.net(module.x)
        assert torch.equal(module.seen[-1], y)
        torch.testing.assert_close(quant.convert(module.net)(module.x), y)


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without gloo",
)
def test_lightning_on_two_ranks(tmp_path: Path) -> None:
    """They train as one process does with the joint batch, go on from a file, and hear of DDP's settings early."""
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from . import lightning_ranks

    done = subprocess.run(
        [sys.executable, lightning_ranks.__file__, str(tmp_path)], cwd=tmp_path, capture_output=True, timeout=500
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    mine, theirs = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    recipes = {"plain": None, "learned": lightning_ranks.LEARNED}
    for kind, recipe in recipes.items():
        one = lightning_ranks.fit(strategy="auto", devices=1, recipe=recipe)
        assert mine[kind]["schedule"] == theirs[kind]["schedule"] == one["schedule"]
        for key, value in one["model"].items():
            assert torch.equal(mine[kind]["model"][key], theirs[kind]["model"][key]), key
            torch.testing.assert_close(mine[kind]["model"][key], value, rtol=1e-4, atol=1e-5, msg=key)
        assert torch.equal(mine[kind]["y"], theirs[kind]["y"])
    assert mine["resumed"]["schedule"] == mine["plain"]["schedule"]
    for key, value in mine["plain"]["model"].items():
        assert torch.equal(mine["resumed"]["model"][key], value), key
    for rank in (mine, theirs):
        assert "ddp_find_unused_parameters_true" in rank["refused"]["refused"]


@pytest.mark.usefixtures("torchvision_loads")
def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from quant.integrations.transformers import QATCallback

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, x, labels = made()
            self.data = [{"x": one, "labels": label} for one, label in zip(x, labels, strict=True)]

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.net(x)
            return {"loss": F.cross_entropy(y, labels), "logits": y}

    def fit(resume: str | None = None) -> tuple[Any, Any]:
        model, callback = Scored(), QATCallback()
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=12, per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True,
            report_to=[], save_steps=4, learning_rate=1e-2, disable_tqdm=True, seed=0, remove_unused_columns=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=model.data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return model, callback

    model, callback = fit()
    assert callback.schedule.count == 12
    assert callback.schedule.phases[-1] == "freeze_norms"
    quant.convert(model.net)
    resumed, second = fit(str(tmp_path / "checkpoint-4"))
    assert second.schedule.count == 12
    assert second.schedule.starts == callback.schedule.starts
    for key, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The library as in a new process: what one Accelerator computes in is kept for all."""
    library = pytest.importorskip("accelerate", reason="accelerate is not installed")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("job", ["training", "calibration", "static"])
def test_accelerate_in_bfloat16(job: str, accelerate: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(32, 6)
    jobs = {"training": quant.prepare_qat, "calibration": quant.prepare}
    made = jobs[job](model, x) if job in jobs else quant.quantize_static(model, [x], progress=False)
    run = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = run.prepare(made)
    if job == "training":
        run.backward(prepared.train()(x).sum())
        prepared.eval()
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x), atol=0.05, rtol=0.05)
        if job != "static":
            converted = quant.convert(run.unwrap_model(prepared))
            torch.testing.assert_close(converted(x), model(x), atol=0.05, rtol=0.05)


def test_transformers_in_bfloat16(tmp_path: Path, accelerate: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.last(self.first(x).relu())
            return {"loss": F.cross_entropy(y, labels), "logits": y}

    x, labels = torch.randn(32, 6), torch.arange(32) % 4
    prepared = quant.prepare_qat(Scored(), (x, labels))
    data = [{"x": one, "labels": label} for one, label in zip(x, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, bf16=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = transformers.Trainer(prepared, arguments, train_dataset=data)
    trainer.train()
    assert {entry.name for entry in quant.summary(quant.convert(trainer.model)) if entry.outcome == "int8"} >= {
        "first",
        "last",
    }


@torch.no_grad()
def test_the_function_of_a_forward_may_be_bound_to_the_model() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(32, 6)
    for made in (quant.prepare(model, x), quant.quantize_static(model, [x], progress=False)):
        expected = made(x)
        made.forward = types.MethodType(made.forward.__func__, made)  # type: ignore[union-attr]
        assert torch.equal(made(x), expected)
        assert torch.equal(copy.deepcopy(made)(x), expected)

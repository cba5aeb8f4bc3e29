"""Train a CNN for 4-bit weights, which collapses without: learned scales, and the float model as teacher.

    python tutorials/qat_4bit.py [--epochs N] [--images N] [--out FILE.png]

Each layer between the first and the last has one scale for its whole weight, as formats without a scale per channel ask
for, and 15 values to choose from. Depthwise filters differ in size, so the small ones are rounded away, and the float
model's weights are of no use. Training learns weights and scales that fit. The script ends in asserts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from curves import draw
from qat_cnn import BATCH, OUT, fine_tune
from torch import Tensor, nn
from train_fashion import accuracy, trained
from zoo import fashion
from zoo.fetch import DataUnavailable

import quant

EPOCHS = 3
LEARNING_RATE = 3e-3  # the weights have far to go
SCALE_RATE = 1e-3
"""Of the learned scales. They are small numbers, and one step of one moves a whole layer's weights."""

EIGHT_BITS, FOUR_BITS = quant.QConfig(), quant.QConfig(weight_bits=4, per_channel=False)
EDGES = {"stem.0": EIGHT_BITS, "head": EIGHT_BITS}
"""The first and the last layer keep 8 bits: few weights, on which much depends (LSQ paper, section 2.3)."""

PTQ = quant.Recipe(EDGES, default=FOUR_BITS)
QAT = quant.Recipe(EDGES, default=replace(FOUR_BITS, weight_observer="lsq"))


def prepare(model: nn.Module, images: Tensor) -> nn.Module:
    """The model with the same bits, and scales of the 4-bit weights that are learned."""
    return quant.prepare_qat(model, images[:BATCH], QAT)


def optimizer_of(p: nn.Module) -> torch.optim.Optimizer:
    """Learned scales, which have `_quant` in their names, in a group of their own: a low rate, and no decay to 0."""
    scales = [parameter for name, parameter in p.named_parameters() if "_quant" in name]
    weights = [parameter for name, parameter in p.named_parameters() if "_quant" not in name]
    return torch.optim.AdamW(
        [
            {"params": weights, "lr": LEARNING_RATE, "weight_decay": 0.01},
            {"params": scales, "lr": SCALE_RATE, "weight_decay": 0.0},
        ]
    )


def distilled(teacher: nn.Module, p: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    """Learn what the float model answers, more than what the labels say."""
    with torch.no_grad():
        answers = teacher(x)
    return quant.distill_loss(p(x), answers, classes, temperature=2.0, alpha=0.7)


def train(
    p: nn.Module,
    images: Tensor,
    classes: Tensor,
    *,
    teacher: nn.Module,
    epochs: int = EPOCHS,
    seed: int = 0,
    after_epoch: Callable[[], None] = lambda: None,
    progress: str | None = "QAT, 4 bits",
) -> None:
    """Train what `prepare` made, in place."""
    fine_tune(
        p,
        images,
        classes,
        optimizer_of(p),
        epochs=epochs,
        seed=seed,
        loss_of=partial(distilled, teacher.eval()),
        after_epoch=after_epoch,
        progress=progress,
    )


def tutorial(epochs: int, images: int, out: Path) -> tuple[float, float, list[float]]:
    """Returns the accuracies of float, PTQ, and QAT after each epoch."""
    x, classes = (data[:images] for data in fashion.load("train"))
    test, test_classes = (data[:images] for data in fashion.load("test"))
    model = trained("depthwise")
    before = accuracy(model, test, test_classes)
    ptq = accuracy(quant.quantize_static(model, x[:512].split(64), PTQ, progress=False), test, test_classes)

    p = prepare(model, x)
    qat: list[float] = []
    train(
        p,
        x,
        classes,
        teacher=model,
        epochs=epochs,
        after_epoch=lambda: qat.append(accuracy(quant.convert(p), test, test_classes)),
    )

    q = quant.convert(p)
    levels = {name: len(layer.q_weight.unique()) for name, layer in q.named_modules() if hasattr(layer, "q_weight")}
    four = {name: count for name, count in levels.items() if name not in EDGES}
    print(f"float {100 * before:.2f} %, PTQ {100 * ptq:.2f} %, QAT {100 * qat[-1]:.2f} % of {len(test):,} images right")
    draw(out, "Depthwise CNN, 4-bit weights, one scale a layer", before, {"PTQ, 4 bits": ptq}, {"QAT, 4 bits": qat})
    print(f"wrote {out}")
    assert len(four) == len(levels) - len(EDGES)
    assert max(four.values()) <= 15, f"more than 15 different values in a 4-bit weight: {four}"
    assert quant.parity(p, q, test[:1000].split(250)).holds
    return before, ptq, qat


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of QAT (default {EPOCHS})")
    parser.add_argument("--images", type=int, default=60_000, help="train on, and score, at most so many (default all)")
    parser.add_argument("--out", type=Path, default=OUT / "qat_4bit.png", help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        before, ptq, qat = tutorial(options.epochs, options.images, options.out)
    except DataUnavailable as error:
        sys.exit(f"qat_4bit: {error}")
    if options.images >= 60_000:
        assert ptq < before - 0.2, f"PTQ gives {ptq:.4f}: it was to collapse"
        assert qat[-1] >= before - 0.01, f"QAT gives {qat[-1]:.4f}, float {before:.4f}: more than 1 point lost"


if __name__ == "__main__":
    main()

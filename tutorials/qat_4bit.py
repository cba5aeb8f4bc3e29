"""Train a CNN for 4-bit weights, which collapses without: equalised channels, learned scales, a teacher.

    python tutorials/qat_4bit.py [--epochs N] [--images N] [--out FILE.png]

Every layer, the first and the last too, has one scale for its whole weight, as formats without a scale per channel ask
for, and 15 values to choose from. Depthwise filters differ in size, so the small ones are rounded away, and the float
model's weights are of no use. Equalising the channels is where to begin; training finds the rest. The script ends in
asserts.
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
from quant.kernels.narrow import as_bytes
from torch import Tensor, nn
from train_fashion import accuracy, trained
from zoo import fashion
from zoo.fetch import DataUnavailable

import quant

EPOCHS = 3
LEARNING_RATE = 1e-3  # three times what eight bits need: the weights have farther to go

FOUR_BITS = quant.QConfig(weight_bits=4, per_channel=False)
PTQ = quant.Recipe(default=FOUR_BITS)
QAT = quant.Recipe(default=replace(FOUR_BITS, weight_observer="lsq"))


def equalized(model: nn.Module, images: Tensor) -> nn.Module:
    """The float model with the same answers and channels of like size."""
    return quant.equalize(model, images[:BATCH])


def prepare(model: nn.Module, images: Tensor) -> nn.Module:
    """The equalised model with 4-bit weights, whose scales are learned."""
    return quant.prepare_qat(equalized(model, images), images[:BATCH], QAT)


def optimizer_of(p: nn.Module) -> torch.optim.Optimizer:
    """Learned scales, which have `_quant` in their names, in a group of their own: decay would pull them to 0."""
    scales = [parameter for name, parameter in p.named_parameters() if "_quant" in name]
    weights = [parameter for name, parameter in p.named_parameters() if "_quant" not in name]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


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


def tutorial(epochs: int, images: int, out: Path) -> tuple[float, dict[str, float], list[float]]:
    """Returns the accuracies of float, of PTQ in three ways, and of QAT after each epoch."""
    x, classes = (data[:images] for data in fashion.load("train"))
    test, test_classes = (data[:images] for data in fashion.load("test"))
    model = trained("depthwise")
    before = accuracy(model, test, test_classes)

    # 1. 4 bits after training: as they are, equalised, and with as many scales as channels.
    def rounded(start: nn.Module, recipe: quant.Recipe) -> float:
        return accuracy(quant.quantize_static(start, x[:512].split(64), recipe, progress=False), test, test_classes)

    ptq = {
        "PTQ": rounded(model, PTQ),
        "PTQ, equalised": rounded(equalized(model, x), PTQ),
        "PTQ, a scale per channel": rounded(model, quant.Recipe(default=replace(FOUR_BITS, per_channel=True))),
    }

    # 2. 4 bits by training.
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
    int8 = {name: layer for name, layer in q.named_modules() if hasattr(layer, "q_weight")}
    levels = {name: len(as_bytes(layer.q_weight).unique()) for name, layer in int8.items()}  # stored in 4 bits
    shares = {"float": before, **ptq, "QAT": qat[-1]}
    for name, share in shares.items():
        print(f"{name:26} {100 * share:5.2f} % of {len(test):,} images right")
    draw(out, "Depthwise CNN, 4-bit weights, one scale a layer", before, ptq, {"QAT, 4 bits": qat})
    print(f"wrote {out}")
    assert set(levels) == {name for name, layer in model.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))}
    assert max(levels.values()) <= 15, f"more than 15 different values in a 4-bit weight: {levels}"
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
        assert ptq["PTQ"] < before - 0.2, f"PTQ gives {ptq['PTQ']:.4f}: it was to collapse"
        assert qat[-1] > max(ptq.values()), f"QAT gives {qat[-1]:.4f}, no more than PTQ: {ptq}"
        assert qat[-1] >= before - 0.01, f"QAT gives {qat[-1]:.4f}, float {before:.4f}: more than 1 point lost"


if __name__ == "__main__":
    main()

"""Train a small CNN for int8 in a plain loop: float, int8 after training (PTQ), int8 by training (QAT).

    python tutorials/qat_cnn.py [--epochs N] [--images N] [--out FILE.png]

The network, depthwise convolutions with batch norms, is trained in float by train_fashion.py (minutes, the first time).
What is scored is always the int8 model that `quant.convert` makes, on 10,000 test images. No epoch is chosen by that:
the last one counts. The script ends in asserts. README.md walks through it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from curves import draw
from quant.kernels.progress import progress_of
from torch import Tensor, nn
from train_fashion import accuracy, trained
from zoo import fashion
from zoo.fetch import DataUnavailable

import quant

EPOCHS = 3
BATCH = 128
LEARNING_RATE = 3e-4  # a tenth of what the float model was trained with, or less, is usual
OUT = Path(__file__).parent / "out"


def cross_entropy(p: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    """The loss that the float model was trained with."""
    return F.cross_entropy(p(x), classes, label_smoothing=0.05)


def fine_tune(
    p: nn.Module,
    images: Tensor,
    classes: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    seed: int = 0,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = cross_entropy,
    after_epoch: Callable[[], None] = lambda: None,
    progress: str | None = "QAT",
) -> None:
    """A plain training loop. What quantisation adds to it is the schedule: one line to make it, one to step it.

    Args:
        p: from `quant.prepare_qat`, trained in place.
        optimizer: of p's parameters; its learning rates fall to 0 by a cosine.
        seed: of the order of the images, and of which are mirrored.
        progress: label of a progress bar on stderr; None for none.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(images) // BATCH)
    schedule = quant.QATSchedule(p, steps, optimizer=optimizer)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with progress_of(progress, unit="batch", total=steps) as bar:
        for _ in range(epochs):
            p.train()
            for batch in torch.randperm(len(images), generator=generator).split(BATCH):
                mirrored = torch.rand(len(batch), generator=generator) < 0.5
                x = torch.where(mirrored.reshape(-1, 1, 1, 1), images[batch].flip(-1), images[batch])
                optimizer.zero_grad()
                loss = loss_of(p, x, classes[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                rates.step()
                schedule.step()
                bar.update()
                bar.set_postfix_str(f"loss={loss.item():.3f}", refresh=False)
            p.eval()
            after_epoch()


def prepare(model: nn.Module, images: Tensor) -> nn.Module:
    """The float model with fake quantisation in; the model itself stays as it is."""
    return quant.prepare_qat(model, images[:BATCH])


def train(
    p: nn.Module,
    images: Tensor,
    classes: Tensor,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    after_epoch: Callable[[], None] = lambda: None,
    progress: str | None = "QAT, int8",
) -> None:
    """Train what `prepare` made, in place."""
    optimizer = torch.optim.AdamW(p.parameters(), lr=LEARNING_RATE, weight_decay=0.01)  # p's, not the float model's
    fine_tune(p, images, classes, optimizer, epochs=epochs, seed=seed, after_epoch=after_epoch, progress=progress)


def tutorial(epochs: int, images: int, out: Path) -> tuple[float, float, list[float]]:
    """The steps of the walk-through; returns the accuracies of float, PTQ, and QAT after each epoch."""
    x, classes = (data[:images] for data in fashion.load("train"))
    test, test_classes = (data[:images] for data in fashion.load("test"))
    model = trained("depthwise")
    before = accuracy(model, test, test_classes)

    # 1. Int8 after training: ranges from 512 images, no training.
    ptq = accuracy(quant.quantize_static(model, x[:512].split(64), progress=False), test, test_classes)

    # 2. Int8 by training.
    p = prepare(model, x)
    qat: list[float] = []
    train(p, x, classes, epochs=epochs, after_epoch=lambda: qat.append(accuracy(quant.convert(p), test, test_classes)))

    # 3. What was trained is what runs: the integers give the classes that the trained model gave.
    q = quant.convert(p)
    with torch.inference_mode():
        same = (q(test).argmax(1) == p(test).argmax(1)).double().mean().item()
    agreement = quant.parity(p, q, test[:1000].split(250))

    print(f"float {100 * before:.2f} %, PTQ {100 * ptq:.2f} %, QAT {100 * qat[-1]:.2f} % of {len(test):,} images right")
    print(f"int8 names the trained model's class for {100 * same:.2f} %; {agreement.unequal:.5%} of all values differ")
    draw(out, "Depthwise CNN on Fashion-MNIST, int8", before, {"PTQ, int8": ptq}, {"QAT, int8": qat})
    print(f"wrote {out}")
    assert agreement.holds
    assert same >= 0.999
    return before, ptq, qat


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of QAT (default {EPOCHS})")
    parser.add_argument("--images", type=int, default=60_000, help="train on, and score, at most so many (default all)")
    parser.add_argument("--out", type=Path, default=OUT / "qat_cnn.png", help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        before, _, qat = tutorial(options.epochs, options.images, options.out)
    except DataUnavailable as error:
        sys.exit(f"qat_cnn: {error}")
    if options.images >= 60_000:
        assert qat[-1] >= before - 0.001, f"QAT gives {qat[-1]:.4f}, float {before:.4f}: more than 0.1 points lost"


if __name__ == "__main__":
    main()

"""Train an LSTM for int8: the loop of qat_cnn.py, and nothing that is special to recurrent layers.

    python tutorials/qat_lstm.py [--epochs N] [--images N] [--out FILE.png]

The network reads an image row by row. Its int8 form has one range for the rows, one for the states, and weights with a
scale per gate row; training rounds all of them in every time step. The script ends in asserts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from curves import draw
from qat_cnn import OUT, fine_tune, prepare
from torch import Tensor, nn
from train_fashion import accuracy, trained
from zoo import fashion
from zoo.fetch import DataUnavailable

import quant

EPOCHS = 3
LEARNING_RATE = 3e-4


def train(
    p: nn.Module,
    images: Tensor,
    classes: Tensor,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    after_epoch: Callable[[], None] = lambda: None,
    progress: str | None = "QAT, LSTM",
) -> None:
    """Train in place what `prepare` made of the LSTM."""
    optimizer = torch.optim.AdamW(p.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    fine_tune(p, images, classes, optimizer, epochs=epochs, seed=seed, after_epoch=after_epoch, progress=progress)


def tutorial(epochs: int, images: int, out: Path) -> tuple[float, float, list[float]]:
    """Returns the accuracies of float, PTQ, and QAT after each epoch."""
    x, classes = (data[:images] for data in fashion.load("train"))
    test, test_classes = (data[:images] for data in fashion.load("test"))
    model = trained("lstm")
    before = accuracy(model, test, test_classes)
    ptq = accuracy(quant.quantize_static(model, x[:512].split(64), progress=False), test, test_classes)

    p = prepare(model, x)
    qat: list[float] = []
    train(p, x, classes, epochs=epochs, after_epoch=lambda: qat.append(accuracy(quant.convert(p), test, test_classes)))

    q = quant.convert(p)
    with torch.inference_mode():
        same = (q(test).argmax(1) == p(test).argmax(1)).double().mean().item()
    print(f"float {100 * before:.2f} %, PTQ {100 * ptq:.2f} %, QAT {100 * qat[-1]:.2f} % of {len(test):,} images right")
    print(f"int8 names the trained model's class for {100 * same:.2f} %")
    print(quant.summary(q))
    draw(out, "LSTM on Fashion-MNIST, int8", before, {"PTQ, int8": ptq}, {"QAT, int8": qat})
    print(f"wrote {out}")
    assert same >= 0.999
    assert {quant.summary(q)[name].outcome for name in ("lstm", "head")} == {"int8"}
    return before, ptq, qat


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of QAT (default {EPOCHS})")
    parser.add_argument("--images", type=int, default=60_000, help="train on, and score, at most so many (default all)")
    parser.add_argument("--out", type=Path, default=OUT / "qat_lstm.png", help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        before, _, qat = tutorial(options.epochs, options.images, options.out)
    except DataUnavailable as error:
        sys.exit(f"qat_lstm: {error}")
    if options.images >= 60_000:
        assert qat[-1] >= before - 0.002, f"QAT gives {qat[-1]:.4f}, float {before:.4f}: more than 0.2 points lost"


if __name__ == "__main__":
    main()

"""Calibrate a real CNN over a folder of photos, read the report, fix one bad layer. README.md walks through it.

    python tutorials/fix_a_layer.py [--out report.html]

EfficientNet-Lite0 as its package publishes it becomes int8, with the ranges that the KL criterion chooses: the one that
TensorRT made popular, and a good one for many networks. Here it is not, and the report says for which layer, and what
to do. The script ends in asserts: it fails where what it says does not hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from zoo import efficientnet
from zoo.fetch import SCIKIT_IMAGE, DataUnavailable, fetch

import quant

KL = quant.QConfig(activation_observer="entropy")
FIX = {"_blocks.15._depthwise_conv": quant.QConfig(activation_observer="minmax")}


def quantise(model: nn.Module, photos: list[Tensor], recipe: quant.Recipe) -> tuple[nn.Module, nn.Module]:
    """The model with observers that saw the photos, and its int8 form."""
    prepared = quant.prepare(model, photos[0], recipe)
    quant.calibrate.run(prepared, photos)
    return prepared, quant.convert(prepared)


def sqnr(expected: Tensor, found: Tensor) -> float:
    """Signal to quantisation noise of logits, in dB."""
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))


def tutorial(out: Path) -> tuple[float, float]:
    """The steps of the walk-through; returns the SQNR of the logits before and after the fix."""
    model = efficientnet.load()
    labelled, classes = efficientnet.labelled()
    with torch.inference_mode():
        logits = model(labelled)
    print(f"{'float':12} {int((logits.argmax(1) == classes).sum())} of {len(classes)} photos right")

    # 1. Calibrate over a folder. These photos have no labels, and none of them is scored.
    folder = fetch(SCIKIT_IMAGE) / "skimage" / "data"
    photos = list(quant.calibrate.read(str(folder), batch_size=8, image_size=224, scale=1, mean=[127], std=[128]))
    prepared, q = quantise(model, photos, quant.Recipe(default=KL))
    before = score("int8", q, labelled, logits, classes)

    # 2. Read the report.
    comparison = quant.compare(model, q, photos[:1])
    out.write_text(quant.report_html(q, comparison, prepared=prepared, title="EfficientNet-Lite0"), encoding="utf-8")
    worst = comparison.steps[0]
    print(f"{worst.name} adds most error: {worst.cause}.\nTry {{{worst.rule}}}. The page is {out}")

    # 3. Fix the one layer that it names, by the rule that it gives, and calibrate again.
    _, fixed = quantise(model, photos, quant.Recipe(FIX, default=KL))
    after = score("int8, fixed", fixed, labelled, logits, classes)

    # 4. What the report said of that layer has become true of no layer.
    again = quant.compare(model, fixed, photos[:1])
    assert worst.name.startswith(*FIX), f"the report names {worst.name}, and the fix is for {list(FIX)}"
    assert "clipping" in worst.cause
    assert again[worst.name].own_sqnr > worst.own_sqnr + 10
    assert after > before + 2, f"the fix gains {after - before:.1f} dB"
    return before, after


def score(what: str, q: nn.Module, labelled: Tensor, logits: Tensor, classes: Tensor) -> float:
    """Print how many photos are right and how near the logits are to float; returns the latter, in dB."""
    with torch.inference_mode():
        found = q(labelled)
    right, near = int((found.argmax(1) == classes).sum()), sqnr(logits, found)
    print(f"{what:12} {right} of {len(classes)} photos right, logits {near:.1f} dB from float")
    return near


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write")
    options = parser.parse_args(arguments)
    try:
        tutorial(options.out)
    except DataUnavailable as error:
        sys.exit(f"fix_a_layer: {error}")


if __name__ == "__main__":
    main()

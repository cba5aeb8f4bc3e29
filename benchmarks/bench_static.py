"""What static int8 costs in accuracy, on trained networks and real data (`make bench-static`).

EfficientNet-Lite0 is calibrated by everyone on the same unlabelled photos and scored on 20 labelled others; networks
trained on Fashion-MNIST are scored on its 10,000 test images. Exit status 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import display
import harness
import torch
from peers import Missing
from static_peers import MAKERS, quiet
from torch import Tensor, nn
from tqdm import tqdm

import quant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from train_fashion import logits, trained
from zoo import efficientnet, fashion
from zoo.fetch import DataUnavailable

OURS = "octet"

MARGIN = 1.0
"""dB that our logits are to be better by than the best peer's."""

FLIPS = 1
"""Photos whose first answer may differ from float's."""

POINTS = {"residual": 0.2, "depthwise": 0.2, "lstm": 0.3, "bilstm": 0.3}
"""Per cent of the test images by which int8 may be worse than float."""

CALIBRATION_IMAGES = 512

LEGEND = """
SQNR: of the logits to the float model's on the scored photos, in dB; 6 dB are one bit
flips: photos whose first answer is not float's
int8: layers with weights that compute in integers
unequal: share of uint8 values, over all steps, in which the integers differ from the float simulation; never by more
than one step
points: int8 minus float, in per cent of the test images"""


@dataclass(frozen=True)
class Converted:
    """One of ours.

    Attributes:
        model: int8.
        weighted, integer: layers with weights, and those of them that compute in integers (a dynamic layer counts).
        unequal: share of uint8 values that differ from the simulation; by one step at most, or `holds` is false.
    """

    model: nn.Module
    weighted: int
    integer: int
    unequal: float
    holds: bool


def convert(model: nn.Module, images: Tensor, batch: int, label: str) -> Converted:
    """Prepare, calibrate and convert with the defaults, and compare with the simulation."""
    prepared = quant.prepare(model, images[:1])
    quant.calibrate.run(prepared, images.split(batch), progress=label != "")
    converted = quant.convert(prepared)
    agreement = quant.parity(prepared, converted, [images[:batch]])
    weighted = [name for name, module in model.named_modules() if _is_weighted(module)]
    report = quant.summary(converted)
    integer = [name for name in weighted if report[name].outcome != "float"]
    return Converted(converted, len(weighted), len(integer), agreement.unequal, agreement.holds)


def _is_weighted(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return isinstance(module, nn.RNNBase) or (weight is not None and weight.dim() > 1)


@dataclass(frozen=True)
class Score:
    """One contender on the labelled photos; weights "" where it cannot be asked how many are int8."""

    name: str
    right: int
    flips: int
    sqnr: float
    integer: str = ""

    def row(self, best: float) -> list[str]:
        verdict = ""
        if self.name == OURS:
            whole, of = self.integer.split("/")
            good = self.flips <= FLIPS and self.sqnr >= best + MARGIN and whole == of
            verdict = "ok" if good else "WORSE"
        numbers = [str(self.right), str(self.flips), "" if math.isinf(self.sqnr) else f"{self.sqnr:.2f}"]
        return [self.name, *numbers, self.integer, verdict]


def sqnr(expected: Tensor, got: Tensor) -> float:
    """Signal to quantisation noise in dB."""
    noise = (got.double() - expected.double()).square().sum()
    return math.inf if noise == 0 else 10 * math.log10(expected.double().square().sum() / noise)


def photos(crops: int) -> tuple[list[Score], dict[str, str], Converted]:
    """Every contender on EfficientNet-Lite0; why some are absent."""
    model = efficientnet.load()
    images, classes = efficientnet.labelled()
    data = efficientnet.calibration(crops)
    with torch.inference_mode():
        expected = model(images)

    def score(name: str, found: Tensor, integer: str = "") -> Score:
        answers = found.argmax(1)
        flips = int((answers != expected.argmax(1)).sum())
        return Score(name, int((answers == classes).sum()), flips, sqnr(expected, found), integer)

    ours = convert(model, data, 1, "EfficientNet-Lite0")
    with torch.inference_mode():
        scores = [score("float", expected), score(OURS, ours.model(images), f"{ours.integer}/{ours.weighted}")]
    missing: dict[str, str] = {}
    for name, make in tqdm(MAKERS.items(), desc="peers", unit="peer", disable=None):
        try:
            with quiet():
                scores.append(score(name, make(model, data.split(1))(images)))
        except Missing as reason:
            missing[name] = str(reason)
    return scores, missing, ours


def networks(names: Sequence[str]) -> list[dict[str, object]]:
    """Each network trained on Fashion-MNIST, float and int8 on the test images."""
    images, classes = fashion.load("test")
    data = fashion.load("train")[0][:CALIBRATION_IMAGES]
    found: list[dict[str, object]] = []
    for name in names:
        model = trained(name)
        ours = convert(model, data, 64, name)
        before, after = (logits(one, images, progress=f"{name} {how}") for one, how in
                         ((model, "float"), (ours.model, "int8")))  # fmt: skip
        accuracy, quantized = ((one.argmax(1) == classes).double().mean().item() for one in (before, after))
        points = 100 * (quantized - accuracy)
        # A tenth of an image may be lost to the arithmetic of the comparison, and no whole one.
        ok = points >= -POINTS[name] - 1e-3 and ours.holds and ours.integer == ours.weighted
        found.append({"name": name, "float": accuracy, "int8": quantized, "points": points, "limit": POINTS[name],
                      "sqnr": sqnr(before, after), "weights": f"{ours.integer}/{ours.weighted}",
                      "unequal": ours.unequal, "verdict": "ok" if ok else "WORSE"})  # fmt: skip
    return found


def photo_table(scores: list[Score], missing: dict[str, str], ours: Converted) -> str:
    """The first section, and who is absent."""
    best = max((score.sqnr for score in scores if score.name not in ("float", OURS)), default=-math.inf)
    rows = [score.row(best) for score in scores]
    lines = [display.table(["EfficientNet-Lite0", "right of 20", "flips", "SQNR", "int8", "verdict"], rows)]
    lines += [f"{name} is absent: {reason}" for name, reason in missing.items()]
    lines.append(
        f"int8 against its simulation: {100 * ours.unequal:.3f} % unequal, " + ("ok" if ours.holds else "BROKEN")
    )
    return "\n".join(lines)


def network_table(found: list[dict[str, object]]) -> str:
    """The second section."""
    rows = []
    for row in found:
        shares = [f"{100 * float(str(row[key])):.2f} %" for key in ("float", "int8")]
        numbers = [f"{float(str(row['points'])):+.2f}", f"-{row['limit']}", f"{float(str(row['sqnr'])):.2f}"]
        unequal = f"{100 * float(str(row['unequal'])):.3f} %"
        rows.append([str(row["name"]), *shares, *numbers, str(row["weights"]), unequal, str(row["verdict"])])
    header = ["Fashion-MNIST", "float", "int8", "points", "limit", "SQNR", "int8", "unequal", "verdict"]
    return display.table(header, rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every verdict is ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crops", type=int, default=1, help="parts of each calibration photo, the middle first")
    parser.add_argument("--networks", nargs="*", default=list(POINTS), choices=list(POINTS), help="of Fashion-MNIST")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    facts = harness.machine(["onnxruntime", "openvino", "nncf"], options.threads)
    print(harness.describe(facts) + "\n")
    try:
        scores, missing, ours = photos(options.crops)
        found = networks(options.networks)
    except DataUnavailable as error:
        print(f"bench_static: {error}", file=sys.stderr)
        return 1
    text = photo_table(scores, missing, ours) + "\n\n" + network_table(found)
    print(text + "\n" + LEGEND)
    content = {"machine": facts, "photos": [asdict(score) for score in scores], "missing": missing, "networks": found}
    path = harness.save("bench_static", content)
    print(f"\nraw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    return 1 if "WORSE" in text or "BROKEN" in text else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

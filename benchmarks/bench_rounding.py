"""What rounding weights by their outputs keeps: nearest, GPTQ and AdaRound at 8, 4 and 3 bits, without any training.

    python benchmarks/bench_rounding.py [mobilenet_v3 efficientnet_b0 depthwise | lite0] [--images N] [--samples N]

The first three are trained on Fashion-MNIST (`mobile_networks.py`, tutorials/models.py; weights are kept in the
cache) and scored on its test images: accuracy, and the points to float. `lite0` is EfficientNet-Lite0 as its package
has it: seconds of AdaRound by layer, and how far the logits of photos are from float. CPU seconds are those of one
process, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import display
import mobile_networks
import torch
from torch import Tensor, nn

import quant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from train_fashion import accuracy
from train_fashion import trained as tutorial_network
from zoo import efficientnet, fashion
from zoo.fetch import DataUnavailable

SAMPLES = 256

METHODS = {
    "nearest": ("nearest", ""),
    "GPTQ": ("gptq", "layer"),
    "AdaRound, layers": ("adaround", "layer"),
    "AdaRound, blocks": ("adaround", "block"),
}

RECIPES = {
    "8 bits": quant.QConfig(),
    "4 bits": quant.QConfig(weight_bits=4),
    "4 bits, one scale": quant.QConfig(weight_bits=4, per_channel=False),
    "3 bits": quant.QConfig(weight_bits=3),
}

BEFORE = quant.QConfig(weight_bits=4, weight_observer="minmax", bias_correction=False)
"""Rounding to nearest with the largest weight for a range, as other toolkits do it."""


def rounded(
    model: nn.Module, batches: Sequence[Tensor], qconfig: quant.QConfig, method: str
) -> tuple[nn.Module, float, str]:
    """The int8 model, the CPU seconds of rounding, and what it says of its layers."""
    prepared = quant.prepare(model, batches[0], quant.Recipe(default=qconfig))
    quant.calibrate.run(prepared, batches, progress=False)
    began, text = time.process_time(), ""
    name, unit = METHODS[method]
    if unit:
        text = str(quant.learn_rounding(prepared, batches, name, unit=unit))
    return quant.convert(prepared), time.process_time() - began, text


def fashion_rows(
    name: str, images: int, samples: int, recipes: Sequence[str], methods: Sequence[str]
) -> Iterator[list[str]]:
    """A row per recipe and method of one network."""
    in_tutorials = name not in mobile_networks.NETWORKS
    model = tutorial_network(name) if in_tutorials else mobile_networks.trained(name)
    data = fashion.load("train")[0][:samples].split(32)
    test, classes = (one[:images] for one in fashion.load("test"))
    before = accuracy(model, test, classes)

    def row(recipe: str, method: str, q: nn.Module, seconds: float) -> list[str]:
        right = accuracy(q, test, classes)
        return [name, recipe, method, f"{100 * before:.2f}", f"{100 * right:.2f}", f"{100 * (right - before):+.2f}",
                f"{seconds:.0f}"]  # fmt: skip

    if "4 bits" in recipes:
        yield row("4 bits", "largest weight", *rounded(model, data, BEFORE, "nearest")[:2])
    for recipe in recipes:
        for method in methods if recipe != "8 bits" else ["nearest"]:
            yield row(recipe, method, *rounded(model, data, RECIPES[recipe], method)[:2])


def lite0(samples: int, methods: Sequence[str]) -> Iterator[list[str]]:
    """EfficientNet-Lite0 with 4-bit weights, by the SQNR of its logits on photos that calibration did not see."""
    model = efficientnet.load()
    data = efficientnet.calibration(-(-samples // 17))[:samples].split(8)
    photos, classes = efficientnet.labelled()
    with torch.no_grad():
        expected = model(photos)
    for method in methods:
        q, seconds, text = rounded(model, data, RECIPES["4 bits"], method)
        with torch.no_grad():
            given = q(photos)
        sqnr = 10 * torch.log10(expected.square().mean() / (given - expected).square().mean()).item()
        same = int((given.argmax(1) == expected.argmax(1)).sum())
        right = int((given.argmax(1) == classes).sum())
        print(text)
        yield [method, f"{sqnr:.1f} dB", f"{same} of {len(photos)}", str(right), f"{seconds:.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ["mobilenet_v3", "efficientnet_b0", "depthwise", "lite0"]
    parser.add_argument("networks", nargs="*", default=names, help=f"of {', '.join(names)} (default all)")
    parser.add_argument("--images", type=int, default=10_000, help="score at most so many test images (default all)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"to calibrate and round by (default {SAMPLES})")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        for name in options.networks:
            if name == "lite0":
                header, rows = (
                    ["EfficientNet-Lite0", "SQNR", "same class", "right", "CPU s"],
                    lite0(options.samples, options.methods),
                )
            else:
                header = ["network", "weights", "rounding", "float", "int8", "points", "CPU s"]
                rows = fashion_rows(name, options.images, options.samples, options.recipes, options.methods)
            print(display.table(header, list(rows)), flush=True)
    except DataUnavailable as error:
        sys.exit(f"bench_rounding: {error}")


if __name__ == "__main__":
    main()

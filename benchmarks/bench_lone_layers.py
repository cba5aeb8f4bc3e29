"""What a layer between float steps costs in int8, over its float form (`make bench-lone-layers`).

Such a layer rounds its own input and gives float32; no neighbour shares these costs. Its time over float's follows how
many products it has for each value that it reads or gives, and `quant/fusion/lone_layers.py` leaves those float that
have too few, by a number that comes from this table. Inputs are large, so that what a call itself costs does not count.
Exit status 1 when a layer that the rule leaves int8 is slower than float.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import display
import harness
import torch
from torch import nn

import quant
from quant.fusion.lone_layers import FEWEST_PRODUCTS
from quant.ops.conv import Conv, ConvTranspose
from quant.ops.linear import Linear

FLOAT, OURS = "float", "octet"

Case = tuple[Callable[[], nn.Module], tuple[int, ...]]


def linear(inputs: int, outputs: int) -> Case:
    """A linear layer on 4,096 rows."""
    return lambda: nn.Linear(inputs, outputs), (4096, inputs)


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, size: int = 56, groups: int = 1) -> Case:
    """A convolution on two images of size x size."""
    make = lambda: nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups)  # noqa: E731
    return make, (2, inputs, size, size)


def conv1d(inputs: int, outputs: int, kernel: int, groups: int = 1) -> Case:
    """A convolution on two signals of 2,048 values."""
    return lambda: nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2, groups=groups), (2, inputs, 2048)


def transposed(inputs: int, outputs: int, kernel: int, stride: int) -> Case:
    """A transposed convolution on two images of 28 x 28."""
    return lambda: nn.ConvTranspose2d(inputs, outputs, kernel, stride), (2, inputs, 28, 28)


LINEAR = [
    (1, 64),
    (2, 64),
    (3, 64),
    (4, 64),
    (8, 8),
    (8, 64),
    (16, 16),
    (32, 7),
    (16, 32),
    (32, 32),
    (64, 64),
    (256, 256),
]
LINEAR += [(64, 1), (512, 1), (512, 2), (512, 4), (512, 10)]
POINTWISE = [(1, 16), (3, 64), (16, 16), (32, 32), (64, 64), (32, 1), (64, 1), (256, 1), (64, 2), (64, 4), (256, 256)]
SQUARE = [(1, 8), (1, 32), (1, 64), (3, 8), (3, 16), (3, 32), (3, 64), (16, 16), (64, 64), (32, 1), (64, 1), (64, 3)]

CASES: dict[str, Case] = {
    **{f"Linear {i} -> {o}": linear(i, o) for i, o in LINEAR},
    **{f"Conv2d {i} -> {o}, 1 x 1": conv(i, o) for i, o in POINTWISE},
    **{f"Conv2d {i} -> {o}, 3 x 3": conv(i, o, 3) for i, o in SQUARE},
    **{f"Conv2d 3 -> {o}, 3 x 3, stride 2": conv(3, o, 3, 2, 112) for o in (16, 32)},
    "Conv2d 3 -> 64, 7 x 7, stride 2": conv(3, 64, 7, 2, 112),
    "Conv2d 3 -> 96, 16 x 16, stride 16": (lambda: nn.Conv2d(3, 96, 16, 16), (2, 3, 224, 224)),
    **{f"Conv2d {c} depthwise, {k} x {k}": conv(c, c, k, groups=c) for c in (32, 96) for k in (3, 5, 7)},
    "Conv2d 96 depthwise, 3 x 3, stride 2": conv(96, 96, 3, 2, groups=96),
    "Conv2d 64 -> 64, 3 x 3, 16 groups": conv(64, 64, 3, groups=16),
    "Conv1d 96 depthwise, 4": conv1d(96, 96, 4, groups=96),
    "Conv1d 96 depthwise, 31": conv1d(96, 96, 31, groups=96),
    "Conv1d 1 -> 32, 9": conv1d(1, 32, 9),
    "Conv1d 40 -> 64, 7": conv1d(40, 64, 7),
    "ConvTranspose2d 32 -> 16, 2 x 2, stride 2": transposed(32, 16, 2, 2),
    "ConvTranspose2d 16 -> 3, 4 x 4, stride 2": transposed(16, 3, 4, 2),
}


def products(layer: Any) -> float:
    """How many products a layer has for each value that it reads or gives, as the rule counts them."""
    shape = tuple(layer.weight.shape)
    if isinstance(layer, nn.Linear):
        return Linear().products_per_value(shape)
    kind = ConvTranspose if layer.transposed else Conv
    return kind(stride=layer.stride, groups=layer.groups).products_per_value(shape)


def run(name: str, effort: harness.Effort) -> tuple[harness.Race, float]:
    """Measure one layer; returns its `products` too."""
    torch.manual_seed(0)
    make, shape = CASES[name]
    layer, x = make().eval(), torch.randn(shape)
    int8 = quant.quantize_static(nn.Sequential(layer), [x, x.flip(-1)], progress=False)
    contenders = [harness.Contender(FLOAT, lambda: layer(x)), harness.Contender(OURS, lambda: int8(x))]
    clock = harness.clock_for(torch.get_num_threads())
    return harness.race(name, contenders, effort=effort, shape={"x": shape}, clock=clock), products(layer)


def report(races: Sequence[tuple[harness.Race, float]]) -> str:
    """The table, the fewest products first."""
    rows = []
    for race, count in sorted(races, key=lambda one: one[1]):
        times, ratio = [display.duration(race.time(name).median) for name in (FLOAT, OURS)], race.ratio(FLOAT, OURS)
        becomes = "int8" if count >= FEWEST_PRODUCTS else "float"
        rows.append(
            [race.case, f"{count:.1f}", *times, f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]", becomes]
        )
    return display.table(["layer", "products", FLOAT, OURS, f"{FLOAT} / {OURS}", "alone, it becomes"], rows)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when no layer that the rule leaves int8 is slower than float."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="only layers whose name it is found in")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each layer")
    options = parser.parse_args(arguments)
    facts = harness.machine((), 1, harness.pin(1))
    print(harness.describe(facts) + "\n")
    effort = harness.Effort(seconds=options.seconds, rounds=9)
    with torch.inference_mode():
        races = [run(name, effort) for name in CASES if re.search(options.only, name)]
    print(report(races))
    slower = [race.case for race, count in races if count >= FEWEST_PRODUCTS and race.ratio(FLOAT, OURS).high < 1]
    cases = [{**race.to_dict(), "products": count} for race, count in races]
    path = harness.save("bench_lone_layers", {"machine": facts, "cases": cases})
    print(f"\nint8 and slower than float: {', '.join(slower) or 'none'}")
    print(f"raw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

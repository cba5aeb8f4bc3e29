"""What the first call at a new batch size or length costs over the next one: `python benchmarks/bench_new_shapes.py`.

A converted model builds its plan for each shape of its inputs when it first meets it. Small images and short texts,
because what a plan costs does not depend on sizes and what a run costs does. It calls nothing but
`quant.quantize_static`, so that it measures an older checkout too: PYTHONPATH names the package that is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import networks
import torch
from torch import Tensor, nn

import quant

SIZES = range(33, 1, -1)
"""Batch sizes, and lengths less 8. The largest first, so that memory that only grows has grown."""
CALLS = 7
"""At each shape, after the first."""


def bert() -> nn.Module:
    """Four layers of 256."""
    return nn.Sequential(*(networks.BertLayer(256, 4) for _ in range(4)))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "MobileNetV2": (networks.MobileNetV2, lambda size: (size, 3, 32, 32)),
    "ResNet-18": (networks.ResNet18, lambda size: (size, 3, 32, 32)),
    "BERT, 4 layers": (bert, lambda size: (1, size + 8, 256)),
}


def seconds(call: Callable[[Tensor], object], x: Tensor) -> float:
    """Of this thread, which is the only one, in one call: other processes do not count."""
    start = time.thread_time()
    call(x)
    return time.thread_time() - start


def measure(model: nn.Module, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[float, float]]:
    """For each shape, the seconds of the first call and the median of the next ones."""
    q = quant.quantize_static(model, [torch.randn(shapes[0])], progress=False)
    for shape in shapes:
        x = torch.randn(shape)
        first = seconds(q, x)
        yield first, statistics.median(seconds(q, x) for _ in range(CALLS))


def main() -> None:
    """The table, on one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{quant.__file__}: ms, medians over {len(SIZES)} shapes")
    print(f"{'':<16} first call   next call   a new shape costs")
    for name, (make, shape_of) in CASES.items():
        if only in name:
            torch.manual_seed(0)
            with torch.inference_mode():
                times = list(measure(make().eval(), [shape_of(size) for size in SIZES]))[1:]
            first, after = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            extra = statistics.median(one - other for one, other in times) * 1e3
            print(f"{name:<16} {first:10.3f} {after:11.3f} {extra:19.3f}")


if __name__ == "__main__":
    main()

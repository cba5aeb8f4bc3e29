"""Private inference: an int8 linear layer on additive secret shares modulo 2^32 is exact.

    python tutorials/gallery/secret_shares.py [--out FILE.svg]

Alice has an input, and two servers compute a layer on it without seeing it: each holds a share, uniformly random
integers modulo 2^32 that add up to the input. The layer's weight is public. A product with a public integer and a sum
need no message between the servers, and int32 arithmetic that wraps around *is* arithmetic modulo 2^32; so the shares
of the products add up to the exact sums, where floating point would round. What needs a protocol of its own (a
comparison, and so ReLU and requantisation) Alice does here, on what she has put together again. It ends in asserts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import nn

import quant

OUT = Path(__file__).parents[1] / "out" / "secret_shares.svg"
SERVERS = 2


def shared(secret: numpy.ndarray, random: numpy.random.Generator) -> list[numpy.ndarray]:
    """Shares modulo 2^32 of an integer array, one for each server: any one of them alone is uniformly random."""
    shares = [random.integers(0, 2**32, secret.shape, dtype=numpy.uint32) for _ in range(SERVERS - 1)]
    last = secret.astype(numpy.int64).astype(numpy.uint32)  # a negative number wraps around
    for share in shares:
        last = last - share
    return [*shares, last]


def together(shares: Sequence[numpy.ndarray]) -> numpy.ndarray:
    """The integers, int32, whose shares these are."""
    return sum(shares[1:], start=shares[0]).view(numpy.int32)


def product(share: numpy.ndarray, q_weight: numpy.ndarray) -> numpy.ndarray:
    """What a server computes modulo 2^32: its share, uint32 (rows, K), times the public weight, int8 (N, K)."""
    return share @ q_weight.astype(numpy.int64).astype(numpy.uint32).T


def on_floats(x: numpy.ndarray, weight: numpy.ndarray, random: numpy.random.Generator) -> float:
    """The largest error of the same in float32, with shares as large as it takes to hide the input; relative."""
    mask = random.normal(0, 1e6 * numpy.abs(x).max(), x.shape).astype(numpy.float32)
    result = (x - mask) @ weight.T + mask @ weight.T
    expected = x.astype(numpy.float64) @ weight.T.astype(numpy.float64)
    return float(numpy.abs(result - expected).max() / numpy.abs(expected).max())


def run(rows: int = 64, inputs: int = 256, outputs: int = 128) -> tuple[list[numpy.ndarray], numpy.ndarray]:
    """Compute a layer on shares of an input; returns the shares and the input's integers."""
    torch.manual_seed(0)
    random = numpy.random.default_rng(0)
    layer, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    q_weight, w_scale = quant.kernels.quantize_weight(weight)

    # Alice: her input as integers, and a share for each server.
    scheme = quant.kernels.ACTIVATION_U8
    x_scale, zero_point, _ = vars(quant.kernels.choose_qparams(x.min(), x.max(), scheme)).values()
    q_x = quant.kernels.quantize(x, float(x_scale), int(zero_point))
    shares = shared(q_x.numpy(), random)

    # The servers, each on its own.
    products = [product(share, q_weight.numpy()) for share in shares]

    # Alice: the int32 that our kernel computes in the clear, to the bit.
    sums = together(products)
    assert numpy.array_equal(sums, quant.kernels.current().product(q_x, q_weight).numpy())

    centred = torch.from_numpy(sums) - zero_point * q_weight.sum(1, dtype=torch.int32)
    error = relative(centred * (x_scale * w_scale) + bias, layer(x).detach())
    print(
        f"{sums.size} sums of {SERVERS} servers' shares are the kernel's own; the output is off by {error:.4f} of float"
    )
    assert error < 0.02
    by_floats = on_floats(x.numpy(), weight.numpy(), random)
    print(f"shares in float32 that hide the input leave an error of {by_floats:.4f} by rounding alone")
    assert by_floats > error
    return shares, q_x.numpy()


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error over that of `expected`."""
    return float((y - expected).norm() / expected.norm())


def draw(path: Path, shares: Sequence[numpy.ndarray], secret: numpy.ndarray) -> None:
    """Histograms of the input's integers and of a server's share of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(secret.ravel(), bins=64, color="#1f6f8b")
    left.set(title="what Alice has", xlabel="uint8", yticks=[])
    right.hist(shares[0].ravel(), bins=64, color="#c1440e")
    right.set(title="what a server sees", xlabel="share modulo $2^{32}$", yticks=[], xticks=[0, 2**31, 2**32])
    right.set_xticklabels(["0", "$2^{31}$", "$2^{32}$"])
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    shares, secret = run()
    draw(options.out, shares, secret)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

"""3 x 3 convolutions of stride 1 in a planned run, which takes Winograd's algorithm where it pays: bit for bit the
reference's, whatever the weights and wherever the tiles lie."""

from __future__ import annotations

import pytest
import torch
from quant.kernels import reference_plan
from quant.kernels.backend import Backend
from torch import Tensor

LARGEST = 2**25 // 255
"""Of the sum of an output's positive weights, and of its negative ones, that equation 10 holds for."""


def run(backend: Backend, x: Tensor, weight: Tensor, padding: tuple[int, int] = (1, 1), zero_point: int = 9) -> None:
    """A planned convolution equals the reference's."""
    generator = torch.Generator().manual_seed(7)
    outputs = weight.shape[0]
    bias = torch.randint(-9999, 9999, (outputs,), generator=generator).to(torch.int32)
    # About the size that brings random sums to the range of a byte.
    multiplier = (torch.rand(outputs, generator=generator) + 0.5) / (100 * weight[0].numel() ** 0.5)
    ones = ",".join("1" for _ in weight.shape[2:])
    pad = ",".join(map(str, (0, *padding)[-(weight.dim() - 2) :]))
    program = "\n".join(
        [
            reference_plan.HEADER,
            "inputs %0",
            f"%1 = conv_u8s8_u8 q_x=%0 zero_point={zero_point} q_weight=$0 q_bias=$1 multiplier=$2 stride={ones} "
            f"padding={pad} dilation={ones} groups=1 output_zero_point=120 quant_min=3 quant_max=250",
            "outputs %1",
        ]
    )
    constants = [weight, bias, multiplier]
    found = torch.ops.octet.run_plan([x], constants, program, backend.name)
    wanted = reference_plan.run_plan([x], constants, program)
    assert torch.equal(found[0], wanted[0])


def integers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def weights(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


@pytest.mark.parametrize("outputs", [32, 40, 64, 71])
@pytest.mark.parametrize("channels", [31, 32, 48, 64])
def test_channels(compiled: Backend, channels: int, outputs: int) -> None:
    run(compiled, integers(1, channels, 20, 20), weights(outputs, channels, 3, 3))


@pytest.mark.parametrize("zero_point", [0, 128, 255])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 0), (0, 5)])
@pytest.mark.parametrize("size", [(20, 20), (17, 30), (3, 97), (22, 23)])
def test_edges(compiled: Backend, size: tuple[int, int], padding: tuple[int, int], zero_point: int) -> None:
    run(compiled, integers(2, 32, *size), weights(32, 32, 3, 3), padding, zero_point)


def test_planes_of_a_volume(compiled: Backend) -> None:
    run(compiled, integers(1, 32, 3, 11, 12), weights(32, 32, 1, 3, 3))


@pytest.mark.parametrize("value", [0, 255])
@pytest.mark.parametrize("weight", [-128, 127], ids=["least", "largest"])
def test_extremes(compiled: Backend, weight: int, value: int) -> None:
    """Sums that are known modulo 2**32 only."""
    x = torch.full((1, 96, 20, 20), value, dtype=torch.uint8)
    run(compiled, x, torch.full((32, 96, 3, 3), weight, dtype=torch.int8))


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_that_are_exact_and_one_more(compiled: Backend, sign: int, beyond: int) -> None:
    channels = 128
    row = torch.zeros(channels * 9, dtype=torch.int64)
    full, rest = divmod(LARGEST + beyond, 127)
    row[:full], row[full] = 127, rest
    weight = (sign * row).to(torch.int8).reshape(1, channels, 3, 3).repeat(32, 1, 1, 1)
    run(compiled, torch.full((1, channels, 20, 20), 255, dtype=torch.uint8), weight)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_tiles(compiled: Backend, threads: int) -> None:
    torch.set_num_threads(threads)
    run(compiled, integers(1, 64, 45, 30), weights(64, 64, 3, 3))

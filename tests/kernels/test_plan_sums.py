"""Sums with the outputs of a convolution in a planned run, which takes them as it writes these: bit for bit the
reference's, where the sum is taken with it and where it must not be."""

from __future__ import annotations

import pytest
import torch
from quant.kernels import reference_plan
from quant.kernels.backend import Backend
from torch import Tensor

BY = (
    "a_zero_point=3 a_multiplier=0.7 b_zero_point=200 b_multiplier=-0.31 output_zero_point=90 quant_min=90 "
    "quant_max=250"
)


def integers(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def conv(out: int, source: int, stride: int = 1, groups: int = 1, kernel: int = 3) -> str:
    """A layer whose constants are $0 to $2."""
    return (
        f"%{out} = conv_u8s8_u8 q_x=%{source} zero_point=9 q_weight=$0 q_bias=$1 multiplier=$2 "
        f"stride={stride},{stride} padding={kernel // 2},{kernel // 2} dilation=1,1 groups={groups} "
        "output_zero_point=120 quant_min=30 quant_max=240"
    )


def run(backend: Backend, inputs: list[Tensor], weight: tuple[int, ...], lines: list[str], outputs: str = "%9") -> None:
    """The text's results are the reference's."""
    generator = torch.Generator().manual_seed(4)
    constants = [
        torch.randint(-127, 128, weight, generator=generator).to(torch.int8),
        torch.randint(-9999, 9999, weight[:1], generator=generator).to(torch.int32),
        (torch.rand(weight[0], generator=generator) + 0.5) / (100 * (weight[1] * weight[2] * weight[3]) ** 0.5),
    ]
    given = " ".join(f"%{index}" for index in range(len(inputs)))
    program = "\n".join([reference_plan.HEADER, f"inputs {given}", *lines, f"outputs {outputs}"])
    found = torch.ops.octet.run_plan(inputs, constants, program, backend.name)
    for one, other in zip(found, reference_plan.run_plan(inputs, constants, program), strict=True):
        assert torch.equal(one, other)


LAYERS = {
    "1x1": ((40, 32, 1, 1), {"kernel": 1}),
    "3x3": ((40, 32, 3, 3), {}),
    "strided": ((40, 32, 3, 3), {"stride": 2}),
    "grouped": ((40, 8, 3, 3), {"groups": 4}),
    "depthwise": ((32, 1, 3, 3), {"groups": 32}),
    "few channels": ((5, 32, 3, 3), {}),
}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("names", ["q_a=%2 q_b=%1", "q_a=%1 q_b=%2"], ids=["left", "right"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
def test_layers(compiled: Backend, layer: tuple[tuple[int, ...], dict[str, int]], names: str, last: bool) -> None:
    weight, settings = layer
    size = 21 if settings.get("stride", 1) == 1 else 11
    inputs = [integers(2, 32, 21, 21), integers(2, weight[0], size, size)]
    if last:
        inputs = [one.contiguous(memory_format=torch.channels_last) for one in inputs]
    run(compiled, inputs, weight, [conv(2, 0, **settings), f"%9 = add {names} {BY}"])


def test_indices_are_not_added_to_bytes(compiled: Backend) -> None:
    indices = torch.zeros(2, 21, 21, 40, dtype=torch.int64).movedim(3, 1)
    with pytest.raises(ValueError, match="int64"):
        run(compiled, [integers(2, 32, 21, 21), indices], (40, 32, 3, 3), [conv(2, 0), f"%9 = add q_a=%2 q_b=%1 {BY}"])


def test_of_two_layers(compiled: Backend) -> None:
    """The second takes the sum: the first's outputs are not there before."""
    lines = [conv(2, 0), conv(3, 1), f"%9 = add q_a=%2 q_b=%3 {BY}"]
    run(compiled, [integers(1, 32, 21, 21), integers(1, 32, 21, 21)], (32, 32, 3, 3), lines)


def test_a_chain(compiled: Backend) -> None:
    """Residual blocks, whose inputs have another name at the sum."""
    lines = [conv(2, 0), "%3 = same x=%0", f"%4 = add q_a=%2 q_b=%3 {BY}"]
    lines += [conv(5, 4), "%6 = same x=%4", f"%9 = add q_a=%6 q_b=%5 {BY}"]
    run(compiled, [integers(1, 32, 21, 21)], (32, 32, 3, 3), lines)


@pytest.mark.parametrize(
    ("lines", "outputs"),
    [
        ([conv(2, 0), f"%9 = add q_a=%2 q_b=%2 {BY}"], "%9"),
        ([conv(2, 0), f"%9 = add q_a=%2 q_b=%1 {BY}"], "%9 %2"),
        ([conv(2, 0), f"%3 = add q_a=%2 q_b=%0 {BY}", f"%9 = add q_a=%2 q_b=%3 {BY}"], "%9"),
        ([conv(2, 0), f"%3 = add q_a=%0 q_b=%1 {BY}", f"%9 = add q_a=%2 q_b=%3 {BY}"], "%9"),
    ],
    ids=["itself", "given out too", "read twice", "not there yet"],
)
def test_sums_that_wait(compiled: Backend, lines: list[str], outputs: str) -> None:
    run(compiled, [integers(1, 32, 9, 9), integers(1, 32, 9, 9)], (32, 32, 3, 3), lines, outputs)


SAME_SIZE = {name: layer for name, layer in LAYERS.items() if layer[0][0] == 32} | {
    "3x3 of as many": ((32, 32, 3, 3), {}),
    "1x1 of as many": ((32, 32, 1, 1), {"kernel": 1}),
}


@pytest.mark.parametrize("layer", SAME_SIZE.values(), ids=list(SAME_SIZE))
@pytest.mark.parametrize(
    ("later", "outputs"),
    [("%4", "%9"), ("%5", "%9"), ("%1", "%9"), ("%5", "%9 %1")],
    ids=["the sum is read twice", "its last use", "the other side is read later", "the other side is given out"],
)
def test_sums_in_the_place_of_their_other_side(
    compiled: Backend, layer: tuple[tuple[int, ...], dict[str, int]], later: str, outputs: str
) -> None:
    """A sum is written where its other side lies, which nothing reads after it."""
    weight, by = layer
    lines = [conv(1, 0, **by), conv(2, 1, **by), conv(3, 2, **by), f"%4 = add q_a=%3 q_b=%1 {BY}"]
    lines += [conv(5, 4, **by), conv(6, 5, **by), f"%7 = add q_a=%6 q_b={later} {BY}", conv(9, 7, **by)]
    run(compiled, [integers(2, 32, 12, 11)], weight, lines, outputs)


@pytest.mark.parametrize("shape", [(1, 32, 1, 1), (1, 1, 9, 9), (32, 9, 9), (3, 32, 9, 9)], ids=str)
def test_sums_that_repeat_a_side(compiled: Backend, shape: tuple[int, ...]) -> None:
    run(
        compiled,
        [integers(1, 32, 9, 9), integers(*shape)],
        (32, 32, 3, 3),
        [conv(2, 0), f"%9 = add q_a=%2 q_b=%1 {BY}"],
    )


@pytest.mark.parametrize("kernel", [1, 3])
def test_threads_share_the_rows(compiled: Backend, kernel: int) -> None:
    torch.set_num_threads(2)
    inputs = [integers(1, 64, 45, 30), integers(1, 64, 45, 30)]
    run(compiled, inputs, (64, 64, kernel, kernel), [conv(2, 0, kernel=kernel), f"%9 = add q_a=%2 q_b=%1 {BY}"])

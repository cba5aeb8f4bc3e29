"""Padding in a planned run: part of a convolution's own windows where that is the same, written out where it is not."""

from __future__ import annotations

import pytest
import torch
from quant.kernels import reference_plan
from quant.kernels.backend import Backend
from torch import Tensor

ZERO = 9
END = "output_zero_point=120 quant_min=30 quant_max=240"


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def integers(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator())


def constants(*shape: int) -> list[Tensor]:
    """int8 weight, int32 bias, float32 multiplier."""
    weight = torch.randint(-127, 128, shape, generator=generator()).to(torch.int8)
    bias = torch.randint(-9999, 9999, shape[:1], generator=generator()).to(torch.int32)
    return [weight, bias, torch.rand(shape[0], generator=generator()) / 500]


def conv(q_x: str, places: str, out: str = "%9") -> str:
    return f"{out} = conv_u8s8_u8 q_x={q_x} zero_point={ZERO} q_weight=$0 q_bias=$1 multiplier=$2 {places} {END}"


def text(*lines: str, outputs: str = "%9") -> str:
    return "\n".join([reference_plan.HEADER, "inputs %0", *lines, f"outputs {outputs}"])


def check(backend: Backend, x: Tensor, weights: list[Tensor], program: str) -> None:
    expected = reference_plan.run_plan([x], weights, program)
    for last in (False, True):
        given = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
        found = torch.ops.octet.run_plan([given], weights, program, backend.name)
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


PLACES = {
    "conv": ((5, 6, 3, 3), "stride=2,2 padding=0,0 dilation=1,1 groups=1"),
    "conv that pads itself": ((5, 6, 3, 3), "stride=2,1 padding=1,0 dilation=1,2 groups=1"),
    "one tap": ((8, 8, 1, 1), "stride=1,1 padding=0,0 dilation=1,1 groups=1"),
    "one tap of every second pixel": ((5, 8, 1, 1), "stride=2,2 padding=0,0 dilation=1,1 groups=1"),
    "groups": ((4, 3, 3, 2), "stride=1,1 padding=0,1 dilation=1,1 groups=2"),
    "depthwise": ((40, 1, 3, 3), "stride=2,2 padding=0,0 dilation=1,1 groups=40"),
    "depthwise that pads itself": ((40, 1, 5, 5), "stride=1,2 padding=2,1 dilation=1,1 groups=40"),
    "dilated depthwise": ((40, 1, 3, 3), "stride=1,1 padding=0,0 dilation=2,2 groups=40"),
    "few channels depthwise": ((6, 1, 3, 3), "stride=1,1 padding=0,0 dilation=1,1 groups=6"),
}
WIDTHS = {
    "as TF": "0,1,0,1",
    "uneven": "3,1,0,2",
    "symmetric": "2,2,2,2",
    "none": "0,0,0,0",
    "along one dimension": "1,2",
    "cutting": "-1,2,3,-1",
    "channels too": "2,2,2,2,0,0,0,1",
}


@pytest.mark.parametrize("fill", [ZERO, 200], ids=["zero point", "another value"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=list(WIDTHS))
@pytest.mark.parametrize(("shape", "places"), PLACES.values(), ids=list(PLACES))
def test_before_a_convolution(compiled: Backend, shape: tuple[int, ...], places: str, widths: str, fill: int) -> None:
    channels = shape[1] * int(places.rsplit("=", 1)[1])
    program = text(f"%1 = pad q=%0 widths={widths} mode=constant fill={fill}", conv("%1", places))
    check(compiled, integers(2, channels, 9, 8), constants(*shape), program)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("widths", ["1,0,2,3", "0,0,1,2", "3,2"])
def test_of_reals(compiled: Backend, mode: str, widths: str) -> None:
    x = torch.randn(2, 3, 6, 5, generator=generator())
    check(compiled, x[0] if widths == "3,2" else x, [], text(f"%9 = pad q=%0 widths={widths} mode={mode} fill=0"))


@pytest.mark.parametrize(("shape", "places"), PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 5), (3, 3)])
def test_of_images_smaller_than_the_kernel(
    compiled: Backend, shape: tuple[int, ...], places: str, size: tuple[int, int]
) -> None:
    channels = shape[1] * int(places.rsplit("=", 1)[1])
    program = text(f"%1 = pad q=%0 widths=3,4,4,3 mode=constant fill={ZERO}", conv("%1", places))
    check(compiled, integers(1, channels, *size), constants(*shape), program)


def test_in_one_and_three_dimensions(compiled: Backend) -> None:
    once = "stride=2, padding=0, dilation=1, groups=1"
    check(compiled, integers(2, 3, 7), constants(4, 3, 3), text(pad("1,2"), conv("%1", once)))
    for groups, shape in ((1, (4, 3, 3, 2, 3)), (20, (20, 1, 1, 3, 3))):
        x = integers(1, shape[1] * groups, 4, 5, 6)
        for widths in ("1,0,0,1,2,1", "1,0,0,1", "0,0,0,0,0,1", "0,0,0,0,1,0"):
            program = text(pad(widths), conv("%1", f"stride=1,1,2 padding=0,0,0 dilation=1,1,1 groups={groups}"))
            check(compiled, x, constants(*shape), program)


@pytest.mark.parametrize("kernel", [(1, 3, 3), (1, 1, 1), (1, 2, 5), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("depth", ["0,1", "1,0", "2,3"])
@pytest.mark.parametrize("stride", [1, 2])
def test_of_planes_that_are_all_padding(
    compiled: Backend, kernel: tuple[int, int, int], depth: str, stride: int
) -> None:
    x, inner = integers(2, 64, 3, 12, 13), f"0,{kernel[1] // 2},{kernel[2] // 2}"
    for groups, shape in ((1, (64, 64, *kernel)), (4, (32, 16, *kernel)), (64, (64, 1, *kernel))):
        places = f"stride={stride},1,1 padding={inner} dilation=1,1,1 groups={groups}"
        program = text(pad(f"0,0,0,0,{depth}"), conv("%1", places))
        check(compiled, x, constants(*shape), program)


def pad(widths: str, out: str = "%1", q: str = "%0", fill: int = ZERO) -> str:
    return f"{out} = pad q={q} widths={widths} mode=constant fill={fill}"


ONCE = "stride=1,1 padding=0,0 dilation=1,1 groups=1"


def test_that_somebody_else_reads_too(compiled: Backend) -> None:
    x, weights = integers(2, 6, 5, 4), constants(5, 6, 3, 3)
    check(compiled, x, weights, text(pad("1,2,0,1"), conv("%1", ONCE), outputs="%9 %1"))
    pooled = "%2 = max_pool q=%1 kernel=3,3 stride=1 padding=0 dilation=1 ceil_mode=False"
    check(compiled, x, weights, text(pad("2,2,1,2"), conv("%1", ONCE), pooled, outputs="%2 %9"))
    sized = "%2 = reshape x=%0 shape=2,-1,%0.3"
    check(compiled, x, weights, text(pad("2,2,1,2"), sized, conv("%1", ONCE), outputs="%2 %9"))


def test_of_padding(compiled: Backend) -> None:
    for second in (ZERO, 30):
        program = text(pad("1,0,0,2"), pad("0,1,1,0", "%2", "%1", second), conv("%2", ONCE))
        check(compiled, integers(2, 6, 5, 4), constants(5, 6, 3, 3), program)


def test_of_reals_before_they_are_rounded(compiled: Backend) -> None:
    x = torch.randn(2, 6, 5, 4, generator=generator())
    rounded = f"%2 = quantize x=%1 scale=0.02 zero_point={ZERO}"
    for widths in ("0,1,0,1", "3,1,0,2", "2,2,2,2", "0,0,0,0", "1,2"):
        program = text(pad(widths, fill=0), rounded, conv("%2", ONCE.replace("stride=1", "stride=2")), outputs="%9 %2")
        check(compiled, x, constants(5, 6, 3, 3), program)
    check(compiled, x, constants(5, 6, 3, 3), text(pad("1,2,3,4", fill=0), rounded, outputs="%1 %2"))
    # Other reals than zero are rounded where they stand.
    check(compiled, x, constants(5, 6, 3, 3), text(pad("1,2,3,4", fill=2), rounded, conv("%2", ONCE)))


def test_of_no_samples(compiled: Backend) -> None:
    check(compiled, integers(0, 6, 5, 4), constants(5, 6, 3, 3), text(pad("1,2,3,4"), conv("%1", ONCE)))

"""conv_u8s8_*: int32 sums bit for bit against float64 convolutions, which are exact at these sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from quant.kernels import reference, reference_conv
from quant.kernels.backend import Backend
from torch import Tensor

CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


@dataclass(frozen=True)
class Case:
    """One convolution; sizes that are equal along every axis are written once."""

    dims: int = 2
    batch: int = 2
    channels: int = 8
    outputs: int = 12
    size: int = 9
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1

    def operands(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randint(0, 256, (self.batch, self.channels, *[self.size] * self.dims), generator=generator)
        shape = (self.outputs, self.channels // self.groups, *[self.kernel] * self.dims)
        return x.byte(), torch.randint(-127, 128, shape, generator=generator).char()

    def geometry(self) -> tuple[Any, ...]:
        return (*([value] * self.dims for value in (self.stride, self.padding, self.dilation)), self.groups)

    def exact(self, x: Tensor, zero_point: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What lies outside the input is zero, which is what the zero point stands for."""
        real = x.double() - zero_point
        sums = CONVOLUTIONS[self.dims](real, weight.double(), None, *self.geometry())
        if bias is not None:
            sums = sums + bias.double().view(-1, *[1] * self.dims)
        return sums.int()


CASES = {
    "plain": Case(),
    "1d": Case(dims=1),
    "3d": Case(dims=3, size=5),
    "pointwise": Case(kernel=1, padding=0),
    "no-padding": Case(padding=0),
    "wide-padding": Case(padding=4),
    "strided": Case(stride=2),
    "strided-past-the-kernel": Case(stride=3, kernel=2, padding=0),
    "dilated": Case(dilation=2, padding=2),
    "grouped": Case(channels=12, outputs=8, groups=4),
    "grouped-of-one-channel": Case(channels=4, outputs=8, groups=4),
    "depthwise": Case(channels=33, outputs=33, groups=33),
    "depthwise-strided-dilated": Case(channels=16, outputs=16, groups=16, stride=2, dilation=2, padding=3),
    "depthwise-1d": Case(dims=1, channels=70, outputs=70, groups=70, kernel=5),
    "depthwise-3d": Case(dims=3, channels=5, outputs=5, groups=5, size=4),
    "depthwise-16": Case(channels=16, outputs=16, groups=16, size=5),
    "depthwise-strided": Case(channels=112, outputs=112, groups=112, stride=2),
    "depthwise-64-and-a-rest": Case(channels=145, outputs=145, groups=145, size=11),
    "depthwise-5x5": Case(channels=48, outputs=48, groups=48, kernel=5, padding=2),
    "depthwise-5x5-strided": Case(channels=96, outputs=96, groups=96, kernel=5, padding=2, stride=2),
    "depthwise-strided-8-and-a-rest": Case(channels=24, outputs=24, groups=24, stride=2, size=11),
    "depthwise-5x5-8-and-a-rest": Case(channels=40, outputs=40, groups=40, kernel=5, padding=2, size=9),
    "depthwise-5x5-strided-a-rest": Case(channels=21, outputs=21, groups=21, kernel=5, padding=2, stride=2, size=9),
    "depthwise-7x7": Case(channels=40, outputs=40, groups=40, kernel=7, padding=3),
    "depthwise-2x2-stride-3": Case(channels=32, outputs=32, groups=32, kernel=2, padding=0, stride=3),
    "depthwise-many-rows": Case(batch=1, channels=20, outputs=20, groups=20, size=150),
    "depthwise-padding-alone": Case(channels=17, outputs=17, groups=17, size=1, kernel=3, padding=3),
    "pointwise-odd": Case(channels=7, outputs=5, kernel=1, padding=0),
    "pointwise-wide": Case(channels=20, outputs=150, kernel=1, padding=0),
    "pointwise-strided": Case(channels=20, outputs=16, kernel=1, padding=0, stride=2),
    "one-channel": Case(channels=1, outputs=1),
    "rgb": Case(channels=3, outputs=17, kernel=7, stride=2, padding=3, size=21),
    "rgb-without-padding": Case(channels=3, outputs=32, stride=2, padding=0, size=11),
    "rgb-dilated": Case(channels=3, outputs=33, kernel=5, dilation=2, padding=4, size=12),
    "rgb-3d": Case(dims=3, channels=3, outputs=65, stride=2, size=5),
    "pointwise-of-one-channel": Case(channels=1, outputs=17, kernel=1, padding=0, size=17),
    "pointwise-of-two-channels": Case(channels=2, outputs=1, kernel=1, padding=0, size=17),
    "pointwise-of-six-channels": Case(channels=6, outputs=5, kernel=1, padding=0, size=17),
    "pointwise-of-27-channels": Case(dims=1, channels=27, outputs=20, kernel=1, padding=0, size=300),
    "rgb-pointwise": Case(channels=3, outputs=9, kernel=1, padding=0),
    "grouped-rgb": Case(channels=6, outputs=4, groups=2),
    "kernel-of-the-input": Case(kernel=9, padding=0),
    "one-pixel": Case(size=1),
    "many-channels": Case(channels=130, outputs=65, size=4),
    "no-samples": Case(batch=0),
}
OUTPUTS = [(60, 20, 250), (0, 0, 255), (0, 0, 250), (0, 20, 255), (60, 0, 255)]
"""Zero point, smallest and largest output: kernels clamp by packing alone where that is what all three ask for."""
cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@cases
@pytest.mark.parametrize("zero_point", [0, 128, 255])
def test_sums_are_exact(backend: Backend, case: Case, zero_point: int) -> None:
    x, weight = case.operands()
    bias = torch.arange(case.outputs, dtype=torch.int32) * 1000
    for q_bias in (None, bias):
        sums = backend.conv_u8s8_s32(x, zero_point, weight, q_bias, *case.geometry())
        assert sums.dtype == torch.int32
        assert torch.equal(sums, case.exact(x, zero_point, weight, q_bias))


@cases
def test_outputs_are_those_of_the_reference(backend: Backend, case: Case) -> None:
    x, weight = case.operands()
    factors = torch.rand(case.outputs, generator=torch.Generator().manual_seed(6)) * 1e-3 + 1e-4
    sums = case.exact(x, 7, weight, None).movedim(1, -1)
    for ends in OUTPUTS:
        u8 = backend.conv_u8s8_u8(x, 7, weight, None, *case.geometry(), factors, *ends)
        assert torch.equal(u8.movedim(1, -1), reference.requantize(sums, factors, *ends)), ends
    f32 = backend.conv_u8s8_f32(x, 7, weight, None, *case.geometry(), factors)
    assert torch.equal(f32.movedim(1, -1), sums.float() * factors)


@cases
@pytest.mark.parametrize("exponent", [-1e-7, 6.0], ids=["below-1", "up-to-a-million"])
def test_outputs_far_beyond_the_range_are_clamped(backend: Backend, case: Case, exponent: float) -> None:
    """Where all multipliers are below 1 no product leaves int32, however large the sums: kernels may count on it."""
    x, weight = case.operands()
    bias = torch.arange(case.outputs, dtype=torch.int32) * 2**20 - 2**22
    bias[0], bias[-1] = 2**30, -(2**30)
    factors = torch.logspace(-4, exponent, case.outputs)
    factors[0] = 10**exponent
    sums = case.exact(x, 7, weight, bias).movedim(1, -1)
    for ends in OUTPUTS:
        u8 = backend.conv_u8s8_u8(x, 7, weight, bias, *case.geometry(), factors, *ends)
        assert torch.equal(u8.movedim(1, -1), reference.requantize(sums, factors, *ends)), ends


@pytest.mark.parametrize("kernel", [(1, 3), (3, 1), (5, 3), (2, 5)], ids=str)
@pytest.mark.parametrize("depth", [0, 2], ids=["2d", "3d"])
def test_depthwise_kernels_that_are_not_square(backend: Backend, kernel: tuple[int, int], depth: int) -> None:
    generator = torch.Generator().manual_seed(8)
    planes = (depth,) if depth else ()
    x = torch.randint(0, 256, (2, 50, *planes, 8, 13), generator=generator).byte()
    weight = torch.randint(-127, 128, (50, 1, *(1 for _ in planes), *kernel), generator=generator).char()
    ones, padding = [1] * (len(planes) + 2), [0] * len(planes) + [kernel[0] // 2, kernel[1] // 2]
    factors = torch.full((50,), 1e-3)
    u8 = backend.conv_u8s8_u8(x, 9, weight, None, ones, padding, ones, 50, factors, 60, 0, 255)
    exact = CONVOLUTIONS[len(ones)](x.double() - 9, weight.double(), None, ones, padding, ones, 50).int()
    assert torch.equal(u8.movedim(1, -1), reference.requantize(exact.movedim(1, -1), factors, 60, 0, 255))


@pytest.mark.parametrize("channels", [1, 2, 15, 17, 32, 33, 48, 49, 63, 64, 65, 80, 100, 129])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2), (4, 3)], ids=str)
def test_depthwise_kernels_take_any_number_of_channels(
    backend: Backend, channels: int, kernel: int, stride: int
) -> None:
    """Blocks of 64, 32 and 16 channels, the last of them not full, over rows of 1 to 12 pixels."""
    for size in (1, 2, 4, 7, 12):
        case = Case(2, 1, channels, channels, size, kernel, stride, kernel // 2, groups=channels)
        x, weight = case.operands()
        factors = torch.rand(channels, generator=torch.Generator().manual_seed(size)) * 1e-3 + 1e-4
        sums = case.exact(x, 7, weight, None).movedim(1, -1)
        u8 = backend.conv_u8s8_u8(x, 7, weight, None, *case.geometry(), factors, 60, 20, 250)
        assert torch.equal(u8.movedim(1, -1), reference.requantize(sums, factors, 60, 20, 250))


@pytest.mark.parametrize("groups", [1, 2, 16], ids=["full", "grouped", "depthwise"])
def test_sums_are_exact_where_int16_pairs_would_saturate(backend: Backend, groups: int) -> None:
    case = Case(channels=16, outputs=16, groups=groups)
    x, weight = case.operands()
    x = torch.full_like(x, 255)
    for first, second in itertools.product((-127, 127), repeat=2):
        weight = weight.view(-1)
        weight[0::2], weight[1::2] = first, second
        weight = weight.view(16, 16 // groups, 3, 3)
        sums = backend.conv_u8s8_s32(x, 0, weight, None, *case.geometry())
        assert torch.equal(sums, case.exact(x, 0, weight, None))
        factors = torch.full((16,), 1e-4)
        u8 = backend.conv_u8s8_u8(x, 0, weight, None, *case.geometry(), factors, 99, 0, 255)
        assert torch.equal(u8.movedim(1, -1), reference.requantize(sums.movedim(1, -1), factors, 99, 0, 255))


@pytest.mark.parametrize("groups", [1, 4, 40])
def test_a_negative_multiplier_clamps_at_the_other_end(backend: Backend, groups: int) -> None:
    g = torch.Generator().manual_seed(6)
    x = torch.randint(0, 256, (2, 40, 9, 11), dtype=torch.uint8, generator=g)
    weight = torch.randint(-127, 128, (40, 40 // groups, 3, 3), dtype=torch.int8, generator=g)
    for factor in (-0.01, -1e5, -1e7):
        arguments = x, 7, weight, None, [1, 1], [1, 1], [1, 1], groups, torch.full((40,), factor), 60, 0, 255
        assert torch.equal(backend.conv_u8s8_u8(*arguments), reference_conv.conv_u8s8_u8(*arguments)), factor


@pytest.mark.parametrize("kind", ["channels-last", "transposed", "sliced", "expanded"])
def test_every_memory_layout_is_read_right(backend: Backend, kind: str) -> None:
    case = Case()
    x, weight = case.operands()
    layouts = {
        "channels-last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3),
        "sliced": torch.cat([x, x], 3)[..., 4:13],
        "expanded": x[:1].expand(5, -1, -1, -1),
    }
    sums = backend.conv_u8s8_s32(layouts[kind], 3, weight, None, *case.geometry())
    assert torch.equal(sums, case.exact(layouts[kind], 3, weight, None))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("groups", [1, 4, 64], ids=["full", "grouped", "depthwise"])
def test_sums_do_not_depend_on_the_number_of_threads(backend: Backend, threads: int, groups: int) -> None:
    case = Case(batch=1, channels=64, outputs=64, size=20, groups=groups)
    x, weight = case.operands()
    torch.set_num_threads(threads)
    sums = backend.conv_u8s8_s32(x, 3, weight, None, *case.geometry())
    assert torch.equal(sums, case.exact(x, 3, weight, None))
    factors = torch.full((64,), 1e-3)
    u8 = backend.conv_u8s8_u8(x, 3, weight, None, *case.geometry(), factors, 60, 0, 255)
    assert torch.equal(u8.movedim(1, -1), reference.requantize(sums.movedim(1, -1), factors, 60, 0, 255))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"x": torch.zeros(1, 8, 9, 9)}, "expected Byte", id="float-input"),
        pytest.param({"x": torch.zeros(1, 7, 9, 9).byte()}, "has 7 channels", id="wrong-channels"),
        pytest.param({"x": torch.zeros(1, 8, 9).byte()}, "spatial dimensions", id="missing-axis"),
        pytest.param({"weight": torch.zeros(12, 8, 3, 3)}, "expected Byte and Char", id="float-weight"),
        pytest.param({"stride": [0, 0]}, "must be positive", id="stride-zero"),
        pytest.param({"stride": [1]}, "stride has 1 values, expected 2", id="short-stride"),
        pytest.param({"padding": [-1, -1]}, "padding not negative", id="negative-padding"),
        pytest.param({"dilation": [0, 0]}, "must be positive", id="dilation-zero"),
        pytest.param({"dilation": [9, 9]}, "does not fit the padded input", id="kernel-larger-than-the-input"),
        pytest.param({"groups": 3}, "in 3 groups", id="groups-do-not-divide"),
        pytest.param({"groups": 0}, "in 0 groups", id="no-groups"),
    ],
)
def test_bad_operands_are_refused(backend: Backend, change: dict[str, Any], words: str) -> None:
    x, weight = Case().operands()
    given = {"x": x, "weight": weight, "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1, **change}
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        backend.conv_u8s8_s32(
            given["x"], 0, given["weight"], None, given["stride"], given["padding"], given["dilation"], given["groups"]
        )


def test_views_of_one_weight_are_told_apart(backend: Backend) -> None:
    """A square weight and its transpose begin at the same byte and have the same sizes."""
    x = torch.randint(0, 256, (1, 8, 4, 4), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (8, 8, 1, 1), dtype=torch.int8)
    for view in (weight, weight.transpose(0, 1)):
        sums = backend.conv_u8s8_s32(x, 3, view, None, [1, 1], [0, 0], [1, 1], 1)
        expected = torch.einsum("oi,bihw->bohw", view[:, :, 0, 0].long(), x.long() - 3)
        assert torch.equal(sums.long(), expected)


def test_an_image_without_width_is_padding_alone(backend: Backend) -> None:
    """It has no memory, from which nothing may be copied: `make sanitize` sees that."""
    x, weight = torch.empty(1, 7, 1, 0, dtype=torch.uint8), torch.ones(7, 1, 1, 1, dtype=torch.int8)
    out = backend.conv_u8s8_f32(x, 3, weight, None, [1, 1], [0, 1], [1, 1], 7, torch.ones(7))
    assert torch.equal(out, torch.zeros(1, 7, 1, 2))

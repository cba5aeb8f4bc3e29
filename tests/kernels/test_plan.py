"""run_plan: every operation of a text, bit for bit what the reference makes of the same text."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from quant.kernels import dispatch, ops, reference_plan
from quant.kernels.backend import Backend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

FACTORS = "q_a=%0 a_zero_point=3 q_b=%1 b_zero_point=200 multiplier=0.0004"
MEAN = "zero_point=7 multiplier=0.83 output_zero_point=100"
SUM = (
    "a_zero_point=3 a_multiplier=0.7 q_b=%1 b_zero_point=200 b_multiplier=-0.31 output_zero_point=90 quant_min=90 "
    "quant_max=250"
)
PRODUCT = "a_zero_point=3 q_b=%1 b_zero_point=200 multiplier=0.004 output_zero_point=90 quant_min=0 quant_max=255"
CONV = "q_x=%0 zero_point=9 q_weight=$0 q_bias=$1 multiplier=$2"
ONCE = "stride=1,1 padding=1,1 dilation=1,1"
POOL = "padding=0 dilation=1 ceil_mode=False"
PADDED = "count_include_pad=True divisor_override=-"
UNPADDED = "count_include_pad=False divisor_override=-"
CLAMPED = "output_zero_point=120 quant_min=30 quant_max=240"
MOST_BYTES = 1 << 26
"""Of all kept plans: csrc/torch/ops_plan.cpp."""
FEATURES, TOKENS, PIXELS = (2, 6, 7, 5), (2, 5, 6), (2, 1, 1, 6)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def integers(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator())


def weights(*shape: int) -> list[Tensor]:
    """int8 weight, int32 bias, float32 multiplier."""
    weight = torch.randint(-127, 128, shape, generator=generator()).to(torch.int8)
    bias = torch.randint(-9999, 9999, shape[:1], generator=generator()).to(torch.int32)
    return [weight, bias, torch.rand(shape[0], generator=generator()) / 500]


def text(*lines: str, inputs: int = 1, outputs: str = "%9") -> str:
    given = " ".join(f"%{index}" for index in range(inputs))
    return "\n".join([reference_plan.HEADER, f"inputs {given}", *lines, f"outputs {outputs}"])


def one(line: str, *shapes: tuple[int, ...], constants: list[Tensor] | None = None) -> tuple[Any, ...]:
    """A text of one line over random integers."""
    inputs = [integers(*shape) for shape in shapes or (FEATURES,)]
    return inputs, constants or [], text(f"%9 = {line}", inputs=len(inputs))


CASES: dict[str, tuple[Any, ...]] = {
    "conv": one(
        f"conv_u8s8_u8 {CONV} stride=1,2 padding=1,1 dilation=1,1 groups=1 {CLAMPED}",
        constants=weights(5, 6, 3, 3),
    ),
    "grouped conv": one(
        f"conv_u8s8_u8 {CONV} stride=1,1 padding=2,0 dilation=2,1 groups=2 {CLAMPED}",
        constants=weights(4, 3, 3, 3),
    ),
    "depthwise conv": one(
        f"conv_u8s8_u8 {CONV} stride=2,2 padding=1,1 dilation=1,1 groups=6 {CLAMPED}",
        constants=weights(6, 1, 3, 3),
    ),
    "conv to float": one(
        f"conv_u8s8_f32 {CONV} stride=1,1 padding=0,0 dilation=1,1 groups=1",
        constants=weights(5, 6, 1, 1),
    ),
    "conv of images to float": one(
        f"conv_u8s8_f32 {CONV} stride=1,1 padding=1,1 dilation=1,1 groups=2",
        (3, 32, 19, 17), constants=weights(20, 16, 3, 3),
    ),
    "wide conv to float": one(
        f"conv_u8s8_f32 {CONV} stride=1,1 padding=0,0 dilation=1,1 groups=1",
        (2, 16, 23, 29), constants=weights(67, 16, 1, 1),
    ),
    "depthwise conv to float": one(
        f"conv_u8s8_f32 {CONV} stride=2,2 padding=1,1 dilation=1,1 groups=6", constants=weights(6, 1, 3, 3)
    ),
    "conv3d to float": one(
        f"conv_u8s8_f32 {CONV} stride=1,1,2 padding=1,0,1 dilation=1,1,1 groups=1",
        (2, 3, 4, 5, 6), constants=weights(4, 3, 3, 2, 3),
    ),
    "conv1d": one(
        f"conv_u8s8_u8 {CONV} stride=1, padding=1, dilation=1, groups=1 {CLAMPED}",
        (2, 6, 9), constants=weights(4, 6, 3),
    ),
    "conv3d": one(
        f"conv_u8s8_u8 {CONV} stride=1,1,2 padding=1,0,1 dilation=1,1,1 groups=1 {CLAMPED}",
        (2, 3, 4, 5, 6), constants=weights(4, 3, 3, 2, 3),
    ),
    "linear": one(f"linear_u8s8_u8 {CONV} {CLAMPED}", (3, 6), constants=weights(5, 6)),
    "linear of tokens": one(f"linear_u8s8_u8 {CONV} {CLAMPED}", TOKENS, constants=weights(5, 6)),
    "linear to float": one(f"linear_u8s8_f32 {CONV}", (3, 6), constants=weights(5, 6)),
    "linear without bias": one(f"linear_u8s8_u8 {CONV.replace('$1', '-')} {CLAMPED}", (3, 6), constants=weights(5, 6)),
    "add": one(f"add q_a=%0 {SUM}", FEATURES, FEATURES),
    "add a channel vector": one(f"add q_a=%0 {SUM}", FEATURES, (6, 1, 1)),
    "add a plane": one(f"add q_a=%0 {SUM}", (2, 1, 7, 5), FEATURES),
    "add one value": one(f"add q_a=%0 {SUM}", FEATURES, (1,)),
    "add outer": one(f"add q_a=%0 {SUM}", (4, 1), (1, 5)),
    "mul": one(f"mul q_a=%0 {PRODUCT}", FEATURES, FEATURES),
    "mul by a gate": one(f"mul q_a=%0 {PRODUCT}", FEATURES, (2, 6, 1, 1)),
    "mul of a gate": one(f"mul q_a=%0 {PRODUCT}", (2, 6, 1, 1), FEATURES),
    "matmul": one(f"matmul {FACTORS} {CLAMPED}", (2, 3, 20, 33), (2, 3, 33, 17)),
    "matmul of 64 rows and more": one(f"matmul {FACTORS} {CLAMPED}", (130, 64), (64, 70)),
    "matmul of broadcast batches": one(f"matmul {FACTORS} {CLAMPED}", (4, 1, 5, 6), (3, 6, 9)),
    "matmul without zero points": one(
        f"matmul {FACTORS.replace('=3', '=0').replace('=200', '=128')} {CLAMPED}", (2, 7, 6), (2, 6, 3)
    ),
    "matmul to float": one(f"matmul_f32 {FACTORS}", (2, 3, 20, 32), (2, 3, 32, 17)),
    "matmul of turned factors": (
        [integers(2, 7, 3, 33), integers(2, 9, 3, 33)], [],
        text("%2 = transpose x=%0 dim0=1 dim1=2", "%3 = permute x=%1 dims=0,2,3,1",
             f"%4 = matmul {FACTORS.replace('%0', '%2').replace('%1', '%3')} {CLAMPED}",
             "%9 = transpose x=%4 dim0=1 dim1=2", inputs=2),
    ),
    "matmul of sliced factors": (
        [integers(2, 5, 3, 8), integers(2, 5, 8, 8)], [],
        text("%2 = slice x=%0 dim=1 start=1 end=4 step=1", "%3 = slice x=%1 dim=3 start=0 end=- step=3",
             "%5 = slice x=%3 dim=1 start=1 end=4 step=1", "%4 = slice x=%2 dim=1 start=0 end=3 step=1",
             f"%9 = matmul {FACTORS.replace('%0', '%4').replace('%1', '%5')} {CLAMPED}", inputs=2),
    ),
    "expand": one("expand x=%0 shape=4,-1,3,-1", (2, 1, 5)),
    "expand by sizes": one("expand x=%0 shape=%1.0,(%1.1+1),5", (2, 1, 5)[1:], (4, 2)),
    "reshape by arithmetic": one(
        "reshape x=%0 shape=(%0.0*%0.1),(%0.3-(%0.2//2)),(((%0.2mod3)max2)min9),-1,(1+(%0.0<=2))", (2, 6, 8, 5)
    ),
    "slice by arithmetic": one("slice x=%0 dim=3 start=(0-(%0.3-1)) end=(%0.3-(%0.0!=7)) step=1"),
    "holds": one("holds x=%0 size=((%0.3*%0.-2)==(%0.2*5)) equals=1"),
    "lookup": one("lookup q=%0 table=$0 axis=1", constants=[integers(256)]),
    "lookup per channel": one("lookup q=%0 table=$0 axis=1", constants=[integers(6, 256)]),
    "lookup in a table with strides": one("lookup q=%0 table=$0 axis=1", constants=[integers(256, 6).t()]),
    "lookup per channel of rows": one("lookup q=%0 table=$0 axis=1", (3, 6), constants=[integers(6, 256)]),
    "max_pool": one("max_pool q=%0 kernel=3,3 stride=2 padding=1 dilation=1 ceil_mode=False"),
    "max_pool of many channels": one(
        "max_pool q=%0 kernel=3,2 stride=2 padding=1 dilation=1 ceil_mode=False", (2, 83, 7, 6)
    ),
    "max_pool ceil dilated": one("max_pool q=%0 kernel=2,2 stride=2,1 padding=0 dilation=2 ceil_mode=True"),
    "max_pool past the end": one("max_pool q=%0 kernel=3,3 stride=2 padding=1 dilation=1 ceil_mode=True", (1, 2, 8, 8)),
    "max_pool1d": one("max_pool q=%0 kernel=3, stride=- padding=1 dilation=1 ceil_mode=False", (2, 3, 11)),
    "max_pool3d": one("max_pool q=%0 kernel=2,2,2 stride=- padding=0 dilation=1 ceil_mode=True", (2, 3, 3, 5, 4)),
    "max_pool unbatched": one(f"max_pool q=%0 kernel=2,2 stride=- {POOL}", (3, 6, 6)),
    "avg_pool": one(f"avg_pool q=%0 kernel=3,3 {MEAN} stride=2 padding=1 ceil_mode=True {PADDED}"),
    "avg_pool inside": one(f"avg_pool q=%0 kernel=3,3 {MEAN} stride=1 padding=1 ceil_mode=True {UNPADDED}"),
    "avg_pool divisor": one(f"avg_pool q=%0 kernel=3,2 {MEAN} stride=3,2 padding=0 {PADDED[:-1]}4"),
    "adaptive_avg_pool": one(f"adaptive_avg_pool q=%0 size=3,- {MEAN}"),
    "adaptive_avg_pool to one": one(f"adaptive_avg_pool q=%0 size=1,1 {MEAN}"),
    "adaptive_max_pool": one("adaptive_max_pool q=%0 size=3,4"),
    "mean": one(f"mean q=%0 dim=2,3 keepdim=False {MEAN}"),
    "mean kept": one(f"mean q=%0 dim=-1,-2 keepdim=True {MEAN}"),
    "mean of channels": one(f"mean q=%0 dim=1, keepdim=False {MEAN}"),
    "mean of all": one(f"mean q=%0 dim=0,1,2,3 keepdim=False {MEAN}"),
    "mean of tokens": one(f"mean q=%0 dim=1, keepdim=False {MEAN}", TOKENS),
    "mean of many": one(f"mean q=%0 dim=2,3 keepdim=False {MEAN}", (1, 2, 300, 260)),
    "pad": one("pad q=%0 widths=1,0,2,3 mode=constant fill=77"),
    "pad channels": one("pad q=%0 widths=0,0,0,0,1,2 mode=constant fill=77"),
    "pad cuts": one("pad q=%0 widths=-1,2 mode=constant fill=77"),
    "pad reflect": one("pad q=%0 widths=1,2,3,0 mode=reflect fill=0"),
    "pad replicate": one("pad q=%0 widths=1,2,3,0 mode=replicate fill=0"),
    "pad circular": one("pad q=%0 widths=1,2,3,0 mode=circular fill=0"),
    "nearest twice": one(f"interpolate q=%0 {MEAN} scale_factor=2 mode=nearest"),
    "nearest smaller": one(f"interpolate q=%0 {MEAN} scale_factor=0.6,1.7 mode=nearest"),
    "nearest that stays or doubles": one(f"interpolate q=%0 {MEAN} scale_factor=2.1,1.2 mode=nearest", (2, 6, 5, 4)),
    "nearest of rows that stay": one(f"interpolate q=%0 {MEAN} scale_factor=1.3 mode=nearest", (2, 3, 3)),
    "nearest of rows that double": one(f"interpolate q=%0 {MEAN} scale_factor=2.1 mode=nearest", (2, 3, 5)),
    "nearest-exact that stays": one(f"interpolate q=%0 {MEAN} scale_factor=1.3 mode=nearest-exact", (2, 6, 3, 3)),
    "nearest recomputed": one(f"interpolate q=%0 {MEAN} scale_factor=1.7 mode=nearest recompute_scale_factor=True"),
    "nearest to a size": one(f"interpolate q=%0 {MEAN} size=13,3 mode=nearest"),
    "nearest-exact": one(f"interpolate q=%0 {MEAN} size=13,3 mode=nearest-exact"),
    "nearest 1d": one(f"interpolate q=%0 {MEAN} size=7 mode=nearest", (2, 3, 5)),
    "linear resize 1d": one(f"interpolate q=%0 {MEAN} size=7 mode=linear", (2, 3, 5)),
    "bilinear twice": one(f"interpolate q=%0 {MEAN} scale_factor=2 mode=bilinear align_corners=False"),
    "bilinear of many channels": one(f"interpolate q=%0 {MEAN} scale_factor=2.5 mode=bilinear", (2, 35, 7, 5)),
    "bilinear smaller": one(f"interpolate q=%0 {MEAN} scale_factor=0.6,1.7 mode=bilinear"),
    "bilinear recomputed": one(f"interpolate q=%0 {MEAN} scale_factor=1.7 mode=bilinear recompute_scale_factor=True"),
    "bilinear with corners": one(f"interpolate q=%0 {MEAN} size=13,3 mode=bilinear align_corners=True"),
    "bilinear to one pixel": one(f"interpolate q=%0 {MEAN} size=1 mode=bilinear align_corners=True"),
    "bilinear of one pixel": one(f"interpolate q=%0 {MEAN} size=3,4 mode=bilinear align_corners=True", PIXELS),
    "bilinear to another's size": one(
        f"interpolate q=%0 {MEAN} size=%1.-2,%1.-1 mode=bilinear", FEATURES, (1, 1, 9, 33)
    ),
    "bilinear to a size that is there": one(f"interpolate q=%0 {MEAN} size=7,9 mode=bilinear"),
    "cat": one("cat tensors=%0,%1 dim=1", FEATURES, (2, 3, 7, 5)),
    "cat of other ranges": one(
        "cat tensors=%0,%1,%0 dim=1 zero_points=3,120,0 multipliers=0.37,1.0,1.9 output_zero_point=120",
        FEATURES, (2, 3, 7, 5),
    ),
    "cat of rows of other ranges": one(
        "cat tensors=%0,%1 dim=-1 zero_points=3,200 multipliers=0.5,2.5 output_zero_point=7", (3, 70), (3, 131)
    ),
    "cat of a batch in another range": one(
        "cat tensors=%0,%1 dim=0 zero_points=3,200 multipliers=0.5,1e-20 output_zero_point=255", FEATURES, FEATURES
    ),
    "cat of one value in ranges far apart": one(
        "cat tensors=%0, dim=0 zero_points=128, multipliers=1e30, output_zero_point=9", (1, 70, 3, 3)
    ),
    "cat of rows": one("cat tensors=%0,%1,%0 dim=-1", (3, 4), (3, 2)),
    "reshape": one("reshape x=%0 shape=%0.0,-1"),
    "reshape to three": one("reshape x=%0 shape=2,6,35"),
    "flatten one pixel": one("flatten x=%0 start=1 end=-1", (3, 6, 1, 1)),
    "permute": one("permute x=%0 dims=0,2,3,1"),
    "transpose": one("transpose x=%0 dim0=1 dim1=-1"),
    "unsqueeze": one("unsqueeze x=%0 dim=-1"),
    "squeeze": one("squeeze x=%0 dim=1", PIXELS),
    "squeeze of more": one("squeeze x=%0 dim=3", PIXELS),
    "slice": one("slice x=%0 dim=1 start=-5 end=100 step=2"),
    "select": one("select x=%0 dim=-2 index=-1"),
    "chunk": one("chunk x=%0 chunks=4 dim=1 index=-1"),
    "same": one("same x=%0"),
    "no samples": one(f"conv_u8s8_u8 {CONV} {ONCE} groups=1 {CLAMPED}", (0, 6, 7, 5), constants=weights(5, 6, 3, 3)),
    "no samples to pool": one(f"max_pool q=%0 kernel=2,2 stride=- {POOL}", (0, 6, 7, 5)),
    "no samples to resize": one(f"interpolate q=%0 {MEAN} mode=nearest size=9,3", (0, 6, 7, 5)),
    "no samples to resize linearly": one(
        f"interpolate q=%0 {MEAN} mode=bilinear size=9,3 align_corners=False", (0, 6, 7, 5)
    ),
    "no samples to pad": one("pad q=%0 widths=1,0,2,3 mode=constant fill=77", (0, 6, 7, 5)),
    "no rows to multiply": one(f"matmul {FACTORS} {CLAMPED}", (2, 3, 0, 33), (2, 3, 33, 17)),
    "no samples to add": one(f"add q_a=%0 {SUM}", (0, 6, 7, 5), (1, 6, 1, 1)),
}  # fmt: skip


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.stride() == wanted.stride()
        assert torch.equal(found, wanted)


cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@cases
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_operation(compiled: Backend, case: tuple[Any, ...], last: bool) -> None:
    inputs, constants, program = case
    if last:
        inputs = [x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x for x in inputs]
    expected = reference_plan.run_plan(inputs, constants, program)
    same(torch.ops.octet.run_plan(inputs, constants, program, compiled.name), expected)


@pytest.mark.parametrize("k", [33025, 33026, 33100, 50176, 70000])
@pytest.mark.parametrize("zero_points", [(0, 0), (255, 255), (0, 255), (3, 128)])
@pytest.mark.parametrize("last", [False, True], ids=["rows", "columns"])
def test_products_whose_sums_leave_int32(compiled: Backend, k: int, zero_points: tuple[int, int], last: bool) -> None:
    a_zero, b_zero = zero_points
    a, b = integers(3, k), integers(k, 5)
    a[0], a[1], b[:, 0], b[:, 1] = 0, 255, 0, 255
    exact = (a.double() - a_zero) @ (b.double() - b_zero)  # of whole numbers below 2**53
    if last:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    factors = f"q_a=%0 a_zero_point={a_zero} q_b=%1 b_zero_point={b_zero}"
    program = text(f"%9 = matmul_f32 {factors} multiplier=0.37", inputs=2)
    expected = reference_plan.run_plan([a, b], [], program)
    assert torch.equal(expected[0], exact.float() * torch.tensor(0.37))
    same(torch.ops.octet.run_plan([a, b], [], program, compiled.name), expected)
    program = text(f"%9 = matmul {factors} multiplier=4.5e-8 {CLAMPED}", inputs=2)
    expected = reference_plan.run_plan([a, b], [], program)
    rounded = torch.round(exact.float() * torch.tensor(4.5e-8)) + 120
    assert torch.equal(expected[0], rounded.clamp(30, 240).byte())
    same(torch.ops.octet.run_plan([a, b], [], program, compiled.name), expected)


def test_a_mean_over_more_than_a_volume_is_refused(compiled: Backend) -> None:
    """torch does so of volumes alone, and so does the interpreter: a padded image may be smaller than its window."""
    x = integers(1, 2, 1, 4, 4)
    program = text(f"%9 = avg_pool q=%0 kernel=3,3,3 {MEAN} stride=1 padding=1 ceil_mode=True {PADDED}", inputs=1)
    with pytest.raises(ValueError, match="smaller than kernel size"):
        reference_plan.run_plan([x], [], program)
    with pytest.raises(ValueError, match="its window is larger than the input"):
        torch.ops.octet.run_plan([x], [], program, compiled.name)
    image = text(f"%9 = avg_pool q=%0 kernel=3,3 {MEAN} stride=1 padding=1 ceil_mode=True {PADDED}", inputs=1)
    expected = reference_plan.run_plan([x[:, :, 0, :1]], [], image)
    same(torch.ops.octet.run_plan([x[:, :, 0, :1]], [], image, compiled.name), expected)


POOLED = {
    "max": "max_pool q=%0 kernel=2,2,2 stride=- padding=1 dilation=1 ceil_mode=False",
    "mean": f"avg_pool q=%0 kernel=1,2,1 {MEAN} stride=- padding=0 ceil_mode=False {PADDED}",
}


@pytest.mark.parametrize("pool", POOLED)
def test_a_volume_without_a_batch_may_lie_like_an_image(compiled: Backend, pool: str) -> None:
    """By its strides in dimensions of size 1, torch takes it for one of channels last."""
    x, program = integers(1, 1, 2, 1), text(f"%9 = {POOLED[pool]}", inputs=1)
    for strides in ((2, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2)):
        one = x.as_strided(x.shape, strides)
        same(torch.ops.octet.run_plan([one], [], program, compiled.name), reference_plan.run_plan([one], [], program))


def network() -> tuple[list[Tensor], list[Tensor], str]:
    """Float in, float out, with a value that is read twice, one that is given out on the way, and two inputs."""
    x = torch.randn(2, 6, 9, 9, generator=generator())
    lines = (
        "%2 = quantize x=%0 scale=0.02 zero_point=9",
        f"%3 = conv_u8s8_u8 {CONV.replace('%0', '%2')} stride=1,1 padding=1,1 dilation=1,1 groups=6 {CLAMPED}",
        f"%4 = add q_a=%3 {SUM}",
        "%5 = lookup q=%4 table=$3 axis=1",
        f"%6 = mean q=%5 dim=2,3 keepdim=False {MEAN}",
        f"%7 = linear_u8s8_f32 {CONV.replace('%0', '%6').replace('$0', '$4').replace('$1', '-').replace('$2', '$5')}",
        "%8 = clamp x=%7 low=-0.5 high=inf",
        "%9 = dequantize q=%4 scale=0.1 zero_point=3",
    )
    second, _, multiplier = weights(4, 6)
    constants = [*weights(6, 1, 3, 3), integers(256), second, multiplier]
    return [x, integers(2, 6, 9, 9)], constants, text(*lines, inputs=2, outputs="%8 %4 %9 %2")


def test_network(compiled: Backend) -> None:
    inputs, constants, program = network()
    same(torch.ops.octet.run_plan(inputs, constants, program, compiled.name), reference_plan.run_plan(*network()))


def test_values_that_no_integer_can_hold(compiled: Backend) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.5, 1.5, -0.5, 1e30]])
    program = text("%9 = quantize x=%0 scale=1.0 zero_point=4")
    same(torch.ops.octet.run_plan([x], [], program, compiled.name), reference_plan.run_plan([x], [], program))


@pytest.mark.parametrize(
    "shape", [(2, 1, 9, 9), (2, 2, 9, 9), (1, 3, 70, 70), (3, 4, 5), (0, 3, 4, 4), (2, 5, 3, 4, 2)]
)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_images_of_few_channels(compiled: Backend, shape: tuple[int, ...], last: bool) -> None:
    x = torch.randn(shape, generator=generator())
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    program = text("%9 = quantize x=%0 scale=0.02 zero_point=99")
    same(torch.ops.octet.run_plan([x], [], program, compiled.name), reference_plan.run_plan([x], [], program))


@pytest.mark.parametrize("shape", [(8, 3, 6), (2, 2, 6), (3, 4, 2, 6)], ids=str)
def test_sequences_of_few_steps_are_no_images_of_few_channels(compiled: Backend, shape: tuple[int, ...]) -> None:
    """A linear layer reads rows as they come, not a channel beside the other."""
    x, program = torch.randn(shape, generator=generator()), text(
        "%1 = quantize x=%0 scale=0.01 zero_point=128",
        f"%9 = linear_u8s8_u8 q_x=%1 zero_point=128 q_weight=$0 q_bias=$1 multiplier=$2 {CLAMPED}",
    )  # fmt: skip
    constants = weights(5, 6)
    made = torch.ops.octet.run_plan([x], constants, program, compiled.name)
    same(made, reference_plan.run_plan([x], constants, program))


@pytest.mark.parametrize("bounds", [(0, 255, 0), (90, 255, 90), (30, 200, 255)], ids=str)
@pytest.mark.parametrize(
    "multipliers", [(0.7, -0.31), (0.5, 0.5), (1.0, 1e-7), (300.0, -2e3), (4e6, 3e6), (-1e30, 1e30)], ids=str
)
def test_sums_of_all_pairs(compiled: Backend, multipliers: tuple[float, float], bounds: tuple[int, int, int]) -> None:
    """Ties, sums that saturate 16 bits, and such as leave int32."""
    values = torch.arange(256).byte()
    a, b = values.repeat_interleave(256).view(1, 64, 32, 32), values.repeat(256).view(1, 64, 32, 32)
    program = text(
        f"%9 = add q_a=%0 a_zero_point=3 a_multiplier={multipliers[0]} q_b=%1 b_zero_point=200 "
        f"b_multiplier={multipliers[1]} output_zero_point={bounds[2]} quant_min={bounds[0]} quant_max={bounds[1]}",
        inputs=2,
    )
    same(torch.ops.octet.run_plan([a, b], [], program, compiled.name), reference_plan.run_plan([a, b], [], program))


def test_shapes_take_turns(compiled: Backend) -> None:
    (_, other), constants, program = network()
    for size in (9, 5, 9, 12, 5, 1):
        for batch in (1, 3):
            x = torch.randn(batch, 6, size, size, generator=generator())
            inputs = [x, other[:1, :, :1, :1]]
            same(
                torch.ops.octet.run_plan(inputs, constants, program, compiled.name),
                reference_plan.run_plan(inputs, constants, program),
            )


def test_kept_plans_are_bounded(extension: None) -> None:
    program = text("%9 = same x=%0")
    for size in range(1, 200):
        torch.ops.octet.run_plan([integers(1, size)], [], program, "")
    assert torch.ops.octet_native.plan_count() >= 199  # of one operation each
    steps = 1 << 12
    sums = (f"%{place + 1} = add_f32 a=%{place} b=%{place}" for place in range(steps))
    long = text(*sums, outputs=f"%{steps}")
    for size in range(1, 40):
        torch.ops.octet.run_plan([torch.zeros(1, size)], [], long, "")
    assert torch.ops.octet_native.plan_count() <= 1 << 16 >> 12
    assert torch.ops.octet_native.plan_bytes() <= MOST_BYTES


def test_tables_of_kept_plans_are_bounded(extension: None) -> None:
    """Of one step each, which holds where every one of its small products begins."""
    program = text(f"%9 = matmul {FACTORS} {CLAMPED}", inputs=2)
    for batch in range(200_000, 200_030):
        x = torch.ones(batch, 1, 1, dtype=torch.uint8)
        torch.ops.octet.run_plan([x, x], [], program, "")
    assert torch.ops.octet_native.plan_count() < 20
    assert 1 << 24 < torch.ops.octet_native.plan_bytes() <= MOST_BYTES


def test_plans_of_dropped_constants_are_dropped(extension: None) -> None:
    before = torch.ops.octet_native.plan_count()
    inputs, constants, program = network()
    torch.ops.octet.run_plan(inputs, constants, program, "")
    assert torch.ops.octet_native.plan_count() == before + 1
    del constants
    assert torch.ops.octet_native.plan_count() == before


def test_a_kept_plan_takes_no_other_dtypes(compiled: Backend) -> None:
    program, x = text("%9 = same x=%0"), integers(1, 7)
    torch.ops.octet.run_plan([x], [], program, compiled.name)
    with pytest.raises(TypeError, match="an input is Int"):
        torch.ops.octet.run_plan([x.int()], [], program, compiled.name)


def test_weights_that_were_written_to_are_seen(compiled: Backend) -> None:
    for index in range(3):
        inputs, constants, program = network()
        torch.ops.octet.run_plan(inputs, constants, program, compiled.name)
        constants[index].copy_(constants[index].flip(0))
        expected = reference_plan.run_plan(inputs, constants, program)
        same(torch.ops.octet.run_plan(inputs, constants, program, compiled.name), expected)


def kept(compiled: Backend, constants: list[Tensor], program: str) -> int:
    number: int = torch.ops.octet_native.keep_text(constants, program, compiled.name)
    return number


def test_a_text_that_is_kept_gives_what_it_gives_in_full(compiled: Backend) -> None:
    (x, *others), constants, program = network()
    number = kept(compiled, constants, program)
    for given in ([x, *others], [x.flip(0), *others], [x[:1], *others], [x, *others]):
        same(torch.ops.octet_native.run_text(given, number), reference_plan.run_plan(given, constants, program))
    constants[0].add_(1)
    same(
        torch.ops.octet_native.run_text([x, *others], number), reference_plan.run_plan([x, *others], constants, program)
    )
    assert torch.ops.octet_native.run_text([x * torch.inf, *others], number) == []
    with pytest.raises(TypeError, match="an input is Int"):
        torch.ops.octet_native.run_text([x.int(), *others], number)


def test_a_text_that_was_dropped_is_gone(compiled: Backend) -> None:
    before = torch.ops.octet_native.text_count()
    number = kept(compiled, [], text("%9 = same x=%0"))
    assert torch.ops.octet_native.text_count() == before + 1
    torch.ops.octet_native.drop_text(number)
    assert torch.ops.octet_native.text_count() == before
    with pytest.raises(ValueError, match=f"no text has number {number}"):
        torch.ops.octet_native.run_text([integers(1, 7)], number)


def test_who_looks_at_calls_is_shown_the_operator_that_has_a_reference(compiled: Backend) -> None:
    seen = list[str]()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs, constants, program = network()
    number = kept(compiled, constants, program)
    with Calls():
        found = torch.ops.octet_native.run_text(inputs, number)
    assert seen == ["octet.run_plan_of_finite.default"]
    same(found, reference_plan.run_plan(inputs, constants, program))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shown = torch.ops.octet_native.run_text([fake.from_tensor(one) for one in inputs], number)
    assert [one.shape for one in shown] == [one.shape for one in found]


@pytest.mark.parametrize("torch_threads", [1, 2])
def test_eight_threads_at_once(compiled: Backend, torch_threads: int) -> None:
    torch.set_num_threads(torch_threads)
    inputs, constants, program = network()
    calls = []
    for index in range(8):
        x = torch.randn(1 + index % 3, 6, 32, 32, generator=generator())
        given = [x, inputs[1][:1, :, :1, :1]]
        calls.append((given, reference_plan.run_plan(given, constants, program)))
    wrong: list[int] = []

    def work(index: int) -> None:
        for turn in range(20):
            given, expected = calls[(index + turn) % 8]
            found = torch.ops.octet.run_plan(given, constants, program, compiled.name)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(
    os.environ.get("OCTET_FAST_TESTS") == "1", reason="OCTET_FAST_TESTS=1: torch's compiler is slow under emulation"
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_carries_it() -> None:
    inputs, constants, program = network()
    operator = torch.ops.octet.run_plan.default
    torch.library.opcheck(operator, (inputs, constants, program, ""))
    expected = reference_plan.run_plan(inputs, constants, program)

    def call(x: Tensor, q: Tensor) -> Any:
        return operator([x, q], constants, program, "")

    same(torch.compile(call, backend="eager", fullgraph=True)(*inputs), expected)
    same(list(torch.jit.trace(lambda x, q: tuple(call(x, q)), tuple(inputs))(*inputs)), expected)  # type: ignore[no-untyped-call]


def test_text_survives_the_round_trip() -> None:
    for _, _, program in [*CASES.values(), network()]:
        again = str(reference_plan.parse(program))
        assert reference_plan.parse(again) == reference_plan.parse(program)


def test_without_the_extension_the_reference_serves_it() -> None:
    inputs, constants, program = network()
    same(ops._without_backend("run_plan")(inputs, constants, program, ""), reference_plan.run_plan(*network()))
    with pytest.raises(ValueError, match="2 inputs, got 1"):
        torch.ops.octet.run_plan(inputs[:1], constants, program, "")
    assert dispatch.current().name

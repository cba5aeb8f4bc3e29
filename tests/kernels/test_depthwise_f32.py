"""Depthwise convolutions of reals, by the extension and by the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import ops, reference_conv
from torch import Tensor

needs_extension = pytest.mark.skipif(bool(ops.extension_problem()), reason=ops.extension_problem() or "built")

IMPLEMENTATIONS: dict[str, Any] = {
    "operator": lambda *arguments: torch.ops.octet.depthwise_f32(*arguments),
    "reference": reference_conv.depthwise_f32,
}
implementations = pytest.mark.parametrize("depthwise", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())

# channels, (height, width), kernel, stride, padding, dilation
SHAPES: dict[str, tuple[int, tuple[int, int], list[int], list[int], list[int], list[int]]] = {
    "3x3": (5, (14, 14), [3, 3], [1, 1], [1, 1], [1, 1]),
    "3x3 by two": (3, (15, 33), [3, 3], [2, 2], [1, 1], [1, 1]),
    "5x5 by two, even": (2, (16, 70), [5, 5], [2, 2], [2, 2], [1, 1]),
    "no padding": (2, (9, 8), [3, 3], [1, 1], [0, 0], [1, 1]),
    "sides unlike each other": (3, (7, 40), [2, 5], [3, 1], [0, 2], [1, 2]),
    "stride beyond the kernel": (2, (11, 13), [2, 1], [4, 3], [1, 0], [1, 1]),
    "padding beyond the kernel": (2, (3, 4), [2, 2], [1, 2], [3, 4], [1, 1]),
    "dilated by two, stride two": (2, (12, 20), [3, 3], [2, 2], [2, 2], [2, 2]),
    "one pixel": (4, (1, 1), [1, 1], [1, 1], [0, 0], [1, 1]),
    "one row of a large kernel": (1, (1, 130), [1, 31], [1, 1], [0, 15], [1, 1]),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def arguments(
    shape: tuple[Any, ...], values: Callable[..., Tensor], *, bias: bool = True, batch: int = 2
) -> tuple[Any, ...]:
    channels, size, kernel, *places = shape
    return values(batch, channels, *size), values(channels, 1, *kernel), values(channels) if bias else None, *places


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(*shape: int) -> Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


@implementations
@shapes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
def test_whole_numbers_are_exact(depthwise: Any, shape: tuple[Any, ...], bias: bool) -> None:
    x, weight, first, *places = arguments(shape, whole, bias=bias)
    y = depthwise(x, weight, first, *places)
    exact = F.conv2d(x.double(), weight.double(), None if first is None else first.double(), *places, x.shape[1])
    assert y.dtype == torch.float32
    assert y.is_contiguous()
    assert torch.equal(y.double(), exact)


@implementations
@shapes
def test_each_sum_is_rounded_once_a_tap_at_most_twice(depthwise: Any, shape: tuple[Any, ...]) -> None:
    x, weight, first, *places = arguments(shape, drawn)
    y = depthwise(x, weight, first, *places)
    exact, sizes = (
        F.conv2d(*(one.double() for one in three), *places, x.shape[1])
        for three in ((x, weight, first), (x.abs(), weight.abs(), first.abs()))
    )
    roundings = 2 * weight[0].numel() + 1
    assert bool(((y.double() - exact).abs() <= roundings * 2.0**-24 * sizes * 1.001).all())


@needs_extension
@shapes
def test_neither_threads_nor_layout_change_a_bit(shape: tuple[Any, ...]) -> None:
    x, weight, bias, *places = arguments((64, *shape[1:]), drawn, batch=9)  # enough for several threads
    torch.set_num_threads(1)
    one = torch.ops.octet.depthwise_f32(x, weight, bias, *places)
    torch.set_num_threads(3)
    two = torch.ops.octet.depthwise_f32(x.to(memory_format=torch.channels_last), weight, bias, *places)
    assert torch.equal(one, two)


@implementations
def test_what_is_not_finite_stays_where_it_is(depthwise: Any) -> None:
    x = torch.zeros(1, 1, 8, 40)
    x[0, 0, 4, 20] = torch.nan
    y = depthwise(x, torch.ones(1, 1, 3, 3), None, [1, 1], [1, 1], [1, 1])
    assert int(y.isnan().sum()) == 9
    assert bool(y[0, 0, 3:6, 19:22].isnan().all())


@implementations
@pytest.mark.parametrize("batch", [0, 1], ids=["no samples", "no channels"])
def test_nothing_in_nothing_out(depthwise: Any, batch: int) -> None:
    channels = 3 * (1 - batch)
    y = depthwise(torch.zeros(batch, channels, 5, 6), torch.zeros(channels, 1, 3, 3), None, [1, 2], [1, 1], [1, 1])
    assert y.shape == (batch, channels, 5, 3)


GOOD = (torch.zeros(1, 2, 5, 5), torch.zeros(2, 1, 3, 3), torch.zeros(2), [1, 1], [1, 1], [1, 1])
WRONG: dict[str, tuple[int, Any, type[Exception], str]] = {
    "doubles": (0, torch.zeros(1, 2, 5, 5).double(), TypeError, "expected"),
    "half a bias": (2, torch.zeros(2).half(), TypeError, "bias"),
    "three dimensions": (0, torch.zeros(2, 5, 5), ValueError, "expected .N, C, height|expected .batch, channels"),
    "another count of channels": (1, torch.zeros(3, 1, 3, 3), ValueError, "weight"),
    "a full kernel": (1, torch.zeros(2, 2, 3, 3), ValueError, "weight"),
    "a bias of three": (2, torch.zeros(3), ValueError, "bias has shape"),
    "one stride": (3, [1], ValueError, "expected 2 each"),
    "no stride": (3, [0, 1], ValueError, "out of range|expected positive"),
    "a negative padding": (4, [-1, 0], ValueError, "out of range|expected positive"),
    "a vast padding": (4, [2**40, 0], ValueError, "out of range|expected positive"),
    "a vast dilation": (5, [2**62, 1], ValueError, "out of range|expected positive"),
    "an image within the kernel": (0, torch.zeros(1, 2, 5, 0), ValueError, "than the kernel's|fewer than"),
}


@implementations
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_refused(depthwise: Any, wrong: tuple[int, Any, type[Exception], str]) -> None:
    place, value, error, words = wrong
    given = [value if index == place else one for index, one in enumerate(GOOD)]
    with pytest.raises(error, match=words):
        depthwise(*given)

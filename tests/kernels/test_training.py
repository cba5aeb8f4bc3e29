"""The operators that a training step computes its ranges by: the compiled ones against the references, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from quant.kernels import reference_training as ref
from torch import Tensor

INFINITY = math.inf
CLAMPS = ((-INFINITY, INFINITY), (0.0, INFINITY), (0.0, 6.0), (-1.0, 1.0))
SCHEMES = {"affine": (0, 255, None), "symmetric u8": (0, 255, 128), "symmetric s8": (-127, 127, 0)}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def fresh_range() -> tuple[Tensor, ...]:
    """average_low, average_high, batches, nan_count, inf_count, scale, zero_point."""
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(3)]
    scale, zero_point = torch.full((), math.nan), torch.zeros((), dtype=torch.int32)
    return torch.full((1,), INFINITY), torch.full((1,), -INFINITY), *counts, scale, zero_point


def batches() -> dict[str, Tensor]:
    with_all = drawn(40_000)
    with_all[::97] = math.nan
    with_all[5], with_all[7] = INFINITY, -INFINITY
    return {
        "all nan": torch.full((3,), math.nan),
        "one": torch.tensor([2.5]),
        "empty": torch.zeros(0, 4),
        "images": drawn(2, 3, 33, 47),
        "channels last": drawn(2, 3, 5, 7, seed=1).to(memory_format=torch.channels_last),
        "strided": drawn(100, seed=2)[::3],
        "not finite": with_all,
        "infinite": torch.tensor([-INFINITY, INFINITY]),
        "zeros": torch.zeros(70_000),
        "positive": drawn(50, seed=3).abs() + 1,
        "large": torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]),
    }


@pytest.mark.parametrize("clamp", CLAMPS, ids=str)
@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("momentum", [0.01, 1.0])
def test_a_range_follows_batches(clamp: tuple[float, float], scheme: str, momentum: float) -> None:
    mine, theirs = fresh_range(), fresh_range()
    for name, x in batches().items():
        torch.ops.octet.follow_range(x, momentum, *clamp, *SCHEMES[scheme], *mine)
        ref.follow_range(x, momentum, *clamp, *SCHEMES[scheme], *theirs)
        for actual, expected in zip(mine, theirs, strict=True):
            assert torch.equal(actual, expected) or (math.isnan(actual) and math.isnan(expected)), name


def test_a_range_of_several_threads() -> None:
    x = drawn(300_000)
    ranges = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        ranges.append(fresh_range())
        torch.ops.octet.follow_range(x, 0.1, -INFINITY, INFINITY, 0, 255, None, *ranges[-1])
    assert all(torch.equal(a, b) for a, b in zip(*ranges, strict=True))


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (7, 20), (3,), (64, 1, 3, 3), (1, 4097), (0, 4)], ids=str)
@pytest.mark.parametrize("extras", ["none", "gain", "bias", "both"])
@pytest.mark.parametrize("quant_max", [127, 7, 1])
def test_a_weight_is_rounded(shape: tuple[int, ...], extras: str, quant_max: int) -> None:
    weight = drawn(*shape)
    weight[1:2] = 0.0
    gain = drawn(shape[0], seed=1) if extras in ("gain", "both") else None
    bias = drawn(shape[0], seed=2) * 1e6 if extras in ("bias", "both") else None
    for input_scale in (torch.tensor(1e-4), torch.tensor(INFINITY)):
        arguments = (weight, gain, bias, None if bias is None else input_scale, 2.0**30, quant_max)
        got, expected = torch.ops.octet.round_weight(*arguments), ref.round_weight(*arguments)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("bad", [math.nan, INFINITY, -INFINITY], ids=str)
def test_a_weight_that_is_not_finite_is_told(bad: float) -> None:
    weight = drawn(4, 50)
    weight[2, 17] = bad
    for function in (torch.ops.octet.round_weight, ref.round_weight):
        scale = function(weight, None, None, None, 1.0, 127)[1]
        assert torch.isfinite(scale).tolist() == [True, True, False, True]


SHAPES = [(4, 8, 9, 11), (2, 7, 13), (1, 3, 2, 2), (3, 5, 1, 7), (2, 3, 4, 5, 6), (16, 1, 50)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_of_a_batch_are_those_of_torch(shape: tuple[int, ...]) -> None:
    for seed in range(10):
        x = drawn(*shape, seed=seed) * 10.0 ** (seed - 5) + seed
        got = torch.ops.octet.batch_statistics(x)
        for expected in (ref.batch_statistics(x), torch.batch_norm_update_stats(x, None, None, 0.0)):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_statistics_of_several_threads_and_layouts() -> None:
    x = drawn(4, 64, 31, 33)
    one = torch.ops.octet.batch_statistics(x)
    torch.set_num_threads(4)
    for same in (x, x.to(memory_format=torch.channels_last)):
        assert all(torch.equal(a, b) for a, b in zip(one, torch.ops.octet.batch_statistics(same), strict=True))


def test_nan_in_a_batch_stays_in_its_channel() -> None:
    x = drawn(2, 3, 5, 5)
    x[1, 1, 2, 2] = math.nan
    mean, variance = torch.ops.octet.batch_statistics(x)
    assert torch.isnan(mean).tolist() == torch.isnan(variance).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("batch_statistics", (torch.zeros(3),), "expected .batch, channels"),
        ("batch_statistics", (torch.zeros(0, 3, 4),), "not empty"),
        ("round_weight", (torch.zeros(()), None, None, None, 1.0, 127), "output channels first"),
        ("round_weight", (torch.zeros(2, 3), torch.zeros(3), None, None, 1.0, 127), "gain has 3 values, expected 2"),
        ("round_weight", (torch.zeros(2, 3), None, torch.zeros(2), None, 1.0, 127), "come together"),
        (
            "follow_range",
            (torch.zeros(2), 0.1, 0.0, 1.0, 0, 255, None, torch.zeros(2), *fresh_range()[1:]),
            "one value",
        ),
    ],
    ids=["no channels", "no values", "no rows", "gain", "bias", "averages"],
)
def test_bad_input(extension: None, operator: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.octet, operator)(*arguments)

"""The pass over a layer's activations: sums of channels, a histogram, a batch norm on the way; against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import build, channel_sums, observe_activation
from quant.kernels import reference_activation as ref
from quant.observers.one_pass import contracts
from torch import Tensor

SHAPES = {
    "image": ((2, 3, 5, 7), 1),
    "small planes": ((3, 70, 7, 7), 1),
    "planes of a block": ((2, 2, 32, 64), 1),
    "planes of several blocks": ((2, 3, 50, 60), 1),
    "audio": ((2, 4, 5000), -2),
    "rows": ((5, 9, 24), -1),
    "wide rows": ((7, 5000), -1),
    "many rows": ((5000, 24), -1),
    "one value": ((1, 1), -1),
    "a vector": ((6,), -1),
    "middle": ((4, 5, 6), 1),
}


def state(channels: int, means: int, bins: int = 256) -> tuple[list[Tensor], list[Tensor]]:
    """What an observer and some means keep of nothing."""
    count = torch.zeros((), dtype=torch.int64)
    observer = [torch.full((1,), math.inf), torch.full((1,), -math.inf), count.clone(), count.clone()]
    kept = [
        buffer
        for _ in range(means)
        for buffer in (
            torch.zeros(channels, dtype=torch.float64),
            count.clone(),
            torch.full((1,), math.inf),
            torch.full((1,), -math.inf),
        )
    ]
    return [*observer, torch.zeros(1, bins, dtype=torch.int64)], kept


def values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Multiples of 2**-10, whose sums in double are exact in any order."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1024).round() / 1024


def assert_like_the_reference(batches: list[Tensor], axis: int, means: int) -> None:
    mine, theirs = (state(batches[0].shape[axis], means) for _ in range(2))
    for batch in batches:
        observe_activation(batch, axis, *mine[0], mine[1])
        ref.observe_activation(batch, axis, *theirs[0], theirs[1])
        for actual, expected in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(("shape", "axis"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("means", [0, 1, 3])
def test_a_tensor_of_any_shape(shape: tuple[int, ...], axis: int, means: int) -> None:
    assert_like_the_reference([values(shape, 1), values(shape, 2) * 4, values(shape, 3)], axis, means)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES.values(), ids=SHAPES.keys())
def test_what_is_not_finite_counts_as_zero(shape: tuple[int, ...], axis: int, special: float) -> None:
    x = values(shape)
    x.view(-1)[:: max(1, x.numel() // 3)] = special
    assert_like_the_reference([values(shape, 1), x], axis, 1)


def test_channels_that_lie_last_are_not_copied() -> None:
    x = values((2, 20, 9, 11)).to(memory_format=torch.channels_last)
    assert_like_the_reference([x, values((2, 20, 9, 11)), x[:, ::2].repeat(1, 2, 1, 1)], 1, 2)


def test_an_empty_tensor_adds_nothing() -> None:
    assert_like_the_reference([values((2, 3, 4, 4)), torch.empty(0, 3, 4, 4), torch.empty(2, 3, 0, 4)], 1, 1)


def test_full_counters_wrap_as_torchs() -> None:
    mine, theirs = (state(3, 1) for _ in range(2))
    shape = (2, 3, 4, 5)
    batches = [values(shape), torch.full(shape, math.nan), values(shape) * 64]  # the last widens bins
    batches[1][0, 0, 0, :2] = math.inf
    for observer, means in (mine, theirs):
        observer[0].fill_(-1), observer[1].fill_(1)
        for counter in (*observer[2:], means[1]):
            counter.fill_(torch.iinfo(torch.int64).max)
    for batch in batches:
        observe_activation(batch, 1, *mine[0], mine[1])
        ref.observe_activation(batch, 1, *theirs[0], theirs[1])
    for actual, expected in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True):
        assert torch.equal(actual, expected)
    assert mine[1][1] < 0


@pytest.mark.parametrize(("shape", "axis"), SHAPES.values(), ids=SHAPES.keys())
def test_sums_are_rounded_once(shape: tuple[int, ...], axis: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)) + 3
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    exact = x.double().sum(others) if others else x.double()
    torch.testing.assert_close(channel_sums(x, axis), exact.float(), rtol=2**-23, atol=0)


@pytest.mark.parametrize("shape", [(4, 3, 300, 300), (8, 1, 100_000), (40_000, 24)], ids=str)
def test_threads_change_no_bit(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        kept = state(shape[1], 1)
        observe_activation(x, 1, *kept[0], kept[1])
        results.append([*kept[0], *kept[1], channel_sums(x, 1)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_means_of_another_number_of_channels(extension: None) -> None:
    kept = state(4, 1)
    with pytest.raises(ValueError, match="total has shape"):
        observe_activation(values((2, 3, 4, 4)), 1, *kept[0], kept[1])
    with pytest.raises(IndexError, match="axis is 4"):
        channel_sums(values((2, 3)), 4)


NORMS = {"image": (2, 37, 9, 11), "small planes": (3, 70, 3, 3), "large planes": (2, 2, 50, 60), "audio": (2, 5, 1500)}
CLAMPS = {"none": (-math.inf, math.inf), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}


def norm_of(channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean, variance, weight, bias."""
    mean, variance, weight, bias = torch.randn(4, channels, generator=torch.Generator().manual_seed(1))
    return mean, variance.abs() + 0.1, weight, bias


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def special_values(shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 3
    x.view(-1)[:7] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 3e38])
    return x


@pytest.mark.parametrize("shape", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("clamp", CLAMPS.values(), ids=CLAMPS.keys())
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_and_a_clamp_are_torchs_to_the_bit(
    extension: None, shape: tuple[int, ...], clamp: tuple[float, float], affine: bool
) -> None:
    contracted = contracts()
    assert contracted is not None, "this torch computes batch norms in a third way; calibration leaves them to it"
    x, (mean, variance, weight, bias) = special_values(shape), norm_of(shape[1])
    own = (weight, bias) if affine else (None, None)
    expected = F.batch_norm(x, mean, variance, *own, eps=1e-3).clamp(*clamp)
    mine, theirs = state(shape[1], 1), state(shape[1], 1)
    torch.ops.octet.observe_normalized(x, mean, variance, *own, 1e-3, contracted, *clamp, *mine[0], mine[1])
    assert torch.equal(as_bits(x), as_bits(expected))
    observe_activation(expected, 1, *theirs[0], theirs[1])
    for actual, other in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("clamp", CLAMPS.values(), ids=CLAMPS.keys())
def test_a_clamp_alone(extension: None, clamp: tuple[float, float]) -> None:
    x = special_values((2, 3, 20, 20))
    expected = x.clamp(*clamp)
    kept = state(3, 0)
    torch.ops.octet.observe_normalized(x, None, None, None, None, 0.0, True, *clamp, *kept[0], kept[1])
    assert torch.equal(as_bits(x), as_bits(expected))


def test_rounding_once_and_twice_differ(extension: None) -> None:
    x, (mean, variance, weight, bias) = torch.randn(2, 37, 9, 11), norm_of(37)
    once, twice = x.clone(), x.clone()
    for y, contracted in ((once, True), (twice, False)):
        kept = state(37, 0)
        torch.ops.octet.observe_normalized(
            y, mean, variance, weight, bias, 1e-5, contracted, *CLAMPS["none"], *kept[0], kept[1]
        )
    assert not torch.equal(once, twice)
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize(
    ("x", "mean", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3), "expected \\(batch, channels"),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(3), "contiguous"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(4), "mean has 4 values, expected 3"),
    ],
    ids=["two dimensions", "channels last", "other channels"],
)
def test_what_it_does_not_normalise(extension: None, x: Tensor, mean: Tensor, message: str) -> None:
    kept = state(3, 0)
    with pytest.raises(ValueError, match=message):
        torch.ops.octet.observe_normalized(
            x, mean, torch.ones_like(mean), None, None, 1e-5, True, *CLAMPS["none"], *kept[0], kept[1]
        )


ON_ONE_SET = """
import hashlib, sys, torch
sys.path.insert(0, "FOLDER")
from test_activation import NORMS, SHAPES, norm_of, state
from quant.kernels import observe_activation, ops
assert not ops.extension_problem()
if torch.ops.octet_native.isa_refusal():
    sys.exit()
digest = hashlib.sha256()
def add(kept):
    for tensor in (*kept[0], *kept[1]):
        digest.update(tensor.numpy().tobytes())
for shape, axis in SHAPES.values():
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    kept = state(shape[axis], 1)
    observe_activation(x, axis, *kept[0], kept[1])
    add(kept)
for shape in NORMS.values():
    for contracted in (True, False):
        x, kept = torch.randn(shape, generator=torch.Generator().manual_seed(6)), state(shape[1], 1)
        torch.ops.octet.observe_normalized(x, *norm_of(shape[1]), 1e-5, contracted, 0.0, 6.0, *kept[0], kept[1])
        add(kept)
        digest.update(x.numpy().tobytes())
print(torch.ops.octet_native.isa(), digest.hexdigest())
"""


def test_instruction_sets_give_the_same_bits(extension: None, run_python: Callable[..., str]) -> None:
    code = ON_ONE_SET.replace("FOLDER", str(Path(__file__).parent))
    results = {}
    for name in dict.fromkeys(["portable", *(one.name for one in build.instruction_sets(build.host_arch()))]):
        printed = run_python(code, QUANT_ISA=name).split()
        if printed:  # nothing where the set is refused
            used, results[name] = printed
            assert used == name
    assert "portable" in results
    assert len(set(results.values())) == 1, results

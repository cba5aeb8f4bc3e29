"""Embedding tables of 8, 4, 3 and 2 bits: packing, and every backend's look-ups against the reference and torch."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels import tables
from quant.kernels.backend import Backend
from torch import Tensor

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
bits = pytest.mark.parametrize("bits", [8, 4, 3, 2], ids=["8bit", "4bit", "3bit", "2bit"])
dims = pytest.mark.parametrize("dim", [1, 3, 16, 33, 64, 128], ids=lambda dim: f"dim{dim}")
index_types = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


def table(rows: int, dim: int, bits: int, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Packed rows, and the floats that they stand for."""
    weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 2, rows)[:, None]
    packed = tables.pack_table(weight, bits, group_size)
    return packed, tables.unpack_rows(packed, bits, dim)


@bits
@dims
def test_a_row_is_within_half_a_step_of_its_floats(bits: int, dim: int) -> None:
    weight = torch.randn(20, dim, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 20)[:, None]
    packed = tables.pack_table(weight, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (20, tables.row_bytes(dim, bits))
    back = tables.unpack_rows(packed, bits, dim)
    span = weight.amax(1) - weight.amin(1)
    # Half a step; a half-precision scale and bias add their own rounding (2**-11 of the scale times 15 steps, 2**-11 of
    # the bias), which a value clamped at an end cannot make up for.
    slack = 2.0**-11 * (span + weight.abs().amax(1)) if bits < 8 else 2.0**-22 * weight.abs().amax(1)
    assert bool(((back - weight).abs() <= (span / (2**bits - 1) / 2 + slack)[:, None] + 2.0**-24).all())


@bits
@settings(max_examples=10 if FAST else 100)
@given(values=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=9))
def test_packing_is_monotone_in_a_row(bits: int, values: list[float]) -> None:
    row = torch.tensor([sorted(values)])
    back = tables.unpack_rows(tables.pack_table(row, bits), bits, len(values))
    assert bool((back[0, 1:] >= back[0, :-1]).all())


@bits
def test_a_constant_row_is_exact(bits: int) -> None:
    row = torch.full((1, 5), 0.625)
    assert torch.equal(tables.unpack_rows(tables.pack_table(row, bits), bits, 5), row)


def test_the_layout_is_the_documented_one() -> None:
    eight = tables.pack_table(torch.tensor([[0.0, 255.0, 3.0]]), 8)
    assert eight[0, :3].tolist() == [0, 255, 3]
    assert eight[0, 3:].clone().view(torch.float32).tolist() == [1.0, 0.0]
    four = tables.pack_table(torch.tensor([[0.0, 15.0, 3.0]]), 4)
    assert four[0, :2].tolist() == [0xF0, 0x03]
    assert four[0, 2:].clone().view(torch.float16).tolist() == [1.0, 0.0]
    two = tables.pack_table(torch.tensor([[0.0, 3.0, 1.0, 2.0, 1.0]]), 2)
    assert two[0, :2].tolist() == [0b10_01_11_00, 0b01]
    assert two[0, 2:].clone().view(torch.float16).tolist() == [1.0, 0.0]
    three = tables.pack_table(torch.tensor([[0.0, 7.0, 1.0, 2.0, 4.0, 5.0, 3.0, 6.0, 4.0]]), 3)
    assert three[0, :3].tolist() == [0b10_01_11_00, 0b10_11_01_00, 0b00]
    assert three[0, 3:5].tolist() == [0b1011_0010, 0b1]
    groups = tables.pack_table(torch.tensor([[0.0, 15.0, 4.0, 34.0]]), 4, 2)
    assert groups[0, :2].tolist() == [0xF0, 0xF0]
    assert groups[0, 2:].clone().view(torch.float16).tolist() == [1.0, 0.0, 2.0, 4.0]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_group_has_a_range_of_its_own(backend: Backend, bits: int) -> None:
    weight = torch.randn(20, 6, 32, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 6)[:, None]
    packed = tables.pack_table(weight.flatten(1), bits, 32)
    assert tables.groups_of_rows(packed.shape[1], 192, bits) == 6
    back = backend.embedding(packed, torch.arange(20), bits, 192).unflatten(1, (6, 32))
    span = weight.amax(2) - weight.amin(2)
    slack = 2.0**-11 * (span + weight.abs().amax(2)) + 2.0**-24
    assert bool(((back - weight).abs() <= (span / (2**bits - 1) / 2 + slack)[:, :, None]).all())


@pytest.mark.parametrize("group_size", [0, -4, 3, 16])
def test_a_group_size_that_divides_no_row_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size is {group_size}, expected a divisor of 8 columns"):
        tables.pack_table(torch.ones(2, 8), 4, group_size)


@bits
def test_a_table_without_rows_is_packed(bits: int) -> None:
    packed = tables.pack_table(torch.ones(0, 8), bits)
    assert packed.shape == (0, tables.row_bytes(8, bits))
    assert tables.unpack_rows(packed, bits, 8).shape == (0, 8)


def test_groups_that_are_none_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="group_size is 32, expected a divisor of 48"):
        tables.pack_table(torch.ones(2, 48), 4, 32)
    with pytest.raises(ValueError, match="fewer than 8 bits"):
        tables.pack_table(torch.ones(2, 64), 8, 32)
    for length in (16, 24, 28 + 1, 24 + 5 * 4):  # no group, no whole number, and 5 of 48 columns
        with pytest.raises(ValueError, match="packed rows are"):
            backend.embedding(torch.zeros(2, length, dtype=torch.uint8), torch.tensor([0]), 4, 48)


@bits
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_table_that_is_not_finite_is_refused(bits: int, bad: float) -> None:
    weight = torch.ones(2, 3)
    weight[1, 1] = bad
    with pytest.raises(ValueError, match="does not fit"):
        tables.pack_table(weight, bits)


def test_a_row_beyond_half_precision_is_refused_for_4_bits() -> None:
    with pytest.raises(ValueError, match=r"does not fit torch\.float16"):
        tables.pack_table(torch.tensor([[-1e6, 1e6]]), 4)


def test_other_bits_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="expected 8, 4, 3 or 2"):
        tables.pack_table(torch.ones(2, 2), 5)
    for other in (0, 1, 5, 9, -8):
        with pytest.raises(ValueError, match="expected 8, 4, 3 or 2"):
            backend.embedding(torch.zeros(2, 10, dtype=torch.uint8), torch.tensor([0]), other, 2)


@bits
@dims
@index_types
def test_a_look_up_is_the_reference_to_the_bit(backend: Backend, bits: int, dim: int, dtype: torch.dtype) -> None:
    packed, real = table(30, dim, bits)
    indices = torch.tensor([[0, 29, 7], [7, 7, 1]], dtype=dtype)
    assert torch.equal(backend.embedding(packed, indices, bits, dim), real[indices.long()])


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("dim", [32, 96, 160])
def test_a_look_up_of_groups_is_the_reference_to_the_bit(backend: Backend, bits: int, dim: int) -> None:
    packed, real = table(30, dim, bits, 32)
    indices = torch.tensor([[0, 29, 7], [7, 7, 1]])
    assert torch.equal(backend.embedding(packed, indices, bits, dim), real[indices])
    for mode in ("sum", "mean", "max"):
        bag = BAGS["padding"]
        tensors = [torch.tensor(bag[key]) for key in ("indices", "offsets")]
        y = backend.embedding_bag(packed, *tensors, None, bits, dim, mode, False, 2)
        check_bags(y, real, None, mode, bag)


@bits
@pytest.mark.parametrize("shape", [(0,), (), (2, 0, 3), (400,)], ids=str)
def test_a_look_up_of_any_shape(backend: Backend, bits: int, shape: tuple[int, ...]) -> None:
    packed, real = table(30, 8, bits)
    indices = torch.randint(0, 30, shape)
    y = backend.embedding(packed, indices, bits, 8)
    assert y.shape == (*shape, 8)
    assert torch.equal(y, real[indices])


def test_every_half_precision_scale_is_decoded_right(backend: Backend) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scales = every[torch.isfinite(every)]
    scales = scales[:: 97 if FAST else 1]
    tail = torch.stack([scales, torch.zeros_like(scales)], 1).view(torch.uint8)
    rows = torch.cat([torch.full((len(scales), 1), 0x31, dtype=torch.uint8), tail], 1)
    y = backend.embedding(rows, torch.arange(len(scales)), 4, 2)
    assert torch.equal(y, torch.stack([scales.float() * 1, scales.float() * 3], 1))
    twice = torch.cat([rows, tail], 1)  # a group for each of the two columns
    assert torch.equal(backend.embedding(twice, torch.arange(len(scales)), 4, 2), y)


BAGS: dict[str, dict[str, Any]] = {
    "plain": {"indices": [1, 2, 3, 3, 29], "offsets": [0, 2, 3]},
    "empty bags": {"indices": [1, 2, 3], "offsets": [0, 0, 2, 2, 3]},
    "one bag": {"indices": [5, 6, 7], "offsets": [0]},
    "no index": {"indices": [], "offsets": [0, 0]},
    "no bag": {"indices": [], "offsets": []},
    "last offset": {"indices": [1, 2, 3, 4], "offsets": [0, 3, 4], "include_last_offset": True},
    "last offset before the end": {"indices": [1, 2, 3, 4], "offsets": [0, 3], "include_last_offset": True},
    "padding": {"indices": [1, 2, 2, 3, 2], "offsets": [0, 2, 4], "padding_idx": 2},
    "padding in the first row": {"indices": [0, 1, 0], "offsets": [0, 2], "padding_idx": 0},
    "long": {"indices": [i * 7 % 30 for i in range(500)], "offsets": [i * 3 for i in range(160)]},
}


def check_bags(y: Tensor, real: Tensor, factors: Tensor | None, mode: str, bag: dict[str, Any]) -> None:
    """Against the definition in float64; trailing indices beyond a given last offset are in no bag."""
    indices, last, padding = bag["indices"], bag.get("include_last_offset", False), bag.get("padding_idx", -1)
    ends = bag["offsets"] + ([] if last else [len(indices)])
    assert y.shape == (len(ends) - 1, real.shape[1])
    for row, (first, end) in enumerate(itertools.pairwise(ends)):
        kept = [i for i in range(first, end) if indices[i] != padding]
        if not kept:
            assert torch.equal(y[row], torch.zeros(real.shape[1]))
            continue
        values = real[[indices[i] for i in kept]].double()
        if mode == "max":
            assert torch.equal(y[row].double(), values.amax(0))
            continue
        weighted = values if factors is None else values * factors[kept, None].double()
        total = weighted.sum(0) / (len(kept) if mode == "mean" else 1)
        # A float32 sum of n terms is off by at most n roundings of its terms' size; a term is scale * q + bias, each of
        # which may be larger than their sum, by the row's own range.
        bound = (len(kept) + 4) * 2.0**-23 * (weighted.abs().sum(0) + values.abs().amax() * len(kept))
        assert bool(((y[row].double() - total).abs() <= bound).all())


@bits
@pytest.mark.parametrize("how", ["sum", "weighted-sum", "mean", "max"])
@pytest.mark.parametrize("name", list(BAGS)[:: 2 if FAST else 1])
def test_bags_are_those_of_the_definition(backend: Backend, bits: int, how: str, name: str) -> None:
    mode, bag = how.removeprefix("weighted-"), BAGS[name]
    last, padding = bag.get("include_last_offset", False), bag.get("padding_idx", -1)
    factors = torch.rand(len(bag["indices"])) if how != mode else None
    for dim in (3, 64) if FAST else (1, 3, 16, 33, 64, 128):
        packed, real = table(30, dim, bits)
        for dtype in (torch.int32, torch.int64):
            indices, offsets = (torch.tensor(bag[key], dtype=dtype) for key in ("indices", "offsets"))
            y = backend.embedding_bag(packed, indices, offsets, factors, bits, dim, mode, last, padding)
            check_bags(y, real, factors, mode, bag)


@pytest.mark.parametrize("index", [-1, 30, 2**40], ids=str)
@bits
def test_an_index_outside_the_table_is_refused(backend: Backend, bits: int, index: int) -> None:
    packed, _ = table(30, 4, bits)
    with pytest.raises(IndexError, match="outside the table of 30 rows"):
        backend.embedding(packed, torch.tensor([3, index]), bits, 4)
    with pytest.raises(IndexError, match="outside the table of 30 rows"):
        backend.embedding_bag(packed, torch.tensor([3, index]), torch.tensor([0]), None, bits, 4, "sum", False, -1)


@pytest.mark.parametrize(
    ("offsets", "last"),
    [([0, 4], False), ([0, 2, 1], False), ([1, 2], False), ([0, 9], True), ([], True), ([-1, 2], False)],
    ids=["past-the-end", "falling", "not-from-0", "last-past-the-end", "none", "negative"],
)
def test_offsets_outside_the_indices_are_refused(backend: Backend, offsets: list[int], last: bool) -> None:
    packed, _ = table(30, 4, 8)
    starts = torch.tensor(offsets, dtype=torch.int64)
    with pytest.raises(IndexError, match="offsets must"):
        backend.embedding_bag(packed, torch.tensor([1, 2, 3]), starts, None, 8, 4, "sum", last, -1)


def test_indices_that_are_not_integers_are_refused(backend: Backend) -> None:
    packed, _ = table(30, 4, 8)
    with pytest.raises(TypeError, match="expected int32 or int64"):
        backend.embedding(packed, torch.tensor([1.0]), 8, 4)


def test_rows_of_another_width_are_refused(backend: Backend) -> None:
    packed, _ = table(30, 4, 8)
    with pytest.raises(ValueError, match="packed rows are"):
        backend.embedding(packed, torch.tensor([1]), 8, 5)


@pytest.mark.parametrize("mode", ["mean", "max", "median"])
def test_factors_go_with_sums_only(backend: Backend, mode: str) -> None:
    packed, _ = table(30, 4, 8)
    with pytest.raises(ValueError, match=r"go with mode 'sum'|expected sum, mean or max"):
        backend.embedding_bag(packed, torch.tensor([1]), torch.tensor([0]), torch.ones(1), 8, 4, mode, False, -1)

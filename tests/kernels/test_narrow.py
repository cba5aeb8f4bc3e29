"""Weights of 4, 3 and 2 bits: what is stored, exactly, and products with it, to the bit of the reference."""

from __future__ import annotations

import os

import pytest
import torch
from quant.kernels import dispatch, narrow, reference, reference_rnn, row_slices, tables
from quant.kernels.scheme import quantize_weight
from torch import Tensor

BITS = narrow.NARROW_BITS
SHAPES = ((1, 32), (16, 64), (17, 96), (70, 128), (64, 512), (150, 1152))
GROUPS = (None, 32, 64, 128)
ROWS = (1, 3, 8, 25) if os.environ.get("OCTET_FAST_TESTS") == "1" else (1, 2, 3, 4, 7, 8, 9, 25, 97)


def is_weight(argument: object) -> bool:
    return isinstance(argument, Tensor) and narrow.is_narrow(argument)


def drawn(rows: int, columns: int, bits: int, size: int | None, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    return narrow.quantize(torch.randn(rows, columns) / columns**0.5, bits, size, symmetric=symmetric)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [0, 1, 15, 17, 64, 66, 192])
def test_unpacking_gives_what_was_packed(rows: int, bits: int) -> None:
    u = torch.randint(0, 2**bits, (rows, 96), dtype=torch.uint8)
    q_weight = narrow.pack(u, bits)
    assert q_weight.shape == (rows, bits, 12)
    assert torch.equal(narrow.unpack(q_weight), u)
    if rows:
        some = torch.randint(0, rows, (5,))
        assert torch.equal(narrow.unpack_rows(q_weight, some), u[some])


def test_the_bytes_lie_as_the_documentation_says() -> None:
    u = (
        torch.arange(66 * 32).reshape(66, 32).remainder(16).to(torch.uint8)
        ^ torch.arange(66, dtype=torch.uint8)[:, None] % 16
    )
    q_weight = narrow.pack(u, 4).reshape(-1)
    for output, first, beside in ((3, 0, 64), (65, 64 * 16, 2)):
        for vector in range(4):
            for j in range(4):
                byte = int(q_weight[first + (vector * beside + output % 64) * 4 + j])
                assert byte & 15 == u[output, 8 * vector + j]
                assert byte >> 4 == u[output, 8 * vector + 4 + j]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_is_within_half_a_step(bits: int, symmetric: bool) -> None:
    weight = torch.randn(20, 256) * torch.logspace(-3, 2, 20)[:, None]
    q_weight, scale = narrow.quantize(weight, bits, 64, symmetric=symmetric)
    error = (narrow.dequantize(q_weight, scale) - weight).unflatten(1, (4, 64)).abs().amax(dim=2)
    # The end of the range may lie a rounded scale or zero point off.
    assert bool(
        (error <= narrow.groups_of(q_weight, scale).scale * (0.5 + 2**bits * 2**-11 + 0.5 * (not symmetric))).all()
    )


def test_one_scale_per_output_is_that_of_bytes() -> None:
    weight = torch.randn(40, 64)
    q_weight, scale = narrow.quantize(weight, 4)
    q_bytes, of_bytes = quantize_weight(weight, bits=4)
    assert torch.equal(narrow.integers(q_weight), q_bytes)
    assert torch.equal(scale, of_bytes)


def test_scales_that_are_no_normal_half_are_stored_as_float() -> None:
    q_weight, scale = narrow.quantize(torch.randn(16, 64) * 1e-5, 4, 32)
    assert scale.dtype == torch.float32
    assert narrow.quantize(torch.randn(16, 64), 4, 32)[1].dtype == torch.float16
    assert narrow.described(q_weight, scale) == "of 4 bits with groups of 32, (16, 64)"


def test_groups_of_zeros() -> None:
    for symmetric in (True, False):
        q_weight, scale = narrow.quantize(torch.zeros(3, 64), 4, 32, symmetric=symmetric)
        assert torch.equal(narrow.dequantize(q_weight, scale), torch.zeros(3, 64))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_linear_has_the_bits_of_the_reference(bits: int, size: int | None, symmetric: bool) -> None:
    if size is None and not symmetric:
        pytest.skip("scales per output have no zero points")
    backend = dispatch.current()
    for rows, columns in SHAPES:
        if size is not None and columns % size:
            continue
        q_weight, scale = drawn(rows, columns, bits, size, symmetric)
        bias = torch.randn(rows)
        for m in ROWS:
            x = torch.randn(m, columns) * 3 + 0.5
            for activation_bits in (8, 16):
                expected = reference.linear_dynamic(x, q_weight, scale, bias, None, activation_bits)
                y = backend.linear_dynamic(x, q_weight, scale, bias, None, activation_bits, True, False)
                assert torch.equal(y, expected), (rows, columns, m, activation_bits)


@pytest.mark.parametrize("size", [None, 32])
def test_the_largest_integers_do_not_saturate(size: int | None) -> None:
    u = torch.full((32, 1024), 15, dtype=torch.uint8)
    u[1::2] = 0
    scale = torch.ones(32) if size is None else torch.ones(32, 1024 // size)
    q_weight, stored = narrow.store(u, scale, None, 4)
    x = torch.ones(3, 1024)
    x[1] *= -1.0
    x[2, ::2] *= -1.0
    expected = reference.linear_dynamic(x, q_weight, stored)
    assert torch.equal(dispatch.current().linear_dynamic(x, q_weight, stored, None, None, 8, True, False), expected)
    assert torch.allclose(expected[0, :2], torch.tensor([7.0 * 1024, -8.0 * 1024]), rtol=1e-5)


def test_a_row_with_nan_is_nan_and_others_are_not() -> None:
    q_weight, scale = drawn(24, 64, 4, 32)
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    y = dispatch.current().linear_dynamic(x, q_weight, scale, None, None, 8, True, False)
    assert bool(y[1].isnan().all())
    assert not bool(y[[0, 2]].isnan().any())


def test_a_write_to_scales_is_seen() -> None:
    q_weight, scale = drawn(24, 64, 4, 32)
    x, backend = torch.randn(2, 64), dispatch.current()
    before = backend.linear_dynamic(x, q_weight, scale, None, None, 8, True, False)
    scale *= 2.0
    after = backend.linear_dynamic(x, q_weight, scale, None, None, 8, True, False)
    assert torch.equal(after, before * 2.0)


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer gives no memory again")
def test_scales_that_come_to_lie_where_others_did_are_seen() -> None:
    """In the memory of scales that died, at the same version."""
    q_weight, _ = drawn(64, 128, 4, 32)
    x, backend, addresses = torch.randn(2, 128), dispatch.current(), set()
    for _ in range(40):
        scale = torch.rand(64, 4) + 0.1
        addresses.add(scale.data_ptr())
        expected = reference.linear_dynamic(x, q_weight, scale)
        assert torch.equal(backend.linear_dynamic(x, q_weight, scale, None, None, 8, True, False), expected)
    assert len(addresses) < 40


def test_views_of_one_memory_are_other_scales() -> None:
    q_weight, scale = drawn(64, 128, 4, 64, symmetric=False)
    x, backend = torch.randn(2, 128), dispatch.current()
    for one in (scale, scale.view(64, 4), scale.view(64, 4)[:, :2].contiguous()):
        expected = reference.linear_dynamic(x, q_weight, one)
        assert torch.equal(backend.linear_dynamic(x, q_weight, one, None, None, 8, True, False), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((5, 1, 0), -1.0, "scale of output 5, group 1 is -1.*expected a finite number that is not negative"),
        ((5, 1, 0), torch.nan, "scale of output 5, group 1 is nan"),
        ((5, 1, 0), torch.inf, "scale of output 5, group 1 is (inf|nan)"),
        ((5, 1, 1), 16.0, "zero point of output 5, group 1 is 16.*expected a whole number from 0 to 15"),
        ((5, 1, 1), -1.0, "zero point of output 5, group 1 is -1"),
        ((5, 1, 1), 3.5, "zero point of output 5, group 1 is 3.5"),
        ((5, 1, 1), torch.nan, "zero point of output 5, group 1 is nan"),
    ],
)
def test_numbers_that_are_no_scales_and_zero_points(
    dtype: torch.dtype, place: tuple[int, int, int], value: float, said: str
) -> None:
    q_weight, scale = drawn(16, 64, 4, 32, symmetric=False)
    scale = scale.to(dtype)
    scale[place] = value
    for run in (dispatch.current().linear_dynamic, reference.linear_dynamic):
        with pytest.raises(ValueError, match=said):
            run(torch.randn(2, 64), q_weight, scale, None, None, 8, True, False)


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_recurrent_layers_are_those_of_the_reference_and_of_bytes(mode: str, size: int | None, batch: int) -> None:
    gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[mode]
    hidden, projected = 96, 32 if mode == "lstm" else 96
    w_ih, w_hh = drawn(gates * hidden, 64, 4, size), drawn(gates * hidden, projected, 4, size)
    w_hr = drawn(projected, hidden, 4, size) if mode == "lstm" else (None, None)
    biases = torch.randn(gates * hidden), torch.randn(gates * hidden)
    x, h, c = torch.randn(5, batch, 64), torch.randn(batch, projected), torch.randn(batch, hidden)
    arguments = (x, None, h, c if mode == "lstm" else None, *w_ih, None, 8, True, *w_hh, *biases, *w_hr, mode, False)
    got = dispatch.current().rnn_layer(*arguments)
    for one, expected in zip(got, reference_rnn.rnn_layer(*arguments), strict=True):
        # Gates are reals that agree to a few last places, and a state near a half rounds to the one or the other.
        assert torch.allclose(one, expected, atol=2e-2)
    if size is None:
        of_bytes = [narrow.integers(one) if is_weight(one) else one for one in arguments]
        for one, expected in zip(got, dispatch.current().rnn_layer(*of_bytes), strict=True):
            assert torch.equal(one, expected)


def test_errors_say_what_was_expected() -> None:
    q_weight, scale = drawn(16, 64, 4, 32)
    backend = dispatch.current()

    def call(x: Tensor, weight: Tensor, by: Tensor) -> Tensor:
        return backend.linear_dynamic(x, weight, by, None, None, 8, True, False)

    with pytest.raises(ValueError, match=r"expected \(\.\.\., 64\) \(in_features\)"):
        call(torch.randn(2, 32), q_weight, scale)
    with pytest.raises(ValueError, match="scale has shape"):
        call(torch.randn(2, 64), q_weight, torch.ones(16, 3, dtype=torch.float16))
    with pytest.raises(ValueError, match="32 of"):
        narrow.pack(torch.zeros(4, 40, dtype=torch.uint8), 4)


# --- some rows at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("bits", narrow.NARROW_BITS)
@pytest.mark.parametrize("setting", [(None, True), (32, True), (64, False)], ids=["outputs", "groups", "zero points"])
def test_slices_of_rows_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int, setting: tuple[int | None, bool]
) -> None:
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = narrow.quantize(weight.float(), bits, setting[0], symmetric=setting[1])
    monkeypatch.setattr(row_slices, "VALUES", 1)  # 64 rows each, and a last slice of 8
    sliced = narrow.quantize(weight, bits, setting[0], symmetric=setting[1])
    assert all(torch.equal(one, other) for one, other in zip(whole, sliced, strict=True))
    assert whole[1].dtype is sliced[1].dtype


@pytest.mark.parametrize("small", [0, 199], ids=["first slice", "last slice"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_that_float16_cannot_hold_makes_those_of_all_slices_float32(
    monkeypatch: pytest.MonkeyPatch, small: int, symmetric: bool
) -> None:
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    weight[small] *= 1e-6
    whole = narrow.quantize(weight, 4, 32, symmetric=symmetric)
    monkeypatch.setattr(row_slices, "VALUES", 1)
    sliced = narrow.quantize(weight, 4, 32, symmetric=symmetric)
    assert sliced[1].dtype is torch.float32
    assert all(torch.equal(one, other) for one, other in zip(whole, sliced, strict=True))


@pytest.mark.parametrize("bits", tables.TABLE_BITS)
def test_slices_of_a_table_are_the_whole(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = tables.pack_table(weight.float(), bits)
    monkeypatch.setattr(row_slices, "VALUES", 1)
    assert torch.equal(tables.pack_table(weight, bits), whole)

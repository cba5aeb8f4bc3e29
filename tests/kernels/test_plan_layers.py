"""Layers of a plan that quantise as they go: the bits of the operators that they are made of, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from quant.kernels import narrow, ops, reference_plan, tables
from torch import Tensor

from .test_plan_reals import reals, text

pytestmark = pytest.mark.skipif(bool(ops.extension_problem()), reason="the compiled kernels are not here")

KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
WEIGHTS = "q_weight_ih=$0 scale_ih=$1 q_weight_hh=$2 scale_hh=$3 bias_ih=$4 bias_hh=$5"
DYNAMIC = f"columns_ih=- bits=8 per_row=True {WEIGHTS}"
STATIC = f"x_scale=0.02 x_zero_point=120 h_scale=0.008 h_zero_point=127 m_scale=0.01 m_zero_point=128 {WEIGHTS}"
HIDDEN, FEATURES = 20, 12


def int8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def scales(count: int, seed: int) -> Tensor:
    return 0.002 + 0.002 * torch.rand(count, generator=torch.Generator().manual_seed(seed))


def layer(mode: str, state: int = HIDDEN) -> list[Tensor]:
    width = KINDS[mode] * HIDDEN
    biases = [reals(width, seed=5), reals(width, seed=6)]
    projection = [int8(state, HIDDEN, seed=7), scales(state, 8)]
    return [
        int8(width, FEATURES, seed=1),
        scales(width, 2),
        int8(width, state, seed=3),
        scales(width, 4),
        *biases,
        *projection,
    ]


def run(program: str, inputs: Sequence[Tensor], constants: Sequence[Tensor]) -> list[Tensor]:
    """What the kernels give; the reference gives it within rounding."""
    found: list[Tensor] = torch.ops.octet.run_plan(list(inputs), list(constants), program, "")
    for one, wanted in zip(found, reference_plan.run_plan(inputs, constants, program), strict=True):
        assert one.shape == wanted.shape
        assert one.dtype == wanted.dtype
        if one.dtype == torch.uint8:
            assert (one.int() - wanted.int()).abs().max() <= 1 if one.numel() else True
        else:
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    return found


def recurrent(op: str, mode: str, settings: str, *, given: bool, projected: bool = False) -> str:
    states = "h=%1 c=%2" if given and mode == "lstm" else "h=%1 c=-" if given else "h=- c=-"
    last = "q_weight_hr=$6 scale_hr=$7" if projected else "q_weight_hr=- scale_hr=-"
    lines = [f"%9 = {op} {settings} {states} {last} mode={mode}", "%10 = final_state y=%9 of=h"]
    lines += ["%11 = final_state y=%9 of=c"] if mode == "lstm" else []
    return text(*lines, inputs=3 if given else 1, outputs="%9 %10" + " %11" * (mode == "lstm"))


@pytest.mark.parametrize("shape", [(1, 12), (7, 12), (40, 12), (3, 5, 12), (0, 12)], ids=str)
@pytest.mark.parametrize("settings", ["columns=- bits=8 per_row=True", "columns=- bits=8 per_row=False",
                                      "columns=$3 bits=16 per_row=True"])  # fmt: skip
def test_dynamic_linear(shape: tuple[int, ...], settings: str) -> None:
    constants = [int8(9, 12), scales(9, 1), reals(9), scales(12, 2) * 200]
    x = reals(*shape)
    program = text(f"%9 = linear_dynamic x=%0 q_weight=$0 scale=$1 bias=$2 {settings}", inputs=1)
    [got] = run(program, [x], constants)
    columns, bits, per_row = "columns=$3" in settings, 16 if "16" in settings else 8, "True" in settings
    wanted = torch.ops.octet.linear_dynamic(
        x, *constants[:3], constants[3] if columns else None, bits, per_row, False, ""
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("bits", narrow.NARROW_BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
def test_dynamic_linear_with_scales_by_group(rows: int, bits: int, dtype: torch.dtype, zero_points: bool) -> None:
    draws = torch.Generator().manual_seed(bits)
    weight = narrow.pack(torch.randint(0, 2**bits, (9, 128), generator=draws), bits)
    scale = torch.rand(9, 4, generator=draws) / 50
    if zero_points:
        scale = torch.stack([scale, torch.randint(0, 2**bits, (9, 4), generator=draws).float()], dim=2)
    constants, x = [weight, scale.to(dtype), reals(9)], reals(rows, 128)
    settings = "columns=- bits=8 per_row=True"
    program = text(f"%9 = linear_dynamic x=%0 q_weight=$0 scale=$1 bias=$2 {settings}", inputs=1)
    [got] = run(program, [x], constants)
    assert torch.equal(got, torch.ops.octet.linear_dynamic(x, *constants, None, 8, True, False, ""))


def test_scales_of_another_dtype_in_the_same_memory_are_other_scales() -> None:
    weight, x = narrow.pack(torch.randint(0, 16, (64, 64), generator=torch.Generator().manual_seed(0)), 4), reals(3, 64)
    bits = torch.randint(0x2000, 0x3000, (64, 4), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    wide = bits.to(torch.int16).view(torch.float32)
    half = torch.as_strided(wide.view(torch.float16), (64, 2), (2, 1))
    program = text("%9 = linear_dynamic x=%0 q_weight=$0 scale=$1 bias=- columns=- bits=8 per_row=True", inputs=1)
    for scale in (wide, half):
        [got] = torch.ops.octet.run_plan([x], [weight, scale], program, "")
        assert torch.equal(got, torch.ops.octet.linear_dynamic(x, weight, scale, None, None, 8, True, False, ""))


def test_scales_by_group_on_the_meta_device_have_shapes() -> None:
    weight, scale = narrow.pack(torch.zeros(9, 128), 4).to("meta"), torch.ones(9, 2, device="meta")
    program = text("%9 = linear_dynamic x=%0 q_weight=$0 scale=$1 bias=- columns=- bits=8 per_row=True", inputs=1)
    [got] = torch.ops.octet.run_plan([reals(3, 128).to("meta")], [weight, scale], program, "")
    assert got.shape == (3, 9)


BY_GROUP = {
    "a weight of bytes": (int8(4, 64), torch.ones(4, 2), "which a weight of bytes has not"),
    "groups of 16": (narrow.pack(torch.zeros(4, 64), 4), torch.ones(4, 4), r"scale has (another )?shape"),
    "other outputs": (narrow.pack(torch.zeros(4, 64), 4), torch.ones(5, 2), r"scale has (another )?shape"),
    "three values a group": (narrow.pack(torch.zeros(4, 64), 4), torch.ones(4, 2, 3), r"scale has (another )?shape"),
    "integers": (narrow.pack(torch.zeros(4, 64), 4), torch.ones(4, 2, dtype=torch.int32), "scale is .*int32"),
}


@pytest.mark.parametrize("name", BY_GROUP)
def test_scales_by_group_that_do_not_fit_are_refused_by_both(name: str) -> None:
    weight, scale, words = BY_GROUP[name]
    operation = "linear_dynamic x=%0 q_weight=$0 scale=$1 bias=- columns=- bits=8 per_row=True"
    for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(ValueError, match=words):
            call([reals(3, 64)], [weight, scale], text(f"%9 = {operation}", inputs=1))


@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from states"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("batch", [1, 3, 33])
def test_recurrent_layers(mode: str, reverse: bool, given: bool, batch: int) -> None:
    constants, steps = layer(mode), 6
    x, states = reals(steps, batch, FEATURES), [reals(batch, HIDDEN, seed=one) * 0.3 for one in (8, 9)]
    h, c = states if given else [torch.zeros(batch, HIDDEN)] * 2
    inputs = states if given else []
    fixed = (None, None, mode, reverse)
    dynamic = run(
        recurrent("rnn_dynamic x=%0", mode, f"{DYNAMIC} reverse={reverse}", given=given), [x, *inputs], constants
    )
    wanted = torch.ops.octet.rnn_layer(
        x, None, h, c, *constants[:2], None, 8, True, *constants[2:6], *fixed, ""
    )  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(dynamic, wanted, strict=False))
    q_x = torch.ops.octet.quantize(x, 0.02, 120)
    for quantized in (False, True):
        settings = f"{STATIC} reverse={reverse} quantized={quantized}"
        static = run(recurrent("rnn_static q_x=%0", mode, settings, given=given), [q_x, *inputs], constants)
        ranges = (0.008, 127, None, None, 0.01, 128, mode, reverse, quantized, "")
        wanted = torch.ops.octet.rnn_layer_static(q_x, 0.02, 120, None, h, c, *constants[:6], *ranges)
        assert all(torch.equal(one, other) for one, other in zip(static, wanted, strict=False))


def test_a_projection() -> None:
    constants, x = layer("lstm", state=8), reals(5, 3, FEATURES)
    program = recurrent("rnn_dynamic x=%0", "lstm", f"{DYNAMIC} reverse=False", given=False, projected=True)
    y, h, c = run(program, [x], constants)
    assert y.shape == (5, 3, 8)
    assert torch.equal(h, y[-1])
    assert c.shape == (3, HIDDEN)


def test_no_steps_leave_the_states_as_they_were() -> None:
    for shape in ((0, 3, FEATURES), (4, 0, FEATURES)):
        states = [reals(shape[1], HIDDEN, seed=one) for one in (8, 9)]
        program = recurrent("rnn_dynamic x=%0", "lstm", f"{DYNAMIC} reverse=False", given=True)
        _, h, c = run(program, [reals(*shape), *states], layer("lstm"))
        assert torch.equal(h, states[0])
        assert torch.equal(c, states[1])


@pytest.mark.parametrize("place", [1, 2], ids=["h", "c"])
def test_a_first_state_that_is_not_finite_is_told(place: int) -> None:
    program = recurrent("rnn_static q_x=%0", "lstm", f"{STATIC} reverse=False quantized=True", given=True)
    inputs = [torch.full((2, 3, FEATURES), 100, dtype=torch.uint8), torch.zeros(3, HIDDEN), torch.zeros(3, HIDDEN)]
    assert len(torch.ops.octet.run_plan_of_finite(inputs, layer("lstm"), program, "")) == 3
    inputs[place][1, 4] = float("nan")
    assert torch.ops.octet.run_plan_of_finite(inputs, layer("lstm"), program, "") == []
    assert reference_plan.run_plan_of_finite(inputs, layer("lstm"), program) == []


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 32])
def test_embeddings(bits: int) -> None:
    table = reals(30, 21)
    settings = f"embedding_table x=%0 rows=$0 bits={bits} dim=21" if bits < 32 else "embedding x=%0 weight=$0"
    packed = tables.pack_table(table, bits) if bits < 32 else table
    for shape in ((5,), (3, 70), (2, 3, 4), (), (0, 4)):
        x = torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(1))
        [got] = run(text(f"%9 = {settings}", inputs=1), [x], [packed])
        wanted = torch.ops.octet.embedding(packed, x, bits, 21, "") if bits < 32 else table[x]
        assert torch.equal(got, wanted)


def test_a_table_may_have_any_strides() -> None:
    run(text("%9 = embedding x=%0 weight=$0", inputs=1), [torch.tensor([4, 0, 29])], [reals(7, 30).t()])


def test_indices_may_have_any_strides_and_be_moved() -> None:
    x = torch.randint(0, 30, (6, 8), generator=torch.Generator().manual_seed(1))
    lines = ("%1 = transpose x=%0 dim0=0 dim1=1", "%2 = slice x=%1 dim=1 start=1 end=- step=2",
             "%3 = reshape x=%2 shape=-1,", "%9 = embedding x=%3 weight=$0")  # fmt: skip
    for indices in (x, x.t().contiguous().t(), x[:, ::2]):
        run(text(*lines, inputs=1), [indices], [reals(30, 7)])


@pytest.mark.parametrize("index", [-1, 30])
def test_an_index_of_no_row_names_the_line(index: int) -> None:
    program, x = text("%9 = embedding x=%0 weight=$0", inputs=1), torch.tensor([3, index])
    for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(IndexError, match=rf"plan line '%9 = embedding .*': index {index} is outside"):
            call([x], [reals(30, 7)], program)


REFUSED = {
    "indices of floats": ("embedding x=%0 weight=$1", "int64"),
    "integers that are given out": ("same x=%1", "gives out int64"),
    "padded integers": ("pad q=%1 widths=1,1 mode=constant fill=0", "int64"),
    "bits": ("linear_dynamic x=%0 q_weight=$0 scale=$1 bias=- columns=- bits=7 per_row=True", "8 nor 16"),
    "features": ("linear_dynamic x=%0 q_weight=$2 scale=$3 bias=- columns=- bits=8 per_row=True", "features"),
    "shape of bits": ("linear_dynamic x=%0 q_weight=$9 scale=$3 bias=- columns=- bits=8 per_row=True", "few bits"),
    "rows of no gates": (
        f"rnn_dynamic x=%0 h=- c=- {DYNAMIC.replace('=$0', '=$10')} q_weight_hr=- scale_hr=- mode=lstm reverse=False",
        "not the same multiple of 4 rows",
    ),
    "no such kind": (f"rnn_dynamic x=%0 h=- c=- {DYNAMIC} q_weight_hr=- scale_hr=- mode=lru reverse=False", "lru"),
    "the state of what has none": ("final_state y=%0 of=h", "no recurrent layer"),
    "rows of another length": ("embedding_table x=%1 rows=$8 bits=8 dim=6", "length"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_both(name: str) -> None:
    operation, words = REFUSED[name]
    inputs = [reals(4, 3, FEATURES), torch.zeros(3, dtype=torch.int64), reals(3, HIDDEN)]
    few_bits = torch.zeros(5, 3, 5, dtype=torch.uint8)  # rows of 40 values, expected a multiple of 32
    constants = [*layer("lstm"), torch.zeros(5, 13, dtype=torch.uint8), few_bits, int8(4 * HIDDEN - 2, FEATURES)]
    constants[1] = constants[1][: 4 * HIDDEN]
    program = text(f"%9 = {operation}", inputs=3)
    for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(ValueError, match=words):
            call(inputs, constants, program)


def test_a_kind_without_c_takes_and_gives_none() -> None:
    constants, x = layer("gru"), reals(4, 3, FEATURES)
    dynamic = f"rnn_dynamic x=%0 h=- {DYNAMIC} q_weight_hr=- scale_hr=- mode=gru reverse=False"
    for lines in ([f"%9 = {dynamic} c=%1"], [f"%8 = {dynamic} c=-", "%9 = final_state y=%8 of=c"]):
        for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
            with pytest.raises(ValueError, match="kind has no c"):
                call([x, reals(3, HIDDEN)], constants, text(*lines, inputs=2))

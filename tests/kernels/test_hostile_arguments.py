"""Arguments that the fuzzers found no answer to, or that were read for them: each is an error, and none a crash.

Where the extension is not loaded the reference serves the same operators, and refuses the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import reference_plan, tables
from quant.kernels.backend import Backend
from torch import Tensor

HUGE = 1 << 62
ALL = torch.ops.octet


def q_x(*shape: int) -> Tensor:
    return torch.full(shape, 9, dtype=torch.uint8)


def weight(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int8)


def conv(x: Tensor, by: Tensor, *settings: Any) -> tuple[Any, ...]:
    return ALL.conv_u8s8_s32, (x, 3, by, None, *settings, "")


def scalars(*values: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor(value, dtype=dtype) for value in values]


def follow_range(low: int, high: int, middle: int | None) -> tuple[Any, ...]:
    state = [*scalars(-1.0, 1.0), *scalars(1, 0, 0, dtype=torch.int64), *scalars(1.0), *scalars(0, dtype=torch.int32)]
    return ALL.follow_range, (torch.zeros(3), 0.1, -math.inf, math.inf, low, high, middle, *state)


def gru(x: Tensor, batch_sizes: list[int] | None, h: Tensor) -> tuple[Any, ...]:
    by = [weight(3, x.shape[-1]), torch.ones(3), None, 8, True, weight(3, 1), torch.ones(3), None, None, None, None]
    sizes = None if batch_sizes is None else torch.tensor(batch_sizes)
    return ALL.rnn_layer, (x, sizes, h, None, *by, "gru", False, "")


TABLE = tables.pack_table(torch.randn(2, 4), 8)

REFUSED = {
    "a padding beyond memory": (
        conv(q_x(1, 2, 3, 3), weight(1, 2, 1, 1), [HUGE] * 2, [HUGE, 0], [1, 1], 1),
        r"2\*\*40",
    ),
    "a padding whose bytes leave int64": (
        conv(q_x(1, 2, 3, 3), weight(1, 2, 1, 1), [1 << 40] * 2, [1 << 39, 1 << 39], [1, 1], 1),
        r"2\*\*40",
    ),
    "a dilation whose reach leaves int64": (
        conv(q_x(1, 1, 9, 9), weight(1, 1, 5, 5), [1, 1], [0, 0], [HUGE] * 2, 1),
        "does not fit the padded input",
    ),
    "groups of no channels": (
        conv(q_x(1, 0, 3, 3), weight(0, 0, 1, 1), [1, 1], [0, 0], [1, 1], 1 << 40),
        "channels, q_weight",
    ),
    "groups whose channels leave int64": (
        conv(q_x(1, 1, 3, 3), weight(0, 7, 1, 1), [1, 1], [0, 0], [1, 1], 7905747460161236407),
        "channels, q_weight",
    ),
    "a weight of many rows of nothing": (
        (ALL.linear_dynamic, (torch.ones(2, 6), weight(HUGE, 0), torch.ones(8), None, None, 8, True, False, "")),
        r"scale has shape|expected \(\.\.\., 0\) \(in_features\)",  # the kernels look at the scale first
    ),
    "rows of less than no values": (
        (ALL.embedding, (TABLE[:, :7].contiguous(), torch.tensor([0]), 8, -1, "")),
        "packed rows",
    ),
    "rows whose bits leave int64": (
        (ALL.embedding, (TABLE[:, :8].contiguous(), torch.tensor([0]), 8, 1 << 61, "")),
        "packed rows",
    ),
    "limits in another order": (
        (ALL.requantize, (torch.zeros(2, dtype=torch.int32), torch.ones(()), 3, 9, 8)),
        "quant_min is 9, above quant_max",
    ),
    "limits of a layer in another order": (
        (ALL.linear_u8s8_u8, (q_x(2, 3), 3, weight(4, 3), None, torch.ones(4), 3, 9, 8, "")),
        "quant_min is 9, above quant_max, 8",
    ),
    "limits of a convolution in another order": (
        (
            ALL.conv_u8s8_u8,
            (q_x(1, 2, 3, 3), 3, weight(4, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], 1, torch.ones(4), 3, 9, 8, ""),
        ),
        "quant_min is 9, above quant_max, 8",
    ),
    "a depthwise kernel of more products than int32 holds": (
        conv(q_x(1, 2, 190, 190), weight(2, 1, 190, 190), [1, 1], [0, 0], [1, 1], 2),
        "K is 36100; the sums of more than",
    ),
    "limits of fake quantisation in another order": (
        (
            ALL.fake_quantize,
            (torch.ones(2), *scalars(1.0), *scalars(0, dtype=torch.int32), None, 9, 8, 0.0, 1.0, False),
        ),
        "quant_min is 9 and quant_max 8",
    ),
    "limits that float32 does not hold": (follow_range(0, 1 << 40, None), "quant_min is 0 and quant_max 1099511627776"),
    "a middle outside": (follow_range(0, 255, 256), "middle is 256"),
    "no integers at all": (
        (ALL.round_weight, (torch.ones(2, 2), None, None, None, 1.0, 0)),
        "quant_max is 0",
    ),
    "integers of no number of bits": (
        (ALL.round_weight, (torch.ones(2, 2), None, None, None, 1.0, 5)),
        "quant_max is 5",
    ),
    "batches whose sum leaves int64": (
        gru(torch.ones(1, 2), [HUGE, HUGE, HUGE, HUGE, 1], torch.ones(1, 1)),
        "batch_sizes|expected",
    ),
    "batches of more rows than there are": (gru(torch.ones(2, 2), [2, 1], torch.ones(2, 1)), "batch_sizes"),
    "batches that grow": (gru(torch.ones(3, 2), [1, 2], torch.ones(1, 1)), "never grow"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=list(REFUSED))
def test_it_is_refused(call: tuple[Any, tuple[Any, ...]], message: str) -> None:
    operator, arguments = call
    with pytest.raises(ValueError, match=message):
        operator(*arguments)


def test_what_has_no_effect_may_be_any_number() -> None:
    """The stride of one output, and the dilation of one tap."""
    operator, arguments = conv(q_x(1, 2, 3, 3), weight(4, 2, 3, 1), [HUGE, 1], [0, 0], [1, HUGE], 1)
    assert torch.equal(operator(*arguments), torch.full((1, 4, 1, 3), 36, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(1, 0, 3, 3), (1, 2, 0, 3), (0, 2, 3, 3)], ids=str)
def test_a_convolution_of_nothing_gives_its_bias(shape: tuple[int, ...]) -> None:
    bias = torch.tensor([5, -7], dtype=torch.int32)
    by = weight(2, shape[1], 3, 3)
    y = ALL.conv_u8s8_s32(q_x(*shape), 3, by, bias, [1, 1], [2, 2], [1, 1], 1, "")
    sizes = [size + 2 for size in shape[2:]]
    assert torch.equal(y, bias.view(1, 2, 1, 1).expand(shape[0], 2, *sizes))


def test_a_convolution_without_channels_on_each_backend(backend: Backend) -> None:
    """Tiles divided by its depth, and rows of no length were reshaped."""
    settings = (3, weight(2, 0, 1, 1), None, [1, 1], [0, 0], [1, 1], 1, torch.ones(2))
    assert torch.equal(backend.conv_u8s8_f32(q_x(1, 0, 4, 3), *settings), torch.zeros(1, 2, 4, 3))
    assert torch.equal(backend.conv_u8s8_u8(q_x(1, 0, 4, 3), *settings, 7, 0, 255), q_x(1, 2, 4, 3) - 2)
    assert backend.conv_u8s8_s32(q_x(1, 2, 4, 3), 3, weight(0, 2, 1, 1), None, *settings[3:7]).shape == (1, 0, 4, 3)


def test_a_convolution_without_channels_in_emulated_tiles(extension: None, run_python: Callable[..., str]) -> None:
    run_python(
        "import torch; from quant.kernels import current\n"
        "x, weight = torch.zeros(1, 0, 4, 3, dtype=torch.uint8), torch.zeros(2, 0, 1, 1, dtype=torch.int8)\n"
        "current('native').conv_u8s8_u8(x, 3, weight, None, [1, 1], [0, 0], [1, 1], 1, torch.ones(2), 7, 0, 255)",
        QUANT_ISA="amx-emulated",
    )


def test_an_adaptive_window_of_one_dimension_may_keep_its_size() -> None:
    text = (
        "octet-plan 1\ninputs %0\n%1 = adaptive_avg_pool q=%0 zero_point=3 size=-, multiplier=1.0 output_zero_point=3"
    )
    assert torch.equal(reference_plan.run_plan([q_x(2, 3, 5)], [], f"{text}\noutputs %1")[0], q_x(2, 3, 5))
    assert torch.equal(ALL.run_plan([q_x(2, 3, 5)], [], f"{text}\noutputs %1", "")[0], q_x(2, 3, 5))


POOLS = {
    "max": "max_pool q=%0 kernel=2,2,2 stride=1 padding=0 dilation=1 ceil_mode=False",
    "mean": "avg_pool q=%0 zero_point=3 kernel=1,2,2 multiplier=0.7 output_zero_point=1 stride=1 padding=0",
    "adaptive": "adaptive_avg_pool q=%0 zero_point=3 size=2,2,2 multiplier=0.7 output_zero_point=1",
    "adaptive max": "adaptive_max_pool q=%0 size=2,2,2",
}


@pytest.mark.parametrize("line", POOLS.values(), ids=list(POOLS))
def test_a_volume_without_a_batch_may_lie_as_an_image(line: str) -> None:
    x = torch.arange(3 * 4 * 5 * 6, dtype=torch.uint8).view(3, 4, 5, 6)
    turned = x.movedim(1, -1).contiguous().movedim(-1, 1)
    text = f"octet-plan 1\ninputs %0\n%1 = {line}\noutputs %1"
    expected = reference_plan.run_plan([x], [], text)[0]
    assert torch.equal(reference_plan.run_plan([turned], [], text)[0], expected)
    assert torch.equal(ALL.run_plan([turned], [], text, "")[0], expected)


@pytest.mark.parametrize("shape", [(4, 3), (5, 2, 3), (2, 1, 1, 2, 3), (2, 4)], ids=str)
def test_a_mask_adds_no_queries(shape: tuple[int, ...]) -> None:
    """torch broadcasts the scores to it."""
    text = "octet-plan 1\ninputs %0 %1 %2\n%3 = attention q=%0 k=%1 v=%1 scale=- causal=False mask=%2\noutputs %3"
    q, k = torch.randn(2, 2 if shape[-2] == 2 else 1, 4), torch.randn(2, 3, 4)
    for run in (lambda *given: reference_plan.run_plan(*given), lambda *given: ALL.run_plan(*given, "")):
        with pytest.raises(ValueError, match=r"its mask (does not fit the scores|has more dimensions)"):
            run([q, k, torch.zeros(shape)], [], text)
    mask = torch.zeros(q.shape[1], 3)
    expected = reference_plan.run_plan([q, k, mask], [], text)
    torch.testing.assert_close(ALL.run_plan([q, k, mask], [], text, ""), expected, rtol=1e-5, atol=1e-6)


def test_rows_without_features_and_outputs_take_no_time(extension: None) -> None:
    """2**62 of them."""
    nothing = torch.empty(1 << 31, 1 << 31, 0)
    y = ALL.linear_dynamic_plain(nothing, weight(0, 0), torch.ones(0), None)
    assert y.shape == nothing.shape
    assert ALL.linear_u8s8_s32(nothing.to(torch.uint8), 3, weight(0, 0), None, "").shape == nothing.shape


def test_steps_without_rows_take_no_memory(extension: None) -> None:
    operator, arguments = gru(torch.empty(1 << 50, 0, 2), None, torch.empty(0, 1))
    assert operator(*arguments)[0].shape == (1 << 50, 0, 1)


ON_TWO_DEVICES = {
    "multiplier": lambda meta: (ALL.requantize, (torch.zeros(2, dtype=torch.int32), meta(torch.ones(())), 0, 0, 255)),
    "q_bias": lambda meta: (
        ALL.linear_u8s8_s32, (q_x(1, 2), 0, weight(3, 2), meta(torch.zeros(3, dtype=torch.int32)), ""),
    ),
    "q_weight": lambda meta: (ALL.product, (q_x(1, 2), meta(weight(3, 2)), "reference")),
    "scale": lambda meta: (ALL.linear_dynamic_plain, (torch.ones(1, 2), weight(3, 2), meta(torch.ones(3)), None)),
    "gain": lambda meta: (ALL.round_weight, (torch.ones(2, 2), meta(torch.ones(2)), None, None, 1.0, 127)),
    "means": lambda meta: (
        ALL.observe_activation,
        (torch.ones(1, 2), 1, torch.ones(1), torch.ones(1), *scalars(0, 0, dtype=torch.int64),
         torch.zeros(1, 8, dtype=torch.int64), [meta(torch.zeros(2, dtype=torch.float64))]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_TWO_DEVICES)
def test_operands_of_two_devices_are_refused(name: str) -> None:
    """The shape function answered, with memory that nobody had written."""
    operator, arguments = ON_TWO_DEVICES[name](lambda x: x.to("meta"))
    with pytest.raises(ValueError, match=f"input is on cpu and {name} on meta, expected one device"):
        operator(*arguments)
    operator, arguments = ON_TWO_DEVICES[name](lambda x: x)
    if name != "means":
        operator(*arguments)


def test_a_plan_of_two_devices_is_held_to_it_line_by_line() -> None:
    """A forward may ask a tensor of the meta device for sizes, beside what it computes."""
    x, shape = q_x(2), q_x(2).to("meta")
    text = "octet-plan 1\ninputs %0 %1\n{}\noutputs %2 %1"
    same, other = ALL.run_plan([x, shape], [], text.format("%2 = same x=%0"), "")
    assert same.equal(x)
    assert other.is_meta
    line = "%2 = add q_a=%0 a_zero_point=1 a_multiplier=1.0 q_b=%1 b_zero_point=1 b_multiplier=1.0"
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        ALL.run_plan([x, shape], [], text.format(f"{line} output_zero_point=1 quant_min=0 quant_max=255"), "")
    known = [torch.zeros(256, dtype=torch.uint8)]
    lookup = "octet-plan 1\ninputs %0\n%1 = lookup q=%0 table=$0\noutputs %1"
    with pytest.raises(ValueError, match="input is on meta and table on cpu, expected one device"):
        ALL.run_plan([shape], known, lookup, "")
    line = "%2 = matmul_f32 q_a=%0 a_zero_point=3 q_b=%1 b_zero_point=200 multiplier=0.0004"
    batch = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    for inputs in ([batch, batch.to("meta")], [batch.to("meta"), batch]):
        with pytest.raises(ValueError, match=r"input is on (cpu and q_b on meta|meta and q_b on cpu)"):
            ALL.run_plan(inputs, [], text.format(line), "")


def test_constants_of_a_plan_lie_on_one_device() -> None:
    """One that no line reads as well: the kernels refuse it, and the shape function takes the place of the kernels."""
    text, there = "octet-plan 1\ninputs %0\n%1 = same x=%0\noutputs %1", weight(2, 2)
    for operator in (ALL.run_plan, ALL.run_plan_of_finite):
        with pytest.raises(ValueError, match="constant 0 is on cpu and constant 1 on meta, expected one device"):
            operator([q_x(2)], [there, there.to("meta")], text, "")
        with pytest.raises(ValueError, match="constants are on the meta device and an input is not"):
            operator([q_x(2)], [there.to("meta")], text, "")
        assert operator([q_x(2)], [there, there], text, "")[0].equal(q_x(2))


def test_rows_without_columns_are_counted_before_they_are_packed(extension: None) -> None:
    for rows, fits in ((2**24, True), (2**24 + 1, False), (2**40, False)):
        empty, x = torch.empty(rows, 0, dtype=torch.int8), torch.empty(0, 0, dtype=torch.uint8)
        if fits:
            assert ALL.linear_u8s8_s32(x, 0, empty, None, "").shape == (0, rows)
            continue
        with pytest.raises(ValueError, match=rf"q_weight has {rows} rows without columns, expected at most 16777216"):
            ALL.linear_u8s8_s32(x, 0, empty, None, "")


@pytest.mark.parametrize("name", ["all_finite", "route", "time_text"])
def test_what_has_no_memory_is_not_looked_at(extension: None, name: str) -> None:
    native = torch.ops.octet_native
    if name == "time_text":
        number = native.keep_text([], "octet-plan 1\ninputs %0\n%1 = same x=%0\noutputs %1", "")
        native.run_text([q_x(2)], number)
        with pytest.raises(TypeError, match="no plain tensor on the CPU"):
            native.time_text([q_x(2).to("meta")], number)
        return
    arguments = (torch.ones(5, device="meta"),) if name == "all_finite" else (weight(2, 2).to("meta"), "")
    with pytest.raises(ValueError, match="is on meta, expected the CPU"):
        getattr(native, name)(*arguments)


WITHOUT = {
    "linear_dynamic_plain": (torch.zeros(2, 4), weight(3, 4), None, None),
    "linear_dynamic": (torch.zeros(2, 4), weight(3, 4), None, None, None, 8, True, False, ""),
    "run_plan": ([torch.zeros(2), None], [], "octet-plan 1\nin %0 %1\nout %0", ""),
}
"""Calls with None for a tensor that an operator cannot be without, and that torch takes for one."""


@pytest.mark.parametrize("name", list(WITHOUT))
def test_no_tensor_is_refused(extension: None, name: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match="None"):
        getattr(ALL, name)(*WITHOUT[name])


def test_a_product_of_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="an operand is None"):
        ALL.product(None, weight(3, 4), "reference")


def test_no_tensor_beside_one_without_memory_is_refused() -> None:
    """By the shape functions, which ended in an AttributeError."""
    indices = torch.zeros(3, dtype=torch.int64, device="meta")
    for operator, rest in ((ALL.embedding, (8, 4)), (ALL.embedding_bag, (indices, None, 8, 4, "sum", False, -1))):
        with pytest.raises(TypeError, match="rows is None, expected a tensor"):
            operator(None, indices, *rest, "")
        assert operator(TABLE.to("meta"), indices, *rest, "").is_meta  # weights may be None


@pytest.mark.parametrize("shape", [(1 << 40, 0, 1 << 31), (1 << 31, 1 << 31, 0)], ids=str)
def test_an_input_of_a_plan_whose_strides_leave_int64_is_refused(extension: None, shape: tuple[int, ...]) -> None:
    by = "stride=1,2 padding=1,1 dilation=1,1 groups=1 output_zero_point=120 quant_min=30 quant_max=240"
    line = f"%9 = conv_u8s8_u8 q_x=%0 zero_point=9 q_weight=$0 q_bias=$1 multiplier=$2 {by}"
    text = f"octet-plan 1\ninputs %0\n{line}\noutputs %9"
    constants = [weight(5, 6, 3, 3), torch.ones(5, dtype=torch.int32), torch.ones(5)]
    for operator in (ALL.run_plan, ALL.run_plan_of_finite):
        with pytest.raises(ValueError, match=r"input 0 has a shape of more than 2\*\*40 values"):
            operator([torch.empty(shape)], constants, text, "")


def test_the_route_of_rows_without_columns_takes_no_memory(extension: None) -> None:
    native = torch.ops.octet_native
    assert native.route(torch.empty(1 << 40, 0, dtype=torch.int8), "native") == native.route(weight(3, 0), "native")


@pytest.mark.parametrize("library", ["onednn", "reference"])
@pytest.mark.parametrize(
    ("x", "by", "words"),
    [
        (q_x(3, 0), weight(1, 1), r"input has shape \(3, 0\), expected \(\.\.\., 1\)"),  # which divided by zero
        (q_x(2, 3, 4), weight(1, 4), r"input has shape \(2, 3, 4\), expected \(M, K\)"),
        (torch.ones(2, 3), weight(4, 3), "input is torch.float32, expected torch.uint8"),
        (None, weight(4, 3).to("meta"), "an operand is None"),
    ],
    ids=["no columns", "three dimensions", "reals", "none"],
)
def test_a_product_of_operands_that_do_not_fit_is_refused(
    x: Tensor | None, by: Tensor, words: str, library: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        ALL.product(x, by, library)

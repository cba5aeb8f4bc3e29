"""Functions, sums and choices of float32 in plans: torch's values within rounding, its bits where they are exact."""

from __future__ import annotations

import math

import pytest
import torch
from quant.kernels import reference_plan
from quant.kernels.reference_reals import FUNCTIONS

from .test_plan_reals import check, needs_kernels, reals, run, text

EXACT = ("neg", "abs", "rsqrt")
ENDS = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 88.7, 88.8, -87.5,
                     -104.0, 0.625, -0.625, 9.0, 1e6, -1e6, 1e7, 3e20])  # fmt: skip


def ulps(got: torch.Tensor, function: str, x: torch.Tensor) -> torch.Tensor:
    """The errors of normal results in units of their last place."""
    exact = FUNCTIONS[function](x.double())
    normal = exact.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return (got.double() - exact).abs() / torch.exp2(torch.floor(torch.log2(normal)) - 23)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function: str) -> None:
    for x in (reals(3, 5, 7) * 4, reals(2, 4100), reals(5, 1, 6)[:, 0].t(), reals(4, 9)[:, 2:7], reals(0, 3), reals()):
        got = check(text(f"%9 = unary_f32 x=%0 by={function}", inputs=1), [x])
        if function in EXACT:
            torch.testing.assert_close(got, FUNCTIONS[function](x), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_the_ends_of_float32(function: str) -> None:
    (got,) = run(text(f"%9 = unary_f32 x=%0 by={function}", inputs=1), [ENDS])
    torch.testing.assert_close(got, FUNCTIONS[function](ENDS), rtol=1e-6, atol=1e-37, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize(
    ("function", "farthest", "most"),
    [
        ("sqrt", 4.0, 0.51),
        ("exp", 87.0, 1.5),
        ("sigmoid", 80.0, 3.0),
        ("tanh", 12.0, 3.0),
        ("cos", 1e6, 1.0),
        ("sin", 1e6, 1.0),
    ],
)
def test_the_last_places_of_functions(function: str, farthest: float, most: float) -> None:
    near = torch.linspace(-4, 4, 40001)
    for x in (near, torch.linspace(-farthest, farthest, 40001), near * 1e-3):
        (got,) = run(text(f"%9 = unary_f32 x=%0 by={function}", inputs=1), [x])
        errors = ulps(got, function, x)
        assert errors[errors.isfinite()].max() <= most


@needs_kernels
def test_gelu_is_as_near_as_its_error_function() -> None:
    """Not to the last place of what is near 0 on the left, where 1 + erf has few digits in torch too."""
    x = torch.cat([torch.linspace(-9, 9, 40001), torch.linspace(-1e-3, 1e-3, 1001)])
    (got,) = run(text("%9 = unary_f32 x=%0 by=gelu", inputs=1), [x])
    exact = FUNCTIONS["gelu"](x.double())
    assert ((got.double() - exact).abs() / x.double().abs().clamp(min=1e-9)).max() <= 1.5e-7


def test_an_unknown_function_is_refused() -> None:
    program = text("%9 = unary_f32 x=%0 by=erfc", inputs=1)
    for runs in (lambda: run(program, [reals(3)]), lambda: reference_plan.run_plan([reals(3)], [], program)):
        with pytest.raises(ValueError, match="by is erfc, expected one of neg,abs"):
            runs()


@pytest.mark.parametrize("by", ["sum", "mean"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((7,), "0,"), ((2, 5, 64), "-1,"), ((2, 5, 7), "1,"), ((3, 4, 5, 6), "0,2"), ((3, 4, 5, 6), "3,1"),
     ((2, 3), "0,1"), ((0, 4), "1,"), ((0, 4), "0,"), ((0, 4), "0,1"), ((0,), "0,"), ((3, 1000), "1,")],
    ids=str,
)  # fmt: skip
def test_sums(by: str, shape: tuple[int, ...], dims: str, *, keepdim: bool) -> None:
    check(text(f"%9 = reduce_f32 x=%0 by={by} dim={dims} keepdim={keepdim}", inputs=1), [reals(*shape)])


def test_sums_of_views() -> None:
    lines = ("%5 = transpose x=%0 dim0=0 dim1=2", "%9 = reduce_f32 x=%5 by=sum dim=2, keepdim=True")
    check(text(*lines, inputs=1), [reals(6, 5, 4)])


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 50, 64, 100])
@pytest.mark.parametrize("inner", [2, 5, 64, 70])
@pytest.mark.parametrize("by", ["sum", "mean"])
def test_sums_of_columns_have_the_bits_of_sums_of_rows(by: str, inner: int, count: int) -> None:
    """Columns are added where they lie, in the order in which a row's partial sums are."""
    x = reals(3, count, inner) * 100
    x[0, 0, 0] = -0.0
    (columns,) = run(text(f"%9 = reduce_f32 x=%0 by={by} dim=1, keepdim=False", inputs=1), [x])
    rows = x.transpose(1, 2).contiguous()
    (expected,) = run(text(f"%9 = reduce_f32 x=%0 by={by} dim=2, keepdim=False", inputs=1), [rows])
    assert torch.equal(columns.view(torch.int32), expected.view(torch.int32))


@needs_kernels
@pytest.mark.parametrize("dims", ["0,", "1,", "2,", "3,", "0,1", "1,2", "2,3", "0,2", "0,3", "1,3", "0,1,2", "1,2,3"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (1, 0, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)], ids=str)
def test_sums_do_not_depend_on_how_values_lie(order: tuple[int, ...], dims: str) -> None:
    """A permutation before the sum moves nothing: the same values, with other strides."""
    x = reals(3, 18, 5, 33)
    places = ",".join(map(str, order))
    lines = (f"%5 = permute x=%0 dims={places}", f"%9 = reduce_f32 x=%5 by=sum dim={dims} keepdim=False")
    (got,) = run(text(*lines, inputs=1), [x])
    (expected,) = run(
        text(f"%9 = reduce_f32 x=%0 by=sum dim={dims} keepdim=False", inputs=1), [x.permute(order).contiguous()]
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((3, 4), "1,-1", "takes a dimension twice"),
        ((1 << 41, 0), "1,", r"more than 2\*\*40 values"),
        ((3, 4), "2,", "dimension"),
        ((), "0,", "dimension"),
    ],
    ids=str,
)  # fmt: skip
def test_sums_that_cannot_be(shape: tuple[int, ...], dims: str, message: str) -> None:
    program = text(f"%9 = reduce_f32 x=%0 by=sum dim={dims} keepdim=False", inputs=1)
    for runs in (lambda: run(program, [reals(*shape)]), lambda: reference_plan.run_plan([reals(*shape)], [], program)):
        with pytest.raises(ValueError, match=message):
            runs()


def masks(*shape: int) -> torch.Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [
        ((2, 5, 7), (2, 5, 7), (2, 5, 7)),
        ((1, 1, 7), (2, 5, 7), ()),
        ((5, 1), (), (2, 5, 7)),
        ((2, 1, 7), (5, 1), (1, 1, 1)),
        ((4,), (1,), (1,)),
        ((0, 3), (3,), ()),
        ((), (2, 3), (3,)),
        ((1, 5), (0, 1), (1, 1)),
    ],
    ids=str,
)
def test_choices(mask: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    inputs = [masks(*mask), reals(*left), reals(*right, seed=1)]
    got = check(text("%9 = where_f32 mask=%0 a=%1 b=%2", inputs=3), inputs)
    assert torch.equal(got, torch.where(inputs[0] != 0, inputs[1], inputs[2]))


def test_choices_of_views() -> None:
    lines = ("%5 = transpose x=%0 dim0=0 dim1=1", "%6 = slice x=%1 dim=1 start=1 end=- step=2",
             "%9 = where_f32 mask=%5 a=%6 b=%2")  # fmt: skip
    check(text(*lines, inputs=3), [masks(4, 6), reals(6, 8), reals(4, seed=2)])


@pytest.mark.parametrize(
    ("mask", "left", "message"),
    [(masks(3), reals(4), "where_f32"), (masks(2, 3), reals(2), "where_f32"), (reals(4), reals(4), "float32")],
    ids=["sizes", "rank", "dtype"],
)
def test_choices_that_cannot_be(mask: torch.Tensor, left: torch.Tensor, message: str) -> None:
    program = text("%9 = where_f32 mask=%0 a=%1 b=%1", inputs=2)
    for runs in (lambda: run(program, [mask, left]), lambda: reference_plan.run_plan([mask, left], [], program)):
        with pytest.raises(ValueError, match=message):
            runs()


@pytest.mark.parametrize("n", [1, 3, 16, 33, 64, 100, 768])
@pytest.mark.parametrize("weight", ["-", "$0"])
def test_rms_norm(n: int, weight: str) -> None:
    program = text(f"%9 = rms_norm x=%0 weight={weight} eps=1e-05 size={n}", inputs=1)
    for x in (reals(2, 70, n) * 3, reals(0, n), reals(n, 4).t()):
        check(program, [x], [reals(n, seed=1)])


@pytest.mark.parametrize(
    "line", ["rms_norm x=%0 weight=- eps=1e-05 size=6", "layer_norm x=%0 weight=- bias=- eps=1e-05 size=6"]
)
def test_norms_of_rows_of_another_size(line: str) -> None:
    program = text(f"%9 = {line}", inputs=1)
    check(program, [reals(2, 6)])
    for runs in (lambda: run(program, [reals(2, 12)]), lambda: reference_plan.run_plan([reals(2, 12)], [], program)):
        with pytest.raises(ValueError, match="its rows have not 6 values"):
            runs()


def test_an_rms_norm_with_another_weight() -> None:
    program = text("%9 = rms_norm x=%0 weight=$0 eps=1e-05 size=6", inputs=1)
    for runs in (run, lambda *given: reference_plan.run_plan(*given[1:], given[0])):
        with pytest.raises(ValueError, match="weight"):
            runs(program, [reals(2, 6)], [reals(5)])


@pytest.mark.parametrize("shape", [(2, 6, 50), (3, 8, 7, 5), (1, 1, 2, 1), (0, 4, 3, 3), (2, 3, 2, 3, 4)], ids=str)
@pytest.mark.parametrize(("weight", "bias"), [("-", "-"), ("$0", "-"), ("$0", "$1")], ids=["plain", "weight", "both"])
def test_instance_norm(shape: tuple[int, ...], weight: str, bias: str) -> None:
    constants = [reals(shape[1], seed=1), reals(shape[1], seed=2)]
    program = text(f"%9 = instance_norm x=%0 weight={weight} bias={bias} eps=1e-05", inputs=1)
    check(program, [reals(*shape) * 3 + 5.0], constants)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 6), "no pixels"), ((2, 6, 1), "one value each"), ((2, 0, 3), "groups do not fit"), ((2, 5, 4), "weight")],
    ids=str,
)
def test_instance_norms_that_cannot_be(shape: tuple[int, ...], message: str) -> None:
    weight = "$0" if message == "weight" else "-"
    program = text(f"%9 = instance_norm x=%0 weight={weight} bias=- eps=1e-05", inputs=1)
    for runs in (run, lambda *given: reference_plan.run_plan(*given[1:], given[0])):
        with pytest.raises(ValueError, match=message):
            runs(program, [reals(*shape)], [reals(6)])

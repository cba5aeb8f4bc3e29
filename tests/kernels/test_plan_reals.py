"""Float steps of a plan: torch's values within rounding, and the same bits alone as together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from quant.kernels import ops, reference_plan
from torch import Tensor

needs_kernels = pytest.mark.skipif(bool(ops.extension_problem()), reason="the compiled kernels are not here")


def text(*lines: str, inputs: int, outputs: str = "%9") -> str:
    return "\n".join([reference_plan.HEADER, "inputs " + " ".join(f"%{i}" for i in range(inputs)), *lines,
                      f"outputs {outputs}"])  # fmt: skip


def run(program: str, inputs: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> list[Tensor]:
    made: list[Tensor] = torch.ops.octet.run_plan(list(inputs), list(constants), program, "")
    return made


def reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(program: str, inputs: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> Tensor:
    (got,) = run(program, inputs, constants)
    (expected,) = reference_plan.run_plan(inputs, constants, program)
    assert got.shape == expected.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5, equal_nan=True)
    return got


@pytest.mark.parametrize("n", [1, 3, 16, 33, 64, 100, 768])
@pytest.mark.parametrize(
    ("weight", "bias"), [("-", "-"), ("$0", "-"), ("-", "$1"), ("$0", "$1")], ids=["plain", "weight", "bias", "both"]
)
def test_layer_norm(n: int, weight: str, bias: str) -> None:
    constants = [reals(n, seed=1), reals(n, seed=2)]
    x = reals(2, 70, n) + (5.0 if n > 3 else 0.0)
    check(text(f"%9 = layer_norm x=%0 weight={weight} bias={bias} eps=1e-05", inputs=1), [x], constants)


def test_layer_norm_keeps_small_spreads_beside_large_means() -> None:
    x = reals(4, 256).double() * 1e-2 + 300
    expected = torch.nn.functional.layer_norm(x.float().double(), (256,), eps=1e-12)
    (got,) = run(text("%9 = layer_norm x=%0 weight=- bias=- eps=1e-12", inputs=1), [x.float()])
    assert (got - expected).abs().max() < 2e-2


@pytest.mark.parametrize("value", [1e6, -3e6, 12345.678, 3e15])
@pytest.mark.parametrize("n", [3, 96, 100, 770])
def test_layer_norm_of_equal_values_is_zero(n: int, value: float) -> None:
    """What their mean is off by is all that there is to divide: 96 times 12345.678 gave 0.295, 770 of -3e6 gave 1."""
    (got,) = run(text("%9 = layer_norm x=%0 weight=- bias=- eps=1e-05", inputs=1), [torch.full((2, n), value)])
    assert got.abs().max() < 1e-3


@needs_kernels
def test_silu() -> None:
    ends = torch.tensor([0.0, -0.0, 88.0, -88.0, 120.0, -120.0, math.inf, math.nan])
    for x in (reals(3, 5, 7) * 4, reals(2, 33, 9, 9) * 30, reals(5, 1, 6)[:, 0].t(), ends, reals(0, 3)):
        check(text("%9 = silu x=%0", inputs=1), [x])


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 6, 7, 5), 1), ((2, 6, 7, 5), 3), ((3, 32, 19, 17), 8), ((1, 20, 33), 20), ((4, 12), 4), ((0, 4, 3, 3), 2),
     ((2, 40, 3, 4, 5), 5)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("weight", "bias"), [("-", "-"), ("$0", "-"), ("-", "$1"), ("$0", "$1")], ids=["plain", "weight", "bias", "both"]
)
def test_group_norm(shape: tuple[int, ...], groups: int, weight: str, bias: str, *, last: bool) -> None:
    constants = [reals(shape[1], seed=1), reals(shape[1], seed=2)]
    x = reals(*shape) * 3 + 5.0
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    check(text(f"%9 = group_norm x=%0 groups={groups} weight={weight} bias={bias} eps=1e-05", inputs=1), [x], constants)


@needs_kernels
def test_group_norm_keeps_small_spreads_beside_large_means() -> None:
    x = reals(2, 4, 64, 64).double() * 1e-2 + 300
    expected = torch.nn.functional.group_norm(x.float().double(), 2, eps=1e-12)
    (got,) = run(text("%9 = group_norm x=%0 groups=2 weight=- bias=- eps=1e-12", inputs=1), [x.float()])
    assert (got - expected).abs().max() < 2e-2


@needs_kernels
@pytest.mark.parametrize("mean", [0.0, 30.0, 3e3, -1e5])
@pytest.mark.parametrize(("shape", "groups"), [((2, 8, 40, 30), 2), ((3, 6, 50), 6), ((1, 16, 9, 9), 16)], ids=str)
def test_group_norm_around_a_large_mean(shape: tuple[int, ...], groups: int, mean: float) -> None:
    """As near to the exact result as the rounding of the result allows, however large the mean is."""
    x = reals(*shape) + mean
    constants = [reals(shape[1], seed=1), reals(shape[1], seed=2)]
    expected = torch.nn.functional.group_norm(x.double(), groups, *[one.double() for one in constants])
    program = text(f"%9 = group_norm x=%0 groups={groups} weight=$0 bias=$1 eps=1e-05", inputs=1)
    (got,) = run(program, [x], constants)
    assert (got - expected).abs().max() < 3e-6 * expected.abs().max()


@needs_kernels
def test_group_norm_of_equal_values_and_of_inf() -> None:
    program = text("%9 = group_norm x=%0 groups=2 weight=- bias=- eps=1e-12", inputs=1)
    (got,) = run(program, [torch.full((1, 4, 50), 0.1)])
    assert got.abs().max() < 1e-2
    x = reals(1, 4, 50)
    x[0, 0, 3] = math.inf
    (got,) = run(program, [x])
    assert got[0, :2].isnan().all()
    assert got[0, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "groups", "message"),
    [((2, 6, 5), 4, "groups do not fit"), ((6,), 2, "no channels"), ((1, 2), 2, "one value each")],
    ids=str,
)
def test_group_norms_that_cannot_be(shape: tuple[int, ...], groups: int, message: str) -> None:
    program = text(f"%9 = group_norm x=%0 groups={groups} weight=- bias=- eps=1e-05", inputs=1)
    with pytest.raises(ValueError, match=message):
        run(program, [reals(*shape)])
    with pytest.raises(ValueError, match=message):
        reference_plan.run_plan([reals(*shape)], [], program)


def test_a_row_with_nan_is_nan_and_no_other() -> None:
    x = reals(3, 20)
    x[1, 7] = math.nan
    (got,) = run(text("%9 = layer_norm x=%0 weight=- bias=- eps=1e-05", inputs=1), [x])
    assert got.isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 5, 7), (2, 5, 7)),
        ((2, 5, 7), (7,)),
        ((5, 1), (2, 5, 7)),
        ((1, 5, 7), (4, 1, 7)),
        ((), (3,)),
        ((0, 3), (3,)),
    ],
    ids=str,
)
def test_sums_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = reals(*left), reals(*right, seed=1)
    assert torch.equal(check(text("%9 = add_f32 a=%0 b=%1", inputs=2), [a, b]), a + b)


def test_sums_of_transposed_reals() -> None:
    lines = ("%5 = transpose x=%0 dim0=1 dim1=2", "%9 = add_f32 a=%5 b=%1")
    check(text(*lines, inputs=2), [reals(2, 5, 7), reals(2, 7, 5)])


SHAPES = {  # batch, queries, keys, width, values
    "bert": ((1, 12), 128, 128, 64, 64),
    "one query": ((2, 3), 1, 9, 32, 32),
    "one key": ((2, 3), 5, 1, 8, 8),
    "odd": ((2, 3), 13, 21, 5, 11),
    "no heads": ((3,), 7, 65, 17, 64),
    "wide": ((1, 2), 9, 70, 80, 96),
    "deep": ((2, 1, 3), 4, 6, 8, 8),
    "empty batch": ((0, 3), 4, 6, 8, 8),
    "no width": ((2,), 3, 5, 0, 0),
    "keys in parts": ((2,), 70, 1100, 64, 64),
    "parts and queries in blocks": ((1, 2), 130, 700, 80, 40),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("scale", ["-", "0.3"])
def test_attention(shape: tuple[tuple[int, ...], int, int, int, int], causal: bool, scale: str) -> None:
    batch, queries, keys, width, values = shape
    if causal and queries > keys:
        pytest.skip("torch's own functions disagree on queries that see nothing new")
    inputs = [reals(*batch, queries, width), reals(*batch, keys, width, seed=1), reals(*batch, keys, values, seed=2)]
    check(text(f"%9 = attention q=%0 k=%1 v=%2 scale={scale} causal={causal}", inputs=3), inputs)


@pytest.mark.parametrize("shape", [(9, 21), (1, 21), (2, 1, 1, 21), (2, 3, 9, 21), (3, 9, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("scale", ["-", "0.3"])
def test_masks_are_added_to_the_scaled_scores(shape: tuple[int, ...], scale: str) -> None:
    inputs = [reals(2, 3, 9, 16), reals(2, 3, 21, 16, seed=1), reals(2, 3, 21, 5, seed=2), reals(*shape, seed=3) * 4]
    line = f"%9 = attention q=%0 k=%1 v=%2 scale={scale} causal=False mask=%3"
    check(text(line, inputs=4), inputs)
    check(text("%7 = permute x=%3 dims=1,0", line.replace("%3", "%7"), inputs=4), [*inputs[:3], reals(21, 9)])


def test_what_a_mask_forbids_has_no_weight() -> None:
    mask = torch.zeros(7, 10)
    mask[:, 6:] = -math.inf
    mask[4] = -math.inf
    inputs = [reals(1, 7, 8), reals(1, 10, 8, seed=1), reals(1, 10, 4, seed=2)]
    line = "%9 = attention q=%0 k=%1 v=%2 scale=- causal=False mask=%3"
    got = check(text(line, inputs=4), [*inputs, mask])
    assert torch.equal(got[0, 4], torch.zeros(4))
    inputs[2][0, 6:] = 1e30
    assert torch.equal(run(text(line, inputs=4), [*inputs, mask])[0], got)


@pytest.mark.parametrize("keys", [3, 40])
@pytest.mark.parametrize("place", [0, 2])
def test_a_nan_beside_forbidden_keys_is_seen(keys: int, place: int) -> None:
    inputs = [reals(1, 2, 8), reals(1, keys, 8, seed=1), reals(1, keys, 8, seed=2)]
    mask = torch.full((2, keys), -math.inf)
    mask[0, place] = 0.0
    inputs[1][0, place] = math.nan
    line = "%9 = attention q=%0 k=%1 v=%2 scale=- causal=False mask=%3"
    assert run(text(line, inputs=4), [*inputs, mask])[0][0, 0].isnan().all()


@pytest.mark.parametrize("shape", [(70, 1100), (1, 1100), (70, 1)], ids=str)
def test_masks_of_keys_in_parts(shape: tuple[int, int]) -> None:
    inputs = [reals(70, 64), reals(1100, 64, seed=1), reals(1100, 8, seed=2), reals(*shape, seed=3) * 4]
    line = "%9 = attention q=%0 k=%1 v=%2 scale=- causal=False mask=%3"
    check(text(line, inputs=4), [one[None] for one in inputs[:3]] + inputs[3:])


def test_attention_of_heads_that_lie_side_by_side() -> None:
    lines = [f"%{3 + i} = reshape x=%{i} shape=%{i}.0,%{i}.1,4,16" for i in range(3)]
    lines += [f"%{i} = transpose x=%{i - 3} dim0=1 dim1=2" for i in (6, 7, 8)]
    lines += ["%10 = attention q=%6 k=%7 v=%8 scale=- causal=False", "%11 = transpose x=%10 dim0=1 dim1=2"]
    lines += ["%9 = flatten x=%11 start=2 end=-1"]
    check(text(*lines, inputs=3), [reals(2, 33, 64, seed=seed) for seed in range(3)])


def test_large_scores_do_not_overflow() -> None:
    q, k = reals(1, 6, 8) * 1e4, reals(1, 20, 8, seed=1) * 1e4
    got = check(text("%9 = attention q=%0 k=%1 v=%2 scale=1.0 causal=False", inputs=3), [q, k, reals(1, 20, 4, seed=2)])
    assert bool(got.isfinite().all())


def test_a_query_with_nan_is_nan_and_no_other() -> None:
    q = reals(1, 10, 8)
    q[0, 4, 2] = math.nan
    (got,) = run(
        text("%9 = attention q=%0 k=%1 v=%2 scale=- causal=False", inputs=3), [q, reals(1, 5, 8), reals(1, 5, 4)]
    )
    assert got.isnan().all(dim=2)[0].tolist() == [place == 4 for place in range(10)]


@needs_kernels
@pytest.mark.parametrize("others_read", ["nothing else", "the sum", "the norm", "both"])
@pytest.mark.parametrize("shape", [(2, 37, 96), (5, 40), (1, 2, 3, 50)], ids=str)
def test_a_sum_its_norm_and_its_rounding_are_one_pass_with_the_same_bits(
    shape: tuple[int, ...], others_read: str
) -> None:
    inputs, constants = [reals(*shape), reals(*shape, seed=1)], [reals(shape[-1], seed=2), reals(shape[-1], seed=3)]
    add, norm = "%2 = add_f32 a=%0 b=%1", "%3 = layer_norm x=%2 weight=$0 bias=$1 eps=1e-05"
    rounding = "%4 = quantize x=%3 scale=0.02 zero_point=120"
    outputs = {"nothing else": "%4", "the sum": "%4 %2", "the norm": "%4 %3", "both": "%4 %2 %3"}[others_read]
    got = run(text(add, norm, rounding, inputs=2, outputs=outputs), inputs, constants)
    (added,) = run(text(add, inputs=2, outputs="%2"), inputs)
    (normed,) = run(text(norm.replace("%2", "%0"), inputs=1, outputs="%3"), [added], constants)
    (rounded,) = run(text(rounding.replace("%3", "%0"), inputs=1, outputs="%4"), [normed])
    known = {"%2": added, "%3": normed, "%4": rounded}
    for name, value in zip(outputs.split(), got, strict=True):
        assert torch.equal(value, known[name])


@needs_kernels
@pytest.mark.parametrize(
    ("line", "shapes", "message"),
    [
        ("attention q=%0 k=%1 v=%1 scale=- causal=False", [(2, 3, 4), (2, 3, 5)], "do not go together"),
        ("attention q=%0 k=%1 v=%1 scale=- causal=False", [(2, 3, 4), (3, 3, 4)], "batches that do not go"),
        ("attention q=%0 k=%1 v=%1 scale=- causal=False", [(3, 4), (3, 4)], "less than three"),
        ("attention q=%0 k=%0 v=%0 scale=- causal=False mask=%1", [(2, 3, 4), (4, 3)], "mask does not fit"),
        ("attention q=%0 k=%0 v=%0 scale=- causal=False mask=%1", [(2, 3, 4), (1, 1, 3, 3)], "mask has more"),
        ("add_f32 a=%0 b=%1", [(2, 3), (2, 4)], "do not go together"),
    ],
)
def test_what_does_not_fit_is_an_error(line: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(text(f"%9 = {line}", inputs=2), [reals(*shape) for shape in shapes])


@pytest.mark.parametrize("by", ["add", "sub", "sub_from", "mul", "div"])
@pytest.mark.parametrize("number", ["0.3", "-7", "1e-40", "3.0000000001"])
def test_arithmetic_with_a_number_has_torchs_bits(by: str, number: str) -> None:
    x = reals(2, 5, 7).transpose(0, 1)
    program = text(f"%9 = number_f32 x=%0 by={by} number={number}", inputs=1)
    assert torch.equal(*run(program, [x]), *reference_plan.run_plan([x], [], program))


@pytest.mark.parametrize("by", ["sub", "mul", "div"])
@pytest.mark.parametrize(("left", "right"), [((2, 5, 7), (2, 5, 7)), ((2, 5, 7), (5, 1)), ((1,), (3, 4))], ids=str)
def test_arithmetic_of_two_has_torchs_bits(by: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    values = [reals(*left), reals(*right, seed=1)]
    program = text(f"%9 = binary_f32 a=%0 b=%1 by={by}", inputs=2)
    assert torch.equal(*run(program, values), *reference_plan.run_plan(values, [], program))


@pytest.mark.parametrize("n", [1, 7, 16, 65, 300])
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax(n: int, logarithm: bool) -> None:
    x = reals(3, 40, n) * 20
    check(text(f"%9 = softmax x=%0 logarithm={logarithm}", inputs=1), [x])


def test_softmax_of_rows_that_are_not_finite_is_torchs() -> None:
    x = reals(6, 33)
    x[0, 3], x[1, 3], x[2], x[3, 3] = math.nan, math.inf, -math.inf, -math.inf
    x[4, :16] = math.nan
    for logarithm in (False, True):
        got = check(text(f"%9 = softmax x=%0 logarithm={logarithm}", inputs=1), [x])
        assert got.isnan().all(dim=1).tolist() == [True, True, True, False, True, False]


def test_a_rounded_softmax_is_rounded_as_by_itself() -> None:
    x = reals(2, 3, 20, 40) * 3
    rounding = "%9 = quantize x=%1 scale=0.00392156862745098 zero_point=0"
    whole = text("%1 = softmax x=%0 logarithm=False", rounding, inputs=1, outputs="%1 %9")
    softmax, rounded = run(whole, [x])
    assert torch.equal(softmax, *run(text("%9 = softmax x=%0 logarithm=False", inputs=1), [x]))
    assert torch.equal(rounded, *run(text(rounding.replace("%1", "%0"), inputs=1), [softmax]))


def test_constants_are_joined_and_added() -> None:
    token, places = reals(1, 1, 6, seed=1), reals(1, 5, 6, seed=2)
    x = reals(3, 4, 6)
    program = text("%1 = constant value=$0", "%2 = expand x=%1 shape=%0.0,-1,-1", "%3 = cat_f32 tensors=%2,%0 dim=1",
                   "%4 = constant value=$1", "%9 = add_f32 a=%3 b=%4", inputs=1, outputs="%9 %4")  # fmt: skip
    got, constant = run(program, [x], [token, places])
    assert torch.equal(got, torch.cat([token.expand(3, -1, -1), x], 1) + places)
    assert torch.equal(constant, places)
    assert constant.data_ptr() != places.data_ptr()


def test_norms_of_values_near_one_another_are_precise() -> None:
    """Of two values 0.01 apart near 2 float32 keeps their difference; squares of them would lose it."""
    x = torch.tensor([1.911828279, 1.900890231]).reshape(1, 1, 1, 2)
    half = (x[0, 0, 0, 0].double() - x[0, 0, 0, 1].double()) / 2
    expected = half / (half**2 + 1e-5).sqrt()
    for line in ("instance_norm x=%0 weight=- bias=- eps=1e-05", "group_norm x=%0 groups=1 weight=- bias=- eps=1e-05"):
        program = text(f"%9 = {line}", inputs=1)
        for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
            (found,) = call([x], [], program)
            assert found[0, 0, 0, 0].item() == pytest.approx(expected.item(), rel=1e-4)

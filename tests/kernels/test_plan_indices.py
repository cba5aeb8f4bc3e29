"""Parts that indices choose in plans: taken and added to, to the bit as torch does on one thread."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from quant.kernels import reference_plan
from torch import Tensor

from .test_plan_reals import reals, run, text

GENERATOR = torch.Generator().manual_seed(0)


def places(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape, generator=GENERATOR)


def check(program: str, inputs: Sequence[Tensor], expected: Tensor) -> None:
    (got,) = run(program, inputs)
    (reference,) = reference_plan.run_plan(inputs, [], program)
    assert got.shape == reference.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert torch.equal(reference, expected)


def of_two(x: Tensor) -> list[Tensor]:
    """x, and views of the same values in other orders."""
    return [x, x.t().contiguous().t(), torch.stack((x, x), 2)[..., 0]]


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 70), (), (0,), (2, 0, 3)], ids=str)
def test_parts_are_taken(shape: tuple[int, ...], negative: bool) -> None:
    index = places(7, *shape) - (7 if negative else 0)
    program = f"%9 = index_select x=%0 dim={{}} index=%1 negative={negative}"
    for dim, x in enumerate((reals(7, 33), reals(5, 7), reals(2, 3, 7))):
        for one in of_two(x) if x.dim() == 2 else [x]:
            whole = (slice(None),) * dim
            check(text(program.format(dim), inputs=2), [one, index], x[(*whole, index)])
            check(text(program.format(dim - x.dim()), inputs=2), [one, index], x[(*whole, index)])
    bytes_of = places(256, 4, 7, 3).to(torch.uint8)
    check(text(program.format(1), inputs=2), [bytes_of, index], bytes_of[:, index])


def test_one_index_takes_one_value_of_a_vector() -> None:
    x = reals(4)
    check(text("%9 = index_select x=%0 dim=0 index=%1 negative=False", inputs=2), [x, torch.tensor(2)], x[2])


def test_indices_are_moved_and_taken_themselves() -> None:
    edges, order, x = places(9, 2, 30), places(30, 11), reals(9, 4)
    lines = ("%2 = select x=%1 dim=0 index=1", "%3 = index_select x=%2 dim=0 index=%4 negative=False",
             "%9 = index_select x=%0 dim=0 index=%3 negative=False")  # fmt: skip
    program = text(*lines, inputs=2).replace("inputs %0 %1", "inputs %0 %1 %4")
    check(program, [x, edges, order], x[edges[1][order]])


@pytest.mark.parametrize("count", [0, 1, 9, 3000])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_added(count: int, dim: int) -> None:
    program = text(f"%9 = index_add x=%0 dim={dim} index=%1 source=%2", inputs=3)
    for shape in ((6, 5, 3), (6, 40), (40, 6)):
        x, index = reals(*shape), places(shape[dim], count)
        sizes = list(shape)
        sizes[dim] = count
        source = reals(*sizes, seed=1)
        check(program, [x, index, source], x.index_add(dim, index, source))
        turned = source.transpose(0, -1).contiguous().transpose(0, -1)
        check(program, [x, index, turned], x.index_add(dim, index, source))
    x, index, source = reals(6), places(6, count), reals(count, seed=1)
    check(text("%9 = index_add x=%0 dim=0 index=%1 source=%2", inputs=3), [x, index, source],
          x.index_add(0, index, source))  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 9, 700])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values_are_added(count: int, dim: int) -> None:
    program = text(f"%9 = scatter_add x=%0 dim={dim} index=%1 source=%2", inputs=3)
    for shape in ((6, 5, 3), (6, 40), (40, 6)):
        x, sizes = reals(*shape), list(shape)
        sizes[dim] = count
        index, source = places(shape[dim], *sizes), reals(*[one + 2 for one in sizes], seed=1)
        check(program, [x, index, source], x.scatter_add(dim, index, source))
        fewer = index.narrow(0, 0, min(index.shape[0], 3))
        check(program, [x, fewer, source], x.scatter_add(dim, fewer, source))
        check(program, [x[:0].expand_as(x[:0]), index[:0], source], x[:0])


@pytest.mark.parametrize("width", [1, 7, 64])
def test_one_index_for_each_row(width: int) -> None:
    x, index, source = reals(20, width), places(20, 500), reals(500, width, seed=1)
    lines = ("%3 = unsqueeze x=%1 dim=1", "%4 = expand x=%3 shape=%2.0,%2.1",
             "%9 = scatter_add x=%0 dim=0 index=%4 source=%2")  # fmt: skip
    check(text(*lines, inputs=3), [x, index, source], x.index_add(0, index, source))
    columns = text("%3 = expand x=%1 shape=%2.0,%2.1", "%9 = scatter_add x=%0 dim=1 index=%3 source=%2", inputs=3)
    index = places(20, 500)
    check(columns, [x.t(), index, source.t()], x.index_add(0, index, source).t())


def test_sums_are_those_of_one_thread() -> None:
    x, index, source = torch.zeros(50, 64), places(50, 20_000), reals(20_000, 64)
    program = text("%9 = index_add x=%0 dim=0 index=%1 source=%2", inputs=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(program, [x, index, source], x.index_add(0, index, source))
    finally:
        torch.set_num_threads(before)


OUTSIDE = {
    "taken": ("index_select x=%0 dim=0 index=%1 negative=False", (-1, 4)),
    "taken from either end": ("index_select x=%0 dim=0 index=%1 negative=True", (-5, 4)),
    "added to": ("index_add x=%0 dim=0 index=%1 source=%2", (-1, 4)),
    "added to by value": ("scatter_add x=%3 dim=0 index=%1 source=%4", (-1, 4)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_of_no_part_names_the_line(name: str) -> None:
    operation, wrong = OUTSIDE[name]
    for index in wrong:
        inputs = [reals(4, 3), torch.tensor([3, index]), reals(2, 3), reals(4), reals(2)]
        program = text(f"%9 = {operation}", inputs=5)
        for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
            with pytest.raises(IndexError, match=rf"plan line '%9 = .*': index {index} is outside a dimension of 4"):
                call(inputs, [], program)


@pytest.mark.parametrize(("shape", "dim"), [((3, 0), 0), ((0, 3), 1), ((2, 3, 0), 1)])
def test_an_index_by_which_nothing_is_added_is_refused_too(shape: tuple[int, ...], dim: int) -> None:
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    program = text(f"%9 = index_add x=%0 dim={dim} index=%1 source=%2", inputs=3)
    check(program, [reals(*shape), torch.tensor([2]), reals(*one)], torch.zeros(shape))
    for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(IndexError, match="index 3 is outside a dimension of 3"):
            call([reals(*shape), torch.tensor([3]), reals(*one)], [], program)


def test_no_part_of_nothing_is_added_to() -> None:
    inputs = [reals(0, 3), torch.tensor([0]), reals(1, 3)]
    program = text("%9 = index_add x=%0 dim=0 index=%1 source=%2", inputs=3)
    for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(IndexError, match="outside a dimension of 0"):
            call(inputs, [], program)


REFUSED = {
    "indices of floats": ("index_select x=%0 dim=0 index=%0 negative=True", "int64"),
    "bytes that are added to": ("index_add x=%3 dim=0 index=%1 source=%2", "uint8|float32"),
    "a dimension that is not there": ("index_select x=%0 dim=2 index=%1 negative=True", "dimension 2"),
    "fewer indices than parts": ("index_add x=%0 dim=0 index=%1 source=%0", "than its indices name"),
    "indices in two dimensions": ("index_add x=%0 dim=0 index=%4 source=%2", "than its indices name"),
    "parts of another size": ("index_add x=%0 dim=0 index=%1 source=%5", "another size"),
    "indices in one dimension": ("scatter_add x=%0 dim=0 index=%1 source=%2", "differ in dimensions"),
    "more indices than values": ("scatter_add x=%0 dim=0 index=%6 source=%2", "more values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_both(name: str) -> None:
    operation, words = REFUSED[name]
    index, two = torch.tensor([3, 0]), torch.zeros(2, 2, dtype=torch.int64)
    inputs = [reals(4, 3), index, reals(2, 3), torch.zeros(4, 3, dtype=torch.uint8), two, reals(2, 2),
              torch.zeros(3, 3, dtype=torch.int64)]  # fmt: skip
    for call in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(ValueError, match=words):
            call(inputs, [], text(f"%9 = {operation}", inputs=7))

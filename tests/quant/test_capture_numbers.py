"""Numbers that a caller gives, and counts that follow from sizes unseen: free where calls compute with them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.capture import capture, proof
from quant.capture.variations import MOST_GROWTH
from quant.graph import Kind, evaluate, expected_call
from quant.runtime.binding import bound_values
from quant.runtime.matching import CaptureMismatch
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.static.runner import finished, output_of


class Net(nn.Module):
    """Two layers and a function between them."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.table = nn.Linear(16, 16), nn.Linear(16, 16), nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor, n: Any = 0, **more: Any) -> Tensor:
        return self.last(self.between(self, self.first(x), n, **more))


def runs(model: nn.Module, example: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the graph of the example stands for another call; what it then gives is right to the bit."""
    found = capture(model, example)
    assert found.islands == {}
    graph = found.graphs[""]
    try:
        values = bound_values(expected_call(graph), model, args, kwargs)
        for node in graph.nodes:
            if node.kind is not Kind.INPUT:
                values[node.index] = evaluate(node, model, values.__getitem__)
    except CaptureMismatch:
        return False
    assert torch.equal(finished(output_of(graph, values), model, args, kwargs), model(*args, **kwargs))
    return True


X = torch.randn(2, 128, 16, generator=torch.Generator().manual_seed(0))


def times(net: Any, y: Tensor, count: int) -> Tensor:
    for _ in range(count):
        y = net.blocks[0](y).relu()
    return y


# ------------------------------------------------------------------------------------------------ given numbers


@pytest.mark.parametrize(
    ("between", "example", "other"),
    [
        (lambda net, y, n: y * n, 3, 7),
        (lambda net, y, n: y * n, 0.5, 7.5),
        (lambda net, y, n: y[:, n:], 37, 38),
        (lambda net, y, n: y[:, -n], 1, 5),
        (lambda net, y, n: y + torch.arange(n, n + y.shape[1]).unsqueeze(-1), 37, 1000),
        (lambda net, y, n: y + torch.tensor([n], dtype=torch.float32).cos(), 981, 3),
        (lambda net, y, n: y + torch.full((y.shape[0], 1, 1), n).sin(), 981, 3),
        (lambda net, y, n: y + net.table(torch.tensor(n)), 9, 0),
        (lambda net, y, n: y * (n // 2 + 1), 7, 8),
        (lambda net, y, n: y + n[0] * n[1], (3, 4.0), (5, 6.0)),
        (lambda net, y, n: y + n["step"], {"step": 3}, {"step": 4}),
        (lambda net, y, n: y * (2 if n > 10 else n), 3, 7),
    ],
    ids=["int", "float", "slice", "index", "positions", "timestep", "full", "embedding at its end", "half", "pair",
         "dict", "compared alike"],
)  # fmt: skip
def test_a_given_number_is_free_where_calls_compute_with_it(between: Any, example: Any, other: Any) -> None:
    assert runs(Net(between), (X, example), X, other)


@pytest.mark.parametrize(
    ("between", "example", "other"),
    [
        (lambda net, y, n: times(net, y, n), 2, 3),
        (lambda net, y, n: times(net, y, n // 4), 8, 12),
        (lambda net, y, n: times(net, y, n // 4) / (n // 4), 8, 12),
        (lambda net, y, n: net.blocks[n](y), 2, 1),
        (lambda net, y, n: y * (2 if n > 10 else n), 3, 11),
        (lambda net, y, n: y * 2 if n else y, 0, 1),
        (lambda net, y, n: y * {3: 0.5, 4: 2.0}.get(n, 1.0), 3, 4),
        (lambda net, y, n: y * math.sin(n), 3.0, 4.0),
        (lambda net, y, n: y * [0.5, 1.0, 2.0][n], 0, 2),
        (lambda net, y, n: y * 2 if n is True else y, True, 1),
        (lambda net, y, n: y.view(2, n, -1).softmax(1).view_as(y), 4, 8),
    ],
    ids=["range", "range of a quotient", "range of a quotient that is read too", "choice of a layer", "comparison",
         "truth", "key", "math", "list", "bool", "shape that refuses the next"],
)  # fmt: skip
def test_a_given_number_is_held_where_it_decides(between: Any, example: Any, other: Any) -> None:
    runs(Net(between), (X, example), X, other)  # what is not held is right to the bit
    assert runs(Net(between), (X, example), X, example)


def test_a_default_is_a_constant_and_another_number_is_another_program() -> None:
    net = Net(lambda net, y, n: y * (1 + n / 100))
    assert not runs(net, X, X, 1)
    prepared = quant.prepare(net, X[:, :8])
    for n in range(1, 30):
        prepared(X[:, :8], n)
        prepared(X[:, :8])
    q = quant.convert(prepared)
    runner = q._modules[RESERVED]
    assert isinstance(runner, ProgramRunner)
    assert len(runner.others) == 1, "one for all numbers"
    with torch.no_grad():
        for n in (0, 3, 19):
            expected = net(X[:, :8], n)
            assert (q(X[:, :8], n) - expected).norm() < 0.05 * expected.norm()


# ------------------------------------------------------------------------------------------------ counts by sizes


@pytest.mark.parametrize(
    ("count", "other"),
    [
        (lambda y: y.shape[1], 127),
        (lambda y: y.shape[1] // 64, 64),
        (lambda y: y.shape[1] // 100, 200),
        (lambda y: (y.shape[1] + 71) // 200, 129),
        (lambda y: y.shape[1] % 16, 129),
        (lambda y: 2 * (y.shape[1] // 64) - 1, 192),
        (lambda y: divmod(y.shape[1], 64)[0], 64),
        (lambda y: math.ceil(y.shape[1] / 100), 90),
        (lambda y: round(y.shape[1] / 100), 220),
        (lambda y: y.shape[1] // 1000, 1000),
    ],
    ids=["size", "64", "100", "offset", "remainder", "twice", "divmod", "ceil", "round", "none"],
)
@pytest.mark.parametrize("read", [False, True], ids=["alone", "and read by a call"])
def test_a_loop_counts_as_it_did(count: Any, other: int, read: bool) -> None:
    def between(net: Any, y: Tensor, n: int) -> Tensor:
        many = count(y)
        return times(net, y, many) / (many + 1 if read else 1)

    net = Net(between)
    runs(net, X, torch.randn(2, other, 16))  # a wrong count is seen in there
    assert runs(net, X, X)


def calls_of_proofs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the calls with other sizes that proofs record."""
    calls: list[Any] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        calls.append(varied(*arguments, **options))
        return calls[-1]

    varied = proof.varied
    monkeypatch.setattr(proof, "varied", watched)
    return calls


def test_a_shorter_mask_has_padding_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a forward that looks for padding branches otherwise, and the recording shows nothing."""
    calls = calls_of_proofs(monkeypatch)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.layer(x) / x.shape[1]
            return y if mask.all() else y * mask.unsqueeze(2)

    for dtype in (torch.bool, torch.int64):
        mask = (torch.arange(24) < torch.tensor([[24], [20], [24], [21]])).to(dtype)
        assert runs(
            Masked(), (torch.randn(4, 24, 16), mask), torch.randn(3, 30, 16), torch.arange(90).view(3, 30) % 7 > 0
        )
    shorter = [args[1] for args, _ in calls if args[1].shape[1] < 24]
    assert shorter
    assert not any(mask.all() for mask in shorter)


def test_sizes_that_grow_by_much_are_varied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, a video's batch, length, height and width would be hundreds of times as large."""
    calls = calls_of_proofs(monkeypatch)

    def between(net: Any, y: Tensor, n: int) -> Tensor:
        for i in range(y.shape[1]):
            y = y + i // 8
        return y * y.shape[2] * (y.shape[3] // 5)

    net, x = Net(between), torch.randn(2, 8, 24, 40, 16)
    assert not runs(net, x, torch.randn(2, 9, 24, 40, 16))
    assert runs(net, x, torch.randn(3, 8, 25, 47, 16))
    shapes = [args[0].shape for args, _ in calls]
    assert max(shape.numel() for shape in shapes) <= MOST_GROWTH * x.numel()
    assert all(any(shape[dim] > 2 * x.shape[dim] for shape in shapes) for dim in (0, 2, 3))


@pytest.mark.parametrize(
    "between",
    [
        lambda net, y, n: torch.nn.functional.pad(y, (0, 0, 0, (-y.shape[1]) % 8)),
        lambda net, y, n: y[:, : y.shape[1] // 3],
        lambda net, y, n: y * (y.shape[1] // 100),
        lambda net, y, n: y.view(y.shape[0], y.shape[1] // 2, 2, 16).flatten(1, 2),
    ],
    ids=["pad", "slice", "factor", "view"],
)
def test_what_only_calls_read_stays_free(between: Any) -> None:
    net = Net(between)
    assert all(runs(net, X, torch.randn(2, size, 16)) for size in (126, 6, 300, 130))


def checked(net: Any, y: Tensor, n: int) -> Tensor:
    if y.dim() != 3:
        raise ValueError("expected 3 dimensions, got a batch of %d" % y.shape[0])  # noqa: UP031
    return y.view(y.shape[0], y.shape[1] // 1, 16)


def test_an_error_that_is_not_raised_holds_no_size() -> None:
    net = Net(checked)
    assert all(runs(net, X, torch.randn(2, size, 16)) for size in (126, 6))


@pytest.mark.parametrize("longest", [128, 140])
def test_a_size_at_its_upper_bound_is_tried_smaller(longest: int) -> None:
    def between(net: Any, y: Tensor, n: int) -> Tensor:
        y = y + torch.ones(longest, 16)[torch.arange(y.shape[1])]
        return times(net, y, y.shape[1] // 40)

    net = Net(between)
    runs(net, X, X[:, :40])
    assert runs(net, X, X)


def test_numbers_that_change_with_each_call_use_up_no_programs() -> None:
    net = Net(lambda net, y, n, scale=1.0: y * scale + torch.tensor([n]).sin())
    batches = [{"x": torch.randn(4, 16), "n": n, "scale": 1.0 + n / 10} for n in range(1, 30)]
    q = quant.quantize_static(net, batches, progress=False)
    runner = q._modules[RESERVED]
    assert isinstance(runner, ProgramRunner)
    assert len(runner.others) == 0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches[::7]:
            assert (q(**batch) - net(**batch)).norm() < 0.05 * net(**batch).norm()


def test_training_takes_numbers_that_change() -> None:
    net = Net(lambda net, y, n: y * (n + 1))
    p = quant.prepare_qat(net, (torch.randn(4, 16), 3))
    schedule = quant.QATSchedule(p, steps=12)
    p.train()
    for n in range(12):
        p(torch.randn(4, 16), n).square().mean().backward()
        schedule.step()
    q, x = quant.convert(p), torch.randn(4, 16)
    with torch.no_grad():
        for n in (1, 5):
            assert (q(x, n) - p.eval()(x, n)).norm() < 0.01 * p(x, n).norm()


# ---------------------------------------------------------------------------------------------- counts by values


def routed(net: Any, y: Tensor, count: Any) -> Tensor:
    """As mixtures of experts count the tokens of each expert: of as many numbers as there are experts."""
    rows = y.flatten(0, 1)
    ends = torch.histc(rows.argmax(dim=1).float(), bins=16, min=0, max=15).cumsum(0)
    one, two = (rows * ends).chunk(2, dim=1)
    return torch.cat([one, two.tanh()], dim=1).view_as(y)


def repeated(net: Any, y: Tensor, count: Any) -> Tensor:
    """As the keys of grouped heads are repeated; the branch asks for a size."""
    twice = torch.repeat_interleave(y, 2, dim=1)
    return twice[:, ::2] if twice.shape[1] > 1 else y


def classified(net: Any, y: Tensor, count: Any) -> Tensor:
    hot = torch.nn.functional.one_hot(y.argmax(dim=-1), num_classes=16).float()
    return y * sum(hot.split(4, dim=2)).repeat(1, 1, 4)


def counted(net: Any, y: Tensor, count: Any) -> Tensor:
    """Here values decide about a size, of the number of repeats too."""
    rows = y.flatten(0, 1)
    kept = rows[rows[:, 0] > 0]
    times = torch.repeat_interleave(y, kept.shape[0] + 1, dim=1)
    return y + 1 if times.shape[1] > 100 else y


@pytest.mark.parametrize("between", [routed, repeated, classified])
def test_a_size_that_a_number_decides_is_no_size_by_values(between: Any) -> None:
    assert runs(Net(between).eval(), X[:, :9], X[:1, 20:40])


def test_a_number_that_values_decide_is_seen_through_repeats() -> None:
    assert capture(Net(counted).eval(), X[:, :9]).islands


def halved_to_eight(net: Any, y: Tensor, _: int) -> Tensor:
    """A loop over a size that no other size decides alike: of 16, 32 is halved twice, and 8 not at all."""
    while y.shape[1] > 8:
        y = y[:, ::2]
    return torch.stack([net.blocks[0](y[:, place]) for place in range(y.shape[1])], 1)


def ninths(net: Any, y: Tensor, _: int) -> Tensor:
    """A size of 1 that is 1 for twice the size too."""
    y = y.transpose(1, 2)
    for width in (3, 3, 2):
        y = torch.nn.functional.max_pool1d(y, width, ceil_mode=True)
    y = y.transpose(1, 2)
    return torch.stack([net.blocks[0](y[:, place]) for place in range(y.shape[1])], 1)


@pytest.mark.parametrize(("between", "size", "other"), [(halved_to_eight, 16, 13), (ninths, 8, 33)])
def test_a_loop_over_a_size_that_few_others_show_is_held(between: Any, size: int, other: int) -> None:
    net = Net(between).eval()
    with torch.no_grad():
        example, longer = X[:, :size], torch.randn(2, other, 16)
        assert runs(net, (example,), example.flip(1))
        assert not runs(net, (example,), longer)
        prepared = quant.prepare(net, (example,))
        assert torch.allclose(prepared(longer), net(longer), atol=1e-5)


class Cached(nn.Module):
    """New words behind those of a cache; a mask for all. Lengths that do not fit together take another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        y = torch.cat([cache, self.first(x)], 1)
        if x.shape[1] == 1:
            y = y * 2.0
        if y.shape[1] > mask.shape[1]:
            mask = torch.nn.functional.pad(mask, (0, y.shape[1] - mask.shape[1]))
        elif y.shape[1] < mask.shape[1]:
            mask = mask[:, -y.shape[1] :]
        result: Tensor = self.last(y * mask[:, :, None])
        return result


def decoder_step(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return X[:, 100:101], X[:, :length], torch.ones(2, length + 1)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7])
def test_the_length_of_a_cache_is_free_beside_its_mask(length: int) -> None:
    """Each decides otherwise by itself, and so does the number of new words, which a cache of one has as well."""
    net, example = Cached().eval(), decoder_step(length)
    for other in (3, 12, 64):
        assert runs(net, example, *decoder_step(other))
    x, cache, mask = decoder_step(9)
    assert not runs(net, example, x, cache, mask[:, 1:])
    assert not runs(net, example, X[:, :2], cache[:, 1:], mask)

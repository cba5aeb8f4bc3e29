"""The steps of calls of range, read from code: constants, attributes of the module, and those that are computed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quant
from quant.capture.range_steps import UNKNOWN, largest_step


class Settings:
    window = 9


class Counts(nn.Module):
    window, settings, places = 7, Settings(), (40,)

    def none(self, x: Tensor) -> Any:
        return range(0, self.window, 50), range(0, 10, 3), x[:, ::5], x.shape[0] % 8, torch.arange(0, x.shape[0], 3)

    def ones(self, x: Tensor) -> Any:
        return range(x.shape[1]), range(1, x.shape[1]), [i for i in range(x.shape[0]) if i % x.shape[1] == 0]

    def slices(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0])[::3]]

    def remainders(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if i % 2 == 0 and i % self.settings.window == 0]

    def numpy(self, x: Tensor) -> Any:
        return [x[int(i)] for i in np.arange(0, x.shape[0], 4, dtype=int)]

    def backwards(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0] - 1, -1, -6)]

    def constant(self, x: Tensor) -> Any:
        return [x[:, i : i + 12] for i in range(0, x.shape[1], 12)]

    def attribute(self, x: Tensor) -> Any:
        n = x.size(1)
        for i in range(n % 3, max(n - 2, 0), self.window):
            x = x + i
        return x

    def deeper(self, x: Tensor) -> Any:
        return sum(x[i] for i in range(0, len(x), self.settings.window))

    def computed(self, x: Tensor) -> Any:
        step = self.window * 2
        return list(range(0, x.shape[0], step))

    def compared(self, x: Tensor) -> Any:
        for i in range(x.shape[0]):
            if i == 40 or x.shape[1] > 70:
                x = x + 1
        return x

    def own(self, x: Tensor) -> Any:
        for i in range(x.shape[0]):
            if i > self.settings.window:
                x = x + 1
        return x

    def named(self, x: Tensor) -> Any:
        every, n = 20, x.shape[0]
        count = 30
        for i in range(n):
            if i % count == every:
                x = x + 1
        return x

    def by_a_local(self, x: Tensor) -> Any:
        every = int("20")
        for i in range(x.shape[0]):
            if i % every == 0:
                x = x + 1
        return x

    def inside(self, x: Tensor) -> Any:
        def parts() -> Any:
            return [x[i] for i in range(0, x.shape[0], 5)]

        return parts()

    def by_helper(self, x: Tensor) -> Any:
        return self.constant(x)

    def up_to_a_local(self, x: Tensor) -> Any:
        last = int("20")
        for i in range(x.shape[0]):
            if i >= last:
                x = x + 1
        return x

    def swapped(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if 40 == i]  # noqa: SIM300

    def local_first(self, x: Tensor) -> Any:
        last = int("20")
        return [x[i] for i in range(x.shape[0]) if last <= i]

    def sums(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if 2 * i + 1 == 41]

    def between(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if 10 < i < 60]

    def among(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if i in (40, 30)]

    def among_own(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if i in self.places]

    def one_before(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if i == self.window - 1]

    def called(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if i == int("20")]

    def quotient(self, x: Tensor) -> Any:
        return [x[i // 20] for i in range(x.shape[0])]

    def shifted(self, x: Tensor) -> Any:
        return [x[i >> 5] for i in range(x.shape[0])]

    def enumerated(self, x: Tensor) -> Any:
        return [x[j] for i, j in enumerate(range(x.shape[0])) if i == 40]

    def zipped(self, x: Tensor) -> Any:
        for i, _ in zip(range(x.shape[0]), range(1000), strict=False):
            if i > 30:
                x = x + 1
        return x

    def one_more(self, x: Tensor) -> Any:
        for i in range(x.shape[0]):
            j = i + 1
            if j == 40:
                x = x + 1
        return x

    def rows(self, x: Tensor) -> Any:
        for i in range(x.shape[0]):
            row, column = i // 8, i % 8
            if row == 3 and column == 0:
                x = x + 1
        return x

    def local_less_one(self, x: Tensor) -> Any:
        far = int("20")
        for i in range(x.shape[0]):
            if i == far - 1:
                x = x + 1
        return x

    def condition(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if max(i - 150, 0)]

    def least(self, x: Tensor) -> Any:
        return [x[i] for i in range(x.shape[0]) if min(i, 150) == 150]

    def all_at_once(self, x: Tensor) -> Any:
        return x * 2 if (np.arange(x.shape[0]) > 70).any() or 50 in range(x.shape[1]) else x

    def kept_numbers(self, x: Tensor) -> Any:
        places = np.arange(x.shape[0])
        return x * 2 if (places > 70).any() else x

    def logarithm(self, x: Tensor) -> Any:
        return x * math.floor(math.log(x.shape[0], 200))

    def from_a_place(self, x: Tensor) -> Any:
        return [x[i] for i in range(60, x.shape[0])]

    def from_own_place(self, x: Tensor) -> Any:
        return [x[i] for i in range(self.settings.window, x.shape[0])]

    def from_a_named_place(self, x: Tensor) -> Any:
        first = 70
        return [x[i] for i in np.arange(x.shape[0])[first:]] + [x[i] for i in range(first, x.shape[0])]

    def less_some(self, x: Tensor) -> Any:
        return [x[i] for i in range(max(len(x) - 60, 0))]

    def less_some_first(self, x: Tensor) -> Any:
        count = len(x) - 60
        return [x[i] for i in range(count)]

    def sliced_places(self, x: Tensor) -> Any:
        places = list(range(x.shape[0]))
        spaced = range(x.shape[0])[60:80:2]
        return places[50:], spaced

    def of_the_most(self, x: Tensor) -> Any:
        return [x[i] for i in range(0, max(len(x), x.shape[1], 3), 5)]

    def no_counts(self, x: Tensor, layers: Any = (), sizes: Any = ()) -> Any:
        for i, layer in enumerate(layers):
            if i == 40 or layer.far(i) or layer == "40":
                x = layer(x)
        whole = [a // b for a, b in zip(sizes, layers, strict=True)]
        for i in range(len(layers)):
            if layers[i].far or whole[i] > 40:
                x = x * math.log(self.window)
        for row in range(x.shape[0]):
            if row is not None and row < x.shape[0] - 1:
                x = x + 1
        return x

    def before_last(self, x: Tensor) -> Any:
        n = x.shape[0]
        return [x[i] for i in range(n) if i < n - 1 and i + 1 < x.shape[0] and n // 50 + 1]


@pytest.mark.parametrize(
    ("forward", "step"),
    [(Counts.none, 0), (Counts.ones, 1), (Counts.slices, 3), (Counts.remainders, 9), (Counts.numpy, 4),
     (Counts.backwards, 6), (Counts.constant, 12), (Counts.attribute, 7), (Counts.deeper, 9),
     (Counts.computed, UNKNOWN), (Counts.inside, 5), (Counts.by_helper, 12), (Counts.compared, 41), (Counts.own, 9),
     (Counts.named, 30), (Counts.by_a_local, UNKNOWN), (Counts.up_to_a_local, UNKNOWN),
     (Counts.swapped, 41), (Counts.local_first, UNKNOWN), (Counts.sums, 45), (Counts.between, 71), (Counts.among, 71),
     (Counts.among_own, UNKNOWN), (Counts.one_before, UNKNOWN), (Counts.called, UNKNOWN), (Counts.quotient, 20),
     (Counts.shifted, 32), (Counts.before_last, 1), (Counts.enumerated, 41), (Counts.zipped, 31), (Counts.one_more, 42),
     (Counts.rows, 32), (Counts.local_less_one, UNKNOWN), (Counts.condition, UNKNOWN), (Counts.least, UNKNOWN),
     (Counts.all_at_once, 71), (Counts.kept_numbers, 71), (Counts.logarithm, UNKNOWN), (Counts.no_counts, 1),
     (Counts.from_a_place, 60), (Counts.from_own_place, 9), (Counts.from_a_named_place, 70), (Counts.less_some, 60),
     (Counts.less_some_first, 60), (Counts.sliced_places, 80), (Counts.of_the_most, 5)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_the_largest_step_by_which_code_counts_to_a_size(forward: Callable[..., Any], step: float) -> None:
    assert largest_step(Counts(), forward) == step


def test_a_forward_of_more_names_than_an_instruction_has_room_for() -> None:
    """Python puts an instruction of its own before those that load any but the first of them."""
    names = "; ".join(f"self.place_{number}" for number in range(300))
    source = (
        f"def forward(self, x):\n    if x is None: {names}\n    return [i for i in range(0, x.size(1), self.window)]"
    )
    defined: dict[str, Any] = {"__name__": __name__}
    exec(source, defined)
    assert largest_step(Counts(), defined["forward"]) == Counts.window


class Far(nn.Module):
    """Computes something where a count, or what follows from it, is larger than any recording's sizes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def enumerated(self, count: int) -> float:
        return math.prod(0.5 for i, _ in enumerate(range(count)) if i == 150)

    def summed(self, count: int) -> float:
        far, scale = int("150"), 1.0
        for i in range(count):
            j = i + 1
            scale = scale * 0.5 if j == far + 1 else scale
        return scale

    def as_condition(self, count: int) -> float:
        return math.prod(0.5 for i in range(count) if max(i - 150, 0))

    def by_numpy(self, count: int) -> float:
        return 0.5 if (np.arange(count) > 150).any() else 1.0

    def of_logarithm(self, count: int) -> float:
        return 1.0 + math.floor(math.log(count, 150))

    def from_a_place(self, count: int) -> float:
        return math.prod(0.5 for _ in range(150, count))

    def less_some(self, count: int) -> float:
        return math.prod(0.5 for _ in range(count - 150))

    def sliced(self, count: int) -> float:
        return math.prod(0.5 for _ in range(count)[150:])

    def forward(self, x: Tensor) -> Tensor:
        kinds = [self.enumerated, self.summed, self.as_condition, self.by_numpy, self.of_logarithm]
        kinds += [self.from_a_place, self.less_some, self.sliced]
        [scale] = [one for one in kinds if one is not None and one.__name__ == self.kind]
        return self.last(self.first(x).sum(1) * scale(x.shape[1]))  # type: ignore[no-any-return]


FAR = ["enumerated", "summed", "as_condition", "by_numpy", "of_logarithm", "from_a_place", "less_some", "sliced"]


@pytest.mark.parametrize("kind", FAR)
def test_what_follows_from_a_count_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for other in set(FAR) - {kind}:
        monkeypatch.setattr(Far, other, None)  # a forward's helpers are all looked at
    model = Far(kind).eval()
    prepared = quant.prepare(model, torch.randn(4, 5, 8))
    for length in (19, 41, 151, 152, 310):
        x = torch.randn(4, length, 8)
        with torch.no_grad():
            torch.testing.assert_close(copy.deepcopy(prepared)(x), model(x))


class Halves(nn.Module):
    """Counts to a length, and computes something at places that are seldom, or further than any recording goes."""

    def __init__(self, *, up_to: bool) -> None:
        super().__init__()
        self.first, self.last, self.up_to = nn.Linear(8, 8), nn.Linear(8, 8), up_to

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sum(1)
        far = int("20") * (7 if self.up_to else 1)
        for i in range(x.shape[1]):
            if i == far if self.up_to else i % far == far - 1:
                y = y * 0.5
        return self.last(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("up_to", [True, False])
def test_what_only_a_longer_loop_computes_is_computed(up_to: bool) -> None:
    torch.manual_seed(0)
    model = Halves(up_to=up_to).eval()
    prepared = quant.prepare(model, torch.randn(4, 5, 8))
    for length in (19, 21, 41, 141, 300):
        x = torch.randn(4, length, 8)
        with torch.no_grad():
            torch.testing.assert_close(copy.deepcopy(prepared)(x), model(x))

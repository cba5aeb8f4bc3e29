"""Loops, recursion and generators that decide how often a layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, rows, signed_rows, steps, uniform


@case("a loop until the change is small")
class UntilConverged(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        for _ in range(50):
            new = 0.5 * torch.cos(y)
            if (new - y).abs().max() < 1e-3:
                break
            y = new
        return self.last(self.first(x) + y)


@case("Newton's method in a while loop")
class Newton(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        target, root = x.abs() + 0.5, torch.ones_like(x)
        while float((root * root - target).abs().max()) > 1e-4:
            root = 0.5 * (root + target / root)
        return self.last(self.first(root).relu())


@case("a layer applied as often as a value says", signed_rows)
class TimesByValue(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(1 + int(x.mean() > 0)):
            y = self.middle(y.relu())
        return self.last(y)


@case("an early exit once all rows are sure", signed_rows)
class EarlyExit(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        if x.mean() > 0:
            return self.exit(y)
        return self.last(y.tanh())


@case("a loop over the steps of a sequence", steps)
class LoopOverLength(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), 32)
        for t in range(x.size(1)):
            state = torch.tanh(self.first(x[:, t]) + 0.5 * state)
        return self.last(state)


@case("a loop over the batch")
class LoopOverBatch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.last(self.first(x[i : i + 1]).relu()) for i in range(x.shape[0])])


@case("enumerate, zip and reversed over tensors", steps)
class Enumerates(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        parts = x.unbind(1)
        mixed = [a + b / (1 + i) for i, (a, b) in enumerate(zip(parts, reversed(parts), strict=True))]
        return self.last(self.first(torch.stack(mixed, 1) / 2).relu())


class Recursive(nn.Module):
    """Halves its input until it is short; at the root it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) == 1:
            return x[:, 0]
        half = x.size(1) // 2
        return torch.tanh(self.merge(torch.cat([self(x[:, :half]), self(x[:, half:])], -1)))


case("the root calls itself on halves", steps)(Recursive)


def tree(batch: int, length: int, index: int) -> Inputs:
    leaf = [uniform(batch, WIDTH) for _ in range(4)]
    return (((leaf[0], leaf[1]), (leaf[2], leaf[3]) if index % 2 else leaf[2]),)


@case("the root calls itself on a tree of tuples", tree)
class TreeNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, node: Any) -> Tensor:
        if isinstance(node, tuple):
            return torch.tanh(self.merge(torch.cat([self(child) for child in node], -1)))
        out: Tensor = node
        return out


@case("a recursive function over layers")
class RecursiveFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def descend(depth: int, y: Tensor) -> Tensor:
            return y if depth == 3 else descend(depth + 1, self.layers[depth](y).relu()) + y

        return descend(0, x)


@case("layers driven by a generator")
class GeneratorDriven(TwoLayers):
    def stages(self, x: Tensor) -> Iterator[Tensor]:
        y = self.first(x)
        yield y
        y = y.relu()
        yield y
        yield self.last(y)

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.stages(x)
        return last


@case("a coroutine that is sent activations")
class Coroutine(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        def running() -> Any:
            total = torch.zeros(())
            while True:
                total = total + (yield total)

        sums = running()
        next(sums)
        sums.send(self.first(x))
        return self.last(sums.send(self.first(x * 0.5)).relu())


@case("match over the shape", rows)
class Matches(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        match tuple(x.shape):
            case (n, 16) if n > 10:
                gain = 2.0
            case _:
                gain = 0.5
        return self.last(self.first(x).relu()) * gain


@case("assertions on values and sizes")
class Asserts(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        assert bool((x <= 1).all()), "inputs end at 1"
        torch._assert(x.shape[1] == WIDTH, "width")
        return self.last(self.first(x).relu())

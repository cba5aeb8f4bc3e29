"""Branches, loops, recursion, exceptions and generators that decide what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, rows, signed_rows, steps, uniform


class NotReady(Exception):
    """Used for control flow."""


@case("a branch on the mean of the input", signed_rows)
class BranchOnMean(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return self.last(self.first(x).tanh())
        return self.last(self.first(x).sin()) * 2


@case("another layer for each sign of the input", signed_rows)
class LayerBySign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if x.mean() > 0 else self.down(x)


@case("torch.equal and allclose decide")
class BranchOnEqual(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if torch.equal(x, x.abs()) or torch.allclose(y, torch.zeros_like(y)):
            return x
        return self.last(y.relu())


@case("any() and all() of a mask decide", signed_rows)
class BranchOnAny(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.stack([x[:, :8].mean(), x[:, 8:].mean()]) > 0
        return self.last(self.first(x).tanh()) if mask.all() else self.last(self.first(-x).sin())


@case("a branch on the batch size")
class BranchOnBatch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if len(x) > 8 else y.tanh())


@case("a branch on the length", steps)
class BranchOnLength(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            x = x[:, :8]
        return self.last(self.first(x).relu())


@case("a branch on the dtype", lambda b, n, i: (uniform(b, WIDTH) if i % 2 else torch.randint(-1, 2, (b, WIDTH)),))
class BranchOnDtype(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = x.float() / 2
        return self.last(self.first(x).relu())


@case("a branch on the number of dimensions", lambda b, n, i: (uniform(*((b, WIDTH) if i % 2 else (2, b, WIDTH))),))
class BranchOnDim(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            x = x.mean(0)
        return self.last(self.first(x).relu())


@case("a branch on the device and on requires_grad")
class BranchOnDevice(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.is_cuda or x.requires_grad or y.device.type != "cpu":
            return x
        return self.last(y.relu())


@case("a branch on whether gradients are on")
class BranchOnGrad(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if torch.is_grad_enabled() else y.relu() * 2)


@case("a branch on self.training")
class BranchOnTraining(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        y = self.first(x).relu()
        return (self.last(y), y.mean()) if self.training else self.last(y) * 2


@case("a branch on a child's training flag, set in the forward")
class SetsTraining(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.eval()
        return self.last(self.drop(self.first(x).relu()))


@case("a branch on isinstance", lambda b, n, i: ([uniform(b, WIDTH)] if i % 2 else uniform(b, WIDTH),))
class BranchOnType(TwoLayers):
    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        if isinstance(x, list):
            x = torch.cat(x) * 0.5
        return self.last(self.first(x).relu())


@case("try and except around a product that fails at first")
class TryExcept(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        try:
            y = y @ self.first.weight.t()[:3]
        except RuntimeError:
            y = y.relu()
        return self.last(y)


@case("an exception of one's own leaves a loop", signed_rows)
class RaisesItself(TwoLayers):
    def check(self, y: Tensor) -> Tensor:
        if y.mean() < 0:
            raise NotReady(y * -1)
        return y

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.check(x)
        except NotReady as error:
            x = error.args[0]
        return self.last(self.first(x).tanh())


@case("an error that the caller gets, for every second input", signed_rows)
class UserError(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise ArithmeticError("five is not taken")
        return self.last(self.first(x).relu())


@case("try with finally and a context")
class Finally(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.last(self.first(x).relu())
        finally:
            x = x * 0


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

"""Branches and exceptions that decide what is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, signed_rows, steps, uniform


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

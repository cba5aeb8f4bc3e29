"""Writes in place: into slices, through views, through .data, with out=, into inputs, into what another name holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, rows, steps, two_rows, uniform


@case("a slice is assigned")
class SliceAssigned(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, :8] = y[:, 8:16] * 2
        return self.last(y.relu())


@case("a boolean mask is assigned")
class MaskAssigned(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[y < 0] = 0.25
        return self.last(self.first(y).relu())


@case("a slice is added to in place")
class SliceAdded(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, ::2] += 1.0
        y[:, 1::2] *= 0.5
        return self.last(y.relu())


@case("a write through a view is seen in the whole")
class ThroughView(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.view(-1, 4, 8)[:, 1].mul_(3.0)
        return self.last(y.relu())


@case("a write into the whole is seen in an older view")
class SeenInView(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        part = y[:, :16]
        y.mul_(2.0)
        return self.last(torch.cat([part, part.flip(1)], 1).relu())


@case("a write through a transposed view")
class ThroughTransposed(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.t()[0].fill_(1.0)
        y.t()[3:5].zero_()
        return self.last(y.relu())


@case("a write through chunks")
class ThroughChunks(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).clone()
        for i, part in enumerate(y.detach().chunk(4, 1)):
            part.mul_(i + 1)
        return self.last(y.tanh())


@case("a write through .data")
class ThroughData(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.data.clamp_(min=0)
        return self.last(y)


@case("a write through detach")
class ThroughDetach(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.detach().abs_()
        return self.last(y)


@case("the .data of an activation is replaced")
class DataReplaced(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.data = y.data.flip(1)
        return self.last(y.relu())


@case("results are written into out=")
class IntoOut(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), WIDTH)
        torch.mul(x, 0.5, out=out)
        torch.add(out, x.flip(1), out=out)
        return self.last(self.first(out).relu())


@case("an input is written in place, and the caller sees it")
class InputWritten(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.last(self.first(x).relu())


@case("a slice of an input is zeroed, and the caller sees it", steps)
class InputSliceWritten(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x[:, -1] = 0
        return self.last(self.first(x).relu())


@case("an input is written after it was used")
class InputWrittenLater(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x.zero_()
        return self.last(y.relu()) + x


def same_twice(batch: int, length: int, index: int) -> Inputs:
    x = uniform(batch, WIDTH)
    return x, x


@case("one tensor is both arguments and one of them is written", same_twice)
class AliasedInputs(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.last(self.first(y).relu())


def with_view(batch: int, length: int, index: int) -> Inputs:
    x = uniform(batch, WIDTH)
    return x, x[:, :8]


@case("the second argument is a view of the first, which is written", with_view)
class ViewOfInput(TwoLayers):
    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        x.add_(0.5)
        return self.last(self.first(torch.cat([part, part], 1)).relu())


@case("an argument is filled as a result", lambda b, n, i: (uniform(b, WIDTH), torch.zeros(b, WIDTH)))
class OutArgument(TwoLayers):
    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        out[:] = self.last(self.first(x).relu()).detach()
        return out


@case("index_add_, index_copy_ and index_fill_")
class IndexAdd(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(len(x), WIDTH)
        y.index_add_(1, torch.tensor([0, 2, 2, 5]), x[:, :4])
        y.index_copy_(1, torch.tensor([1, 3]), x[:, 4:6])
        y.index_fill_(1, torch.tensor([7]), 0.5)
        return self.last(self.first(y).relu())


@case("scatter_ and scatter_add_")
class Scatter(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(WIDTH).flip(0).expand(len(x), -1)
        y = torch.zeros_like(x).scatter_(1, place, x).scatter_add_(1, place % 4, x * 0.25)
        return self.last(self.first(y).relu())


@case("masked_fill_ and masked_scatter_")
class MaskedFill(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.masked_fill_(y > 0.5, 0.5)
        z = x.clone().masked_scatter_(x < 0, x[x < 0].flip(0))
        return self.last(y.relu()) + z


@case("index_put_ with accumulation")
class IndexPut(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(4, WIDTH)
        y.index_put_((torch.arange(len(x)) % 4,), x, accumulate=True)
        return self.last(self.first(y / 4).relu())


@case("a triangle filled in place")
class FillsDiagonal(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gram = (x.t() @ x / len(x)).fill_diagonal_(1.0)
        gram.triu_()
        return self.last(self.first(x @ gram / 4).relu())


@case("relu_, add_ and friends in a row")
class InPlaceChain(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.add_(0.1).relu_().mul_(2).clamp_(max=1.5).sub_(0.5).tanh_())


@case("an in-place activation whose input is used again")
class InPlaceUsedTwice(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.act(y)
        return self.last(y + z)


@case("a residual sum in place into an activation that is read later")
class InPlaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z = self.other(y.relu())
        y += z
        return y * z


@case("an activation resized and reshaped in place")
class ReshapedInPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).unsqueeze_(1).squeeze_(1)
        return self.last(y.transpose_(0, 1).t_().relu())


@case("copy_ between two activations, and swap")
class Swaps(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).clone(), self.first(-x).clone()
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept * 2)
        return self.last(a.relu() + b.tanh())


@case("as_strided windows over an activation")
class Strided(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).contiguous()
        windows = y.as_strided((len(x), 16, 2), (32, 2, 1))
        return self.last(torch.cat([windows.sum(-1), windows[..., 0]], 1).relu())


@case("a tensor grown row by row", rows)
class GrownByRow(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), 32)
        for i in range(len(x)):
            out[i] = self.first(x[i]).relu()
        return self.last(out)


@case("one argument is written into the other, both are read", two_rows)
class CopiedBetween(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x[:, :8].copy_(y[:, 8:])
        return self.last(F.relu(self.first(x), inplace=True)) + y

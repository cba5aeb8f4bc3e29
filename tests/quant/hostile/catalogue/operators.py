"""Operators off the beaten track, and selections by values: sorting, gathering, masks, windows, transforms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, Inputs, TwoLayers, case, rows, steps, uniform


@case("einsum over named sizes", steps)
class Einsum(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        scores = torch.einsum("bic,bjc->bij", x, x).softmax(-1)
        return self.last(torch.einsum("bij,bjd->bid", scores, y).relu())


@case("einsum with a layer's own weight")
class EinsumWeight(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last((torch.einsum("bi,oi->bo", x, self.first.weight) + self.first.bias).relu())


@case("unfold and fold of windows", steps)
class UnfoldFold(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.unfold(1, 3, 1).mean(-1)).relu())


@case("unfold of images, a layer, and fold", lambda b, n, i: (uniform(b, 1, 8, 8),))
class ImageFold(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=4).transpose(1, 2)
        return F.fold(self.last(self.first(patches).relu()).transpose(1, 2), (8, 8), 4, stride=4)


@case("a Fourier transform of the input and its inverse", steps)
class Fourier(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        low = torch.fft.irfft(spectrum[:, :3], n=x.size(1), dim=1)
        return self.last(self.first(low).relu())


@case("a short-time Fourier transform in front", lambda b, n, i: (uniform(b, 64),))
class Stft(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        s = torch.stft(x, 30, 10, window=torch.hann_window(30), return_complex=True).abs()
        return self.last(self.first(s.transpose(1, 2)).relu())


@case("cumsum, cumprod and diff", steps)
class Cumulates(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]
        return self.last(self.first(y[:, 1:] + x.diff(dim=1) * 0.5).relu())


@case("sort and its indices, of the input")
class Sorts(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sort(dim=1)
        return self.last(self.first(values).relu()), order


@case("topk of the input and gather of an activation")
class TopkGather(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        _, best = x.topk(8, dim=1)
        y = self.first(x)
        return self.last(torch.cat([y.gather(1, best), y[:, 8:]], 1).relu())


@case("argmax of the input picks an embedding")
class ArgmaxEmbedding(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) + self.table(x.argmax(1))).relu())


@case("take_along_dim, index_select and fancy indexing")
class Indexing(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        order = x.argsort(1)
        y = self.first(torch.take_along_dim(x, order, 1))
        y = y.index_select(1, torch.tensor([3, 1, 2, 0]))[:, [0, 2, 1, 3]]
        return self.last(torch.cat([y] * 8, 1).relu())


@case("an activation indexed by a tensor made in the forward")
class IndexedByTensor(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())[torch.tensor([0, 2])]


@case("rows chosen by a boolean mask")
class MaskedRows(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x[x[:, 0] > -0.5]).relu())


@case("nonzero and where with one argument")
class Nonzero(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row, column = torch.where(x > 0.9)
        y = self.first(x)
        return self.last(y[row].relu()), torch.nonzero(x > 0.9) + 0 * column.sum()


@case("unique values, with counts and inverse", lambda b, n, i: (torch.randint(8, (b, WIDTH)),))
class Unique(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        return self.last(self.first(inverse.float() / 4 - 1).relu()), counts


@case("bucketize, searchsorted and histc of the input")
class Buckets(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        edges = torch.linspace(-1, 1, 9)
        y = torch.bucketize(x, edges).float() / 4 - 1
        z = torch.searchsorted(edges, x.contiguous()).float() / 4 - 1
        return self.last(self.first(y + z).relu()), torch.histc(x, 8, -1, 1)


@case("repeat_interleave by counts from the input", lambda b, n, i: (uniform(b, WIDTH), torch.arange(b) % 3))
class RepeatInterleave(TwoLayers):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.last(self.first(x).relu().repeat_interleave(counts, 0))


@case("segments summed by an index, as graph networks do", lambda b, n, i: (uniform(b, WIDTH), torch.arange(b) // 3))
class Segments(TwoLayers):
    def forward(self, x: Tensor, segment: Tensor) -> Tensor:
        y = self.first(x).relu()
        pooled = torch.zeros(int(segment.max()) + 1, 32).index_add(0, segment, y)
        return self.last(pooled / 3)


def graph(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, WIDTH), torch.randint(batch, (2, 3 * batch))


@case("scatter_reduce with amax, and messages along edges", graph)
class Messages(TwoLayers):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.first(x).relu()
        sent = y[edges[0]]
        got = torch.zeros_like(y).scatter_reduce(0, edges[1][:, None].expand_as(sent), sent, "amax", include_self=True)
        return self.last(y + got)


@case("masks with -inf and rows that are all masked", lambda b, n, i: (uniform(b, WIDTH), torch.rand(b, WIDTH) > 0.4))
class MinusInfinity(TwoLayers):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = x.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
        return self.last(self.first(x * (weights + 0.5)).relu())


@case("an output with infinities where a mask says so")
class InfiniteOutput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).masked_fill(x < -0.5, float("-inf"))


@case("a determinant, an inverse and a solution", lambda b, n, i: (uniform(b, WIDTH),))
class LinearAlgebra(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gram = x.t() @ x / len(x) + 2 * torch.eye(WIDTH)
        y = torch.linalg.solve(gram, x.t()).t() + x @ torch.linalg.inv(gram)
        return self.last(self.first(y).relu()) * torch.linalg.slogdet(gram)[1] / 16


@case("a norm, a quantile and a median of the input")
class Statistics(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.norm(dim=1, keepdim=True) / 4 + x.quantile(0.75, dim=1, keepdim=True)
        return self.last(self.first(x / scale - x.median(1, keepdim=True).values).relu())


@case("distances between all pairs of rows")
class Distances(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cdist(x, x) / 4
        return self.last(self.first(x + y.mean(1, keepdim=True)).relu())


@case("grid_sample with a grid from a layer", lambda b, n, i: (uniform(b, 4, 4, 4), uniform(b, WIDTH)))
class GridSample(TwoLayers):
    def forward(self, image: Tensor, x: Tensor) -> Tensor:
        grid = self.last(self.first(x).relu()).tanh().view(-1, 2, 4, 2)
        return F.grid_sample(image, grid, align_corners=False)


@case("a conditional sum through torch.where on both sides", rows)
class WhereBothSides(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.where(x[:, :1] > 0, y.relu(), y.tanh()))


@case("the operators +=, @=, **, //, % and <<", rows)
class OddOperators(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += 0.5
        y = (y**2 % 16.0) - (y + 4.0) // 8.0 + abs(y)
        y @= torch.eye(32)
        return self.last(divmod(y, 2.0)[1] if isinstance(y, Tensor) and hasattr(y, "__divmod__") else -y)


@case("torch.ops.aten called directly")
class AtenDirectly(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten.addmm.default(self.first.bias, x, self.first.weight.t())
        return self.last(torch.ops.aten.relu.default(y))


@case("Tensor.__add__, torch.Tensor.relu and operator functions")
class UnboundMethods(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        import operator

        y = torch.Tensor.relu(self.first(x))
        return self.last(operator.iadd(operator.mul(y, 2.0), Tensor.__add__(y, 1.0)))


@case("the outputs of max over a dimension, by name")
class NamedResults(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = self.first(x).view(-1, 16, 2).max(dim=2)
        return self.last(torch.cat([best.values, best[0]], 1)), x.max(1).indices

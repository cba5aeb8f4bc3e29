"""Calls of torch that change what they are given without saying so by name, and writes into buffers by detours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cases import WIDTH, Inputs, TwoLayers, case, uniform


def numbers_of_rows(batch: int, length: int, index: int) -> Inputs:
    return (torch.randint(0, 24, (batch, length)),)


class Tracked(TwoLayers):
    """Two layers, and statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("var", torch.ones(32))


def statistics(model: nn.Module) -> tuple[Tensor, Tensor]:
    return model.mean, model.var


@case("F.batch_norm by the batch, with statistics in buffers", state=statistics)
class NormOfBatch(Tracked):
    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.first(x), self.mean, self.var, training=True)
        return self.last(y.relu())


@case("F.batch_norm for its statistics alone, which are read after it", state=statistics)
class NormForStatistics(Tracked):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        F.batch_norm(y, self.mean, self.var, training=True, momentum=0.5)
        return self.last((y - self.mean).relu())


@case("statistics are read before F.batch_norm changes them", state=statistics)
class ReadBeforeNorm(Tracked):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        before = y - self.mean * 2
        after = F.batch_norm(y, self.mean, self.var, training=True, momentum=0.9)
        return self.last((before + after).relu())


@case("F.batch_norm with the buffers of a layer that does not run", state=lambda m: m.norm.running_mean)
class NormOfLayer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.first(x), self.norm.running_mean, self.norm.running_var, training=True)
        return self.last(y.relu())


def signals(batch: int, length: int, index: int) -> Inputs:
    return (uniform(batch, WIDTH, 12),)


@case("F.instance_norm with statistics in buffers", signals, state=statistics)
class InstanceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(WIDTH, 32, 3), nn.Conv1d(32, WIDTH, 3)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("var", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        y = F.instance_norm(self.first(x), self.mean, self.var, use_input_stats=True, momentum=0.3)
        return self.last(y.relu())


class Table(nn.Module):
    """A table of large rows, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, WIDTH)
        self.make_table(uniform(24, 32) * 3)

    def make_table(self, rows: Tensor) -> None:
        self.table = nn.Parameter(rows)


@case("F.embedding with a largest norm", numbers_of_rows, state=lambda m: m.table)
class EmbeddingOfNorm(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.last(F.embedding(ids, self.table, max_norm=2.0).relu())


@case("F.embedding of a buffer with a largest norm, which is read before it", numbers_of_rows, state=lambda m: m.table)
class EmbeddingOfBuffer(Table):
    def make_table(self, rows: Tensor) -> None:
        self.register_buffer("table", rows)

    def forward(self, ids: Tensor) -> Tensor:
        before = self.table.mean(0)
        return self.last((F.embedding(ids, self.table, max_norm=2.0) + before).relu())


@case("nn.Embedding with a largest norm, its weight read after it", numbers_of_rows)
class EmbeddingLayer(Table):
    def make_table(self, rows: Tensor) -> None:
        self.table = nn.Embedding(24, 32, max_norm=2.0, _weight=rows)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.table(ids)
        return self.last((y + self.table.weight.mean(0)).relu())


@case("nn.EmbeddingBag with a largest norm", numbers_of_rows)
class BagLayer(Table):
    def make_table(self, rows: Tensor) -> None:
        self.table = nn.EmbeddingBag(24, 32, max_norm=2.0, _weight=rows)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids).relu())


@case("F.embedding_bag with a largest norm", numbers_of_rows)
class BagOfNorm(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.last(F.embedding_bag(ids, self.table, max_norm=2.0).relu())


class Counts(nn.Module):
    """A parametrization that scales by how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.asked += 1
        return weight * (1 + 1 / self.asked)


@case("a parametrization that counts how often it is asked")
def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    parametrize.register_parametrization(model[2], "weight", Counts(), unsafe=True)
    return model


class Kept(TwoLayers):
    """Two layers, and a buffer of what came."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, WIDTH))


def kept(model: nn.Module) -> Tensor:
    out: Tensor = model.kept
    return out


@case("a row of a buffer is added to in place", state=kept)
class RowOfBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].add_(x.mean(0))
        return self.last(self.first(x + self.kept.mean(0)).relu())


@case("a flat view of a buffer is assigned to", state=kept)
class FlatBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.view(-1)[3:5] = x[0, :2]
        return self.last(self.first(x + self.kept.mean(0)).relu())


@case("the parts of an unbound buffer are copied to", state=kept)
class UnboundBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        for place, row in enumerate(self.kept.unbind(0)):
            row.copy_(x[place])
        return self.last(self.first(x + self.kept.mean(0)).relu())


@case("a view of a buffer taken before it changes is read after", state=kept)
class OlderView(Kept):
    def forward(self, x: Tensor) -> Tensor:
        row = self.kept[1]
        self.kept.mul_(0.5).add_(x.mean(0))
        return self.last(self.first(x + row).relu())


@case("results are written into a buffer by out=", state=kept)
class OutOfBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        torch.mul(x[:4], 0.5, out=self.kept)
        return self.last(self.first(x + self.kept.mean(0)).relu())


@case("a list of buffers is changed by torch._foreach_add_", state=kept)
class ForEach(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_add_([self.kept, self.other], [x[:4], x[1:5]], alpha=0.5)
        return self.last(self.first(x + self.kept.mean(0) - self.other.mean(0)).relu())


@case("a buffer is set to another tensor by set_", state=kept)
class SetsBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x + self.kept.mean(0))
        self.kept.set_(x[:4].detach().clone())
        return self.last(y.relu())


@case("an activation is set to another one by set_")
class SetsActivation(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        z = y.clone()
        z.set_((y * 2).relu())
        return self.last(z) + self.last(y)


@case("a buffer is changed through .data", state=kept)
class DataOfBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.data.mul_(0.5).add_(x[:4])
        return self.last(self.first(x + self.kept.mean(0)).relu())


@case("the .data of a buffer is replaced", state=kept)
class ReplacesData(Kept):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x + self.kept.mean(0))
        self.kept.data = x[:4] * 0.5
        return self.last(y.relu())


@case("the .data of a row of an activation is written, and read by the whole")
class DataOfRow(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        y[0].data.fill_(0.5)
        return self.last(y)


@case("a buffer is registered in each call", state=kept)
class RegistersEachTime(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        self.register_buffer("kept", y.detach().mean(0), persistent=False)
        return self.last(y - self.kept)


@case("a buffer is registered in the first call and changed in the next ones", other=None, state=kept)
class RegistersOnce(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        if not hasattr(self, "kept"):
            self.register_buffer("kept", y.detach().mean(0))
        else:
            self.kept.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
        return self.last(y - self.kept)


@case("dropout that is on in eval mode, behind a child's name")
class AlwaysDrops(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).relu(), self.drop.p, training=True))


@case("F.batch_norm for statistics that the forward itself begins")
class OwnStatistics(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        mean, var = torch.zeros(32), torch.ones(32)
        F.batch_norm(y, mean, var, training=True, momentum=1.0)
        return self.last(((y - mean) / (var + 0.1)).relu())


@case("torch.batch_norm by position, with statistics in buffers", state=statistics)
class NormByPosition(Tracked):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.batch_norm(self.first(x), None, None, self.mean, self.var, True, 0.1, 1e-5, False)
        return self.last((y - self.mean).relu())


@case("F.batch_norm with a row of a buffer as its mean", state=lambda m: m.both)
class NormOfRows(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("both", torch.stack([torch.zeros(32), torch.ones(32)]))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.both
        y = F.batch_norm(self.first(x), mean, var, training=True)
        return self.last((y - self.both[0]).relu())


@case("a linear layer whose weight is a buffer that is written through a view", other=None, state=lambda m: m.weight)
class WrittenWeight(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", uniform(32, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.weight[0].add_(y.detach().mean(0))
        return self.last(F.linear(y, self.weight).relu())


@case("functional layers whose biases are computed from the input")
class ComputedBias(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.first.weight, self.first(x).mean(0))
        z = F.conv1d(y[None].transpose(1, 2), self.last.weight[:, :, None], self.last(y).mean(0))
        return z[0].T

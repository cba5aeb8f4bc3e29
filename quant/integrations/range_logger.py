"""Ranges, clipped shares and histograms of a prepared model for TensorBoard, wandb and their like; imports neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.observers import ChannelMean, NoDataSeen, Observer
from quant.observers._histogram_store import HistogramStore, RowView
from quant.observers.fake_quantize import FakeQuantizeBase

BUCKETS = 64
"""Bars of a logged histogram."""


@dataclass(frozen=True)
class RangeRow:
    """The range of one value.

    Attributes:
        layer: that computes the value, or the name of the model's input.
        low, high: real values of the smallest and the largest integer, the widest of all channels.
        scale: the largest of all channels.
        zero_point: that of the channel with that scale.
        clipped: share of what was seen that lies outside; None where the observer counts no values.
        edges, counts: a histogram of what was seen, float64 (bars + 1,) and int64 (bars,); None without one.
    """

    layer: str
    low: float
    high: float
    scale: float
    zero_point: int
    clipped: float | None
    edges: Tensor | None
    counts: Tensor | None

    def scalars(self) -> dict[str, float]:
        """All but the histogram, by names that begin with the layer's."""
        shown = {"low": self.low, "high": self.high, "scale": self.scale, "zero_point": float(self.zero_point)}
        if self.clipped is not None:
            shown["clipped"] = self.clipped
        return {f"{self.layer}/{name}": value for name, value in shown.items()}


def range_rows(prepared: nn.Module) -> Iterator[RangeRow]:
    """A row for each range of a model from `prepare` or `prepare_qat`; what saw no data yet is left out."""
    inside = set[int]()
    for name, module in prepared.named_modules():
        if id(module) in inside or not isinstance(module, (FakeQuantizeBase, Observer)):
            continue
        inside.update(map(id, module.modules()))
        if isinstance(module, ChannelMean):
            continue
        try:
            qparams = module.qparams()
        except NoDataSeen:
            continue
        low, high = qparams.ends().unbind(1)
        widest = int(qparams.scale.argmax())
        clipped, edges, counts = _histogram(module, low, high) if isinstance(module, HistogramStore) else (None,) * 3
        yield RangeRow(
            layer=module.name or name,
            low=low.min().item(),
            high=high.max().item(),
            scale=qparams.scale.max().item(),
            zero_point=int(qparams.zero_point.reshape(-1)[widest]),
            clipped=clipped,
            edges=edges,
            counts=counts,
        )


class RangeLogger:
    """Hands the rows of `range_rows` to a writer.

        log = RangeLogger(SummaryWriter("runs"))  # or RangeLogger(wandb.init(...))
        log(prepared, step)

    Args:
        writer: has `add_scalar(name, value, step)`, as TensorBoard's SummaryWriter, or `log(values, step=step)`, as
            wandb's run. Histograms go to its `add_histogram_raw`, where it has one.
        prefix: of all names.

    Raises:
        TypeError: the writer has neither method.
    """

    def __init__(self, writer: Any, prefix: str = "ranges/") -> None:
        if not (callable(getattr(writer, "add_scalar", None)) or callable(getattr(writer, "log", None))):
            raise TypeError(
                f"RangeLogger: writer is a {type(writer).__name__}, expected add_scalar(name, value, step), as of "
                "TensorBoard's SummaryWriter, or log(values, step=step), as of a run of wandb"
            )
        self.writer, self.prefix = writer, prefix

    def __call__(self, prepared: nn.Module, step: int) -> None:
        """Log all ranges that the model has now."""
        rows = list(range_rows(prepared))
        values = {f"{self.prefix}{name}": value for row in rows for name, value in row.scalars().items()}
        if hasattr(self.writer, "add_scalar"):
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        elif values:
            self.writer.log(values, step=step)
        if hasattr(self.writer, "add_histogram_raw"):
            for row in rows:
                if row.edges is not None and row.counts is not None:
                    self._add_histogram(f"{self.prefix}{row.layer}/histogram", row.edges, row.counts, step)

    def _add_histogram(self, name: str, edges: Tensor, counts: Tensor, step: int) -> None:
        centers = (edges[:-1] + edges[1:]) / 2
        self.writer.add_histogram_raw(
            name,
            min=edges[0].item(),
            max=edges[-1].item(),
            num=int(counts.sum()),
            sum=(centers * counts).sum().item(),
            sum_squares=(centers.square() * counts).sum().item(),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )


def _histogram(
    store: HistogramStore, low: Tensor, high: Tensor
) -> tuple[float, Tensor, Tensor] | tuple[None, None, None]:
    """The share outside of [low, high], and edges and counts of all channels' values; None where none was seen."""
    outside, views = 0, list[RowView]()
    for row, (exponent, first, last) in enumerate(zip(store.exponents(), low.tolist(), high.tolist(), strict=True)):
        if exponent is not None:  # else it has a range by hand alone
            view = RowView(store.counts[row].cpu(), 2.0**exponent, store.low[row].item(), store.high[row].item())
            outside += int(view.counts[(view.centers < first) | (view.centers > last)].sum())
            views.append(view)
    if not views:
        return None, None, None
    first, last = min(view.low for view in views), max(view.high for view in views)
    edges = torch.linspace(first, last if last > first else first + 1.0, BUCKETS + 1, dtype=torch.float64)
    counts = torch.zeros(BUCKETS, dtype=torch.int64)
    for view in views:
        counts.index_add_(0, torch.bucketize(view.centers, edges[1:-1]), view.counts)
    return outside / int(counts.sum()), edges, counts

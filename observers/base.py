"""What an observer is: the protocol, the input checks, and the finite range of a tensor.

An observer only looks: `forward` returns its very input, builds no graph, and keeps statistics in
buffers of constant size. How statistics become a range is each subclass's one idea, in its own file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from quant.kernels import ACTIVATION_U8, QParams, QScheme, choose_qparams
from quant.observers._state import Stateful, fresh
from torch import Tensor


class NoDataSeen(ValueError):
    """A range was asked of an observer (or of one of its channels) that saw no finite value."""


class EmptyAverage(NoDataSeen):
    """A range is the average of an empty one and others, as an average of models has it that began before the data."""


class FiniteRange(NamedTuple):
    """Extremes of the finite values of each row, and what was not finite.

    A row without finite values has low = +inf and high = -inf, the identity of minimum and maximum.
    """

    low: Tensor
    high: Tensor
    nan: Tensor | int
    inf: Tensor | int
    all_finite: bool


class Observer(Stateful, ABC):
    """Watches tensors and answers with the QParams that fit them.

    Rows are what has a range of its own: one per tensor, or one per index of `scheme.axis`.

    All buffers are in state_dict; floating ones stay float32 under `.half()` and `.to(dtype)`.

    Buffers:
        low, high: (rows,), the statistics' smallest and largest value; low > high where nothing was seen.
        told_of_non_finite: whether somebody has said that values were not finite.
        nan_count, inf_count: int64 scalars. Such values are left out of every other statistic.

    Attributes:
        by_hand: whether its options are the range itself, rather than how one is chosen.
        follows_batches: whether its range depends on the order of batches. A weight is observed once.
        of_input: whether it watches what a model is called with.
        given: a range (low, high) set by hand, in place of the one that statistics would choose; None lets
            them. A setting, not a statistic: no part of state_dict.

    Args:
        scheme: the integers to choose parameters for; `scheme.axis` says per tensor or along which axis.

    Raises:
        NoDataSeen: from `range` and `qparams`, when nothing finite was seen, by any row. A range set by hand needs
            no data, except with `scheme.axis`, where the number of rows is unknown before.
        TypeError: from `forward`, for a tensor that is not real floating point.
        ValueError: from `forward`, when the axis is absent or its size changes.
    """

    by_hand: ClassVar[bool] = False
    follows_batches: ClassVar[bool] = False
    low: Tensor
    high: Tensor
    nan_count: Tensor
    inf_count: Tensor
    given: tuple[float, float] | None = None
    told_of_non_finite = False
    of_input = False

    def __init__(self, scheme: QScheme = ACTIVATION_U8) -> None:
        super().__init__()
        self.scheme = scheme
        rows = 1 if scheme.axis is None else 0
        self.register_buffer("low", torch.full((rows,), math.inf))
        self.register_buffer("high", torch.full((rows,), -math.inf))
        self.register_buffer("nan_count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("inf_count", torch.zeros((), dtype=torch.int64))

    @property
    def _rows_may_change(self) -> bool:
        return self.scheme.axis is not None

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x` (float16, bfloat16, float32 or float64; any shape) and return it, the same object."""
        self._check(x)
        with torch.no_grad():
            self._observe(as_plain(x))
        return x

    def give(self, low: float, high: float) -> None:
        """Answer with this range from now on, whatever is seen; statistics go on all the same.

        Raises:
            ValueError: an end is not finite in float32, or low is above high.
        """
        largest = torch.finfo(torch.float32).max
        if not -largest <= low <= high <= largest:
            raise ValueError(f"{self._where()}: range is [{low}, {high}], expected finite ends, low <= high")
        self.given = (float(low), float(high))

    @property
    def needs_data(self) -> bool:
        """Whether its range waits for statistics: not where one was set by hand for the whole tensor."""
        return self.given is None or self.scheme.axis is not None

    def range(self) -> tuple[Tensor, Tensor]:
        """The chosen (low, high), or those set by hand: float32, shape () or (channels,), finite, low <= high.

        Raises:
            NoDataSeen: nothing finite was seen, or one channel saw nothing finite.
        """
        if self.needs_data:
            self._check_seen()
        if self.given is None:
            low, high = self._range()
        else:
            low, high = torch.full_like(self.low, self.given[0]), torch.full_like(self.high, self.given[1])
        return (low[0], high[0]) if self.scheme.axis is None else (low, high)

    def qparams(self) -> QParams:
        """Scale and zero point of the chosen range; raises as `range` does."""
        return choose_qparams(*self.range(), self.scheme)

    def merge(self, other: Observer) -> None:
        """Take in what `other` saw, as if this observer had seen it too. The file of each class says how exactly.

        Raises:
            TypeError: `other` is of another class.
            ValueError: schemes, settings or numbers of channels differ.
        """
        if type(other) is not type(self):
            raise TypeError(f"{self._where()}: cannot merge a {type(other).__name__}, expected the same class")
        if self._settings() != other._settings():
            raise ValueError(f"{self._where()}: cannot merge {other._settings()}, expected {self._settings()}")
        self.nan_count += other.nan_count.to(self.nan_count.device)
        self.inf_count += other.inf_count.to(self.inf_count.device)
        if other.low.numel():
            self._allocate(other.low.numel(), self.low.device)
            self._merge(other)

    def reset(self) -> None:
        """Forget everything seen; settings stay."""
        self.low.fill_(math.inf)
        self.high.fill_(-math.inf)
        self.nan_count.zero_()
        self.inf_count.zero_()

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self._settings().items())

    def _add(self, rows: Tensor) -> None:
        """Add `rows`, float32 (rows, n), to the statistics and what is not finite to its counts."""
        seen = finite_range(rows)
        if not seen.all_finite:
            self.nan_count += seen.nan
            self.inf_count += seen.inf
        self._update(rows, seen)

    def _update(self, rows: Tensor, seen: FiniteRange) -> None:
        """Add `rows`, whose extremes are known, to the statistics; where not all_finite, NaN and inf are left out."""
        raise NotImplementedError

    def _range(self) -> tuple[Tensor, Tensor]:
        """The chosen (low, high), each (rows,), from statistics in which every row has data."""
        return self.low.clone(), self.high.clone()

    def _check_seen(self) -> None:
        """Raise NoDataSeen where some row has no statistics."""
        empty = ~(self.low <= self.high)  # NaN too, as an altered file may have it
        if self.low.numel() == 0 or bool(empty.all()):
            raise NoDataSeen(
                f"{self._where()}: no finite value was seen{self._non_finite()}; run calibration data through the "
                "model before asking for its parameters"
            )
        if bool(empty.any()):
            rows = empty.nonzero().flatten().tolist()
            raise NoDataSeen(f"{self._where()}: channels {rows} saw no finite value{self._non_finite()}")

    @abstractmethod
    def _merge(self, other: Observer) -> None:
        """Add the statistics of `other`, which has as many rows."""

    def _settings(self) -> dict[str, object]:
        """The settings that two observers must share to be merged; printed by repr."""
        return {"scheme": self.scheme}

    def _observe(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        rows = to_rows(x, self.scheme.axis)
        self._allocate(rows.shape[0], x.device)
        self._add(rows)

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(
                f"{self._where()}: got a tensor of {x.dtype}, expected real values in a floating dtype; integers "
                "(indices, masks) need no quantisation parameters"
            )
        axis = self.scheme.axis
        if axis is not None and not -x.dim() <= axis < x.dim():
            raise ValueError(f"{self._where()}: axis {axis} does not exist in a tensor of shape {tuple(x.shape)}")

    def _allocate(self, rows: int, device: torch.device) -> None:
        """Give the buffers their rows at the first tensor; afterwards only check the number."""
        have = self.low.numel()
        if have == rows:
            return
        if have:
            raise ValueError(
                f"{self._where()}: axis {self.scheme.axis} has size {rows}, expected {have} as in the tensors before"
            )
        self.low = fresh(self.low, (rows,), math.inf, device)
        self.high = fresh(self.high, (rows,), -math.inf, device)

    def _non_finite(self) -> str:
        nan, inf = int(self.nan_count), int(self.inf_count)
        return f" ({nan} NaN and {inf} infinite values were)" if nan or inf else ""


class RangeObserver(Observer):
    """An observer whose statistic is the range itself, so that it needs no search: cheap enough for every training
    step.

    Args:
        scheme: as for Observer.
        distributed: take each batch's extremes over all ranks of the default process group before using them, so
            that every rank keeps the range of the joint batch. A collective in every forward: all ranks must call it.
    """

    def __init__(self, scheme: QScheme = ACTIVATION_U8, *, distributed: bool = False) -> None:
        super().__init__(scheme)
        self.distributed = distributed

    def start(self, low: Tensor, high: Tensor) -> None:
        """Begin with the range [low, high], float32 () or (channels,), as if it had been seen."""
        self._allocate(low.numel(), low.device)
        self.low.copy_(low.reshape(-1))
        self.high.copy_(high.reshape(-1))

    def _observe(self, x: Tensor) -> None:
        if x.numel() == 0 and not self.distributed:
            return
        rows = to_rows(x, self.scheme.axis)
        self._allocate(rows.shape[0], x.device)
        seen = finite_range(rows)
        if not seen.all_finite:
            self.nan_count += seen.nan
            self.inf_count += seen.inf
        self._update(rows, joint_range(seen) if self.distributed else seen)


def all_reduce(values: Tensor, how: str) -> Tensor:
    """`values` after torch.distributed's SUM or MAX over the default group, in place; unchanged where there is none."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values, op=getattr(dist.ReduceOp, how))
    return values


def joint_range(seen: FiniteRange) -> FiniteRange:
    """The extremes over all ranks."""
    extremes = all_reduce(torch.stack((-seen.low, seen.high)), "MAX")
    return seen._replace(low=-extremes[0], high=extremes[1])


def as_plain(x: Tensor) -> Tensor:
    """A tensor of a subclass as a plain tensor, since the subclass would change how statistics are computed and copied.

    A subclass with kernels of its own (`__torch_dispatch__`) stays as it is.
    """
    if type(x) is Tensor or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(Tensor)


def to_rows(x: Tensor, axis: int | None) -> Tensor:
    """float32 (1, n) of the whole tensor, or (channels, n) along `axis`.

    The order within a row means nothing, so a dense tensor in any memory format (NHWC) is viewed, not copied.
    """
    x = as_plain(x)
    x = x if x.dtype == torch.float32 else x.to(torch.float32)
    if axis is not None:
        return x.movedim(axis, 0).reshape(x.shape[axis], -1) if x.numel() else x.new_empty(x.shape[axis], 0)
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(1, -1)


def finite_range(rows: Tensor) -> FiniteRange:
    """Extremes of float32 (rows, n) over the finite values.

    One pass when all is finite, since NaN and inf show in the extremes themselves. Under torch.compile there is no
    branch on data: a fused kernel looks at every value.
    """
    if rows.numel() == 0:
        nothing = rows.new_full((rows.shape[0],), math.inf)
        return FiniteRange(nothing, -nothing, 0, 0, False)
    if not torch.compiler.is_compiling():
        if rows.shape[0] == 1:  # the whole-tensor reduction is vectorised, the one along a dimension is not
            low, high = torch.aminmax(rows)
            if math.isfinite(low.item()) and math.isfinite(high.item()):
                return FiniteRange(low.reshape(1), high.reshape(1), 0, 0, True)
        else:
            low, high = torch.aminmax(rows, dim=1)
            if bool(torch.isfinite(torch.stack((low, high))).all()):
                return FiniteRange(low, high, 0, 0, True)
    finite = torch.isfinite(rows)
    low = torch.where(finite, rows, math.inf).amin(dim=1)
    high = torch.where(finite, rows, -math.inf).amax(dim=1)
    return FiniteRange(low, high, torch.isnan(rows).sum(), torch.isinf(rows).sum(), False)

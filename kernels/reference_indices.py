"""The oracle for what a plan does at the places that indices name: torch's own functions.

Sums are added in the order of the indices, so the kernels' bits are those of torch on one thread.
"""

from __future__ import annotations

from collections.abc import Callable

from quant.kernels.reference_layers import OutOfTable
from torch import Tensor
from torch._subclasses import FakeTensor


def index_select(x: Tensor, dim: int, index: Tensor, negative: bool) -> Tensor:
    """The parts of x at some places of a dimension.

    Args:
        x: of any dtype.
        index: int64, of any shape; its dimensions take the place of `dim`.
        negative: whether -1 is the last place; else it is none.

    Raises:
        OutOfTable: an index names no place.
    """
    size = x.shape[dim]
    _check(index, -size if negative else 0, size)
    places = index.where(index >= 0, index + size) if negative else index
    chosen = x.index_select(dim, places.reshape(-1))
    before = x.shape[: dim % x.dim()]
    return chosen.reshape([*before, *index.shape, *x.shape[len(before) + 1 :]])


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x with the parts of `source` along a dimension added at the places that the vector `index` names."""
    _check(index, 0, x.shape[dim])
    return x.index_add(dim, index, source)


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x with each value of `source` added at the place of a dimension that the value of `index` beside it names."""
    _check(index, 0, x.shape[dim])
    return x.scatter_add(dim, index, source)


def _check(index: Tensor, low: int, size: int) -> None:
    if isinstance(index, FakeTensor) or index.numel() == 0:
        return
    outside = index[(index < low) | (index >= size)]
    if outside.numel():
        raise OutOfTable(f"index {int(outside[0])} is outside a dimension of {size}")


INDICES: dict[str, Callable[..., Tensor]] = {
    "index_select": index_select,
    "index_add": index_add,
    "scatter_add": scatter_add,
}
"""By the names that a plan's text has for them."""

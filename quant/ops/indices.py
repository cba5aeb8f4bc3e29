"""Parts of a float32 tensor that indices choose: taken, and added to, as graph networks pass messages.

`x[indices]` is a view (`slices.py`). Sums have torch's bits.
"""

from __future__ import annotations

import torch

from quant.ops.planning import Lines, PlanCall, Unplanned, integer
from quant.ops.registry import plans_reals


@plans_reals(torch.index_select, "index_select")
def index_select(call: PlanCall) -> Lines:
    """The parts at the places of a dimension that a vector names."""
    _check_arguments(call, {"input", "dim", "index"})
    index = call.indices(2, "index")
    if len(call.values.shape(index)) != 1:
        raise Unplanned("its indices are no vector")
    x, dim = call.tensor(), integer("dim", call.argument(1, "dim"))
    return [("index_select", {"x": x, "dim": dim, "index": index, "negative": False})]


@plans_reals(torch.index_add, "index_add", "index_add_")
def index_add(call: PlanCall) -> Lines:
    """Parts of a tensor added at the places of a dimension that a vector names."""
    return _added("index_add", call, "source")


@plans_reals(torch.scatter_add, "scatter_add", "scatter_add_")
def scatter_add(call: PlanCall) -> Lines:
    """Values added at places of a dimension, an index for each value."""
    return _added("scatter_add", call, "src")


def _added(op: str, call: PlanCall, source: str) -> Lines:
    _check_arguments(call, {"input", "dim", "index", source})
    if call.node.writes:
        raise Unplanned("it writes to what outlives the call")
    settings = {"dim": integer("dim", call.argument(1, "dim")), "index": call.indices(2, "index")}
    return [(op, {"x": call.tensor(), **settings, "source": call.tensor(3, source)})]


def _check_arguments(call: PlanCall, names: set[str]) -> None:
    if len(call.args) + len(call.kwargs) != len(names) or not set(call.kwargs) <= names:
        raise Unplanned("it is computed in float")

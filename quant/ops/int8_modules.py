"""Float calls of embeddings, and of int8 modules that quantise as they go, between other operations of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quant.kernels.plan_sizes import dimensions_in
from quant.nn import Embedding, Linear
from quant.nn.recurrent import RecurrentSequence
from quant.nn.recurrent.cell import RecurrentCell
from quant.ops.planning import NumberOf, Opened, PlacesOf, PlanCall, Unplanned
from quant.ops.recurrent import opened, step
from quant.ops.registry import plans_reals
from quant.runtime.int8_module_calls import EmbeddingCall, Int8ModuleCall
from quant.runtime.places_call import places_call
from quant.runtime.recurrent_lines import CellLines

OTHERWISE = "it has hooks, or settings or a forward that no plan has"


@plans_reals(nn.Embedding, Embedding)
def embedding(call: PlanCall) -> EmbeddingCall:
    """A table that gives rows as they are."""
    known = call.symbol()
    if isinstance(known, PlacesOf):
        return _of_places(call, known)
    planned = EmbeddingCall(call.out, (call.indices().index,), call.node.target)
    if call.module is None or not planned.holds(call.module):
        raise Unplanned(OTHERWISE)
    return planned


def _of_places(call: PlanCall, places: PlacesOf) -> EmbeddingCall:
    module: Any = call.module
    reads = dict.fromkeys([places.source, *(one.index for one in dimensions_in(places.number))])
    planned = places_call(call.out, tuple(reads), call.node.target, places.number, module.embedding_dim)
    if not planned.holds(module):
        raise Unplanned(OTHERWISE)
    return planned


@plans_reals(torch.arange)
def places(call: PlanCall) -> PlacesOf:
    """0, 1, ... up to a size, for an embedding alone."""
    known, dtype = call.symbol(), call.kwargs.get("dtype")
    if len(call.args) != 1 or not isinstance(known, NumberOf) or dtype not in (None, torch.int64):
        raise Unplanned("it is computed by torch")
    return PlacesOf(known.source, known.number)


@plans_reals(Linear)
def dynamic_linear(call: PlanCall) -> Int8ModuleCall:
    """A linear layer with a range per row."""
    planned = Int8ModuleCall(call.out, (call.tensor().index,), call.node.target)
    if call.module is None or not planned.holds(call.module):
        raise Unplanned(OTHERWISE)
    return planned


@plans_reals(RecurrentSequence)
def dynamic_recurrent(call: PlanCall) -> Opened:
    """A recurrent network with a range per row and step."""
    return opened(call, integers=False)


@plans_reals(RecurrentCell)
def dynamic_cell(call: PlanCall) -> Opened | CellLines:
    """A recurrent cell with a range per row and step."""
    return step(call)

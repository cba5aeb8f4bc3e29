"""Float calls of embeddings, and of int8 modules that quantise as they go, between other operations of a plan."""

from __future__ import annotations

from torch import nn

from quant.nn import Embedding, Linear
from quant.nn.recurrent import RecurrentSequence
from quant.ops.planning import Opened, PlanCall, Unplanned
from quant.ops.recurrent import opened
from quant.ops.registry import plans_reals
from quant.runtime.int8_module_calls import EmbeddingCall, Int8ModuleCall

OTHERWISE = "it has hooks, or settings or a forward that no plan has"


@plans_reals(nn.Embedding, Embedding)
def embedding(call: PlanCall) -> EmbeddingCall:
    """A table that gives rows as they are."""
    planned = EmbeddingCall(call.out, (call.indices().index,), call.node.target)
    if call.module is None or not planned.holds(call.module):
        raise Unplanned(OTHERWISE)
    return planned


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

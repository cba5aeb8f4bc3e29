"""The experts of a mixture of experts as transformers keeps them, all in one tensor, each as two int8 linear layers.

transformers holds the weights of all experts of a layer in two parameters of three dimensions, on classes that its
decorator `use_experts_implementation` marks. What they compute is the decorator's: the rows that were routed to an
expert go through its first product, the gate (`_apply_gate` of the class) or activation, and its second product.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quant.nn.base import QuantizedWeight, as_float32
from quant.nn.linear import Linear
from quant.recipe import QConfig
from quant.runtime.layers.quant_module import QuantModule

_DECORATOR = "transformers.integrations.moe"
"""The module that defines `use_experts_implementation`."""


def is_experts(kind: type) -> bool:
    """Whether transformers' decorator made this class's own forward; it need not be imported for this."""
    decorator, forward = sys.modules.get(_DECORATOR), kind.__dict__.get("forward")
    return decorator is not None and getattr(forward, "__globals__", None) is vars(decorator)


class Experts(QuantModule):
    """The rows of each expert through `up`, gate or activation, and `down`, times their weights, added up per token.

    Modules: up and down, for each expert a `Linear`. The sum over a token's experts is float32.
    """

    def __init__(self, up: Iterable[Linear], down: Iterable[Linear]) -> None:
        super().__init__()
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

    @classmethod
    def from_float(cls, module: Any, qconfig: QConfig) -> "Experts":
        """The int8 stand-in of a module of transformers."""
        first = "gate_up_proj" if module.has_gate else "up_proj"
        return cls(_linears(module, first, qconfig), _linears(module, "down_proj", qconfig))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, width), int64 (tokens, k) of experts, and (tokens, k) -> (tokens, width) of `dtype`.

        Numbers from that of the experts on stand for none, as in transformers.
        """
        own: Any = self  # what its float class has: has_gate, act_fn, _apply_gate
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.up):
                continue
            token, place = torch.where(top_k_index == expert)
            first = self.up[expert](hidden_states[token])
            between = own._apply_gate(first) if own.has_gate else own.act_fn(first)
            outputs = self.down[expert](between)
            if own.has_post_expert_norm:
                outputs = own.post_expert_norm(outputs)
            total.index_add_(0, token, as_float32(outputs * top_k_weights[token, place, None]))
        return total.to(self.dtype)

    def extra_repr(self) -> str:
        return f"experts={len(self.up)}"


def _linears(module: Any, name: str, qconfig: QConfig) -> list[Linear]:
    """An int8 Linear for each matrix of a parameter (experts, N, K), or (experts, K, N) where it is transposed."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    rows = weights.transpose(1, 2) if module.is_transposed else weights
    return [
        Linear(QuantizedWeight.of(weight, qconfig), bias, per_row=qconfig.ranges_per_row)
        for weight, bias in zip(rows, biases, strict=True)
    ]

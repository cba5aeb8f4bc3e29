"""Linear layers: `nn.Linear`, `F.linear`, and products with a weight of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.folding import Transposed, depends_on_nothing, has_parameter, is_written, own_shape
from quant.ops.call import Call, StaysFloat
from quant.ops.operator import Weighted
from quant.ops.registry import Recognised, recognises
from quant.runtime.layers.products import LinearProduct
from quant.runtime.trees import Attr


@dataclass(frozen=True)
class Linear(Weighted):
    """y = x weight' + bias, the weight (out, in)."""

    name: ClassVar[str] = "linear"

    @property
    def input_channel_axis(self) -> int:
        return -1

    @property
    def needs_rank(self) -> bool:
        return self.is_folded  # a batch norm has its channels second, which are last in two dimensions alone

    def int8(self) -> LinearProduct:
        return LinearProduct()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


@recognises(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
def linear_module(call: Call) -> Recognised:
    """`nn.Linear`."""
    operator = Linear(weight=own_parameter("weight", call), bias=own_parameter("bias", call))
    return Recognised(operator, (call.activation(),))


@recognises(F.linear)
def linear_function(call: Call) -> Recognised:
    """`F.linear`, whose weight may be computed, but not from the input."""
    return Recognised(Linear(weight=own_weight(call), bias=own_bias(call)), (call.activation(),))


@recognises(torch.addmm)
def added_product(call: Call) -> Recognised:
    """`torch.addmm(bias, x, weight)`, GPT-2's Conv1D, with a bias (out,) and weight (in, out) of the model."""
    if call.get(3, "beta", 1) != 1 or call.get(4, "alpha", 1) != 1 or call.node.kwargs.get("out") is not None:
        raise StaysFloat("it has a beta, an alpha or an out")
    bias, weight = call.get(0, "input"), call.get(2, "mat2")
    outputs = outputs_of(call, weight)
    if outputs is None or own_shape(call.graph, call.root, bias) != (outputs,):
        raise StaysFloat("its bias or weight is computed from the input, or of another shape")
    return Recognised(Linear(weight=Transposed(weight), bias=bias), (call.activation(1, "mat1"),))


def outputs_of(call: Call, weight: Any) -> int | None:
    """The outputs of a trained weight (in, out); None for anything else."""
    shape = own_shape(call.graph, call.root, weight)
    trained = shape is not None and len(shape) == 2 and has_parameter(call.graph, call.root, weight)
    return shape[1] if shape is not None and trained else None


def own_parameter(name: str, call: Call) -> Attr | None:
    """The parameter `name` of the module that is called; None where it has none."""
    module, path = call.module, call.node.target
    assert module is not None
    return None if getattr(module, name) is None else Attr(f"{path}.{name}" if path else name)


def own_weight(call: Call) -> Any:
    """The weight argument of a function, which must not depend on the input."""
    return _of_the_model(call, call.get(1, "weight"), "weight")


def own_bias(call: Call) -> Any:
    """The bias argument of a function, which must not depend on the input; None where it has none."""
    return _of_the_model(call, call.get(2, "bias"), "bias")


def _of_the_model(call: Call, value: Any, name: str) -> Any:
    if not depends_on_nothing(call.graph, value):
        raise StaysFloat(f"its {name} is computed from the input")
    if is_written(call.graph, value):
        raise StaysFloat(f"its {name} follows from what the forward writes on the model")
    return value

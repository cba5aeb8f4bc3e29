"""The registry of dynamic int8 layers: float class -> what builds its int8 form, third parties' included."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from quant.int8_classes import LAYERS, Maker
from quant.nn.attention import MultiheadAttention
from quant.nn.embedding import Embedding, EmbeddingBag
from quant.nn.experts import Experts, is_experts
from quant.nn.linear import Conv1D, Linear
from quant.recurrent_layers import recurrent_class, recurrent_classes
from quant.runtime.layers.quant_module import QuantModule

M = TypeVar("M", bound="type[QuantModule] | Maker")

SUPPORTED: dict[type[nn.Module], Maker] = {
    nn.Linear: Linear.from_float,
    nn.MultiheadAttention: MultiheadAttention,
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
}
"""Those of torch.nn, except recurrent ones (`quant.recurrent_layers`)."""


for _kind, _make in SUPPORTED.items():
    LAYERS.add(_kind, _make)


def register_int8(kind: type[nn.Module]) -> Callable[[M], M]:
    """A decorator for what stands in for modules of a float class in `quantize_dynamic`: a class, or a function that
    makes one. A subclass of `StaticQuantModule` does in static quantisation and training too.

    It is called with the float module and its `QConfig`; of a class, `from_float` is, where there is one. Subclasses of
    `kind` that keep its forward count as well. A package that is installed needs no call: an entry point of the group
    "octet.layers", named as the float class is in full, is the class or the function.

    Raises:
        ValueError, TypeError: it is no such thing, or the float class has an int8 layer.
    """

    def added(value: M) -> M:
        LAYERS.add(kind, value)
        return value

    return added


def maker(kind: type) -> Maker | None:
    """The Maker for modules of exactly this class; None where there is none."""
    if kind is _imported_conv1d():
        return Conv1D.from_float
    if is_experts(kind):
        return Experts.from_float
    known, recurrent = LAYERS.get(kind), recurrent_class(kind)
    return known if recurrent is None or known is not None else recurrent.stand_in


def inputs_of(module: nn.Module) -> int | None:
    """Inputs of each output of a linear layer, or values of a table's row; None of layers of other kinds."""
    if type(module) is nn.Linear:
        return module.in_features
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return module.embedding_dim
    weight = module._parameters.get("weight")
    return weight.shape[0] if weight is not None and type(module) is _imported_conv1d() else None


def supported() -> list[type[nn.Module]]:
    """The imported float classes that have an int8 layer."""
    conv1d = _imported_conv1d()
    return [*LAYERS, *recurrent_classes(), *([] if conv1d is None else [conv1d])]


def is_own(module: QuantModule) -> bool:
    """Whether an int8 module is of a class of this package."""
    return type(module).__module__.startswith(__package__)


def _imported_conv1d() -> type[nn.Module] | None:
    """transformers' Conv1D, where that is imported, which it need not be for this."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)

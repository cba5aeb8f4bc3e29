"""What every int8 module shares: its name in the user's model, its backend, and errors that say both.

The files of int8 modules do without `from __future__ import annotations`: torch.jit.script cannot read the annotations
of a module class where they are strings.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

HALVES = (torch.bfloat16, torch.float16)
"""Float types that a model may be in besides float32."""


class QuantModule(nn.Module):
    """An int8 stand-in for a float module.

    Attributes:
        layer_name: dotted name in the user's model, for errors.
        backend: '' for the dispatcher's choice, or a name of `quant.kernels.available()`.
        kept_in_files: attributes (numbers, texts, booleans) that a file keeps besides those of every int8 layer, and
            that the float module does not tell.
        dtype: the float type of the user's layer, which outputs and the real weights have. The arithmetic between is
            that of float32 whatever it is: scales and biases are kept so.
    """

    __jit_unused_properties__: list[str] = []  # noqa: RUF012 - TorchScript reads it as a class attribute

    kept_in_files: ClassVar[tuple[str, ...]] = ()
    layer_name: str
    backend: str
    dtype: torch.dtype

    def __init__(self) -> None:
        super().__init__()
        self.layer_name = ""
        self.backend = ""
        self.dtype = torch.float32

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantModule":
        # `half()` and `to(torch.bfloat16)` change what goes in and out; scales and biases lose nothing by it.
        for child in self.children() if recurse else ():
            child._apply(fn)

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            halved = moved.dtype in HALVES and tensor.dtype == torch.float32
            return tensor.to(moved.device) if halved else moved

        wanted = fn(torch.empty(0)).dtype
        if wanted in (torch.float32, *HALVES):
            self.dtype = wanted
        super()._apply(keep, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        # Whether columns are scaled, and with it the bits of the input, hangs on the weights: those loaded decide.
        for columns, q_weight in (("columns", "q_weight"), ("columns_ih", "q_weight_ih")):
            if columns not in self._buffers or prefix + q_weight not in state_dict:
                continue
            loaded = state_dict.get(prefix + columns)
            if (loaded is None) != (self._buffers[columns] is None):
                self._buffers[columns] = None if loaded is None else torch.empty_like(loaded)
                self.activation_bits = 8 if loaded is None else 16
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def _named(self, error: Exception) -> Exception:
        """The same error, saying which layer it comes from."""
        return type(error)(f"layer {self.layer_name or '(root)'!r} ({type(self).__name__}): {error}")


def frozen(parameter: Tensor | None) -> nn.Parameter | None:
    """A bias as a parameter that no optimiser moves: readers find what they expect under its name."""
    if parameter is None:
        return None
    return nn.Parameter(parameter.detach().to(torch.float32).clone(), requires_grad=False)


def dequantize_weight(q_weight: Tensor, scale: Tensor, columns: Tensor | None, terms: int = 1) -> Tensor:
    """The real weight (N, K) that an int8 one (N, terms * K) stands for: float32."""
    weight = q_weight.to(torch.float32) * scale.unsqueeze(1)
    if columns is not None:
        weight = weight * columns
    return weight if terms == 1 else torch.stack(weight.chunk(terms, dim=1)).sum(dim=0)

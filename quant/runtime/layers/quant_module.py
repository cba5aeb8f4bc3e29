"""The base of int8 modules: the name in the user's model, the backend, and errors with that name.

Files of int8 modules do not use `from __future__ import annotations`: torch.jit.script cannot read annotations of a
module class that are strings.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.kernels import narrow

HALVES = (torch.bfloat16, torch.float16)
"""Float types of a model besides float32."""


REFUSALS = (TypeError, ValueError, NotImplementedError)
"""What kernels, and torch for a device that has none, raise of operands; a layer puts its name in front."""


class QuantModule(nn.Module):
    """An int8 module in the place of a float one.

    Attributes:
        layer_name: dotted name in the user's model, for errors.
        backend: '' for the dispatcher's choice, or a name of `quant.kernels.available()`.
        kept_in_files: further attributes (numbers, texts, booleans) that a file stores, because the float module does
            not determine them.
        dtype: the float type of the user's layer, of its outputs and of its real weights. Arithmetic, scales and biases
            are float32 in any case.
    """

    __jit_unused_properties__: list[str] = []  # noqa: RUF012 - TorchScript reads it as a class attribute

    planned: ClassVar[Any] = None
    """A method, where the module has one input, that gives its operation in a plan (`kernels/reference_plan.py`) and
    the settings but for `x`; a tensor among them becomes a constant."""

    def can_plan(self) -> bool:
        """Whether it has an operation in a plan now; one of scales by group has none, but for `Linear`."""
        return self.planned is not None and not self.has_groups()

    def has_groups(self) -> bool:
        """Whether a weight of its own has scales by group."""
        return any(one.dim() > 1 for one in self.own_scales())

    def own_scales(self) -> list[Tensor]:
        """The scales of its weights."""
        return [one for name, one in self._buffers.items() if name.startswith("scale") and one is not None]

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
        # `half()` and `to(torch.bfloat16)` change the type of inputs and outputs; scales and biases stay float32.
        for child in self.children() if recurse else ():
            child._apply(fn)

        scales = set(map(id, self.own_scales()))

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            halved = moved.dtype in HALVES and tensor.dtype == torch.float32
            stored = id(tensor) in scales and tensor.dtype == torch.float16  # of a narrow weight
            return tensor.to(moved.device) if halved or stored else moved

        wanted = fn(torch.empty(0)).dtype
        if wanted in (torch.float32, *HALVES):
            self.dtype = wanted
        super()._apply(keep, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        # The loaded weights decide whether columns are scaled, and with that the bits of the input.
        for columns, q_weight in (("columns", "q_weight"), ("columns_ih", "q_weight_ih")):
            if columns not in self._buffers or prefix + q_weight not in state_dict:
                continue
            loaded = state_dict.get(prefix + columns)
            if (loaded is None) != (self._buffers[columns] is None):
                self._buffers[columns] = None if loaded is None else torch.empty_like(loaded)
                self.activation_bits = 8 if loaded is None else 16
        for name in self._buffers:
            scale = name.replace("q_weight", "scale")
            if name.startswith("q_weight") and {prefix + name, prefix + scale} <= set(state_dict):
                self._fit(name, scale, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    @torch.jit.unused
    def _fit(self, name: str, scale: str, state_dict: Any, prefix: str) -> None:
        """Check that a loaded weight is stored as this one; one of bytes, as older versions stored it, is made so."""
        own, own_scale = self._buffers[name], self._buffers[scale]
        loaded, loaded_scale = state_dict[prefix + name], state_dict[prefix + scale]
        if not (isinstance(loaded, Tensor) and isinstance(loaded_scale, Tensor)):
            return  # torch names it
        if own is None or own_scale is None or not (narrow.is_narrow(own) or narrow.is_narrow(loaded)):
            return
        if own_scale.dim() == 1:
            state_dict[prefix + name] = loaded = narrow.as_stored(loaded, own)
        if loaded.shape != own.shape or loaded_scale.shape != own_scale.shape:
            raise ValueError(
                f"layer {self.layer_name or prefix[:-1] or '(root)'!r} ({type(self).__name__}): {name} is "
                f"{narrow.described(own, own_scale)}, in the state_dict {narrow.described(loaded, loaded_scale)}; "
                "quantise the model by the recipe that the state_dict was made with, or load a file of quant.save, "
                "which says it, by quant.load"
            )
        if own_scale.dim() > 1:
            half = loaded_scale.dtype == torch.float16
            self._buffers[scale] = own_scale.to(torch.float16 if half else torch.float32)

    def _where(self) -> str:
        """Its name for errors."""
        return self.layer_name if len(self.layer_name) > 0 else "(root)"

    def _named(self, error: Exception) -> Exception:
        """The error with the layer's name in front of its message."""
        return named(error, self._where(), type(self).__name__)


_OF_HALVES = re.compile(r"is (BFloat16|Half|torch\.bfloat16|torch\.float16), expected (Float|torch\.float32)$")
"""How kernels, and the reference, refuse half inputs."""


def named(error: Exception, name: str, kind: str) -> Exception:
    """An error of a kernel with the layer's name and kind in front of its message."""
    where = f"layer {name or '(root)'!r} ({kind})"
    if isinstance(error, NotImplementedError):  # torch's, in pages, of an operator that no other device has
        return TypeError(f"{where}: expected tensors on the CPU, where int8 layers run: call it with x.cpu()")
    other = "; call it with x.float(), or under torch.autocast" if _OF_HALVES.search(str(error)) else ""
    return type(error)(f"{where}: {error}{other}")


def frozen(parameter: Tensor | None) -> nn.Parameter | None:
    """A bias as a float32 parameter without a gradient, under the name where other code expects it."""
    if parameter is None:
        return None
    return nn.Parameter(parameter.detach().to(torch.float32).clone(), requires_grad=False)


def dequantize_weight(q_weight: Tensor, scale: Tensor, columns: Tensor | None, terms: int = 1) -> Tensor:
    """The float32 weight (N, K) of an int8 weight (N, terms * K), or of a narrow one (`quant.kernels.narrow`)."""
    if q_weight.dtype == torch.uint8:
        weight = narrow.dequantize(q_weight, scale)
    else:
        weight = q_weight.to(torch.float32) * scale.unsqueeze(1)
    if columns is not None:
        weight = weight * columns
    return weight if terms == 1 else torch.stack(weight.chunk(terms, dim=1)).sum(dim=0)

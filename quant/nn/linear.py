"""`Linear` with an int8 weight, its activations quantised at run time."""

from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import dispatch, narrow
from quant.kernels.backends.compiled import direct
from quant.nn.base import QuantizedWeight, as_float32, output_dtype, scripted_as, takes_half
from quant.recipe import QConfig
from quant.runtime.layers.quant_module import REFUSALS, QuantModule, dequantize_weight, frozen

_linear_dynamic_plain = direct("linear_dynamic_plain")


class Linear(QuantModule):
    """y = x @ weight' + bias, `dtype` in and out, the product in integers (`reference.linear_dynamic`).

    Buffers: q_weight int8 (out_features, in_features) and scale float32 (out_features,), or those of a narrow weight
    (`quant.kernels.narrow`); columns float32 (in_features,) or None. `weight` reads as the float weight that they stand
    for.
    """

    q_weight: Tensor
    scale: Tensor
    columns: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, per_row: bool = True) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.q_weight.shape[0], narrow.columns_of(weight.q_weight)
        self.activation_bits = weight.activation_bits
        self.per_row = per_row
        self.described = weight.described
        self.register_buffer("q_weight", weight.q_weight)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("columns", weight.columns)
        self.bias: Tensor | None
        self.register_parameter("bias", frozen(bias))

    @classmethod
    def from_float(cls, module: nn.Linear, qconfig: QConfig) -> "Linear":
        """The int8 stand-in of a float Linear."""
        return cls(QuantizedWeight.of(module.weight, qconfig), module.bias, per_row=qconfig.ranges_per_row)

    @torch.jit.unused
    def can_plan(self) -> bool:
        """True: scales by group are a plan's too."""
        return True

    @torch.jit.unused
    def planned(self) -> tuple[str, dict[str, Any]]:
        """Its operation in a plan."""
        tensors = {"q_weight": self.q_weight, "scale": self.scale, "bias": self.bias, "columns": self.columns}
        return "linear_dynamic", {**tensors, "bits": self.activation_bits, "per_row": self.per_row}

    @property
    def weight(self) -> Tensor:
        """`dtype` (out_features, in_features): the int8 weight dequantised, computed at each read."""
        return dequantize_weight(self.q_weight, self.scale, self.columns).to(self.dtype)

    def _scripted(self, input: Tensor) -> Tensor:
        if self.dtype != torch.float32:
            return self._compiled(as_float32(input), self.q_weight, self.scale, self.bias).to(self.dtype)
        return self._compiled(input, self.q_weight, self.scale, self.bias)

    @scripted_as(_scripted)
    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), both of `dtype`; a half type's layer takes any float type.

        Under autocast a half input gives its own dtype.
        """
        dtype = self.dtype
        is_half = dtype is not torch.float32
        if not is_half and type(input) is Tensor and input.dtype is not torch.float32 and takes_half(input):
            dtype, is_half = input.dtype, True
        if is_half:
            input = as_float32(input)
        # Tensors not by attribute, which costs half a microsecond each: a small layer takes two and a half in all.
        buffers = self._buffers
        try:
            if (
                buffers["columns"] is None
                and self.activation_bits == 8
                and self.per_row
                and dispatch.is_direct(self.backend)
            ):
                y: Tensor = _linear_dynamic_plain(
                    input, buffers["q_weight"], buffers["scale"], self._parameters["bias"]
                )
                return y.to(dtype) if is_half else y
        except REFUSALS as error:
            raise self._named(error) from error
        return self._dispatch(input, self.q_weight, self.scale, self.bias).to(dtype)

    @torch.jit.export
    def outputs(self, input: Tensor, first: int, last: int) -> Tensor:
        """Only the outputs [first, last): (..., last - first), of `dtype`."""
        dtype = self.dtype
        if not torch.jit.is_scripting():
            dtype = output_dtype(dtype, input)
        if dtype != torch.float32:
            input = as_float32(input)
        if self.q_weight.dtype == torch.uint8 and (first % 64 != 0 or (last % 64 != 0 and last != self.out_features)):
            return self.forward(input).to(dtype)[..., first:last]  # a narrow weight's outputs lie in panels of 64
        q_weight, scale, bias = self.q_weight[first:last], self.scale[first:last], self.bias
        part = None if bias is None else bias[first:last]
        if torch.jit.is_scripting():
            return self._compiled(input, q_weight, scale, part).to(dtype)
        return self._dispatch(input, q_weight, scale, part).to(dtype)

    def _compiled(self, input: Tensor, q_weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.octet.linear_dynamic(  # type: ignore[no-any-return]
            input, q_weight, scale, bias, self.columns, self.activation_bits, self.per_row, False, self.backend
        )

    @torch.jit.unused
    def _dispatch(self, input: Tensor, q_weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        try:
            return dispatch.current(self.backend).linear_dynamic(
                input, q_weight, scale, bias, self.columns, self.activation_bits, self.per_row, False
            )
        except REFUSALS as error:
            raise self._named(error) from error

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation_bits={self.activation_bits}"
        )


class Conv1D(Linear):
    """transformers' Conv1D, a linear layer whose weight is kept (in_features, out_features), with an int8 weight."""

    @classmethod
    def from_float(cls, module: nn.Module, qconfig: QConfig) -> "Conv1D":
        """The int8 stand-in of a float Conv1D."""
        kept: Tensor = module.weight  # type: ignore[assignment]
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        return cls(QuantizedWeight.of(kept.t(), qconfig), bias, per_row=qconfig.ranges_per_row)

    @property
    def weight(self) -> Tensor:
        """`dtype` (in_features, out_features): the int8 weight dequantised, computed at each read."""
        return dequantize_weight(self.q_weight, self.scale, self.columns).to(self.dtype).t()

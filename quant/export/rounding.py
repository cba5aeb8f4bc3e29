"""How a QDQ program rounds: by plain arithmetic, or by the operators that readers of such programs look for.

Both give the same integers. `Plain` is understood by whatever runs torch. `Decomposed` calls
`torch.ops.quantized_decomposed`, the names by which ExecuTorch, and others that read programs of torch.export, know
quantised values; the package that reads the program defines them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from quant.kernels.reference import quantize_rows, row_ranges


class Rounding(Protocol):
    """The conversions between float32 and 8 bits.

    Attributes:
        shift: what the 8 bits are less than the uint8 of the converted model.
        weights_between_integers_only: whether a weight stays float where its layer's output is float.
    """

    shift: int
    weights_between_integers_only: bool

    def quantize(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        """float32 -> 8 bits, by the scale and zero point of uint8."""

    def dequantize(self, q: Tensor, scale: float, zero_point: int) -> Tensor:
        """8 bits -> float32."""

    def weight(self, q_weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        """The real values of an int8 weight with output channels first; `zeros` are its zero points, int64."""

    def rows(self, x: Tensor, bits: int, *, per_row: bool) -> Tensor:
        """float32 (..., K) rounded to `bits` bits by the range of each row, or of all of x."""


class Plain:
    """uint8, and torch's own functions."""

    shift = 0
    weights_between_integers_only = False

    def quantize(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        inverse = float(numpy.float32(1.0) / numpy.float32(scale))
        return torch.clamp(torch.round(x * inverse) + zero_point, 0, 255).to(torch.uint8)

    def dequantize(self, q: Tensor, scale: float, zero_point: int) -> Tensor:
        return (q.to(torch.float32) - zero_point) * scale

    def weight(self, q_weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        return q_weight.to(torch.float32) * scale.reshape(-1, *[1] * (q_weight.dim() - 1))

    def rows(self, x: Tensor, bits: int, *, per_row: bool) -> Tensor:
        top = 2**bits - 1
        rows = x.reshape(-1, x.shape[-1])
        scale, zero_point = row_ranges(rows, top, per_row=per_row)
        q = quantize_rows(rows, scale, zero_point, top).to(torch.float32)
        return ((q - zero_point) * scale).reshape(x.shape)


class Decomposed:
    """int8, which is what XNNPACK has for activations, and `torch.ops.quantized_decomposed`.

    Raises:
        ImportError: nobody has defined these operators.
    """

    shift = 128
    weights_between_integers_only = True

    def __init__(self) -> None:
        self._operators: Any = torch.ops.quantized_decomposed
        if not hasattr(self._operators, "quantize_per_tensor"):
            raise ImportError(
                "torch.ops.quantized_decomposed has no operators: the package that reads the program defines them; "
                "import it first (for ExecuTorch: pip install 'octet-quant[executorch]', then import executorch.exir)"
            )

    def quantize(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        low, high = -self.shift, 255 - self.shift
        q: Tensor = self._operators.quantize_per_tensor(x, scale, zero_point - self.shift, low, high, torch.int8)
        return q

    def dequantize(self, q: Tensor, scale: float, zero_point: int) -> Tensor:
        low, high = -self.shift, 255 - self.shift
        x: Tensor = self._operators.dequantize_per_tensor(q, scale, zero_point - self.shift, low, high, torch.int8)
        return x

    def weight(self, q_weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        weight: Tensor = self._operators.dequantize_per_channel(q_weight, scale, zeros, 0, -127, 127, torch.int8)
        return weight

    def rows(self, x: Tensor, bits: int, *, per_row: bool) -> Tensor:
        # Finer roundings and one range for all rows have no integer kernel there.
        if bits != 8 or not per_row:
            return x
        scale, zero_point = self._operators.choose_qparams_per_token_asymmetric(x, torch.int8)
        q = self._operators.quantize_per_token(x, scale, zero_point, -128, 127, torch.int8)
        rounded: Tensor = self._operators.dequantize_per_token(
            q, scale, zero_point, -128, 127, torch.int8, torch.float32
        )
        return rounded

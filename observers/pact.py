"""PACT: the clipping level of an activation is learned (Choi et al. 2018, arXiv 1805.06085).

    y = clamp(x, 0, alpha), rounded to the steps of alpha (equations 1 and 2);
    d y / d alpha = 1 where x >= alpha, else 0 (equation 3).

The paper's alpha starts large and is drawn down by an L2 penalty on it: give the optimiser weight decay for these
parameters, or add `penalty()` to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from quant.kernels import ACTIVATION_U8, QParams, QScheme
from quant.observers._rounding import as_dtype, round_trip, scale_and_zero_point
from quant.observers.fake_quantize import FakeQuantizeBase, ScaleCollapsed
from torch import Tensor, nn


class PACTFakeQuantize(FakeQuantizeBase):
    """Quantise-dequantise in [0, alpha], or in [-alpha, alpha] with a symmetric scheme; per tensor.

    It replaces a ReLU: with an affine scheme negative values become zero. `set_observing(False)` stops the learning,
    as in LSQFakeQuantize.

    Parameters:
        alpha: float32, (1,), not (), which FSDP cannot shard. Its start needs no data, so there is always a range.

    Args:
        scheme: per tensor.
        alpha: where it starts; 10 in the paper's section 6.

    Raises:
        ScaleCollapsed: alpha is not positive and finite any more.
    """

    def __init__(self, scheme: QScheme = ACTIVATION_U8, *, alpha: float = 10.0) -> None:
        super().__init__(scheme)
        if scheme.axis is not None:
            raise ValueError(f"PACTFakeQuantize: axis is {scheme.axis}, expected None: alpha is one per tensor")
        if not 0.0 < alpha < float("inf"):
            raise ValueError(f"PACTFakeQuantize: alpha is {alpha}, expected positive and finite")
        self.alpha = nn.Parameter(torch.full((1,), float(alpha)))

    def forward(self, x: Tensor) -> Tensor:
        """Round as the switches say; x's dtype, shape and device."""
        self._check(x)
        if not self._is_on("quantizing"):
            return x
        if not torch.compiler.is_compiling():
            self._check_alpha()
        alpha = (self.alpha if self._is_on("observing") else self.alpha.detach()).view(())
        scale, zero_point = self._parameters_of_rounding()
        out: Tensor = _LearnedClip.apply(x, alpha, scale, zero_point, self.scheme)  # type: ignore[no-untyped-call]
        return out

    def qparams(self) -> QParams:
        self._check_alpha()
        return QParams(*self._parameters_of_rounding(), self.scheme)

    def current_scale(self) -> Tensor:
        return self._parameters_of_rounding()[0]

    def start(self, low: Tensor, high: Tensor) -> None:
        """Begin with alpha at the upper end, or at the larger one with a symmetric scheme."""
        with torch.no_grad():
            end = torch.maximum(-low, high) if self.scheme.symmetric else high
            self.alpha.copy_(torch.where(end > 0, end, self.alpha.reshape(end.shape)).reshape(1))

    def penalty(self) -> Tensor:
        """alpha squared, to be added to the loss with a factor of the user's (the paper's lambda)."""
        return self.alpha.square().sum()

    def _parameters_of_rounding(self) -> tuple[Tensor, Tensor]:
        high = self.alpha.detach().to(torch.float32).view(())
        return scale_and_zero_point(-high if self.scheme.symmetric else torch.zeros_like(high), high, self.scheme)

    def _check_alpha(self) -> None:
        alpha = self.alpha.item()
        if not 0.0 < alpha < float("inf"):
            raise ScaleCollapsed(
                f"{self._where()}: learned alpha is {alpha}, expected positive and finite; lower its learning rate or "
                "the factor of its penalty"
            )


class _LearnedClip(torch.autograd.Function):
    """PACT: gradients for x and alpha."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> Tensor:
        out, _ = round_trip(x.to(torch.float32), scale, zero_point, scheme, with_mask=False)
        ctx.save_for_backward(x, alpha)
        ctx.symmetric = scheme.symmetric
        return as_dtype(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, alpha = ctx.saved_tensors
        above = x >= alpha
        below = x <= -alpha if ctx.symmetric else x < 0.0
        grad_x = torch.where(above | below, 0.0, grad) if ctx.needs_input_grad[0] else None
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.where(above, grad, 0.0).to(torch.float32).sum()
            if ctx.symmetric:
                grad_alpha = grad_alpha - torch.where(below, grad, 0.0).to(torch.float32).sum()
        return grad_x, grad_alpha, None, None, None

"""Quantised numbers: the scheme (which integers), the parameters (which reals), and how to choose these.

Nothing here computes a layer; `reference.py` does, on the types of this file. Equation numbers are those of
kernels/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_MIN = 2.0**-126
"""Smallest scale ever chosen: the smallest normal float32, whose reciprocal is still finite."""


@dataclass(frozen=True)
class QScheme:
    """Which integers stand for a tensor's values.

    Attributes:
        dtype: torch.uint8 or torch.int8, how the integers are stored.
        quant_min, quant_max: smallest and largest integer used; fewer bits are a narrower range in the same dtype.
        symmetric: zero_point is fixed at the middle of the range: 0 for int8, 128 for uint8.
        axis: None for one scale per tensor, else the axis that has a scale per index.

    Raises:
        ValueError: a dtype that is not 8 bits, a range that is empty or does not fit the dtype, or a symmetric one that
            does not reach to both sides of its zero point.
    """

    dtype: torch.dtype
    quant_min: int
    quant_max: int
    symmetric: bool
    axis: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.uint8, torch.int8):
            raise ValueError(f"QScheme: dtype is {self.dtype}, expected torch.uint8 or torch.int8")
        info = torch.iinfo(self.dtype)
        if not info.min <= self.quant_min < self.quant_max <= info.max:
            raise ValueError(
                f"QScheme: range [{self.quant_min}, {self.quant_max}] is empty or outside {self.dtype}, "
                f"expected {info.min} <= quant_min < quant_max <= {info.max}"
            )

        if self.symmetric and not self.quant_min < self.symmetric_zero_point < self.quant_max:
            raise ValueError(
                f"QScheme: symmetric range [{self.quant_min}, {self.quant_max}] has no integer on both sides of its "
                f"zero point {self.symmetric_zero_point}"
            )

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point that a symmetric scheme uses: 0 for int8, 128 for uint8."""
        return 0 if self.dtype == torch.int8 else 128


ACTIVATION_U8 = QScheme(torch.uint8, 0, 255, symmetric=False)
"""Activations: uint8, affine, one scale per tensor (or, chosen at run time, one per row)."""

WEIGHT_S8 = QScheme(torch.int8, -127, 127, symmetric=True, axis=0)
"""Weights: int8, symmetric, one scale per output channel. -128 is left out so that -w is always representable."""


def weight_scheme(bits: int = 8, axis: int | None = 0) -> QScheme:
    """The symmetric int8-stored weight scheme of `bits` bits, 2 to 8."""
    if not 2 <= bits <= 8:
        raise ValueError(f"weight bits are {bits}, expected 2 to 8")
    top = 2 ** (bits - 1) - 1
    return QScheme(torch.int8, -top, top, symmetric=True, axis=axis)


@dataclass(frozen=True, eq=False)
class QParams:
    """Scale and zero point of one tensor: real = scale * (q - zero_point) (equation 1).

    Invariants: `scale` is float32, positive and finite, of shape () or (channels,); `zero_point` is int32 of the same
    shape and lies in [scheme.quant_min, scheme.quant_max], so that the real 0 is always exact; with `scheme.axis`
    None both have shape ().
    """

    scale: Tensor
    zero_point: Tensor
    scheme: QScheme

    def __post_init__(self) -> None:
        scale, zero_point, scheme = self.scale, self.zero_point, self.scheme
        if scale.dtype != torch.float32 or zero_point.dtype != torch.int32:
            raise ValueError(
                f"QParams: scale is {scale.dtype} and zero_point {zero_point.dtype}, expected float32 and int32"
            )
        if scale.shape != zero_point.shape or scale.dim() > 1 or (scheme.axis is None) != (scale.dim() == 0):
            raise ValueError(
                f"QParams: scale has shape {tuple(scale.shape)} and zero_point {tuple(zero_point.shape)}, expected "
                f"{'()' if scheme.axis is None else '(channels,)'} for both (axis={scheme.axis})"
            )
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ValueError(f"QParams: scale must be positive and finite, got {scale}")
        if not bool(((zero_point >= scheme.quant_min) & (zero_point <= scheme.quant_max)).all()):
            raise ValueError(
                f"QParams: zero_point {zero_point} lies outside [{scheme.quant_min}, {scheme.quant_max}], so zero "
                "would not be exact"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QParams):
            return NotImplemented
        return (
            self.scheme == other.scheme
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )

    def quantize(self, x: Tensor) -> Tensor:
        """float32 of any shape -> scheme.dtype of the same shape (equation 2).

        Rounds half to even and clamps; +-inf clamp to the ends, NaN becomes zero_point.
        """
        scale, zero_point = self._broadcast(x.dim())
        q = torch.round(x * (1.0 / scale))
        q = torch.nan_to_num(q, nan=0.0, posinf=float("inf"), neginf=float("-inf")) + zero_point
        return q.clamp(self.scheme.quant_min, self.scheme.quant_max).to(self.scheme.dtype)

    def dequantize(self, q: Tensor) -> Tensor:
        """scheme.dtype of any shape -> float32 of the same shape (equation 1)."""
        scale, zero_point = self._broadcast(q.dim())
        return (q.to(torch.int32) - zero_point).to(torch.float32) * scale

    def ends(self) -> Tensor:
        """The real values of quant_min and quant_max, (channels or 1, 2) float64 on the CPU."""
        scale, zero_point = self.scale.reshape(-1).double(), self.zero_point.reshape(-1)
        low, high = self.scheme.quant_min - zero_point, self.scheme.quant_max - zero_point
        return torch.stack((low * scale, high * scale), dim=1).cpu()

    def _broadcast(self, dim: int) -> tuple[Tensor, Tensor]:
        axis = self.scheme.axis
        if axis is None:
            return self.scale, self.zero_point
        if not -dim <= axis < dim:
            raise ValueError(f"QParams: axis {axis} does not exist in a tensor of {dim} dimensions")
        shape = [1] * dim
        shape[axis] = -1
        return self.scale.view(shape), self.zero_point.view(shape)


def choose_qparams(minimum: Tensor, maximum: Tensor, scheme: QScheme) -> QParams:
    """Scale and zero point that cover [minimum, maximum] and zero (equations 3 and 4).

    Args:
        minimum, maximum: float32, shape () or (channels,) as scheme.axis says; finite, minimum <= maximum. The range
            is widened to contain 0, so that zero is exact.
        scheme: what to choose for. A symmetric scheme covers [-m, m], m = max(|minimum|, |maximum|).

    Returns:
        QParams. An empty range (both ends zero) gives scale SCALE_MIN and the zero point of zero.

    Raises:
        ValueError: NaN or inf in the range, or minimum > maximum.
    """
    if not bool((torch.isfinite(minimum) & torch.isfinite(maximum)).all()):
        raise ValueError(f"choose_qparams: the range must be finite, got minimum {minimum} and maximum {maximum}")
    if bool((minimum > maximum).any()):
        raise ValueError(f"choose_qparams: minimum {minimum} exceeds maximum {maximum}")
    low = torch.clamp(minimum.to(torch.float32), max=0.0)
    high = torch.clamp(maximum.to(torch.float32), min=0.0)
    quant_min, quant_max = scheme.quant_min, scheme.quant_max
    if scheme.symmetric:
        middle = scheme.symmetric_zero_point
        bound = torch.maximum(-low, high)
        scale = divided(bound, min(quant_max - middle, middle - quant_min))
        scale = scale.clamp(min=SCALE_MIN)
        zero_point = torch.full_like(scale, middle, dtype=torch.int32)
        return QParams(scale, zero_point, scheme)
    scale, zero_point = affine_qparams(low, high, quant_min, quant_max)
    return QParams(scale, zero_point.to(torch.int32), scheme)


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, the same on every device: with a number, CUDA multiplies by the number's inverse."""
    return x / by if x.device.type == "cpu" else x / torch.full_like(x, by)


def affine_qparams(low: Tensor, high: Tensor, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """Equations 3 and 4 on ranges that already contain zero; float32 in, float32 (integral zero point) out.

    The operations and their order are a contract: the C++ kernels repeat them bit for bit. Each end is divided
    before the subtraction, because high - low overflows float32 for ranges beyond half of its maximum.
    """
    steps = float(quant_max - quant_min)
    scale = (divided(high, steps) - divided(low, steps)).clamp(min=SCALE_MIN)
    zero_point = (quant_min - torch.round(low * (1.0 / scale))).clamp(quant_min, quant_max)
    return scale, zero_point


def quantize_weight(weight: Tensor, *, bits: int = 8, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric per-channel int8 of a float weight.

    Args:
        weight: float32, any shape of at least one dimension, finite.
        bits: 2 to 8, the range [-(2**(bits-1)-1), 2**(bits-1)-1].
        axis: of the output channels.

    Returns:
        (q_weight int8 of the same shape and contiguous, scale float32 (channels,)). A channel of zeros has scale 1.
    """
    weight = weight.detach().to(torch.float32)
    scale = weight_scale(weight, bits=bits, axis=axis)
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    return QParams(scale, zero_point, weight_scheme(bits, axis)).quantize(weight).contiguous(), scale


def weight_scale(weight: Tensor, *, bits: int = 8, axis: int = 0) -> Tensor:
    """The scale that `quantize_weight` takes, float32 (channels,), in one look at the float32 weight.

    A channel that holds NaN or inf has such a scale.
    """
    flat = weight.transpose(0, axis).flatten(1) if weight.dim() > 1 else weight[:, None]
    bound = flat.abs().amax(dim=1) if flat.shape[1] else flat.new_zeros(flat.shape[0])
    scale = divided(bound, 2 ** (bits - 1) - 1).clamp(min=SCALE_MIN)
    return torch.where(bound == 0, torch.ones_like(bound), scale)

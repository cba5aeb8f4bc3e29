"""What the runtimes and processors that a file is for ask of it."""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = ("vnni", "avx2")
"""Processors: with instructions that add four products of 8 bits at once (AVX-512 VNNI, AVX-VNNI, AMX, ARM), or
without, where two products are added in 16 bits."""


@dataclass(frozen=True)
class Runtime:
    """A runtime, and what it computes otherwise than others.

    Attributes:
        name: as `export_onnx` takes it.
        title: for people.
        signed: activations are int8, symmetric (the zero point 0).
        rounds_convolutions: a convolution is computed in integers only where its output is rounded.
        clamps_integers: the same holds for clamps that QuantizeLinear does not make redundant.
        moves_integers: moves are written on integers; else between a DequantizeLinear and a QuantizeLinear.
        padded_means: average pools with padding are right for zero points other than 0.
        joins_dynamic: DynamicQuantizeLinear and MatMulInteger are one integer kernel; else the weight alone is int8.
        transposes: transposed convolutions are integers as they are; else they are written as the convolution of
            their phases, and moves, which OpenVINO computes wrongly.
        splits_channels: a reshape may take the channels of a convolution's integers apart. OpenVINO (2026.4) moves the
            scales of its weight behind the reshape, to other channels.
        fast_gather: a table as Gather is not slower than the function itself.
        multiplies_unsigned: uint8 weights are multiplied as integers, too.
        rounds_by_inverse: inputs are rounded by the inverse of their scale, as the model does it; QuantizeLinear
            divides, and a float that lies halfway between two steps may go the other way.
        joins_sums: an Add between roundings is an integer kernel that rounds some sums otherwise than the model.
        joins_roundings: a value that is rounded again to another range is rounded once, to a range that is neither.
    """

    name: str
    title: str
    signed: bool = False
    rounds_convolutions: bool = False
    clamps_integers: bool = False
    moves_integers: bool = False
    padded_means: bool = True
    joins_dynamic: bool = False
    transposes: bool = False
    splits_channels: bool = True
    fast_gather: bool = False
    multiplies_unsigned: bool = False
    rounds_by_inverse: bool = False
    joins_sums: bool = False
    joins_roundings: bool = False


RUNTIMES = {
    "ort": Runtime(
        "ort",
        "ONNX Runtime",
        rounds_convolutions=True,
        moves_integers=True,
        clamps_integers=True,
        joins_dynamic=True,
        multiplies_unsigned=True,
        rounds_by_inverse=True,
        joins_sums=True,
        joins_roundings=True,
    ),
    "openvino": Runtime(
        "openvino", "OpenVINO", padded_means=False, transposes=True, splits_channels=False, fast_gather=True
    ),
    "tensorrt": Runtime("tensorrt", "TensorRT", signed=True),
}
"""By the name that `export_onnx` takes."""

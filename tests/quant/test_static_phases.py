"""Transposed convolutions by phases: the operator's own answer, to the bit, whatever the geometry."""

from __future__ import annotations

import pytest
import torch
from quant.kernels.reference_ops import OPS

from quant.runtime.layers.polyphase import Polyphase
from quant.runtime.layers.products import TransposedProduct

# (kernel, stride, padding, output padding, groups)
GEOMETRIES: dict[str, tuple[list[int], list[int], list[int], list[int], int]] = {
    "doubling": ([2, 2], [2, 2], [0, 0], [0, 0], 1),
    "generator": ([4, 4], [2, 2], [1, 1], [0, 0], 1),
    "uneven taps": ([3, 5], [2, 3], [1, 0], [1, 2], 2),
    "kernel below stride": ([1, 2], [3, 3], [0, 0], [2, 0], 1),
    "stride 1": ([3, 3], [1, 1], [2, 1], [0, 0], 4),
    "sequence": ([16], [8], [4], [0], 2),
    "volume": ([3, 2, 2], [2, 2, 1], [1, 0, 0], [1, 0, 0], 1),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("kernel", "stride", "padding", "more", "groups"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_phases_give_the_operators_answer(
    kernel: list[int], stride: list[int], padding: list[int], more: list[int], groups: int, bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (2, 8, *[5, 4, 3][: len(kernel)]), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (8, 12 // groups, *kernel), dtype=torch.int8)
    q_bias = torch.randint(-9999, 9999, (12,), dtype=torch.int32) if bias else None
    multiplier = torch.rand(12) * 1e-3
    product = TransposedProduct(stride, padding, [1] * len(kernel), groups, more)
    phases = Polyphase(product, weight, q_bias, multiplier)
    got = OPS["conv_u8s8_u8"](x, 77, phases.q_weight, phases.q_bias, *phases.settings, phases.multiplier, 99, 0, 255)
    places = tuple(product.settings.values())
    expected = OPS["conv_transpose_u8s8_u8"](x, 77, weight, q_bias, *places, multiplier, 99, 0, 255)
    assert torch.equal(phases.in_order(got, x.shape[2:]), expected)

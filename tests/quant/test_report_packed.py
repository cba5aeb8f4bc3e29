"""Packed weights in the report: what compiled kernels hold besides a model's buffers; 0 where nothing is packed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from quant.kernels import ops
from torch import Tensor, nn

import quant

COMPILED = not ops.extension_problem()


class Wide(nn.Module):
    """Recurrent layers and attention of whose weights some have no entry of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.mix = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True), nn.MultiheadAttention(64, 4)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(x)[0]
        return self.head(self.mix(y, y, y)[0])


def image_net() -> nn.Module:
    """Of every form that static layers are packed in: Winograd's, depthwise, of groups, of phases, a product's."""
    convolutions = [
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Conv2d(64, 64, 3, groups=64),
        nn.Conv2d(64, 32, 3, groups=2),
        nn.ConvTranspose2d(32, 16, 4, stride=2),
    ]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def statically(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_static(model, [x], progress=False)


def dynamically(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_dynamic(model)


CASES: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], nn.Module], list[str]]
] = {
    "convolutions": (image_net, (2, 32, 32, 32), statically, ["0", "1", "2", "3", "6"]),
    "static recurrent": (Wide, (2, 6, 16), statically, ["rnn", "head"]),
    "dynamic": (Wide, (2, 6, 16), dynamically, ["rnn", "mix", "head"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_packed_weights_are_counted(case: str) -> None:
    make, shape, quantized, layers = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(shape)
    q = quantized(make().eval(), x)
    before = quant.summary(q)
    q(x)
    after = quant.summary(q)
    assert after == before, "what a process has packed is no part of the outcome"
    assert after.packed is not None
    data = json.loads(json.dumps(after.to_dict()))
    assert (data["bytes_packed"], data["packed"]) == (sum(after.packed.values()), after.packed)
    assert str(after).endswith(f"\npacked weights in this process: {after.bytes_packed / 1024:.1f} KiB")
    assert quant.summary(copy.deepcopy(q.eval())).bytes_packed <= before.bytes_packed, "a copy packs its own"
    if not COMPILED:
        assert after.packed == {}
        return
    assert set(after.packed) - {""} == set(layers)
    for name in layers:  # a weight is a byte; small ones are filled up to whole blocks
        weights = after[name].bytes_before // 4
        assert weights // 2 < after.packed[name] <= 10 * weights + 65536, name


@pytest.mark.skipif(not COMPILED, reason="nothing is packed without the compiled kernels")
def test_a_convolution_is_packed_by_the_first_call() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 32, 32, 32)
    q = statically(nn.Sequential(nn.Conv2d(32, 64, 3, padding=1)).eval(), x)
    assert quant.summary(q).packed == {}
    assert str(quant.summary(q)).endswith("\npacked weights in this process: 0.0 KiB")
    q(x)
    assert quant.summary(q).bytes_packed >= 32 * 64 * 9


def test_a_tensor_of_two_layers_counts_once() -> None:
    q = nn.Sequential(quant.quantize_dynamic(nn.Linear(64, 64)), quant.quantize_dynamic(nn.Linear(64, 64)))
    q[1].q_weight = q[0].q_weight
    q(torch.randn(1, 64))
    assert list(quant.summary(q).packed or ()) == (["0"] if COMPILED else [])


def test_a_float_model_has_no_packed_weights() -> None:
    report = quant.summary(nn.Linear(4, 4))
    assert report.bytes_packed == 0
    assert "packed" not in str(report)

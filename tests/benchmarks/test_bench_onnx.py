"""How far last bits move a model's outputs, which `make bench-onnx` prints beside what ONNX Runtime differs by."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

import quant


class Words(nn.Module):
    """Whole numbers in; the floats of its layer norm decide the ranges of its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.words(words)))


def test_last_bits_behind_float_layers_move_the_outputs_of_a_dynamic_model(load: Callable[[str], ModuleType]) -> None:
    torch.manual_seed(0)
    bench, words = load("bench_onnx"), torch.randint(20, (3, 5))
    model = quant.quantize_dynamic(Words().eval())
    with torch.no_grad():
        before = model(words)
        moved = bench.moved_by_last_bits(model, (words,))
        assert torch.equal(model(words), before)
    assert 0 < moved < 0.01
    assert moved == bench.moved_by_last_bits(model, (words,))


def test_a_program_of_integers_moves_by_its_inputs_alone(load: Callable[[str], ModuleType]) -> None:
    torch.manual_seed(0)
    bench, words, x = load("bench_onnx"), torch.randint(20, (3, 5)), torch.randn(8, 16)
    q = quant.quantize_static(nn.Sequential(nn.Linear(16, 4)).eval(), [x], progress=False)
    assert bench.moved_by_last_bits(q, (x,)) < 0.1
    only_words = quant.quantize_dynamic(nn.Sequential(nn.Embedding(20, 16)).eval())
    assert bench.moved_by_last_bits(only_words, (words,)) is None


def test_the_share_of_integer_nodes(load: Callable[[str], ModuleType]) -> None:
    kernels = {"QLinearConv": 3, "MaxPool": 1, "Reshape": 4, "Softmax": 2, "Sum": 1}
    assert load("bench_onnx").nodes(kernels) == (4, 7, "2 Softmax, 1 Sum")

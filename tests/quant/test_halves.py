"""Models in bfloat16 and float16: int8 weights from the half type, the model's own type in and out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import quant

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(48, 24), (5, 3, 48)),
    "lstm": (lambda: nn.LSTM(48, 24, 2, bidirectional=True), (7, 3, 48)),
    "projected": (lambda: nn.LSTM(48, 24, proj_size=8, batch_first=True), (3, 7, 48)),
    "gru": (lambda: nn.GRU(48, 24, batch_first=True), (3, 7, 48)),
    "rnn": (lambda: nn.RNN(48, 24), (7, 3, 48)),
    "lstm_cell": (lambda: nn.LSTMCell(48, 24), (3, 48)),
    "gru_cell": (lambda: nn.GRUCell(48, 24), (3, 48)),
    "rnn_cell": (lambda: nn.RNNCell(48, 24), (3, 48)),
    "attention": (lambda: nn.MultiheadAttention(48, 4, add_bias_kv=True), (7, 3, 48)),
    "cross": (lambda: nn.MultiheadAttention(48, 4, kdim=48, vdim=24), (7, 3, 48)),
}
LAYERS = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A float32 layer, and the tensors that it is called with."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    x = torch.randn(shape)
    if "Attention" in type(layer := make().eval()).__name__:
        return layer, (x, x, x[..., :24] if kind == "cross" else x)
    return layer, (x,)


def tensors(tree: Any) -> list[Tensor]:
    """Those of nested tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [one for item in tree if item is not None for one in tensors(item)]


def error(expected: Any, got: Any) -> float:
    """Of the worst output, relative to its norm."""
    pairs = list(zip(tensors(expected), tensors(got), strict=True))
    return max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in pairs)


@torch.no_grad()
@HALVES
@LAYERS
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's of its own float layer
def test_a_half_layer_becomes_int8_and_answers_in_its_own_type(kind: str, dtype: torch.dtype) -> None:
    layer, inputs = made(kind)
    expected = layer(*inputs)
    reference = error(expected, quant.quantize_dynamic(layer)(*inputs))
    q = quant.quantize_dynamic(copy.deepcopy(layer).to(dtype))
    got = q(*(x.to(dtype) for x in inputs))
    assert {one.dtype for one in tensors(got)} == {dtype}
    # Inputs, weights and the answer are rounded to the half type besides: 2**-9 of each in bfloat16.
    assert error(expected, got) < 1.5 * reference + 5 * 2**-8
    assert all(entry.outcome == "int8" for entry in quant.summary(q))


@torch.no_grad()
@HALVES
@LAYERS
def test_it_takes_inputs_of_any_float_type(kind: str, dtype: torch.dtype) -> None:
    layer, inputs = made(kind)
    q = quant.quantize_dynamic(layer.to(dtype))
    half = q(*(x.to(dtype) for x in inputs))
    exact = q(*(x.to(dtype).float() for x in inputs))
    assert all(torch.equal(a, b) for a, b in zip(tensors(half), tensors(exact), strict=True))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        q(*(x.to(torch.int64) for x in inputs))


@torch.no_grad()
@HALVES
@LAYERS
def test_an_int8_layer_can_be_turned_into_a_half_one_and_back(kind: str, dtype: torch.dtype) -> None:
    layer, inputs = made(kind)
    q = quant.quantize_dynamic(layer)
    expected = q(*inputs)
    turned = copy.deepcopy(q).to(dtype)
    assert {one.dtype for one in tensors(turned(*inputs))} == {dtype}
    assert {buffer.dtype for buffer in turned.buffers()} == {buffer.dtype for buffer in q.buffers()}
    assert error(expected, turned(*inputs)) < 5 * 2**-8
    back = turned.float()(*inputs)
    if kind != "attention":  # whose learned keys are the user's own parameters, rounded by then
        assert all(torch.equal(a, b) for a, b in zip(tensors(expected), tensors(back), strict=True))


@torch.no_grad()
@HALVES
def test_tables_and_what_is_tied_to_them(dtype: torch.dtype) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
            self.head.weight = self.words.weight
            self.alone, self.bags = nn.Embedding(50, 32), nn.EmbeddingBag(50, 32, mode="sum")

        def forward(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            x = self.words(tokens) + self.alone(tokens)
            return self.head(x), self.bags(tokens, per_sample_weights=weights)

    torch.manual_seed(0)
    model = Language().eval()
    tokens, weights = torch.randint(50, (4, 6)), torch.rand(4, 6)
    expected = model(tokens, weights)
    q = quant.quantize_dynamic(model.to(dtype))
    got = q(tokens, weights.to(dtype))
    assert {one.dtype for one in got} == {dtype}
    assert error(expected, got) < 0.03
    assert q.words.weight.dtype == q.head.weight.dtype == q.alone.weight.dtype == dtype


@torch.no_grad()
@HALVES
def test_packed_sequences_and_states_in_half(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(16, 24).eval()
    q = quant.quantize_dynamic(copy.deepcopy(layer).to(dtype))
    lengths = [torch.randn(n, 16) for n in (5, 2, 4)]
    state = (torch.randn(1, 3, 24), torch.randn(1, 3, 24))
    expected, (h, c) = layer(pack_sequence(lengths, enforce_sorted=False), state)
    got, (h_half, c_half) = q(
        pack_sequence([x.to(dtype) for x in lengths], enforce_sorted=False), tuple(one.to(dtype) for one in state)
    )
    assert got.data.dtype == h_half.dtype == c_half.dtype == dtype
    assert error((expected.data, h, c), (got.data, h_half, c_half)) < 0.03


@torch.no_grad()
@HALVES
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_half_model_is_saved_scripted_and_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 32), nn.LayerNorm(32), nn.TransformerEncoderLayer(32, 4, 64), nn.Linear(32, 8)]
        return nn.Sequential(*layers).eval().to(dtype)

    model, x = make(), torch.randn(6, 2, 16).to(dtype)
    q = quant.quantize_dynamic(model)
    assert error(model(x), q(x)) < 0.05
    quant.save(q, tmp_path / "half.q8")
    restored = quant.load(tmp_path / "half.q8", model=make())
    assert torch.equal(restored(x), q(x))
    scripted = torch.jit.script(quant.quantize_dynamic(nn.Linear(16, 4).to(dtype)))
    assert scripted(x).dtype == dtype

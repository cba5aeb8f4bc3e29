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
from quant.runtime.trees import leaves

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


class Net(nn.Module):
    """Convolutions, a residual sum, float steps, and outputs of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        self.last = nn.LayerNorm(5)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = torch.relu(self.norm(self.one(x)))
        y = torch.relu(y + self.two(y)).mean((2, 3))
        y = self.last(self.head(y if scale is None else y * scale))
        return {"logits": y, "chances": y.float().softmax(-1), "best": y.argmax(-1)}


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Net().eval().to(dtype)


IMAGES = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
@HALVES
def test_a_half_model_is_static_and_answers_in_its_own_types(dtype: torch.dtype, tmp_path: Path) -> None:
    model, exact, x = net(dtype), net(torch.float32), IMAGES.to(dtype)
    q = quant.quantize_static(model, [x], progress=False)
    assert all(quant.summary(q)[name].outcome == "int8" for name in ("one", "norm", "two", "head"))
    reference = quant.quantize_static(exact, [IMAGES], progress=False)
    expected, got = exact(IMAGES), q(x)
    assert {name: one.dtype for name, one in got.items()} == {
        "logits": dtype,
        "chances": torch.float32,
        "best": torch.int64,
    }
    before = {entry.name: entry.bytes_before for entry in quant.summary(reference)}
    assert quant.summary(q)["two"].bytes_before == before["two"] // 2
    noise = error(expected["logits"], reference(IMAGES)["logits"])
    assert error(expected["logits"], got["logits"]) < 1.5 * noise + 5 * 2**-8
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    quant.save(q, tmp_path / "half.q8")
    restored = quant.load(tmp_path / "half.q8", model=net(dtype))
    other = torch.randn(2, 3, 20, 20).to(dtype)
    for name, one in restored(other).items():
        assert torch.equal(one, q(other)[name])
    wide = quant.load(tmp_path / "half.q8", model=net(torch.float32))
    assert torch.equal(wide(other.float())["logits"].to(dtype), q(other)["logits"])


@torch.no_grad()
@HALVES
def test_a_loaded_model_answers_in_the_types_of_the_float_model_that_is_given(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    quant.save(quant.quantize_static(net(dtype), [IMAGES.to(dtype)], progress=False), tmp_path / "half.q8")
    for given in (dtype, torch.float32, other):
        loaded = quant.load(tmp_path / "half.q8", model=net(given))
        assert loaded(IMAGES.to(given))["logits"].dtype == given
    with pytest.raises(TypeError, match=r"expected torch\.float32, got"):
        quant.load(tmp_path / "half.q8", model=net(torch.float32))(IMAGES.to(dtype))


@HALVES
def test_the_integers_of_a_half_model_are_those_that_training_saw(dtype: torch.dtype) -> None:
    x = IMAGES.to(dtype)
    p = quant.prepare_qat(net(dtype), x).train()
    optimizer = torch.optim.SGD(p.parameters(), lr=0.01)
    for _ in range(25):
        optimizer.zero_grad()
        p(x)["logits"].float().square().mean().backward()
        optimizer.step()
    q = quant.convert(p.eval())
    assert p(x)["logits"].dtype == q(x)["logits"].dtype == dtype
    assert quant.parity(p, q, [x]).holds


@torch.no_grad()
@HALVES
def test_a_half_model_is_calibrated_step_by_step_and_compared(dtype: torch.dtype) -> None:
    model, x = net(dtype), IMAGES.to(dtype)
    prepared = quant.prepare(model, {"x": x, "scale": torch.rand(8).to(dtype)})
    batches = [{"x": x, "scale": torch.rand(8).to(dtype)} for _ in range(3)]
    quant.calibrate.run(prepared, batches, progress=False)
    q = quant.convert(prepared)
    assert q(**batches[0])["logits"].dtype == dtype
    assert quant.parity(prepared, q, batches).holds
    comparison = quant.compare(model, q, batches)
    assert min(step.sqnr for step in comparison.steps) > 25.0
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert copy.deepcopy(q)(**batches[0])["logits"].dtype == dtype


@torch.no_grad()
@HALVES
@pytest.mark.parametrize("kind", ["linear", "lstm", "gru_cell"])
def test_a_half_layer_may_be_the_whole_static_model(kind: str, dtype: torch.dtype) -> None:
    layer, inputs = made(kind)
    expected = layer(*inputs)
    given = tuple(x.to(dtype) for x in inputs)
    q = quant.quantize_static(layer.to(dtype), [given], progress=False)
    assert {one.dtype for one in tensors(q(*given))} == {dtype}
    assert error(expected, q(*given)) < 0.05


FLOAT_LAYERS = {
    "Linear": lambda: nn.Linear(16, 16),
    "LSTM": lambda: nn.LSTM(16, 16, 2, bidirectional=True),
    "GRU": lambda: nn.GRU(16, 16),
    "LSTMCell": lambda: nn.LSTMCell(16, 16),
    "GRUCell": lambda: nn.GRUCell(16, 16),
    "MultiheadAttention": lambda: nn.MultiheadAttention(16, 2),
}


@pytest.mark.parametrize("name", FLOAT_LAYERS)
@torch.no_grad()
def test_a_float32_layer_takes_a_half_input_under_autocast_alone(name: str) -> None:
    torch.manual_seed(0)
    model = FLOAT_LAYERS[name]().eval()
    q, x = quant.quantize_dynamic(model), torch.randn(5, 2, 16).bfloat16()
    x = x[0] if name.endswith("Cell") else x
    given = (x, x[:3], x[:3]) if name == "MultiheadAttention" else (x,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = list(leaves(q(*given))), list(leaves(model(*given)))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0.05, rtol=0.05)
    with pytest.raises(
        TypeError, match=r"expected (Float|torch\.float32); call it with x\.float\(\), or under torch\.autocast"
    ):
        q(*given)

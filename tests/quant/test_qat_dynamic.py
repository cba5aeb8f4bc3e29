"""Training of layers that become dynamic: the weights are those that convert stores, and gradients reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.qat import observe_only
from quant.recipe import QConfig, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Tagger(nn.Module):
    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.encoder, self.head = encoder, nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(tokens))[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention, self.head = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Stepping(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(20, 8), cell, nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.cell(self.words(tokens[:, 0]))
        return self.head(h[0] if isinstance(h, tuple) else h)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


class Placed(nn.Module):
    """Looks up a buffer, as the positions of transformers' models are."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(20, 8), nn.Embedding(7, 8), nn.Linear(8, 3)
        self.register_buffer("places", torch.arange(7), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens) + self.positions(self.places))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Tagger(nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1), 12),
    "projected": lambda: Tagger(nn.LSTM(8, 6, proj_size=4), 4),
    "gru": lambda: Tagger(nn.GRU(8, 6, bias=False), 6),
    "rnn": lambda: Tagger(nn.RNN(8, 6, nonlinearity="relu"), 6),
    "lstm cell": lambda: Stepping(nn.LSTMCell(8, 6)),
    "gru cell": lambda: Stepping(nn.GRUCell(8, 6)),
    "rnn cell": lambda: Stepping(nn.RNNCell(8, 6)),
    "attention": Attending,
    "bags": Bags,
    "positions in a buffer": Placed,
}
every_model = pytest.mark.parametrize("name", list(MODELS))


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randint(1, 20, (5, 7))


def train(prepared: nn.Module, tokens: Tensor, steps: int = 12) -> list[float]:
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.01)
    prepared.train()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = prepared(tokens)
        loss = F.cross_entropy(y.reshape(-1, 3), torch.arange(y.numel() // 3) % 3)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@every_model
@pytest.mark.parametrize("bits", [8, 4])
def test_trains_and_converts(name: str, bits: int) -> None:
    model, tokens = make(name)
    prepared = quant.prepare_qat(model, tokens, Recipe(default=QConfig(weight_bits=bits)))
    before = {key: value.clone() for key, value in prepared.named_parameters()}
    losses = train(prepared, tokens)
    assert losses[-1] < losses[0]
    still = {key for key, value in prepared.named_parameters() if torch.equal(before[key], value)}
    assert still <= {"cell.weight_hh"}  # its state is zero, so there is nothing to learn
    assert [key for key, _ in prepared.named_parameters()] == [key for key, _ in model.named_parameters()]
    prepared.eval()
    converted = quant.convert(prepared)
    with torch.no_grad():
        trained, deployed = prepared(tokens), converted(tokens)
    # Activations of 8 bits per row are all that differs.
    assert float((trained - deployed).norm() / trained.norm()) < 0.05


@every_model
def test_observing_is_the_float_model(name: str) -> None:
    model, tokens = make(name)
    prepared = quant.prepare_qat(model, tokens)
    observe_only(prepared)
    torch.manual_seed(1)
    expected = model.train()(tokens)
    torch.manual_seed(1)
    torch.testing.assert_close(prepared.train()(tokens), expected)


def weights_of(converted: nn.Module) -> dict[str, Any]:
    layer = converted.get_submodule("encoder")
    return {name: getattr(layer, name) for name in ("weight_ih_l0", "weight_hh_l0")}


@pytest.mark.parametrize("bits", [8, 3])
def test_rounded_weights_are_those_that_are_deployed(bits: int) -> None:
    """Per gate row, to the bit."""
    from quant.qat.dynamic import with_rounded_weights

    torch.manual_seed(0)
    layer, qconfig = nn.LSTM(40, 6), QConfig(weight_bits=bits, activation_bits=8)
    twin = with_rounded_weights(layer, qconfig)
    deployed = quant.quantize_dynamic(layer, Recipe(default=qconfig))
    for name in ("weight_ih_l0", "weight_hh_l0"):
        assert torch.equal(getattr(twin, name), getattr(deployed, name)), name
        assert not torch.equal(getattr(twin, name), getattr(layer, name))
    assert twin.bias_ih_l0 is layer.bias_ih_l0
    x = torch.randn(3, 2, 40)
    assert torch.equal(layer(x)[0], nn.LSTM.forward(layer, x)[0])
    twin(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_bad_weight_is_refused_by_name() -> None:
    model, tokens = make("gru")
    prepared = quant.prepare_qat(model, tokens).train()
    with torch.no_grad():
        prepared.encoder.weight_hh_l0[0] = torch.nan
    with pytest.raises(ValueError, match="layer 'encoder'"):
        prepared(tokens)


def test_the_recipe_leaves_layers_float() -> None:
    model, tokens = make("lstm")
    prepared = quant.prepare_qat(model, tokens, Recipe({"encoder": None, "words": None}))
    prepared.train()(tokens)
    converted = quant.convert(prepared)
    assert {entry.name: entry.outcome for entry in quant.summary(converted)}["encoder"] == "float"


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.bags = nn.Embedding(50, 16, padding_idx=0), nn.EmbeddingBag(50, 16, mode="mean")
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.fc(self.rows(words))
        out: Tensor = self.out(torch.relu(self.mix(x, x, x, need_weights=False)[0].mean(1) + self.bags(words)))
        return out


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_tables_and_attention_train_and_convert_to_what_eval_showed(bits: int) -> None:
    words, classes = torch.randint(0, 50, (32, 6)), torch.randint(0, 4, (32,))
    recipe = quant.Recipe({"rows": quant.QConfig(weight_bits=bits), "bags": quant.QConfig(weight_bits=bits)})
    prepared = quant.prepare_qat(Tables(), words, recipe).train()
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(words), classes).backward()
        optimizer.step()
    assert [name for name, weight in prepared.named_parameters() if weight.grad is None] == []
    prepared.eval()
    converted: Any = quant.convert(prepared)
    agreement = quant.parity(prepared, converted, [words])
    assert agreement.holds, agreement
    assert {"rows", "bags"} <= {step.name for step in agreement}
    assert {quant.summary(converted)[name].outcome for name in ("rows", "bags")} == {f"int{bits}"}
    assert quant.summary(converted)["mix"].outcome == "int8"
    with torch.no_grad():
        expected = prepared(words)
        # What training cannot round is the attention's inputs, by ranges of their own at each call.
        assert (converted(words) - expected).norm() / expected.norm() < 0.01
    converted.rows.rows[:, 0] += 1
    assert not quant.parity(prepared, converted, [words]).holds

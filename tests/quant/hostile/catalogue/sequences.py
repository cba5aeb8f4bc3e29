"""Sequences: packed and padded, recurrent states, attention masks, key-value caches, streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

from ..cases import WIDTH, Inputs, case, steps, uniform


def with_lengths(batch: int, length: int, index: int) -> Inputs:
    lengths = torch.tensor([length - i % (length - 1) for i in range(batch)])
    return uniform(batch, length, WIDTH), lengths


def ragged(batch: int, length: int, index: int) -> Inputs:
    return ([uniform(1 + (i + index) % length, WIDTH) for i in range(4)],)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(WIDTH, 32, batch_first=True), nn.Linear(32, WIDTH)


@case("packed and padded again, around a GRU", with_lengths)
class Packs(Reader):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(y)


@case("a list of sequences of other lengths, padded", ragged)
class Pads(Reader):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.out(self.rnn(pad_sequence(parts, batch_first=True))[0])


@case("a packed sequence as the input and as an output", lambda b, n, i: (pack_sequence(ragged(b, n, i)[0], False),))
class PackedInput(Reader):
    def forward(self, x: PackedSequence) -> Any:
        y, state = self.rnn(x)
        return y, self.out(state)


def state_or_none(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, length, WIDTH), uniform(batch, 32) if index % 2 else None


@case("a cell in the user's loop, with an initial state or without", state_or_none)
class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.out(state))
        return torch.stack(outputs, 1)


@case("a GRU cell as the whole model", lambda b, n, i: (uniform(b, WIDTH), uniform(b, 32)))
def gru_cell() -> nn.Module:
    return nn.GRUCell(WIDTH, 32)


@case("an LSTM cell as the whole model", lambda b, n, i: (uniform(b, WIDTH), (uniform(b, 32), uniform(b, 32))))
def lstm_cell() -> nn.Module:
    return nn.LSTMCell(WIDTH, 32)


@case("an RNN cell as the whole model", lambda b, n, i: (uniform(b, WIDTH), uniform(b, 32)))
def rnn_cell() -> nn.Module:
    return nn.RNNCell(WIDTH, 32)


@case("greedy decoding until a token says stop, fed by its own output", lambda b, n, i: (torch.randint(1, 8, (2, 3)),))
class Greedy(nn.Module):
    """The chosen tokens hang on the inputs alone, so that rounding cannot change them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        last, states = tokens[:, -1], []
        while bool((last > 0).any()) and len(states) < 8:
            states.append(self.out(self.table(last)))
            last = (last - 1).clamp(min=0)
        return torch.stack(states, 1), last


class Cache:
    """Keys and values of each layer, grown by `update`; as Hugging Face's DynamicCache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.keys) <= layer:
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key], 1)
            self.values[layer] = torch.cat([self.values[layer], value], 1)
        return self.keys[layer], self.values[layer]

    def length(self) -> int:
        return self.keys[0].size(1) if self.keys else 0


class DecoderLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        mask = torch.ones(x.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - x.size(1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(i) for i in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor, cache: Cache | None = None, use_cache: bool = True) -> tuple[Tensor, Cache | None]:
        if cache is None and use_cache:
            cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x), cache


def prefill_or_step(batch: int, length: int, index: int) -> Inputs:
    if index % 2 == 0:
        return {"x": uniform(batch, length, WIDTH)}
    cache = Cache()
    for layer in range(2):
        cache.update(layer, uniform(batch, length, WIDTH), uniform(batch, length, WIDTH))
    return {"x": uniform(batch, 1, WIDTH), "cache": cache}


case("a decoder that makes and returns its key-value cache", steps)(Decoder)
case("a decoder whose cache object is given at every second call", prefill_or_step)(Decoder)


@case("a decoder called in a loop with its own cache, in one forward", steps)
class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        logits, cache = self.decoder(x)
        outputs = [logits[:, -1]]
        for step in range(3):
            logits, cache = self.decoder(x[:, step : step + 1] * 0.5, cache)
            outputs.append(logits[:, -1])
        return torch.stack(outputs, 1), cache.length()


def padding(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, length, WIDTH), torch.arange(length) < (length if index % 2 else length - 2)


@case("a mask of padding dropped when nothing is padded", padding)
class DropsMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = None if bool(mask.all()) else torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        return self.out(F.scaled_dot_product_attention(q, k, v, bias))


@case("MultiheadAttention with and without its weights", lambda b, n, i: (uniform(b, n, WIDTH), bool(i % 2)))
class AttentionWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, weights: bool) -> tuple[Tensor, Tensor | None]:
        return self.attention(x, x, x, need_weights=weights)


def layer_states(batch: int, length: int, index: int) -> Inputs:
    return uniform(batch, WIDTH), [[uniform(batch, 32), uniform(batch, 32)] for _ in range(2)]


@case("a nested list of states, one for each layer", layer_states)
class StateLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(WIDTH, 32), nn.LSTMCell(32, 32)])
        self.out = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, states: list[list[Tensor]]) -> tuple[Tensor, list[Any]]:
        new = []
        for cell, state in zip(self.cells, states, strict=True):
            state = cell(x, tuple(state))
            x = state[0]
            new.append(list(state))
        return self.out(x), new


@case("teacher forcing while training, the own output else", steps)
class TeacherForcing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, step, outputs = torch.zeros(x.size(0), 32), x[:, 0], []
        for t in range(x.size(1)):
            state = self.cell(step, state)
            y = self.out(state)
            outputs.append(y)
            step = x[:, t] if self.training else y.clamp(-1, 1)
        return torch.stack(outputs, 1)

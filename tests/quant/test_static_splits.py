"""What is split between integer and float readers, and what is indexed by tensors."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant

SPLITS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda t: t.chunk(2, 1),
    "torch_chunk": lambda t: torch.chunk(t, 2, dim=1),
    "split": lambda t: t.split(8, 1),
    "split_sizes": lambda t: t.split([8, 8], 1),
    "split_with_sizes": lambda t: torch.split_with_sizes(t, [8, 8], 1),
    "unbind": lambda t: t.view(-1, 2, 8).unbind(1),
    "tensor_split": lambda t: t.tensor_split(2, 1),
}


class Split(nn.Module):
    """Two parts of one layer's output, each read in float, by an int8 layer, by both or by nobody."""

    def __init__(self, split: str, first: str, second: str, whole: str = "") -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.split, self.readers, self.whole = split, (first, second), whole

    def forward(self, x: Tensor) -> Any:
        parts = SPLITS[self.split](self.a(x))
        y = self.c(x)
        for part, reader in zip(parts, self.readers, strict=True):
            if reader in ("float", "both"):
                y = y + torch.sin(part)
            if reader in ("int8", "both"):
                y = y + self.b(part)
        if self.whole == "passed":
            y = y + torch.cat(parts, 1).sin().sum(1, keepdim=True)
        if self.whole == "sliced":
            y = y + torch.cat(parts[::-1], 1).sin().sum(1, keepdim=True)
        return (y, parts) if self.whole == "returned" else y


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(64, 8) for _ in range(4)]


def decibels(expected: Tensor, found: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (expected - found).square().sum()))


def check(model: nn.Module, least: float = 30.0) -> nn.Module:
    """Static int8 of a model, which agrees with float, step by step and after it was saved."""
    data = batches()
    q = quant.quantize_static(model.eval(), data, progress=False)
    prepared = quant.prepare(model, data[0])
    quant.calibrate.run(prepared, data, progress=False)
    with torch.no_grad():
        for size in (64, 5):
            x = torch.randn(size, 8)
            expected, found = model(x), q(x)
            if isinstance(expected, Tensor):
                assert decibels(expected, found) > least
            else:
                assert type(found[1]) is type(expected[1])
                assert len(found[1]) == len(expected[1])
                for one, other in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
                    assert decibels(one, other) > least
    assert quant.parity(prepared, quant.convert(prepared), data[:1]).holds
    return q


READERS = ("float", "int8", "both", "none")
PAIRS = [("chunk", *pair) for pair in itertools.product(READERS, repeat=2)]
PAIRS += [
    (split, *pair)
    for split in SPLITS
    if split != "chunk"
    for pair in zip(READERS, READERS[1:] + READERS[:1], strict=True)
]
"""Each pair of readers for one way to split, and for the others each reader of either part."""


@pytest.mark.parametrize(("split", "first", "second"), PAIRS)
def test_parts_are_read_in_float_and_by_int8_layers(split: str, first: str, second: str) -> None:
    torch.manual_seed(0)
    check(Split(split, first, second))


WHOLES = ("passed", "sliced", "returned")
FIRSTS = ("float", "int8", "none")


@pytest.mark.parametrize(
    ("split", "first", "whole"),
    [("chunk", *pair) for pair in itertools.product(FIRSTS, WHOLES)]
    + [(split, *pair) for split in SPLITS if split != "chunk" for pair in zip(FIRSTS, WHOLES, strict=True)],
)
def test_the_tuple_itself_is_read_beside_an_int8_reader(split: str, first: str, whole: str) -> None:
    torch.manual_seed(0)
    check(Split(split, first, "int8", whole))


def test_a_part_is_the_input_of_an_lstm_and_another_its_state() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.rnn = nn.Linear(8, 16), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            part, state = self.a(x).chunk(2, 1)
            y, _ = self.rnn(part[:, None], (state[None], state[None]))
            return y[:, 0]

    torch.manual_seed(0)
    check(Model())


def test_queries_are_normalised_in_float_and_values_are_multiplied_in_integers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(-1, 3, 2, 4).unbind(1)
            weights = nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).transpose(1, 2)
            return self.out((weights.softmax(-1) @ v).flatten(1))

    torch.manual_seed(0)
    check(Attention(), least=25.0)


def test_split_parts_train_and_load(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, data = Split("chunk", "float", "int8").eval(), batches()
    q = quant.quantize_static(model, data, progress=False)
    quant.save(q, tmp_path / "split.q8")
    restored = quant.load(tmp_path / "split.q8", model=copy.deepcopy(model))
    assert torch.equal(restored(data[0]), q(data[0]))
    p = quant.prepare_qat(model, data[0]).train()
    p(data[0]).sum().backward()
    p.eval()
    with torch.no_grad():
        assert decibels(p(data[0]), quant.convert(p)(data[0])) > 35


@pytest.mark.parametrize(
    "index",
    [
        lambda y: torch.tensor([0, 2]),
        lambda y: torch.tensor([[0, 2], [1, 1]]),
        lambda y: torch.tensor(0),
        lambda y: torch.arange(y.shape[0]) > 1,
        lambda y: (torch.tensor([0, 2]), slice(1, 5)),
        lambda y: (slice(None), [0, 2]),
        lambda y: (..., None),
        lambda y: False,
    ],
    ids=["tensor", "matrix", "scalar", "mask", "tuple", "list", "ellipsis", "bool"],
)
@pytest.mark.parametrize("after", ["end", "layer"])
def test_a_tensor_made_in_forward_is_an_index(index: Callable[[Tensor], Any], after: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)[index(x)]
            return self.b(nn.functional.pad(y.flatten(), (0, 8))[:8]) if after == "layer" else y

    torch.manual_seed(0)
    model, data = Model().eval(), batches()
    with torch.no_grad():
        q = quant.quantize_static(model, data, progress=False)
        expected, found = model(data[0]), q(data[0])
    assert found.shape == expected.shape
    if expected.numel():
        assert decibels(expected, found) > 30

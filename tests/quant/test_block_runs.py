"""Rounding block by block: short runs from what done blocks gave have the bits of whole ones, on chains and others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.rounding import block_runs
from quant.rounding.block_runs import BlockRuns

FOUR = quant.Recipe(default=quant.QConfig(weight_bits=4))
BATCHES = 3


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x if other is None else x + other)))
        return x.add_(y) if not x.requires_grad and other is None else x + y


class Chain(nn.Module):
    """Blocks that write into what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tuples(Chain):
    """Blocks that give their output in a tuple."""

    class Inner(Block):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
            return (super().forward(x, other), None)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inner() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Pair(nn.Module):
    """An encoder, and a decoder whose blocks all read what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        y = torch.tanh(x)
        for layer in self.decoder:
            y = layer(y, memory)
        return y


class Skips(Chain):
    """The last block reads what the first one gave."""

    def forward(self, x: Tensor) -> Tensor:
        one = self.layers[0](self.first(x)).clone()
        two = self.layers[1](one.clone())
        return self.head(self.layers[3](self.layers[2](two), one))


class Twice(Chain):
    """One block is called two times, and one by its forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.first(x)))
        x = self.layers[3](self.layers[2].forward(self.layers[1](x)))
        return self.head(x)


class Backwards(Chain):
    """Blocks are called in another order than that of their names."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class Widths(nn.Module):
    """Blocks of several widths, whose sum with another path is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 8), nn.Linear(8, 16), nn.Linear(16, 4)])
        self.beside = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[1](self.layers[0](x).relu()) + self.beside(x)
        return self.layers[3](self.layers[2](y).relu())


CHAINS = {"a chain": Chain, "tuples": Tuples, "an encoder and a decoder": Pair}
OTHERS = {"skips": Skips, "a block called twice": Twice, "another order": Backwards, "other widths": Widths}


def quietly(model: nn.Module, batch: Tensor) -> Any:
    """A user's function that catches what the model raises."""
    try:
        return model(batch.clone())
    except Exception:
        return None


def rounded(make: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], Counter[str]]:
    """The tensors of the model rounded by GPTQ, and how often each float layer ran for it."""
    torch.manual_seed(0)
    model, calls = make().eval(), Counter[str]()
    data = [torch.randn(20, 16) @ torch.randn(16, 16) for _ in range(BATCHES)]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    q = quant.quantize_dynamic(
        model, FOUR, batches=data, rounding="gptq", progress=False, forward=quietly, inplace=True
    )
    return {name: value for name, value in q.state_dict().items() if isinstance(value, Tensor)}, calls


@pytest.mark.parametrize("make", [*CHAINS.values(), *OTHERS.values()], ids=[*CHAINS, *OTHERS])
def test_the_bits_are_those_of_whole_runs(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    short, calls = rounded(make)
    monkeypatch.setattr(BlockRuns, "may_begin_before", lambda self, block: False)
    monkeypatch.setattr(BlockRuns, "may_end_behind", lambda self, block: False)
    whole, more = rounded(make)
    assert short.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in short.items())
    assert calls.total() < more.total()


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_of_a_chain_each_block_runs_a_few_times_whatever_its_length(make: Callable[[], nn.Module]) -> None:
    calls = rounded(make)[1]
    stack = [name for name in calls if name.split(".")[0] in ("layers", "decoder")]
    # Once in the first pass, once for its own inputs and once for what it gives; and the first batch again to compare.
    assert max(calls[name] for name in stack) <= 3 * BATCHES + len(stack) // 2 + 2


def test_outputs_beyond_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rounded(Chain)[0]
    monkeypatch.setattr(block_runs, "LEAST_BYTES", 0)
    monkeypatch.setattr(nn.Module, "parameters", lambda self, recurse=True: iter(()))
    got, calls = rounded(Chain)
    assert all(torch.equal(value, expected[name]) for name, value in got.items())
    assert calls["layers.0.up"] == 6 * BATCHES  # for each group from the first layer to the head

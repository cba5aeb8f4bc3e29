"""Networks drawn from integers, for comparing two versions of this package: the same ones in every process.

Nothing here uses more of `quant` than its public functions, so that any version of it can be asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quant

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `golden` is a package
sys.path.append(str(Path(__file__).resolve().parents[1] / "quant"))  # whose generators need no more

from golden.hashing import tensors
from random_blocks import Draw
from random_operators import draw_network

Inputs = tuple[Tensor, ...]
Convert = Callable[[nn.Module, list[Inputs], Random], nn.Module]

CONFIGS = (
    quant.QConfig(activation_observer="minmax"),
    quant.QConfig(activation_observer="minmax", weight_bits=4),
    quant.QConfig(activation_observer="minmax", per_channel=False, activation_symmetric=True),
    quant.QConfig(activation_observer="histogram", weight_observer="mse"),
)


@dataclass(frozen=True)
class Kind:
    """One sort of networks.

    Attributes:
        draw: a float model, and sets of inputs for it: the first one to capture with, the others of other shapes.
        convert: the int8 form.
    """

    draw: Callable[[int], tuple[nn.Module, list[Inputs]]]
    convert: Convert


def outputs(name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the converted network of this name gives, with its place."""
    kind_name, seed = name.rsplit("-", 1)
    kind = KINDS[kind_name]
    model, inputs = kind.draw(int(seed))
    converted = kind.convert(model, inputs, Random(int(seed)))
    larger = tuple(torch.cat([one, one.flip(0)[:1]]) for one in inputs[0])
    for index, one in enumerate([*inputs, larger]):
        with torch.no_grad():
            result = converted(*one)
        yield from ((f"call {index}, output {place}", leaf) for place, leaf in enumerate(tensors(result)))


class _Called(TorchFunctionMode):
    """Notes the names of the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def functions_called(name: str) -> set[str]:
    """The names of the functions and methods of torch that the float network of this name calls."""
    kind_name, seed = name.rsplit("-", 1)
    model, inputs = KINDS[kind_name].draw(int(seed))
    with _Called() as called, torch.no_grad():
        model(*inputs[0])
    return called.names


# How a network becomes int8.


def static(model: nn.Module, inputs: list[Inputs], random: Random) -> nn.Module:
    config = CONFIGS[0] if random.random() < 0.6 else random.choice(CONFIGS)
    prepared = quant.prepare(model, inputs[0], quant.Recipe(default=config))
    with torch.no_grad():
        for one in inputs:
            prepared(*one)
    return quant.convert(prepared)


def dynamic(model: nn.Module, inputs: list[Inputs], random: Random) -> nn.Module:
    config = quant.QConfig(weight_bits=random.choice((8, 8, 8, 4)), per_channel=random.random() < 0.8)
    return quant.quantize_dynamic(model, quant.Recipe(default=config))


def trained(model: nn.Module, inputs: list[Inputs], random: Random) -> nn.Module:
    """Two steps of training."""
    prepared = quant.prepare_qat(model, inputs[0]).train()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-3)
    for _ in range(2):
        loss = sum(leaf.square().mean() for leaf in tensors(prepared(*inputs[0])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return quant.convert(prepared.eval())


# What is drawn.


def blocks(seed: int) -> tuple[nn.Module, list[Inputs]]:
    model, one, other = Draw(seed).network()
    return model, [(one,), (other,)]


def operators(seed: int) -> tuple[nn.Module, list[Inputs]]:
    model, inputs = draw_network(seed)
    return model, [inputs]


class Recurrent(nn.Module):
    """Tokens or features, perhaps a linear layer, recurrent layers, scores of each step or of the last state."""

    def __init__(self, random: Random, words: bool) -> None:
        super().__init__()
        features, hidden = random.choice((4, 5, 8, 16)), random.choice((4, 8, 12, 16))
        both = random.random() < 0.5
        options: dict[str, Any] = {"num_layers": random.randint(1, 2), "bidirectional": both}
        kind = random.choice(("LSTM", "LSTM", "GRU", "RNN"))
        if kind == "RNN":
            options["nonlinearity"] = random.choice(("tanh", "relu"))
        if kind == "LSTM" and random.random() < 0.3:
            options["proj_size"] = hidden // 2
        self.features = features
        self.words = nn.Embedding(20, features) if words else None
        self.first = nn.Linear(features, features) if random.random() < 0.3 else None
        self.rnn = getattr(nn, kind)(features, hidden, batch_first=True, bias=random.random() < 0.8, **options)
        self.last = random.random() < 0.5
        width = options.get("proj_size", hidden)
        self.head = nn.Linear(width if self.last else width * (1 + both), 3)

    def forward(self, x: Tensor) -> Any:
        x = x if self.words is None else self.words(x)
        x = x if self.first is None else self.first(x).relu()
        sequence, state = self.rnn(x)
        state = state[0] if isinstance(state, tuple) else state
        return self.head(state[-1]) if self.last else (self.head(sequence), state)


class Looped(nn.Module):
    """A cell in the user's own loop over the steps."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.features, hidden = random.choice((4, 8)), random.choice((4, 8, 16))
        self.cell = getattr(nn, random.choice(("LSTMCell", "GRUCell", "RNNCell")))(self.features, hidden)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def recurrent(seed: int) -> tuple[nn.Module, list[Inputs]]:
    random = Random(seed)
    torch.manual_seed(seed)
    model = Looped(random) if random.random() < 0.3 else Recurrent(random, words=False)
    steps = random.randint(2, 6)
    return model.eval(), [(torch.randn(batch, steps, model.features),) for batch in (2, 3)]


def layers(seed: int) -> tuple[nn.Module, list[Inputs]]:
    """What dynamic quantisation knows: linear layers, attention, recurrent layers, embeddings."""
    random = Random(seed)
    torch.manual_seed(seed)
    features = random.choice((4, 8, 16, 24))
    kind = random.choice(("linear", "linear", "attention", "recurrent", "looped", "words"))
    if kind == "words":
        model: nn.Module = Recurrent(random, words=True)
        return model.eval(), [(torch.randint(20, (batch, 5)),) for batch in (2, 3)]
    if kind in ("recurrent", "looped"):
        model = Looped(random) if kind == "looped" else Recurrent(random, words=False)
        features = model.features
    elif kind == "attention":
        heads, first = random.choice((1, 2, 4)), random.random() < 0.5
        model = nn.TransformerEncoderLayer(features, heads, 2 * features, batch_first=True, norm_first=first)
    else:
        inner = random.choice((3, 16, 33, 64))
        act = random.choice((nn.ReLU, nn.GELU, nn.Tanh))
        bias = random.random() < 0.7
        model = nn.Sequential(nn.Linear(features, inner, bias=bias), act(), nn.Linear(inner, random.choice((1, 5, 32))))
    return model.eval(), [(torch.randn(batch, 4, features) * random.choice((0.1, 1, 10)),) for batch in (2, 3)]


KINDS = {
    "operators": Kind(operators, static),
    "blocks": Kind(blocks, static),
    "recurrent": Kind(recurrent, static),
    "dynamic": Kind(layers, dynamic),
    "trained": Kind(blocks, trained),
    "trained-recurrent": Kind(recurrent, trained),
}

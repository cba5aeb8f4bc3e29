"""Random networks: each prepares, calibrates, converts, pickles and runs, equal to its simulation step by step."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quant.convert import convert
from quant.dynamic import NothingQuantized
from quant.graph import leaves
from quant.parity import parity
from quant.prepare import prepare, simulating
from quant.recipe import QConfig, Recipe

EXAMPLES = int(os.environ.get("OCTET_RANDOM_NETWORKS", "15" if os.environ.get("OCTET_FAST_TESTS") == "1" else "60"))
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "leaky": lambda: nn.LeakyReLU(0.1),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "prelu": nn.PReLU,
    "dropout": nn.Dropout,
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "transposed": lambda x: x.transpose(2, 3).contiguous(),
    "padded": lambda x: F.pad(x, (1, 0, 0, 1)),
    "cropped": lambda x: x[:, :, : max(x.shape[2] - 1, 1)],
    "pooled": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "averaged": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "grown": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "resized": lambda x: F.interpolate(x, size=(5, 5), mode="bilinear", align_corners=False),
    "scaled": lambda x: x * 0.5 + 0.1,
    "clamped": lambda x: x.clamp(-1, 1),
    "softmaxed": lambda x: x.softmax(1),
    "gated by its mean": lambda x: x * x.mean((2, 3), keepdim=True),
    "squared": lambda x: x.square().clamp(max=10),
    "multiplied": lambda x: x @ x.transpose(2, 3),
    "reshaped": lambda x: x.reshape(x.shape[0], x.shape[1], -1).reshape(x.shape),
    "changed in place": lambda x: (x + 0).mul_(0.7),
}
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: torch.tanh(a) * b,
    "add in place": lambda a, b: (a + 0).add_(b),
    "divide": lambda a, b: a / (b.abs() + 1),
}

conv = st.fixed_dictionaries(
    {
        "kernel_size": st.sampled_from([1, 3, (1, 3)]),
        "stride": st.sampled_from([1, 1, 2]),
        "padding": st.sampled_from([0, 1, (1, 0)]),
        "dilation": st.sampled_from([1, 1, 2]),
        "groups": st.sampled_from([1, 1, 2, 4]),
        "bias": st.booleans(),
        "padding_mode": st.sampled_from(["zeros", "zeros", "circular"]),
    }
)
source = st.integers(0, 5)
step = st.one_of(
    st.tuples(st.just("conv"), conv, st.booleans(), source),
    st.tuples(st.just("conv"), conv, st.booleans(), source),
    st.tuples(st.just("transposed"), st.sampled_from([1, 2]), st.booleans(), source),
    st.tuples(st.just("act"), st.sampled_from(sorted(ACTIVATIONS)), st.none(), source),
    st.tuples(st.just("function"), st.sampled_from(sorted(FUNCTIONS)), st.none(), source),
    st.tuples(st.just("join"), st.sampled_from(sorted(JOINS)), source, source),
    st.tuples(st.just("cat"), st.none(), source, source),
    st.tuples(st.just("again"), st.none(), st.none(), source),
    st.tuples(st.just("island"), st.none(), st.none(), source),
)
program = st.tuples(st.lists(step, min_size=2, max_size=9), st.integers(0, 2**20))


class Island(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if bool(torch.isfinite(x).all()) else x


class Generated(nn.Module):
    """A network made from a list of steps, each of which reads one or two of the tensors made before."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleDict()
        self.fc: nn.Module | None = None

    def part(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        if name not in self.parts:
            self.parts[name] = make()
        return self.parts[name]

    def forward(self, x: Tensor) -> dict[str, Any]:
        values = [x]
        for index, (kind, setting, more, place) in enumerate(self.steps):
            value = values[place % len(values)]
            values.append(self._step(f"{kind}{index}", kind, setting, more, value, values))
        last = values[-1]
        if self.fc is None:
            self.fc = nn.Linear(last.shape[1], 3)
        return {"scores": self.fc(last.mean((2, 3))), "maps": values[len(values) // 2]}

    def _step(self, name: str, kind: str, setting: Any, more: Any, x: Tensor, values: list[Tensor]) -> Tensor:
        channels = x.shape[1]
        if kind == "conv":
            options = {**setting, "groups": setting["groups"] if channels % setting["groups"] == 0 else 1}
            return self.part(name, lambda: _block(nn.Conv2d(channels, 4, **options), more))(x)
        if kind == "transposed":
            make = lambda: nn.ConvTranspose2d(channels, 4, 2, stride=2, groups=setting if channels % 2 == 0 else 1)  # noqa: E731
            return self.part(name, lambda: _block(make(), more))(x)
        if kind == "act":
            return self.part(name, ACTIVATIONS[setting])(x + 0)
        if kind == "function":
            return FUNCTIONS[setting](x)
        if kind == "again":
            return self.part(f"shared{channels}", lambda: nn.Conv2d(channels, channels, 1))(x)
        if kind == "island":
            return self.part(name, lambda: Island(channels))(x)
        other = values[more % len(values)]
        if kind == "cat":
            return torch.cat([x, other], 1) if other.shape[2:] == x.shape[2:] else x
        return JOINS[setting](x, other) if other.shape == x.shape else x


def _block(conv: nn.Module, normed: bool) -> nn.Module:
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU()) if normed else conv


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(program)
def test_random_network(made: tuple[list[Any], int]) -> None:
    steps, seed = made
    torch.manual_seed(seed)
    model, x = Generated(steps), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        try:
            model.eval()(x)
        except RuntimeError:
            assume(False)
        expected = model.eval()(x)
    assume(all(bool(torch.isfinite(leaf).all()) and leaf.numel() for leaf in leaves(expected)))
    try:
        prepared = prepare(model, x, Recipe(default=QConfig(activation_observer="minmax")))
    except NothingQuantized:
        return
    with torch.no_grad():
        for one, other in zip(leaves(expected), leaves(prepared(x)), strict=True):
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)
    with simulating(prepared):
        simulated = prepared(x)
    converted = pickle.loads(pickle.dumps(convert(prepared)))
    with torch.no_grad():
        got = converted(x)
    for found in parity(prepared, converted, [x]):
        assert found.holds, found
    for one, other, float_one in zip(leaves(simulated), leaves(got), leaves(expected), strict=True):
        size = float(float_one.abs().max()) + 1e-6
        assert float((one - other).abs().max()) <= 0.1 * size
    assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves(converted(torch.randn(3, 4, 8, 8))))

"""Random networks: each prepares, calibrates, converts, saves, loads and runs, equal to its simulation step by step.

A network is a list of steps over tensors (N, C, *places) of one, two or three dimensions; each step reads one or two of
the tensors made before it. A step that torch itself refuses (a kernel larger than its input, say) is left out.
Networks of a second kind are put together from the blocks of real ones: random_blocks.py.
OCTET_RANDOM_NETWORKS says how many of each kind are drawn; `make test-random` draws 500. OCTET_RANDOM_SEED names the
first of the second kind, to draw one that failed again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from quant.kernels import dispatch, use
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn

import quant
from quant.graph import leaves, map_leaves
from quant.nn.base import QuantModule
from quant.ops.registry import real_form
from quant.parity import parity
from quant.static import program_runner
from quant.static.instructions import FloatCall
from quant.static.program_reader import parse
from quant.static.program_runner import ProgramRunner
from quant.static.shown_programs import programs_of
from quant.static.simulating import simulating
from quant.static.single_steps import call

from .random_blocks import Draw

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
EXAMPLES = int(os.environ.get("OCTET_RANDOM_NETWORKS", "8" if FAST else "20"))
BLOCKS = int(os.environ.get("OCTET_RANDOM_NETWORKS", "12" if FAST else "40"))
LARGEST = 30_000
"""Elements of a tensor; a step that makes a larger one is left out."""

ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(inplace=True),
    "relu6": lambda _: nn.ReLU6(),
    "hardtanh": lambda _: nn.Hardtanh(-0.7, 0.9),
    "hardswish": lambda _: nn.Hardswish(),
    "leaky": lambda _: nn.LeakyReLU(0.1),
    "silu": lambda _: nn.SiLU(),
    "gelu": lambda _: nn.GELU(),
    "gelu tanh": lambda _: nn.GELU(approximate="tanh"),
    "sigmoid": lambda _: nn.Sigmoid(),
    "hardsigmoid": lambda _: nn.Hardsigmoid(),
    "tanh": lambda _: nn.Tanh(),
    "elu": lambda _: nn.ELU(),
    "prelu": lambda channels: nn.PReLU(channels),
    "prelu of one": lambda _: nn.PReLU(),
    "softmax": lambda _: nn.Softmax(1),
    "dropout": lambda _: nn.Dropout(),
    "identity": lambda _: nn.Identity(),
}
NORMS: dict[str, Callable[[int, int], nn.Module]] = {
    "batch": lambda channels, dims: _of("BatchNorm", dims)(channels),
    "batch without affine": lambda channels, dims: _of("BatchNorm", dims)(channels, affine=False),
    "group": lambda channels, _: nn.GroupNorm(2 if channels % 2 == 0 else 1, channels),
    "instance": lambda channels, dims: _of("InstanceNorm", dims)(channels, affine=True),
}
POOLS: dict[str, Callable[[int], nn.Module]] = {
    "max": lambda dims: _of("MaxPool", dims)(2, ceil_mode=True),
    "max, overlapping": lambda dims: _of("MaxPool", dims)(3, 1, 1),
    "average": lambda dims: _of("AvgPool", dims)(3, 1, 1),
    "average of what is there": lambda dims: _of("AvgPool", dims)(3, 2, 1, count_include_pad=False),
    "adaptive average": lambda dims: _of("AdaptiveAvgPool", dims)(3),
    "adaptive max": lambda dims: _of("AdaptiveMaxPool", dims)(2),
    "upsample": lambda dims: nn.Upsample(scale_factor=2, mode="nearest"),
    "upsample linear": lambda dims: nn.Upsample(scale_factor=1.5, mode=LINEAR[dims], align_corners=False),
    "zero pad": lambda dims: _of("ZeroPad", dims)(1),
    "uneven zero pad": lambda dims: _of("ZeroPad", dims)((0, 1) * dims),
    "reflection pad": lambda dims: _of("ReflectionPad", dims)(1),
}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "halves swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: torch.cat(x.split([1, x.shape[1] - 1], 1), 1),
    "transposed": lambda x: x.transpose(1, -1).contiguous().transpose(-1, 1),
    "padded": lambda x: F.pad(x, (1, 0)),
    "cropped": lambda x: x[:, :, : max(x.shape[2] - 1, 1)],
    "last of two": lambda x: x.chunk(2, 1)[-1],
    "grown": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "resized": lambda x: F.interpolate(x, size=5, mode=LINEAR[x.dim() - 2], align_corners=False),
    "scaled": lambda x: x * 0.5 + 0.1,
    "clamped": lambda x: x.clamp(-1, 1),
    "softmaxed": lambda x: x.softmax(1),
    "gated by its mean": lambda x: x * x.mean(-1, keepdim=True).sigmoid(),
    "mean kept": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
    "squared": lambda x: x.square().clamp(max=10),
    "root": lambda x: (x.abs() + 1).sqrt(),
    "log": lambda x: x.abs().add(1).log(),
    "multiplied": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "attended": lambda x: F.scaled_dot_product_attention(x.flatten(2), x.flatten(2), x.flatten(2)).reshape(x.shape),
    "reshaped": lambda x: x.reshape(x.shape[0], x.shape[1], -1).view(x.shape),
    "unfolded": lambda x: x.permute(0, *range(2, x.dim()), 1).flatten(1, -2).transpose(1, 2).unflatten(2, x.shape[2:]),
    "changed in place": lambda x: (x + 0).mul_(0.7),
    "activated in place": lambda x: F.relu_(x + 0),
    "functional": lambda x: F.gelu(F.hardtanh(x)) + torch.tanh(x).sigmoid(),
    "dropped": lambda x: F.dropout(x, 0.5, False),
    "stacked": lambda x: torch.stack([x, x], 2).flatten(1, 2),
    "masked": lambda x: x.masked_fill(x < 0, 0.0),  # where it jumps, a step of rounding would be one of the mask
}
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "add and relu": lambda a, b: F.relu(a + b),
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: torch.tanh(a) * b,
    "add in place": lambda a, b: (a + 0).add_(b),
    "add a part": lambda a, b: torch.add(a, b, alpha=0.5),
    "divide": lambda a, b: a / (b.abs() + 1),
    "broadcast": lambda a, b: a + b.mean(-1, keepdim=True),
    "cat": lambda a, b: torch.cat([a, b], 1),
    "matmul": lambda a, b: a.flatten(2) @ b.flatten(2).transpose(1, 2),
}


def _of(name: str, dims: int) -> Any:
    return getattr(nn, f"{name}{dims}d")


conv = st.fixed_dictionaries(
    {
        "kernel_size": st.sampled_from([1, 3, "asymmetric"]),
        "stride": st.sampled_from([1, 1, 2]),
        "padding": st.sampled_from([0, 1, "same", "asymmetric"]),
        "dilation": st.sampled_from([1, 1, 2]),
        "groups": st.sampled_from([1, 1, 2, 4, "depthwise"]),
        "bias": st.booleans(),
        "padding_mode": st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]),
    }
)
transposed = st.fixed_dictionaries(
    {
        "kernel_size": st.sampled_from([2, 3]),
        "stride": st.sampled_from([1, 2]),
        "padding": st.sampled_from([0, 1]),
        "output_padding": st.sampled_from([0, 1]),
        "groups": st.sampled_from([1, 2]),
        "bias": st.booleans(),
    }
)
place = st.integers(0, 5)
after = st.sampled_from(["", "", "batch", "batch and relu", "relu"])


NONE = st.none()


def _step(kind: str, setting: Any = NONE, more: Any = NONE) -> Any:
    return st.tuples(st.just(kind), setting, more, place)


step = st.one_of(
    _step("conv", conv, after),
    _step("conv", conv, after),
    _step("transposed", transposed, after),
    _step("linear", st.booleans(), after),
    _step("act", st.sampled_from(sorted(ACTIVATIONS))),
    _step("norm", st.sampled_from(sorted(NORMS))),
    _step("pool", st.sampled_from(sorted(POOLS))),
    _step("function", st.sampled_from(sorted(FUNCTIONS))),
    _step("function", st.sampled_from(sorted(FUNCTIONS))),
    _step("join", st.sampled_from(sorted(JOINS)), place),
    _step("join", st.sampled_from(sorted(JOINS)), place),
    _step("again", st.sampled_from(["module", "weight"])),
    _step("island"),
    _step("sequence", st.sampled_from(["LSTM", "GRU", "LayerNorm", "Attention", "Transformer"]), st.booleans()),
    _step("embedding", st.sampled_from(["Embedding", "EmbeddingBag"])),
)
CONFIGS = [
    quant.QConfig(activation_observer="minmax"),
    quant.QConfig(activation_observer="minmax", weight_bits=4),
    quant.QConfig(activation_observer="minmax", per_channel=False, activation_symmetric=True),
    quant.QConfig(activation_observer="histogram", weight_observer="mse"),
]
network = st.tuples(
    st.lists(step, min_size=2, max_size=9),
    st.sampled_from([1, 2, 2, 2, 3]),
    st.sampled_from(["tensor", "dict", "tuple", "maps"]),
    st.booleans(),
    st.sampled_from(CONFIGS),
    st.integers(0, 2**20),
)


class Island(nn.Module):
    """Branches on its input's values, which no graph can keep."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.conv = _of("Conv", dims)(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if bool(torch.isfinite(x).all()) else x


class Generated(nn.Module):
    """A network made from a list of steps; the first run, in `build`, makes its layers."""

    def __init__(self, steps: list[Any], dims: int, output: str, seed: int) -> None:
        super().__init__()
        self.steps, self.dims, self.output, self.seed = steps, dims, output, seed
        self.parts = nn.ModuleDict()
        self.left_out: set[int] = set()
        self.building = False

    def build(self, *inputs: Tensor) -> None:
        """Make the layers, and leave out steps that torch refuses on these inputs."""
        self.building = True
        with torch.no_grad():
            self.eval()(*inputs)
        self.building = False

    def part(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        if name not in self.parts:
            assert self.building
            made = make().eval()
            for tensor in (*made.parameters(), *made.buffers()):
                if tensor.is_floating_point() and tensor.dim() == 1:  # a norm's statistics, a bias, a slope
                    tensor.data.uniform_(0.5, 1.5)
            self.parts[name] = made
        return self.parts[name]

    def forward(self, x: Tensor, ids: Tensor, second: Tensor | None = None) -> Any:
        values = [x] if second is None else [x, second]
        for index, (kind, setting, more, place) in enumerate(self.steps):
            if index in self.left_out:
                continue
            arguments = (f"{kind}{index}", setting, more, values[place % len(values)], values, ids)
            if self.building:
                self._try(index, kind, arguments, values)
            else:
                values.append(getattr(self, f"_{kind}")(*arguments))
        maps, last = values[len(values) // 2], values[-1]
        if self.output == "maps":
            return maps
        scores = self.part("fc", lambda: nn.Linear(last.shape[1], 3))(last.flatten(2).mean(2))
        return {"tensor": scores, "tuple": (scores, (maps,)), "dict": {"scores": scores, "maps": maps}}[self.output]

    def _try(self, index: int, kind: str, arguments: tuple[Any, ...], values: list[Tensor]) -> None:
        try:
            value = getattr(self, f"_{kind}")(*arguments)
            again = getattr(self, f"_{kind}")(*arguments)
        except (RuntimeError, ValueError, IndexError, UserWarning):
            self.left_out.add(index)
            return
        fits = 0 < value.numel() <= LARGEST and value.dim() == self.dims + 2
        if fits and bool((value.abs() < 1e3).all()) and torch.equal(value, again):
            values.append(value)
        else:
            self.left_out.add(index)

    def _conv(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        channels, options = x.shape[1], dict(setting)
        groups = channels if options["groups"] == "depthwise" else options["groups"]
        options["groups"] = groups if channels % groups == 0 else 1
        out = 2 * channels if setting["groups"] == "depthwise" and channels < 8 else 4
        options["stride"] = 1 if options["padding"] == "same" else options["stride"]
        for key, odd in (("kernel_size", (1, 3, 2)), ("padding", (1, 0, 2))):
            options[key] = odd[: self.dims] if options[key] == "asymmetric" else options[key]
        if out % options["groups"]:
            out = options["groups"]
        return self._block(name, lambda: _of("Conv", self.dims)(channels, out, **options), out, more, x)

    def _transposed(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        channels, options = x.shape[1], dict(setting)
        options["groups"] = options["groups"] if channels % options["groups"] == 0 else 1
        return self._block(name, lambda: _of("ConvTranspose", self.dims)(channels, 4, **options), 4, more, x)

    def _linear(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        layer = self.part(name, lambda: nn.Linear(x.shape[1], 4, bias=setting))
        y = layer(x.movedim(1, -1)) if setting else F.linear(x.movedim(1, -1), layer.weight)
        return F.relu(y).movedim(-1, 1) if "relu" in more else y.movedim(-1, 1)

    def _block(self, name: str, make: Callable[[], nn.Module], out: int, more: str, x: Tensor) -> Tensor:
        norms = [lambda: _of("BatchNorm", self.dims)(out)] if "batch" in more else []
        acts = [nn.ReLU] if "relu" in more else []
        parts = [self.part(f"{name}_{i}", one) for i, one in enumerate([make, *norms, *acts])]
        for part in parts:
            x = part(x)
        return x

    def _act(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        return self.part(name, lambda: ACTIVATIONS[setting](x.shape[1]))(x + 0)

    def _norm(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        return self.part(name, lambda: NORMS[setting](x.shape[1], self.dims))(x)

    def _pool(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        return self.part(name, lambda: POOLS[setting](self.dims))(x)

    def _function(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        return self._shaped(FUNCTIONS[setting](x))

    def _join(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        return self._shaped(JOINS[setting](x, values[more % len(values)]))

    def _shaped(self, y: Tensor) -> Tensor:
        """(N, C, anything) with as many dimensions as the others."""
        return y.reshape(*y.shape[:2], *[1] * (self.dims + 2 - y.dim()), *y.shape[2:]) if y.dim() < self.dims + 2 else y

    def _again(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        channels = x.shape[1]
        first = self.part(f"shared{channels}", lambda: _of("Conv", self.dims)(channels, channels, 1))
        if setting == "module":
            return first(first(x))
        other = self.part(name, lambda: _of("Conv", self.dims)(channels, channels, 1))
        if self.building:
            other.weight = first.weight
        return other(x)

    def _island(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        return self.part(name, lambda: Island(x.shape[1], self.dims))(x)

    def _sequence(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        channels, rows = x.shape[1], x.flatten(2).transpose(1, 2)
        if setting == "LayerNorm":
            y = self.part(name, lambda: nn.LayerNorm(channels))(rows)
        elif setting == "Attention":
            attention = self.part(name, lambda: nn.MultiheadAttention(channels, 1, batch_first=True))
            y = attention(rows, rows, rows * 0.5 if more else rows, need_weights=not more)[0]
        elif setting == "Transformer":
            layer = partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=more)
            y = self.part(name, lambda: layer(channels, 1, 8))(rows)
        else:
            kind = getattr(nn, setting)
            y = self.part(name, lambda: kind(channels, 4, batch_first=True, bidirectional=more))(rows)[0]
        return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], *x.shape[2:])

    def _embedding(self, name: str, setting: Any, more: Any, x: Tensor, values: list[Tensor], ids: Tensor) -> Tensor:
        table = self.part(name, lambda: getattr(nn, setting)(9, x.shape[1]))
        vectors = table(ids) if setting == "EmbeddingBag" else table(ids).mean(1)
        return x + vectors.reshape(*vectors.shape, *[1] * self.dims)


def drawn(made: tuple[Any, ...]) -> tuple[nn.Module, tuple[Tensor, ...], quant.QConfig]:
    """The network, inputs for it, and how it is quantised."""
    steps, dims, output, two, config, seed = made
    torch.manual_seed(seed)
    shape = (4, {1: (12,), 2: (8, 8), 3: (5, 4, 4)}[dims])
    inputs = [torch.randn(2, shape[0], *shape[1]), torch.randint(0, 9, (2, 3))]
    inputs += [torch.randn(2, shape[0], *shape[1])] if two else []
    model = Generated(steps, dims, output, seed)
    model.build(*inputs)
    return model, tuple(inputs), config


def check(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    config: quant.QConfig,
    path: Path,
    others: Sequence[tuple[Tensor, ...]] = (),
) -> str:
    """Take one network through everything; returns "int8", or why it was refused.

    Args:
        inputs: to calibrate on, and to run.
        others: inputs of other shapes, to run planned and step by step.
    """
    with torch.no_grad():
        expected = model(*inputs)
    try:
        prepared = quant.prepare(model, inputs, quant.Recipe(default=config))
    except quant.NothingQuantized:
        return "nothing to quantise"
    with torch.no_grad():
        close(prepared(*inputs), expected, 1e-4)
    with simulating(prepared):
        simulated = prepared(*inputs)
    converted = quant.convert(prepared)
    quant.save(converted, path)
    loaded = quant.load(path, model=model)
    with torch.no_grad():
        got = converted(*inputs)
        assert equal(got, loaded(*inputs))
    larger = tuple(torch.cat([one, one.flip(0)[:1]]) for one in inputs)
    for one in (inputs, larger, *others):
        planned_equals_steps(converted, one)
    assert quant.summary(loaded) == quant.summary(converted)
    assert programs_of(loaded) == programs_of(converted)
    assert all(parse(str(program)) == program for program in programs_of(converted).values())
    named = dict(zip(("x", "ids", "second"), inputs, strict=False))
    for backend in dict.fromkeys((dispatch.current().name, "reference")) if integers(loaded) else ():
        with use(backend):
            wrong = [found for found in parity(prepared, loaded, [named]) if not found.holds]
            assert not wrong, (backend, wrong)
    if not any(isinstance(module, QuantModule) for module in loaded.modules()):
        if not inexact(converted):
            with torch.no_grad(), in_one_layout():
                native = converted(*inputs)
                with use("reference"):
                    close(converted(*inputs), native, 1e-6)
        if not any(isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d)) for module in model.modules()):
            close(got, simulated, 0.1)
    with torch.no_grad():
        assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves(loaded(*larger)))
    return "int8"


def planned_equals_steps(converted: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """To the bit, on one thread and on two: each against as many, as torch's softmax rounds by the sharing."""
    with torch.no_grad(), in_one_layout():
        for threads in (1, 2):
            with on_threads(threads):
                with mock.patch.object(CompiledBackend, "plans", False):
                    steps = converted(*inputs)
                assert equal(converted(*inputs), steps), f"planned, on {threads} threads"


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(leaves(found), leaves(expected), strict=True))


@contextmanager
def in_one_layout() -> Iterator[None]:
    """Let the user's own float calls get contiguous values. Plans and steps may lay a value out differently before
    them, and torch's sums round by the layout: 4e-7 where it was seen."""

    def call_contiguous(instruction: FloatCall, root: nn.Module, args: Any, kwargs: Any) -> Any:
        return call(instruction, root, *map_leaves(contiguous, (args, kwargs)))

    with mock.patch.object(program_runner, "call", call_contiguous):
        yield


def contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def integers(converted: nn.Module) -> bool:
    """Whether anything static is computed in integers; else there are dynamic layers, or what is int8 nobody reads."""
    floats = {"call", "guard", "move", "quantize", "dequantize"}
    programs = [module.program for module in converted.modules() if isinstance(module, ProgramRunner)]
    return any(one.kind not in floats for program in programs for one in program.instructions)


def inexact(converted: nn.Module) -> bool:
    """Whether native calls give reals that differ from torch's in their last bits. What is rounded then may fall to the
    other side, and a norm of few values makes any difference of one step: `parity` compares the steps one by one."""
    runners = [module for module in converted.modules() if isinstance(module, ProgramRunner)]
    forms = [real_form(node, one.root) for one in runners for node in one.graph.nodes]
    return not all(form.exact for form in forms if form is not None)


def close(got: Any, expected: Any, share: float) -> None:
    """Equal up to a share of the largest value."""
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        assert float((one - other).abs().max()) <= share * (float(other.abs().max()) + 1e-6)


def test_random_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="OCTET_RANDOM_NETWORKS" not in os.environ,  # `make test` draws the same ones each time
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(network)
    def each(made: tuple[Any, ...]) -> None:
        outcomes[check(*drawn(made), tmp_path / "model.q8")] += 1

    each()
    with capsys.disabled():
        refused = sum(count for outcome, count in outcomes.items() if outcome != "int8")
        print(f"\n{outcomes.total()} random networks, {refused / outcomes.total():.1%} refused: {dict(outcomes)}")
    assert outcomes["int8"] > 0.8 * outcomes.total()


def test_random_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`random_blocks` says what is drawn. `make test` draws the same ones each time."""
    first = Random().randrange(2**30) if "OCTET_RANDOM_NETWORKS" in os.environ else 0
    first = int(os.environ.get("OCTET_RANDOM_SEED", first))
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + BLOCKS):
        model, inputs, other = Draw(seed).network()
        config = CONFIGS[0] if seed % 3 else CONFIGS[seed // 3 % len(CONFIGS)]
        try:
            outcomes[check(model, (inputs,), config, tmp_path / "model.q8", [(other,)])] += 1
        except Exception as error:
            told = f"draw {seed - first + 1}, OCTET_RANDOM_SEED={seed}, {config}"
            raise AssertionError(f"{told}\n{model.describe(inputs, other)}") from error
    with capsys.disabled():
        print(f"\n{outcomes.total()} networks of random blocks: {dict(outcomes)}")
    assert outcomes["int8"] > 0.95 * outcomes.total()

"""Networks drawn operator by operator: lists of steps over tensors (N, C, *places) of one, two or three dimensions.

A step reads one or two of the tensors made before it. A step that torch itself refuses (a kernel larger than its input,
say) is left out. What a step may be stands in tables, which hypothesis draws from in test_static_random.py and
`draw_network`, here, from one integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


BOTH = (False, True)
CONV: dict[str, Sequence[Any]] = {
    "kernel_size": (1, 3, "asymmetric"),
    "stride": (1, 1, 2),
    "padding": (0, 1, "same", "asymmetric"),
    "dilation": (1, 1, 2),
    "groups": (1, 1, 2, 4, "depthwise"),
    "bias": BOTH,
    "padding_mode": ("zeros", "zeros", "circular", "reflect", "replicate"),
}
TRANSPOSED: dict[str, Sequence[Any]] = {
    "kernel_size": (2, 3),
    "stride": (1, 2),
    "padding": (0, 1),
    "output_padding": (0, 1),
    "groups": (1, 2),
    "bias": BOTH,
}
AFTER = ("", "", "batch", "batch and relu", "relu")
PLACES = range(6)
NOTHING = (None,)

Choices = Sequence[Any] | dict[str, Sequence[Any]]
STEPS: tuple[tuple[str, Choices, Choices], ...] = (
    ("conv", CONV, AFTER),
    ("conv", CONV, AFTER),
    ("transposed", TRANSPOSED, AFTER),
    ("linear", BOTH, AFTER),
    ("act", sorted(ACTIVATIONS), NOTHING),
    ("norm", sorted(NORMS), NOTHING),
    ("pool", sorted(POOLS), NOTHING),
    ("function", sorted(FUNCTIONS), NOTHING),
    ("function", sorted(FUNCTIONS), NOTHING),
    ("join", sorted(JOINS), PLACES),
    ("join", sorted(JOINS), PLACES),
    ("again", ("module", "weight"), NOTHING),
    ("island", NOTHING, NOTHING),
    ("sequence", ("LSTM", "GRU", "LayerNorm", "Attention", "Transformer"), BOTH),
    ("embedding", ("Embedding", "EmbeddingBag"), NOTHING),
)
"""Kind of a step, its settings, and more of them; the place of its input, one of PLACES, comes last."""

DIMS = (1, 2, 2, 2, 3)
OUTPUTS = ("tensor", "dict", "tuple", "maps")


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


def built(steps: list[Any], dims: int, output: str, two: bool, seed: int) -> tuple[Generated, tuple[Tensor, ...]]:
    """The network of a list of steps, and inputs for it."""
    torch.manual_seed(seed)
    shape = (4, {1: (12,), 2: (8, 8), 3: (5, 4, 4)}[dims])
    inputs = [torch.randn(2, shape[0], *shape[1]), torch.randint(0, 9, (2, 3))]
    inputs += [torch.randn(2, shape[0], *shape[1])] if two else []
    model = Generated(steps, dims, output, seed)
    model.build(*inputs)
    return model, tuple(inputs)


def draw_network(seed: int) -> tuple[Generated, tuple[Tensor, ...]]:
    """A network and inputs for it, all from one integer."""
    random = Random(seed)
    steps = [
        (kind, _drawn(settings, random), _drawn(more, random), random.choice(PLACES))
        for kind, settings, more in random.choices(STEPS, k=random.randint(2, 9))
    ]
    return built(steps, random.choice(DIMS), random.choice(OUTPUTS), random.random() < 0.5, seed)


def _drawn(choices: Choices, random: Random) -> Any:
    if isinstance(choices, dict):
        return {key: random.choice(values) for key, values in choices.items()}
    return random.choice(choices)

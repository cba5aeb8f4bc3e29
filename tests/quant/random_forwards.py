"""Modules with random forwards: control flow, views, writes in place, state, shared layers, odd signatures.

A module is the text of a class, drawn from one integer, so that one that fails can be read and run by itself. Its value
`y` has the shape (batch, length, WIDTH) at all times, and every statement keeps it so, for any batch and length; layers
are wide and values stay near [-1, 1], so that honest int8 is right to some 20 dB.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16

HEADER = """
import functools, itertools, math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""

Lines = list[str]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass
class Class:
    """One class while it is drawn: what its constructor makes, and its forward."""

    name: str
    made: Lines = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    body: Lines = field(default_factory=list)

    def text(self, signature: str, begin: Lines, end: Lines) -> str:
        own = ["super().__init__()", *self.made]
        forward = [*begin, *self.body, *end]
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", *(f"        {line}" for line in own)]
        return "\n".join([*lines, "", f"    def forward({signature}):", *(f"        {line}" for line in forward), ""])


@dataclass(frozen=True)
class Signature:
    """How a forward takes its arguments.

    Attributes:
        parameters: their text.
        begin: what makes `x`, `scale`, `flag` and `count` of them.
        call: (tensors, index) -> positional and keyword arguments.
        tensors: how many tensors a call has.
    """

    parameters: str
    begin: Lines
    call: Callable[[list[Tensor], int], Call]
    tensors: int = 1


PLAIN = ["scale, flag, count = 0.75, True, 2"]
SIGNATURES = [
    Signature("self, x", PLAIN, lambda t, i: ((t[0],), {})),
    Signature("self, x", PLAIN, lambda t, i: ((), {"x": t[0]})),
    Signature("self, x, scale=1.0, *, flag=False", ["count = 2"], lambda t, i: ((t[0], 0.5 + i % 2), {"flag": True})),
    Signature("self, x, *more", [*PLAIN, "x = x + 0.5 * sum(more)"], lambda t, i: ((t[0], t[1], t[1]), {}), 2),
    Signature("*args, **settings", ["self, x = args", *PLAIN, "scale = settings.get('scale', 0.5)"],
              lambda t, i: ((t[0],), {"scale": 0.25 + i % 2})),
    Signature("self, inputs", ["x = inputs['x'] + 0.5 * inputs['rest'][0]", *PLAIN],
              lambda t, i: (({"x": t[0], "rest": [t[1]]},), {}), 2),
    Signature("self, x, count", ["scale, flag = 0.5, False"], lambda t, i: ((t[0], 1 + i % 3), {})),
    Signature("self, pair, other=None",
              ["x = pair[0] - 0.5 * pair[1]", "x = x if other is None else x + other", *PLAIN],
              lambda t, i: (((t[0], t[1]),), {"other": t[0] * 0.1 if i % 2 else None}), 2),
]  # fmt: skip
"""All ways to call; those of (x), (x=), numbers, any number of tensors, self among *args, dicts, counts, tuples."""

OUTPUTS = [
    "return y",
    "return y, x * 2",
    "return {'y': y, 'length': y.shape[1]}",
    "return [y, {'mean': y.mean(1), 'x': x}]",
    "return y.flatten(1)",
    "return y.mean((1, 2)), y[:, 0]",
    "return y.transpose(0, 1)",
    "return y, len(y), y.shape",
]


class Draw:
    """Draws one module. Each method whose name begins with `_on_` gives statements, with `self.own` the class."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.classes: Lines = []
        self.own = Class("Model")
        self.count = 0
        self.statements = sorted(name for name in dir(self) if name.startswith("_on_"))

    def module(self) -> tuple[str, Signature]:
        """The text of the classes, of which `Model` is the last, and how the model is called."""
        signature = self.random.choice(SIGNATURES)
        self.fill(self.random.randint(3, 8))
        end = self.random.choice(OUTPUTS)
        text = self.own.text(signature.parameters, [*signature.begin, f"y = {self.layer('linear')}(x)"], [end])
        return "\n".join([HEADER, *self.classes, text]), signature

    def fill(self, statements: int) -> None:
        for _ in range(statements):
            self.own.body += getattr(self, self.random.choice(self.statements))()
        self.own.body.append(f"y = {self.layer('linear')}(torch.tanh(y))")

    def odds(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, *choices: str) -> Lines:
        return [self.random.choice(choices)]

    def size(self) -> int:
        return self.random.choice((2, 3, 4, 5, 8, 12))

    def layer(self, kind: str = "linear") -> str:
        """A layer of the class; now and then one that it has."""
        same = [name for name in self.own.layers if name.startswith(kind)]
        if same and self.odds(0.25):
            return f"self.{self.random.choice(same)}"
        makers = {
            "linear": f"nn.Linear({WIDTH}, {WIDTH})",
            "conv": f"nn.Conv1d({WIDTH}, {WIDTH}, 3, padding=1)",
            "strided": f"nn.Conv1d({WIDTH}, {WIDTH}, 3, stride={self.random.choice((2, 3))}, padding=1)",
            "norm": f"nn.LayerNorm({WIDTH})",
            "batch": f"nn.BatchNorm1d({WIDTH})",
            "gru": f"nn.GRU({WIDTH}, {WIDTH}, batch_first=True)",
        }
        name = self.make(kind, makers[kind])
        self.own.layers.append(name)
        return f"self.{name}"

    def make(self, kind: str, value: str, how: str = "self.{} = {}") -> str:
        self.count += 1
        name = f"{kind}_{self.count}"
        self.own.made.append(how.format(name, value))
        return name

    def buffer(self, value: str) -> str:
        return "self." + self.make("buffer", value, "self.register_buffer('{}', {})")

    # Layers and activations.

    def _on_linear(self) -> Lines:
        return [f"y = {self.layer()}(y)"]

    def _on_activation(self) -> Lines:
        return self.pick("y = F.relu(y)", "y = y.relu()", "y = torch.tanh(y)", "y = F.gelu(y)", "y = y * y.sigmoid()",
                         "y = F.hardswish(y)", "y = F.leaky_relu(y, 0.1)")  # fmt: skip

    def _on_residual(self) -> Lines:
        return self.pick(f"y = y + 0.5 * {self.layer()}(y)", f"y = y - {self.layer()}(F.relu(y)) * scale")

    def _on_norm(self) -> Lines:
        return [f"y = {self.layer('norm')}(y)"]

    def _on_convolution(self) -> Lines:
        layer = self.layer(self.random.choice(("conv", "strided")))
        middle = self.random.choice(("{}", f"{self.layer('batch')}({{}})", "F.relu({})"))
        return [f"y = {middle.format(f'{layer}(y.transpose(1, 2))')}.transpose(1, 2)"]

    def _on_recurrent(self) -> Lines:
        return [f"y, state = {self.layer('gru')}(y)", *self.pick("y = y + state[-1][:, None]", "y = y * 0.5")]

    def _on_attention(self) -> Lines:
        mask = self.random.choice(("", " + torch.full((n, n), -9.0).triu(1)"))
        return [
            "n = y.shape[1]",
            f"q, k = {self.layer()}(y), {self.layer()}(y)",
            f"y = ((q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1]){mask}).softmax(-1) @ y",
        ]

    # Views and rearrangements.

    def _on_view(self) -> Lines:
        return self.pick(
            "y = y[:, ::2]", "y = y.flip(1)", "y = y[:, y.shape[1] // 2 :]", "y = torch.roll(y, 1, 1)",
            "y = y.narrow(1, 0, (y.shape[1] + 1) // 2)",
            "y = torch.cat([y, y[:, :1]], 1)", "y = torch.cat([y, y.mean(1, keepdim=True)], 1)",
            "y = y.reshape(-1, 16).view(x.shape[0], -1, 16)", "y = y.unflatten(-1, (4, 4)).transpose(2, 3).flatten(2)",
            "y = y.repeat(1, 2, 1)", "y = torch.cat(y.chunk(2, -1)[::-1], -1)",
            "y = y.expand(y.shape[0], -1, -1) * 0.5",
        )  # fmt: skip

    def _on_pool(self) -> Lines:
        pool = f"F.max_pool1d(y.transpose(1, 2), {self.random.choice((2, 3))}, ceil_mode=True)"
        mean = "F.adaptive_avg_pool1d(y.transpose(1, 2), (y.shape[1] + 1) // 2)"
        return [f"y = {self.random.choice((pool, mean))}.transpose(1, 2)"]

    def _on_even(self) -> Lines:
        n = self.random.choice((2, 4))
        whole = self.random.choice([
            [f"if y.shape[1] % {n}:", f"    y = F.pad(y, (0, 0, 0, {n} - y.shape[1] % {n}))"],
            [f"y = F.pad(y, (0, 0, 0, -y.shape[1] % {n}))"],
            [f"y = F.pad(y, (0, 0, 0, math.ceil(y.shape[1] / {n}) * {n} - y.shape[1]))"],
        ])  # fmt: skip
        return [*whole, f"y = y.reshape(y.shape[0], -1, {n}, 16).{self.random.choice(('mean', 'amax'))}(2)"]

    # Loops and branches.

    def _on_steps(self) -> Lines:
        over = self.random.choice(("range(y.shape[1])", f"range(0, y.shape[1], {self.size()})"))
        return [
            "state = torch.zeros_like(y[:, 0])",
            "states = []",
            f"for i in {over}:",
            f"    state = torch.tanh({self.layer()}(y[:, i]) + 0.5 * state)",
            "    states.append(state)",
            "y = torch.stack(states, 1)",
        ]

    def _on_parts(self) -> Lines:
        n = self.size()
        return self.pick(
            f"y = torch.cat([y[:, i : i + {n}].mean(1, keepdim=True) for i in range(0, y.shape[1], {n})], 1)",
            f"y = torch.cat([part * (0.5 + 0.5 * (i % 2)) for i, part in enumerate(y.split({n}, 1))], 1)",
            "y = torch.stack([a + 0.5 * b for a, b in zip(y.unbind(1), reversed(y.unbind(1)))], 1)",
            f"y = torch.stack(list(itertools.islice(y.unbind(1), (y.shape[1] + {n}) // {n})), 1)",
            f"y = y * torch.tensor([1 - i / 64 for i in range(64)][: y.shape[1] % {n + 1} + 1]).mean()",
        )

    def _on_while(self) -> Lines:
        return [f"while y.shape[1] > {self.size()}:", *self.pick("    y = y[:, ::2] + 0.1", "    y = y[:, 1:] * 0.9")]

    def _on_branch_of_size(self) -> Lines:
        size = self.random.choice(("y.shape[1]", "len(y)", "y.shape[0]", "y[:, ::3].shape[1]", "y.numel() // 16"))
        test = self.random.choice((f"{size} > {self.size()}", f"{size} % 3 == 1", f"{size} in ({self.size()}, 7)"))
        return [f"if {test}:", f"    y = {self.layer()}(y)", "else:", "    y = y * 0.5 + 0.1"]

    def _on_clamped_size(self) -> Lines:
        n = self.random.choice((f"min(y.shape[1], {self.size()})", f"max(1, y.shape[1] - {self.size()})",
                                f"int(np.clip(y.shape[1], 1, {self.size()}))"))  # fmt: skip
        return [f"n = {n}", *self.pick("y = torch.cat([y[:, :n] * 0.5, y[:, n:]], 1)", "y = y[:, -n:]", "y = y / n")]

    def _on_branch_of_values(self) -> Lines:
        if self.own.name != "Model":  # whose input is rounded, and may be near the branch
            return self._on_residual()
        test = self.random.choice(("x.mean() > 0", "float(x.sum()) < 0", "(x[0, 0] > 0).any()", "x.max().item() > 0.3"))
        return [f"if {test}:", f"    y = {self.layer()}(y)", "else:", "    y = torch.tanh(y)"]

    def _on_arguments(self) -> Lines:
        return self.random.choice([
            ["if flag:", f"    y = {self.layer()}(y) * scale"],
            ["y = y * scale"],
            ["for _ in range(count):", f"    y = torch.tanh({self.layer()}(y))"],
            [f"y = y + {self.layer()}(x).mean(1, keepdim=True)"],
        ])  # fmt: skip

    # Writes in place.

    def _on_write(self) -> Lines:
        own = self.random.choice(("y = y.clone()", f"y = {self.layer()}(y)", "y = y * 1.0"))
        return [own, self.random.choice((
            "y[:, 0] = 0.5", "y[:, ::2] *= 0.5", "y.mul_(0.5).add_(0.1)", "y[..., :4].add_(1)", "y.relu_()",
            "y.transpose(1, 2)[:, :4].neg_()", "y.data.mul_(0.5)", "y.detach().add_(0.1)", "y.clamp_(-1, 1)",
            "y[y.abs() > 100] = 0", "y.index_fill_(1, torch.tensor([0]), 0.25)", "y.view(-1)[:3] = 0.0",
            "y[:, -1:].copy_(y[:, :1])", "y.masked_fill_(torch.ones_like(y, dtype=torch.bool).triu(2), 0.0)",
        ))]  # fmt: skip

    def _on_write_with_readers(self) -> Lines:
        before = self.random.choice(
            ("h = y", "h = y[:, :1]", "h = y.transpose(1, 2)", "h = y.detach()", "h = y.view(-1)")
        )
        read = {"h = y": "h", "h = y[:, :1]": "h", "h = y.transpose(1, 2)": "h.transpose(1, 2)", "h = y.detach()": "h",
                "h = y.view(-1)": "h.view(y.shape)"}[before]  # fmt: skip
        write = self.random.choice(("y.mul_(0.5)", "y[:, :1].add_(0.5)", "h.mul_(0.5)", "h.add_(0.25)", "y.tanh_()"))
        return [f"y = {self.layer()}(y)", before, write, f"y = {self.layer()}(y) + {read}"]

    def _on_filled(self) -> Lines:
        return self.random.choice([
            ["z = torch.empty_like(y)", "torch.mul(y, 0.5, out=z)", "y = y + z"],
            ["z = torch.zeros(y.shape[0], y.shape[1] + 2, 16)", "z[:, 1:-1] = y", "y = z"],
            ["z = y.new_zeros(y.shape)", "for i in range(y.shape[1]):", "    z[:, i] = y[:, i] * 0.5", "y = y + z"],
            ["for part in y.chunk(2, -1):", "    part = part.tanh()", "    y = y + part.repeat(1, 1, 2) * 0.1"],
        ])  # fmt: skip

    # State.

    def _on_state(self) -> Lines:
        self.count += 1
        name = f"kept_{self.count}"
        buffer = self.buffer(f"torch.zeros({WIDTH})")
        both = self.buffer(f"torch.zeros(2, {WIDTH})")
        now = "y.detach().mean((0, 1))"
        return self.random.choice([
            [f"{buffer}.mul_(0.5).add_({now}, alpha=0.5)", f"y = y - {buffer}"],
            [f"{both}[0].copy_({now})", f"y = y + {both}.sum(0) * 0.5"],
            [f"{buffer} = {now}", f"y = y - {buffer} * 0.5"],
            [f"self.{name} = getattr(self, '{name}', 0) + 1", f"y = y / (1 + 1 / self.{name})"],
            [f"before, {buffer} = {buffer}, {now}", "y = y + before * 0.5"],
            [f"if not hasattr(self, '{name}'):", f"    self.{name} = {{}}", f"if y.shape[1] not in self.{name}:",
             f"    self.{name}[y.shape[1]] = torch.linspace(-0.5, 0.5, y.shape[1])[:, None]",
             f"y = y + self.{name}[y.shape[1]]"],
            [f"F.batch_norm(y.flatten(0, 1), {buffer}, {both}[1], training=True)", f"y = y - {buffer}"],
        ])  # fmt: skip

    # Containers, Python, other modules.

    def _on_python(self) -> Lines:
        layer = self.layer()
        return self.random.choice([
            ["parts = {'a': y, 'b': y * 0.5}", "y = sum(parts.values()) * 0.5"],
            ["try:", "    y = y + self.missing", "except AttributeError:", "    y = y * 0.9"],
            [f"y = functools.reduce(lambda a, f: f(a), [{layer}, torch.tanh], y)"],
            ["def halved(z, by=2):", "    return z / by", "y = halved(y, by=1 + len(x.shape) / 3)"],
            ["y = sum(a * b for a, b in zip((y, y.flip(1)), (0.75, 0.25)))"],
            [f"for f in ({layer}, F.relu, {layer}):", "    y = f(y)"],
            [f"y = y + {self.buffer('torch.linspace(-0.5, 0.5, 256)[:, None]')}[: y.shape[1]]"],
        ])  # fmt: skip

    def _on_outside_of_torch(self) -> Lines:
        return self.pick("y = y * float(np.tanh(1 + x.detach().numpy().mean()))",
                         "y = y + torch.tensor(x[0, 0].tolist())",
                         "y = y * (1 + 0.1 * round(x.mean().item(), 3))")  # fmt: skip

    def _on_submodule(self) -> Lines:
        """A class of its own, called once or twice."""
        if len(self.classes) > 3:
            return self._on_residual()
        outer, self.own = self.own, Class(f"Part{len(self.classes)}")
        self.classes.append("")
        place = len(self.classes) - 1
        self.fill(self.random.randint(1, 3))
        begin = ["scale, flag, count = 0.5, False, 1", "x = y"]
        self.classes[place] = self.own.text("self, y", begin, ["return y"])
        outer, self.own = self.own, outer
        name = self.make("part", f"{outer.name}()")
        return [f"y = self.{name}(y)"] * (2 if self.odds(0.3) else 1)


@dataclass(frozen=True)
class RandomModule:
    """A module drawn from its seed, and its calls."""

    seed: int
    text: str
    signature: Signature

    def build(self) -> nn.Module:
        """The float model, the same each time."""
        name = f"<random forward {self.seed}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        namespace: dict[str, Any] = {"__name__": f"random_forward_{self.seed}"}
        exec(compile(self.text, name, "exec"), namespace)
        torch.manual_seed(self.seed)
        model: nn.Module = namespace["Model"]()
        return model.eval()

    def inputs(self, sizes: tuple[int, int], index: int) -> Call:
        """The arguments of one call, new tensors each time; values have the sign of the index, for branches on them."""
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tensors = [
            torch.rand((*sizes, WIDTH), generator=generator) - (0.0 if index % 2 else 1.0)
            for _ in range(self.signature.tensors)
        ]
        return self.signature.call(tensors, index)

    def sizes(self) -> list[tuple[int, int]]:
        """Batch and length of the calibration, and of others."""
        random = Random(self.seed)
        return [(random.randint(2, 9), random.randint(3, 17)) for _ in range(3)] + [(random.randint(2, 4), 33)]


def drawn(seed: int) -> RandomModule:
    """The module of a seed."""
    return RandomModule(seed, *Draw(seed).module())

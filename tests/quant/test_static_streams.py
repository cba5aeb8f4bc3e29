"""Sums that float steps read beside integer ones: kept in float32, and rounded for the integer readers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.fusion.fused_graph import FusedGraph
from quant.static.runner import runners


def decibels(expected: Tensor, found: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (expected - found).square().sum()))


class RMSNorm(nn.Module):
    """As language models write it out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Positions(nn.Module):
    """A convolution over tokens and a sum, as Twins and CPVT encode positions; moves lie between sum and readers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).reshape(x.shape[0], 32, 4, 4)
        return (self.conv(image) + image).flatten(2).transpose(1, 2)


def fused_graph_of(model: nn.Module, x: Tensor) -> FusedGraph:
    [runner] = runners(quant.prepare(model.eval(), x)).values()
    return runner.fused


def integer_sums(fused: FusedGraph) -> int:
    return sum(step.operator.name == "add" for step in fused.steps)


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm], ids=["LayerNorm", "RMSNorm"])
def test_a_stream_that_ends_in_an_int8_layer_is_as_precise_as_one_that_ends_in_a_norm(norm: type[nn.Module]) -> None:
    found = []
    for last in ([norm(32)], []):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(norm) for _ in range(16)], *last, nn.Linear(32, 10)).eval()
        assert integer_sums(fused_graph_of(model, tokens())) == 0
        q = quant.quantize_static(model, [tokens(seed) for seed in range(4)], progress=False)
        with torch.no_grad():
            found.append(decibels(model(tokens()), q(tokens())))
    assert found[1] > found[0] - 1.5
    assert found[1] > 30


def test_moves_and_sums_of_a_stream_are_part_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Positions(), Block(), nn.Linear(32, 10)).eval()
    prepared = quant.prepare(model, tokens())
    quant.calibrate.run(prepared, [tokens(seed) for seed in range(4)], progress=False)
    [runner] = runners(prepared).values()
    assert integer_sums(runner.fused) == 0
    assert {step.reason for step in runner.fused.steps if "add" in step.name} == {"float steps read it too"}
    q = quant.convert(prepared)
    assert {quant.summary(q)[name].outcome for name in ("0.up", "0.down", "2.conv", "4")} == {"int8"}
    assert quant.parity(prepared, q, [tokens()]).holds
    with torch.no_grad():
        assert decibels(model(tokens()), q(tokens())) > 38
    quant.save(q, tmp_path / "stream.q8")
    assert torch.equal(quant.load(tmp_path / "stream.q8", model=model)(tokens()), q(tokens()))


def test_what_only_such_a_sum_reads_is_float_with_it() -> None:
    """A dropout or an activation between a layer and the sum: an integer form of it nobody would read."""

    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(F.dropout(super().forward(x), 0.1, self.training).transpose(1, 2)).transpose(1, 2)

    torch.manual_seed(0)
    model = nn.Sequential(Dropped(), Dropped(), nn.Linear(32, 10)).eval()
    fused = fused_graph_of(model, tokens())
    assert all(fused.emits_integers(step) or step.operator.name == "linear" for step in fused.steps if step.integer)
    q = quant.quantize_static(model, [tokens(seed) for seed in range(4)], progress=False)
    with torch.no_grad():
        assert decibels(model(tokens()), q(tokens())) > 30


def test_training_keeps_a_stream_in_float_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 10)).eval()
    p = quant.prepare_qat(model, tokens()).train()
    p(tokens()).sum().backward()
    q = quant.convert(p.eval())
    with torch.no_grad():
        assert decibels(p(tokens()), q(tokens())) > 45


class Residual(nn.Module):
    """conv -> add -> relu -> conv, each block's output given out as well, as backbones of detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.relu(self.stem(x))
        seen = []
        for block in self.blocks:
            x = F.relu(block(x) + x)
            seen.append(x.flatten(2))
        return [*seen, F.softmax(self.last(x), dim=1)]


def test_sums_of_convolutions_stay_integers() -> None:
    fused = fused_graph_of(Residual(), torch.randn(2, 3, 8, 8))
    assert integer_sums(fused) == 3
    assert all(fused.emits_integers(step) for step in fused.steps if step.operator.name == "add")


def test_a_layer_that_is_left_float_leaves_the_sums_before_it_integers() -> None:
    x = torch.randn(2, 3, 8, 8)
    [runner] = runners(quant.prepare(Residual().eval(), x, quant.Recipe({"blocks.1": None}))).values()
    assert integer_sums(runner.fused) == 3


def test_sums_before_a_float_head_stay_integers() -> None:
    """The last sum is the head's; those before it are read by it through a sum alone."""

    class Headed(Residual):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = self.stem(x)
            for block in self.blocks:
                x = block(F.relu(x)) + x
            return x.pow(3).mean((2, 3)).pow(1 / 3)

    assert integer_sums(fused_graph_of(Headed(), torch.randn(2, 3, 8, 8))) == 2


class Heads(nn.Module):
    """What the caller gets is read by layers as well: a mean, features behind an activation, a part of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(16, 48), nn.Linear(32, 8), nn.Linear(32, 8)
        self.first = nn.Linear(32, 32)
        self.back, self.rest, self.judge = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        features, part = self.body(x).split((32, 16), dim=-1)
        features = torch.tanh(self.first(features))
        mean = self.mean(features)
        drawn = mean + noise * torch.exp(0.5 * self.spread(features))
        return features, mean, part, self.back(drawn), self.rest(part), self.judge(mean)


def test_what_the_caller_gets_is_not_rounded() -> None:
    torch.manual_seed(0)
    model = Heads().eval()
    batches = [(torch.randn(64, 16), torch.randn(64, 8)) for _ in range(4)]
    q = quant.quantize_static(model, batches, progress=False)
    with torch.no_grad():
        found = q(*batches[0])
    for values in found[:3]:
        assert values.unique().numel() > 256
    fused = fused_graph_of(model, batches[0])
    assert [step.name for step in fused.steps if step.operator.name in ("add", "mul")] == []
    assert sorted(step.name for step in fused.steps if step.output in fused.as_reals) == ["mean"]


def test_training_and_integers_agree_on_what_is_not_rounded() -> None:
    torch.manual_seed(0)
    batch = torch.randn(64, 16), torch.randn(64, 8)
    p = quant.prepare_qat(Heads().eval(), batch).train()
    sum(one.square().sum() for one in p(*batch)).backward()
    q = quant.convert(p.eval())
    assert all(step.holds for step in quant.parity(p, q, [batch]))
    with torch.no_grad():
        assert all(decibels(one, other) > 45 for one, other in zip(p(*batch), q(*batch), strict=True))

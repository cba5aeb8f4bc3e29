"""Transformers as models write them: sizes by arithmetic, attention by hand, tokens and positions."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn

import quant
from quant.runtime.programs import RESERVED
from quant.runtime.uncaptured import UncapturedCall
from quant.static.native import Schedule


class ByHand(nn.Module):
    """Attention by hand, its heads by arithmetic of sizes; `divides` says how the scores are scaled."""

    def __init__(self, width: int = 24, heads: int = 3, *, divides: bool = False) -> None:
        super().__init__()
        self.heads, self.divides = heads, divides
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, D = x.shape
        q, k, v = (one(x).view(B, T, self.heads, D // self.heads).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1)
        each = D // self.heads
        scores = scores / math.sqrt(8) if self.divides else scores * (self.heads / 24) ** 0.5
        if mask is not None:
            scores = scores + mask
        y = F.dropout(scores.softmax(dim=-1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, self.heads * each))


class FromOne(nn.Module):
    """One projection for all, cut by `unbind`, bmm over joined batches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.size(0), x.size(1)
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, 3, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = (one.reshape(batch * 3, tokens, q.shape[-1]) for one in (q, k, v))
        y = torch.bmm(torch.softmax(torch.bmm(q * 8**-0.5, k.transpose(1, 2)), -1), v)
        return self.out(y.reshape(batch, 3, tokens, -1).transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """A class token and positions, windows of rows, and norms by function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(10, 24), nn.Linear(24, 5)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 24)), nn.Parameter(torch.randn(1, 9, 24))
        self.weight, self.attention = nn.Parameter(torch.rand(24) + 0.5), ByHand()
        self.register_buffer("gain", torch.rand(24) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.places[:, : x.shape[1]] if x.shape[1] > 9 else x + self.places
        x = x + self.gain * self.attention(F.layer_norm(x, (24,), self.weight, None, 1e-6))
        return self.head(F.layer_norm(x, (24,))[:, 0])


class Windows(nn.Module):
    """Padded to whole windows where it has to be, as Swin does."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window, self.norm, self.attention = window, nn.LayerNorm(24), ByHand()

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        if H % w or W % w:
            return x
        y = self.norm(x).view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, C)
        y = self.attention(y).view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        return x + y


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "by hand": (ByHand(), (torch.randn(2, 9, 24),), (torch.randn(3, 17, 24),)),
    "divided": (ByHand(divides=True), (torch.randn(2, 9, 24),), (torch.randn(1, 5, 24),)),
    "masked": (
        ByHand(),
        (torch.randn(2, 9, 24), torch.randn(2, 1, 1, 9)),
        (torch.randn(4, 12, 24), torch.randn(4, 1, 12, 12)),
    ),
    "from one": (FromOne(), (torch.randn(2, 9, 24),), (torch.randn(3, 20, 24),)),
    "positions": (Positions(), (torch.randn(2, 8, 10),), (torch.randn(5, 8, 10),)),
    "windows": (Windows(), (torch.randn(2, 8, 12, 24),), (torch.randn(1, 16, 4, 24),)),
}


def converted(case: str) -> tuple[nn.Module, nn.Module]:
    model, inputs, _ = CASES[case]
    prepared = quant.prepare(copy.deepcopy(model).eval(), inputs)
    with torch.no_grad():
        prepared(*inputs)
        return prepared, quant.convert(prepared)


def schedule(q: nn.Module) -> Schedule:
    runner: Any = q._modules[RESERVED]
    found: Schedule = runner.program.schedule
    return found


def by_steps(q: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with mock.patch.object(CompiledBackend, "plans", False):
        y: Tensor = q(*inputs)
    return y


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_native_call(case: str) -> None:
    found = schedule(converted(case)[1])
    inside = sum(region.steps for region in found.regions)
    assert [type(step).__name__ for step in found.steps].count("Region") == len(found.regions) == 1
    assert inside > 10


@pytest.mark.parametrize("case", CASES)
def test_planned_is_step_by_step_to_the_bit_and_near_float(case: str) -> None:
    prepared, q = converted(case)
    _, seen, others = CASES[case]
    with torch.no_grad():
        for inputs in (seen, others):
            got = q(*inputs)
            assert torch.equal(got, by_steps(q, inputs))
            assert not torch.equal(got, torch.zeros_like(got))
        assert float((q(*seen) - prepared(*seen)).norm() / prepared(*seen).norm()) < 0.05
    batch = {"x": seen[0], "mask": seen[1]} if len(seen) == 2 else seen
    assert quant.parity(prepared, q, [batch]).holds


@pytest.mark.parametrize("case", CASES)
def test_a_saved_file_gives_the_same(case: str, tmp_path: Path) -> None:
    _, q = converted(case)
    model, seen, others = CASES[case]
    quant.save(q, tmp_path / "q.q8")
    loaded = quant.load(tmp_path / "q.q8", model=model)
    with torch.no_grad():
        for inputs in (seen, others):
            assert torch.equal(loaded(*inputs), q(*inputs))


def test_a_size_that_decides_otherwise_is_no_call_of_the_program() -> None:
    _, q = converted("windows")
    x = torch.randn(2, 7, 12, 24)
    with torch.no_grad(), pytest.warns(UncapturedCall, match="decides by a size: it was 0"):
        assert torch.equal(q(x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ["by hand", "positions", "windows"])
def test_it_exports(case: str) -> None:
    _, q = converted(case)
    _, seen, _ = CASES[case]
    with torch.no_grad():
        assert torch.equal(torch.export.export(q, seen).module()(*seen), q(*seen))


def test_parameters_are_read_anew() -> None:
    _, q = converted("positions")
    _, seen, _ = CASES["positions"]
    with torch.no_grad():
        before = q(*seen)
        q.places.mul_(2.0)  # type: ignore[operator, union-attr]
        changed = q(*seen)
        assert not torch.equal(changed, before)
        assert torch.equal(changed, by_steps(q, seen))
        q.gain = torch.zeros(24)
        assert torch.equal(q(*seen), by_steps(q, seen))


class Sums(nn.Module):
    """Parameters of two modules in one norm, which no line of a plan has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.layer = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.layer_norm(self.layer(x), (6,), self.one.weight, self.two.bias))


def test_parameters_of_two_modules_run_by_themselves() -> None:
    x = torch.randn(3, 6)
    q = quant.quantize_static(Sums().eval(), [x], progress=False)
    assert [type(step).__name__ for step in schedule(q).steps] == ["Region", "FloatCall", "Region"]
    with torch.no_grad():
        assert torch.equal(q(x), by_steps(q, (x,)))


class Gram(nn.Module):
    """Products of all pairs of channels, summed over the pixels, as losses of style have them."""

    def forward(self, x: Tensor) -> Tensor:
        f = x.flatten(2)
        return f @ f.transpose(1, 2)


def test_products_over_many_pixels_are_exact() -> None:
    torch.manual_seed(0)
    x = 3 + 0.01 * torch.rand(1, 4, 224, 224)
    x[0, 0, 0, 0] = 0
    q = quant.quantize_static(Gram().eval(), [x], progress=False)
    with torch.no_grad():
        y = q(x)
        torch.testing.assert_close(y, Gram()(x), rtol=0.02, atol=0)
        assert torch.equal(y, by_steps(q, (x,)))

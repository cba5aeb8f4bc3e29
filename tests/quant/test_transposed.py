"""Weights that are kept (in, out), as GPT-2's Conv1D has them, and slices of a weight that holds many layers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.parity import parity

from .test_convert import check, signal_to_noise


class Conv1D(nn.Module):
    """The layer of transformers.pytorch_utils, in its words."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.2 * torch.randn(nx, nf))
        self.bias = nn.Parameter(0.1 * torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = x.size()[:-1] + (self.nf,)  # noqa: RUF005 - as transformers writes it
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class Written(nn.Module):
    """A product with the weight in one of the ways that people write it."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.2 * torch.randn(12, 20)), nn.Parameter(0.1 * torch.randn(20))
        self.how, self.head = how, nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.how(x, self.weight, self.bias)))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "operator": lambda x, w, b: x @ w + b,
    "matmul": lambda x, w, b: b + torch.matmul(x, w),
    "method": lambda x, w, b: x.matmul(w) + b,
    "linear": lambda x, w, b: F.linear(x, w.t(), b),
    "scaled": lambda x, w, b: x @ (w * 0.5) - b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w).unflatten(0, (3, 7)),
    "mm": lambda x, w, b: (torch.mm(x.flatten(0, 1), w) + b).unflatten(0, (3, 7)),
}
X = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """transformers, as far as its Conv1D goes."""
    module = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)
    return Conv1D


@pytest.mark.parametrize("way", WAYS)
def test_a_product_with_the_models_own_weight_is_a_layer(way: str) -> None:
    torch.manual_seed(0)
    q = check(Written(WAYS[way]), X, sqnr=30.0)
    report = quant.summary(q)
    assert report[""].outcome == "int8"
    assert report[""].bytes_after < 0.5 * report[""].bytes_before


def test_it_is_trained() -> None:
    torch.manual_seed(0)
    p = quant.prepare_qat(Written(WAYS["operator"]), X).train()
    p(X).square().mean().backward()
    assert float(p.weight.grad.abs().sum()) > 0
    assert float(p.bias.grad.abs().sum()) > 0
    assert parity(p.eval(), quant.convert(p), [X]).holds


def test_a_product_with_a_buffer_stays_float() -> None:
    class Mel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.rand(12, 20))
            self.head = nn.Linear(20, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x.exp() @ self.bank).log())

    q = quant.quantize_static(Mel().eval(), [X], progress=False)
    assert quant.summary(q)[""].outcome == "float"


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_product_that_is_weighed_stays_float_and_right(beta: float) -> None:
    torch.manual_seed(0)
    model = Written(
        lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w, beta=beta, alpha=2.0).unflatten(0, (3, 7))
    ).eval()
    with torch.no_grad():
        assert signal_to_noise(model(X), quant.quantize_static(model, [X], progress=False)(X)) > 30.0


@torch.no_grad()
def test_conv1d_is_static_and_takes_other_sizes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(24, 12), nn.GELU(), Conv1D(12, 24), nn.LayerNorm(12)).eval()
    q = quant.quantize_static(model, [X], progress=False)
    assert [quant.summary(q)[name].outcome for name in "02"] == ["int8", "int8"]
    for x in (X, torch.randn(2, 5, 12)):
        assert signal_to_noise(model(x), q(x)) > 25.0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_conv1d_is_dynamic(library: type[nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(library(24, 12), nn.GELU(), library(12, 24)).eval().to(dtype)

    model, x = make(), X.to(dtype)
    q = quant.quantize_dynamic(model)
    assert [entry.outcome for entry in quant.summary(q)] == ["int8", "int8"]
    assert float((q(x) - model(x)).float().norm() / model(x).float().norm()) < 0.02
    assert q(x).dtype == q[0].weight.dtype == dtype
    assert q[0].weight.shape == model[0].weight.shape
    assert (q[0].nf, q[0].nx) == (24, 12)
    assert float((q[0].weight - model[0].weight).float().abs().max()) < 0.01
    quant.save(q, tmp_path / "conv1d.q8")
    assert torch.equal(quant.load(tmp_path / "conv1d.q8", model=make())(x), q(x))


def test_another_conv1d_is_none(library: type[nn.Module]) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), None

        def forward(self, x: Tensor) -> Tensor:
            return x

    Other.__name__ = "Conv1D"
    with pytest.raises(quant.NothingQuantized):
        quant.quantize_dynamic(Other())


class Experts(nn.Module):
    """Experts held in one parameter each, as transformers holds them; every expert sees every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(4, 32, 12))
        self.down_proj = nn.Parameter(0.2 * torch.randn(4, 12, 16))
        self.router = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        found: Any = 0
        for index in range(4):
            gate, up = F.linear(x, self.gate_up_proj[index]).chunk(2, dim=-1)
            found = found + F.linear(F.silu(gate) * up, self.down_proj[index]) * weights[..., index : index + 1]
        return found


@torch.no_grad()
def test_slices_of_a_parameter_are_layers_each() -> None:
    torch.manual_seed(0)
    model = Experts().eval()
    q = quant.quantize_static(model, [X], progress=False)
    other = torch.randn(2, 5, 12)
    assert signal_to_noise(model(X), q(X)) > 25.0
    assert signal_to_noise(model(other), q(other)) > 20.0
    assert q.gate_up_proj is None
    assert quant.summary(q).bytes_after < 0.5 * quant.summary(q).bytes_before


@pytest.mark.usefixtures("torchvision_loads")
@torch.no_grad()
def test_gpt2_of_transformers_is_dynamic() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    q = quant.quantize_dynamic(model)
    assert quant.summary(q)["transformer.h.0.attn.c_attn"].outcome == "int8"
    tokens = torch.randint(50, (2, 8))
    assert signal_to_noise(model(tokens).logits, q(tokens).logits) > 30.0

"""Static layers with 16-bit activations: two exact products of bytes, planned, step by step, and in files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quant.kernels import two_bytes
from torch import Tensor, nn

import quant
from quant.runtime.instructions import LayerCall, Quantize

FINE = quant.QConfig(activation_bits=16)


class Residual(nn.Module):
    """A sum and a function of it in front of a layer, which would be integers for a layer of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        y: Tensor = self.three(torch.relu(x + self.two(x)))
        return y


def attention_like() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 5), (3, 8)),
    "linears": (attention_like, (2, 7, 16)),
    "clamped, then integers": (lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 4)), (6, 8)),
    "a sum": (Residual, (4, 12)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, stride=2)
        ),
        (2, 3, 12, 12),
    ),
    "padding of another mode": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (2, 2, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), (2, 6, 8, 8)),
    "1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 5, stride=2), nn.ReLU(), nn.Conv1d(6, 2, 1)), (2, 4, 21)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), nn.ReLU()), (2, 3, 6, 6)),
}


def inputs(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values of which most are small beside a few: 8 bits lose them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(seed + 99)) < 0.05, 20.0, 0.2)


def made(name: str, qconfig: quant.QConfig = FINE) -> tuple[nn.Module, nn.Module, Tensor]:
    make, shape = CASES[name]
    torch.manual_seed(1)
    model = make().eval()
    x = inputs(shape)
    return model, quant.quantize_static(model, [x], quant.Recipe(default=qconfig), progress=False), x


def sqnr(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.detach(), got.detach()
    return float(10 * torch.log10(expected.square().sum() / (expected - got).square().sum()))


@pytest.mark.parametrize("name", CASES)
def test_the_planned_run_the_single_steps_and_the_simulation_agree(name: str) -> None:
    model, q, x = made(name)
    prepared = quant.prepare(model, x, quant.Recipe(default=FINE))
    quant.calibrate.run(prepared, [x], progress=False)
    report = quant.parity(prepared, q, [x])
    assert report.holds, str(report)
    planned = q(x)
    with quant.kernels.use("reference"):
        one_by_one = q(x)
    scale = planned.abs().max()
    assert (planned - one_by_one).abs().max() <= 1e-6 * scale or sqnr(one_by_one, planned) > 60


@pytest.mark.parametrize("name", CASES)
def test_only_the_weights_and_the_ranges_between_layers_are_rounded_to_8_bits(name: str) -> None:
    model, q, x = made(name)
    _, coarse, _ = made(name, quant.QConfig())
    with torch.no_grad():
        expected = model(x)
    gain = sqnr(expected, q(x)) - sqnr(expected, coarse(x))
    assert gain > 2.5, f"{gain:.1f} dB"


@pytest.mark.parametrize("name", CASES)
def test_no_value_is_rounded_to_8_bits_before_a_layer_of_16(name: str) -> None:
    _, q, _ = made(name)
    if hasattr(q.program, "instructions"):  # not a lone layer
        kinds = [type(one) for one in q.program.instructions]
        assert Quantize not in kinds
        assert LayerCall in kinds


def test_a_saved_layer_reads_two_bytes_again(tmp_path: Path) -> None:
    for name in ("linears", "convolutions", "linear"):
        model, q, x = made(name)
        quant.save(q, tmp_path / "q.pt")
        loaded = quant.load(tmp_path / "q.pt", model=copy.deepcopy(model))
        assert torch.equal(loaded(x), q(x))


def test_one_layer_of_a_model_by_its_name() -> None:
    model, _, x = made("linears")
    q = quant.quantize_static(model, [x], quant.Recipe({"3": FINE}), progress=False)
    entries = {entry.name: entry.detail for entry in quant.summary(q)}
    assert "16-bit input" in entries["3"]
    assert "16-bit" not in entries["1"]


def test_outliers_that_8_bits_cannot_hold_leave_no_layer_float() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight[:3] *= 40
        model[1].weight[:, :3] /= 40
    batches = [torch.randn(8, 32) for _ in range(4)]
    q = quant.quantize_static(model, batches, quant.Recipe({"1": FINE}), progress=False, smooth=False)
    assert quant.summary(q)["1"].outcome == "int8"
    with torch.no_grad():
        assert sqnr(model(batches[0]), q(batches[0])) > 25


def test_a_value_that_is_not_finite_makes_its_sample_nan() -> None:
    _, q, x = made("linears")
    x = x.clone()
    x[1, 3, 2] = torch.nan
    y = q(x)
    assert y[1].isnan().all()
    assert torch.equal(y[0], q(inputs((2, 7, 16)))[0])


def test_training_leaves_the_input_as_it_is_and_converts_to_two_bytes() -> None:
    model, _, x = made("linears")
    recipe = quant.Recipe(default=FINE)
    prepared = quant.prepare_qat(copy.deepcopy(model), x, recipe).train()
    for _ in range(3):
        prepared(x).square().mean().backward()
    prepared.eval()
    q = quant.convert(prepared)
    assert sqnr(prepared(x).detach(), q(x)) > 70


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_two_bytes_are_within_half_a_step_of_the_low_one(scale: float) -> None:
    s, z = torch.tensor(scale), torch.tensor(40, dtype=torch.int32)
    x = (torch.rand(10_000) * 255 - 40) * s
    error = (two_bytes.rounded(x, s, z) - x).abs().max()
    assert error <= 0.501 * scale / two_bytes.STEPS + 255 * scale * 2**-23


@pytest.mark.parametrize("name", ["linears", "convolutions", "linear"])
def test_an_export_to_qdq_names_a_layer_that_it_cannot_write_and_the_way_out(name: str) -> None:
    _, q, _ = made(name)
    with pytest.raises(ValueError, match=r"layer '\d?'.* 16-bit activations .*smooth=False"):
        quant.to_qdq(q)


@pytest.mark.parametrize("name", ["linears", "convolutions"])
def test_an_export_to_onnx_names_a_layer_that_it_cannot_write_and_the_way_out(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    _, q, _ = made(name)
    with pytest.raises(ValueError, match=r"layer '\d' has 16-bit activations .*smooth=False"):
        quant.export_onnx(q, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())

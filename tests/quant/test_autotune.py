"""`kernels.autotune` on models as `quant` makes them, and its choices in saved files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant
from quant import kernels


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(8, 8), nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x))[0])


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().mean((2, 3)))


def _dynamic() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Dynamic().eval()
    return model, quant.quantize_dynamic(model), torch.randn(5, 2, 8)


@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def _static() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, data = Static().eval(), [torch.randn(2, 3, 9, 9) for _ in range(4)]
    return model, quant.quantize_static(model, data, progress=False), data[0]


def favouring(model: nn.Module, name: str) -> Callable[[], float]:
    """A clock by which everything takes ten times as long as on the backend `name`."""
    layers = [module for module in model.modules() if hasattr(module, "backend")]
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0 if any(layer.backend == name for layer in layers) else 10.0
        return now

    return clock


@pytest.mark.parametrize("make", [_dynamic, _static])
def test_choices_change_no_number_and_are_saved(
    make: Callable[[], tuple[nn.Module, nn.Module, Tensor]], tmp_path: Path
) -> None:
    model, made, x = make()
    expected = made(x)
    result = kernels.autotune(made, x, backends=["reference"], progress=False, clock=favouring(made, "reference"))
    assert {one.backend for one in result} >= {"reference"}
    assert any("reference" in line.detail for line in quant.summary(made))  # also where it is the only backend
    # The integers are the same; gates and other float steps may round their last bit differently.
    assert (made(x) - expected).abs().max() < 1e-5
    quant.save(made, tmp_path / "tuned.safetensors")
    loaded = quant.load(tmp_path / "tuned.safetensors", model=model)
    assert list(chosen(loaded)) == list(chosen(made))
    elsewhere = quant.load(tmp_path / "tuned.safetensors", model=model, backend="onednn")
    assert {backend for _, backend in chosen(elsewhere)} == {"onednn"}


def chosen(model: nn.Module) -> Iterator[tuple[str, str | None]]:
    return ((name, module.backend) for name, module in model.named_modules() if hasattr(module, "backend"))


def test_a_planned_region_is_one_choice() -> None:
    _, made, x = _static()
    result = kernels.autotune(made, x, backends=["reference"], progress=False)
    assert [one.name for one in result] == [""]
    assert len(list(chosen(made))) == result.layers[0].parts

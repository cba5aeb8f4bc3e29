"""`export_executorch`: the file, run by ExecuTorch's own Python runtime, gives the numbers of the converted model."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant

pytestmark = [pytest.mark.usefixtures("seeded_on_one_thread"), pytest.mark.filterwarnings("ignore")]

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="executorch is not installed (the extra of its name)"
)


class Photos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise, self.head = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.first(image))
        x = torch.relu(x + self.second(x))
        return self.head(nn.functional.hardswish(self.depthwise(x)).mean((2, 3)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 10)).eval()


def run(path: Path, x: Tensor) -> Tensor:
    runtime: Any = importlib.import_module("executorch.runtime")
    method = runtime.Runtime.get().load_program(path).load_method("forward")
    [y] = method.execute([x])
    return y  # type: ignore[no-any-return]


def error(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


@needs_executorch
def test_a_convolutional_network_is_integers_in_xnnpack(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 40, 40)
    q = quant.quantize_static(Photos().eval(), [x, x], progress=False)
    report = quant.export_executorch(q, tmp_path / "photos.pte", (x,))
    assert report.delegates >= 1
    assert not any("conv" in name for name in report.portable)
    assert report.size == (tmp_path / "photos.pte").stat().st_size
    with torch.no_grad():  # the last layer gives floats, and rounds its input once more, by the range of each row
        assert error(run(tmp_path / "photos.pte", x), q(x)) < 5e-3


@needs_executorch
def test_a_transformer_with_dynamic_layers_has_their_numbers(tmp_path: Path) -> None:
    x = torch.randn(1, 24, 64)
    q = quant.quantize_dynamic(encoder())
    report = quant.export_executorch(q, tmp_path / "encoder.pte", (x,))
    assert not any("addmm" in name for name in report.portable)
    with torch.no_grad():
        assert error(run(tmp_path / "encoder.pte", x), q(x)) < 1e-3


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    q = quant.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(
        ImportError, match=r"export_executorch needs the package executorch .*octet-quant\[executorch\]"
    ):
        quant.export_executorch(q, tmp_path / "m.pte", (torch.randn(2, 8),))
    assert not list(tmp_path.iterdir())

"""What the zoo says of an ONNX file: the model's bits, too far from float, or a refusal by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quant

from . import in_onnx
from .entry import Entry, images


class Network(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x))).mean((2, 3))


def row(function: Callable[[Tensor], Tensor]) -> dict[str, object]:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    entry = Entry("network", lambda: Network(function), images(12))
    model = entry.build()
    q = quant.quantize_static(model, [entry.draw(0, 4)], progress=False)
    with torch.no_grad():
        return in_onnx.verdict(entry, model, q, [entry.draw(1, 4), entry.draw(2, 3)])


def test_a_file_that_runs() -> None:
    found = row(torch.relu)
    assert found["verdict"] == "ok"
    assert found["apart"] == 0.0 or "from the model" in str(found["reason"])


def test_a_refusal_names_the_step() -> None:
    found = row(lambda x: torch.fft.fft2(x).real)
    assert found["verdict"] == "ok"
    assert str(found["reason"]).startswith("refused quant.export_onnx: layer ")


@pytest.mark.filterwarnings("ignore::quant.runtime.uncaptured.UncapturedCall")
def test_a_size_that_the_forward_decides_by_is_the_files_alone() -> None:
    found = row(lambda x: x * 2 if x.shape[0] == 4 else x)
    assert found["verdict"] == "ok"
    assert "its forward decides by size 0 of 'x', 4 for the file and 3 in a call" in str(found["reason"])


def test_what_is_wrong_with_an_output() -> None:
    wanted = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ours = wanted + 0.01 * torch.ones(50)
    assert in_onnx.difference(ours, ours, wanted) == ("", 0.0)
    said, apart = in_onnx.difference(wanted + 0.1, ours, wanted)
    assert "20.0 dB further from float than the model" in said
    assert apart > 0.01
    assert in_onnx.difference(wanted + 0.011, ours, wanted)[0] == ""
    said, apart = in_onnx.difference(ours[None], ours, wanted)
    assert "expected torch.float32 (50,)" in said
    assert apart == math.inf

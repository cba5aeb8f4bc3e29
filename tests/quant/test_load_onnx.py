"""ONNX files of other quantisers, against ONNX Runtime. Where onnx or onnxruntime is missing the tests say so."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Residual(nn.Module):
    """Norms, sums, concatenations, pools with padding, depthwise convolutions, clamps and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 16, 1)
        self.gate = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        y = torch.relu(x + self.wide(F.relu6(self.deep(x))))
        y = torch.cat([y * torch.sigmoid(self.gate(y)), F.avg_pool2d(y, 3, 1, 1)], 1)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


def images() -> list[Tensor]:
    return list(torch.randn(6, 4, 3, 32, 32, generator=torch.Generator().manual_seed(1)))


def exported(model: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter, that it is the older one
        torch.onnx.export(
            model.eval(),
            (images()[0],),
            str(path),
            input_names=["x"],
            dynamo=False,
            dynamic_axes={"x": {0: "n", 2: "h", 3: "w"}},
        )
    return path


def quantized(model: nn.Module, folder: Path, **options: Any) -> Path:
    """The file that ONNX Runtime's quantiser writes."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    tool = pytest.importorskip("onnxruntime.quantization", reason="onnxruntime is not installed")

    class Reader(tool.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(images())

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"x": batch.numpy()}

    source, target = exported(model, folder / "float.onnx"), folder / "int8.onnx"
    types = {"activation_type": tool.QuantType.QUInt8, "weight_type": tool.QuantType.QInt8}
    named = {name: getattr(tool.QuantType, value) for name, value in options.items() if name in types}
    tool.quantize_static(str(source), str(target), Reader(), **{**types, **options, **named})
    return target


def by_onnxruntime(path: Path, x: Tensor) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def steps_apart(path: Path, ours: Tensor, theirs: Tensor) -> float:
    """The largest difference in steps of the file's last range."""
    from quant.onnx.file import read_onnx

    file = read_onnx(path)
    last = [node for node in file.nodes if node.op == "QuantizeLinear"][-1]
    return float((ours - theirs).abs().max() / file.constants[last.inputs[1]])


OPTIONS = {
    "per channel": {"per_channel": True},
    "per tensor": {"per_channel": False},
    "int8 activations": {"per_channel": True, "activation_type": "QInt8"},
    "uint8 weights": {"weight_type": "QUInt8", "extra_options": {"WeightSymmetric": True}},
}


@pytest.mark.parametrize("which", OPTIONS)
def test_files_of_onnxruntime(which: str, tmp_path: Path) -> None:
    model = Residual().eval()
    path = quantized(model, tmp_path, **OPTIONS[which])
    loaded = quant.load_onnx(path)
    for x in (images()[0], images()[1][:1], torch.randn(3, 3, 48, 40)):
        ours, theirs = loaded(x), by_onnxruntime(path, x)
        assert ours.shape == theirs.shape
        assert steps_apart(path, ours, theirs) <= 1.01, "a table's sigmoid may round a tie the other way"
    exact = model(images()[0]).detach()
    assert float((ours := loaded(images()[0])).sub(exact).norm() / exact.norm()) < 0.1
    assert torch.equal(ours, quant.load_onnx(path, backend="reference")(images()[0]))


def test_the_bits_are_those_of_onnxruntime(tmp_path: Path) -> None:
    """Without functions in float: everything between the input and the output is integers."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            x = torch.relu(x + self.second(x))
            return self.head(x.mean((2, 3)))

    path = quantized(Plain().eval(), tmp_path, per_channel=True)
    loaded = quant.load_onnx(path)
    assert all(torch.equal(loaded(x), by_onnxruntime(path, x)) for x in images())


def test_a_file_of_nncf(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    nncf = pytest.importorskip("nncf", reason="nncf is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6272, 5)
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = nncf.Dataset([{"x": one.numpy()} for one in images()])
        file = nncf.quantize(onnx.load(str(exported(model, tmp_path / "float.onnx"))), data)
    path = tmp_path / "int8.onnx"
    onnx.save(file, str(path))
    x = images()[0]
    ours, theirs = quant.load_onnx(path)(x), by_onnxruntime(path, x)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.005


def test_its_module_is_as_others(tmp_path: Path) -> None:
    import copy

    loaded = quant.load_onnx(quantized(Residual(), tmp_path))
    x = images()[0]
    assert torch.equal(copy.deepcopy(loaded)(x), loaded(x))
    x[1, 0, 0, 0] = torch.nan
    assert torch.isnan(loaded(x)).any(1).tolist() == [False, True, False, False]
    with pytest.raises(TypeError, match=r"expected 1 inputs \(x\), got 2"):
        loaded(x, x)
    with pytest.raises(TypeError, match=r"input 'x': expected torch.float32, got torch.float64"):
        loaded(x.double())


def test_a_file_with_float_layers_is_refused_by_name(tmp_path: Path) -> None:
    path = quantized(Residual(), tmp_path, op_types_to_quantize=["Gemm"])
    with pytest.raises(
        ValueError, match=r"int8.onnx: node '.*Conv.*' \(Conv\): its input .* is a constant that is not"
    ):
        quant.load_onnx(path)


def test_an_operator_without_an_integer_form_is_refused_by_name(tmp_path: Path) -> None:
    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).cumsum(1)

    path = quantized(Soft(), tmp_path)
    with pytest.raises(ValueError, match=r"node '.*CumSum.*' \(CumSum\) has no integer form here; known are Abs, "):
        quant.load_onnx(path)


def test_no_model(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        quant.load_onnx(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no protobuf")
    with pytest.raises(ValueError, match=r"text.onnx is no ONNX model"):
        quant.load_onnx(tmp_path / "text.onnx")


def test_without_onnx_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"takes the package onnx, .*octet-quant\[onnx\]"):
        quant.load_onnx(tmp_path / "any.onnx")

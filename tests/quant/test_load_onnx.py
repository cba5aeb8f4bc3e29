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


def session_of(path: Path, *, exact: bool = True) -> Any:
    """A session; `exact` without VNNI too, where sums of two products would overflow."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def by_onnxruntime(path: Path, x: Tensor) -> Tensor:
    session = session_of(path)
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


def resized(folder: Path, factors: list[float], attributes: dict[str, str], last: str = "y") -> Path:
    """A file that resizes integers of a range, and gives the rounded result; 's' for that before it is rounded."""
    helper = pytest.importorskip("onnx", reason="onnx is not installed").helper
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    dims = ["n", "c", "d", "h", "w"][: len(factors) + 2]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["r"]),
        helper.make_node("Resize", ["r", "", "factors"], ["s"], **attributes),
        helper.make_node("QuantizeLinear", ["s", "scale", "zero"], ["t"]),
        helper.make_node("DequantizeLinear", ["t", "scale", "zero"], ["y"]),
    ]
    held = [
        helper.make_tensor("scale", 1, [], [1.0]),
        helper.make_tensor("zero", 2, [], [0]),
        helper.make_tensor("factors", 1, [len(factors) + 2], [1.0, 1.0, *factors]),
    ]
    ends = [helper.make_tensor_value_info(name, 1, [f"{one}{name}" for one in dims]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "resized", ends[:1], ends[1:], held)
    path = folder / "resized.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


FACTORS = [0.1, 0.29, 1 / 3, 0.5, 0.7, 0.75, 0.9999, 1.0, 1.1, 1.25, 1.3, 1.5, 1.7, 2.0, 2.3, 3.0, 3.3, 5.0, 41.0]
NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
COORDINATES = ["half_pixel", "align_corners", "pytorch_half_pixel"]


@pytest.mark.parametrize("factor", FACTORS)
def test_nearest_values_are_those_of_onnxruntime(factor: float, tmp_path: Path) -> None:
    """For every size: torch's own size and place are other ones for some."""
    path = resized(tmp_path, [factor], NEAREST)
    session, loaded = session_of(path), quant.load_onnx(path)
    for size in range(1, 256):
        x = torch.arange(float(size)).view(1, 1, size)
        if int(torch.tensor(size * 1.0) * torch.tensor(factor)):
            wanted = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
            assert torch.equal(loaded(x), wanted), f"of size {size}"
    if factor < 1:
        with pytest.raises(ValueError, match="empty"):
            loaded(torch.zeros(1, 1, 1))


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_linear_values_are_those_of_onnxruntime(coordinates: str, tmp_path: Path) -> None:
    """But for the order in which two dimensions are rounded, which decides ties."""
    attributes = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    drawn = torch.Generator().manual_seed(3)
    least = 1.0 if coordinates == "pytorch_half_pixel" else 0.0
    factors = [one for one in FACTORS if least <= one < 6]
    for one, other in zip(factors, [*factors[5:], *factors[:5]], strict=True):
        for last, bound in (("s", 1e-3), ("y", 1)):
            path = resized(tmp_path, [one, other], attributes, last)
            session, loaded = session_of(path), quant.load_onnx(path)
            for height, width in [(10, 26), (100, 13), (22, 29), (11, 11), (30, 40)]:
                x = torch.randint(0, 256, (2, 3, height, width), generator=drawn).float()
                wanted = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
                assert (ours := loaded(x)).shape == wanted.shape
                assert (ours - wanted).abs().max() <= bound


@pytest.mark.parametrize("coordinates", ["asymmetric", *COORDINATES])
def test_an_image_that_keeps_its_size_is_returned(coordinates: str, tmp_path: Path) -> None:
    """As ONNX Runtime does, whatever the factor."""
    mode = NEAREST if coordinates == "asymmetric" else {"mode": "linear", "coordinate_transformation_mode": coordinates}
    path = resized(tmp_path, [1.2, 1.2], mode)
    loaded, x = quant.load_onnx(path), torch.randint(0, 256, (1, 2, 4, 3)).float()
    assert torch.equal(loaded(x), x)
    assert torch.equal(by_onnxruntime(path, x), x)


@pytest.mark.parametrize("factors", [[1.7, 0.7], [1.3, 2.0], [1.1, 1.7, 0.7]])
def test_several_dimensions_are_those_of_onnxruntime(factors: list[float], tmp_path: Path) -> None:
    path = resized(tmp_path, factors, NEAREST)
    loaded = quant.load_onnx(path)
    for sizes in ([13, 10, 9], [26, 22, 20], [5, 4, 40]):
        x = torch.randint(0, 256, (2, 3, *sizes[: len(factors)])).float()
        assert torch.equal(loaded(x), by_onnxruntime(path, x))


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


class Encoder(nn.Module):
    """Embeddings, masks, attention written out, norms and a gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(50, 32), nn.Embedding(64, 32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.wide, self.narrow, self.after = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        query, key, value = (
            layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / 8**0.5 + (1.0 - mask[:, None, None, :].float()) * -30.0
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return self.after(x + self.narrow(F.gelu(self.wide(x))))


def sentences(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1), generator=generator)).long()
    return torch.randint(0, 50, (batch, length), generator=generator), mask


def exported_encoder(path: Path) -> Path:
    axes = {name: {0: "batch", 1: "length"} for name in ("ids", "mask")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Encoder().eval(), sentences(2, 12), str(path), input_names=["ids", "mask"], dynamic_axes=axes, dynamo=False,
            opset_version=17,
        )  # fmt: skip
    return path


def of_sentences(path: Path, ids: Tensor, mask: Tensor, *, exact: bool = True) -> Tensor:
    session = session_of(path, exact=exact)
    return torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])


@pytest.mark.parametrize("per_channel", [True, False], ids=["per channel", "per tensor"])
def test_a_transformer_of_onnxruntime(per_channel: bool, tmp_path: Path) -> None:
    """One plan behind its masks; what differs is ORT's softmax of integers, which takes floor(1 / scale)."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    tool = pytest.importorskip("onnxruntime.quantization", reason="onnxruntime is not installed")

    class Reader(tool.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [sentences(4, 12, seed) for seed in range(1, 5)]

        def get_next(self) -> dict[str, Any] | None:
            return (
                dict(zip(("ids", "mask"), (one.numpy() for one in self.left.pop()), strict=True)) if self.left else None
            )

    source, path = exported_encoder(tmp_path / "float.onnx"), tmp_path / "int8.onnx"
    types = {"activation_type": tool.QuantType.QUInt8, "weight_type": tool.QuantType.QInt8}
    # In 7 bits, which do not overflow: ONNX Runtime 1.32 does not open this file with the option of `session_of`.
    tool.quantize_static(str(source), str(path), Reader(), per_channel=per_channel, reduce_range=True, **types)
    loaded = quant.load_onnx(path)
    assert loaded.plan.count("octet-plan") == 1
    assert loaded.plan.count("matmul ") == 2, "both products of attention are integers"
    for batch, length in ((2, 12), (3, 7)):
        call = sentences(batch, length, 9)
        ours, theirs = loaded(*call), of_sentences(path, *call, exact=False)
        assert ours.shape == theirs.shape
        assert float((ours - theirs).norm() / theirs.norm()) < 0.03
        assert torch.allclose(ours, quant.load_onnx(path, backend="reference")(*call), rtol=1e-3, atol=1e-3)


def test_a_transformer_of_nncf(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    nncf = pytest.importorskip("nncf", reason="nncf is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    calls = [sentences(4, 12, seed) for seed in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = nncf.Dataset([{"ids": ids.numpy(), "mask": mask.numpy()} for ids, mask in calls])
        model = onnx.load(str(exported_encoder(tmp_path / "float.onnx")))
        onnx.save(nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER), str(tmp_path / "int8.onnx"))
    call = sentences(3, 9, 9)
    ours, theirs = quant.load_onnx(tmp_path / "int8.onnx")(*call), of_sentences(tmp_path / "int8.onnx", *call)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


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
    with pytest.raises(ValueError, match=r"input 'x': expected 4 dimensions \(n, 3, h, w\), got \(3, 32, 32\)"):
        loaded(x[0])
    with pytest.raises(ValueError, match=r"int8.onnx: inputs 'x' \(4, 2, 32, 32\) do not fit the file.*plan line"):
        loaded(x[:, :2])


def test_layers_that_a_file_left_in_float_are_computed_by_torch_and_named(tmp_path: Path) -> None:
    model = Residual().eval()
    path = quantized(model, tmp_path, op_types_to_quantize=["Gemm"])
    loaded = quant.load_onnx(path)
    assert len([name for name in loaded.in_torch if "(Conv)" in name]) == 4
    x = images()[0]
    ours, theirs = loaded(x), by_onnxruntime(path, x)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3


def test_a_float_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    with pytest.raises(ValueError, match=r"holds no QuantizeLinear and no DequantizeLinear, so nothing in it"):
        quant.load_onnx(exported(Residual(), tmp_path / "float.onnx"))


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
    with pytest.raises(FileNotFoundError, match="there is no ONNX file"):
        quant.load_onnx(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no protobuf")
    with pytest.raises(ValueError, match=r"text.onnx is no ONNX model"):
        quant.load_onnx(tmp_path / "text.onnx")


def test_without_onnx_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"takes the package onnx, .*octet-quant\[onnx\]"):
        quant.load_onnx(tmp_path / "any.onnx")

"""Converted models as ONNX files: the same bits when they are read back, and in ONNX Runtime where it is installed.

What needs the packages onnx and onnxruntime says so where they are missing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.export.whole_plan import ExportError
from quant.onnx.export import file_of
from quant.onnx.export_report import ExportReport
from quant.onnx.load import OnnxModule
from quant.onnx.load_operators import plan_of

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")

Function = Callable[["Network", Tensor], Tensor]


class Network(nn.Module):
    """An operator between convolutions, all in integers up to the last layer."""

    def __init__(self, function: Function, middle: nn.Module | None = None, channels: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(channels, 8, 3, stride=2)
        self.head, self.middle, self.function = nn.Linear(8, 5), middle, function

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(self.function(self, self.first(x))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, y: Tensor) -> Tensor:
        return y * torch.sigmoid(self.two(torch.relu(self.one(F.adaptive_avg_pool2d(y, 1)))))


def through(net: Network, y: Tensor) -> Tensor:
    assert net.middle is not None
    return net.middle(y)  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "clamp inside": lambda y: y.clamp(-0.2, 0.4),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
    "a table": lambda y: F.leaky_relu(y, 0.17),
    "add": lambda y: y + torch.relu(y),
    "sub": lambda y: y - torch.sigmoid(y),
    "mul": lambda y: y * torch.sigmoid(y),
    "avg_pool": lambda y: F.avg_pool2d(y, 2),
    "avg_pool padded": lambda y: F.avg_pool2d(y, 3, 1, 1),
    "avg_pool of what is there": lambda y: F.avg_pool2d(y, 3, 1, 1, count_include_pad=False),
    "max_pool": lambda y: F.max_pool2d(y, 3, 2, 1),
    "mean": lambda y: y.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3) + y[:, :, :3, :3],
    "mean of rows": lambda y: y + y.mean(3, keepdim=True),
    "nearest": lambda y: F.interpolate(y, scale_factor=2),
    "bilinear": lambda y: F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False),
    "pad": lambda y: F.pad(y, (1, 2, 1, 0)),
    "reflect": lambda y: F.pad(y, (1, 2, 1, 0), mode="reflect"),
    "transpose": lambda y: y.transpose(2, 3),
    "slice": lambda y: y[:, :, ::2, 1:-1],
    "chunk": lambda y: torch.cat(y.chunk(2, 1)[::-1], 1),
    "split": lambda y: torch.cat(y.split([4, 12], 1)[::-1], 1),
    "unbind and stack": lambda y: torch.stack(y.unbind(1)[::-1], 1),
    "pixel shuffle": lambda y: torch.cat([F.pixel_shuffle(y, 2)] * 4, 1),
    "channel shuffle": lambda y: y.view(y.shape[0], 2, 8, *y.shape[2:]).transpose(1, 2).reshape(y.shape),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gate": Gate,
    "depthwise": lambda: nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6()),
    "grouped": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=4),
    "dilated": lambda: nn.Conv2d(16, 16, 3, padding=2, dilation=2),
    "padded on one side": lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(16, 16, 3, stride=2)),
    "reflected": lambda: nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(16, 16, 4, 2, 1),
    "transposed in groups": lambda: nn.ConvTranspose2d(16, 16, 3, 2, 1, output_padding=1, groups=4),
    "batch norm apart": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(16)),
    "prelu": lambda: nn.PReLU(16),
}
CASES: dict[str, tuple[Function, nn.Module | None, int]] = {
    **{name: (lambda net, y, f=f: f(y), None, 16) for name, f in FUNCTIONS.items()},  # type: ignore[misc]
    "cat": (lambda net, y: torch.cat([y, torch.relu(y)], 1), None, 32),
    **dict.fromkeys(LAYERS, (through, None, 16)),
}


def images(count: int = 2) -> list[Tensor]:
    return list(torch.randn(count, 4, 3, 20, 20, generator=torch.Generator().manual_seed(1)))


def network(case: str) -> nn.Module:
    function, _, channels = CASES[case]
    return Network(function, LAYERS[case]() if case in LAYERS else None, channels).eval()


@functools.cache
def converted(case: str) -> nn.Module:
    torch.manual_seed(0)
    return quantized(network(case), images())


def quantized(model: nn.Module, data: Sequence[Any], **settings: Any) -> nn.Module:
    recipe = quant.Recipe(default=quant.QConfig(**settings))
    return quant.quantize_static(model, data, recipe, progress=False)


def exported(q: nn.Module, folder: Path, inputs: Any, *, target: str = "avx2", **options: Any) -> ExportReport:
    """Files for processors without VNNI are exact on all."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return quant.export_onnx(q, folder / "model.onnx", target=target, verify=inputs, **options)


@pytest.mark.parametrize("case", CASES)
def test_a_file_read_again_has_the_same_bits(case: str) -> None:
    q = converted(case)
    file = file_of(q)[0]
    loaded = OnnxModule("model.onnx", file, plan_of(file), None)
    assert not loaded.in_torch
    for x in (images()[0], torch.randn(2, 3, 24, 28)):
        with torch.no_grad():
            assert torch.equal(loaded(x), q(x))


@pytest.mark.parametrize("case", CASES)
def test_the_bits_in_onnxruntime(case: str, tmp_path: Path) -> None:
    q = converted(case)
    for x in (images()[0], torch.randn(2, 3, 24, 28)):
        report = exported(q, tmp_path, x)
        assert report.verification is not None
        assert report.verification.same_bits, report
        assert not any(step.differing for step in report.verification.steps), report
        assert "Conv" not in report.verification.kernels, "all convolutions are integers"


class Block(nn.Module):
    """A transformer's layer, with attention by torch's function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (self.split(one(x)) for one in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).reshape(x.shape)
        x = self.one(x + self.out(y))
        return self.two(x + self.narrow(F.gelu(self.wide(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Embeddings, two layers, a pooler and a classifier, with a mask of padding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(40, width)
        self.norm, self.layers = nn.LayerNorm(width), nn.ModuleList([Block(width, 4) for _ in range(2)])
        self.pool, self.classes = nn.Linear(width, width), nn.Linear(width, 3)
        self.ids: Tensor
        self.register_buffer("ids", torch.arange(40)[None])

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.words(words) + self.places(self.ids[:, : words.shape[1]]))
        padding = (1.0 - mask[:, None, None, :].float()) * -10000.0
        for layer in self.layers:
            x = layer(x, padding)
        return {"scores": self.classes(torch.tanh(self.pool(x[:, 0]))), "states": x}


def sentences(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length // 2 :] = 0
    return torch.randint(0, 50, (batch, length), generator=generator), mask


def test_a_transformer_in_onnxruntime(tmp_path: Path) -> None:
    q = quantized(Encoder().eval(), [sentences(2, 12, seed) for seed in range(4)])
    for call in (sentences(2, 12), sentences(3, 21, seed=9)):
        verification = exported(q, tmp_path, call).verification
        assert verification is not None
        assert max(verification.outputs.values()) < 0.002
        assert verification.kernels["QGemm"] == 14, "every linear layer is integers"
    assert list(verification.outputs) == ["scores", "states"]


def test_names_and_free_sizes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    q = quantized(Encoder().eval(), [sentences(2, 12, seed) for seed in range(4)])
    report = exported(q, tmp_path, False)
    model = onnx.load(report.path)
    shapes = {one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim]
              for one in (*model.graph.input, *model.graph.output)}  # fmt: skip
    assert shapes == {
        "words": ["words_0", "words_1"],
        "mask": ["mask_0", "mask_1"],
        "scores": ["scores_0", 3],
        "states": ["states_0", "states_1", 32],
    }
    names = {one.name for one in model.graph.initializer}
    assert {"layers.0.query.weight", "layers.1.narrow.bias", "norm.weight"} <= names
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 17)]


def test_the_report_says_what_each_step_is_and_why(tmp_path: Path) -> None:
    q = quantized(Encoder().eval(), [sentences(2, 12, seed) for seed in range(4)])
    file, writer = file_of(q)
    report = ExportReport("model.onnx", "ONNX Runtime", "vnni", 17, 2048, tuple(writer.forms), ("pool",), ("a note",))
    assert report["layers.0.wide"].integer
    assert not report["norm"].integer
    text = str(report)
    assert "norm" in text
    assert "LayerNormalization" in text
    assert "14 of " in text
    assert "WITHOUT VNNI 1 layer can overflow 16 bits" in text
    assert "not in the file: a note" in text
    with pytest.raises(KeyError, match="no step 'none' in the report"):
        report["none"]
    assert file.metadata["octet.saturates_without_vnni"].startswith("layers.0.query, ")


def test_weights_that_can_overflow_are_uint8_without_vnni(tmp_path: Path) -> None:
    data = images()
    file, writer = file_of(quantized(network("relu"), data), target="avx2")
    assert writer.unsigned == ["first", "second", "head"]
    assert file.constants["first.weight"].dtype == torch.uint8
    assert "octet.saturates_without_vnni" not in file.metadata
    file, writer = file_of(quantized(network("relu"), data, weight_bits=7), target="avx2")
    assert not writer.unsigned
    assert file.constants["first.weight"].dtype == torch.int8
    forms = {"octet.recurrent": "exact", "octet.sums": "exact"}
    assert file.metadata == {"octet.runtime": "ort", "octet.target": "avx2", **forms}


def test_other_runtimes_refuse_weights_that_can_overflow() -> None:
    with pytest.raises(ValueError, match=r"target='avx2'.* 'first', .*OpenVINO has no other.*QConfig\(weight_bits=7\)"):
        file_of(quantized(network("relu"), images()), "openvino", "avx2")


def test_where_the_processor_overflows_the_verification_says_so(tmp_path: Path) -> None:
    report = exported(converted("relu"), tmp_path, images()[0], target="vnni")
    verification = report.verification
    assert verification is not None
    assert report.overflowing == ("first", "second", "head")
    assert verification.saturating in ((), report.overflowing)
    assert verification.same_bits != bool(verification.saturating)
    assert ("THIS PROCESSOR adds two products in 16 bits" in str(report)) == bool(verification.saturating)


def test_tensorrt_takes_symmetric_activations(tmp_path: Path) -> None:
    data = images()
    with pytest.raises(ValueError, match=r"TensorRT takes symmetric activations .*activation_symmetric=True"):
        file_of(quantized(network("add"), data), "tensorrt")
    q = quantized(network("add"), data, activation_symmetric=True, weight_bits=7)
    file, _ = file_of(q, "tensorrt")
    points = [file.constants[node.inputs[2]] for node in file.nodes if node.op == "QuantizeLinear"]
    assert {one.dtype for one in points} == {torch.int8}
    assert not any(int(one) for one in points)
    verification = exported(q, tmp_path, [data[0]], runtime="tensorrt").verification
    assert verification is not None
    assert max(verification.outputs.values()) < 0.01


def test_openvino_pads_before_it_averages() -> None:
    q = quantized(network("avg_pool padded"), images())
    ops = [node.op for node in file_of(q, "openvino")[0].nodes]
    assert ops[ops.index("Pad") + 1 :][:3] == ["QuantizeLinear", "DequantizeLinear", "AveragePool"]


def test_steps_without_a_form_are_named_together() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.fft.fft2(y).real + torch.erfinv(y.clamp(-0.5, 0.5))

    q = quantized(Odd().eval(), images())
    with pytest.raises(ValueError, match=r"layer 'fft_fft2_.*' calls 'fft_fft2', .*layer 'erfinv.*writes_call"):
        file_of(q)


def test_a_form_of_ones_own() -> None:
    from quant.onnx.call import CALLS, WrittenCall, writes_call

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.asinh(self.conv(x))

    @writes_call("asinh")
    def asinh(call: WrittenCall) -> str:
        return call.writer.node("Asinh", call.get(0, "input"))

    try:
        assert "Asinh" in [node.op for node in file_of(quantized(Odd().eval(), images()))[0].nodes]
        with pytest.raises(ValueError, match="expected one function to write 'asinh'"):
            writes_call("asinh")(lambda call: "")
    finally:
        del CALLS["asinh"]


def test_what_is_no_converted_model(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    with pytest.raises(ValueError, match="Conv2d holds no int8 module; quantise it first"):
        quant.export_onnx(nn.Conv2d(3, 4, 1), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="runtime is 'tflite', expected one of 'ort', 'openvino', 'tensorrt'"):
        quant.export_onnx(nn.Conv2d(3, 4, 1), tmp_path / "model.onnx", runtime="tflite")
    with pytest.raises(ValueError, match="target is 'arm', expected one of 'vnni', 'avx2'"):
        quant.export_onnx(nn.Conv2d(3, 4, 1), tmp_path / "model.onnx", target="arm")
    with pytest.raises(ValueError, match="recurrent is 'best', expected one of 'exact', 'fast'"):
        quant.export_onnx(nn.Conv2d(3, 4, 1), tmp_path / "model.onnx", recurrent="best")


@pytest.mark.parametrize("bits", [8, 16])
def test_a_layer_that_is_the_whole_model_wants_a_program(bits: int) -> None:
    q = quantized(nn.Linear(8, 4).eval(), [torch.randn(4, 8)], activation_bits=bits)
    with pytest.raises(
        ValueError, match=r"StaticLayer is an int8 layer .* no program .*quantise nn\.Sequential\(layer\)"
    ):
        file_of(q)


def test_without_onnx_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"writing ONNX files takes the package onnx, .*octet-quant\[onnx\]"):
        quant.export_onnx(quantized(network("relu"), images()), tmp_path / "model.onnx")


class Tagger(nn.Module):
    """A recurrent layer over embeddings, whose states are returned too."""

    def __init__(self, layer: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 24)
        self.layer = layer(24, 32, **settings)  # type: ignore[call-arg]
        self.tags = nn.Linear(64 if self.layer.bidirectional else 32, 5)

    def forward(self, words: Tensor) -> Any:
        y, states = self.layer(self.words(words))
        return self.tags(torch.relu(y)), states


RECURRENT: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "stacked lstm of two directions": (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {"batch_first": True, "bidirectional": True}),
    "gru without biases": (nn.GRU, {"bias": False}),
    "stacked rnn": (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
}


@pytest.mark.parametrize("which", RECURRENT)
@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_recurrent_layers_have_the_models_numbers_in_onnxruntime(which: str, how: str, tmp_path: Path) -> None:
    layer, settings = RECURRENT[which]
    model = Tagger(layer, **settings).eval()
    words = [torch.randint(0, 30, (3, 11)) for _ in range(4)]
    q = quantized(model, words) if how == "static" else quant.quantize_dynamic(model)
    example = None if how == "static" else (words[0],)
    report = exported(q, tmp_path, [torch.randint(0, 30, (2, 17))], example_inputs=example)
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 0.002
    assert report["layer"].integer
    assert report["layer"].why.endswith("calibrated ranges" if how == "static" else "a range for each row")
    ways = (2 if settings.get("bidirectional") else 1) * settings.get("num_layers", 1)
    assert report.verification.kernels["Scan"] == ways


@pytest.mark.parametrize("which", RECURRENT)
def test_the_fast_form_of_recurrent_layers_in_onnxruntime(which: str, tmp_path: Path) -> None:
    layer, settings = RECURRENT[which]
    model = Tagger(layer, **settings).eval()
    q = quantized(model, [torch.randint(0, 30, (3, 11)) for _ in range(4)])
    words = torch.randint(0, 30, (2, 17))
    report = exported(q, tmp_path, [words], recurrent="fast")
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 0.03
    assert report["layer"].integer == (layer is nn.LSTM)
    expected = "DynamicQuantizeLSTM" if layer is nn.LSTM else layer.__name__
    assert expected in report.verification.kernels


@pytest.mark.parametrize("bits", [8, 16, "auto"])
@pytest.mark.parametrize("which", ["lstm", "stacked lstm of two directions"])
def test_the_fast_form_of_dynamic_layers_has_int8_weights(which: str, bits: Any, tmp_path: Path) -> None:
    """Those whose weights have two terms, or columns by their norms, too."""
    layer, settings = RECURRENT[which]
    recipe, words = quant.Recipe(default=quant.QConfig(activation_bits=bits)), torch.randint(0, 30, (2, 17))
    q = quant.quantize_dynamic(Tagger(layer, **settings).eval(), recipe)
    direction = q.get_submodule("layer").directions[0]
    assert (direction.terms, direction.columns_ih is None) == {8: (1, True), 16: (1, False), "auto": (2, False)}[bits]
    report = exported(q, tmp_path, [words], recurrent="fast", example_inputs=(words,))
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 0.03
    assert "LSTM" not in report.verification.kernels
    assert report["layer"].integer
    assert ("8 bits of an input of 16" in report["layer"].why) == (bits != 8)
    assert ("the first of two terms of a weight" in report["layer"].why) == (bits == "auto")


@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_float_weights_of_the_fast_form_are_said(how: str) -> None:
    words = torch.randint(0, 30, (3, 11))
    model = Tagger(nn.GRU).eval()
    q = quantized(model, [words]) if how == "static" else quant.quantize_dynamic(model)
    _, writer = file_of(q, example_inputs=None if how == "static" else (words,), recurrent="fast")
    [form] = [one for one in writer.forms if one.step == "layer"]
    assert not form.integer
    assert form.why == "GRU, float weights: no runtime has an operator with int8 weights"


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, num_layers=2, proj_size=4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.layer(x, (h, c))
        return y, h, c


def test_projections_and_initial_states(tmp_path: Path) -> None:
    def call(batch: int, time: int) -> tuple[Tensor, ...]:
        return torch.randn(time, batch, 8), torch.randn(2, batch, 4).tanh(), torch.randn(2, batch, 8)

    q = quantized(Projected().eval(), [call(2, 5) for _ in range(3)])
    verification = exported(q, tmp_path, call(3, 9)).verification
    assert verification is not None
    assert max(verification.outputs.values()) < 1e-4
    with pytest.raises(ValueError, match="layer 'layer' is a recurrent layer with projections, which ONNX has not"):
        file_of(q, recurrent="fast")


def test_a_kind_without_a_form_is_refused_by_name() -> None:
    from quant.onnx.recurrent_steps import STEPS, writes_step

    q = quantized(Tagger(nn.GRU).eval(), [torch.randint(0, 30, (3, 11)) for _ in range(2)])
    write = STEPS.pop("gru")
    try:
        with pytest.raises(ValueError, match=r"layer 'layer' is a recurrent layer of the kind 'gru', .*writes_step"):
            file_of(q)
    finally:
        writes_step("gru")(write)


def test_a_call_to_verify_with_that_was_not_captured(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the inputs to verify with are no call that was captured: .* was torch\.float32"
    ):
        exported(converted("relu"), tmp_path, {"x": images()[0].double()})
    with pytest.raises(ValueError, match=r"the inputs to verify with are no call that was captured: 'int' object"):
        exported(converted("relu"), tmp_path, 3)


class Mixed(nn.Module):
    """Layers that a recipe leaves float, between int8 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.wide, self.head = nn.Conv2d(16, 16, 3), nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(F.max_pool2d(self.norm(torch.softmax(self.first(x), 1)), 2), 2)
        y = torch.relu(self.second(y)).mean((2, 3))
        return self.head(torch.softmax(self.wide(y), -1))  # type: ignore[no-any-return]


def test_float_layers_in_onnxruntime(tmp_path: Path) -> None:
    recipe = quant.Recipe(rules=[("first", None), ("head", None)])
    q = quant.quantize_static(Mixed().eval(), images(), recipe, progress=False)
    report = exported(q, tmp_path, images()[0])
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 1e-5
    assert [one.step for one in report.floats][:1] == ["first"]
    assert report["second"].integer


def test_float_functions_in_onnxruntime(tmp_path: Path) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = F.glu(self.first(x), -1)
            y = torch.einsum("bi,bj->bij", y, y).flatten(1)[:, :16]
            y = torch.where(y > 0, y, y.abs().sqrt()) - F.normalize(y, dim=1) + y.clamp(min=-0.1).cumsum(1)
            return self.second(y / (1 + y.amax(1, keepdim=True)).pow(2))  # type: ignore[no-any-return]

    rows = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    verification = exported(quantized(Gated().eval(), rows), tmp_path, rows[0]).verification
    assert verification is not None
    assert max(verification.outputs.values()) < 0.01


def test_values_by_places_in_onnxruntime(tmp_path: Path) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(4, 4)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            y = self.first(x)
            taken = y.gather(1, places) + y[torch.arange(len(y))[:, None], places]
            used = torch.where((places > 3).all(1, keepdim=True), taken, taken * 2)
            return self.second(used / torch.tensor([1.0, 2.0, 3.0, 4.0]))  # type: ignore[no-any-return]

    generator = torch.Generator().manual_seed(0)
    calls = [
        (torch.randn(rows, 8, generator=generator), torch.randint(0, 16, (rows, 4), generator=generator))
        for rows in (6, 6, 6)
    ]
    verification = exported(quantized(Placed().eval(), calls[1:]), tmp_path, calls[0]).verification
    assert verification is not None
    assert max(verification.outputs.values()) < 0.01


def test_an_empty_cache_is_left_out_and_flags_are_noted(tmp_path: Path) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.layer(x)
            return {"y": torch.cat([torch.tensor([]), y], dim=-2), "filled": True}

    q = quantized(Cached().eval(), [torch.randn(2, 5, 8) for _ in range(2)])
    report = exported(q, tmp_path, torch.randn(3, 7, 8))
    assert report.verification is not None
    assert report.verification.same_bits
    assert "not in the file: the model also returns what is no tensor: True at 'filled'" in str(report)


def test_a_dynamic_model_in_onnxruntime(tmp_path: Path) -> None:
    q = quant.quantize_dynamic(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval())
    rows = torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"Sequential has int8 layers and no program .*: give example_inputs"):
        file_of(q)
    report = exported(q, tmp_path, rows, example_inputs=rows)
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 1e-6, "each row has its own range"
    assert report.verification.kernels["MatMulInteger"] == 2
    assert [one.step for one in report.verification.steps] == ["input_0", "1"], "what each layer rounds is compared"
    assert not any(one.differing for one in report.verification.steps)
    assert [node.op for node in file_of(q, "openvino", example_inputs=rows)[0].nodes].count("MatMul") == 2


class Padded(nn.Module):
    """Padding by modules, before convolutions and between floats."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.stem = nn.ConstantPad1d(2, 0.5), nn.Conv1d(3, 8, 3)
        self.zeros, self.deep = nn.ZeroPad1d((0, 3)), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.mirror, self.last = nn.ReflectionPad1d(2), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.stem(self.before(x)))
        return self.mirror(self.last(self.deep(self.zeros(y))))


def test_padding_by_zeros_is_the_convolutions_own() -> None:
    q = quantized(Padded().eval(), [torch.randn(2, 3, 12) for _ in range(2)])
    file = file_of(q)[0]
    loaded, x = OnnxModule("model.onnx", file, plan_of(file), None), torch.randn(3, 3, 17)
    with torch.no_grad():
        assert torch.equal(loaded(x), q(x))
    deep = next(node for node in file.nodes if node.op == "Conv" and node.attributes["group"] == 8)
    assert deep.attributes["pads"] == [1, 4]
    assert [node.op for node in file.nodes].count("Pad") == 2, "before the first QuantizeLinear, and by reflection"


def test_integers_are_clamped_as_integers() -> None:
    """A range that holds negative numbers too, because what is joined has them."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.max_pool2d(torch.cat([torch.relu(self.one(x)), self.two(x)], 1), 2))

    q = quantized(Joined().eval(), images())
    file = file_of(q)[0]
    [clip] = [node for node in file.nodes if node.op == "Clip"]
    assert file.constants[clip.inputs[1]].dtype == torch.uint8
    loaded = OnnxModule("model.onnx", file, plan_of(file), None)
    with torch.no_grad():
        assert torch.equal(loaded(images()[0]), q(images()[0]))


class Stepwise(nn.Module):
    """Cells, a step of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LSTMCell(16, 32), nn.GRUCell(32, 32), nn.RNNCell(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.first(x, (h, c))
        return self.last(self.third(self.second(h, h * 0.5))), h, c


@pytest.mark.parametrize("which", ["static", "dynamic", "float"])
def test_cells_in_onnxruntime(which: str, tmp_path: Path) -> None:
    call = torch.randn(3, 16), torch.randn(3, 32).tanh(), torch.randn(3, 32)
    model = Stepwise().eval()
    if which == "static":
        q = quantized(model, [call])
    else:
        kept = [("first", None), ("second", None), ("third", None)] if which == "float" else []
        q = quant.quantize_dynamic(model, quant.Recipe(kept))  # type: ignore[arg-type]
    report = exported(q, tmp_path, call, example_inputs=None if which == "static" else call)
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 0.002
    integers = report.verification.kernels.get("MatMulInteger", 0)
    assert integers == {"static": 6, "dynamic": 7, "float": 1}[which], "two products a cell, and the last layer's"


@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_the_fast_form_of_a_cell(how: str, tmp_path: Path) -> None:
    call = torch.randn(3, 16), torch.randn(3, 32).tanh(), torch.randn(3, 32)
    q = quantized(Stepwise().eval(), [call]) if how == "static" else quant.quantize_dynamic(Stepwise().eval())
    report = exported(q, tmp_path, call, recurrent="fast", example_inputs=None if how == "static" else call)
    assert report.verification is not None
    assert max(report.verification.outputs.values()) < 0.03
    assert report.verification.kernels["DynamicQuantizeLSTM"] == 1


def channels(function: Callable[[Tensor], Tensor]) -> list[str]:
    """The operators of OpenVINO's file of a convolution with a function behind it."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function(self.stem(x)))

    return [node.op for node in file_of(quantized(Behind().eval(), images()), "openvino")[0].nodes]


SPLIT: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda y: y.unflatten(1, (2, 8)).flatten(0, 1),
    "function": lambda y: torch.sigmoid(y).unflatten(1, (2, 8)).flatten(0, 1),
    "rows in between": lambda y: y.flatten(2).unflatten(1, (2, 8)).flatten(0, 1).unflatten(2, (20, 20)),
}


@pytest.mark.parametrize("case", SPLIT)
def test_openvino_is_not_asked_to_take_channels_apart(case: str) -> None:
    """It moves the scales of a convolution's weight behind the reshape, to other channels: 20 to 80 % of error."""
    with pytest.raises(ExportError, match="takes the channels of a convolution apart, which OpenVINO computes wrongly"):
        channels(SPLIT[case])


def test_other_moves_are_openvinos_too() -> None:
    assert "Split" in channels(lambda y: y.chunk(2, 1)[1])
    assert "Transpose" in channels(
        lambda y: y[:, :8].flatten(2).transpose(1, 2).unflatten(1, (20, 20)).permute(0, 3, 1, 2)
    )


def test_openvino_transposes_convolutions_itself() -> None:
    """The moves of the phases split channels."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2), nn.ConvTranspose2d(4, 4, 3, groups=2)
    ).eval()
    nodes = file_of(quantized(model, images()), "openvino")[0].nodes
    found = [node for node in nodes if node.op == "ConvTranspose"]
    assert [node.attributes["group"] for node in found] == [1, 2]
    assert not any(node.op == "Reshape" for node in nodes)

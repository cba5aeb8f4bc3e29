"""`to_qdq`: the program of torch's own calls agrees with the integers, and says by name what it cannot write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.export import ExportError
from quant.runtime.matching import CaptureMismatch

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Residual(nn.Module):
    """Convolutions of every kind, sums, products, pools, padding, tables, a concatenation and moves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = torch.relu(x + self.depthwise(x))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = torch.cat([F.max_pool2d(x, 2), F.avg_pool2d(F.hardswish(x), 2)], 1)
        x = F.interpolate(F.pad(x, (1, 1, 1, 1)), scale_factor=2.0)
        return self.head(self.up(x).mean((2, 3)))


class Encoder(nn.Module):
    """Attention with a product of activations, norms and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[:, 0])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(20, 16, padding_idx=0), nn.EmbeddingBag(20, 16, mode="mean")
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(1) + self.bags(words))


class Island(nn.Module):
    """A branch on a value, around two captured modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x) if float(x.sum()) < 1e9 else x


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12)


def rows() -> Tensor:
    return torch.randn(3, 9, 32)


def static(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_static(model.eval(), [x, x * 0.5], progress=False)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutions": lambda: (static(Residual(), x := images()), x),
    "encoder, static": lambda: (static(Encoder(), x := rows()), x),
    "encoder, dynamic": lambda: (quant.quantize_dynamic(Encoder().eval()), rows()),
    "one layer": lambda: (static(nn.Linear(16, 8), x := torch.randn(6, 16)), x),
    "one convolution": lambda: (static(nn.Conv1d(4, 4, 3), x := torch.randn(2, 4, 9)), x),
    "an island": lambda: (static(Island(), x := torch.randn(6, 16)), x),
    "tables": lambda: (quant.quantize_dynamic(Words().eval()), torch.randint(0, 20, (4, 6))),
    "16 bits": lambda: (
        quant.quantize_dynamic(
            nn.Sequential(nn.Linear(16, 8)), quant.Recipe(default=quant.QConfig(activation_bits=16))
        ),
        torch.randn(5, 16),
    ),
}


def error(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CASES)
def test_the_program_agrees_with_the_integers(name: str) -> None:
    q, x = CASES[name]()
    with torch.no_grad():
        expected, y = q(x), quant.to_qdq(q)(x)
    assert y.shape == expected.shape
    # One step in 255, in a few values: what sums of float32 may do to those that lie between two integers.
    assert error(y, expected) < 0.01


def test_each_rounded_value_is_at_most_a_step_away() -> None:
    """A layer's output, for the very same input."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Flatten(0, 0))
    x = torch.randn(8, 8, 20, 20)
    q = static(model, x)
    with torch.no_grad():
        difference = (quant.to_qdq(q)(x) - q(x)).abs()
    step = max(value.qparams[0] for value in q.program.values if value.qparams is not None)  # type: ignore[union-attr]
    assert difference.max() < 1.5 * step
    assert (difference > 0.5 * step).float().mean() < 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if name != "an island"])
def test_the_program_has_torchs_own_operators_alone(name: str) -> None:
    q, x = CASES[name]()
    plain = quant.to_qdq(q)
    with torch.no_grad():
        exported = torch.export.export(plain, (x,))
        assert error(exported.module()(x), plain(x)) < 1e-5
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert called
    assert not any("octet" in target for target in called)


def test_sizes_may_vary_and_inputs_keep_their_names() -> None:
    x = images()
    q = static(Residual(), x)
    plain = quant.to_qdq(q)
    with torch.no_grad():
        exported = torch.export.export(plain, (x,), dynamic_shapes={"image": {0: torch.export.Dim("batch", max=64)}})
        more = torch.cat([x, x, x])
        assert error(exported.module()(more), q(more)) < 0.01
    assert exported.graph_signature.user_inputs == ("image",)


@pytest.mark.filterwarnings("ignore")
def test_torch_onnx_takes_the_program(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed, which torch.onnx writes files with")
    runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    x = images()
    q = static(Residual(), x)
    written: Any = torch.onnx.export(quant.to_qdq(q), (x,), dynamo=True, verbose=False)
    written.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    [y] = session.run(None, {"image": x.numpy()})
    with torch.no_grad():
        assert error(torch.from_numpy(y), q(x)) < 0.01


def test_the_model_is_left_as_it_was() -> None:
    x = images()
    q = static(Residual(), x)
    before, expected = copy.deepcopy(q.state_dict()), q(x)
    quant.to_qdq(q)
    assert torch.equal(q(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in q.state_dict().items())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_a_recurrent_layer_is_named(how: str) -> None:
    x = torch.randn(5, 2, 8)
    q = static(Recurrent(), x) if how == "static" else quant.quantize_dynamic(Recurrent().eval())
    with pytest.raises(ExportError, match=r"layer 'lstm'.*leave it float by the recipe"):
        quant.to_qdq(q)


def test_what_is_not_converted_is_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ExportError, match=r"Linear has no int8 layer: only what quant\.quantize_static"):
        quant.to_qdq(nn.Linear(8, 8))
    with pytest.raises(ExportError, match=r"Sequential is prepared, not converted: call quant\.convert first"):
        quant.to_qdq(quant.prepare(nn.Sequential(nn.Linear(8, 8)).eval(), x))
    with pytest.raises(TypeError, match="expected a quantised model, got a Tensor"):
        quant.to_qdq(x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operators is 'onnx', expected 'torch' or 'quantized_decomposed'"):
        quant.to_qdq(static(nn.Linear(8, 8), x), operators="onnx")  # type: ignore[arg-type]


def test_a_model_that_was_changed_after_its_conversion_is_refused() -> None:
    q = static(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8))
    q[2] = nn.Linear(8, 8)
    with pytest.raises(ExportError, match=r"layer '2' was replaced after quant\.convert"):
        quant.to_qdq(q)


def test_a_call_that_was_not_captured_is_an_error() -> None:
    plain = quant.to_qdq(static(Residual(), images()))
    with pytest.raises(
        CaptureMismatch, match=r"argument 'image' was torch\.float32 in example_inputs and is torch\.float64"
    ):
        plain(images().double())


def test_operators_that_nobody_has_defined_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "quantized_decomposed", object(), raising=False)
    with pytest.raises(ImportError, match="quantized_decomposed has no operators: the package that reads the program"):
        quant.to_qdq(static(nn.Linear(8, 8), torch.randn(4, 8)), operators="quantized_decomposed")

"""Static layers whose weights are stored in 4, 3 and 2 bits: the bits of bytes, in half the memory and file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from quant.kernels import narrow
from torch import Tensor, nn

import quant
from quant.export.qdq import to_qdq
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.program_runner import ProgramRunner

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x)[0])
        return y


class Mixed(nn.Module):
    """A static linear layer behind one that stays dynamic by the recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(20, 64), nn.Linear(64, 96), nn.Linear(96, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(self.words(tokens))))
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 70), nn.ReLU(), nn.Linear(70, 64), nn.Linear(64, 9)),
               lambda seed: drawn(5, 64, seed=seed)),
    "lstm": (lambda: Recurrent(nn.LSTM(64, 32, 2)), lambda seed: drawn(4, 3, 64, seed=seed)),
    "gru": (lambda: Recurrent(nn.GRU(64, 32)), lambda seed: drawn(4, 3, 64, seed=seed)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(32, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)),
             lambda seed: drawn(2, 32, 6, 6, seed=seed)),
    "embedding": (Mixed, lambda seed: torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(seed))),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", MODELS)
BITS = pytest.mark.parametrize("bits", [4, 3, 2])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(name: str, bits: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    make, data = MODELS[name]
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=bits))
    return quant.quantize_static(make().eval(), [data(one) for one in range(4)], recipe, progress=False)


def weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        if isinstance(module, (StaticLayer, QuantModule)):
            for key, one in module.named_buffers(recurse=False):
                if key.startswith("q_weight"):
                    yield module, key, one


def in_bytes(model: nn.Module) -> nn.Module:
    """The same with weights as older versions stored them."""
    copied = copy.deepcopy(model)
    for module, key, one in list(weights(copied)):
        setattr(module, key, narrow.as_bytes(one))
    return copied


@EACH
@BITS
def test_the_bits_are_those_of_bytes(name: str, bits: int) -> None:
    q, x = quantized(name, bits), MODELS[name][1](9)
    stored = [one for _, _, one in weights(q)]
    assert any(narrow.is_narrow(one) for one in stored)
    bytes_of = in_bytes(q)
    assert not any(narrow.is_narrow(one) for _, _, one in weights(bytes_of))
    assert torch.equal(q(x), bytes_of(x))
    assert torch.equal(copy.deepcopy(q)(x), q(x))


@EACH
def test_the_reference_gives_the_same(name: str) -> None:
    q, x = quantized(name), MODELS[name][1](9)
    with quant.kernels.use("reference"):
        expected = q(x)
    assert torch.allclose(q(x), expected, atol=2e-2 if name in ("lstm", "gru") else 1e-5)


@pytest.mark.parametrize("name", ["linear", "lstm", "gru"])
def test_one_native_call_computes_it(name: str) -> None:
    runner = next(one for one in quantized(name).modules() if isinstance(one, ProgramRunner))
    assert len(runner.program.schedule.regions) == 1
    assert not runner.program.schedule.reasons


@EACH
def test_files_hold_the_bits_alone(name: str, tmp_path: Path) -> None:
    q, x = quantized(name), MODELS[name][1](9)
    quant.save(q, tmp_path / "q.q8")
    loaded = quant.load(tmp_path / "q.q8", model=MODELS[name][0]().eval())
    assert torch.equal(loaded(x), q(x))
    assert [one.dtype for _, _, one in weights(loaded)] == [one.dtype for _, _, one in weights(q)]


def test_sizes_that_the_summary_says(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False)).eval()
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, bias_correction=False))
    q = quant.quantize_static(model, [torch.randn(4, 512)], recipe, progress=False)
    report = quant.summary(q)
    assert report.bytes_after <= 0.13 * report.bytes_before
    assert "stored in 4 bits" in report["0"].detail
    quant.save(q, tmp_path / "q.q8")
    assert (tmp_path / "q.q8").stat().st_size <= report.bytes_after + 32768
    q(torch.randn(2, 512))
    packed = quant.summary(q).packed
    assert packed is not None
    assert sum(packed.values()) < 0.1 * report.bytes_after  # nothing is packed again


def test_weights_that_stay_bytes_are_told() -> None:
    report = quant.summary(quantized("conv"))
    assert "its weight stored as bytes, as those of convolutions are" in report["0"].detail
    report = quant.summary(quantized("linear"))
    assert "weights of 70 inputs stored as bytes" in report["2"].detail


@pytest.mark.parametrize("name", ["linear", "lstm"])
def test_older_files_and_states_load(name: str, tmp_path: Path) -> None:
    q, x = quantized(name), MODELS[name][1](9)
    older = in_bytes(q)
    fresh = copy.deepcopy(q)
    for _, _, one in weights(fresh):
        one.zero_()
    assert not torch.equal(fresh(x), q(x))
    fresh.load_state_dict(older.state_dict())
    assert torch.equal(fresh(x), q(x))
    assert all(narrow.is_narrow(one) or one.shape[1] == 70 for _, _, one in weights(fresh))
    quant.save(older, tmp_path / "older.q8")
    loaded = quant.load(tmp_path / "older.q8", model=MODELS[name][0]().eval())
    assert torch.equal(loaded(x), q(x))


@pytest.mark.parametrize("name", ["linear", "conv", "embedding"])
def test_a_model_of_torch_operators_has_bytes(name: str) -> None:
    q, x = quantized(name), MODELS[name][1](9)
    expected, y = q(x), to_qdq(q)(x)
    assert float((y - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("name", ["linear", "lstm", "conv", "embedding"])
def test_the_runner_gets_bytes(name: str, tmp_path: Path) -> None:
    q, x = quantized(name), MODELS[name][1](9)
    quant.save(q, tmp_path / "q.q8", runner=True)
    assert torch.equal(quant.load(tmp_path / "q.q8", model=MODELS[name][0]().eval())(x), q(x))
    from quant.artefact.runner_file import read_runner_file

    plan = read_runner_file(tmp_path / "q.q8")
    assert not any(one.dtype == torch.uint8 and one.dim() == 3 for one in plan.constants)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    q = quantized("linear")
    layer = next(one for one in q.modules() if isinstance(one, StaticLayer))
    layer.q_weight = layer.q_weight[:, :1].contiguous()  # of one bit
    quant.save(q, tmp_path / "q.q8")
    with pytest.raises(quant.ArtefactError):
        quant.load(tmp_path / "q.q8", model=MODELS["linear"][0]().eval())


def test_onnx_gets_bytes(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    for name in ("linear", "embedding"):
        report = quant.export_onnx(quantized(name), tmp_path / f"{name}.onnx")
        assert report.bytes == (tmp_path / f"{name}.onnx").stat().st_size

"""`quant.save` and `quant.load` of statically quantised models, alone and beside dynamic layers."""

from __future__ import annotations

import copy
import enum
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quant
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.trees import leaves


class Everything(nn.Module):
    """Static and dynamic layers, folded and free batch norms, look-up tables with parameters, functional weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.conv2 = nn.Conv1d(8, 8, 3, padding=1)
        self.act = nn.PReLU(8)
        self.conv3 = nn.Conv1d(8, 8, 1)
        self.free = nn.BatchNorm1d(8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.layer_norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 3)
        self.register_buffer("offset", torch.randn(3), persistent=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.norm(self.conv(self.embedding(tokens).transpose(1, 2))))
        x = self.conv3(self.free(self.act(self.conv2(x)) + x))
        y = self.layer_norm(self.rnn(x.transpose(1, 2))[0])
        y = F.linear(y + self.attention(y, y, y, need_weights=False)[0], self.matrix)
        return {"scores": self.head(y).sigmoid() + self.offset, "maps": x}


class Small(nn.Module):
    def __init__(self, width: int = 4, slope: float = 0.1) -> None:
        super().__init__()
        self.conv, self.act, self.fc = nn.Conv2d(3, width, 3), nn.LeakyReLU(slope), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.act(self.conv(x)).mean((2, 3)))
        return out


class Branching(nn.Module):
    """An island: its forward branches on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Small(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        return self.two(y) if bool(y.isfinite().all()) else y


class Holder(nn.Module):
    """A quantised model as a part of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer = inner, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x))
        return out


class Integers(nn.Module):
    """Nothing in float between its input and its output, so that nothing may differ from machine to machine."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.act = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU()
        self.point, self.slope = nn.Conv2d(8, 8, 1), nn.PReLU(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.max_pool2d(x + self.act(self.depthwise(x)), 2)
        out: Tensor = self.fc(F.adaptive_avg_pool2d(self.slope(self.point(x)), 1).flatten(1))
        return out


TOKENS = torch.arange(36).reshape(4, 9) % 10
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "everything": (Everything, TOKENS),
    "island": (Branching, IMAGES),
    "a layer": (lambda: nn.Linear(8, 4), IMAGES),
    "sequential": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.Flatten()), IMAGES),
}
KEPT = Path(__file__).parent / "artefacts"
MINMAX = quant.QConfig(activation_observer="minmax")


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model of which nothing has the value that its constructor gives everyone, but for what no file holds."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
        for buffer in model.buffers():
            if buffer.is_floating_point() and buffer.dim():
                buffer.uniform_(0.5, 1.5)
        if isinstance(model, Everything):
            model.offset.fill_(0.5)
    return model


def quantized(make: Callable[[], nn.Module], x: Tensor, recipe: quant.Recipe | None = None) -> nn.Module:
    return quant.quantize_static(made(make), [x], recipe or quant.Recipe(default=MINMAX), progress=False)


def same(one: Any, other: Any) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("captured", [False, True], ids=["programs", "captured"])
def test_what_is_loaded_computes_the_same(
    case: str, captured: bool, tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    make, x = CASES[case]
    q = quantized(make, x)
    quant.save(q, tmp_path / "model.q8")
    whole = (tmp_path / "model.q8").read_bytes()
    if captured:
        without_programs(tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=made(make, seed=1))
    assert same(loaded(x), q(x))
    assert quant.summary(loaded) == quant.summary(q)
    assert loaded.state_dict().keys() == q.state_dict().keys()
    quant.save(loaded, tmp_path / "again.q8")
    assert (tmp_path / "again.q8").read_bytes() == whole


@pytest.mark.parametrize(
    "recipe",
    [
        quant.Recipe({"conv2": None, "rnn": None}, default=MINMAX),
        quant.Recipe(default=quant.QConfig(weight_bits=4, weight_observer="mse")),
        quant.Recipe({"embedding": quant.QConfig(weight_bits=5)}, default=MINMAX),
        quant.Recipe(default=quant.QConfig(activation_symmetric=True, per_channel=False, activation_observer="minmax")),
    ],
    ids=["some float", "4 bits", "a table that cannot", "symmetric per tensor"],
)
def test_recipes_come_back(recipe: quant.Recipe, tmp_path: Path) -> None:
    q = quantized(Everything, TOKENS, recipe)
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=made(Everything, seed=1))
    assert same(loaded(TOKENS), q(TOKENS))
    assert quant.summary(loaded) == quant.summary(q)


@pytest.mark.parametrize("captured", [False, True], ids=["programs", "captured"])
def test_the_float_weights_do_not_matter_and_are_left_alone(
    captured: bool, tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    q = quantized(Everything, TOKENS)
    quant.save(q, tmp_path / "model.q8")
    if captured:
        without_programs(tmp_path / "model.q8")
    model = made(Everything, seed=1)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    before = copy.deepcopy(model.state_dict())
    assert same(quant.load(tmp_path / "model.q8", model=model)(TOKENS), q(TOKENS))
    assert all(torch.equal(before[name].nan_to_num(7), now.nan_to_num(7)) for name, now in model.state_dict().items())
    assert not any(isinstance(module, StaticLayer) for module in model.modules())


def test_parts_of_the_loaded_model_can_be_called(tmp_path: Path) -> None:
    q = quantized(Branching, IMAGES)
    quant.save(q, tmp_path / "model.q8")
    loaded: Any = quant.load(tmp_path / "model.q8", model=Branching())
    assert torch.equal(loaded.one(IMAGES), q.one(IMAGES))  # type: ignore[operator]


def test_a_quantised_model_inside_another(tmp_path: Path) -> None:
    holder = quant.quantize_dynamic(Holder(quantized(Small, IMAGES)))
    quant.save(holder, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=Holder(Small()))
    assert torch.equal(loaded(IMAGES), holder(IMAGES))
    with pytest.raises(quant.ArtefactError, match=r"those of \['inner'\], parts of the model"):
        quant.load(tmp_path / "model.q8", model=Holder(Small()), example_inputs=IMAGES)


def test_a_part_of_a_converted_model_is_not_saved(tmp_path: Path) -> None:
    q = quantized(Small, IMAGES)
    with pytest.raises(quant.ArtefactError, match="save the whole"):
        quant.save(q.fc, tmp_path / "model.q8")  # type: ignore[arg-type]


def test_a_prepared_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(quant.ArtefactError, match=r"call quant\.convert first"):
        quant.save(quant.prepare(Small(), IMAGES), tmp_path / "model.q8")


def test_extra_state_is_refused(tmp_path: Path) -> None:
    class Odd(Small):
        def get_extra_state(self) -> str:
            return "a string"

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(quant.ArtefactError, match="_extra_state, and safetensors holds tensors alone"):
        quant.save(quantized(Odd, IMAGES), tmp_path / "model.q8")


class Mode(enum.Enum):
    """What a user may give as an argument, and JSON does not have."""

    PLAIN = 1


class TakesMode(Small):
    def forward(self, mode: Mode, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_inputs_that_cannot_be_made_again_are_asked_for(
    tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    inputs = (Mode.PLAIN, IMAGES)
    prepared = quant.prepare(made(TakesMode), inputs, quant.Recipe(default=MINMAX))
    prepared(*inputs)
    q = quant.convert(prepared)
    quant.save(q, tmp_path / "model.q8")
    assert torch.equal(quant.load(tmp_path / "model.q8", model=TakesMode())(*inputs), q(*inputs))
    without_programs(tmp_path / "model.q8")
    with pytest.raises(quant.ArtefactError, match="holds no example inputs; give example_inputs"):
        quant.load(tmp_path / "model.q8", model=TakesMode())
    loaded = quant.load(tmp_path / "model.q8", model=TakesMode(), example_inputs=inputs)
    assert torch.equal(loaded(*inputs), q(*inputs))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    quant.save(quantized(Small, IMAGES), tmp_path / "model.q8")
    return tmp_path / "model.q8"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Small(width=5), r"call 1 is conv: Conv2d.*out_channels=5.*expected conv: Conv2d.*out_channels=4"),
        (Small(slope=0.3), r"call 2 is act: LeakyReLU\[negative_slope=0\.3\]"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.1)), "the layers conv, fc, which Sequential does not have"),
        (Holder(Small()), "the layers conv, fc, which Holder does not have; its children are inner"),
        (nn.LSTM(3, 4), "does not fit"),
        (Small().double(), "does not fit"),
    ],
    ids=["width", "slope", "fewer layers", "inside another", "another class", "float64"],
)
def test_another_model_is_refused(path: Path, model: nn.Module, message: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(quant.ArtefactError, match=message):
        quant.load(path, model=model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_file_has_the_rights_of_any_other(path: Path) -> None:
    (path.parent / "other").touch()
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode


def test_an_altered_range_is_refused(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    manifest = json.loads(metadata["octet"])
    slots = manifest["static"][""]["ranges"][""]
    slots[next(iter(slots))][0] *= 1.5
    save_file(load_file(path), path, metadata={**metadata, "octet": json.dumps(manifest)})
    with pytest.raises(quant.ArtefactError, match="its manifest does not match its checksum"):
        quant.load(path, model=Small())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(quant.ArtefactError, match="not a whole safetensors file"):
        quant.load(path, model=Small())


def test_every_altered_byte_is_noticed(path: Path) -> None:
    data = path.read_bytes()
    for place in range(8, len(data), max(len(data) // 40, 1)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(quant.ArtefactError):
            quant.load(path, model=Small())


def test_another_backend_can_be_asked_for(path: Path, tmp_path: Path) -> None:
    loaded: Any = quant.load(path, model=Small(), backend="reference")
    assert loaded.conv.backend == "reference"
    torch.testing.assert_close(loaded(IMAGES), quant.load(path, model=Small())(IMAGES))
    quant.save(quant.quantize_dynamic(Small(), backend="reference"), tmp_path / "dynamic.q8")
    other: Any = quant.load(tmp_path / "dynamic.q8", model=Small(), backend="native")
    assert other.fc.backend == "native"


def test_a_file_made_on_x86_gives_the_same_numbers_here() -> None:
    """Made by `python tests/quant/test_artefact_static.py` on an AVX-512 VNNI machine; this may be an ARM one."""
    loaded = quant.load(KEPT / "integers.q8", model=Integers())
    got = torch.cat([loaded(IMAGES * step) for step in (0.5, 1.0, 3.0)])
    assert torch.equal(got, load_file(KEPT / "integers.expected")["output"])
    assert quant.summary(loaded)["slope"].outcome == "int8"


@pytest.mark.filterwarnings("ignore:quant.convert. the running statistics")
def test_what_was_trained_comes_back(tmp_path: Path) -> None:
    prepared = quant.prepare_qat(made(Integers), IMAGES).train()
    prepared(IMAGES).square().sum().backward()
    q = quant.convert(prepared.eval())
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=made(Integers, seed=1))
    assert torch.equal(loaded(IMAGES), q(IMAGES))
    assert quant.summary(loaded) == quant.summary(q)


class GivesMoreInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x).relu()
        return (self.last(y), y) if self.training else self.last(y)


def test_a_model_with_an_island_in_training_alone_comes_back(tmp_path: Path) -> None:
    x = torch.randn(8, 16)
    prepared = quant.prepare_qat(GivesMoreInTraining(), x).train()
    prepared(x)
    q = quant.convert(prepared.eval())
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=GivesMoreInTraining())
    assert torch.equal(loaded(x), q(x))
    assert quant.summary(loaded) == quant.summary(q)


def test_what_8_bits_cannot_hold_comes_back_in_float(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    decades = torch.randn(16, 2) * torch.tensor([1.0, 1e8])
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([1.0, 1e-8]))
    with pytest.warns(quant.calibrate.CalibrationWarning, match="layer '0' stays float"):
        q = quant.quantize_static(model, [decades], progress=False)
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=copy.deepcopy(model))
    assert torch.equal(loaded(decades), q(decades))
    assert quant.summary(loaded) == quant.summary(q)


SCRIPT = """
import sys
import torch
from safetensors.torch import load_file
import quant
from test_artefact_static import IMAGES, Integers
path = sys.argv[1]
loaded = quant.load(f"{path}/model.q8", model=Integers())
assert torch.equal(loaded(IMAGES), load_file(f"{path}/expected")["output"])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="QUANT_ISA names instruction sets of x86-64")
@pytest.mark.parametrize("isa", ["portable", "avx2", "reference"])
def test_a_lesser_machine_gives_the_same_numbers(isa: str, tmp_path: Path) -> None:
    """Products are exact on every instruction set, so the bytes of the output are the same too."""
    q = quantized(Integers, IMAGES)
    quant.save(q, tmp_path / "model.q8")
    save_file({"output": q(IMAGES)}, tmp_path / "expected")
    lesser = {"QUANT_BACKEND": "reference"} if isa == "reference" else {"QUANT_ISA": isa}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONSAFEPATH": "1", **lesser}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def keep() -> None:
    """Make the kept file anew, after a change of the manifest's version."""
    q = quantized(Integers, IMAGES)
    quant.save(q, KEPT / "integers.q8")
    save_file({"output": torch.cat([q(IMAGES * step) for step in (0.5, 1.0, 3.0)])}, KEPT / "integers.expected")


if __name__ == "__main__":
    keep()


@pytest.mark.parametrize("given", ["float", "dynamic"])
def test_layers_that_were_int8_before_come_back(given: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LSTM(32, 16), First(), nn.Linear(16, 4)).eval()
    dynamic = quant.quantize_dynamic(model, quant.Recipe({"0": quant.QConfig(), "2": quant.QConfig()}, default=None))
    batches = [torch.randn(5, 3, 8) for _ in range(3)]
    q = quant.quantize_static(dynamic, batches, progress=False)
    report = quant.summary(q)
    before = quant.summary(dynamic)
    for name in ("0", "2"):
        assert report[name] == before[name]
    assert report["4"].outcome == "int8"
    assert len(report.quantized) == len([one for one in report if one.bytes_before]) + 1  # the planned run
    quant.save(q, tmp_path / "q.safetensors")
    loaded = quant.load(tmp_path / "q.safetensors", model=model if given == "float" else dynamic)
    assert torch.equal(loaded(batches[0]), q(batches[0]))
    assert quant.summary(loaded) == report


class First(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair[0]  # type: ignore[no-any-return]

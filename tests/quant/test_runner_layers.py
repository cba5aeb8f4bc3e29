"""The runner on models with embeddings, recurrent layers and dynamic linear layers: the bits of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from quant.kernels import build
from safetensors import safe_open
from torch import Tensor, nn

import quant
from quant.export.whole_plan import ExportError, whole_plan

from .runner_models import image, needs_kernels, octet_run, run_model, starts_python


class Tagger(nn.Module):
    """Words to tags, by both directions of two layers."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.states = kind(24, 20, 2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(40, 7)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.states(self.words(words))
        return self.tags(states)


class Streaming(nn.Module):
    """A network that takes its states, gives them back, and hands them on inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(12, 16), nn.LSTM(16, 16)
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.first(x, (h, c))
        y, (h, c) = self.second(y, (h, c))
        return self.out(y), h, c


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.states, self.out = nn.LSTM(12, 16, proj_size=8, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y, (h, _) = self.states(x)
        return {"tags": self.out(y), "last": h}


class Encoder(nn.Module):
    """One block of a transformer, over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.query, self.key, self.value, self.out, self.narrow = (nn.Linear(32, 32) for _ in range(5))
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        batch, length, size = x.shape
        heads = [one(x).reshape(batch, length, 4, 8).transpose(1, 2) for one in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, length, size)
        x = self.first(x + self.out(mixed))
        return self.second(x + self.narrow(torch.relu(self.wide(x))))


class Heads(nn.Module):
    """Outputs that torch gives as views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        boxes = self.boxes(x)
        return boxes.permute(0, 2, 3, 1), boxes.reshape(x.shape[0], 2, 4, -1).transpose(2, 3)


class Frames(nn.Module):
    """Images of bytes, through a gate of half the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(8, 4, 3)

    def forward(self, frames: Tensor) -> Tensor:
        return self.second(nn.functional.glu(self.first(frames.float() / 255), 1)).mean((2, 3))


class OwnNorm(nn.LayerNorm):
    """As timm's, whose forward is seen through."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def streamed(steps: int, batch: int) -> tuple[Tensor, ...]:
    return image(steps, batch, 12), image(1, batch, 16, seed=1) * 0.3, image(1, batch, 16, seed=2) * 0.3


Case = tuple[Callable[[], nn.Module], tuple[Tensor, ...], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "lstm": (Tagger, (words(3, 9),), (words(33, 4, seed=1),)),
    "gru": (lambda: Tagger(nn.GRU), (words(3, 9),), (words(1, 21, seed=1),)),
    "rnn": (lambda: Tagger(nn.RNN), (words(3, 9),), (words(2, 5, seed=1),)),
    "streaming": (Streaming, streamed(6, 3), streamed(2, 17)),
    "projected": (Projected, (image(6, 3, 12),), (image(9, 1, 12),)),
    "encoder": (Encoder, (words(2, 11),), (words(5, 6, seed=1),)),
}
"""Name -> the network, an example, and inputs of other sizes."""


def quantized(name: str, *, dynamic: bool) -> nn.Module:
    torch.manual_seed(5)
    make, example, _ = CASES[name]
    if dynamic:
        return quant.quantize_dynamic(make().eval())
    return quant.quantize_static(make().eval(), [example] * 2, progress=False)


def outputs_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.inference_mode():
        result: Any = model(*inputs)
    return list(result.values()) if isinstance(result, dict) else [*result] if isinstance(result, tuple) else [result]


@pytest.fixture(scope="module", params=[(name, dynamic) for name in CASES for dynamic in (False, True)],
                ids=[f"{name}-{kind}" for name in CASES for kind in ("static", "dynamic")])  # fmt: skip
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    name, dynamic = request.param
    model, path = quantized(name, dynamic=dynamic), tmp_path_factory.mktemp(name) / "model.q8"
    quant.save(model, path, runner=True, example_inputs=CASES[name][1] if dynamic else None)
    return name, model, path


@needs_kernels
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("place", [1, 2], ids=["as at export", "other sizes"])
def test_the_bits_of_python(
    saved: tuple[str, nn.Module, Path], runner: Path, tmp_path: Path, place: int, threads: str
) -> None:
    name, model, path = saved
    inputs: Any = CASES[name][place]
    expected = outputs_of(model, inputs)
    found = run_model(runner, path, tmp_path, inputs, len(expected), "--threads", threads)
    for one, wanted in zip(found, expected, strict=True):
        if name == "encoder":  # a dynamic one has torch's attention and norms in Python, which add in another order
            torch.testing.assert_close(one, wanted, rtol=0, atol=0 if hasattr(model, "program") else 2e-5)
        else:
            assert torch.equal(one, wanted)


PYTHON = """
import json, sys, numpy, torch
from quant.kernels import ops
from safetensors import safe_open
ops.extension_problem()
with safe_open(f"{sys.argv[1]}/model.q8", framework="pt") as file:
    document = json.loads(file.metadata()["octet_runner"])
    constants = [file.get_tensor(one["tensor"]) for one in document["constants"]]
x = torch.from_numpy(numpy.load(f"{sys.argv[1]}/in0.npy"))
[y] = torch.ops.octet.run_plan([x], constants, document["plan"], "native")
numpy.save(f"{sys.argv[1]}/wanted.npy", y.numpy())
"""


@needs_kernels
@starts_python
@pytest.mark.parametrize("isa", [one.name for one in build.instruction_sets(build.host_arch())])
@pytest.mark.parametrize(("name", "dynamic"), [("lstm", False), ("gru", True)])
def test_on_each_instruction_set(runner: Path, tmp_path: Path, isa: str, name: str, dynamic: bool) -> None:
    model, example = quantized(name, dynamic=dynamic), CASES[name][1]
    quant.save(model, tmp_path / "model.q8", runner=True, example_inputs=example if dynamic else None)
    [found] = run_model(runner, tmp_path / "model.q8", tmp_path, CASES[name][2], 1, QUANT_ISA=isa)
    environment = {**os.environ, "QUANT_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PYTHON, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(found, torch.from_numpy(numpy.load(tmp_path / "wanted.npy")))


def test_an_index_of_no_row_names_the_layer(runner: Path, tmp_path: Path) -> None:
    quant.save(quantized("lstm", dynamic=False), tmp_path / "model.q8", runner=True)
    numpy.save(tmp_path / "words.npy", numpy.array([[3, 50]]))
    done = octet_run(runner, tmp_path / "model.q8", "--input", tmp_path / "words.npy")
    assert done.returncode == 1
    assert "layer 'words': plan line" in done.stderr
    assert "index 50 is outside the table of 50 rows" in done.stderr


@needs_kernels
def test_bytes_are_numbers(runner: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    frames = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((2, 3, 16, 16), (3, 3, 12, 20))]
    model = quant.quantize_static(Frames().eval(), [frames[0]] * 2, progress=False)
    quant.save(model, tmp_path / "model.q8", runner=True)
    for one in frames:
        [found] = run_model(runner, tmp_path / "model.q8", tmp_path, [one], 1)
        assert torch.equal(found, outputs_of(model, (one,))[0])


def test_parameters_of_a_forward_may_want_gradients() -> None:
    torch.manual_seed(5)
    x = image(2, 5, 16)
    float_model = nn.Sequential(nn.Linear(16, 16), OwnNorm(16), nn.Linear(16, 4)).eval()
    model = quant.quantize_static(float_model, [x] * 2, progress=False)
    assert model.get_parameter("1.weight").requires_grad
    assert torch.is_grad_enabled()
    assert "layer_norm" in whole_plan(model).text


def test_outputs_that_torch_gives_as_views(runner: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    x = image(2, 3, 24, 24)
    model = quant.quantize_static(Heads().eval(), [x] * 2, progress=False)
    quant.save(model, tmp_path / "model.q8", runner=True)
    again = quant.load(tmp_path / "model.q8", model=Heads().eval())
    quant.save(again, tmp_path / "again.q8", runner=True)
    expected = outputs_of(model, (x,))
    for name in ("model.q8", "again.q8"):
        found = run_model(runner, tmp_path / name, tmp_path, [x], 2)
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))


def test_a_loaded_tagger_gives_the_same(tmp_path: Path) -> None:
    model = quantized("lstm", dynamic=False)
    quant.save(model, tmp_path / "model.q8", runner=True)
    again = quant.load(tmp_path / "model.q8", model=Tagger().eval())
    assert torch.equal(again(CASES["lstm"][2][0]), model(CASES["lstm"][2][0]))
    assert whole_plan(again).text == whole_plan(model).text


def test_a_dynamic_model_needs_an_example() -> None:
    with pytest.raises(ExportError, match=r"Tagger has int8 layers and no program .*: give example_inputs"):
        whole_plan(quantized("lstm", dynamic=True))


def test_a_dynamic_models_weights_are_stored_once(tmp_path: Path) -> None:
    """Those of the copy that was captured for the export are the model's own."""
    quant.save(quantized("lstm", dynamic=True), tmp_path / "model.q8", runner=True, example_inputs=CASES["lstm"][1])
    with safe_open(tmp_path / "model.q8", framework="pt") as file:
        added = [name for name in file.keys() if name.startswith("_quant_runner/")]  # noqa: SIM118
        assert [name for name in added if file.get_tensor(name).dtype == torch.int8] == []


def test_a_float_module_with_a_hook_is_named() -> None:
    model = quantized("encoder", dynamic=False)
    model.first.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ExportError, match="Encoder: first is in training mode or has hooks, which only Python heeds"):
        whole_plan(model)


def test_what_has_no_operation_is_named() -> None:
    class Rest(Tagger):
        def forward(self, words: Tensor) -> Tensor:
            return torch.cumsum(super().forward(words), 1)

    class Counting(Tagger):
        def forward(self, words: Tensor) -> Tensor:
            return super().forward(words[: int((words > 3).sum())])

    with pytest.raises(ExportError, match="1 further step, expected one native call of everything; outside is 'cumsum"):
        whole_plan(quant.quantize_dynamic(Rest().eval()), words(3, 9))
    with pytest.raises(ExportError, match="Counting is not one graph: its own Python runs in"):
        whole_plan(quant.quantize_dynamic(Counting().eval()), words(3, 9))


def test_a_state_that_goes_on_as_a_tuple_is_computed_once() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states, self.out = nn.LSTM(12, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Any:
            y, last = self.states(x)
            return self.out(torch.cumsum(y, 0)), last

    x = image(6, 3, 12)
    model = quant.quantize_static(Whole().eval(), [x] * 2, progress=False)
    with torch.inference_mode():
        _, (h, c) = model(x)
    assert h.shape == c.shape == (1, 3, 16)
    assert all(not region.tail for region in model._modules["_quant"].program.schedule.regions)


def test_int32_indices_run_as_before() -> None:
    model = quantized("lstm", dynamic=False)
    assert torch.equal(model(words(3, 9).int()), model(words(3, 9)))
    with pytest.raises(IndexError, match="layer 'words'"):
        model(torch.full((2, 3), 50))

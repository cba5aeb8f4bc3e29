"""Converted models by torch.export, in a process without this package, and by AOTInductor in one without Python."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from quant.kernels import ops
from torch import Tensor, nn

import quant

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "torch_export.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(words)[0])


class Counting(nn.Module):
    """Keeps its state between calls in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 4)
        self.state: Tensor
        self.register_buffer("state", torch.zeros(1, 16))

    def forward(self, frame: Tensor) -> Tensor:
        state = self.cell(frame, self.state)
        self.state.copy_(state)
        return self.head(state)


class Bert(nn.Module):
    """Two layers of an encoder over the words' vectors, with a class for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Linear(24, 32), nn.Parameter(torch.randn(64, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 3)

    def forward(self, vectors: Tensor) -> Tensor:
        x = self.words(vectors) + self.places[: vectors.shape[1]]
        return self.head(self.layers(x)[:, 0])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def static(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_static(model.eval(), [x, x], progress=False)


def dynamic(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_dynamic(model.eval())


MAKERS = {"static": static, "dynamic": dynamic}
INPUTS = {
    "net": lambda count: torch.randn(count, 3, 12, 14),
    "tagger": lambda count: torch.randn(count, 9, 16),
    "bert": lambda count: torch.randn(count, 11, 24),
}
MODELS = {"net": net, "tagger": Tagger, "bert": Bert}
NAMES = {"net": "input", "tagger": "words", "bert": "vectors"}
CASES = [("static", "net"), ("static", "tagger"), ("dynamic", "tagger"), ("static", "bert"), ("dynamic", "bert")]


@functools.cache
def case(how: str, name: str) -> tuple[nn.Module, torch.export.ExportedProgram]:
    x = INPUTS[name](3)
    q = MAKERS[how](MODELS[name](), x)
    return q, exported_with_batch(q, x, NAMES[name])


def exported_with_batch(q: nn.Module, x: Tensor, name: str) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(q, (x,), dynamic_shapes={name: {0: torch.export.Dim("batch", max=64)}})


@pytest.mark.parametrize(("how", "name"), CASES, ids=[" ".join(one) for one in CASES])
def test_a_program_has_the_users_names_and_the_bits(how: str, name: str) -> None:
    q, exported = case(how, name)
    assert exported.graph_signature.user_inputs == (NAMES[name],)
    x = INPUTS[name](7)
    with torch.no_grad():
        assert torch.equal(exported.module()(x), q(x))


@pytest.mark.parametrize("names", [{0: "batch", 1: "time"}], ids=["batch and time"])
@pytest.mark.parametrize("how", MAKERS)
def test_batch_and_time_of_a_recurrent_layer_may_vary(how: str, names: dict[int, str]) -> None:
    x = INPUTS["tagger"](3)
    q = MAKERS[how](Tagger(), x)
    sizes = {place: torch.export.Dim(name, max=64) for place, name in names.items()}
    with torch.no_grad():
        exported = torch.export.export(q, (x,), dynamic_shapes=(sizes,))
        longer = torch.randn(5, 31, 16)
        assert torch.equal(exported.module()(longer), q(longer))


def test_a_state_in_buffers_goes_with_the_program() -> None:
    frames = torch.randn(4, 1, 16)
    q = quant.quantize_dynamic(Counting().eval())
    with torch.no_grad():
        exported = torch.export.export(copy.deepcopy(q), (frames[0],)).module()
        for frame in frames:
            assert torch.equal(exported(frame), q(frame))


def test_no_call_of_a_plan_has_an_empty_list_of_tensors() -> None:
    """AOTInductor refuses one. The product of two activations behind the first layer has no constants."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cumsum(self.first(x), 1)  # which splits the program
            return torch.matmul(x, x.transpose(1, 2))

    x = torch.randn(2, 6, 8)
    q = static(Products(), x)
    with torch.no_grad():
        exported = torch.export.export(q, (x,))
        assert torch.equal(exported.module()(x), q(x))
    plans = [node for node in exported.graph.nodes if "run_plan" in str(node.target)]
    assert plans
    assert all(list(node.args[1]) for node in plans)


LOAD = """
import sys

import torch

torch.ops.load_library(sys.argv[1])
for number in range(int(sys.argv[2])):
    with torch.no_grad():
        y = torch.export.load(f"{number}.pt2").module()(torch.load(f"{number}.x.pt"))
    torch.save(y, f"{number}.y.pt")
assert not any(name == "quant" or name.startswith("quant.") for name in sys.modules)
"""


def test_a_process_with_the_extension_alone_gives_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = loaded_extension()
    monkeypatch.chdir(tmp_path)
    expected = []
    for number, (how, name) in enumerate(CASES):
        q, exported = case(how, name)
        torch.export.save(exported, f"{number}.pt2")
        torch.save(x := INPUTS[name](5), f"{number}.x.pt")
        with torch.no_grad():
            expected.append(q(x))
    done(sys.executable, "-c", LOAD, extension, str(len(CASES)))
    assert all(torch.equal(torch.load(f"{number}.y.pt"), y) for number, y in enumerate(expected))


def test_schemas_of_the_extension_are_those_of_the_sources() -> None:
    """Both read one list; a library that was built from another one is not used, and says so."""
    loaded_extension()
    for name, schema in ops.SCHEMAS.items():
        [defined] = torch._C._jit_get_schemas_for_operator(f"octet::{name}")
        assert str(defined) == str(torch._C.parse_schema(f"octet::{name}{schema}"))
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"octet::{name}", "Autograd")


def test_an_extension_with_other_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_extension()
    monkeypatch.setitem(ops.SCHEMAS, "dequantize", "(Tensor q, float scale) -> Tensor")
    assert "other arguments has dequantize; `quant build`" in ops.extension_problem.__wrapped__()


def test_scripting_a_static_model_is_refused_with_the_ways_out() -> None:
    x = torch.randn(4, 8)
    q = static(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x)
    for model in (q, q[0], quant.prepare(nn.Sequential(nn.Linear(8, 8)), x), nn.Sequential(q)):
        with (
            pytest.warns(DeprecationWarning, match="torch.jit.script"),
            pytest.raises(TypeError, match=r"torch\.jit\.script: .*torch\.jit\.trace"),
        ):
            torch.jit.script(model)
    assert torch.equal(q(x), q(x))


class Both(nn.Module):
    """Two models of one input as one, which is compiled once."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, vectors: Tensor) -> Tensor:
        return torch.stack([self.first(vectors), self.second(vectors)])


PACKAGE = """
import torch

import quant.kernels

torch._inductor.aoti_compile_and_package(torch.export.load("model.pt2"), package_path="aoti.pt2")
"""


def loaded_extension() -> str:
    problem = ops.extension_problem()
    if problem:
        pytest.skip(problem)
    return os.environ.get("QUANT_EXTENSION") or str(ops.extension_path())


def done(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_page() -> None:
    """Run the page's blocks in the current folder: its model, its package and its C++ program."""
    python = ""
    for language, text in BLOCK.findall(PAGE.read_text()):
        named = re.match(r"(?://|#) (\w+\.\w+)", text)
        if named is not None:
            Path(named[1]).write_text(text)
        elif language == "python" and "tagger.pt2" in text:
            python += text
        elif language == "py":
            done(sys.executable, "-c", python)
            done(sys.executable, "-W", "ignore", "-c", text)
        elif language == "sh":
            done("sh", "-e", "-c", text)


@pytest.mark.timeout(1800)  # it compiles two programs, and workers share the machine
def test_a_cpp_program_gives_the_bits_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's recurrent tagger, and other models in its program; one test, so that one worker compiles it."""
    extension = loaded_extension()
    if os.environ.get("OCTET_EMULATED") == "1" or shutil.which("c++") is None:
        pytest.skip("no C++ compiler (c++) for this machine")
    monkeypatch.chdir(tmp_path)
    run_page()
    written, tags = (numpy.fromfile(name, numpy.float32) for name in ("tags.f32", "expected.f32"))
    assert written.size == 3 * 20 * 10
    assert (written == tags).all()
    assert done(sys.executable, "tag.py", extension) == "(2, 30, 10)\n"
    both, x = Both(case("static", "bert")[0], case("dynamic", "bert")[0]), INPUTS["bert"](5)
    torch.export.save(exported_with_batch(both, INPUTS["bert"](3), NAMES["bert"]), "model.pt2")
    done(sys.executable, "-W", "ignore", "-c", PACKAGE)
    x.numpy().tofile("x")
    done("./tag", "aoti.pt2", extension, "x", "y", *map(str, x.shape))
    with torch.no_grad():
        expected = both(x).numpy()
    apart = numpy.abs(numpy.fromfile("y", numpy.float32).reshape(expected.shape) - expected)
    assert apart[0].max() == 0
    # Inductor compiles what is float of a dynamic model, and adds in another order.
    assert apart[1].max() <= 1e-5

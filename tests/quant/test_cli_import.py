"""`quant import`: other quantisers' models from a shell, with their numbers, and errors in one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import quant

from .test_cli import Cli, cli  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")

MODELS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).eval()

def tagger():
    return nn.Sequential(nn.Linear(8, 16), nn.LSTM(16, 4)).eval()
"""


@pytest.fixture
def shell(cli: Cli, tmp_path: Path) -> Cli:  # noqa: F811
    (tmp_path / f"{cli.module}.py").write_text(MODELS)
    return cli


def photo() -> Tensor:
    return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def onnx_file(name: str = "model.onnx") -> nn.Module:
    pytest.importorskip("onnx", reason="onnx is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    q = quant.quantize_static(model, [photo()], progress=False)
    quant.export_onnx(q, name)
    return q


def test_an_onnx_file_runs_without_onnx(shell: Cli) -> None:
    q = onnx_file()
    said = shell.run("import", "model.onnx", "--out", "model.q8")
    assert "int8" in said
    assert "0/Conv" in said
    assert "wrote model.q8" in said
    numpy.save("x.npy", photo().numpy())
    shell.run("run", "model.q8", "--input", "x.npy", "--output", "y.npy")
    assert torch.equal(torch.from_numpy(numpy.load("y.npy")), q(photo()))
    assert "0/Conv" in shell.run("summary", "model.q8")
    with pytest.raises(quant.ArtefactError, match=r"`quant import` wrote: it is a plan and fits no module; read it by"):
        quant.load("model.q8", model=nn.Linear(2, 2))
    assert torch.equal(quant.load("model.q8")(photo()), q(photo()))


def test_the_report_as_json(shell: Cli) -> None:
    onnx_file()
    said = shell.run("import", "model.onnx", "-o", "model.q8", "--json")
    assert [entry["outcome"] for entry in json.loads(said)["modules"]] == ["int8", "int8"]


def test_a_file_that_is_not_one_plan_is_refused_by_node(shell: Cli) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    onnx_file()
    model = onnx.load("model.onnx")
    last = model.graph.node[-1]
    last.op_type = "Softplus"
    onnx.save(model, "erf.onnx")
    assert f"torch computes '{last.name}'" in shell.fails("import", "erf.onnx", "-o", "model.q8")
    assert not Path("model.q8").exists()


def dynamic_state(factory: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.ao.quantization as ao

        namespace: dict[str, Any] = {}
        exec(MODELS, namespace)
        model = namespace[factory]()
        return model, ao.quantize_dynamic(model, {nn.Linear, nn.LSTM})


def saved(model: nn.Module, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.save about its own storages
        torch.save(model.state_dict(), name)


def test_a_state_dict_of_torch_ao(shell: Cli) -> None:
    model, theirs = dynamic_state("make")
    saved(theirs, "ao.pt")
    shell.run("import", "ao.pt", "--model", f"{shell.module}:make", "-o", "model.safetensors")
    loaded, x = quant.load("model.safetensors", model=model), torch.randn(5, 8)
    assert torch.equal(loaded(x), quant.from_torch_ao(theirs, model)(x))


WRONG: dict[str, tuple[list[str], str]] = {
    "no file": (["import", "none.onnx", "-o", "m.q8"], "there is no file none.onnx"),
    "another kind": (["import", "text.txt", "-o", "m.q8"], "text.txt ends in '.txt', expected .onnx, .pt, .pth, .bin"),
    "no model": (["import", "text.onnx", "-o", "m.q8"], "text.onnx is no ONNX model that can be read"),
    "no state": (["import", "text.pt", "-o", "m.q8", "--model", "{module}:make"], "text.pt"),
    "no factory": (["import", "text.pt", "-o", "m.q8"], "needs --model PACKAGE.MODULE:FACTORY, the float model"),
    "a factory too many": (["import", "text.onnx", "-o", "m.q8", "--model", "a:b"], "--model goes with a state dict"),
    "no folder": (["import", "text.onnx", "-o", "none/m.q8"], "cannot write in none"),
    "a float state": (["import", "float.pt", "-o", "m.q8", "--model", "{module}:make"], "no layer that torch.ao"),
    "recurrent layers": (
        ["import", "lstm.pt", "-o", "m.q8", "--model", "{module}:tagger"],
        "Recurrent layers of torch.ao do",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_is_one_line(shell: Cli, case: str) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    for name in ("text.txt", "text.onnx", "text.pt"):
        Path(name).write_text("no model")
    torch.save(nn.Linear(2, 2).state_dict(), "float.pt")
    if case == "recurrent layers":
        saved(dynamic_state("tagger")[1], "lstm.pt")
    words, said = WRONG[case]
    assert said in shell.fails(*(one.format(module=shell.module) for one in words))

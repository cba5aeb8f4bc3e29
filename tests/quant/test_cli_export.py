"""`quant export` and `quant run`: the numbers of Python from a shell, and errors in one line."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import quant
from quant.cli import export_command, formats, main
from quant.onnx.export_report import Verification
from quant.onnx.recurrent_layers import FORMS
from quant.onnx.runtimes import RUNTIMES, TARGETS

from .test_cli import Cli, cli  # noqa: F401 - a fixture

MODELS = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.states, self.tags = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
    def forward(self, words):
        return self.tags(self.states(self.words(words))[0])

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).eval()

def tagger():
    torch.manual_seed(0)
    return Tagger().eval()
"""


@pytest.fixture
def shell(cli: Cli, tmp_path: Path) -> Cli:  # noqa: F811
    (tmp_path / f"{cli.module}.py").write_text(MODELS)
    return cli


def static(shell: Cli) -> torch.nn.Module:
    namespace: dict[str, object] = {}
    exec(MODELS, namespace)
    batches = [torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    model = quant.quantize_static(namespace["make"](), batches, progress=False)  # type: ignore[operator]
    quant.save(model, "model.q8")
    numpy.save("x.npy", batches[0].numpy())
    return model


def test_a_static_model(shell: Cli) -> None:
    model = static(shell)
    assert "wrote run.q8" in shell.run("export", "model.q8", *shell.model(), "--format", "runner", "--out", "run.q8")
    printed = shell.run("run", "run.q8", "--input", "x.npy", "--output", "y.npy", "--repeat", "2", "--threads", "1")
    assert printed.startswith("output output float32 (5, 2)\n2 runs: median ")
    with torch.inference_mode():
        assert torch.equal(torch.from_numpy(numpy.load("y.npy")), model(torch.from_numpy(numpy.load("x.npy"))))


def test_a_dynamic_model_with_an_example(shell: Cli) -> None:
    shell.run("dynamic", *shell.model("tagger"), "--out", "tagger.safetensors")
    export = ("export", "tagger.safetensors", *shell.model("tagger"), "--format", "runner", "--out", "run.q8")
    assert "give example_inputs" in shell.fails(*export)
    numpy.save("words.npy", numpy.array([[1, 2, 3], [4, 5, 6]]))
    shell.run(*export, "--example", "words.npy")
    numpy.save("other.npy", numpy.array([[1, 2, 3, 7, 9]]))
    assert "output output float32 (1, 5, 3)" in shell.run("run", "run.q8", "--input", "other.npy")
    numpy.save("other.npy", numpy.array([[1, 20]]))
    assert "index 20 is outside the table of 20 rows" in shell.fails("run", "run.q8", "--input", "other.npy")


def test_a_program_of_torch(shell: Cli) -> None:
    model = static(shell)
    export = ("export", "model.q8", *shell.model(), "--format", "pt2", "--out", "model.pt2")
    assert "--format pt2 needs --example FILE.npy" in shell.fails(*export)
    assert "wrote model.pt2" in shell.run(*export, "--example", "x.npy")
    again, x = torch.export.load("model.pt2").module(), torch.randn(9, 8)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    numpy.save("narrow.npy", numpy.zeros((5, 7), numpy.float32))
    assert "quant export: layer '0' (%2): " in shell.fails(*export, "--example", "narrow.npy")


def test_a_file_of_onnx(shell: Cli) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    model = static(shell)
    printed = shell.run("export", "model.q8", *shell.model(), "--format", "onnx", "--out", "model.onnx")
    assert printed.endswith("KiB)\n")
    assert "0  integer  Gemm of integers" in printed
    with torch.inference_mode():
        assert torch.equal(quant.load_onnx("model.onnx")(torch.ones(3, 8)), model(torch.ones(3, 8)))


def exported(shell: Cli, *words: str) -> str:
    """A tagger with int8 weights in words.onnx, and two sentences in words.npy."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    shell.run("dynamic", *shell.model("tagger"), "--out", "tagger.safetensors")
    numpy.save("words.npy", numpy.array([[1, 2, 3], [4, 5, 6]]))
    export = ("export", "tagger.safetensors", *shell.model("tagger"), "--format", "onnx", "--out", "words.onnx")
    return shell.run(*export, "--example", "words.npy", *words)


@pytest.mark.parametrize(("form", "said"), [("exact", "MatMul of integers, steps in a Scan"), ("fast", "DynamicQ")])
def test_the_settings_of_onnx(shell: Cli, form: str, said: str) -> None:
    printed = json.loads(exported(shell, "--target", "avx2", "--recurrent", form, "--json"))
    report = printed["report"]
    [states] = [one["why"] for one in report["steps"] if one["step"] == "states"]
    assert states.startswith(said)
    assert (report["target"], report["overflowing"], report["verification"]) == ("avx2", [], None)
    printed = json.loads(exported(shell, "--runtime", "openvino", "--json"))
    assert printed["report"]["runtime"] == "OpenVINO"


def test_an_exported_file_is_verified(shell: Cli) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    assert "uint8 values are the same" in exported(shell, "--target", "avx2", "--verify")
    verify = ("verify", "tagger.safetensors", "words.onnx", *shell.model("tagger"), "--example", "words.npy")
    assert "uint8 values are the same" in shell.run(*verify, "--max-error", "0.002")
    found = json.loads(shell.run(*verify, "--json"))
    assert found["same_bits"] is not any(found["outputs"].values())
    assert found["steps"]
    assert found["ran_in"].startswith("ONNX Runtime ")


def test_an_error_larger_than_asked_for_is_status_2(shell: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's form of the recurrent layer is another model than ours."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    exported(shell, "--target", "avx2", "--recurrent", "fast")
    words = ("verify", "tagger.safetensors", "words.onnx", *shell.model("tagger"), "--example", "words.npy")
    assert main([*words, "--max-error", "1e-12"]) == 2
    printed = capsys.readouterr()
    assert "relative error of outputs: output " in printed.out
    assert "from the model's, relative, more than --max-error 1e-12" in printed.err


def test_an_output_of_nan_is_no_small_error(
    shell: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    static(shell)
    Path("model.onnx").touch()
    found = Verification("ONNX Runtime", {"boxes": 0.0, "scores": math.nan}, (), {})
    monkeypatch.setattr("quant.onnx.verify_onnx", lambda *_, **__: found)
    verify = ("verify", "model.q8", "model.onnx", *shell.model(), "--max-error", "1")
    assert main(verify) == 2
    assert "output scores of model.onnx in ONNX Runtime is nan from the model's" in capsys.readouterr().err


@pytest.mark.parametrize("bound", ["nan", "-1", "little"])
def test_a_bound_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], bound: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "model.q8", "model.onnx", "--model", "a:b", f"--max-error={bound}"])
    assert f"argument --max-error: {bound}, expected a number from 0 on" in capsys.readouterr().err


def test_a_file_of_another_model_is_not_verified(shell: Cli) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    exported(shell, "--target", "avx2")
    static(shell)
    wrong = ("verify", "model.q8", "words.onnx", *shell.model())
    assert "words.onnx does not fit Sequential: its inputs are 'words'" in shell.fails(*wrong)
    assert "there is no file none.onnx" in shell.fails("verify", "model.q8", "none.onnx", *shell.model())
    assert "there is no file none.q8" in shell.fails("verify", "none.q8", "words.onnx", *shell.model())


@pytest.mark.parametrize("words", [("--target", "avx2"), ("--sums", "fast"), ("--verify",), ("--runtime", "ort")])
def test_settings_of_onnx_are_refused_for_other_formats(shell: Cli, words: tuple[str, ...]) -> None:
    static(shell)
    export = ("export", "model.q8", *shell.model(), "--format", "runner", "--out", "run.q8", *words)
    assert f"{words[0]} goes with --format onnx, not with runner" in shell.fails(*export)
    assert not Path("run.q8").exists()


@pytest.mark.parametrize(("name", "package"), [("onnx", "onnx"), ("pte", "executorch.exir")])
def test_a_package_that_is_missing_is_named(
    shell: Cli, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    static(shell)
    monkeypatch.setitem(sys.modules, package, None)
    export = ("export", "model.q8", *shell.model(), "--format", name, "--out", f"model.{name}", "--example", "x.npy")
    assert f"octet-quant[{package.partition('.')[0]}]" in shell.fails(*export)
    assert not Path(f"model.{name}").exists()


def test_the_names_are_those_of_the_table() -> None:
    assert sorted(export_command.FORMAT_NAMES) == sorted(formats.FORMATS)
    assert tuple(RUNTIMES) == export_command.RUNTIMES
    assert (export_command.TARGETS, export_command.FORMS) == (TARGETS, FORMS)


def test_bad_input(shell: Cli) -> None:
    static(shell)
    export = ("export", "model.q8", *shell.model(), "--format")
    assert "there is no file no.q8" in shell.fails(
        "export", "no.q8", *shell.model(), "--format", "runner", "--out", "o"
    )
    assert "ends in '.q8', expected .onnx" in shell.fails(*export, "onnx", "--out", "o.q8")
    assert "has no part for the runner: write it by quant.save(" in shell.fails("run", "model.q8", "--input", "x.npy")
    shell.run(*export, "runner", "--out", "run.q8")
    assert "the model has 1 inputs (input), got 0" in shell.fails("run", "run.q8")
    numpy.save("int.npy", numpy.arange(8))
    assert "input 'input' is int64, expected float32" in shell.fails("run", "run.q8", "--input", "int.npy")
    assert "is no .npy file of numbers" in shell.fails("run", "run.q8", "--input", "model.q8")
    numpy.save("nan.npy", numpy.full((1, 8), numpy.nan, numpy.float32))
    assert "NaN or inf came to" in shell.fails("run", "run.q8", "--input", "nan.npy")
    wrong = ("run", "run.q8", "--input", "x.npy", "--output", "a.npy", "--output", "b.npy")
    assert "--output is given 2 times, the model has 1 outputs" in shell.fails(*wrong)
    data = bytearray(Path("run.q8").read_bytes())
    data[-1] ^= 1
    Path("run.q8").write_bytes(bytes(data))
    assert "altered or damaged" in shell.fails("run", "run.q8", "--input", "x.npy")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(40), b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 118])
def test_an_array_that_numpy_cannot_read(shell: Cli, content: bytes) -> None:
    """Empty, no archive, and a header without an end: none of numpy's errors of these is a ValueError."""
    static(shell)
    shell.run("export", "model.q8", *shell.model(), "--format", "runner", "--out", "run.q8")
    Path("bad.npy").write_bytes(content)
    assert "bad.npy is no .npy file of numbers" in shell.fails("run", "run.q8", "--input", "bad.npy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--repeat", "-1"), "--repeat is -1, expected at least 0"),
        (("--threads", "0"), "--threads is 0, expected 1 to 1024"),
        (("--threads", "99999999999"), "--threads is 99999999999, expected 1 to 1024"),
    ],
)
def test_numbers_that_no_run_has(shell: Cli, words: tuple[str, str], message: str) -> None:
    static(shell)
    assert message in shell.fails("run", "model.q8", "--input", "x.npy", *words)


def test_an_example_that_the_model_does_not_take(shell: Cli) -> None:
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    exec(MODELS, namespace)
    quant.save(quant.quantize_dynamic(namespace["tagger"]()), "model.q8")  # type: ignore[operator]
    numpy.save("words.npy", numpy.full((2, 3), 20))
    export = ("export", "model.q8", *shell.model("tagger"), "--format", "runner", "--out", "run.q8")
    assert "index 20 is outside the table of 20 rows" in shell.fails(*export, "--example", "words.npy")


@pytest.mark.parametrize(
    "change",
    [
        lambda document: [],
        lambda document: {},
        lambda document: {**document, "version": 0},
        lambda document: {**document, "version": "1"},
        lambda document: {**document, "plan": 7},
        lambda document: {**document, "inputs": [{**document["inputs"][0], "dtype": "float99"}]},
        lambda document: {**document, "constants": [7]},
        lambda document: {**document, "outputs": []},
    ],
)
def test_an_altered_part_for_the_runner(shell: Cli, change: Callable[[Any], object]) -> None:
    """Whose checksum was altered with it."""
    static(shell)
    shell.run("export", "model.q8", *shell.model(), "--format", "runner", "--out", "run.q8")
    data = Path("run.q8").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = json.dumps(change(json.loads(header["__metadata__"]["octet_runner"])))
    header["__metadata__"].update(octet_runner=text, octet_runner_crc32=str(zlib.crc32(text.encode())))
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    Path("run.q8").write_bytes(len(new).to_bytes(8, "little") + new + data[end:])
    assert "run.q8: its part for the runner" in shell.fails("run", "run.q8", "--input", "x.npy")


def test_a_part_for_the_runner_without_an_end(shell: Cli) -> None:
    text = "[" * 100_000
    metadata = {"octet": "{}", "octet_runner": text, "octet_runner_crc32": str(zlib.crc32(text.encode()))}
    save_file({"x": torch.zeros(1)}, "run.q8", metadata)
    assert "run.q8: its part for the runner was altered" in shell.fails("run", "run.q8")

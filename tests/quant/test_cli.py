"""The command line: what it prints and writes, and that whatever the user can put right is one line and status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quant.kernels import build, ops
from torch import nn

import quant
from quant.artefact.file import read, write
from quant.cli import doctor, files, main

MODELS = """
import warnings
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)
    def get_extra_state(self):
        return "a string"
    def set_extra_state(self, state):
        pass

ready = make()
number = 3

def needs(size): return nn.Linear(size, size)
def leaves(): raise SystemExit("bye")
def returns_none(): return None
def warns(): warnings.warn("mind the gap"); return make()
def no_layer(): return nn.ReLU()
def double(): return make().double()
def quantized():
    import quant
    return quant.quantize_dynamic(make())
"""


class Cli:
    """One user: a folder with a module `NAME`, and the command."""

    def __init__(self, module: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.module = module
        self._capsys = capsys

    def model(self, factory: str = "make") -> list[str]:
        return ["--model", f"{self.module}:{factory}"]

    def run(self, *arguments: str) -> str:
        """Standard output of a command that succeeds."""
        status = main(arguments)
        captured = self._capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    def fails(self, *arguments: str) -> str:
        """The one line of a command that fails."""
        status = main(arguments)
        captured = self._capsys.readouterr()
        assert status == 2
        assert captured.out == ""
        [line] = captured.err.splitlines()
        assert line.startswith(f"quant {arguments[0]}: ")
        return line


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    module = f"models_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(MODELS)
    (tmp_path / f"{module}_broken.py").write_text("import torch\nraise RuntimeError('two\\nlines')\n")
    (tmp_path / f"{module}_wants.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Cli(module, capsys)


def float_model(seed: int = 1) -> nn.Module:
    """The model of `make`, whose weights are those of seed 0; routes of products depend on them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"octet-quant {quant.__version__}\n")


def test_dynamic_prints_the_report(cli: Cli) -> None:
    printed = cli.run("dynamic", *cli.model())
    assert printed.strip() == str(quant.summary(quant.quantize_dynamic(float_model(seed=0))))


def test_dynamic_prints_the_report_as_json(cli: Cli) -> None:
    report = json.loads(cli.run("dynamic", *cli.model(), "--json", "--out", "int8.safetensors"))
    assert report == quant.summary(quant.quantize_dynamic(float_model(seed=0))).to_dict()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_dynamic_writes_the_int8_form_of_the_weights(cli: Cli, suffix: str) -> None:
    model = float_model()
    weights = f"float{suffix}"
    if suffix == ".pt":
        torch.save(model.state_dict(), weights)
    else:
        safetensors.torch.save_file(model.state_dict(), weights)
    printed = cli.run("dynamic", *cli.model(), "--weights", weights, "--out", "int8.safetensors")
    assert "wrote int8.safetensors" in printed
    expected = quant.quantize_dynamic(model)
    restored = quant.load("int8.safetensors", model=float_model())
    x = torch.randn(3, 8)
    torch.testing.assert_close(restored(x), expected(x), rtol=0, atol=0)


def in_a_file(report: dict[str, Any]) -> dict[str, Any]:
    """A report as a file has it: no process has packed its weights."""
    return {**report, "packed": {}, "bytes_packed": 0}


def test_summary_reads_the_report_that_dynamic_wrote(cli: Cli) -> None:
    report = json.loads(cli.run("dynamic", *cli.model(), "--json", "--out", "int8.safetensors"))
    assert json.loads(cli.run("summary", "int8.safetensors", "--json")) == in_a_file(report)
    assert "2 of 2 modules" in cli.run("summary", "int8.safetensors")


@pytest.mark.parametrize(
    ("factory", "line"),
    [("make", "0 of 2 modules"), ("ready", "0 of 2 modules"), ("Tied", "0 of 2"), ("quantized", "2 of 2 modules")],
)
def test_summary_of_a_model(cli: Cli, factory: str, line: str) -> None:
    assert line in cli.run("summary", *cli.model(factory))


def test_a_pattern_leaves_modules_float(cli: Cli) -> None:
    report = json.loads(cli.run("dynamic", *cli.model(), "--keep-float", "2", "--json"))
    assert {entry["name"]: entry["outcome"] for entry in report["modules"]} == {"0": "int8", "2": "float"}


def test_the_backend_is_the_named_one(cli: Cli) -> None:
    assert "reference" in cli.run("dynamic", *cli.model(), "--backend", "reference")


def test_tied_weights_are_written_and_read_once(cli: Cli) -> None:
    torch.save({"table.weight": torch.randn(6, 4)}, "one_name.pt")
    cli.run("dynamic", *cli.model("Tied"), "--weights", "one_name.pt", "--out", "tied.safetensors")
    stored = safetensors.torch.load_file("tied.safetensors")
    assert sum(value.dtype == torch.int8 for value in stored.values()) == 1


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dynamic", *cli.model("warns")]) == 0
    assert capsys.readouterr().err == "quant: warning: mind the gap\n"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing", "expected package.module:factory"),
        (":make", "expected package.module:factory"),
        ("no_such_module_anywhere:make", "no module 'no_such_module_anywhere'"),
        ("json.no_such:make", "no module 'json.no_such'"),
        ("{}:nope", "has no 'nope'; it has make, Tied, Odd"),
        ("{}:make.nope", "has no 'make.nope'"),
        ("{}:number", "of type int, expected a torch.nn.Module"),
        ("{}:returns_none", "of type NoneType, expected a torch.nn.Module"),
        ("{}:needs", "called without arguments"),
        ("{}:leaves", "failed with SystemExit at "),
        ("{}_broken:make", "_broken.py:2: two lines"),
        ("{}_wants:make", "a_package_that_nobody_has"),
        ("{}:no_layer", "no module was quantised. The model holds ReLU (1)"),
        ("{}:double", "torch.float64, expected torch.float32"),
        ("{}:quantized", "already quantised"),
    ],
)
def test_a_model_that_cannot_be_had(cli: Cli, model: str, message: str) -> None:
    assert message in cli.fails("dynamic", "--model", model.format(cli.module))


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("2.weight"), "it lacks 2.weight"),
        (lambda state: state | {"extra": torch.ones(1)}, "it also has extra"),
        (lambda state: state | {"0.weight": torch.ones(4, 3)}, "0.weight is [4, 3], in the model [4, 8]"),
        (lambda state: {f"module.{key}": value for key, value in state.items()}, "strip 'module.'"),
        (lambda state: {"epoch": 3, "model": state}, "no tensors; save the state dict alone, perhaps the one under 'm"),
        (lambda state: list(state.values()), "holds a list, expected a state dict"),
        (lambda state: float_model(), "not opened, because it could run code"),
    ],
    ids=["missing", "unexpected", "shape", "data-parallel", "nested", "list", "whole-module"],
)
def test_pickled_weights_that_do_not_fit(
    cli: Cli, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    torch.save(change(float_model().state_dict()), "weights.pt")
    assert message in cli.fails("dynamic", *cli.model(), "--weights", "weights.pt")


def test_a_pickle_is_not_run(cli: Cli, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return os.mkdir, (str(tmp_path / "was_run"),)

    torch.save({"0.weight": Payload()}, "weights.pt")
    cli.fails("dynamic", *cli.model(), "--weights", "weights.pt")
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
@pytest.mark.parametrize("content", [b"", b"not weights at all, and long enough to have a header"])
def test_files_that_hold_no_weights(cli: Cli, name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    assert name in cli.fails("dynamic", *cli.model(), "--weights", name)


@pytest.mark.parametrize(
    ("weights", "message"), [("nowhere.pt", "there is no file"), (".", "there is no file"), ("w.npz", "ends in '.npz'")]
)
def test_weights_that_are_not_there(cli: Cli, weights: str, message: str) -> None:
    Path("w.npz").touch()
    assert message in cli.fails("dynamic", *cli.model(), "--weights", weights)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("int8.pt", "expected .safetensors"),
        ("nowhere/int8.safetensors", "cannot write in nowhere"),
        ("folder.safetensors", "is a folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_known_before_the_model_is_made(cli: Cli, out: str, message: str) -> None:
    Path("folder.safetensors").mkdir()
    assert message in cli.fails("dynamic", *cli.model("leaves"), "--out", out)


def test_a_failed_write_leaves_the_old_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    Path("int8.safetensors").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in cli.fails("dynamic", *cli.model(), "--out", "int8.safetensors")
    assert Path("int8.safetensors").read_text() == "old"
    assert not list(Path().glob(".int8*"))


def test_a_state_that_is_not_tensors_cannot_be_written(cli: Cli) -> None:
    assert "_extra_state" in cli.fails("dynamic", *cli.model("Odd"), "--out", "int8.safetensors")


def test_backends_and_patterns_that_are_not_there(cli: Cli) -> None:
    assert "no backend is called 'gpu'; there are native" in cli.fails("dynamic", *cli.model(), "--backend", "gpu")
    assert "rule 'decoder*'" in cli.fails("dynamic", *cli.model(), "--keep-float", "decoder*")


def test_summary_wants_one_source(cli: Cli) -> None:
    assert "expected either a file" in cli.fails("summary")
    assert "expected either a file" in cli.fails("summary", "x.safetensors", *cli.model())
    assert "--weights goes with --model" in cli.fails("summary", "x.safetensors", "--weights", "y.pt")


def test_summary_of_a_damaged_file(cli: Cli, tmp_path: Path) -> None:
    cli.run("dynamic", *cli.model(), "--out", "int8.safetensors")
    path = tmp_path / "int8.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "int8.safetensors was altered or damaged: " in cli.fails("summary", "int8.safetensors")


def test_summary_of_a_file_without_the_bytes_of_what_stayed_float(cli: Cli, tmp_path: Path) -> None:
    report = json.loads(cli.run("dynamic", *cli.model(), "--json", "--keep-float", "2", "--out", "int8.safetensors"))
    assert report["model_bytes_after"] > report["bytes_after"]
    manifest, tensors = read(Path("int8.safetensors"))
    kept = {name: manifest[name] for name in ("static", "modules", "report")}
    write(Path("older.safetensors"), tensors, kept)
    assert json.loads(cli.run("summary", "older.safetensors", "--json")) == in_a_file(report)


def test_summary_of_a_file_without_a_report(cli: Cli) -> None:
    safetensors.torch.save_file(float_model().state_dict(), "float.safetensors")
    Path("text.safetensors").write_text("text")
    assert "holds no report" in cli.fails("summary", "float.safetensors")
    assert "not a safetensors file" in cli.fails("summary", "text.safetensors")
    assert "there is no file" in cli.fails("summary", "nowhere.safetensors")


@pytest.mark.parametrize("arguments", [["dynamic"], ["nonsense"], [], ["summary", "--nonsense"]])
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: quant" in capsys.readouterr().err


def test_build_takes_the_arguments_of_the_compiler_script(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["build", "--help"])
    assert stopped.value.code == 0
    assert "--torch-dir" in capsys.readouterr().out


def test_build_into_a_place_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    # Not a folder without write permission: that stops everybody but root.
    assert main(["build", "--cxx", "true", "--arch", "x86_64", "--force", "--out", "/dev/null/_octet.so"]) == 2
    line = capsys.readouterr().err
    assert "cannot write in /dev/null" in line
    assert "--out FILE" in line
    assert "QUANT_EXTENSION" in line


def test_build_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    assert main(["build"]) == 2
    assert "no C++ compiler" in capsys.readouterr().err


def test_build_with_a_compiler_that_is_not_there(cli: Cli) -> None:
    assert "no-such-cxx" in cli.fails("build", "--cxx", "no-such-cxx", "--torch-dir", str(Path(torch.__file__).parent))


def test_doctor_tells_every_backend_and_why_it_is_missing(cli: Cli) -> None:
    findings = json.loads(cli.run("doctor", "--json"))
    assert findings["backends"] == quant.kernels.available()
    assert findings["torch"] == torch.__version__
    text = cli.run("doctor")
    for name, reason in findings["backends"].items():
        [line] = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
        assert line.endswith(f"missing: {reason}" if reason else "usable")


NAMES = [one.name for one in build.instruction_sets(build.host_arch())]
"""What QUANT_ISA may be here."""


def test_doctor_says_which_kernels_are_loaded(cli: Cli) -> None:
    findings = json.loads(cli.run("doctor", "--json"))
    problem = ops.extension_problem()
    assert problem in findings["extension"]
    assert (findings["cpu"]["isa_in_use"] in NAMES) == (not problem)
    assert bool(findings["cpu"]["kernels"]) == (not problem)


def test_an_extension_of_older_sources_is_no_error_of_doctor() -> None:
    assert doctor.about_extension("a_question_of_newer_sources") == ""
    assert (doctor.about_extension("isa") in NAMES) == (not ops.extension_problem())


@pytest.mark.parametrize("name", NAMES)
def test_doctor_says_whose_kernels_each_family_runs(name: str) -> None:
    kernels = doctor.kernels_of(name)
    assert list(kernels) == [
        "gemm",
        "gemm_of_safe_pairs",
        "gemm_of_symmetric",
        "depthwise",
        "winograd",
        "rows",
        "elementwise",
        "reals",
        "narrow",
    ]
    assert kernels["gemm"] == name
    for served in kernels.values():
        assert served in NAMES or served.startswith("none: "), served
    expected = {"avxvnni": "avx2", "neondot": "portable"}
    assert kernels["rows"] == expected.get(name, kernels["rows"])


@pytest.mark.parametrize(
    ("machine", "flags", "isa"),
    [
        ("x86_64", "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni amx_tile amx_int8", "amx"),
        ("x86_64", "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni amx_tile", "avx512vnni"),
        ("x86_64", "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512vnni"),
        ("x86_64", "avx2 fma avx512f avx512bw avx512vl avx512dq", "avx2"),
        ("x86_64", "avx2 fma avx_vnni", "avxvnni"),
        ("x86_64", "avx2 fma", "avx2"),
        ("x86_64", "sse4_2 avx", "portable"),
        ("aarch64", "fp asimd atomics asimddp sve i8mm bf16", "neoni8mm"),
        ("aarch64", "fp asimd atomics asimddp", "neondot"),
        ("aarch64", "fp asimd", "neon"),
        ("aarch64", "", ""),
        ("riscv64", "rv64imafdc", "portable"),
    ],
)
def test_the_best_isa_of_a_cpu(machine: str, flags: str, isa: str) -> None:
    assert doctor.best_isa(set(flags.split()), machine) == isa


def test_doctor_agrees_with_the_kernels_about_this_cpu() -> None:
    if ops.extension_problem() or os.environ.get("QUANT_ISA") or not doctor.CPUINFO.exists():
        pytest.skip("needs the compiled kernels, /proc/cpuinfo and no QUANT_ISA")
    cpu = doctor.examine()["cpu"]
    assert cpu["isa"] in ("", cpu["isa_in_use"]) or cpu["isa_refusal"]


def test_doctor_reports_a_backend_that_the_environment_gets_wrong(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.dispatch._FROM_ENVIRONMENT", "gpu")
    assert "no backend is called 'gpu'" in cli.run("doctor")


@pytest.mark.skipif(bool(ops.extension_problem()), reason="only the compiled kernels have instruction sets")
def test_an_instruction_set_that_is_none_is_said_and_not_used(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, "-m", "quant", *arguments], {**os.environ, "QUANT_ISA": "foo"}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "net.py").write_text(MODELS)
    doctor = run("doctor")
    assert (doctor.returncode, doctor.stderr) == (0, "")
    assert "in use: none: QUANT_ISA is 'foo', expected portable" in doctor.stdout
    assert "backend      none: QUANT_ISA is 'foo', expected portable" in doctor.stdout
    used = run("dynamic", "--model", "net:make")
    assert used.returncode == 2
    [line] = used.stderr.splitlines()
    assert line.startswith("quant dynamic: QUANT_ISA is 'foo', expected portable")


def test_two_empty_tensors_are_not_tied() -> None:
    a, b = torch.empty(0), torch.empty(0)
    assert files._identity(a) != files._identity(b)


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quant", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "usage: quant" in done.stdout

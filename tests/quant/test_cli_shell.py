"""What a shell sees of every command: exit statuses, JSON, colours, completion; and `quant bench`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import quant
from quant.cli import commands, gains, main, make_parser
from quant.cli.completion import SHELLS, script

MODELS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()

def other():
    return nn.Linear(3, 3)
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    from quant.kernels.build import make_parser as make_build_parser

    [verbs] = [one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return {**verbs.choices, "build": make_build_parser()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a module of models and a file of one; the module's name."""
    module = f"shell_models_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    namespace: dict[str, Any] = {}
    exec(MODELS, namespace)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    numpy.save("x.npy", x.numpy())
    quant.save(quant.quantize_static(namespace["make"](), [x], progress=False), "model.q8")
    return module


def test_bench_prints_tables_and_writes_files(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["bench", "model.q8", "--model", f"{folder}:make", "--seconds", "0.01"]
    arguments = [*common, "--example", "x.npy", "--threads", "1", "2", "--out", "all.json", "--plot", "call.svg"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[:2] for line in printed.splitlines()[2:6]]
    assert rows == [["1", "int8"], ["1", "float"], ["2", "int8"], ["2", "float"]]
    assert "wrote all.json" in printed
    assert "wrote call.svg" in printed
    assert Path("call.svg").read_text().startswith("<svg")
    steps = [one["name"] for one in json.loads(Path("all.json").read_text())["steps"]]
    assert {"0", "3"} <= set(steps)


def test_bench_prints_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["bench", "model.q8", "--model", f"{folder}:make", "--seconds", "0.01", "--json"]
    assert main([*common, "--shape", "1x3x8x8", "--no-float", "--no-steps"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["threads"][0]["float_model"], data["float_memory"], data["error"], data["steps"]) == (
        None,
        None,
        None,
        [],
    )
    assert data["threads"][0]["int8"]["calls"] >= 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["away.q8", "--shape", "1x3x8x8"], "there is no file away.q8"),
        (["model.q8", "--example", "away.npy"], "--example: away.npy is no .npy file of numbers"),
        (["model.q8", "--shape", "1x3x8x8", "--seconds", "0"], "seconds is 0.0, expected a positive number"),
        (["model.q8", "--shape", "1x3x8x8", "--plot", "call.png"], "--plot: call.png ends in '.png', expected .svg"),
        (["model.q8", "--shape", "1x3x8x8", "--no-steps", "--plot", "a.svg"], "--plot draws the steps"),
        (["model.q8", "--shape", "1x7x8x8"], "7 channels"),
    ],
    ids=["no file", "no array", "no time", "suffix", "no steps", "another shape"],
)
def test_what_bench_cannot_do_is_one_line(
    arguments: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--model", f"{folder}:make"]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("quant bench: ")
    assert message in line
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["--shape", "1xx3"], ["--shape", "0x3"], ["--threads", "0"], []])
def test_arguments_that_make_no_sense_are_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    extra = arguments if "--threads" not in arguments else [*arguments, "--shape", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "model.q8", "--model", "a:b", *extra])
    assert stopped.value.code == 2
    assert "quant bench: error:" in capsys.readouterr().err


def test_every_command_can_print_json() -> None:
    assert [name for name, parser in parsers().items() if "--json" not in parser._option_string_actions] == []


def test_export_and_run_print_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", f"{folder}:make"]
    assert main(["export", "model.q8", *model, "--format", "runner", "--out", "runner.q8", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["bytes"] == Path("runner.q8").stat().st_size
    assert (written["file"], written["format"]) == ("runner.q8", "runner")
    assert main(["run", "runner.q8", "--input", "x.npy", "--repeat", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(one["dtype"], one["shape"]) for one in data["outputs"]] == [("float32", [2, 5])]
    assert len(data["milliseconds"]) == 3


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "quant doctor: interrupted"


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)], ids=["torch", "Python"]
)
def test_no_memory_is_one_line(
    allocate: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "doctor", lambda *_: allocate())
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quant doctor: out of memory: ")
    assert said.count("\n") == 1


def test_an_error_of_another_kind_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(commands, "doctor", fails)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["doctor"])


def test_a_compiler_that_is_not_there_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--cxx", "/nonexistent/compiler", "--force"]) in (1, 2)
    assert "quant build: " in capsys.readouterr().err


def test_the_documented_statuses_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "130"]


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["bench", "--help"]])
def test_no_color_is_heeded(arguments: list[str]) -> None:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-m", "quant", *arguments], capture_output=True, text=True, check=True, env=environment
    )
    assert "\x1b" not in done.stdout + done.stderr


def completed(line: list[str], folder: Path) -> list[str]:
    """What bash offers for the last word of a command line."""
    words = " ".join(f"'{word}'" for word in line)
    text = f"{script('bash', make_parser(), {'build': parsers()['build']})}\nCOMP_WORDS=({words})\n"
    text += f'COMP_CWORD={len(line) - 1}\n_quant\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    (tmp_path / "my model.q8").touch()
    (tmp_path / "my.npy").touch()
    assert completed(["quant", "se"], tmp_path) == ["sensitivity"]
    assert set(parsers()) <= set(completed(["quant", ""], tmp_path))
    assert completed(["quant", "bench", "--thr"], tmp_path) == ["--threads"]
    assert set(completed(["quant", "autoquant", "--objective", ""], tmp_path)) == {"latency", "size"}
    assert set(completed(["quant", "export", "my"], tmp_path)) == {"my model.q8", "my.npy"}
    assert set(completed(["quant", "bench", "--example", "my."], tmp_path)) == {"my.npy"}
    assert completed(["quant", "calibrate", "--limit", "m"], tmp_path) == []
    assert set(completed(["quant", "completion", ""], tmp_path)) == set(SHELLS)
    assert completed(["quant", "build", "--for"], tmp_path) == ["--force"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_option_and_the_shell_reads_it(shell: str) -> None:
    text = script(shell, make_parser(), {"build": parsers()["build"]})
    for name, parser in parsers().items():
        lines = text if shell == "zsh" else "\n".join(line for line in text.splitlines() if name in line)
        for flag in parser._option_string_actions:
            short = f"-s {flag[1:]} " if flag[1] != "-" else f"-l {flag[2:]} "
            assert (short if shell == "fish" else flag) in lines, f"{shell}: {name} {flag}"
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_completion_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    text = capsys.readouterr().out
    assert main(["completion", "fish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": "fish", "script": text}


def machine(**changes: Any) -> dict[str, Any]:
    """Findings of a machine that has nothing to gain, with changes; names with a dot's place as `cpu_isa`."""
    cpu = {"machine": "x86_64", "isa": "amx", "isa_in_use": "amx", "isa_refusal": ""}
    system = {"cores": 4, "quota": None, "governor": "performance"}
    found = {"cpu": cpu, "environment": {}, "threads": 4, "cpus": 4, "system": system}
    for name, value in changes.items():
        part, _, key = name.partition("_")
        if part in ("cpu", "system"):
            found[part][key] = value  # type: ignore[index]
        else:
            found[name] = value
    return found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cpu_isa_in_use": "none, the kernels are not loaded"}, "run `quant build`"),
        (
            {"cpu_isa_in_use": "avx2", "environment": {"QUANT_ISA": "avx2"}},
            "QUANT_ISA=avx2 holds the kernels below amx",
        ),
        ({"cpu_isa_refusal": "permission denied"}, "tiles that are not used: permission denied"),
        ({"environment": {"QUANT_BACKEND": "reference"}}, "QUANT_BACKEND=reference decides for all layers"),
        ({"threads": 8}, "torch has 8 threads on 4 CPUs: they wait for each other; set OMP_NUM_THREADS=4"),
        ({"system_quota": 1.5}, "4 threads on 1.5 CPUs' time, the container's limit"),
        ({"system_cores": 2}, "4 threads on 2 cores"),
        ({"threads": 1}, "torch uses 1 of 4 CPUs"),
        ({"system_governor": "powersave"}, "governor is powersave"),
        ({"cpu_isa": "avx2", "cpu_isa_in_use": "avx2"}, "this CPU has no VNNI"),
        ({"cpu_isa": "avx512vnni", "cpu_isa_in_use": "avx512vnni"}, "this CPU has no AMX"),
        ({"cpu_machine": "aarch64", "cpu_isa": "neon", "cpu_isa_in_use": "neon"}, "no dot product of bytes"),
    ],
)
def test_doctor_names_what_could_be_gained(changes: dict[str, Any], sentence: str) -> None:
    [said] = gains.gains(machine(**changes))
    assert sentence in said


def test_doctor_names_nothing_where_nothing_is_to_be_gained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gains.gains(machine()) == []
    monkeypatch.setattr(gains, "gains", lambda findings: ["by a faster CPU"])
    assert main(["doctor"]) == 0
    assert "could gain   by a faster CPU" in capsys.readouterr().out


def test_the_quota_of_a_container_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "CGROUPS", tmp_path)
    assert gains.system()["quota"] is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert gains.system()["quota"] == 0.5
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert gains.system()["quota"] == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert gains.system()["quota"] is None

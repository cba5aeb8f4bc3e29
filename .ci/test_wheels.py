"""Install a wheel as a user does, in a clean environment for each Python and torch, and run it: `make test-wheels`.

    python .ci/test_wheels.py                                          # build/wheels, every Python here, every torch
    python .ci/test_wheels.py --python 3.12 /opt/py314/bin/python3.14 --torch 2.13.0 --tests tests/quant/test_capture.py

Each environment runs .ci/wheel_probe.py, and with --tests pytest on files of this checkout against the installed
package. A Python that is not here is a row that says so. Of one torch the probe's int8 outputs have to be the same bits
under every Python. Where pip takes a torch for CUDA, NVIDIA's libraries, two gigabytes, are fetched once for a torch
and linked into its environments. What was installed is deleted when a torch is done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10.0", "2.11.0", "2.12.0", "2.13.0")
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2", "hypothesis>=6.100", "scipy>=1.10")
STEPS = ("dynamic_lstm", "static_cnn", "counted_size", "qat_steps")
"""Whose digests the probe prints."""


@dataclass
class Row:
    """What came of an environment.

    Attributes:
        python: the version, or what it was asked for as.
        torch: the version that pip installed, or was asked for.
        result: 'ok', or what is wrong, in a line.
        digests: of the probe's outputs, by step.
        tests: pytest's last line.
        seconds: of it all.
    """

    python: str
    torch: str
    result: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    tests: str = ""
    seconds: float = 0.0


class Failed(Exception):
    """A command failed; the message is one line, and the log has the rest."""


def find_python(asked: str) -> Path | None:
    """The interpreter of a path or of a version: on PATH, else pyenv's newest; None where there is none."""
    if "/" in asked:
        return Path(asked) if Path(asked).exists() else None
    folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    of_pyenv = sorted(
        folder.glob(f"{asked}.*/bin/python{asked}"), key=lambda path: [*map(int, re.findall(r"\d+", str(path)))]
    )
    on_path = shutil.which(f"python{asked}")
    candidates = [*([Path(on_path)] if on_path else []), *reversed(of_pyenv)]
    return next((one for one in candidates if is_version(one, asked)), None)


def is_version(python: Path, version: str) -> bool:
    """Whether an interpreter starts and is of this minor version; pyenv's shims are on PATH for all of them."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


class Environment:
    """A virtual environment, what is run in it, and a log of that."""

    def __init__(self, python: Path, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        self.python = folder / "bin" / "python"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.run([python, "-m", "venv", folder])

    def run(self, command: Sequence[str | Path]) -> str:
        """Standard output of a command that must succeed; the checkout and its settings are out of its reach."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("QUANT_", "PYTHON", "VIRTUAL_ENV"))
        }
        kept |= {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
        kept["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{kept['PATH']}"
        done = subprocess.run(command, cwd=self.folder.parent, env=kept, capture_output=True, text=True, check=False)
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}\n")
        if done.returncode:
            lines = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
            raise Failed(f"{' '.join(map(str, command[1:4]))}: {lines[-1] if lines else done.returncode}")
        return done.stdout

    def pip_install(self, *arguments: str | Path) -> None:
        """Without compiling to bytecode, which takes longer than all of the rest, for files that are never imported."""
        words = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-cache-dir")
        self.run([self.python, *words, *arguments])

    @property
    def packages(self) -> Path:
        """The folder that packages are installed in."""
        [found] = self.folder.glob("lib/python*/site-packages")
        return found


def install(environment: Environment, wheel: Path, torch: str, shared: Path, tools: Sequence[str]) -> None:
    """The wheel, a torch and everything that they require."""
    environment.pip_install("--no-deps", f"torch=={torch}")
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('torch')))"
    wanted = [line for line in environment.run([environment.python, "-c", code]).splitlines() if is_shared(line)]
    if wanted and not shared.exists():
        environment.pip_install("--target", shared, *wanted)
    for entry in shared.iterdir() if wanted else ():
        if not (environment.packages / entry.name).exists():
            (environment.packages / entry.name).symlink_to(entry)
    environment.pip_install(f"torch=={torch}", wheel, *tools)


def is_shared(requirement: str) -> bool:
    """Whether a requirement of torch's is of NVIDIA's libraries, the same for every Python."""
    return requirement.startswith(("nvidia-", "cuda-toolkit"))


def try_one(python: Path, torch: str, wheel: Path, options: argparse.Namespace, shared: Path) -> Row:
    """Make an environment, run the probe and the tests in it, and delete it."""
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    row, begin = Row(version, torch), time.monotonic()
    folder = shared.parent / f"python{version}-torch{torch}"
    log = options.logs / f"{folder.name}.log"
    try:
        environment = Environment(python, folder, log)
        install(environment, wheel, torch, shared, TEST_TOOLS if options.tests else ())
        said = json.loads(environment.run([environment.python, ROOT / ".ci" / "wheel_probe.py"]).splitlines()[-1])
        row.torch, row.digests = said["torch"], {step: said[step] for step in STEPS}
        if options.tests:
            paths = [ROOT / path for path in options.tests]
            pytest = [
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--rootdir={ROOT}",
                "-c",
                ROOT / "pyproject.toml",
            ]
            row.tests = last_line(environment.run([environment.python, *pytest, *paths]))
        row.result = "ok"
    except Failed as problem:
        row.result = f"FAILED: {problem} ({log})"
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    row.seconds = time.monotonic() - begin
    return row


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip("= ")


def try_all(wheel: Path, options: argparse.Namespace) -> Iterator[Row]:
    """A row for each environment, torch by torch, since the libraries of one take gigabytes."""
    pythons = {asked: find_python(asked) for asked in options.python}
    with tempfile.TemporaryDirectory(prefix="octet-wheels-", dir=options.folder) as name:
        for torch in options.torch:
            shared, first = Path(name, f"shared-{torch}"), Row("", "")
            for asked, python in pythons.items():
                if python is None:
                    yield Row(asked, torch, "not here: neither on PATH, with venv and ensurepip, nor of pyenv")
                    continue
                row = try_one(python, torch, wheel, options, shared)
                first = first if first.digests else row
                unlike = [step for step in row.digests if row.digests[step] != first.digests[step]]
                if unlike and row.result == "ok":
                    row.result = f"FAILED: other bits than Python {first.python} has in {', '.join(unlike)}"
                yield row
            shutil.rmtree(shared, ignore_errors=True)


def show(row: Row) -> str:
    """A line of the table."""
    cells = (row.python, row.torch, row.result, " ".join(row.digests.values()), row.tests, f"{row.seconds:.0f} s")
    return f"| {' | '.join(cells)} |"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="default: the newest in build/wheels for this machine")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"versions or paths; default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--tests", nargs="+", default=(), help="files of tests, run against what is installed")
    parser.add_argument("--folder", type=Path, help="where the environments are made, some gigabytes (default: TMPDIR)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "wheel-tests", help="default: build/wheel-tests")
    parser.add_argument("--keep", action="store_true", help="leave each environment until the torch's last one is done")
    options = parser.parse_args(arguments)
    missing = [path for path in options.tests if not (ROOT / path.partition("::")[0]).exists()]
    if missing:
        parser.error(f"--tests: no such file in this checkout: {', '.join(missing)}")
    return options


def newest_wheel() -> Path:
    """The wheel of this machine in build/wheels that was made last."""
    machine = os.uname().machine
    wheels = sorted(
        (ROOT / "build" / "wheels").glob(f"octet_quant-*_{machine}.whl"), key=lambda path: path.stat().st_mtime
    )
    if not wheels:
        raise SystemExit(f"build/wheels has no wheel for {machine}; `make wheels` builds it")
    return wheels[-1]


def main(arguments: Sequence[str]) -> int:
    """Try each environment; 1 where one failed, or none was tried."""
    options = parse(arguments)
    wheel = (options.wheel or newest_wheel()).resolve()
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB\n")
    print(
        f"| Python | torch | result | digests of {', '.join(STEPS)} | tests | time |\n|---|---|---|---|---|---|",
        flush=True,
    )
    rows = []
    for row in try_all(wheel, options):
        rows.append(row)
        print(show(row), flush=True)
    bad, good = (sum(one.result.startswith(word) for one in rows) for word in ("FAILED", "ok"))
    print(f"\n{good} environments ok, {bad} failed, {len(rows) - good - bad} not here")
    return int(bad > 0 or good == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

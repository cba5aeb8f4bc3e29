"""Compile kernels/csrc into the extension: `quant build`, or `python -m quant.kernels.build`.

Not torch.utils.cpp_extension: it has no flags per file, and each instruction set is a file here. The extension
registers torch operators and includes no Python header, so one build serves every Python version beside the same torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "_octet.so"

COMMON_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
# No contraction: a fused multiply-add rounds once where the reference rounds twice, so those that are meant are in
# the source. No errno and no traps: rint and the selects then vectorise. None of these changes a value.
ROW_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# What is float32 in a float model has no reference to the bit.
REAL_FLAGS = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
FILE_FLAGS = {
    "rows_portable.cpp": ROW_FLAGS,
    "rows_avx2.cpp": [*ROW_FLAGS, "-mavx2", "-mfma"],
    "rows_avx512.cpp": [*ROW_FLAGS, *AVX512],
    "elementwise_portable.cpp": ROW_FLAGS,
    "elementwise_avx2.cpp": [*ROW_FLAGS, "-mavx2"],
    "elementwise_avx512.cpp": [*ROW_FLAGS, *AVX512],
    "reals_portable.cpp": REAL_FLAGS,
    "reals_avx2.cpp": [*REAL_FLAGS, "-mavx2", "-mfma"],
    "reals_avx512.cpp": [*REAL_FLAGS, *AVX512],
    "plan_moves.cpp": ["-ffp-contract=off"],
    "native_avx2.cpp": ["-mavx2"],
    "native_avxvnni.cpp": ["-mavx2", "-mavxvnni"],
    "native_avx512vnni.cpp": [*AVX512, "-mavx512vnni"],
    "depthwise_avx2.cpp": ["-mavx2"],
    "depthwise_avxvnni.cpp": ["-mavx2", "-mavxvnni"],
    "depthwise_avx512vnni.cpp": [*AVX512, "-mavx512vnni"],
    "native_neondot.cpp": ["-march=armv8.2-a+dotprod"],
    "native_neoni8mm.cpp": ["-march=armv8.2-a+dotprod+i8mm"],
    "linear.cpp": ["-ffp-contract=off"],
    "tables.cpp": ["-ffp-contract=off"],
    "threads_torch.cpp": ["-fopenmp"],
}
ONLY = {"x86_64": "avx", "aarch64": "neon"}
"""What the names of files for one architecture contain."""
TORCH_FILES = (
    "libraries.cpp",
    "library_fbgemm.cpp",
    "ops.cpp",
    "ops_conv.cpp",
    "ops_embedding.cpp",
    "ops_fake_quantize.cpp",
    "ops_histogram.cpp",
    "ops_plan.cpp",
    "ops_rnn.cpp",
    "packed.cpp",
    "threads_torch.cpp",
)


STANDALONE = ("threads_openmp.cpp",)
"""What the extension has in a form of torch's."""


class BuildError(RuntimeError):
    """The extension could not be compiled; the message says what is missing or what the compiler said."""


@dataclass(frozen=True)
class Target:
    """Where and with what to compile. `torch_dir` is the torch package's own folder, which holds include/ and lib/."""

    cxx: str
    torch_dir: Path
    arch: str
    output: Path


def find_compiler() -> str | None:
    """$CXX, else g++ or clang++ on PATH, else None."""
    named = os.environ.get("CXX")
    if named:
        return shutil.which(named)
    return shutil.which("g++") or shutil.which("clang++")


def host_target(output: Path = DEFAULT_OUTPUT) -> Target:
    """This machine and the torch that is importable here."""
    import torch

    cxx = find_compiler()
    if cxx is None:
        raise BuildError("no C++ compiler: neither $CXX nor g++ nor clang++ was found (on Debian: apt install g++)")
    arch = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return Target(cxx, Path(torch.__file__).resolve().parent, arch, output)


def sources(target: Target) -> list[Path]:
    """The files to compile for this architecture."""
    foreign = [mark for arch, mark in ONLY.items() if arch != target.arch]
    found = (path for path in SOURCES.glob("*.cpp") if path.name not in STANDALONE)
    return sorted(path for path in found if not any(mark in path.stem for mark in foreign))


def fingerprint(target: Target) -> str:
    """Everything the output depends on, as two digests: of sources, flags and torch, and of the compiler."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    torch_version = (target.torch_dir / "version.py").read_text()
    digest.update(repr((COMMON_FLAGS, FILE_FLAGS, target.arch, torch_version)).encode())
    version = subprocess.run([target.cxx, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{digest.hexdigest()} {hashlib.sha256(version.encode()).hexdigest()}"


def is_current(target: Target) -> bool:
    """Whether the output was built from exactly what would be built now."""
    return target.output.exists() and _stamp(target) == fingerprint(target)


def is_foreign(target: Target) -> bool:
    """Whether the output says that it was built from other sources, or for another torch, than are here.

    By another compiler it may have been: that of the machine where a wheel was built.
    """
    stamp = _stamp(target)
    return bool(stamp) and stamp.split()[0] != fingerprint(target).split()[0]


def _stamp(target: Target) -> str:
    """The fingerprint that was written beside the output, '' where there is none."""
    stamp = target.output.with_suffix(".stamp")
    return stamp.read_text() if stamp.exists() else ""


def build(target: Target, *, jobs: int | None = None) -> Path:
    """Compile and link; the output appears only when it is whole.

    Raises:
        BuildError: the output cannot be written, or a file did not compile or link; the compiler's own words are in
            the message.
    """
    _check_writable(target.output)
    includes = [
        f"-I{target.torch_dir / 'include'}",
        f"-I{target.torch_dir / 'include/torch/csrc/api/include'}",
    ]
    with tempfile.TemporaryDirectory(prefix="octet-build-") as folder:

        def compile_one(source: Path) -> Path:
            made = Path(folder) / f"{source.stem}.o"
            flags = [*COMMON_FLAGS, *FILE_FLAGS.get(source.name, [])]
            if source.name in TORCH_FILES:
                flags += includes
            _run([target.cxx, *flags, "-c", str(source), "-o", str(made)])
            return made

        # The torch files take a minute each and the others seconds: the slow ones start first.
        ordered = sorted(sources(target), key=lambda path: path.name not in TORCH_FILES)
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, ordered))
        # Beside the output, so that the rename that publishes it is atomic.
        whole = target.output.with_name(f".{target.output.name}.{os.getpid()}")
        _run(_link_command(target, objects, whole))
        os.replace(whole, target.output)
    target.output.with_suffix(".stamp").write_text(fingerprint(target))
    return target.output


def _check_writable(output: Path) -> None:
    """Known at once rather than after a minute of compiling."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise BuildError(
            f"cannot write in {output.parent}: {error.strerror or error}; build to another place with --out FILE, "
            "and name that file in QUANT_EXTENSION"
        ) from error


def _link_command(target: Target, objects: Iterable[Path], output: Path) -> list[str]:
    # torch is loaded before the extension, so its libraries are found without an rpath.
    return [
        target.cxx,
        "-shared",
        *map(str, objects),
        f"-L{target.torch_dir / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-ltorch",
        "-fopenmp",
        "-Wl,--no-as-needed",
        "-Wl,--allow-shlib-undefined",
        "-o",
        str(output),
    ]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr.strip()[-4000:]}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="quant build", description="Compile the kernels for the torch installed here."
    )
    parser.add_argument("--cxx", help="C++ compiler (default: $CXX, g++, clang++)")
    parser.add_argument("--torch-dir", type=Path, help="folder of the torch package to compile against")
    parser.add_argument("--arch", help="x86_64 or aarch64 (default: this machine's)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help="the shared object to write")
    parser.add_argument("--force", action="store_true", help="compile even where nothing has changed")
    options = parser.parse_args(arguments)
    try:
        if options.cxx and options.torch_dir and options.arch:
            target = Target(options.cxx, options.torch_dir, options.arch, options.out)
        else:
            host = host_target(options.out)
            target = Target(
                options.cxx or host.cxx, options.torch_dir or host.torch_dir, options.arch or host.arch, options.out
            )
        if not options.force and is_current(target):
            print(f"kernels are up to date: {target.output}")
            return 0
        print(f"compiling {len(sources(target))} files for {target.arch} with {target.cxx} (about a minute) ...")
        print(f"built {build(target)}")
    except BuildError as error:
        print(f"quant build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

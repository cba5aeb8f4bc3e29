"""Compile kernels/csrc into the extension: `quant build`, or `python -m quant.kernels.build`.

The core alone, without torch, becomes a static library: `make core`. Not torch.utils.cpp_extension: it has no flags per
file, and each instruction set is a file here. The extension registers torch operators and includes no Python header, so
one build serves every Python version beside the same torch.

It is one file that imports nothing of its package: setup.py and make load it by its path, before the package is there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "_octet.so"

TABLE = SOURCES / "core" / "cpu" / "instruction_sets.inc"

COMMON_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
# No contraction: a fused multiply-add rounds once where the reference rounds twice, so those that are meant are in
# the source. No errno and no traps: rint and the selects then vectorise. None of these changes a value.
EXACT_FLAGS = ["-ffp-contract=off"]
ROW_FLAGS = [*EXACT_FLAGS, "-fno-math-errno", "-fno-trapping-math"]
# GCC 12 finds an uninitialised value in each of its own intrinsics for AVX-512, 3,000 times (its bug 105593), and notes
# that wide vectors are passed in another way without AVX-512, which functions of one file alone do not mind.
QUIET_FLAGS = ["-Wno-uninitialized", "-Wno-psabi"]
# A kernel missing from a table would be a null pointer.
TABLE_FLAGS = ["-Werror=missing-field-initializers"]
FAMILY_FLAGS = {
    "gemm": [*TABLE_FLAGS, *EXACT_FLAGS],
    "narrow": [*TABLE_FLAGS, *EXACT_FLAGS],
    "depthwise": [*TABLE_FLAGS, *EXACT_FLAGS],
    "winograd": [*TABLE_FLAGS, *EXACT_FLAGS],
    "rows": [*TABLE_FLAGS, *ROW_FLAGS],
    "elementwise": [*TABLE_FLAGS, *ROW_FLAGS],
    # What is float32 in a float model has no reference to the bit.
    "reals": [*TABLE_FLAGS, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"],
}
"""Family -> flags of `<family>_<instruction set>.cpp`, which come before those of the instruction set."""
FILE_FLAGS = {
    "linear.cpp": EXACT_FLAGS,
    "narrow_gemm.cpp": EXACT_FLAGS,
    "tables.cpp": EXACT_FLAGS,
    "moving_range.cpp": ROW_FLAGS,
    "rounded_weight.cpp": ROW_FLAGS,
    "lower_resize.cpp": EXACT_FLAGS,
    "threads_openmp.cpp": ["-fopenmp"],
    "torch_threads.cpp": ["-fopenmp"],
}
"""File name -> flags; so no two files of different folders have the same name."""
STANDALONE = "threads_openmp.cpp"
"""The file of the core whose functions torch provides in the extension."""


@dataclass(frozen=True)
class InstructionSet:
    """A row of csrc/core/cpu/instruction_sets.inc.

    Attributes:
        name: its name in QUANT_ISA.
        arch: the architecture that has it; '' for all.
        by_request: whether it is used only where QUANT_ISA asks for it.
        needs: the CPU features that it needs, by Linux's names.
        flags: compiler flags of its files.
        kernels: family -> the name of its table, '' where it has none.
    """

    name: str
    arch: str
    by_request: bool
    needs: frozenset[str]
    flags: tuple[str, ...]
    kernels: dict[str, str]


class BuildError(RuntimeError):
    """The extension could not be compiled; the message names what is missing, or quotes the compiler."""


@dataclass(frozen=True)
class Target:
    """Compiler, torch, architecture and output of a build; `torch_dir` is the folder of the torch package."""

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


def host_arch() -> str:
    """This machine's architecture, by its name in `--arch`."""
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def host_target(output: Path = DEFAULT_OUTPUT) -> Target:
    """This machine and the torch that is importable here."""
    return Target(require_compiler(), torch_folder(), host_arch(), output)


def torch_folder() -> Path:
    """Of the torch that is importable here."""
    import torch

    return Path(torch.__file__).resolve().parent


def require_compiler() -> str:
    """`find_compiler`, or a BuildError that says what to install."""
    cxx = find_compiler()
    if cxx is None:
        raise BuildError("no C++ compiler: neither $CXX nor g++ nor clang++ was found (on Debian: apt install g++)")
    return cxx


def compiler_environment() -> dict[str, str]:
    """This process's environment, in which Debian's Emscripten works too: a program in Python and JavaScript."""
    # It imports what lies beside it.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    # Where Debian keeps the modules it requires, and where a node from elsewhere does not look.
    kept["NODE_PATH"] = os.pathsep.join(filter(None, [kept.get("NODE_PATH"), "/usr/share/nodejs"]))
    return kept


@functools.cache
def all_instruction_sets() -> tuple[InstructionSet, ...]:
    """The rows of the table for every architecture, in its order."""
    arch, sets = "", []
    pattern = re.compile(r"^#[^\n]*|^OCTET_INSTRUCTION_SET\((.*?)\)$", re.MULTILINE | re.DOTALL)
    for line in pattern.finditer(TABLE.read_text()):
        if line[1] is None:  # a line of the preprocessor, which begins or ends what exists on one architecture
            marked = re.search(r"if defined\(__(\w+)__\)", line[0])
            arch = marked[1] if marked else ""
        else:
            sets.append(_parse_row(arch, line[1]))
    return tuple(sets)


def _parse_row(arch: str, row: str) -> InstructionSet:
    _, name, chosen, needs, flags, *_ = (" ".join(part.split()).strip('"') for part in row.split(","))
    return InstructionSet(
        name=name,
        arch=arch,
        by_request=chosen == "by_request",
        needs=frozenset(needs.split(" | ")) - {"any_cpu"},
        flags=tuple(flags.split()),
        kernels={family: table.replace("none", "") for family, table in re.findall(r"\.(\w+) = &?(\w+)", row)},
    )


def instruction_sets(arch: str) -> list[InstructionSet]:
    """Those of one architecture, the slowest first."""
    return [one for one in all_instruction_sets() if one.arch in ("", arch)]


def set_of(source: Path) -> tuple[str, InstructionSet] | None:
    """Family and instruction set of a file `<family>_<instruction set>.cpp`, None for any other."""
    family, _, name = source.stem.partition("_")
    sets = [one for one in all_instruction_sets() if one.name.replace("-", "_") == name]
    return (family, sets[0]) if family in FAMILY_FLAGS and sets else None


def sources(target: Target) -> list[Path]:
    """The files of the extension for this architecture: the core's, and torch's binding."""
    return [path for path in _sources_in(SOURCES, target.arch) if path.name != STANDALONE]


def binding_sources(arch: str) -> list[Path]:
    """The files that include torch's headers."""
    return _sources_in(SOURCES / "torch", arch)


def core_sources(arch: str) -> list[Path]:
    """The files of the core alone, which include no header of torch or Python."""
    return _sources_in(SOURCES / "core", arch)


def _sources_in(folder: Path, arch: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*.cpp") if _exists_on(arch, path))


def _exists_on(arch: str, source: Path) -> bool:
    of_set = set_of(source)
    return of_set is None or of_set[1] in instruction_sets(arch)


def flags_of(source: Path, torch_dir: Path | None = None) -> list[str]:
    """The compiler flags of a file; files of the binding need `torch_dir`."""
    # Quoted includes only: a folder named torch must not stand before torch's own headers.
    of_set = set_of(source)
    if of_set is None:
        own = FILE_FLAGS.get(source.name, [])
    else:
        own = [*FAMILY_FLAGS[of_set[0]], *of_set[1].flags, *QUIET_FLAGS]
    flags = [*COMMON_FLAGS, *own, "-iquote", str(SOURCES)]
    if not _is_core(source) and torch_dir:
        flags += [f"-I{torch_dir / 'include'}", f"-I{torch_dir / 'include/torch/csrc/api/include'}"]
    return flags


def _is_core(source: Path) -> bool:
    return (SOURCES / "core") in source.parents


def fingerprint(target: Target) -> str:
    """Two digests of everything that the output depends on: of sources, flags and torch, and of the compiler."""
    torch_version = (target.torch_dir / "version.py").read_text()
    return _digests(SOURCES, (COMMON_FLAGS, FAMILY_FLAGS, FILE_FLAGS, target.arch, torch_version), target.cxx)


def core_fingerprint(cxx: str, arch: str) -> str:
    """The fingerprint of the core's static library."""
    return _digests(SOURCES / "core", (COMMON_FLAGS, FAMILY_FLAGS, FILE_FLAGS, arch), cxx)


def _digests(folder: Path, settings: tuple[object, ...], cxx: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in {".cpp", ".h", ".inc"}):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    digest.update(repr(settings).encode())
    asked = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True, env=compiler_environment())
    version = asked.stdout
    return f"{digest.hexdigest()} {hashlib.sha256(version.encode()).hexdigest()}"


def is_current(target: Target) -> bool:
    """Whether the output was built from exactly what would be built now."""
    return target.output.exists() and _stamp(target) == fingerprint(target)


def core_is_current(cxx: str, arch: str, output: Path) -> bool:
    """Whether the core's static library at `output` is what would be built now."""
    stamp = output.with_suffix(".stamp")
    return output.exists() and stamp.exists() and stamp.read_text() == core_fingerprint(cxx, arch)


def is_foreign(target: Target) -> bool:
    """Whether the output was built from other sources, or for another torch, than those installed here.

    The compiler may differ: wheels are built on another machine.
    """
    stamp = _stamp(target)
    return bool(stamp) and stamp.split()[0] != fingerprint(target).split()[0]


def _stamp(target: Target) -> str:
    """The fingerprint that was written beside the output, '' where there is none."""
    stamp = target.output.with_suffix(".stamp")
    return stamp.read_text() if stamp.exists() else ""


def build(target: Target, *, core: Path | None = None, jobs: int | None = None) -> Path:
    """Compile and link; the output appears only when it is whole.

    Args:
        target: what to build, and by which compiler.
        core: where to write the core's static library too, which needs one more short file; None for not at all. Where
            a current one lies there, only torch's binding is compiled.
        jobs: number of compilers to run at once.

    Raises:
        BuildError: the output cannot be written, or a file did not compile or link; the message quotes the compiler.
    """
    stamp = fingerprint(target)  # before: a file that is edited meanwhile may or may not be in what is compiled
    [output] = build_each([target], core=core, jobs=jobs)
    output.with_suffix(".stamp").write_text(stamp)
    return output


def build_each(
    targets: Sequence[Target],
    *,
    core: Path | None = None,
    jobs: int | None = None,
    flags: Sequence[str] = (),
    objects_in: Path | None = None,
) -> list[Path]:
    """`build` for several torches, by one compiler and for one architecture: the core is compiled once. No stamps.

    Args:
        targets: what to build.
        core: as in `build`; its objects are taken where it is current and no `flags` are given.
        jobs: as in `build`.
        flags: compiler flags of every file, after its own, and of linking.
        objects_in: a folder that keeps the objects, beside which `--coverage` writes; None for one that is removed.

    Raises:
        BuildError: as `build`.
    """
    cxx, arch = targets[0].cxx, targets[0].arch
    for target in targets:
        _check_writable(target.output)
    core_stamp = core_fingerprint(cxx, arch)
    reused = core is not None and not flags and core_is_current(cxx, arch, core)
    with contextlib.ExitStack() as stack:
        folder = objects_in or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octet-build-")))
        of_torch = [_binding_units(target, folder / str(index), jobs) for index, target in enumerate(targets)]
        of_core = [_unit(path, folder / "core") for path in core_sources(arch) if core or path.name != STANDALONE]
        if core is not None and reused:
            of_core, objects = [], _unpacked(core, folder / "core")
        else:
            objects = [unit.output for unit in of_core]
        _compile(cxx, [*(unit for units in of_torch for unit in units), *of_core], jobs, flags)
        if core is not None and not reused:
            _archive(objects, core, core_stamp)
        shared = [one for one in objects if one.stem != Path(STANDALONE).stem]
        for target, own in zip(targets, of_torch, strict=True):
            # Beside the output, so that the rename that publishes it is atomic.
            whole = target.output.with_name(f".{target.output.name}.{os.getpid()}")
            _run([*_link_command(target, [*(unit.output for unit in own), *shared], whole), *flags])
            os.replace(whole, target.output)
    return [target.output for target in targets]


def build_core(cxx: str, arch: str, output: Path, *, jobs: int | None = None) -> Path:
    """The core as a static library, for programs without torch: link with it, and with -fopenmp.

    Raises:
        BuildError: as `build`.
    """
    _check_writable(output)
    stamp = core_fingerprint(cxx, arch)
    with tempfile.TemporaryDirectory(prefix="octet-core-") as folder:
        units = [_unit(path, Path(folder)) for path in core_sources(arch)]
        _compile(cxx, units, jobs)
        _archive([unit.output for unit in units], output, stamp)
    return output


@dataclass(frozen=True)
class _Unit:
    """Files that are compiled as one, with the flags that each of them has, and the object that comes of them."""

    files: tuple[Path, ...]
    flags: tuple[str, ...]
    output: Path


def _unit(source: Path, folder: Path) -> _Unit:
    return _Unit((source,), tuple(flags_of(source)), folder / f"{source.stem}.o")


def _binding_units(target: Target, folder: Path, jobs: int | None) -> list[_Unit]:
    """The binding in as many units as are compiled at once: reading torch's headers is most of the time of a file."""
    by_flags: dict[tuple[str, ...], list[Path]] = {}
    for source in sorted(binding_sources(target.arch), key=lambda path: path.stat().st_size, reverse=True):
        by_flags.setdefault(tuple(flags_of(source, target.torch_dir)), []).append(source)
    count = jobs or os.cpu_count() or 1
    units = [(flags, files[first::count]) for flags, files in by_flags.items() for first in range(count)]
    return [_Unit(tuple(files), flags, folder / f"{files[0].stem}.o") for flags, files in units if files]


def _compile(cxx: str, units: Iterable[_Unit], jobs: int | None, flags: Sequence[str] = ()) -> None:
    """Write the object of each unit."""

    def compile_one(unit: _Unit) -> None:
        unit.output.parent.mkdir(parents=True, exist_ok=True)
        before = [word for path in unit.files[:-1] for word in ("-include", str(path))]
        _run([cxx, *unit.flags, *flags, *before, "-c", str(unit.files[-1]), "-o", str(unit.output)])

    # Those that take longest start first: torch's headers, then products.
    slow = ("gemm_", "narrow_", "depthwise_")
    order = sorted(units, key=lambda unit: (_is_core(unit.files[0]), not unit.files[0].name.startswith(slow)))
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, order))


def _archiver() -> str:
    archiver = shutil.which(os.environ.get("AR", "ar"))
    if archiver is None:
        raise BuildError("no archiver: neither $AR nor ar was found (on Debian: apt install binutils)")
    return archiver


def _unpacked(archive: Path, folder: Path) -> list[Path]:
    """The objects of a static library, in a new folder."""
    folder.mkdir(parents=True)
    _run([_archiver(), "x", str(archive.resolve())], folder)
    return sorted(folder.glob("*.o"))


def _archive(objects: Iterable[Path], output: Path, stamp: str) -> None:
    archiver = _archiver()
    output.parent.mkdir(parents=True, exist_ok=True)
    whole = output.with_name(f".{output.name}.{os.getpid()}")
    _run([archiver, "rcs", str(whole), *map(str, objects)])
    os.replace(whole, output)
    output.with_suffix(".stamp").write_text(stamp)


def _check_writable(output: Path) -> None:
    """Check that the output can be written before a minute of compiling."""
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


def _run(command: list[str], folder: Path | None = None) -> None:
    environment = compiler_environment()
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr.strip()[-4000:]}")


def _main_core(options: argparse.Namespace, cxx: str, arch: str) -> int:
    if not options.force and core_is_current(cxx, arch, options.core):
        return _done(options, f"the core is up to date: {options.core}", options.core, built=False)
    _say(options, f"compiling {len(core_sources(arch))} files of the core for {arch} with {cxx} ...")
    output = build_core(cxx, arch, options.core)
    return _done(options, f"built {output}", output, built=True)


def _say(options: argparse.Namespace, words: str) -> None:
    if not options.json:
        print(words)


def _done(options: argparse.Namespace, words: str, output: Path, *, built: bool) -> int:
    """Say what is there now; returns the exit status."""
    print(json.dumps({"file": str(output), "built": built}) if options.json else words)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The arguments of `quant build`."""
    parser = argparse.ArgumentParser(
        prog="quant build", description="Compile the kernels for the torch installed here."
    )
    parser.add_argument("--cxx", help="C++ compiler (default: $CXX, g++, clang++)")
    parser.add_argument("--torch-dir", type=Path, help="folder of the torch package to compile against")
    parser.add_argument("--arch", help="x86_64 or aarch64 (default: this machine's)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, help="the shared object to write")
    parser.add_argument("--core", type=Path, metavar="FILE", help="write the core's static library too")
    parser.add_argument("--core-only", action="store_true", help="--core and no extension; needs no torch")
    parser.add_argument("--force", action="store_true", help="compile even where nothing has changed")
    parser.add_argument("--json", action="store_true", help="print the file and whether it was compiled now, as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.core_only and options.core is None:
        parser.error("--core-only needs --core FILE")
    try:
        if options.core_only:
            return _main_core(options, options.cxx or require_compiler(), options.arch or host_arch())
        torch_dir = options.torch_dir or torch_folder()
        target = Target(options.cxx or require_compiler(), torch_dir, options.arch or host_arch(), options.out)
        has_core = options.core is None or core_is_current(target.cxx, target.arch, options.core)
        if not options.force and is_current(target) and has_core:
            return _done(options, f"kernels are up to date: {target.output}", target.output, built=False)
        _say(
            options, f"compiling {len(sources(target))} files for {target.arch} with {target.cxx} (about a minute) ..."
        )
        if options.force and options.core:
            options.core.with_suffix(".stamp").unlink(missing_ok=True)
        output = build(target, core=options.core)
    except BuildError as error:
        print(f"quant build: {error}", file=sys.stderr)
        return 1
    return _done(options, f"built {output}", output, built=True)


if __name__ == "__main__":
    sys.exit(main())

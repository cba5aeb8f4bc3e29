"""Compile the runner: `make runner`, or `python kernels/runner/build.py --help`.

It needs neither torch nor this package. The core's sources are compiled once more, for size: -O3 makes the
kernels faster that the compiler vectorises, and the others only larger.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent

if TYPE_CHECKING:
    from quant.kernels import build as kernels_build
else:  # by its path: its package may not be installed
    sys.path.insert(0, str(HERE.parent))
    import build as kernels_build

LIBRARY = ("artefact.cpp", "crc32.cpp", "file_bytes.cpp", "json.cpp", "model.cpp", "octet.cpp", "thread_limit.cpp")
PROGRAM = ("npy.cpp", "octet_run.cpp")

WASM = "wasm32"
"""The architecture of WebAssembly, for em++."""
OF_ARCH = {WASM: ["-fwasm-exceptions", "-msimd128"]}
"""Architecture -> flags for compiling and linking, where it needs some."""

THREADS = {"openmp": ["-fopenmp"], "pool": ["-DOCTET_POOL", "-pthread"], "none": []}
"""Kind of threads -> flags for compiling and linking."""

SECTIONS = ["-ffunction-sections", "-fdata-sections"]
LEAN = ["-fno-rtti"]
"""Without the names of types, which each lambda in a std::function would bring."""
OWN_FLAGS = ["-std=c++20", "-Os", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *SECTIONS, *LEAN]
FAST = {"crc32.cpp": "-O2", "packed_gemm.cpp": "-O3", "conv_gather.cpp": "-O3", "builder.cpp": "-O2"}
"""Files that go over all weights when a model is opened, the one that gathers the patches of convolutions, where -O2
takes 3 % of a U-Net's call, and the one that copies between layouts, where -Os takes 5 % of it."""
LEFT_OUT = ("threads_openmp.cpp", "gemm_amx_emulated.cpp")
"""Files of the core that the runner has not: it brings its own threads, and emulated tiles are for tests. Nor has it
those of narrow weights, because weights of its files are bytes."""
WITHOUT_NARROW = dict.fromkeys(("instruction_sets.cpp", "linear.cpp", "rnn.cpp"), "-DOCTET_WITHOUT_NARROW")
"""Leaves narrow weights out of the layers that may have them, and of the table of kernels."""
INFERENCE_ALONE = "-DOCTET_INFERENCE_ALONE"
"""Leaves out of the tables of rows what calibration and training call."""
WITHOUT_EMULATION = "-DkAmxEmulatedGemm=kPortableGemm"
"""Where the table names the products over emulated tiles, it has the portable ones, which give the same sums."""


@dataclass(frozen=True)
class Settings:
    """How the runner is built.

    Attributes:
        cxx: the compiler; arch: what it compiles for.
        out: the folder for liboctet.so, liboctet.a, octet.h and octet-run. For WebAssembly there is no liboctet.so, and
            octet-run is octet-run.js and octet-run.wasm.
        threads: a key of THREADS.
        flags: further ones for all files and for linking, as for a sanitizer.
        is_static: whether octet-run has the C and C++ libraries inside.
        core: a static library of the core to link with, where its sources are not to be compiled again.
        selection: what is left in; None for everything.
    """

    cxx: str
    arch: str
    out: Path
    threads: str = "openmp"
    flags: tuple[str, ...] = ()
    is_static: bool = False
    core: Path | None = None
    selection: Selection | None = None


SELECTING = ("instruction_sets.cpp", "isa.cpp", "lower.cpp")
"""Files of the core that read csrc/core/cpu/selection.h: what they do not name is not linked."""


class BadFile(ValueError):
    """A file that the runner is to be built for cannot be read, or has no part for the runner."""


@dataclass(frozen=True)
class Selection:
    """What a runner for some models has.

    Attributes:
        operations: of plans, sorted.
        instruction_sets: besides the portable one; empty for all.
    """

    operations: tuple[str, ...]
    instruction_sets: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """For the files of SELECTING."""
        words = {"OCTET_OPERATIONS": self.operations, "OCTET_INSTRUCTION_SETS": self.instruction_sets}
        return [f'-D{name}="{" ".join(listed)}"' for name, listed in words.items() if listed]


def operations_of(path: Path) -> set[str]:
    """The operations in the plan of a file of `quant.save(..., runner=True)`.

    Raises:
        BadFile: it is no such file.
    """
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        plan = json.loads(header["__metadata__"]["octet_runner"])["plan"]
        operations = {line.split(" ")[2] for line in plan.split("\n")[2:-1]}
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError) as error:
        raise BadFile(f"{path} has no part for the runner: write it by quant.save(model, path, runner=True)") from error
    # The compiler reads them, in the quotes of a macro: what a file names must not end these.
    if wrong := sorted(name for name in operations if not re.fullmatch("[a-z0-9_]+", name)):
        raise BadFile(f"{path}: {wrong[0]!r} is no operation of a plan; the file was altered or damaged")
    return operations


def selection_of(files: Iterable[Path], sets: str | None, arch: str) -> Selection:
    """What runs some files, on some instruction sets.

    Args:
        files: of `quant.save(..., runner=True)`.
        sets: names with commas between; None for all.

    Raises:
        BadFile: a file is none of the runner's, or there is no such instruction set.
    """
    names = tuple(sets.split(",")) if sets else ()
    known = [one.name for one in kernels_build.instruction_sets(arch)]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise BadFile(f"--isa: there is no {', '.join(unknown)} for {arch}, expected some of {', '.join(known)}")
    operations = sorted(set().union(*map(operations_of, files)))
    return Selection(tuple(operations), tuple(sorted(names)))


def core_sources(arch: str) -> list[Path]:
    """The files of the core that are compiled."""
    sources = kernels_build.core_sources(arch)
    return [path for path in sources if path.name not in LEFT_OUT and not path.name.startswith("narrow_")]


def flags_of(source: Path, threads: str, arch: str) -> list[str]:
    """The compiler flags of a file of the core or of the runner."""
    include = ["-iquote", str(HERE), "-iquote", str(kernels_build.SOURCES)]
    if source.parent == HERE:
        fast = [FAST[source.name]] if source.name in FAST else []
        return [*OWN_FLAGS, *fast, *THREADS[threads], *OF_ARCH.get(arch, []), *include]
    flags = [*kernels_build.flags_of(source), *OF_ARCH.get(arch, [])]
    family = source.parent.name if kernels_build.set_of(source) is None else source.stem.partition("_")[0]
    # Portable kernels are the fallback on x86-64, and those of NEON on aarch64.
    if arch == "x86_64" and source.stem.endswith("_portable"):
        family = "gemm"
    of_family = {"gemm": "-O2", "plan": "-Os"}.get(family, "-O3" if kernels_build.set_of(source) else "-O2")
    optimised = FAST.get(source.name, of_family)
    flags[flags.index("-O3")] = optimised
    flags += [*LEAN, *([] if optimised == "-O3" else SECTIONS)]
    flags += [INFERENCE_ALONE] if source.stem.startswith("rows_") else []
    flags += [WITHOUT_NARROW[source.name]] if source.name in WITHOUT_NARROW else []
    return [*flags, WITHOUT_EMULATION] if source.name == "instruction_sets.cpp" else flags


def build(settings: Settings, jobs: int | None = None) -> Path:
    """Compile and link; returns the path of octet-run, or of octet-run.js.

    Raises:
        kernels_build.BuildError: something did not compile or link; the message quotes the compiler.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    stamp = fingerprint(settings)
    core = core_sources(settings.arch) if settings.core is None else []
    own, program = [HERE / name for name in LIBRARY], [HERE / name for name in PROGRAM]
    objects = _compile_all(settings, [*core, *own, *program], jobs)
    library = [*(objects[path] for path in (*core, *own)), *([settings.core] if settings.core else [])]
    library = link(settings, library, [objects[path] for path in program], jobs)
    if settings.core is None:
        _archive(library, settings.out / "liboctet.a", "emar" if settings.arch == WASM else "ar")
    (settings.out / "octet.h").write_bytes((HERE / "octet.h").read_bytes())
    _stamp(settings.out).write_text(stamp)
    return settings.out / _program(settings)


def _program(settings: Settings) -> str:
    return "octet-run.js" if settings.arch == WASM else "octet-run"


def _selected(settings: Settings, library: list[Path], jobs: int | None) -> list[Path]:
    """The objects of a library with less in it, and the size of the whole one in a file beside them."""
    _link(settings, library, WHOLE, ["-shared", f"-Wl,--version-script={HERE / 'exports.map'}"])
    assert settings.selection is not None
    folder, flags = settings.out / "selected", (*settings.flags, *settings.selection.flags)
    folder.mkdir(exist_ok=True)
    sources = [path for path in core_sources(settings.arch) if path.name in SELECTING]
    selected = _compile_all(replace(settings, out=folder, flags=flags), sources, jobs)
    others = {f"{path.stem}.o" for path in sources}
    return [*(path for path in library if path.name not in others), *selected.values()]


WHOLE = "liboctet-whole.so"
"""What a selection is smaller than."""


def link(settings: Settings, library: list[Path], program: list[Path], jobs: int | None = None) -> list[Path]:
    """Link liboctet.so and octet-run; for WebAssembly octet-run alone.

    Args:
        library: objects of the library; program: those of octet-run alone.

    Returns:
        the objects that are in the library, of a selection others than those given.
    """
    if settings.arch == WASM:
        _link_wasm(settings, [*program, *library])
        return library
    if settings.selection is not None:
        library = _selected(settings, library, jobs)
    _link(settings, library, "liboctet.so", ["-shared", f"-Wl,--version-script={HERE / 'exports.map'}"])
    _link(settings, [*program, *library], "octet-run", ["-static"] if settings.is_static else [])
    return library


def is_current(settings: Settings) -> bool:
    """Whether the folder holds what would be built now."""
    stamp = _stamp(settings.out)
    return stamp.exists() and stamp.read_text() == fingerprint(settings)


def fingerprint(settings: Settings) -> str:
    """A digest of everything that the output depends on."""
    digest = hashlib.sha256(kernels_build.core_fingerprint(settings.cxx, settings.arch).encode())
    for path in sorted(HERE.iterdir()):
        if path.suffix in {".cpp", ".h", ".py", ".map"}:
            digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((settings.threads, settings.flags, settings.is_static, settings.selection)).encode())
    return digest.hexdigest()


def _stamp(out: Path) -> Path:
    return out / "octet-run.stamp"


def _compile_all(settings: Settings, sources: list[Path], jobs: int | None) -> dict[Path, Path]:
    """The object of each file."""
    folder = settings.out / "objects"
    folder.mkdir(exist_ok=True)

    def compile_one(source: Path) -> Path:
        compiled = folder / f"{source.stem}.o"
        flags = [*flags_of(source, settings.threads, settings.arch), *settings.flags]
        _run([settings.cxx, *flags, "-c", str(source), "-o", str(compiled)])
        return compiled

    # Products take a minute each and the others seconds: the slow ones start first.
    order = sorted(sources, key=lambda path: not path.name.startswith("gemm"))
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        return dict(zip(order, pool.map(compile_one, order), strict=True))


def _link(settings: Settings, parts: Iterable[Path], name: str, kind: list[str]) -> None:
    stripped = [] if settings.flags else ["-s"]
    flags = [*kind, *THREADS[settings.threads], *settings.flags, "-Wl,--gc-sections,-z,noseparate-code", *stripped]
    whole = settings.out / f".{name}.{os.getpid()}"
    _run([settings.cxx, *map(str, parts), *flags, "-o", str(whole)])
    os.replace(whole, settings.out / name)


def _link_wasm(settings: Settings, parts: Iterable[Path]) -> None:
    # Two files, of which the first names the second. Files are those of the machine, as node sees them.
    flags = [*OF_ARCH[WASM], *settings.flags, "-O2", "-sNODERAWFS=1", "-sENVIRONMENT=node", "-sALLOW_MEMORY_GROWTH=1"]
    with tempfile.TemporaryDirectory(dir=settings.out) as folder:
        _run([settings.cxx, *map(str, parts), *flags, "-o", f"{folder}/octet-run.js"])
        for name in ("octet-run.wasm", "octet-run.js"):
            os.replace(Path(folder, name), settings.out / name)


def _archive(objects: Iterable[Path], output: Path, archiver: str = "ar") -> None:
    whole = output.with_name(f".{output.name}.{os.getpid()}")
    _run([os.environ.get("AR", archiver), "rcs", str(whole), *map(str, objects)])
    os.replace(whole, output)


def _run(command: list[str]) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=kernels_build.compiler_environment()
    )
    if result.returncode:
        raise kernels_build.BuildError(f"{' '.join(command)}\n{result.stderr.strip()[-4000:]}")


UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined")
"""Ends a process that does what C++ does not define; `vptr` needs the names of types, which LEAN leaves out."""

FUZZING = ("-fsanitize=address", "-fno-omit-frame-pointer", "-O1", "-DFUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION")

SANITIZERS = {
    "address": ("-fsanitize=address", *UNDEFINED, "-O1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"),
    "thread": ("-fsanitize=thread", "-O1", "-g1"),
    "none": (),
}
"""What `build_stress` may be under -> flags."""


def build_fuzz(settings: Settings, jobs: int | None = None, names: tuple[str, ...] = ("fuzz",)) -> list[Path]:
    """The programs of fuzz.cpp and fuzz_calls.cpp, with the core under the sanitizer too where `settings` brings none.

    Returns:
        the path of each of `names`.

    Raises:
        kernels_build.BuildError: as `build`.
    """
    return _build_programs(names, replace(settings, flags=(*FUZZING, *settings.flags)), jobs)


def build_stress(settings: Settings, sanitizer: str, jobs: int | None = None) -> Path:
    """The program of stress.cpp under a key of SANITIZERS, as `build_fuzz`.

    ThreadSanitizer does not see OpenMP's locks, and finds races where none are: the settings' threads are the pool.
    """
    [program] = _build_programs(("stress",), replace(settings, flags=(*SANITIZERS[sanitizer], *settings.flags)), jobs)
    return program


def _build_programs(names: tuple[str, ...], settings: Settings, jobs: int | None) -> list[Path]:
    """The programs of some sources and the library, all of it compiled with the settings' flags."""
    settings.out.mkdir(parents=True, exist_ok=True)
    programs, stamp = [settings.out / name for name in names], settings.out / f"{'-'.join(names)}.stamp"
    wanted = fingerprint(settings)
    if all(one.exists() for one in programs) and stamp.exists() and stamp.read_text() == wanted:
        return programs
    core = core_sources(settings.arch) if settings.core is None else []
    sources = [HERE / f"{name}.cpp" for name in names]
    objects = _compile_all(settings, [*core, *(HERE / one for one in LIBRARY), *sources], jobs)
    own = [objects.pop(source) for source in sources]
    for name, compiled in zip(names, own, strict=True):
        _link(settings, [compiled, *objects.values(), *([settings.core] if settings.core else [])], name, [])
    stamp.write_text(wanted)
    return programs


def list_flags(arch: str, threads: str) -> str:
    """For CMake: a line for each file of the library, its path and its flags with semicolons between."""
    files = [*core_sources(arch), *(HERE / name for name in LIBRARY)]
    return "\n".join(";".join([str(path), *flags_of(path, threads, arch)]) for path in files)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make runner", description="Compile liboctet and octet-run, without torch.")
    parser.add_argument("--cxx", help="C++ compiler (default: $CXX, g++, clang++)")
    parser.add_argument("--arch", help="x86_64, aarch64, or wasm32 with --cxx em++ (default: this machine's)")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the library and the program")
    parser.add_argument("--threads", choices=THREADS, default="openmp", help="what shares work among threads")
    parser.add_argument("--static", action="store_true", help="octet-run with the C and C++ libraries inside")
    parser.add_argument(
        "--for",
        type=Path,
        action="append",
        default=[],
        dest="files",
        metavar="FILE",
        help="leave out the operations that this model has not; may be repeated",
    )
    parser.add_argument(
        "--isa",
        metavar="NAMES",
        help="with --for: the instruction sets besides the portable one (default: all), as avx2,amx",
    )
    parser.add_argument("--fuzz", action="store_true", help="the program of fuzz.cpp instead, under AddressSanitizer")
    parser.add_argument(
        "--list-flags", action="store_true", help="print files and flags for CMake, and compile nothing"
    )
    options = parser.parse_args(arguments)
    arch = options.arch or kernels_build.host_arch()
    if options.list_flags:
        print(list_flags(arch, options.threads))
        return 0
    try:
        cxx = options.cxx or kernels_build.require_compiler()
        selection = selection_of(options.files, options.isa, arch) if options.files else None
        if options.isa and selection is None:
            raise BadFile("--isa goes with --for FILE")
        if arch == WASM and (selection is not None or options.threads != "none"):
            raise BadFile("--arch wasm32 goes with --threads none, and without --for")
        settings = Settings(cxx, arch, options.out, options.threads, is_static=options.static, selection=selection)
        if options.fuzz:
            print(f"built {build_fuzz(settings)[0]}")
            return 0
        if is_current(settings):
            print(f"the runner is up to date: {options.out / _program(settings)}")
            return 0
        print(
            f"compiling {len(core_sources(arch)) + len(LIBRARY + PROGRAM)} files for {arch} with {cxx} (a minute) ..."
        )
        build(settings)
    except (kernels_build.BuildError, BadFile) as error:
        print(f"make runner: {error}", file=sys.stderr)
        return 1
    for name in ("octet-run.js", "octet-run.wasm") if arch == WASM else ("octet-run", "liboctet.so"):
        print(f"built {options.out / name}: {_megabytes(options.out / name)}")
    if selection is not None:
        whole, here = (options.out / WHOLE).stat().st_size, (options.out / "liboctet.so").stat().st_size
        (options.out / WHOLE).unlink()
        print(
            f"for {len(selection.operations)} operations on {', '.join(selection.instruction_sets) or 'all sets'}: "
            f"{whole - here} bytes less than the {whole} with everything"
        )
    return 0


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())

"""The table of instruction sets: what it refuses, and that a new set is a row and the files of its kernels."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quant.kernels import build, reference_plan

from .test_core import (
    IMAGES,
    RUN_PLAN,
    TOKENS,
    generator,
    image_constants,
    in_memory,
    link,
    run,
    run_and_say,
    token_constants,
)

COUNTED = Path(__file__).with_name("counted_kernels.h")
FAMILIES = {
    "gemm": "run_u8",
    "narrow": "run",
    "depthwise": "row",
    "winograd": "run",
    "rows": "quantize",
    "elementwise": "add",
    "reals": "layer_norm",
}
"""The families, each with the kernel of it whose calls are counted."""

x86 = pytest.mark.skipif(build.host_arch() != "x86_64", reason="the rows are of x86-64")


def with_row(folder: Path, row: str) -> Path:
    """A copy of `kernels/` whose table has one row more, after that of AVX2."""
    shutil.copytree(build.SOURCES, folder / "csrc")
    shutil.copy(build.__file__, folder)
    table = folder / build.TABLE.relative_to(build.SOURCES.parent)
    before, after = table.read_text().split("OCTET_INSTRUCTION_SET(AvxVnni,")
    table.write_text(f"{before}{row}\nOCTET_INSTRUCTION_SET(AvxVnni,{after}")
    return folder


def row_of_avx2() -> str:
    """The row of AVX2 as that of a set "added", which is chosen by request; one route for all weights."""
    [row] = re.findall(r"^OCTET_INSTRUCTION_SET\(Avx2,.*?\)\n", build.TABLE.read_text(), re.MULTILINE | re.DOTALL)
    row = row.replace('(Avx2, "avx2", by_cpu', '(Added, "added", by_request').replace("kAvx2", "kAdded")
    return re.sub(r"(\.gemm_of_(?:safe_pairs|symmetric) = )&\w+", r"\1none", row)


def file_of_avx2(family: str, core: Path) -> Path:
    """Write AVX2's file of a family as that of "added", with a counter before one kernel of the table in its row."""
    [source] = core.glob(f"*/{family}_avx2.cpp")
    [table] = re.findall(rf"\.{family} = &(\w+)", row_of_avx2())
    text = source.read_text().replace("kAvx2", "kAdded")
    counter = rf'\1 = added::counted(\3, &\2::{FAMILIES[family]}, "{family}");'
    counted, places = re.subn(rf"(extern const (\w+) {table}) = (.*);", counter, text)
    assert places == 1, f"{source.name} has no table {table}"
    added = source.with_name(f"{family}_added.cpp")
    added.write_text(f'#include "{COUNTED.name}"\n{counted}')
    return added


def build_of(kernels: Path) -> ModuleType:
    """Its own build.py."""
    spec = importlib.util.spec_from_file_location("octet_build_of_a_copy", kernels / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is executed
    spec.loader.exec_module(module)
    return module


def compiler() -> str:
    cxx = build.find_compiler()
    if cxx is None:
        pytest.skip("no C++ compiler: neither $CXX nor g++ nor clang++")
    return cxx


# --- what the table refuses -----------------------------------------------------------------------------------------

CELLS = {
    "gemm": "&kAvx2Gemm",
    "gemm_of_safe_pairs": "none",
    "gemm_of_symmetric": "none",
    "depthwise": "none",
    "winograd": "none",
    "rows": "&kAvx2Rows",
    "elementwise": "&kAvx2Elements",
    "reals": "&kAvx2Reals",
    "narrow": "&kAvx2Narrow",
}


def errors_with(folder: Path, *, needs: str = "avx2 | fma", **changes: str | None) -> str:
    """What the compiler says of a row with these cells; None leaves a family out."""
    cells = [f".{family} = {table}" for family, table in {**CELLS, **changes}.items() if table]
    row = f'OCTET_INSTRUCTION_SET(Added, "added", by_cpu, {needs}, "-mavx2",\n    {", ".join(cells)})'
    core = with_row(folder / "kernels", row) / "csrc"
    said = ""
    for source in ("core/instruction_sets.cpp", "core/cpu/isa.cpp"):
        command = [compiler(), "-std=c++20", "-fsyntax-only", "-iquote", core, core / source]
        said += subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False).stderr
    return said


@x86
def test_holes_where_something_else_serves_compile(tmp_path: Path) -> None:
    assert errors_with(tmp_path) == ""


@x86
@pytest.mark.parametrize("family", ["gemm", "rows", "elementwise", "reals", "narrow"])
def test_a_hole_that_nothing_fills_does_not_compile(family: str, tmp_path: Path) -> None:
    assert "deleted function" in errors_with(tmp_path, **{family: "none"})


@x86
@pytest.mark.parametrize("family", list(CELLS))
def test_a_family_that_a_row_leaves_out_does_not_compile(family: str, tmp_path: Path) -> None:
    assert "error: " in errors_with(tmp_path, **{family: None})


@x86
def test_a_feature_that_nobody_detects_does_not_compile(tmp_path: Path) -> None:
    assert "'avx10' was not declared" in errors_with(tmp_path, needs="avx2 | avx10").translate({8216: 39, 8217: 39})


def test_a_kernel_that_a_table_leaves_out_does_not_compile(tmp_path: Path) -> None:
    portable = build.SOURCES / "core" / "gemm" / "gemm_portable.cpp"
    shorter = tmp_path / portable.name
    shorter.write_text(portable.read_text().replace("nullptr, nullptr, nullptr}", "nullptr, nullptr}"))
    for source, expected in ((portable, ""), (shorter, "run_image_u8")):
        command = [compiler(), *build.flags_of(portable), "-fsyntax-only", str(source)]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert (expected in said) if expected else said == ""


def test_every_row_says_every_family() -> None:
    for one in build.all_instruction_sets():
        assert list(one.kernels) == list(CELLS), one.name
    names = [one.name for one in build.all_instruction_sets()]
    assert len(names) == len(set(names))


def test_files_of_an_instruction_set_are_compiled_for_its_architecture_alone() -> None:
    x86, arm = ({path.name for path in build.core_sources(arch)} for arch in ("x86_64", "aarch64"))
    assert {"gemm_avx2.cpp", "reals_avx512vnni.cpp"} <= x86 - arm
    assert "gemm_neondot.cpp" in arm - x86
    assert {"gemm_portable.cpp", "isa.cpp"} <= x86 & arm


def test_files_of_an_instruction_set_leave_no_function_to_the_linker(core_library: Path) -> None:
    """It keeps one of those that several files compile, for all CPUs, and may keep that of AVX-512."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    said = subprocess.run([nm, "-C", str(core_library)], capture_output=True, text=True, check=True).stdout
    objects = dict(part.strip().split(".o:\n", 1) for part in said.split("\n\n") if ".o:\n" in part)
    sources = build.core_sources(build.host_arch())
    own = [path.stem for path in sources if any(flag.startswith("-m") for flag in build.flags_of(path))]
    assert len(own) > 9 or build.host_arch() != "x86_64"
    for name in own:
        assert not re.findall(r"^\S* +[WVu] .*", objects[name], re.MULTILINE), name


# --- a new one ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(core_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan's C++ program with one more instruction set, of which nothing is written but its files and its row."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or not {"avx2", "fma"} <= set(cpuinfo.read_text().split()):
        pytest.skip("the added instruction set is AVX2 under another name, which this CPU does not have")
    folder = tmp_path_factory.mktemp("added")
    kernels = with_row(folder / "kernels", row_of_avx2())
    core = kernels / "csrc" / "core"
    added = {file_of_avx2(family, core) for family in FAMILIES}
    shutil.copy(COUNTED, kernels / "csrc")
    building = build_of(kernels)
    names = [one.name for one in building.instruction_sets("x86_64")]
    assert names[names.index("avx2") + 1] == "added"
    assert [name for name in names if name != "added"] == [one.name for one in build.instruction_sets("x86_64")]
    own = [path for path in building.core_sources("x86_64") if path.stem.endswith("_added")]
    assert set(own) == added
    # Everything else is in the library as it was: the objects that read the table come before it.
    readers = [core / "instruction_sets.cpp", core / "cpu" / "isa.cpp"]
    objects = [compiled(building, source, folder) for source in [*readers, *own]]
    return link(RUN_PLAN, [*objects, core_library], folder / "run_plan")


def compiled(building: ModuleType, source: Path, folder: Path) -> Path:
    """Its object, sooner than by the build's own -O3. Reals keep that: what they round follows the compiler."""
    made = folder / f"{source.stem}.o"
    quick = [] if source.stem.startswith("reals_") else ["-O1"]
    command = [compiler(), *building.flags_of(source), *quick, "-c", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def families_that_ran(said: str) -> set[str]:
    return {line.split()[1] for line in said.splitlines() if line.startswith("added ") and line.endswith(" ran")}


def test_a_new_instruction_set_is_its_files_and_a_row(program: Path, tmp_path: Path) -> None:
    """Plans run by its kernels, of every family, to the reference's bytes; but narrow weights, which they have not."""
    x = torch.randn(1, 3, 24, 24, generator=generator())
    images, said = run_and_say(program, tmp_path, IMAGES, image_constants(), [x], "added")
    assert images == b"".join(map(in_memory, reference_plan.run_plan([x], image_constants(), IMAGES)))
    tokens = torch.randn(2, 7, 64, generator=generator())
    reals, more = run_and_say(program, tmp_path, TOKENS, token_constants(), [tokens], "added")
    assert reals == run(program, tmp_path, TOKENS, token_constants(), [tokens], "avx2")
    assert families_that_ran(said) | families_that_ran(more) == set(FAMILIES) - {"narrow"}


def test_no_cpu_chooses_what_is_for_requests(program: Path, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 24, 24, generator=generator())
    assert families_that_ran(run_and_say(program, tmp_path, IMAGES, image_constants(), [x], "")[1]) == set()

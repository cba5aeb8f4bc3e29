"""What is in a wheel, and that one which was installed without a compiler works."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import quant

CHECKOUT = Path(__file__).parents[1]
FOLDERS = {"quant": "quant", "kernels": "quant/kernels", "observers": "quant/observers", "calibrate": "quant/calibrate"}
"""Where each folder of packages stands in a wheel."""
EXTENSION = "quant/kernels/_octet.so"
STAMP = "quant/kernels/_octet.stamp"
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.so", "*.stamp")


def copy_sources(target: Path) -> Path:
    """What an installation is made from, without anything that was built in the checkout."""
    for folder in FOLDERS:
        shutil.copytree(CHECKOUT / folder, target / folder, ignore=NOT_SHIPPED)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, target / name)
    return target


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed; the checkout and its settings are out of its reach."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUANT_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pip(*arguments: str, cwd: Path, **environment: str) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd, **environment)


def build_wheel(sources: Path, folder: Path, **environment: str) -> Path:
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(sources),
        cwd=folder,
        **environment,
    )
    [wheel] = folder.glob("*.whl")
    return wheel


def build_directly(sources: Path, folder: Path, **environment: str) -> Path:
    """As `build_wheel`, by what pip calls: what pip does itself is tested by the wheels that other tests share."""
    make = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", make, cwd=sources, **environment)
    [wheel] = folder.glob("*.whl")
    return wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def install(wheel: Path, target: Path) -> Path:
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel), cwd=target.parent)
    return target


def run_installed(target: Path, code: str, **environment: str) -> str:
    """Run Python code with the wheel in `target` before whatever the tests themselves run on."""
    program = f"import quant\nassert quant.__file__.startswith({str(target)!r}), quant.__file__\n{code}"
    return run(sys.executable, "-c", program, cwd=target.parent, PYTHONPATH=str(target), **environment)


@pytest.fixture(scope="session")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where there is no compiler."""
    sources = copy_sources(tmp_path_factory.mktemp("sources"))
    return build_wheel(sources, tmp_path_factory.mktemp("wheel"), CXX="/nonexistent")


@pytest.fixture(scope="session")
def installed(pure_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pure wheel, unpacked by pip."""
    return install(pure_wheel, tmp_path_factory.mktemp("site") / "packages")


@pytest.fixture(scope="session")
def compiled_wheel(fake_compiler: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where there is one."""
    sources = copy_sources(tmp_path_factory.mktemp("compiled_sources"))
    return build_wheel(sources, tmp_path_factory.mktemp("compiled_wheel"), CXX=str(fake_compiler))


@pytest.fixture(scope="session")
def fake_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that takes a compiler's arguments and writes an empty output."""
    program = tmp_path_factory.mktemp("compiler") / "fake-cxx"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1; exit; fi\n'
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def expected_files() -> set[str]:
    """Every module of every package, and the files that packages carry."""
    wanted = {f"{FOLDERS[folder]}/{path.relative_to(CHECKOUT / folder)}" for folder, path in package_files()}
    return {name.replace(os.sep, "/") for name in wanted}


def package_files() -> list[tuple[str, Path]]:
    found = []
    for folder in FOLDERS:
        found += [
            (folder, path) for path in (CHECKOUT / folder).rglob("*.py") if (path.parent / "__init__.py").exists()
        ]
    found.append(("quant", CHECKOUT / "quant" / "py.typed"))
    found += [("kernels", path) for path in (CHECKOUT / "kernels" / "csrc").rglob("*") if path.is_file()]
    readme = CHECKOUT / "kernels" / "README.md"
    return [*found, *([("kernels", readme)] if readme.exists() else [])]


def test_a_wheel_has_one_top_level_name(pure_wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(pure_wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"quant"}


def test_a_wheel_has_every_package_file_and_no_other(pure_wheel: Path) -> None:
    assert {name for name in names(pure_wheel) if name.startswith("quant/")} == expected_files()


def test_a_wheel_built_without_a_compiler_is_for_any_machine(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")


def test_a_wheel_built_from_the_sdist_has_the_same_files(pure_wheel: Path, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    make = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run(sys.executable, "-c", make, cwd=sources)
    [sdist] = (sources / "dist").glob("*.tar.gz")
    (tmp_path / "wheel").mkdir()
    assert names(build_wheel(sdist, tmp_path / "wheel", CXX="/nonexistent")) == names(pure_wheel)


def test_a_file_left_in_the_build_folder_is_not_in_the_wheel(pure_wheel: Path, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    stale = sources / "build" / "lib" / "quant" / "deleted_last_year.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    (tmp_path / "wheel").mkdir()
    assert names(build_directly(sources, tmp_path / "wheel", CXX="/nonexistent")) == names(pure_wheel)


def test_a_wheel_built_with_a_compiler_has_the_extension(compiled_wheel: Path) -> None:
    assert "-py3-none-linux_" in compiled_wheel.name
    dist_info = {name for name in names(compiled_wheel) if ".dist-info/" in name}
    assert names(compiled_wheel) - dist_info == expected_files() | {EXTENSION, STAMP}


def test_an_installed_wheel_with_kernels_needs_no_build(
    compiled_wheel: Path, fake_compiler: Path, tmp_path: Path
) -> None:
    target = install(compiled_wheel, tmp_path / "packages")
    code = "import sys\nfrom quant.cli import main\nsys.exit(main(['build']))"
    said = run_installed(target, code, CXX=str(fake_compiler), QUANT_EXTENSION="none")
    assert said == f"kernels are up to date: {target / EXTENSION}\n"
    with open(target / "quant/kernels/csrc/core/cpu/isa.cpp", "a", encoding="utf-8") as source:
        source.write("// changed\n")
    assert "compiling" in run_installed(target, code, CXX=str(fake_compiler), QUANT_EXTENSION="none")


def shipped_wheel(sources: Path, folder: Path, *versions: str) -> Path:
    """A wheel with an extension, an empty file, for each of these torches."""
    kernels = folder / "kernels"
    kernels.mkdir(parents=True)
    for version in versions:
        (kernels / f"_octet_torch{version}.so").touch()
    return build_directly(sources, folder, OCTET_WHEEL_KERNELS=str(kernels), CXX="/nonexistent")


def test_a_wheel_for_everybody_has_an_extension_for_each_torch(pure_wheel: Path, tmp_path: Path) -> None:
    wheel = shipped_wheel(copy_sources(tmp_path / "sources"), tmp_path / "wheel", "2_9", "2_10")
    assert "-py3-none-linux_" in wheel.name
    added = {name for name in names(wheel) - names(pure_wheel) if ".dist-info/" not in name}
    assert added == {"quant/kernels/_octet_torch2_9.so", "quant/kernels/_octet_torch2_10.so"}
    target = install(wheel, tmp_path / "packages")
    reason = "from quant.kernels import ops; print(ops.extension_path().name, '|', ops.extension_problem.__wrapped__())"
    said = run_installed(target, f"import torch; torch.__version__ = '2.11.1+cpu'; {reason}")
    assert said == (
        "_octet.so | the compiled kernels of this installation are for torch 2.9, 2.10, and this is torch 2.11.1+cpu; "
        "`quant build` builds them for it\n"
    )
    said = run_installed(target, f"import torch; torch.__version__ = '2.10.0'; {reason}")
    assert "_octet_torch2_10.so | the compiled kernels do not load: " in said
    (target / "quant/kernels/_octet.so").touch()  # by `quant build`
    assert run_installed(target, reason).startswith("_octet.so | the compiled kernels do not load: ")


def test_a_folder_without_extensions_makes_no_wheel(tmp_path: Path) -> None:
    """Whoever names a folder wants its kernels; pip would not show that they are missing."""
    with pytest.raises(AssertionError, match=r"OCTET_WHEEL_KERNELS=.* has no _octet_torch\*\.so"):
        shipped_wheel(copy_sources(tmp_path / "sources"), tmp_path / "wheel")


def load_ci(name: str) -> ModuleType:
    """A program of `.ci`."""
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build_wheels() -> ModuleType:
    return load_ci("build_wheels")


@pytest.fixture
def wheel_tests() -> ModuleType:
    return load_ci("test_wheels")


def test_tools_that_are_missing_are_named_before_anything_is_compiled(
    build_wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_wheels, "compile_kernels", lambda *given: pytest.fail("it compiles"))
    with pytest.raises(SystemExit, match=r"patchelf not found: .*make wheels"):
        build_wheels.main(["--output", str(tmp_path / "wheels")])


def test_a_torch_that_cannot_be_fetched_is_named_and_leaves_nothing(
    build_wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_wheels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SystemExit, match=r"torch 9\.9\.9 for aarch64 could not be fetched"):
        build_wheels.torch_folder("9.9.9", "aarch64")
    assert not list((tmp_path / "cache").iterdir())


def test_what_auditwheel_says_of_a_wheel_that_it_refuses_is_shown(
    build_wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        if command[1] == "-c":  # the wheel, into the folder that the code names
            Path(command[2].split("build_wheel('")[1].split("'")[0], "octet.whl").touch()
            return subprocess.CompletedProcess(command, 0)
        return subprocess.CompletedProcess(command, 1, "", "cannot repair to any policy")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"auditwheel cannot name octet\.whl:\ncannot repair to any policy"):
        build_wheels.make_wheel(tmp_path, "x86_64", tmp_path / "wheels")


def test_a_wheel_that_serves_fewer_systems_than_torch_is_refused(build_wheels: ModuleType) -> None:
    build_wheels.check_tag("octet_quant-0.1.0-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl")
    for tag in ("manylinux_2_34_x86_64", "linux_x86_64"):
        with pytest.raises(SystemExit, match=r"fewer systems than torch, which asks for glibc 2\.28.*old_glibc\.h"):
            build_wheels.check_tag(f"octet_quant-0.1.0-py3-none-{tag}.whl")


def test_the_kernels_of_a_wheel_ask_for_an_old_c_library(build_wheels: ModuleType, tmp_path: Path) -> None:
    """Locks and shared pointers, as the kernels have them, by the compiler of this machine."""
    compiler, reader = shutil.which("g++"), shutil.which("objdump")
    if compiler is None or reader is None:
        pytest.skip("no g++ or objdump")
    (tmp_path / "locks.cpp").write_text(
        "#include <memory>\n#include <shared_mutex>\n#include <sstream>\n"
        "int locked(std::shared_mutex& one, std::shared_ptr<int> two) {\n"
        "  std::shared_lock reads(one);\n  auto kept = two;\n  return *kept;\n}\n"
        "void write(std::shared_mutex& one) { one.lock(); one.unlock(); }\n"
        "std::string text(std::ostringstream& one) { return one.str(); }\n"
    )
    flags = ("-std=c++20", "-Os", "-fPIC", "-shared", "-include", str(build_wheels.OLD_GLIBC))
    run(compiler, *flags, "locks.cpp", "-o", "locks.so", cwd=tmp_path)
    symbols = run(reader, "-T", "locks.so", cwd=tmp_path)
    assert "pthread_rwlock_rdlock" in symbols
    newer = [line for line in symbols.splitlines() if re.search(r"GLIBC_2\.(29|3\d)|GLIBCXX_3\.4\.(2[5-9]|3\d)", line)]
    assert not newer, newer


def test_a_python_that_is_not_here_is_said_and_does_not_fail_the_others(
    wheel_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "octet.whl"
    wheel.touch()
    monkeypatch.setattr(wheel_tests, "is_version", lambda python, version: version != "3.99")
    monkeypatch.setattr(wheel_tests, "find_python", lambda asked: None if asked == "3.99" else Path(asked))
    monkeypatch.setattr(
        wheel_tests, "try_one", lambda python, torch, *others: wheel_tests.Row(str(python), torch, "ok")
    )
    given = ["--wheel", str(wheel), "--torch", "2.13.0", "--python"]
    assert wheel_tests.main([*given, "3.99", "3.12"]) == 0
    said = capsys.readouterr().out
    assert "| 3.99 | 2.13.0 | not here: " in said
    assert said.endswith("1 environments ok, 0 failed, 1 not here\n")
    assert wheel_tests.main([*given, "3.99"]) == 1  # nothing was tried


def test_other_bits_under_another_python_are_a_failure(
    wheel_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "octet.whl"
    wheel.touch()
    digests = {"3.10": {"static_cnn": "a", "qat_steps": "b"}, "3.14": {"static_cnn": "c", "qat_steps": "b"}}
    monkeypatch.setattr(wheel_tests, "find_python", Path)
    monkeypatch.setattr(
        wheel_tests, "try_one", lambda python, *others: wheel_tests.Row(str(python), "2", "ok", digests[str(python)])
    )
    assert wheel_tests.main(["--wheel", str(wheel), "--torch", "2.13.0", "--python", "3.10", "3.14"]) == 1
    assert "| 3.14 | 2 | FAILED: other bits than Python 3.10 has in static_cnn |" in capsys.readouterr().out


LISTS = re.compile(r"^(\w+) = \[\n?(.*?)\n?\]$", re.MULTILINE | re.DOTALL)
"""The lists of pyproject.toml: Python 3.10 cannot read it."""
LOCK = CHECKOUT / ".ci" / "requirements-dev.txt"


def test_every_developers_package_is_locked_with_its_hash() -> None:
    text = LOCK.read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE))
    assert len(locked) == sum(not line.startswith(("#", " ")) for line in text.splitlines())
    assert "://" not in text
    for line in wanted_by_developers():
        one = Requirement(line)
        assert one.specifier.contains(locked[canonicalize_name(one.name)]), f"{line}: `make lock` renews {LOCK.name}"


def wanted_by_developers() -> list[str]:
    """The requirements of the package and of its extra `dev`, with those of the extras that it names."""
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    lists = dict(LISTS.findall(text))
    wanted = re.findall(r'"([^"]+)"', lists["dependencies"] + lists["dev"])
    extras = [extra for one in wanted for extra in Requirement(one).extras if one.startswith("octet-quant")]
    wanted += [one for extra in extras for one in re.findall(r'"([^"]+)"', lists[extra])]
    return [one for one in wanted if not one.startswith("octet-quant")]


def test_a_package_without_a_hash_is_not_locked() -> None:
    lock, data = load_ci("lock"), {"name": "Some_Package", "version": "1.0"}
    hashed = {"metadata": data, "download_info": {"archive_info": {"hashes": {"sha256": "0" * 64}}}}
    project = {"metadata": data, "download_info": {"dir_info": {}}}
    assert lock.lines([hashed, project]) == [f"some-package==1.0 \\\n    --hash=sha256:{'0' * 64}\n"]
    with pytest.raises(SystemExit, match=r"some-package 1\.0: pip reports no SHA-256"):
        lock.lines([{"metadata": data, "download_info": {"archive_info": {}}}])


def test_every_dependency_is_imported_by_the_package() -> None:
    """What is not would be fetched by every user, and may not load beside their torch."""
    sources = "\n".join(path.read_text(encoding="utf-8") for _, path in package_files() if path.suffix == ".py")
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", sources, re.MULTILINE))
    lists = dict(LISTS.findall((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")))
    named = {canonicalize_name(Requirement(one).name) for one in re.findall(r'"([^"]+)"', lists["dependencies"])}
    assert "torch" in named
    assert {one.replace("-", "_") for one in named} <= imported


def test_the_version_is_one(pure_wheel: Path) -> None:
    assert pure_wheel.name.split("-")[1] == quant.__version__


def test_a_wheel_takes_the_checkouts_extension_where_it_is_current(fake_compiler: Path, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    run(sys.executable, "kernels/build.py", cwd=sources, CXX=str(fake_compiler))
    (sources / "kernels" / "_octet.so").write_text("the checkout's")
    (tmp_path / "wheel").mkdir()
    wheel = build_directly(sources, tmp_path / "wheel", CXX=str(fake_compiler))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(EXTENSION) == b"the checkout's"


@pytest.mark.parametrize(
    "command",
    [
        ["kernels/build.py"],
        ["kernels/build.py", "--core-only", "--core", "core.a"],
        ["kernels/runner/build.py", "--out", "runner"],
    ],
    ids=["extension", "core", "runner"],
)
def test_a_source_that_is_edited_during_a_build_is_compiled_again(
    fake_compiler: Path, tmp_path: Path, command: list[str]
) -> None:
    sources, editing = copy_sources(tmp_path / "sources"), tmp_path / "editing-cxx"
    edited = sources / "kernels" / "csrc" / "core" / "cpu" / "isa.cpp"
    editing.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "// edited" >> {edited}\nexec {fake_compiler} "$@"\n')
    editing.chmod(editing.stat().st_mode | stat.S_IXUSR)
    assert "compiling" in run(sys.executable, *command, "--cxx", str(editing), cwd=sources)
    assert "compiling" in run(sys.executable, *command, "--cxx", str(fake_compiler), cwd=sources)
    assert "up to date" in run(sys.executable, *command, "--cxx", str(fake_compiler), cwd=sources)


def test_a_core_that_is_current_is_not_compiled_again(fake_compiler: Path, tmp_path: Path) -> None:
    """`make demo` compiles it while torch is fetched."""
    sources, counting, log = copy_sources(tmp_path / "sources"), tmp_path / "counting-cxx", tmp_path / "log"
    counting.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {fake_compiler} "$@"\n')
    counting.chmod(counting.stat().st_mode | stat.S_IXUSR)

    def compiled(*arguments: str) -> list[str]:
        log.write_text("")
        given = ("kernels/build.py", "--core", "core.a", "--cxx", str(counting), *arguments)
        run(sys.executable, *given, cwd=sources)
        lines = [line for line in log.read_text().splitlines() if " -c " in line or "-shared" in line]
        return [line for line in lines if "/csrc/core/" in line or "-shared" in line]

    assert len(compiled("--core-only")) > 20
    [link] = compiled()
    assert link.count("/core/") > 20
    assert "threads_openmp.o" not in link  # torch has its functions
    assert len(compiled("--force")) > 20


def test_an_outdated_extension_of_the_checkout_is_not_in_the_wheel(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources")
    (sources / "kernels" / "_octet.so").write_text("of last year")
    (tmp_path / "wheel").mkdir()
    assert EXTENSION not in names(build_directly(sources, tmp_path / "wheel", CXX="/nonexistent"))


def test_an_installed_wheel_can_compile_its_kernels(pure_wheel: Path, fake_compiler: Path, tmp_path: Path) -> None:
    target = install(pure_wheel, tmp_path / "packages")
    code = "import sys\nfrom quant.cli import main\nsys.exit(main(['build']))"
    said = run_installed(target, code, CXX=str(fake_compiler), QUANT_EXTENSION="none")
    assert (target / EXTENSION).exists()
    assert str(target / EXTENSION) in said


def test_installed_without_a_compiler_it_works_and_says_so_once(installed: Path) -> None:
    code = """
import warnings, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    quantized = quant.quantize_dynamic(model)
    x = torch.randn(3, 8)
    error = (quantized(x) - model(x)).norm() / model(x).norm()
    quantized(x)
assert error < 0.05, error
[warning] = [w for w in caught if "reference" in str(w.message)]
print(quant.kernels.available()["native"], "|", warning.message)
"""
    reason, warning = run_installed(installed, code).split("|")
    assert "quant build" in reason
    assert "slow reference backend" in warning


def asked_of_newer_libraries(library: Path) -> set[str]:
    """The symbols of a library that come with glibc 2.28 or newer, which systems that wheels are for may not have."""
    table = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*UND\*.*GLIBC_2\.(\d+)[\d.]*\)? +(\w+)", table)
    return {name for minor, name in found if int(minor) > 27}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names or os.confstr("CS_GNU_LIBC_VERSION") != "glibc 2.36",
    reason=".ci/old_glibc.h is written for the headers of Debian 12",
)
def test_what_newer_systems_alone_have_is_replaced_in_wheels() -> None:
    """A wheel built with a symbol that nobody replaced is for fewer systems; its build says so, minutes of it later."""
    library = CHECKOUT / "kernels" / "_octet.so"
    if not library.exists():
        pytest.skip("the kernels are not built")
    asked = asked_of_newer_libraries(library)
    replaced = (CHECKOUT / ".ci" / "old_glibc.h").read_text(encoding="utf-8")
    assert "pthread_rwlock_rdlock" in asked
    assert {name for name in asked if not re.search(rf"\b{name}\b", replaced)} == set()

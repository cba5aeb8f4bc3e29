"""What the tests of dynamic layers share: the name of every backend in turn, and the same start."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quant.kernels import build, dispatch

from quant.artefact.file import CONSTANT, read, write

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
WITHOUT_KERNELS = os.environ.get("QUANT_EXTENSION") == "none"
REASONS = dispatch.available()
"""Name of each backend -> why it cannot be used here, or ''. Asked once, since it reads the entry points of every
installed package."""
NAMES = ["native"] if FAST else [n for n, reason in REASONS.items() if not (reason and WITHOUT_KERNELS)]
"""Emulated, the kernels' own tests go through all: what layers do around a backend is the same on every machine.
Without the compiled kernels only those that are there: thousands of skips would say what was decided."""


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend of NAMES that can be used here; the skip of another says why it cannot."""
    name: str = request.param
    reason = REASONS[name]
    if reason:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.fixture
def seeded_on_one_thread() -> Iterator[None]:
    """These tensors are too small to share."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_programs() -> Callable[[Path], None]:
    """Takes programs, and what was noted for them, out of a file: versions before wrote such, which are captured."""

    def take_out(path: Path) -> None:
        manifest, tensors = read(path)
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONSTANT)}
        for description in manifest["static"].values():
            for name in ("removed", "fingerprint"):
                del description[name]
        write(path, own, {name: manifest[name] for name in ("static", "modules", "report", "float_bytes")})

    return take_out


CHECKOUT = Path(__file__).resolve().parents[2]
RUNNER = CHECKOUT / "kernels" / "runner"


@pytest.fixture(scope="session")
def runner_build() -> ModuleType:
    """kernels/runner/build.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("runner_build", RUNNER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runner_build"] = module  # dataclasses look their module up while it is executed
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def compiler() -> str:
    """The C++ compiler, or a skip."""
    if os.environ.get("OCTET_EMULATED") == "1":
        pytest.skip("no C++ compiler for the emulated machine")
    cxx = build.find_compiler()
    if cxx is None:
        pytest.skip("no C++ compiler: neither $CXX nor g++ nor clang++")
    return cxx


@pytest.fixture(scope="session")
def whole_runner(runner_build: ModuleType) -> Path:
    """The folder that `make runner` fills, where it is current."""
    settings = runner_build.Settings(compiler(), build.host_arch(), CHECKOUT / "build")
    if not runner_build.is_current(settings):
        pytest.skip("build/octet-run is missing or not current: `make runner` compiles it")
    return settings.out


@pytest.fixture(scope="session")
def runner(runner_build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with octet-run and liboctet.so: of `make runner`, or else with the core of `make build`."""
    if "OCTET_RUNNER" in os.environ:  # cross-compiled, for an emulated machine
        return Path(os.environ["OCTET_RUNNER"])
    cxx, arch = compiler(), build.host_arch()
    made = runner_build.Settings(cxx, arch, CHECKOUT / "build")
    if runner_build.is_current(made):
        return made.out
    core = CHECKOUT / "build" / "core" / "liboctet_core.a"
    folder = tmp_path_factory.mktemp("runner")
    if not build.core_is_current(cxx, arch, core):
        core = build.build_core(cxx, arch, folder / core.name)
    runner_build.build(runner_build.Settings(cxx, arch, folder, core=core))
    return folder


class FunctionNames(torch.overrides.TorchFunctionMode):
    """A mode of torch that is told of each function; `seen` has their names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

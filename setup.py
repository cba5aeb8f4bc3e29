"""What pyproject.toml cannot say: which folders are which packages, and how the compiled kernels get into a wheel.

A wheel gets the compiled kernels where the build sees torch and a C++ compiler (`pip install --no-build-isolation .`).
Where it does not, the wheel is pure Python and `quant build` compiles them later. An editable install compiles nothing:
there `quant build`, or `make build`, writes the extension into the checkout. A wheel for everybody has one for each
torch, compiled beforehand (`make wheels`), in the folder that OCTET_WHEEL_KERNELS names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
FOLDERS = {"quant": "quant", "quant.kernels": "kernels", "quant.observers": "observers", "quant.calibrate": "calibrate"}
"""Package -> its folder. One import name, and folders that say what is in them."""

KERNELS = HERE / "kernels"
EXTENSION = Path("quant", "kernels", "_octet.so")
SHIPPED = "_octet_torch*.so"
"""One for each torch; kernels/ops.py takes the one of the torch that it runs beside."""


class BuildWithKernels(build_py):
    """`build_py`, then the extension beside the copied modules."""

    def run(self) -> None:
        if not self.editable_mode:
            # setuptools never empties this folder, so a module deleted since the last build would be in the wheel.
            shutil.rmtree(Path(self.build_lib, "quant"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            problem = add_extension(Path(self.build_lib, EXTENSION))
            if problem:
                print(f"octet-quant: without compiled kernels: {problem}", file=sys.stderr)
                print("octet-quant: int8 layers will run on `reference`; `quant build` compiles later", file=sys.stderr)


class WheelOfAnyPython(bdist_wheel):
    """`bdist_wheel` whose tag says what is inside: the extension includes no Python header, so only the platform."""

    def run(self) -> None:
        self.run_command("build")
        folder = Path(self.get_finalized_command("build_py").build_lib, EXTENSION.parent)
        self.root_is_pure = not (folder / EXTENSION.name).exists() and not any(folder.glob(SHIPPED))
        self.distribution.has_ext_modules = lambda: not self.root_is_pure  # `install` asks, to choose its folder
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


def find_packages() -> dict[str, str]:
    """Every package of FOLDERS and its folder: those with an __init__.py."""
    found = {}
    for name, folder in FOLDERS.items():
        for init in sorted((HERE / folder).rglob("__init__.py")):
            inner = init.parent.relative_to(HERE / folder).parts
            found[".".join((name, *inner))] = init.parent.relative_to(HERE).as_posix()
    return found


def add_extension(output: Path) -> str:
    """Put the extension at `output`: the checkout's, where that is current, else compiled. Returns why not, or ''.

    Where OCTET_WHEEL_KERNELS names a folder, those that lie in it are put beside `output` instead.
    """
    if os.environ.get("OCTET_WHEEL_KERNELS"):
        shipped = list(Path(os.environ["OCTET_WHEEL_KERNELS"]).glob(SHIPPED))
        if not shipped:  # a wheel without what its builder asked for: pip would not show a note
            raise SystemExit(f"OCTET_WHEEL_KERNELS={os.environ['OCTET_WHEEL_KERNELS']} has no {SHIPPED}")
        for one in shipped:
            shutil.copyfile(one, output.with_name(one.name))
        return ""
    if os.environ.get("QUANT_EXTENSION") == "none":
        return "QUANT_EXTENSION=none leaves them out"
    if importlib.util.find_spec("torch") is None:
        return "torch is not importable in the build (`pip install --no-build-isolation .` lets it see yours)"
    compiling = load_by_path("octet_build", KERNELS / "build.py")
    try:
        built = KERNELS / "_octet.so"
        if compiling.is_current(compiling.host_target(built)):
            for suffix in (".so", ".stamp"):  # by the stamp `quant build` sees that there is nothing to do
                shutil.copyfile(built.with_suffix(suffix), output.with_suffix(suffix))
            return ""
        compiling.build(compiling.host_target(output))
    except (compiling.BuildError, OSError) as error:
        return str(error)
    return ""


def load_by_path(name: str, path: Path) -> ModuleType:
    """Import one file: as `quant.kernels.build` it would import its package, which is not installed yet."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    spec.loader.exec_module(module)
    return module


packages = find_packages()
setup(
    packages=list(packages),
    package_dir=packages,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
)

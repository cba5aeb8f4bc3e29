"""`make fuzz-runner`: altered files into the runner, under AddressSanitizer.

The program is kernels/runner/fuzz.cpp with the whole core under the sanitizer; the files are those of the runner's
tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
ASAN = "allocator_may_return_null=1:max_allocation_size_mb=256:detect_leaks=0"
"""No memory is an error like others; and what a stopped process leaves is no leak."""


def load_by_path(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    spec.loader.exec_module(module)
    return module


def saved(folder: Path) -> list[Path]:
    """The files of all test networks, written to a folder."""
    import quant

    models, networks = (load_by_path(name, HERE / f"{name}.py") for name in ("runner_models", "runner_networks"))
    static = {name: (make, batches) for name, (make, batches) in models.EXAMPLES.items()}
    static |= {name: (make, [example] * 2) for name, (make, example, _) in networks.NETWORKS.items()}
    dynamic = {name: (make, example) for name, (make, example) in models.AS_THEY_COME.items()}
    dynamic |= {f"{name}_as_it_comes": networks.NETWORKS[name][:2] for name in ("bert", "speller")}
    files = []

    def save(name: str, model: nn.Module, example: Any = None) -> None:
        files.append(folder / f"{name}.q8")
        quant.save(model, files[-1], runner=True, example_inputs=example)

    for name, (make, batches) in static.items():
        save(name, quant.quantize_static(make().eval(), batches, progress=False))
    for name, (make, example) in dynamic.items():
        save(name, quant.quantize_dynamic(make().eval()), example)
    return files


def fuzz(
    program: Path, count: int, seed: int, folder: Path, isa: str = "", *, shown: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the program over files of all test networks; failing cases are written to the folder.

    Args:
        shown: what the program prints goes where this process prints, and is not in the result.
    """
    files = saved(folder)
    environment = {**os.environ, "ASAN_OPTIONS": ASAN, "OMP_WAIT_POLICY": "passive"}  # many small calls on two threads
    environment |= {"QUANT_ISA": isa} if isa else {}
    words = [program, str(count), str(seed), folder, *files]
    return subprocess.run(list(map(str, words)), capture_output=not shown, text=True, check=False, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="altered files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--isa", default="", help="an instruction set, as QUANT_ISA")
    options = parser.parse_args()
    build = load_by_path("runner_build", CHECKOUT / "kernels" / "runner" / "build.py")
    out = CHECKOUT / "build" / "fuzz"
    settings = build.Settings(build.kernels_build.require_compiler(), build.kernels_build.host_arch(), out)
    print("compiling the runner and the core under AddressSanitizer ...", flush=True)
    return fuzz(build.build_fuzz(settings), options.count, options.seed, out, options.isa, shown=True).returncode


if __name__ == "__main__":
    sys.exit(main())

"""`quant.save(..., runner=True)` and the torch-free runner: the bits of Python, in a process without it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from quant.kernels import build
from safetensors import safe_open
from torch import Tensor, nn

import quant

from .conftest import compiler
from .runner_models import EXAMPLES, SHAPES, converted, image, octet_run, outputs_of, run_model

MEGABYTE = 1_000_000


@pytest.fixture(scope="module", params=list(EXAMPLES))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    """Each network: its name, the int8 model, and its file."""
    model = converted(request.param)
    path = tmp_path_factory.mktemp("exported") / f"{request.param}.q8"
    quant.save(model, path, runner=True)
    return request.param, model, path


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model, path = converted("residual"), tmp_path_factory.mktemp("residual") / "model.q8"
    quant.save(model, path, runner=True)
    return model, path


def inputs_of(name: str, place: int) -> list[Tensor]:
    return [image(*shape, seed=20 + place) for shape in SHAPES[name][place]]


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("place", [0, 1], ids=["as at export", "other sizes"])
def test_the_bits_of_python(
    exported: tuple[str, nn.Module, Path], runner: Path, tmp_path: Path, place: int, threads: str
) -> None:
    name, model, path = exported
    inputs = inputs_of(name, place)
    expected = outputs_of(model, inputs)
    outputs = run_model(runner, path, tmp_path, inputs, len(expected), "--threads", threads)
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("isa", [one.name for one in build.instruction_sets(build.host_arch())])
def test_on_each_instruction_set(residual: tuple[nn.Module, Path], runner: Path, tmp_path: Path, isa: str) -> None:
    model, path = residual
    inputs = inputs_of("residual", 1)
    [output] = run_model(runner, path, tmp_path, inputs, 1, QUANT_ISA=isa)
    assert torch.equal(output, outputs_of(model, inputs)[0])


@pytest.mark.parametrize("isa", [one.name for one in build.instruction_sets(build.host_arch())])
def test_a_convolution_of_many_channels_and_tiles(runner: Path, tmp_path: Path, isa: str) -> None:
    """By Winograd's products where the instruction set has them (PackedWinograd::serves)."""
    torch.manual_seed(3)
    inner = nn.Conv2d(64, 32, 3, padding=1)  # whose outputs are integers, as the next layer's inputs
    layers = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), inner, nn.ReLU(), nn.Conv2d(32, 4, 1)).eval()
    model = quant.quantize_static(layers, [(image(1, 3, 24, 24),)], progress=False)
    quant.save(model, tmp_path / "model.q8", runner=True)
    x = image(2, 3, 28, 21, seed=1)
    [output] = run_model(runner, tmp_path / "model.q8", tmp_path, [x], 1, QUANT_ISA=isa)
    assert torch.equal(output, outputs_of(model, [x])[0])


def test_the_file_is_one_for_python_too(exported: tuple[str, nn.Module, Path]) -> None:
    name, model, path = exported
    restored = quant.load(path, model=EXAMPLES[name][0]().eval())
    inputs = inputs_of(name, 0)
    for output, wanted in zip(outputs_of(restored, inputs), outputs_of(model, inputs), strict=True):
        assert torch.equal(output, wanted)


def test_a_loaded_model_exports_the_same(residual: tuple[nn.Module, Path], runner: Path, tmp_path: Path) -> None:
    model, path = residual
    quant.save(quant.load(path, model=EXAMPLES["residual"][0]().eval()), tmp_path / "again.q8", runner=True)
    inputs = inputs_of("residual", 1)
    [output] = run_model(runner, tmp_path / "again.q8", tmp_path, inputs, 1)
    assert torch.equal(output, outputs_of(model, inputs)[0])


def test_weights_are_stored_once(residual: tuple[nn.Module, Path]) -> None:
    with safe_open(residual[1], framework="pt") as file:
        added = [file.get_tensor(name) for name in file.keys() if name.startswith("_quant_runner/")]  # noqa: SIM118
    assert added
    assert [one.shape for one in added if one.dtype == torch.int8] == []


def test_it_says_what_the_model_takes_and_gives(runner: Path, tmp_path: Path) -> None:
    quant.save(converted("pyramid"), tmp_path / "model.q8", runner=True)
    done = octet_run(runner, tmp_path / "model.q8", "--describe", QUANT_ISA="portable")
    assert done.stdout.splitlines() == [
        "input image float32 (any, 3, any, any)",
        "output fine float32 (any, 6, any, any)",
        "output coarse float32 (any, 4, any, any)",
        "instruction set portable",
    ]


def test_an_input_by_its_name(runner: Path, tmp_path: Path) -> None:
    model = converted("pair")
    quant.save(model, tmp_path / "model.q8", runner=True)
    inputs = inputs_of("pair", 0)
    [expected] = run_model(runner, tmp_path / "model.q8", tmp_path, inputs, 1)
    words = [
        "--input",
        f"narrow={tmp_path}/in1.npy",
        "--input",
        f"wide={tmp_path}/in0.npy",
        "--output",
        tmp_path / "y.npy",
    ]
    done = octet_run(runner, tmp_path / "model.q8", *words, "--repeat", "3")
    assert done.returncode == 0, done.stderr
    assert "3 runs: median" in done.stdout
    assert torch.equal(torch.from_numpy(numpy.load(tmp_path / "y.npy")), expected)
    assert torch.equal(expected, outputs_of(model, inputs)[0])


def test_an_output_by_its_name(runner: Path, tmp_path: Path) -> None:
    model = converted("pyramid")
    quant.save(model, tmp_path / "model.q8", runner=True)
    inputs = inputs_of("pyramid", 0)
    fine, coarse = run_model(runner, tmp_path / "model.q8", tmp_path, inputs, 2)
    named = ["--output", f"coarse={tmp_path}/second.npy", "--output", f"fine={tmp_path}/first.npy"]
    done = octet_run(runner, tmp_path / "model.q8", "--input", f"image={tmp_path}/in0.npy", *named)
    assert done.returncode == 0, done.stderr
    for name, expected in (("first", fine), ("second", coarse)):
        assert torch.equal(torch.from_numpy(numpy.load(tmp_path / f"{name}.npy")), expected)
    one = octet_run(
        runner, tmp_path / "model.q8", "--input", tmp_path / "in0.npy", "--output", f"coarse={tmp_path}/c.npy"
    )
    assert one.returncode == 0, one.stderr
    assert torch.equal(torch.from_numpy(numpy.load(tmp_path / "c.npy")), coarse)


class Masked(nn.Module):
    """A layer of whose outputs a mask of the caller's leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(self.first(x).masked_fill(mask, 0.0))


def test_an_input_of_booleans(runner: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = quant.quantize_static(Masked().eval(), [(image(5, 16), image(5, 8) > 0)], progress=False)
    quant.save(model, tmp_path / "model.q8", runner=True)
    inputs = [image(3, 16, seed=1), image(3, 8, seed=1) > 0]
    [output] = run_model(runner, tmp_path / "model.q8", tmp_path, inputs, 1)
    assert torch.equal(output, outputs_of(model, inputs)[0])
    numpy.save(tmp_path / "in1.npy", inputs[1].to(torch.uint8).numpy())
    words = [word for place in (0, 1) for word in ("--input", tmp_path / f"in{place}.npy")]
    done = octet_run(runner, tmp_path / "model.q8", *words)
    assert done.stderr == "octet-run: input 'mask' is uint8, expected bool\n"


def test_more_sizes_than_a_model_keeps_plans_for(residual: tuple[nn.Module, Path], runner: Path) -> None:
    """The plan that was not used for longest goes, and is made anew."""
    library = Library(runner)
    model, path = residual
    handle = library.open(path)
    for width in (*range(32, 32 + 70), 32, 101, 33):
        x = image(1, 3, 32, width, seed=width)
        assert torch.equal(library.run(handle, x), outputs_of(model, [x])[0])
    library.close(handle)


def test_many_threads_share_a_model(residual: tuple[nn.Module, Path], runner: Path) -> None:
    """Each plans sizes of its own while the others run."""
    library = Library(runner)
    model, path = residual
    handle = library.open(path)
    inputs = [image(1 + place % 3, 3, 24 + 8 * (place % 5), 32, seed=place) for place in range(12)]
    expected = [outputs_of(model, [x])[0] for x in inputs]
    wrong: list[int] = []

    def work(begin: int) -> None:
        for step in range(24):
            place = (begin + step) % len(inputs)
            if not torch.equal(library.run(handle, inputs[place]), expected[place]):
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    library.close(handle)
    assert wrong == []


def test_a_file_in_memory(residual: tuple[nn.Module, Path], runner: Path) -> None:
    """The model has a copy of its own: what the caller had may be written over."""
    library = Library(runner)
    model, path = residual
    content = ctypes.create_string_buffer(path.read_bytes(), path.stat().st_size)
    handle = ctypes.c_void_p(library.calls.octet_open_memory(content, len(content)))
    assert handle, library.error()
    ctypes.memset(content, 0xAA, len(content))
    x = image(2, 3, 32, 40)
    assert torch.equal(library.run(handle, x), outputs_of(model, [x])[0])
    library.close(handle)
    assert library.calls.octet_open_memory(content, len(content)) is None
    assert library.error().startswith("the file in memory: it is no safetensors file")
    assert library.calls.octet_open_memory(None, 0) is None
    assert library.error() == "octet_open_memory: bytes is NULL"


def test_errors_are_the_threads_own(residual: tuple[nn.Module, Path], runner: Path) -> None:
    library = Library(runner)
    assert library.open_raw(b"nowhere.q8") is None
    seen: list[str] = []
    other = threading.Thread(target=lambda: seen.append(library.error()))
    other.start()
    other.join()
    assert "nowhere.q8" in library.error()
    assert seen == [""]


def test_strided_inputs(residual: tuple[nn.Module, Path], runner: Path) -> None:
    library = Library(runner)
    model, path = residual
    handle = library.open(path)
    x = image(2, 3, 40, 48, seed=5).to(memory_format=torch.channels_last)[:, :, ::2, 8:40]
    assert torch.equal(library.run(handle, x), outputs_of(model, [x])[0])
    library.close(handle)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_a_status(residual: tuple[nn.Module, Path], runner: Path, value: float) -> None:
    library = Library(runner)
    handle = library.open(residual[1])
    x = image(1, 3, 32, 32)
    x[0, 1, 2, 3] = value
    with pytest.raises(RuntimeError, match="3: NaN or inf came to where a value is rounded"):
        library.run(handle, x)
    library.close(handle)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("threads", ["pool", "none"])
def test_other_kinds_of_threads(
    runner_build: ModuleType, residual: tuple[nn.Module, Path], tmp_path: Path, threads: str
) -> None:
    core = Path(__file__).resolve().parents[2] / "build" / "core" / "liboctet_core.a"
    cxx = build.find_compiler()
    if (
        cxx is None
        or os.environ.get("OCTET_EMULATED") == "1"
        or not build.core_is_current(cxx, build.host_arch(), core)
    ):
        pytest.skip("no current build/core/liboctet_core.a: `make core` compiles it")
    settings = runner_build.Settings(cxx, build.host_arch(), tmp_path / "built", threads, core=core)
    runner_build.build(settings)
    model, path = residual
    inputs = [image(2, 3, 96, 96, seed=7)]
    [output] = run_model(settings.out, path, tmp_path, inputs, 1, "--threads", "2", "--repeat", "20")
    [expected] = outputs_of(model, inputs)
    assert torch.equal(output, expected)
    [empty] = run_model(settings.out, path, tmp_path, [image(0, 3, 96, 96)], 1, "--threads", "2")
    assert empty.shape == (0, *expected.shape[1:])
    Library(settings.out).check_forks(path, inputs[0], expected, threads=1 if threads == "none" else 2)
    if shutil.which("ldd"):
        assert (
            "libgomp"
            not in subprocess.run(
                ["ldd", settings.out / "octet-run"], capture_output=True, text=True, check=True
            ).stdout
        )


def test_cmake_compiles_the_same_files_with_the_same_flags(runner_build: ModuleType, tmp_path: Path) -> None:
    if shutil.which("cmake") is None or os.environ.get("OCTET_EMULATED") == "1" or build.find_compiler() is None:
        pytest.skip("no cmake, or no C++ compiler for it")
    source = Path(__file__).resolve().parents[2] / "kernels" / "runner"
    command = ["cmake", "-S", source, "-B", tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DOCTET_THREADS=pool"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = {
        Path(one["file"]).resolve(): one["command"].split()
        for one in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    wanted = [*runner_build.core_sources(build.host_arch()), *(source / name for name in runner_build.LIBRARY)]
    assert set(wanted) == {path for path in compiled if path.name not in runner_build.PROGRAM}
    for path in wanted:
        assert set(runner_build.flags_of(path, "pool", build.host_arch())) <= set(compiled[path]), path


def test_neither_torch_nor_python_and_small(whole_runner: Path) -> None:
    for name in ("octet-run", "liboctet.so"):
        assert (whole_runner / name).stat().st_size <= 1.5 * MEGABYTE
        needed = subprocess.run(["ldd", whole_runner / name], capture_output=True, text=True, check=True).stdout
        undefined = subprocess.run(
            ["nm", "-Du", whole_runner / name], capture_output=True, text=True, check=True
        ).stdout
        for word in ("torch", "python", "_Py", "PyObject", "3c10"):
            assert word not in needed
            assert word not in undefined


def test_the_library_shows_the_c_api_alone(whole_runner: Path) -> None:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", whole_runner / "liboctet.so"], capture_output=True, text=True, check=True
    )
    shown = {line.split()[-1] for line in said.stdout.splitlines()}
    header = (whole_runner / "octet.h").read_text()
    assert shown == set(re.findall(r"^OCTET_API .*?(octet_\w+)\(", header, re.MULTILINE))


class Tail(nn.Module):
    """A step without a kernel between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cumsum(torch.relu(self.first(x)), 2) / 9)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def static(model: nn.Module, *x: Tensor) -> nn.Module:
    return quant.quantize_static(model.eval(), [x] * 4, progress=False)


REFUSED = {
    "a step by itself": (
        lambda: static(Tail(), image(2, 3, 8, 8)),
        r"Tail is 2 native calls and 1 further step, .* 'cumsum_\d+' \(computed by torch in float\)",
    ),
    "a forward that writes": (lambda: static(Counter(), image(2, 8)), "Counter writes to a buffer"),
    "a dynamic model": (
        lambda: quant.quantize_dynamic(nn.Sequential(nn.Linear(8, 8))),
        "give example_inputs, with which it is captured",
    ),
    "a half type": (lambda: static(nn.Sequential(nn.Linear(8, 8)).half(), image(2, 8).half()), "a model in float16"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_one_plan_is_refused_by_name(make: object, message: str, tmp_path: Path) -> None:
    assert callable(make)
    with pytest.raises(quant.ArtefactError, match=message):
        quant.save(make(), tmp_path / "model.q8", runner=True)
    assert not (tmp_path / "model.q8").exists()


def test_a_model_with_programs_of_several_kinds_is_refused(tmp_path: Path) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.first(x)
            return y if mask is None else y * mask

    x = image(4, 8)
    prepared = quant.prepare(Gate().eval(), x, examples=[(x, x)])
    prepared(x), prepared(x, x)
    with pytest.raises(quant.ArtefactError, match="Gate has 2 programs for calls of several kinds"):
        quant.save(quant.convert(prepared), tmp_path / "model.q8", runner=True)


def test_a_hook_is_refused(tmp_path: Path) -> None:
    model = converted("pair")
    model.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(quant.ArtefactError, match="Pair has a forward hook"):
        quant.save(model, tmp_path / "model.q8", runner=True)


def test_a_module_that_was_replaced_is_named(tmp_path: Path) -> None:
    model = converted("pair")
    model.left = nn.Linear(12, 16)
    with pytest.raises(quant.ArtefactError, match=r"left was replaced after quant\.convert"):
        quant.save(model, tmp_path / "model.q8", runner=True)
    assert not (tmp_path / "model.q8").exists()


def test_a_file_keeps_the_model_of_its_export(runner: Path, tmp_path: Path) -> None:
    """What becomes of the model later is not in the file, and is in the next one."""
    model, inputs = converted("pair"), inputs_of("pair", 0)
    quant.save(model, tmp_path / "before.q8", runner=True)
    before = outputs_of(model, inputs)[0]
    model.out.load_state_dict(
        {name: one.neg() for name, one in model.out.state_dict().items() if "bias" in name}, strict=False
    )
    after = outputs_of(model, inputs)[0]
    quant.save(model, tmp_path / "after.q8", runner=True)
    assert not torch.equal(before, after)
    for name, expected in (("before", before), ("after", after)):
        [output] = run_model(runner, tmp_path / f"{name}.q8", tmp_path, inputs, 1)
        assert torch.equal(output, expected)


class Library:
    """liboctet by ctypes, for models of one input and one output."""

    class Tensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("dtype", ctypes.c_int),
            ("rank", ctypes.c_int32),
            ("sizes", ctypes.c_int64 * 8),
            ("strides", ctypes.c_int64 * 8),
        ]

    def __init__(self, runner: Path) -> None:
        if os.environ.get("OCTET_EMULATED") == "1":
            pytest.skip("the emulated machine has no C++ library")
        self.calls = ctypes.CDLL(str(runner / "liboctet.so"))
        self.calls.octet_open.restype = ctypes.c_void_p
        self.calls.octet_open_memory.restype = ctypes.c_void_p
        self.calls.octet_open_memory.argtypes = ctypes.c_char_p, ctypes.c_size_t
        self.calls.octet_error.restype = ctypes.c_char_p

    def open_raw(self, path: bytes) -> int | None:
        return self.calls.octet_open(path)  # type: ignore[no-any-return]

    def open(self, path: Path) -> ctypes.c_void_p:
        model = self.open_raw(str(path).encode())
        assert model, self.error()
        return ctypes.c_void_p(model)

    def close(self, model: ctypes.c_void_p) -> None:
        self.calls.octet_close(model)

    def error(self) -> str:
        return str(self.calls.octet_error().decode())

    def run(self, model: ctypes.c_void_p, x: Tensor) -> Tensor:
        given = self.Tensor(x.data_ptr(), 0, x.dim())
        given.sizes[: x.dim()], given.strides[: x.dim()] = x.shape, x.stride()
        result = self.Tensor()
        self._check(self.calls.octet_plan(model, ctypes.byref(given), ctypes.byref(result)))
        y = torch.empty_strided(result.sizes[: result.rank], result.strides[: result.rank])
        result.data = y.data_ptr()
        self._check(self.calls.octet_run(model, ctypes.byref(given), ctypes.byref(result)))
        return y

    def check_forks(self, path: Path, x: Tensor, expected: Tensor, threads: int = 2) -> None:
        """The same outputs on so many threads, in children before and after the first call, and between these."""
        model = self.open(path)
        self.calls.octet_set_threads(model, 2)

        def is_right() -> bool:
            return torch.equal(self.run(model, x), expected) and len(os.listdir("/proc/self/task")) >= threads

        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(0 if is_right() else 1)
            end, done = time.monotonic() + 60, (0, 0)
            while not done[0] and time.monotonic() < end:
                done = os.waitpid(child, os.WNOHANG)
                time.sleep(0.005)
            if not done[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert done == (child, 0)
            assert torch.equal(self.run(model, x), expected)
        self.close(model)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"{status}: {self.error()}")


def test_a_runner_for_one_model(
    runner_build: ModuleType, whole_runner: Path, residual: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    """Linked from the objects of the whole one, but for the three that say what is left in."""
    model, path = residual
    arch, program = build.host_arch(), [Path(name).stem for name in runner_build.PROGRAM]
    objects = sorted((whole_runner / "objects").glob("*.o"))
    known = {source.stem for source in (*runner_build.core_sources(arch), *map(Path, runner_build.LIBRARY))}
    selection = runner_build.selection_of([path], "portable", arch)
    assert "conv_u8s8_u8" in selection.operations
    assert "rnn_static" not in selection.operations
    settings = runner_build.Settings(compiler(), arch, tmp_path, selection=selection)
    runner_build.link(
        settings, [one for one in objects if one.stem in known], [one for one in objects if one.stem in program]
    )
    whole, small = (tmp_path / name for name in (runner_build.WHOLE, "liboctet.so"))
    assert small.stat().st_size < 0.6 * whole.stat().st_size
    inputs = inputs_of("residual", 1)
    [output] = run_model(tmp_path, path, tmp_path, inputs, 1)
    assert torch.equal(output, outputs_of(model, inputs)[0])
    assert "instruction set portable" in octet_run(tmp_path, path, "--describe").stdout
    quant.save(converted("pyramid"), tmp_path / "other.q8", runner=True)
    numpy.save(tmp_path / "x.npy", image(1, 3, 16, 16).numpy())
    done = octet_run(tmp_path, tmp_path / "other.q8", "--input", tmp_path / "x.npy")
    assert done.returncode == 1
    assert "this program was built without the operation, for another model" in done.stderr


def structures_of_operations() -> dict[str, str]:
    """Each operation of plans by its name, and the structure that core/plan/ir.cpp reads it into."""
    source = (build.SOURCES / "core" / "plan" / "ir.cpp").read_text()
    readers = {
        name: found[1]
        for name, body in re.findall(r"^OperationKind (\w+)\(LineReader& in[^)]*\) \{(.*?)^\}", source, re.S | re.M)
        if (found := re.search(r"op::(\w+)", body))
    }
    table = source[source.index("readers() {") :]
    pairs = re.findall(r'\{"(\w+)",\s*(&\w+|\[\].*?return op::\w+)', table, re.S)
    return {name: readers[read[1:]] if read.startswith("&") else read.rpartition("::")[2] for name, read in pairs}


def test_a_structure_is_left_in_for_each_of_its_operations() -> None:
    """Or a runner for a model that has the one refuses it, as it would another model."""
    structures = structures_of_operations()
    settings = (build.SOURCES / "core" / "plan" / "settings.inc").read_text().split("\n")[1:-2]
    assert sorted(structures) == sorted(line.split(" ")[0] for line in settings)
    lowering = (build.SOURCES / "core" / "plan" / "lower.cpp").read_text()
    named = {kind: set(names.split(" ")) for kind, names in re.findall(r'kNames<op::(\w+)> = "([^"]+)"', lowering)}
    assert named["Conv"] == {"conv_u8s8_u8", "conv_u8s8_f32"}
    for kind, names in named.items():
        assert names == {name for name, structure in structures.items() if structure == kind}, kind


def test_what_no_runner_is_built_for(
    runner_build: ModuleType, residual: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"no model of anybody's")
    for path, words in ((tmp_path / "other", "has no part for the runner"), (tmp_path / "none", "No such file")):
        with pytest.raises(runner_build.BadFile, match=words):
            runner_build.selection_of([path], None, "x86_64")
    with pytest.raises(runner_build.BadFile, match="there is no avx3 for x86_64, expected some of portable, "):
        runner_build.selection_of([residual[1]], "avx2,avx3", "x86_64")


def header_only(document: object) -> bytes:
    """A file of nothing but a part for the runner."""
    header = json.dumps({"__metadata__": {"octet_runner": json.dumps(document)}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            header_only({"plan": 'octet-plan 1\ninputs %0\n%1 = add"+evil() q=%0\noutputs %1'}),
            "is no operation of a plan",
        ),
        (header_only({"plan": "octet-plan 1\ninputs %0\n%1 =\noutputs %1"}), "has no part for the runner"),
        (header_only({"plan": 7}), "has no part for the runner"),
        (header_only([]), "has no part for the runner"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "has no part for the runner"),
    ],
    ids=["a quote", "no operation", "no text", "no document", "deep"],
)
def test_an_altered_file_gives_the_compiler_nothing(
    runner_build: ModuleType, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "altered.q8").write_bytes(content)
    with pytest.raises(runner_build.BadFile, match=words):
        runner_build.operations_of(tmp_path / "altered.q8")

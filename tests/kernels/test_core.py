"""The core without torch and Python: a C++ program links its static library, runs plans, and gives the same bytes."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from quant.kernels import build, dispatch, reference_plan
from torch import Tensor

HERE = Path(__file__).resolve().parent
RUN_PLAN = HERE / "core_program" / "run_plan.cpp"

CLAMPED = "output_zero_point=120 quant_min=30 quant_max=240"
IMAGES = "\n".join([
    reference_plan.HEADER,
    "inputs %0",
    "%1 = quantize x=%0 scale=0.02 zero_point=9",
    "%2 = conv_u8s8_u8 q_x=%1 zero_point=9 q_weight=$0 q_bias=$1 multiplier=$2 stride=1,1 padding=1,1 dilation=1,1 "
    f"groups=1 {CLAMPED}",
    "%3 = conv_u8s8_u8 q_x=%2 zero_point=120 q_weight=$3 q_bias=- multiplier=$4 stride=1,1 padding=1,1 dilation=1,1 "
    f"groups=32 {CLAMPED}",
    "%4 = add q_a=%3 a_zero_point=120 a_multiplier=0.7 q_b=%2 b_zero_point=120 b_multiplier=0.4 output_zero_point=90 "
    "quant_min=90 quant_max=250",
    "%5 = conv_u8s8_u8 q_x=%4 zero_point=90 q_weight=$5 q_bias=$1 multiplier=$2 stride=1,1 padding=1,1 dilation=1,1 "
    f"groups=1 {CLAMPED}",
    "%6 = conv_u8s8_u8 q_x=%5 zero_point=120 q_weight=$6 q_bias=$1 multiplier=$2 stride=2,2 padding=0,0 dilation=1,1 "
    f"groups=2 {CLAMPED}",
    "%7 = max_pool q=%6 kernel=2,2 stride=1,1",
    "%8 = mean q=%7 zero_point=120 dim=2,3 keepdim=False multiplier=0.83 output_zero_point=100",
    "%9 = linear_u8s8_u8 q_x=%8 zero_point=100 q_weight=$7 q_bias=- multiplier=$8 output_zero_point=7 quant_min=0 "
    "quant_max=255",
    "%10 = dequantize q=%5 scale=0.1 zero_point=120",
    "outputs %9 %10 %4",
])  # fmt: skip
TOKENS = "\n".join([
    reference_plan.HEADER,
    "inputs %0",
    "%1 = quantize x=%0 scale=0.02 zero_point=128",
    "%2 = linear_u8s8_f32 q_x=%1 zero_point=128 q_weight=$0 q_bias=$1 multiplier=$2",
    "%3 = reshape x=%2 shape=%0.0,-1,4,16",
    "%4 = permute x=%3 dims=0,2,1,3",
    "%5 = attention q=%4 k=%4 v=%4 scale=- causal=False",
    "%6 = permute x=%5 dims=0,2,1,3",
    "%7 = reshape x=%6 shape=%0.0,-1,64",
    "%8 = add_f32 a=%7 b=%0",
    "%9 = layer_norm x=%8 weight=$3 bias=- eps=1e-05",
    "%10 = quantize x=%9 scale=0.03 zero_point=120",
    "outputs %9 %10",
])  # fmt: skip


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def weight(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, generator=generator()).to(torch.int8)


def multiplier(n: int) -> Tensor:
    return torch.rand(n, generator=generator()) / 5000


def image_constants() -> list[Tensor]:
    bias = torch.randint(-9999, 9999, (32,), generator=generator()).to(torch.int32)
    return [
        weight(32, 3, 3, 3), bias, multiplier(32), weight(32, 1, 3, 3), multiplier(32),
        weight(32, 32, 3, 3), weight(32, 16, 1, 1), weight(10, 32), multiplier(10),
    ]  # fmt: skip


def token_constants() -> list[Tensor]:
    bias = torch.randint(-999, 999, (64,), generator=generator()).to(torch.int32)
    return [weight(64, 64), bias, multiplier(64), torch.rand(64, generator=generator())]


@pytest.fixture(scope="module")
def program(core_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, linked with the core's static library."""
    return link(RUN_PLAN, [core_library], tmp_path_factory.mktemp("core") / "run_plan")


def link(source: Path, objects: list[Path], made: Path, extra: Sequence[str] = ()) -> Path:
    """A C++ program of one source and what it is linked with: objects, then a library for what they lack."""
    cxx = build.find_compiler()
    assert cxx
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", *extra, "-iquote", build.SOURCES]
    command = [cxx, *flags, source, *objects, "-fopenmp", "-o", made]
    linked = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert linked.returncode == 0, linked.stderr
    return made


def packed(*parts: int | bytes | list[int]) -> bytes:
    """Numbers of 8 bytes; bytes and lists after their length."""
    out = b""
    for part in parts:
        if isinstance(part, int):
            out += struct.pack("<q", part)
        elif isinstance(part, bytes):
            out += struct.pack("<q", len(part)) + part
        else:
            out += struct.pack(f"<q{len(part)}q", len(part), *part)
    return out


def described(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


Inputs = list[Tensor] | list[tuple[Tensor, ...]]
"""Of one call after the other: the input of a plan that has one, or all of them."""


def run(program: Path, folder: Path, text: str, constants: list[Tensor], inputs: Inputs, isa: str = "") -> bytes:
    """The bytes of the outputs of each call, one after the other."""
    return run_and_say(program, folder, text, constants, inputs, isa)[0]


def run_and_say(
    program: Path, folder: Path, text: str, constants: list[Tensor], inputs: Inputs, isa: str
) -> tuple[bytes, str]:
    """The bytes of the outputs of each call, one after the other, and what the program wrote to stderr."""
    message = packed(text.encode(), len(constants))
    for constant in constants:
        message += packed(
            str(constant.dtype).removeprefix("torch.").encode(), list(constant.shape), described(constant)
        )
    message += packed(len(inputs))
    for call in inputs:
        tensors = call if isinstance(call, tuple) else (call,)
        message += packed(len(tensors))
        for x in tensors:
            message += packed(int(x.dtype == torch.float32), list(x.shape), list(x.stride()), described(x))
    (folder / "in").write_bytes(message)
    environment = {**os.environ, "QUANT_ISA": isa} if isa else None
    done = subprocess.run(
        [program, folder / "in", folder / "out"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return (folder / "out").read_bytes(), done.stderr


def in_memory(tensor: Tensor) -> bytes:
    """The bytes as they lie: channels last where it does."""
    return described(tensor.movedim(1, -1) if tensor.dim() == 4 and not tensor.is_contiguous() else tensor)


@pytest.mark.parametrize("isa", ["", *(one.name for one in build.instruction_sets(build.host_arch()))])
def test_images(program: Path, isa: str, tmp_path: Path) -> None:
    """On this machine's best instruction set, and on each that it may be lowered to."""
    inputs = [torch.randn(shape, generator=generator()) for shape in [(1, 3, 24, 24), (2, 3, 9, 11), (1, 3, 24, 24)]]
    expected = b""
    for x in inputs:
        for y in reference_plan.run_plan([x], image_constants(), IMAGES):
            expected += in_memory(y)
    assert run(program, tmp_path, IMAGES, image_constants(), inputs, isa) == expected


def test_tokens(program: Path, extension: None, tmp_path: Path) -> None:
    """Reals have the bits of the extension: no reference fixes the order of their sums."""
    inputs = [torch.randn(shape, generator=generator()) for shape in [(2, 7, 64), (1, 13, 64)]]
    expected = b""
    for x in inputs:
        for y in torch.ops.octet.run_plan([x], token_constants(), TOKENS, "native"):
            expected += in_memory(y)
    assert dispatch.available()["native"] == ""
    assert run(program, tmp_path, TOKENS, token_constants(), inputs) == expected


def test_an_error_is_an_exception_that_names_the_line(program: Path, tmp_path: Path) -> None:
    text = IMAGES.replace("groups=32", "groups=5")
    (tmp_path / "in").write_bytes(packed(text.encode(), 0, 1, 1, 1, [1, 3, 4, 4], [48, 16, 4, 1], b"\0" * 192))
    done = subprocess.run([program, tmp_path / "in", tmp_path / "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("plan line '%2 = conv_u8s8_u8 q_x=%1 ")
    assert "there are 0 constants" in done.stderr


CONV = "q_weight=$0 q_bias=- multiplier=$1 stride=1,1 padding=1,1 dilation=1,1 groups=1"
ADD = "a_zero_point=0 a_multiplier=0.5 b_zero_point=0 b_multiplier=0.5"
BYTES = "output_zero_point=0 quant_min=0 quant_max=255"
PASSES = {
    "a sum that alone reads a convolution": (
        [f"%1 = conv_u8s8_u8 q_x=%0 zero_point=0 {CONV} {BYTES}", f"%2 = add q_a=%0 {ADD} q_b=%1 {BYTES}"],
        "%2",
        ["0 sum 1"],
    ),
    "a convolution that is read twice": (
        [f"%1 = conv_u8s8_u8 q_x=%0 zero_point=0 {CONV} {BYTES}", f"%2 = add q_a=%1 {ADD} q_b=%1 {BYTES}"],
        "%2",
        [],
    ),
    "a convolution that is an output": (
        [f"%1 = conv_u8s8_u8 q_x=%0 zero_point=0 {CONV} {BYTES}", f"%2 = add q_a=%0 {ADD} q_b=%1 {BYTES}"],
        "%2 %1",
        [],
    ),
    "a convolution whose size is read": (
        [
            f"%1 = conv_u8s8_u8 q_x=%0 zero_point=0 {CONV} {BYTES}",
            f"%2 = add q_a=%0 {ADD} q_b=%1 {BYTES}",
            "%3 = reshape x=%2 shape=%1.0,-1",
        ],
        "%3",
        [],
    ),
    "a convolution to reals": ([f"%1 = conv_u8s8_f32 q_x=%0 zero_point=0 {CONV}"], "%1", []),
    "a sum, its norm and a rounding": (
        [
            "%1 = add_f32 a=%0 b=%0",
            "%2 = layer_norm x=%1 weight=- bias=- eps=1e-05",
            "%3 = quantize x=%2 scale=0.1 zero_point=0",
            "%4 = linear_u8s8_u8 q_x=%3 zero_point=0 q_weight=$0 q_bias=- multiplier=$1 " + BYTES,
        ],
        "%2 %4",
        ["0 norm 1", "1 rounding 2", "2 for_linear"],
    ),
    "a sum that is an output": (
        ["%1 = add_f32 a=%0 b=%0", "%2 = layer_norm x=%1 weight=- bias=- eps=1e-05"],
        "%1 %2",
        [],
    ),
    "reals that are an output": (
        ["%1 = dequantize q=%0 scale=0.1 zero_point=0", "%2 = dequantize q=%0 scale=0.1 zero_point=0"],
        "%2",
        ["1 given_out"],
    ),
}


@pytest.mark.parametrize(("lines", "outputs", "expected"), PASSES.values(), ids=list(PASSES))
def test_passes(program: Path, lines: list[str], outputs: str, expected: list[str], tmp_path: Path) -> None:
    """Text in, and what the passes say of it: operations by their place."""
    (tmp_path / "text").write_text("\n".join([reference_plan.HEADER, "inputs %0", *lines, f"outputs {outputs}"]))
    done = subprocess.run([program, "--passes", tmp_path / "text"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == expected


def test_the_program_needs_neither_torch_nor_python(program: Path) -> None:
    if shutil.which("ldd") is None:
        pytest.skip("no ldd")
    needed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    assert "libgomp" in needed or "libomp" in needed
    for name in ("torch", "c10", "python"):
        assert name not in needed, needed

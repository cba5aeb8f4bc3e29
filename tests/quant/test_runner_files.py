"""Files and inputs that the runner refuses, each with a message that says what is wrong; and altered files."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from quant.kernels import build

import quant
from quant.artefact.runner_document import DOCUMENT, VERSION
from quant.artefact.runner_file import read_runner_file
from quant.export import PlannedModel

from .fuzz_runner import fuzz, fuzz_calls
from .runner_models import converted, image, needs_kernels, octet_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "model.q8"
    quant.save(converted("residual"), path, runner=True)
    return path.read_bytes()


def taken_apart(saved: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(saved[:8], "little")
    return json.loads(saved[8 : 8 + length]), saved[8 + length :]


def put_together(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def with_document(saved: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its document changed, and the checksum of the new one."""
    header, data = taken_apart(saved)
    document = json.loads(header["__metadata__"][DOCUMENT])
    change(document)
    text = json.dumps(document)
    header["__metadata__"][DOCUMENT] = text
    header["__metadata__"][f"{DOCUMENT}_crc32"] = str(zlib.crc32(text.encode()))
    return put_together(header, data)


def with_header(saved: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    header, data = taken_apart(saved)
    change(header)
    return put_together(header, data)


def first_weight(header: dict[str, Any]) -> dict[str, Any]:
    return header["stem.q_weight"]  # type: ignore[no-any-return]


def flipped(saved: bytes, place: int) -> bytes:
    return saved[:place] + bytes([saved[place] ^ 1]) + saved[place + 1 :]


def other_document(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda saved: with_document(saved, lambda document: document.update({key: value}))


def other_plan(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(document: dict[str, Any]) -> None:
        assert old in document["plan"]
        document["plan"] = document["plan"].replace(old, new)

    return lambda saved: with_document(saved, change)


def other_constant(**entries: Any) -> Callable[[bytes], bytes]:
    return lambda saved: with_document(saved, lambda document: document["constants"][0].update(entries))


TWICE = b'{"__metadata__": {}, "a": 1, "a": 2}'

BAD_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda saved: b"", "it is too short for a safetensors file"),
    "no safetensors": (lambda saved: b"GIF89a" * 99, "it is no safetensors file, or it was cut"),
    "cut in its header": (lambda saved: saved[:1000], "it is no safetensors file, or it was cut"),
    "cut in its tensors": (lambda saved: saved[:-100], "lies behind the end of the file: it was cut"),
    "a bit of a tensor": (lambda saved: flipped(saved, len(saved) - 50), "does not match its checksum"),
    "a newer version": (
        other_document("version", VERSION + 1),
        f"its part for the runner has version {VERSION + 1} (octet-quant ",
    ),
    "a document without its checksum": (
        lambda saved: with_header(saved, lambda header: header["__metadata__"].update({DOCUMENT: "{}"})),
        "the runner's part does not match its checksum",
    ),
    "without a part for the runner": (
        lambda saved: with_header(saved, lambda header: header["__metadata__"].pop(DOCUMENT)),
        "it has no part for the runner: write it by quant.save(model, path, runner=True)",
    ),
    "of another program": (
        lambda saved: with_header(saved, lambda header: header.pop("__metadata__")),
        "it is a safetensors file that quant.save did not write",
    ),
    "a missing tensor": (
        lambda saved: with_header(saved, lambda header: header.pop("stem.q_weight")),
        "it lacks the tensor 'stem.q_weight'",
    ),
    "other sizes": (
        lambda saved: with_header(saved, lambda header: first_weight(header).update(shape=[16, 3, 49])),
        "tensor 'stem.q_weight' has sizes (16, 3, 49), expected (16, 3, 7, 7)",
    ),
    "more sizes than bytes": (
        lambda saved: with_header(saved, lambda header: first_weight(header).update(shape=[16, 3, 7, 8])),
        "tensor 'stem.q_weight' has 2352 bytes, expected 2688",
    ),
    "sizes beyond all memory": (
        lambda saved: with_header(saved, lambda header: first_weight(header).update(shape=[1 << 60, 1 << 60])),
        "tensor 'stem.q_weight' has impossible sizes",
    ),
    "another dtype": (
        lambda saved: with_header(saved, lambda header: first_weight(header).update(dtype="U8")),
        "tensor 'stem.q_weight' is uint8, expected int8",
    ),
    "offsets backwards": (
        lambda saved: with_header(saved, lambda header: first_weight(header).update(data_offsets=[9, 3])),
        "tensor 'stem.q_weight' has damaged offsets",
    ),
    "a name that occurs twice": (
        lambda saved: len(TWICE).to_bytes(8, "little") + TWICE,
        "damaged JSON: 'a' is there twice",
    ),
    "an operation of tomorrow": (other_plan("max_pool q=", "max_pool9 q="), "no such operation"),
    "a setting out of bounds": (other_plan("zero_point=0 ", "zero_point=256 "), "zero_point is 256, expected 0 to 255"),
    "a constant that is not there": (other_constant(tensor="nothing"), "it lacks the tensor 'nothing'"),
    "a step too few": (lambda saved: with_document(saved, lambda document: document["steps"].pop()), "names for"),
    "an input too few": (other_document("inputs", []), "its plan has 1 inputs and 1 outputs, expected 0 and 1"),
}


@pytest.mark.parametrize(("change", "message"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_a_bad_file(saved: bytes, runner: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "bad.q8"
    path.write_bytes(change(saved))
    done = octet_run(runner, path, "--describe")
    assert done.returncode == 1
    assert done.stderr.startswith(f"octet-run: {path}: ")
    assert message in done.stderr


@needs_kernels
@pytest.mark.parametrize(("change", "message"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_a_bad_file_in_python(saved: bytes, tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    """`quant run` says the same of it, but where safetensors refuses the file."""
    path = tmp_path / "bad.q8"
    path.write_bytes(change(saved))
    with pytest.raises(ValueError) as raised:  # an ArtefactError, or the plan's own when it is run
        PlannedModel(read_runner_file(path), "native")(image(1, 3, 32, 32))
    said = str(raised.value)
    assert message.removeprefix("it ") in said or f"{path} is no safetensors file, or it was cut: " in said


def with_input(**entries: Any) -> Callable[[bytes], bytes]:
    return lambda saved: with_document(saved, lambda document: document["inputs"][0].update(entries))


@pytest.mark.parametrize("name", ["größe", "√x > €", "𝄞 𠀀鿿 \U0010ffff", 'a "word"\\n/', "\x7f"])
def test_a_name_of_any_letters(saved: bytes, runner: Path, tmp_path: Path, name: str) -> None:
    """Python writes them as ASCII: escapes of one unit, or of two beyond 16 bits."""
    (tmp_path / "model.q8").write_bytes(with_input(name=name)(saved))
    done = octet_run(runner, tmp_path / "model.q8", "--describe")
    assert done.stdout.startswith(f"input {name} float32 (any, 3, any, any)\n"), done.stderr


def test_an_input_of_any_rank(saved: bytes, runner: Path, tmp_path: Path) -> None:
    (tmp_path / "model.q8").write_bytes(with_input(shape=None, fixed_rank=False)(saved))
    done = octet_run(runner, tmp_path / "model.q8", "--describe")
    assert done.stdout.startswith("input x float32 of any rank\n"), done.stderr


def unescaped(old: str, new: str) -> Callable[[bytes], bytes]:
    """The file with other bytes in the name of its input."""
    assert len(old) == len(new)

    def change(saved: bytes) -> bytes:
        changed = with_input(name="here" + old)(saved)
        header, data = taken_apart(changed)
        text = header["__metadata__"][DOCUMENT].replace("here" + json.dumps(old)[1:-1], "here" + new)
        header["__metadata__"] |= {DOCUMENT: text, f"{DOCUMENT}_crc32": str(zlib.crc32(text.encode()))}
        return put_together(header, data)

    return change


BAD_INPUT_ENTRIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "the first half of a letter": (with_input(name="\ud834"), "damaged JSON: half a pair in a string"),
    "its second half": (with_input(name="\udd1e"), "damaged JSON: half a pair in a string"),
    "two first halves": (with_input(name="\ud834\ud834"), "damaged JSON: half a pair in a string"),
    "an escape of no digits": (unescaped("______", r"\u12x4"), "damaged JSON: \\u without four digits"),
    "an escape of no letter": (unescaped("__", r"\q"), "damaged JSON: an unknown escape in a string"),
    "a name that moves the cursor": (with_input(name="x\x1b[2J"), "a name has a control character"),
    "a dtype that no input has": (
        with_input(dtype="float16"),
        "'x' is float16, expected float32, uint8, bool or int64",
    ),
    "nine dimensions": (with_input(shape=[1] * 9), "'x' has 9 dimensions, expected at most 8"),
    "sizes of another type": (with_input(shape=[1.5]), "shape is not an integer"),
}


@pytest.mark.parametrize(("change", "message"), BAD_INPUT_ENTRIES.values(), ids=list(BAD_INPUT_ENTRIES))
def test_an_input_that_no_file_has(
    saved: bytes, runner: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    test_a_bad_file(saved, runner, tmp_path, change, message)


def test_a_file_that_is_not_there(runner: Path, tmp_path: Path) -> None:
    done = octet_run(runner, tmp_path / "none.q8", "--describe")
    assert (done.returncode, done.stderr) == (
        1,
        f"octet-run: cannot read {tmp_path}/none.q8: No such file or directory\n",
    )


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_an_output_that_is_not_what_the_file_says(saved: bytes, runner: Path, tmp_path: Path, dtype: str) -> None:
    """Who makes room by `octet_describe_output` would make too little."""
    changed = with_document(saved, lambda document: document["outputs"][0].update(dtype=dtype))
    (tmp_path / "bad.q8").write_bytes(changed)
    numpy.save(tmp_path / "x.npy", image(1, 3, 32, 32).numpy())
    done = octet_run(runner, tmp_path / "bad.q8", "--input", tmp_path / "x.npy")
    assert done.returncode == 1
    assert f"is float32, and the file says {dtype}" in done.stderr


def test_a_file_without_the_part_for_the_runner(runner: Path, tmp_path: Path) -> None:
    quant.save(converted("pair"), tmp_path / "model.q8")
    done = octet_run(runner, tmp_path / "model.q8", "--describe")
    assert "it has no part for the runner: write it by quant.save(model, path, runner=True)" in done.stderr


LAYER = "layer 'stem': plan line '%2 = conv_u8s8_u8 "
BAD_INPUTS = {
    "a dtype": (image(1, 3, 32, 32).to(torch.uint8), ["input 'x' is uint8, expected float32"]),
    "a rank": (image(3, 32, 32), ["input 'x' has 3 dimensions, expected 4"]),
    "channels": (image(1, 4, 32, 32), [LAYER, "; input 'x' is (1, 4, 32, 32), at export it was (any, 3, any, any)"]),
    "a size": (image(1, 3, 0, 32), [LAYER]),
}


@pytest.mark.parametrize(("x", "messages"), BAD_INPUTS.values(), ids=list(BAD_INPUTS))
def test_a_bad_input(saved: bytes, runner: Path, tmp_path: Path, x: torch.Tensor, messages: list[str]) -> None:
    (tmp_path / "model.q8").write_bytes(saved)
    numpy.save(tmp_path / "x.npy", x.numpy())
    done = octet_run(runner, tmp_path / "model.q8", "--input", tmp_path / "x.npy")
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr


@needs_kernels
@pytest.mark.parametrize(("x", "messages"), BAD_INPUTS.values(), ids=list(BAD_INPUTS))
def test_a_bad_input_in_python(saved: bytes, tmp_path: Path, x: torch.Tensor, messages: list[str]) -> None:
    """The same words of the same file."""
    (tmp_path / "model.q8").write_bytes(saved)
    with pytest.raises((TypeError, ValueError)) as raised:
        quant.load(tmp_path / "model.q8", backend="native")(x)
    for message in messages:
        assert message in str(raised.value)


BAD_CALLS = {
    "no model": ([], "no model"),
    "no input": (["model.q8"], "no --input for 'x'"),
    "two inputs": (["model.q8", "--input", "x.npy", "--input", "x.npy"], "the model has 1 inputs"),
    "two outputs": (["model.q8", "--input", "x.npy", "--output", "a", "--output", "b"], "the model has 1 outputs"),
    "a word for a number": (["model.q8", "--repeat", "often"], "--repeat is 'often', expected a number"),
    "no threads": (["model.q8", "--threads", "0"], "--threads is '0', expected a number from 1"),
    "an output that is not there": (
        ["model.q8", "--input", "x.npy", "--output", "z=y.bin"],
        "--output z=y.bin: the model has no output 'z'; its outputs are 'output'",
    ),
    "an unknown option": (["model.q8", "--fast"], "unknown argument '--fast'"),
}


@pytest.mark.parametrize(("words", "message"), BAD_CALLS.values(), ids=list(BAD_CALLS))
def test_a_bad_call(saved: bytes, runner: Path, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "model.q8").write_bytes(saved)
    numpy.save(tmp_path / "x.npy", image(1, 3, 32, 32).numpy())
    there = [str(tmp_path / word) if word.endswith((".q8", ".npy")) else word for word in words]
    done = octet_run(runner, *there)
    assert done.returncode == 2
    assert done.stderr.startswith(f"octet-run: {message}\nusage: octet-run MODEL ")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00\xff\xff", b"no array"], ids=["empty", "cut", "text"])
def test_a_bad_array(saved: bytes, runner: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.q8").write_bytes(saved)
    (tmp_path / "x.npy").write_bytes(content)
    done = octet_run(runner, tmp_path / "model.q8", "--input", tmp_path / "x.npy")
    assert done.returncode == 1
    assert f"{tmp_path}/x.npy: it " in done.stderr


@pytest.fixture(scope="module")
def fuzzers(runner_build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The fuzzers, with the sanitizers around the core that `make build` compiled alone."""
    cxx, core = build.find_compiler(), Path(__file__).resolve().parents[2] / "build" / "core" / "liboctet_core.a"
    if (
        os.environ.get("OCTET_EMULATED") == "1"
        or cxx is None
        or not build.core_is_current(cxx, build.host_arch(), core)
    ):
        pytest.skip("no current build/core/liboctet_core.a: `make core` compiles it")
    folder = tmp_path_factory.mktemp("fuzzers")
    settings = runner_build.Settings(cxx, build.host_arch(), folder, core=core, flags=runner_build.UNDEFINED)
    try:
        programs: list[Path] = runner_build.build_fuzz(settings, names=("fuzz", "fuzz_calls"))
    except runner_build.kernels_build.BuildError as error:
        if "asan" in str(error) or "ubsan" in str(error):
            pytest.skip("the compiler has no AddressSanitizer, or no UndefinedBehaviorSanitizer")
        raise
    return programs


def test_altered_files_end_nothing(fuzzers: list[Path], tmp_path: Path) -> None:
    """A slice of `make fuzz-runner`."""
    done = fuzz(fuzzers[0], 400, 7, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(", 0 failures\n")


def test_wrong_calls_are_refused(fuzzers: list[Path], tmp_path: Path) -> None:
    """A slice of `make fuzz-runner-calls`."""
    done = fuzz_calls(fuzzers[1], 200, 1, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "200 sequences of calls, 0 failures\n"

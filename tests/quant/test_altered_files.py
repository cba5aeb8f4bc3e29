"""What `make fuzz-files` found in altered files, one by one, and a slice of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from quant.calibrate.checkpoint import KEY
from quant.calibrate.errors import CheckpointError

import quant
from quant import calibrate
from quant.cli.errors import UserError
from quant.runtime.tree_reader import Reader

from . import altered_files, fuzz_files
from .altered_files import SafeTensors

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")

Edit = Callable[[SafeTensors], None]


@pytest.fixture(scope="module", autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before, fuzz_files.ROOT = fuzz_files.ROOT, tmp_path_factory.mktemp("files")
    yield
    fuzz_files.ROOT = before


def refused(kind: fuzz_files.Kind, path: Path, edit: Edit, seal: Callable[[SafeTensors, bool], dict[str, str]]) -> str:
    """The error of reading a file in which something is altered and the checksums are right; it names the file."""
    file = SafeTensors.read(kind.file)
    edit(file)
    path.write_bytes(file.bytes(seal(file, True)))
    with pytest.raises(kind.refusals) as caught:
        kind.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def at(*places: Any, value: Any = None, key: str = "octet") -> Edit:
    """Set a place of the manifest, or remove it."""

    def edit(file: SafeTensors) -> None:
        *outer, last = places
        holder = file.documents[key]
        for one in outer:
            holder = holder[one]
        if value is None:
            del holder[last]
        else:
            holder[last] = value

    return edit


def without(name: str) -> Edit:
    return lambda file: (
        file.tensors.__delitem__(name)
        or [
            one["checksums"].pop(name, None)
            for one in file.documents.values()
            if isinstance(one, dict) and "checksums" in one
        ]
    )


DYNAMIC: dict[str, tuple[Edit, str]] = {
    "no layers' form": (at("modules", "head", value=3), "layer 'head' of 'modules'"),
    "settings that are no table": (at("modules", "head", "inner", "", value=[1]), "layer 'head' of 'modules'"),
    "a setting that no layer has": (at("modules", "head", "inner", "", "forward", value="x"), "setting 'forward'"),
    "a setting of another kind": (at("modules", "head", "inner", "", "terms", value=2**40), "setting 'terms'"),
    "settings of no layer": (at("modules", "head", "inner", "x.y", value={}), "x"),
    "a report of other entries": (at("report", 0, "name", value=7), "'report'"),
    "a name for no tensor": (at("same", value={"more": "nothing"}), "lacks the tensor 'nothing'"),
    "names that are no table": (at("same", value=3), "'same'"),
    "no scale": (without("attention.in_proj.scale"), "in_proj.scale"),
    "an infinite version": (at("schema", value=float("inf")), "damaged manifest"),
}


@pytest.mark.parametrize(("edit", "message"), DYNAMIC.values(), ids=list(DYNAMIC))
def test_dynamic(tmp_path: Path, edit: Edit, message: str) -> None:
    assert message in refused(fuzz_files.dynamic(), tmp_path / "model.q8", edit, altered_files.seal_artefact)


STATIC: dict[str, tuple[Edit, str]] = {
    "no ranges of a state": (without("gru.state_scale"), "its ranges do not fit its layers"),
    "no recurrent weight": (without("gru.directions.0.scale_hh"), "lacks scale_hh"),
    "programs that are no table": (at("programs", value={"": 3}), "'programs'"),
    "no description": (at("static", "", "layers"), "static"),
}


@pytest.mark.parametrize(("edit", "message"), list(STATIC.values())[:3], ids=list(STATIC)[:3])
def test_static(tmp_path: Path, edit: Edit, message: str) -> None:
    assert message in refused(fuzz_files.recurrent(), tmp_path / "model.q8", edit, altered_files.seal_artefact)


def test_a_backend_that_nobody_has(tmp_path: Path) -> None:
    edit = at("programs", "", "units", 0, "programs", 0, "backend", value="fast")
    said = refused(fuzz_files.convolutional(), tmp_path / "model.q8", edit, altered_files.seal_artefact)
    assert "no backend is called 'fast'" in said


def test_an_onnx_node_that_leaves_out_what_it_needs(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = onnx.load_from_string(fuzz_files.onnx_file().file)
    [*_, node] = [one for one in model.graph.node if one.op_type == "Conv"]
    node.input[0] = ""
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"model.onnx: .*Conv.*an input is left out"):
        quant.load_onnx(tmp_path / "model.onnx")


def test_a_description_without_layers(tmp_path: Path) -> None:
    refused(
        fuzz_files.captured_again(), tmp_path / "model.q8", STATIC["no description"][0], altered_files.seal_artefact
    )


@pytest.mark.parametrize("sizes", [[2**40], [2**31, 2**31], [-1], "x", [True]], ids=str)
def test_an_example_of_impossible_sizes(tmp_path: Path, sizes: Any) -> None:
    """Refused before there is memory for it."""
    example = {"tuple": [{"tuple": [{"tensor": sizes, "dtype": "float32"}]}, {"dict": {}}]}
    edit = at("static", "", "example", value=example)
    said = refused(fuzz_files.captured_again(), tmp_path / "model.q8", edit, altered_files.seal_artefact)
    assert "example inputs: " in said


def test_a_manifest_that_is_nested_without_end(tmp_path: Path) -> None:
    kind = fuzz_files.dynamic()
    said = refused(kind, tmp_path / "model.q8", at("report", value=altered_files.DEEP), altered_files.seal_artefact)
    assert "damaged manifest" in said


CALIBRATION: dict[str, tuple[Edit, str]] = {
    "no number of batches": (at("batches", key=KEY), "batches"),
    "less than no batches": (at("batches", value=-1, key=KEY), "batches"),
    "observers of another form": (at("observers", 0, value="x", key=KEY), "observers"),
    "no version": (at("schema", key=KEY), "version None"),
    "no table": (lambda file: file.documents.update({KEY: [1]}), "no table"),
}


@pytest.mark.parametrize(("edit", "message"), CALIBRATION.values(), ids=list(CALIBRATION))
def test_calibration(tmp_path: Path, edit: Edit, message: str) -> None:
    seal = altered_files.seal_checkpoint(KEY)
    assert message in refused(fuzz_files.calibration(), tmp_path / "checkpoint", edit, seal)


ROUNDING = "octet.rounding"


def zeroed(name: str) -> Edit:
    def edit(file: SafeTensors) -> None:
        file.tensors[name].data = bytes(4) + file.tensors[name].data[4:]

    return edit


def shaped(name: str, times: int = 1) -> Edit:
    def edit(file: SafeTensors) -> None:
        file.tensors[name].shape[:0] = [1] * times

    return edit


@pytest.mark.parametrize("make", [fuzz_files.gptq, fuzz_files.learned_rounding], ids=["gptq", "learned"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (at("errors", key=ROUNDING), "no errors"),
        (at("errors", "first", value=["x", 1], key=ROUNDING), "no errors"),
        (without("first/q_weight"), "lacks the weight of 'first'"),
        (zeroed("first/scale"), "the scale of 'first' is none"),
        (shaped("first/scale", 70), "the scale of 'first' is none"),
        (shaped("first/q_weight"), "q_weight of 'first' is int8 (1, 8, 6) there and int8 (8, 6) here"),
    ],
    ids=["no errors", "errors that are no numbers", "no weight", "a scale of 0", "71 sizes", "another shape"],
)
@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_rounding(tmp_path: Path, make: Callable[[], fuzz_files.Kind], edit: Edit, message: str) -> None:
    seal = altered_files.seal_checkpoint(ROUNDING)
    assert message in refused(make(), tmp_path / "checkpoint", edit, seal)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("scores", {'["float"]': {"value": "x", "samples": None}}, "no measurement of 'scores'"),
        ("scores", {'["nothing"]': {"value": 1.0, "samples": None}}, "nothing"),
        ("layers", {"harm": {"nobody": 1.0}}, "layers that the model does not have"),
        ("tuned", {'["float"]': None}, "no measurement of 'tuned'"),
        ("more", {}, "no kind of measurement"),
        ("backends", 3, "lacks a table"),
    ],
)
@pytest.mark.filterwarnings("ignore::quant.calibrate.CalibrationWarning")
def test_search(tmp_path: Path, place: str, value: Any, message: str) -> None:
    kind, path = fuzz_files.search(), tmp_path / "search.json"
    document = json.loads(kind.file)
    document["measured"][place] = value
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as caught:
        kind.load(path)
    assert str(path) in str(caught.value)


def test_ranges(tmp_path: Path) -> None:
    kind, path = fuzz_files.ranges(), tmp_path / "ranges.json"
    document = json.loads(kind.file)
    name = next(iter(document["ranges"]))
    document["ranges"][name]["low"] = -(10**400)
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match="a number that no float holds") as caught:
        kind.load(path)
    assert str(path) in str(caught.value)
    path.write_text('{"ranges": ' + altered_files.WRITTEN[altered_files.DEEP] + "}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"ranges\.json: "):
        kind.load(path)


def test_many_ranges_take_no_time() -> None:
    """Names were counted one by one: of 20,000 that takes 4 seconds, of more hours."""
    from quant.calibrate.ranges_file import _refusing_twins

    names = [(str(number), None) for number in range(200_000)]
    assert len(_refusing_twins(names)) == 200_000
    with pytest.raises(ValueError, match="'7' stands there twice"):
        _refusing_twins([*names, ("7", None)])


def test_a_recipe_for_no_backend() -> None:
    with pytest.raises(quant.RecipeError, match="Recipe: backend is 7, expected a name or None"):
        quant.Recipe.from_dict({"rules": [], "backend": 7})


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_folder_whose_tables_are_nested_without_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(altered_files.WRITTEN[altered_files.DEEP], encoding="utf-8")
    with torch.device("meta"):
        model = fuzz_files.Small()
    with pytest.raises(ValueError, match=name):
        quant.load_quantized(model, tmp_path)


@pytest.mark.parametrize(("place", "byte"), [(119, 223), (0, 0)], ids=str)
def test_pickles(tmp_path: Path, place: int, byte: int) -> None:
    kind, path = fuzz_files.pickled(), tmp_path / "weights.pt"
    path.write_bytes(kind.file[:place] + bytes([byte]) + kind.file[place + 1 :])
    with pytest.raises(UserError, match=r"weights\.pt"):
        kind.load(path)


@pytest.mark.parametrize("dtype", ["V8", "S", "O"])
def test_a_scalar_that_would_be_as_many_bytes(dtype: str) -> None:
    """numpy makes a thousand million bytes of numpy.void(10**9)."""
    with pytest.raises(ValueError, match="no value of"):
        Reader(f"numpy('{dtype}', 1000000000)", 1, []).value()
    assert Reader("numpy('int16', 7)", 1, []).value() == numpy.int16(7)


def test_a_checkpoint_of_calibration_is_still_read(tmp_path: Path) -> None:
    model = quant.prepare(fuzz_files.made(fuzz_files.Small), fuzz_files.ROWS)
    path = tmp_path / "checkpoint"
    for _ in range(2):
        calibrate.run(model, [fuzz_files.ROWS] * 2, progress=False, checkpoint=path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and limits of memory, are Linux's")
@pytest.mark.skipif(
    os.environ.get("OCTET_FAST_TESTS") == "1", reason="OCTET_FAST_TESTS=1: a process that imports torch"
)
def test_a_slice() -> None:
    command = [sys.executable, "tests/quant/fuzz_files.py", "--count", "300"]
    environment = {**os.environ, "OCTET_FUZZ_SECONDS": "60"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout.endswith("; 0 failures\n")

"""ONNX files on disk: written whole or not at all, and refused by name where they are broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quant
from quant.onnx.export import file_of
from quant.onnx.file import Node, OnnxFile
from quant.onnx.load_operators import plan_of
from quant.onnx.load_plan import NotTranslated

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    return quant.quantize_static(model, [torch.randn(2, 3, 8, 8)], progress=False)


def changed(file: OnnxFile, op: str, **changes: Any) -> OnnxFile:
    """The file with the first node of a kind changed."""
    place = next(place for place, node in enumerate(file.nodes) if node.op == op)
    nodes = list[Node](file.nodes)
    nodes[place] = dataclasses.replace(nodes[place], **changes)
    return dataclasses.replace(file, nodes=tuple(nodes))


def with_constant(file: OnnxFile, name: str, value: torch.Tensor) -> OnnxFile:
    return dataclasses.replace(file, constants={**file.constants, name: value})


BROKEN: dict[str, tuple[Callable[[OnnxFile], OnnxFile], str]] = {
    "no inputs": (lambda file: changed(file, "Conv", inputs=()), "node '0/Conv'"),
    "no scale": (lambda file: changed(file, "QuantizeLinear", inputs=("input",)), "an input is left out"),
    "foreign domain": (lambda file: changed(file, "Conv", domain="somebody"), "of the domain 'somebody'"),
    "too few scales": (
        lambda file: with_constant(file, "0.weight_scale", torch.ones(7)),
        "7 scales and 8 zero points for a constant",
    ),
    "too few scales of biases": (
        lambda file: with_constant(file, "0.bias_scale", torch.ones(3)),
        "3 scales and 8 zero points for a constant",
    ),
    "output of no node": (lambda file: dataclasses.replace(file, outputs=("nobody",)), "output 'nobody'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_the_node(converted: nn.Module, case: str) -> None:
    change, said = BROKEN[case]
    with pytest.raises(NotTranslated, match=said):
        plan_of(change(file_of(converted)[0]))


def test_a_file_is_replaced_when_all_of_it_is_written(
    converted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="no space left"):
            quant.export_onnx(converted, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path], "no part of the file is left"
    quant.export_onnx(converted, path)
    assert len(path.read_bytes()) > 100


def test_a_folder_that_is_not_there_is_named(converted: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        quant.export_onnx(converted, tmp_path / "nowhere" / "model.onnx")


@pytest.fixture
def model_of(converted: nn.Module, tmp_path: Path) -> Any:
    """The exported file as the package onnx has it."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    quant.export_onnx(converted, tmp_path / "model.onnx")
    return onnx.load(str(tmp_path / "model.onnx"))


def refused(model: Any, folder: Path, said: str) -> None:
    (folder / "changed.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=said):
        quant.load_onnx(folder / "changed.onnx")


def test_a_newer_version_is_refused(model_of: Any, tmp_path: Path) -> None:
    model_of.opset_import[0].version = 99
    refused(model_of, tmp_path, r"changed.onnx .* operators of version 99 \(opset\), and this library reads 10 to 28")


def test_a_missing_tensor_is_named(model_of: Any, tmp_path: Path) -> None:
    place = next(place for place, one in enumerate(model_of.graph.initializer) if one.name.endswith("weight"))
    name = model_of.graph.initializer[place].name
    del model_of.graph.initializer[place]
    refused(model_of, tmp_path, f"its input '{name}' is not there yet")


def test_a_tensor_of_other_dims_is_named(model_of: Any, tmp_path: Path) -> None:
    weight = next(one for one in model_of.graph.initializer if one.name.endswith("weight"))
    weight.dims[0] += 1
    refused(model_of, tmp_path, "changed.onnx is no ONNX model that can be read")


def test_a_tensor_of_another_dtype_is_named(model_of: Any, tmp_path: Path) -> None:
    weight = next(one for one in model_of.graph.initializer if one.name.endswith("weight"))
    weight.data_type = 17  # float of 8 bits
    refused(model_of, tmp_path, f"tensor '{weight.name}' holds .*, expected numbers of 8 bits or more")


def test_an_input_that_is_no_tensor_of_numbers_is_named(model_of: Any, tmp_path: Path) -> None:
    model_of.graph.input[0].type.tensor_type.elem_type = 8
    refused(model_of, tmp_path, "input 'input' has the type 8, expected a tensor of numbers")


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="no outputs"):
        quant.load_onnx(tmp_path / "empty.onnx")

"""An ONNX file as plain data: its nodes in order, and its constants as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.export.whole_files import replace_file


@dataclass(frozen=True)
class Node:
    """One operator of the file.

    Attributes:
        name: its own, or that of its first output where it has none.
        op: the operator's name, as "Conv".
        inputs, outputs: names of values; '' for an input that is left out.
        attributes: by name; texts are bytes.
        domain: '' for ONNX's own operators.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    domain: str = ""

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op})"


@dataclass(frozen=True)
class TensorKind:
    """What a file says of an input or an output.

    Attributes:
        shape: with a text for each size that may differ between calls; None where nothing is known.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class OnnxFile:
    """A model.

    Attributes:
        nodes: in order.
        constants: tensors by name: initializers, and what Constant nodes give.
        inputs, outputs: names of values, in order.
        kinds: of inputs and outputs, where the file is written.
        metadata: texts by name, where the file is written.
    """

    nodes: tuple[Node, ...]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kinds: Mapping[str, TensorKind] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def read_onnx(path: str | PathLike[str]) -> OnnxFile:
    """Read a file, with the package onnx.

    Raises:
        ImportError: onnx is not installed.
        FileNotFoundError: there is no such file.
        ValueError: it is no ONNX model.
    """
    onnx = package("quant.load_onnx: reading ONNX files")
    if not Path(path).is_file():
        raise FileNotFoundError(f"quant.load_onnx: there is no file {str(path)!r}")
    try:
        return _read(onnx, onnx.load(str(path)).graph)
    except Exception as error:  # protobuf's own, and numpy's of tensors that are not what they say
        raise ValueError(f"quant.load_onnx: {path} is no ONNX model: {error}") from error


def _read(onnx: Any, graph: Any) -> OnnxFile:
    if not graph.output:
        raise ValueError("it has no outputs")
    constants = {one.name: _tensor(onnx.numpy_helper.to_array(one)) for one in graph.initializer}
    nodes = []
    for one in graph.node:
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in one.attribute}
        if one.op_type == "Constant" and "value" in attributes:
            constants[one.output[0]] = _tensor(onnx.numpy_helper.to_array(attributes["value"]))
        else:
            name = one.name or next(iter(one.output), "")
            nodes.append(Node(name, one.op_type, tuple(one.input), tuple(one.output), attributes, one.domain))
    inputs = tuple(one.name for one in graph.input if one.name not in constants)
    return OnnxFile(tuple(nodes), constants, inputs, tuple(one.name for one in graph.output))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())


def write_onnx(file: OnnxFile, path: str | PathLike[str], opsets: Mapping[str, int]) -> None:
    """Write a file, checked by the package onnx.

    Args:
        opsets: the version of the operators of each domain.

    Raises:
        ImportError: onnx is not installed.
    """
    onnx = package("quant.export_onnx: writing ONNX files")
    nodes = [
        onnx.helper.make_node(one.op, one.inputs, one.outputs, one.name, domain=one.domain, **one.attributes)
        for one in file.nodes
    ]
    constants = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in file.constants.items()]

    def described(name: str) -> Any:
        kind = file.kinds[name]
        return onnx.helper.make_tensor_value_info(name, DTYPES[kind.dtype], kind.shape)

    inputs, outputs = ([described(name) for name in names] for names in (file.inputs, file.outputs))
    graph = onnx.helper.make_graph(nodes, "octet", inputs, outputs, constants)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, producer_name="octet-quant")
    model.ir_version = IR_VERSION
    onnx.helper.set_model_props(model, dict(file.metadata))
    onnx.checker.check_model(model)
    replace_file(Path(path), model.SerializeToString(), "quant.export_onnx")


def package(what: str) -> Any:
    """The package onnx, with its helpers.

    Raises:
        ImportError: it is not installed; `what` says what it is needed for.
    """
    try:
        import onnx
        from onnx import checker, helper, numpy_helper  # noqa: F401  # attributes of onnx from here on
    except ImportError as error:
        raise ImportError(
            f"{what} takes the package onnx, which is not installed: pip install 'octet-quant[onnx]'"
        ) from error
    return onnx


IR_VERSION = 8
"""The version of the file format, which came with operators of version 15 to 18."""

DTYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11,
}  # fmt: skip
"""The numbers of onnx.TensorProto.DataType."""

"""An ONNX file as plain data: its nodes in order, and its constants as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Node:
    """One operator of the file.

    Attributes:
        name: its own, or that of its first output where it has none.
        op: the operator's name, as "Conv".
        inputs, outputs: names of values; '' for an input that is left out.
        attributes: by name.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op})"


@dataclass(frozen=True)
class OnnxFile:
    """A model.

    Attributes:
        nodes: in order.
        constants: tensors by name: initializers, and what Constant nodes give.
        inputs, outputs: names of values, in order.
    """

    nodes: tuple[Node, ...]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read_onnx(path: str | PathLike[str]) -> OnnxFile:
    """Read a file, with the package onnx.

    Raises:
        ImportError: onnx is not installed.
        FileNotFoundError: there is no such file.
        ValueError: it is no ONNX model.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise ImportError(
            "quant.load_onnx: reading ONNX files takes the package onnx, which is not installed: "
            "pip install 'octet-quant[onnx]'"
        ) from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"quant.load_onnx: there is no file {str(path)!r}")
    try:
        graph = onnx.load(str(path)).graph
    except Exception as error:  # protobuf's own
        raise ValueError(f"quant.load_onnx: {path} is no ONNX model: {error}") from error
    constants = {one.name: _tensor(numpy_helper.to_array(one)) for one in graph.initializer}
    nodes = []
    for one in graph.node:
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in one.attribute}
        if one.op_type == "Constant" and "value" in attributes:
            constants[one.output[0]] = _tensor(numpy_helper.to_array(attributes["value"]))
        else:
            name = one.name or one.output[0]
            nodes.append(Node(name, one.op_type, tuple(one.input), tuple(one.output), attributes))
    inputs = tuple(one.name for one in graph.input if one.name not in constants)
    return OnnxFile(tuple(nodes), constants, inputs, tuple(one.name for one in graph.output))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())

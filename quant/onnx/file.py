"""An ONNX file as plain data: its nodes in order, and its constants as tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.calibrate.whole_files import replace_file


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
        shape: with a text for each size that may differ between calls, '' where it has no name; None where nothing is
            known.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class Body:
    """A graph that a node runs, as an attribute; it reads its own inputs and constants alone.

    Attributes:
        nodes, constants: as of a file.
        inputs, outputs: names of float32 tensors, in order.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxFile:
    """A model.

    Attributes:
        nodes: in order.
        constants: tensors by name: initializers, and what Constant nodes give.
        inputs, outputs: names of values, in order.
        kinds: of inputs, and of outputs where the file is written.
        metadata: texts by name.
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
        raise FileNotFoundError(f"there is no ONNX file {str(path)!r}")
    try:
        model = onnx.load(str(path))
        file = _read(onnx, model.graph, _checked_version(model))
        return replace(file, metadata={one.key: one.value for one in model.metadata_props})
    except Exception as error:  # protobuf's own, and numpy's of tensors that are not what they say
        raise ValueError(f"quant.load_onnx: {path} is no ONNX model that can be read: {error}") from error


def _checked_version(model: Any) -> int:
    """Of the operators."""
    versions = [one.version for one in model.opset_import if one.domain in ("", "ai.onnx")]
    if versions and not OPSETS[0] <= max(versions) <= OPSETS[1]:
        raise ValueError(
            f"it has operators of version {max(versions)} (opset), and this library reads {OPSETS[0]} to {OPSETS[1]}: "
            "convert it with onnx.version_converter, or export it again with such an opset"
        )
    if model.functions:
        raise ValueError(
            f"it defines operators of its own ({model.functions[0].name!r}): write it again with them inlined, by "
            "onnx.inliner.inline_local_functions"
        )
    return max(versions, default=OPSETS[1])


def _read(onnx: Any, graph: Any, version: int) -> OnnxFile:
    if not graph.output:
        raise ValueError("it has no outputs")
    _check_names(graph)
    nodes, constants = _nodes(onnx, graph, FLATTENING if version < 13 else {})
    given = [one for one in graph.input if one.name not in constants]
    kinds = {one.name: _kind(one) for one in given}
    return OnnxFile(nodes, constants, tuple(kinds), tuple(one.name for one in graph.output), kinds)


def _nodes(onnx: Any, graph: Any, named: Mapping[str, str]) -> tuple[tuple[Node, ...], dict[str, Tensor]]:
    """The nodes of a graph, some operators under other names, and its constants."""
    constants = {one.name: _tensor(onnx, one, one.name) for one in graph.initializer}
    nodes = []
    for one in graph.node:
        attributes = {each.name: _attribute(onnx, each) for each in one.attribute}
        name = one.name or next(iter(one.output), "")
        if one.op_type == "Constant" and one.output:
            constants[one.output[0]] = _constant(attributes, name)
        else:
            op = named.get(one.op_type, one.op_type)
            nodes.append(Node(name, op, tuple(one.input), tuple(one.output), attributes, one.domain))
    return tuple(nodes), constants


def _check_names(graph: Any) -> None:
    """Raise ValueError where a name is that of two values: which one a node reads would depend on who asks."""
    inputs = {one.name for one in graph.input}
    held = [one.name for one in graph.initializer]  # which may be defaults of inputs
    written = [name for node in graph.node for name in node.output if name]
    twice = [name for name, count in Counter([*written, *{*inputs, *held}]).items() if count > 1]
    twice += [name for name, count in Counter(held).items() if count > 1]
    if twice or len(inputs) < len(graph.input):
        named = repr(twice[0]) if twice else "of an input"
        raise ValueError(f"the name {named} is that of two values, expected another for each")


def _attribute(onnx: Any, attribute: Any) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.GraphProto):
        body = _nodes(onnx, value, {})
        return Body(*body, tuple(one.name for one in value.input), tuple(one.name for one in value.output))
    return _tensor(onnx, value, attribute.name) if isinstance(value, onnx.TensorProto) else value


def _constant(attributes: Mapping[str, Any], name: str) -> Tensor:
    """What a Constant node gives."""
    if len(attributes) != 1:
        raise ValueError(f"node {name!r} (Constant) has {len(attributes)} attributes, expected its value")
    [(key, value)] = attributes.items()
    dtypes = {"value_float": torch.float32, "value_floats": torch.float32, "value_int": torch.int64,
              "value_ints": torch.int64}  # fmt: skip
    if key != "value" and key not in dtypes:
        raise ValueError(f"node {name!r} (Constant) has a {key}, expected numbers")
    return value if key == "value" else torch.tensor(value, dtype=dtypes[key])


def _kind(value: Any) -> TensorKind:
    """What a file says of an input."""
    kind = value.type.tensor_type
    dtypes = {number: dtype for dtype, number in DTYPES.items()}
    if kind.elem_type not in dtypes:
        raise ValueError(f"input {value.name!r} has the type {kind.elem_type}, expected a tensor of numbers")
    sizes = [one.dim_value if one.HasField("dim_value") else one.dim_param for one in kind.shape.dim]
    return TensorKind(dtypes[kind.elem_type], tuple(sizes) if kind.HasField("shape") else None)


def _tensor(onnx: Any, tensor: Any, name: str) -> Tensor:
    array = onnx.numpy_helper.to_array(tensor)
    try:
        return torch.from_numpy(array.copy())
    except TypeError as error:
        raise ValueError(f"tensor {name!r} holds {array.dtype}, expected numbers of 8 bits or more") from error


def write_onnx(file: OnnxFile, path: str | PathLike[str], opsets: Mapping[str, int]) -> None:
    """Write a file, checked by the package onnx.

    Args:
        opsets: the version of the operators of each domain.

    Raises:
        ImportError: onnx is not installed.
    """
    onnx = package("quant.export_onnx: writing ONNX files")
    graph = _graph(onnx, "octet", file, file.kinds)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, producer_name="octet-quant")
    model.ir_version = IR_VERSION
    onnx.helper.set_model_props(model, dict(file.metadata))
    onnx.checker.check_model(model)
    replace_file(Path(path), model.SerializeToString(), "quant.export_onnx")


def _graph(onnx: Any, name: str, part: OnnxFile | Body, kinds: Mapping[str, TensorKind]) -> Any:
    """The package's form of a file's graph, or of a body."""

    def attribute(key: str, value: Any) -> Any:
        return _graph(onnx, key, value, {}) if isinstance(value, Body) else value

    def described(value: str) -> Any:
        kind = kinds.get(value, TensorKind(torch.float32, None))
        return onnx.helper.make_tensor_value_info(value, DTYPES[kind.dtype], kind.shape)

    nodes = [
        onnx.helper.make_node(one.op, one.inputs, one.outputs, one.name, domain=one.domain,
                              **{key: attribute(key, value) for key, value in one.attributes.items()})
        for one in part.nodes
    ]  # fmt: skip
    constants = [onnx.numpy_helper.from_array(tensor.numpy(), key) for key, tensor in part.constants.items()]
    inputs, outputs = ([described(one) for one in names] for names in (part.inputs, part.outputs))
    return onnx.helper.make_graph(nodes, name, inputs, outputs, constants)


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


FLATTENING = {"Softmax": "Softmax-11", "LogSoftmax": "LogSoftmax-11"}
"""Operators that before version 13 flattened their input to a matrix, and what they are called here."""

OPSETS = (10, 28)
"""The versions of ONNX's operators that are read: from the first with QuantizeLinear to the last that was looked at."""

IR_VERSION = 8
"""The version of the file format, which came with operators of version 15 to 18."""

DTYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11,
}  # fmt: skip
"""The numbers of onnx.TensorProto.DataType."""

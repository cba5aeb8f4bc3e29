"""`verify_onnx`: a file that was exported some time ago beside the model as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from quant.export.naming import listed
from quant.export.whole_plan import ExportError
from quant.onnx.export import file_of
from quant.onnx.export_report import Verification
from quant.onnx.file import Body, Node, OnnxFile, read_onnx
from quant.onnx.verify import verified


def verify_onnx(
    model: nn.Module,
    path: str | PathLike[str],
    inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    example_inputs: Any = None,
) -> Verification:
    """Run a file of `export_onnx` beside the model that it was written of.

    The file has to be what `export_onnx` writes of the model now, for the runtime and target that the file names: the
    same inputs, outputs, nodes and constants.

    Args:
        model: as `export_onnx` takes it.
        path: of the file.
        inputs: a call of the model: a tensor, its arguments by place, or by name; random ones for None.
        example_inputs: a call with which a model from `quant.quantize_dynamic` is captured.

    Raises:
        ImportError: onnx, or the file's runtime, is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is not one of `export_onnx`; or (`ExportError`) it is of another model, or of this one
            before it changed: the message names the inputs, outputs, layers or constants that no longer fit.
    """
    file = read_onnx(path)
    said = file.metadata
    if "octet.runtime" not in said:
        raise ValueError(f"quant.onnx.verify_onnx: {path} has no 'octet.runtime': it is no file of quant.export_onnx")
    current, writer = file_of(
        model, said["octet.runtime"], said.get("octet.target", "vnni"), example_inputs,
        said.get("octet.recurrent", "fast"), said.get("octet.sums", "fast"),
    )  # fmt: skip
    problem = next(_differences(file, current), None)
    if problem is not None:
        raise ExportError(
            f"quant.onnx.verify_onnx: {path} does not fit {type(model).__name__}: {problem}. The file is of another "
            "model, or the model or this package changed after the export: export it again"
        )
    return verified(path, writer, file, inputs)


def _differences(file: OnnxFile, current: OnnxFile) -> Iterator[str]:
    """What the file has otherwise than the model, the easiest to understand first."""
    for what, names, wanted in (("inputs", file.inputs, current.inputs), ("outputs", file.outputs, current.outputs)):
        if names != wanted:
            yield f"its {what} are {_named(names)}, the model's are {_named(wanted)}"
    for name in current.inputs:
        if file.kinds[name] != current.kinds[name]:
            yield f"its input '{name}' is {_kind(file, name)}, the model's is {_kind(current, name)}"
    has, wants = _constants(file), _constants(current)
    if missing := [name for name in wants if name not in has]:
        yield f"it has no {_named(missing)}, which the model has"
    if further := [name for name in has if name not in wants]:
        yield f"the model has none of its {_named(further)}"
    if shapes := [
        name for name in wants if (has[name].shape, has[name].dtype) != (wants[name].shape, wants[name].dtype)
    ]:
        yield f"{_named(shapes)} have other sizes or dtypes than the model's"
    if values := [name for name in wants if not torch.equal(has[name], wants[name])]:
        yield f"{_named(values)} hold other numbers than the model's"
    for (one, does), (other, asked) in zip(_all_nodes(file.nodes), _all_nodes(current.nodes), strict=False):
        if (one, does) != (other, asked):
            yield f"its {one} stands where the model has {other}" if one != other else f"its {one} has other settings"
    if len(file.nodes) != len(current.nodes):
        yield f"it has {len(file.nodes)} nodes, expected {len(current.nodes)}"


def _named(names: Sequence[str]) -> str:
    return listed(f"'{name}'" for name in names)


def _kind(file: OnnxFile, name: str) -> str:
    kind = file.kinds[name]
    sizes = "any shape" if kind.shape is None else f"({', '.join(map(str, kind.shape))})"
    return f"{str(kind.dtype).removeprefix('torch.')} {sizes}"


def _bodies(nodes: Sequence[Node]) -> Iterator[Body]:
    for node in nodes:
        yield from (value for value in node.attributes.values() if isinstance(value, Body))


def _constants(file: OnnxFile) -> dict[str, Tensor]:
    """Those of the file and of its nodes' bodies."""
    found = dict(file.constants)
    for body in _bodies(file.nodes):
        found.update(body.constants)
    return found


def _all_nodes(nodes: Sequence[Node]) -> Iterator[tuple[str, Any]]:
    """Of each node its name and what it computes; those of bodies behind their own."""
    for node in nodes:
        settings = {key: _as_read(one) for key, one in node.attributes.items() if not isinstance(one, Body)}
        yield str(node), (node.inputs, node.outputs, node.domain, settings)
        yield from (pair for body in _bodies([node]) for pair in _all_nodes(body.nodes))


def _as_read(attribute: Any) -> Any:
    """An attribute as a file gives it back: numbers with the bits of float32."""
    if isinstance(attribute, float):
        return float(torch.tensor(attribute, dtype=torch.float32))
    return [_as_read(one) for one in attribute] if isinstance(attribute, (list, tuple)) else attribute

"""Runs a written file in its runtime and compares it with the model, value by value."""

from __future__ import annotations

import collections
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.export.whole_plan import ExportError
from quant.kernels.reference import quantize_rows, row_ranges
from quant.onnx import file as onnx_file
from quant.onnx.export_report import StepDifference, Verification
from quant.onnx.file import Node, OnnxFile, TensorKind, write_onnx
from quant.onnx.graph_writer import OPSET, DynamicInput, GraphWriter
from quant.onnx.returned import returned
from quant.runtime.binding import bound_values
from quant.runtime.matching import CaptureMismatch
from quant.runtime.names import attribute
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import Attr, Ref, map_leaves
from quant.runtime.values import Held, at

Values = Mapping[str, Tensor]

Run = Callable[[str, str, Values, Path], tuple[str, dict[str, Tensor], dict[str, int]]]
"""(file, the file with further outputs, inputs, a folder) -> the runtime, its values, kinds of nodes."""


def verified(
    path: str | PathLike[str],
    writer: GraphWriter,
    file: OnnxFile,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None,
) -> Verification:
    """Run a file and its model.

    Args:
        path: of the file.
        writer: with which it was written.
        inputs: a call of the model: a tensor, its arguments by place, or by name; random ones for None.

    Raises:
        ImportError: the runtime is not installed.
        ExportError: the model's program does not stand for such a call, or the runtime does not run the file.
    """
    given = drawn(writer.program) if inputs is None else _bound(writer, inputs)
    fed = dict(zip(file.inputs, given, strict=True))
    values = writer.program.values
    rounded = {writer.names[one]: one for one in writer.names if values[one].qparams is not None}
    written = {name for node in file.nodes for name in node.outputs}
    rounded = {name: one for name, one in rounded.items() if name in written}
    asked = [*rounded, *(name for name in writer.dynamic_inputs if name in written)]
    run = _in_openvino if writer.runtime.name == "openvino" else _in_onnxruntime
    with tempfile.TemporaryDirectory() as folder:
        open_file = Path(folder) / "steps.onnx"
        _with_outputs(path, open_file, asked, signed=writer.runtime.signed)
        try:
            ran_in, theirs, kernels = run(str(path), str(open_file), fed, Path(folder))
        except ImportError:
            raise
        except Exception as error:  # the runtime's own kinds
            raise ExportError(f"{path} is there, and {writer.runtime.title} does not run it so: {error}") from error
        overflowing = tuple(dict.fromkeys(writer.overflowing))
        saturating = overflowing if overflowing and _saturates(run, Path(folder)) else ()
    held = held_values(writer.runner, given)
    outputs = [_output(writer, held, leaf) for _, leaf in returned(writer.program)]
    errors = {name: _error(theirs[name], one) for name, one in zip(file.outputs, outputs, strict=True)}
    shift = 128 if writer.runtime.signed else 0
    steps = [_difference(values[one].name, theirs[name], held.integers[values[one].node], shift)
             for name, one in rounded.items()]  # fmt: skip
    for name in asked[len(rounded) :]:
        one = writer.dynamic_inputs[name]
        source = values[one.source]
        steps.append(_difference(source.name, theirs[name], _rows(one, held.of(source)), 0))
    return Verification(ran_in, errors, tuple(steps), kernels, saturating)


def _output(writer: GraphWriter, held: Held, leaf: Any) -> Tensor:
    """A tensor that the model returns."""
    if isinstance(leaf, Ref):
        tensor = held.of(writer.program.values[leaf.index])
    else:
        tensor = attribute(writer.root, leaf.path) if isinstance(leaf, Attr) else leaf
    assert isinstance(tensor, Tensor)
    return tensor


def _rows(one: DynamicInput, x: Tensor) -> Tensor:
    """The integers that a dynamic layer rounds its input to."""
    rows = x.reshape(-1, x.shape[-1])  # x may be a single row
    rows = rows if one.columns is None else rows * one.columns
    scale, zero_point = row_ranges(rows, 255, per_row=one.per_row)
    return quantize_rows(rows, scale, zero_point, 255).reshape(x.shape)


def held_values(runner: ProgramRunner, given: Sequence[Tensor]) -> Held:
    """All values of a call with tensors in the places of the program's inputs."""
    args, kwargs = _call_of(runner, dict(zip(runner.program.inputs, given, strict=True)))
    with torch.no_grad():
        return runner.held(*args, **kwargs)


def _call_of(runner: ProgramRunner, by_register: Mapping[int, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the captured call, with tensors in the places of the program's inputs."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    parameters = inspect.signature(type(runner.root).forward).parameters
    for name, tree in runner.expected.arguments.items():
        value = map_leaves(lambda leaf: by_register[leaf.index] if isinstance(leaf, Ref) else leaf, tree)
        kind = parameters[name].kind if name in parameters else inspect.Parameter.KEYWORD_ONLY
        if kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def _bound(writer: GraphWriter, inputs: Tensor | Sequence[Any] | Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call in the order of the program's inputs."""
    runner = writer.runner
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    try:
        placed = () if named else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        values = bound_values(runner.expected, runner.root, placed, named)
    except (CaptureMismatch, TypeError) as error:
        raise ExportError(f"the inputs to verify with are no call that was captured: {error}") from error
    return [values[register] for register in writer.program.inputs]


def drawn(program: Program, sizes: Mapping[str, int] | None = None) -> list[Tensor]:
    """Random inputs: floats of the range that they are quantised in, whole numbers below 2.

    Args:
        sizes: for each symbol of the program; those at capture for None.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = []
    ranges = {values.node: values.qparams for values in program.values if values.qparams is not None}
    for register in program.inputs:
        value = program.values[register]
        assert value.shape is not None
        shape = [at(size, program.sizes if sizes is None else sizes) for size in value.shape]
        if value.dtype == torch.float32:
            scale, zero_point = ranges.get(value.node) or (6 / 255, 128)
            reals = torch.randn(shape, generator=generator) * scale * 255 / 6
            tensors.append(reals + (127.5 - zero_point) * scale)
        else:
            tensors.append(torch.randint(0, 2, shape, generator=generator).to(value.dtype))
    return tensors


def _with_outputs(path: str | PathLike[str], target: Path, names: Sequence[str], *, signed: bool) -> None:
    """The file with further outputs."""
    onnx = onnx_file.package("verifying an ONNX file")
    model = onnx.load(str(path))
    kind = onnx_file.DTYPES[torch.int8 if signed else torch.uint8]
    model.graph.output.extend([onnx.helper.make_tensor_value_info(name, kind, None) for name in names])
    onnx.save(model, str(target))


def _in_onnxruntime(
    path: str, with_steps: str, fed: Values, folder: Path
) -> tuple[str, dict[str, Tensor], dict[str, int]]:
    """The name of the runtime, its values, and the kinds of nodes of its optimised graph."""
    try:
        import onnxruntime
    except ImportError as error:
        raise _missing("ONNX Runtime", "onnxruntime") from error

    arrays = {name: tensor.numpy() for name, tensor in fed.items()}
    results: dict[str, Tensor] = {}
    optimised = folder / "optimised.onnx"
    for one in (_session(with_steps), _session(path, optimised)):  # the outputs are those of the file as it is
        names = [output.name for output in one.get_outputs()]
        results.update(
            {name: torch.from_numpy(array) for name, array in zip(names, one.run(names, arrays), strict=True)}
        )
    onnx = onnx_file.package("verifying an ONNX file")
    kinds = collections.Counter(_kinds(onnx, onnx.load(str(optimised)).graph))
    return f"ONNX Runtime {onnxruntime.__version__}", results, dict(kinds)


def _kinds(onnx: Any, graph: Any) -> Iterator[str]:
    """The kinds of a graph's nodes, those in the bodies of others included."""
    for node in graph.node:
        yield node.op_type
        for one in node.attribute:
            if one.type == onnx.AttributeProto.GRAPH:
                yield from _kinds(onnx, one.g)


def _saturates(run: Run, folder: Path) -> bool:
    """Whether a runtime adds two products of uint8 and int8 in 16 bits here: by a convolution that overflows them."""
    wide, channels, most = 127, 64, 255.0
    sums = most * wide * channels
    constants = {
        "one": torch.tensor(1.0), "zero": torch.tensor(0, dtype=torch.uint8), "step": torch.tensor(sums / 128),
        "weight": torch.full((channels, channels, 1, 1), wide, dtype=torch.int8),
        "scales": torch.ones(channels), "zeros": torch.zeros(channels, dtype=torch.int8),
    }  # fmt: skip
    nodes = (
        Node("round", "QuantizeLinear", ("x", "one", "zero"), ("q",), {}),
        Node("read", "DequantizeLinear", ("q", "one", "zero"), ("x_read",), {}),
        Node("real", "DequantizeLinear", ("weight", "scales", "zeros"), ("weight_read",), {"axis": 0}),
        Node("product", "Conv", ("x_read", "weight_read"), ("sums",), {"kernel_shape": [1, 1]}),
        Node("round_sums", "QuantizeLinear", ("sums", "step", "zero"), ("q_sums",), {}),
        Node("read_sums", "DequantizeLinear", ("q_sums", "step", "zero"), ("y",), {}),
    )
    kind = TensorKind(torch.float32, (1, channels, 8, 8))
    path = folder / "sums.onnx"
    write_onnx(OnnxFile(nodes, constants, ("x",), ("y",), {"x": kind, "y": kind}), path, {"": OPSET})
    _, values, _ = run(str(path), str(path), {"x": torch.full((1, channels, 8, 8), most)}, folder)
    return bool((values["y"] < 0.99 * sums).any())


def _session(file: str | PathLike[str], optimised: Path | None = None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _in_openvino(
    path: str, with_steps: str, fed: Values, folder: Path
) -> tuple[str, dict[str, Tensor], dict[str, int]]:
    try:
        import openvino
    except ImportError as error:
        raise _missing("OpenVINO", "openvino") from error
    core = openvino.Core()
    results: dict[str, Tensor] = {}
    for file in (with_steps, path):
        compiled = core.compile_model(file, "CPU")
        run = compiled({name: tensor.numpy() for name, tensor in fed.items()})
        for place, output in enumerate(compiled.outputs):
            for name in output.get_names():
                results[name] = torch.from_numpy(run[place].copy())
    return f"OpenVINO {openvino.__version__}", results, {}


def _missing(title: str, package: str) -> ImportError:
    return ImportError(
        f"verifying the file runs it in {title}, which is not installed: pip install {package}, or do without verifying"
    )


def _error(theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return float("inf")
    one, other = theirs.detach().double(), ours.detach().double()
    same = (one == other) | (one.isnan() & other.isnan())  # inf as well, as of masked scores
    apart = torch.where(same, 0.0, one - other)
    return float(apart.norm() / other[other.isfinite()].norm().clamp(min=1e-30))


def _difference(step: str, theirs: Tensor, ours: Tensor, shift: int) -> StepDifference:
    if theirs.shape != ours.shape:
        return StepDifference(step, 1.0, 255)
    apart = (theirs.to(torch.int32) + shift - ours.to(torch.int32)).abs()
    if not apart.numel():
        return StepDifference(step, 0.0, 0)
    return StepDifference(step, float((apart > 0).double().mean()), int(apart.max()))

"""What other libraries make of models with several inputs, of any type and length: as functions, and how much is int8.

Each maker takes a float model and calls of it (its keyword arguments by name) and returns a `Quantized`. It raises
`Missing` where its library is not here. Nothing is timed: torchao's graphs run as they are converted, without Inductor,
which computes the same up to the rounding of float32. `static_peers.py` has what single tensors need.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import Missing
from static_peers import OPSET, compiled_by_openvino, quantized_by_onnxruntime, quiet, session_of
from torch import Tensor, nn

Inputs = Mapping[str, Tensor]
"""A call's arguments by name."""


@dataclass(frozen=True)
class Quantized:
    """A contender's model.

    Attributes:
        call: its outputs.
        values: how many values of the layers' weights it holds as int8, tables of embeddings left out.
    """

    call: Callable[[Inputs], tuple[Tensor, ...]]
    values: int


@dataclass(frozen=True)
class Subject:
    """What a contender is given.

    Attributes:
        model: float, in eval mode.
        calls: to calibrate with.
        free: by the input's name, its dimensions whose size differs from call to call.
    """

    model: nn.Module
    calls: Sequence[dict[str, Tensor]]
    free: Mapping[str, Sequence[int]]


Maker = Callable[[Subject], Quantized]


def onnxruntime_static(subject: Subject) -> Quantized:
    """ONNX Runtime's `quantize_static`: QDQ, uint8 activations by min-max (its default), int8 weights per channel."""
    with _onnxruntime() as (ort, folder):
        exported = folder / "float.onnx"
        _export(subject, exported)
        feeds = [_arrays(one) for one in subject.calls]
        quantized = quantized_by_onnxruntime(exported, feeds, reduce_range=False)
        return _session(ort, quantized)


def onnxruntime_dynamic(subject: Subject) -> Quantized:
    """ONNX Runtime's `quantize_dynamic` with int8 weights per channel."""
    with _onnxruntime() as (ort, folder):
        from onnxruntime.quantization import QuantType, quantize_dynamic

        exported, quantized = folder / "float.onnx", folder / "int8.onnx"
        _export(subject, exported)
        quantize_dynamic(exported, quantized, weight_type=QuantType.QInt8, per_channel=True)
        return _session(ort, quantized)


class _onnxruntime:
    """The library and a folder for files, as long as this lasts."""

    def __enter__(self) -> tuple[Any, Path]:
        try:
            import onnxruntime
            import onnxruntime.quantization
        except ImportError as error:
            raise Missing(f"{error.name} is not installed") from error
        self._folder, self._quiet = tempfile.TemporaryDirectory(), quiet()
        self._quiet.__enter__()
        return onnxruntime, Path(self._folder.name)

    def __exit__(self, *raised: Any) -> None:
        self._quiet.__exit__(*raised)
        self._folder.cleanup()


def _export(subject: Subject, path: Path) -> None:
    names, values = zip(*subject.calls[0].items(), strict=True)
    axes = {name: list(dims) for name, dims in subject.free.items()}
    with quiet():
        torch.onnx.export(
            subject.model, values, path, input_names=list(names), dynamic_axes=axes, dynamo=False, opset_version=OPSET
        )


def _arrays(inputs: Inputs) -> dict[str, Any]:
    return {name: one.numpy() for name, one in inputs.items()}


def _session(ort: Any, path: Path) -> Quantized:
    import onnx

    session = session_of(ort, path)
    graph = onnx.load(path).graph
    tables = _tables_of(graph)
    values = sum(
        math.prod(one.dims)
        for one in graph.initializer
        if one.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) and len(one.dims) > 1
        if one.name not in tables
    )

    def call(inputs: Inputs) -> tuple[Tensor, ...]:
        return tuple(map(torch.as_tensor, session.run(None, _arrays(inputs))))

    return Quantized(call, values)


def _tables_of(graph: Any) -> set[str]:
    """Names of the initialisers that rows are gathered from, before or after they are dequantised."""
    tables: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type == "Gather" or (node.op_type == "DequantizeLinear" and node.output[0] in tables):
            tables.add(node.input[0])
    return tables


def nncf(subject: Subject) -> Quantized:
    """NNCF's `quantize` with its defaults, of which one is fast bias correction, run by OpenVINO."""
    return _nncf(subject, {})


def nncf_smooth(subject: Subject) -> Quantized:
    """The same for transformers (SmoothQuant) with full bias correction."""
    library = _imported("nncf")
    return _nncf(subject, {"model_type": library.ModelType.TRANSFORMER, "fast_bias_correction": False})


def _nncf(subject: Subject, more: dict[str, Any]) -> Quantized:
    openvino, library = _imported("openvino"), _imported("nncf")
    with tempfile.TemporaryDirectory() as folder, quiet():
        exported = Path(folder, "float.onnx")
        _export(subject, exported)
        data = library.Dataset([_arrays(one) for one in subject.calls])
        made = library.quantize(openvino.convert_model(exported), data, subset_size=len(subject.calls), **more)
        compiled = compiled_by_openvino(made)

    def call(inputs: Inputs) -> tuple[Tensor, ...]:
        found = compiled(_arrays(inputs))
        return tuple(torch.as_tensor(np.array(found[place])) for place in range(len(found)))

    return Quantized(call, _openvino_values(made))


def _openvino_values(model: Any) -> int:
    """Values of the weights that an OpenVINO model holds as int8, or rounds to it, without tables."""
    found: dict[str, int] = {}
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and len(node.get_output_shape(0)) > 1:
            whole = node.get_element_type().get_type_name() in ("i8", "u8")
            rounded, table = _openvino_readers(node)
            if (whole or rounded) and not table:
                found[node.get_friendly_name()] = math.prod(node.get_output_shape(0))
    return sum(found.values())


def _openvino_readers(node: Any) -> tuple[bool, bool]:
    """Whether a constant is rounded on its way to what computes with it, and whether that gathers rows."""
    rounded = table = False
    for reader in (one.get_node() for one in node.output(0).get_target_inputs()):
        kind = reader.get_type_name()
        table |= kind == "Gather"
        values = reader.input_value(0).get_node() == node
        if values and kind in ("Convert", "Subtract", "Multiply", "Reshape", "FakeQuantize"):
            below = _openvino_readers(reader)
            rounded, table = rounded or kind == "FakeQuantize" or below[0], table or below[1]
    return rounded, table


def torchao_static(subject: Subject) -> Quantized:
    """torchao's export quantisation with its quantiser for x86."""
    _imported("torchao")
    with quiet():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        longest = max(
            subject.calls, key=lambda one: sum(value.numel() for value in one.values())
        )  # a size of 1 is held
        sizes = tuple(dict.fromkeys(subject.free.get(name, ()), torch.export.Dim.AUTO) for name in longest)
        exported = torch.export.export(subject.model, tuple(longest.values()), dynamic_shapes=sizes)
        prepared = prepare_pt2e(exported.module(), quantizer)
        for one in subject.calls:
            prepared(*one.values())
        made = convert_pt2e(prepared)
    values = sum(one.numel() for one in made.state_dict().values() if one.dtype == torch.int8 and one.dim() > 1)
    return Quantized(lambda inputs: as_tuple(made(*inputs.values())), values)


def torchao_dynamic(subject: Subject) -> Quantized:
    """torchao's int8 weights and a range for each row of activations, which it has for linear layers."""
    _imported("torchao")
    with quiet():
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        made = copy.deepcopy(subject.model)
        quantize_(made, Int8DynamicActivationInt8WeightConfig())
    values = sum(
        one.weight.numel()
        for one in made.modules()
        if isinstance(one, nn.Linear) and type(one.weight.data) is not Tensor
    )
    return Quantized(lambda inputs: as_tuple(made(*inputs.values())), values)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """A model's outputs, of which there may be one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _imported(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return __import__(name)
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error


STATIC: dict[str, Maker] = {
    "ort": onnxruntime_static,
    "nncf": nncf,
    "nncf smooth": nncf_smooth,
    "torchao": torchao_static,
}
"""Peers with ranges of calibration, by their names in tables."""

DYNAMIC: dict[str, Maker] = {"ort": onnxruntime_dynamic, "torchao": torchao_dynamic}
"""Peers with ranges of each call."""

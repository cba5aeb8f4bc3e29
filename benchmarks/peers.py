"""The contenders of dynamic quantisation: torch float, ours, and the libraries we compare with.

Each maker takes a float module and an example input and returns a `Peer`: what to call, and what it computes. A peer
that cannot be had is a `Missing` with the reason, never left out silently. Only here does this repository import
torch.ao, which is deprecated: as a peer to compare with.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import quant

AO_ENGINES = ("fbgemm", "x86")

_ONNX_OPSET = 17


class Missing(Exception):
    """A peer that cannot be had here; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A quantised model, ready to call with its example input.

    Attributes:
        name: how tables call it.
        call: one inference of the example input, as the library's users would write it.
        predict: the output (the first, where there are several) for any input of the example's shape.
        scope: what has to hold around calls.
    """

    name: str
    call: Callable[[], object]
    predict: Callable[[Tensor], Tensor]
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


Maker = Callable[[nn.Module, Tensor], Peer]


def module_peer(
    name: str, model: nn.Module, x: Tensor, scope: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Peer:
    """Of a module that is called with `x`."""

    def predict(x: Tensor) -> Tensor:
        with scope():
            return first(model(x))

    return Peer(name, lambda: model(x), predict, scope)


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Of a module's outputs."""
    return output[0] if isinstance(output, tuple) else output


def torch_float(model: nn.Module, x: Tensor) -> Peer:
    """The model itself, eager."""
    return module_peer("float", model, x)


SEVEN = "octet 7 bits"
"""Ours with weights of 7 bits, whose products take three instructions where 8 take four: for CPUs where full-range int8
saturates in a product of three, and which ONNX Runtime gives as many bits there (`reduce_range`)."""

SEVEN_BITS = quant.Recipe(default=quant.QConfig(weight_bits=7))


def octet(backend: str = "", *, recipe: quant.Recipe | None = None, name: str = "") -> Maker:
    """`quant.quantize_dynamic` on one backend, or on the dispatcher's choice."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        made = quant.quantize_dynamic(model, recipe=recipe, backend=backend or None)
        return module_peer(name or f"octet {backend}".strip(), made, x)

    return make


@contextmanager
def ao_engine(name: str) -> Iterator[None]:
    """torch.ao's process-wide switch, for as long as needed: it decides how weights are packed and what runs them."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def torch_ao(engine: str) -> Maker:
    """`torch.ao.quantization.quantize_dynamic` on one engine."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        if engine not in torch.backends.quantized.supported_engines:
            raise Missing(f"engine {engine!r} is not in this build of torch")
        with warnings.catch_warnings(), ao_engine(engine):
            warnings.simplefilter("ignore")  # it is deprecated: that is why we are here
            from torch.ao.quantization import quantize_dynamic

            # In a Sequential, because torch.ao leaves a supported root float without a word.
            wrapped = quantize_dynamic(nn.Sequential(model), {nn.Linear, nn.LSTM, nn.GRU})
        return module_peer(f"ao {engine}", wrapped[0], x, lambda: ao_engine(engine))

    return make


def onnxruntime(model: nn.Module, x: Tensor, *, name: str = "ort", reduce_range: bool = True) -> Peer:
    """ONNX Runtime's dynamic quantisation; without reduce_range it saturates on AVX2."""
    try:
        import onnx
        import onnxruntime as ort
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _quiet_logging():
        warnings.simplefilter("ignore")
        exported, quantized = Path(folder, "float.onnx"), Path(folder, "int8.onnx")
        torch.onnx.export(
            model, (x,), exported, input_names=["x"], output_names=["y"], dynamo=False, opset_version=_ONNX_OPSET
        )
        quantize_dynamic(exported, quantized, weight_type=QuantType.QInt8, reduce_range=reduce_range)
        graph = onnx.load(quantized).graph
        weights = {weight.name for weight in graph.initializer}
        # The products of attention have no weight, and stay as they are.
        weighted = {node.op_type for node in graph.node if weights & set(node.input)}
        left = sorted(weighted & {"LSTM", "GRU", "RNN", "Gemm", "MatMul"})
        if left:
            raise Missing(f"it leaves {', '.join(left)} float")
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = ort.InferenceSession(quantized, options, providers=["CPUExecutionProvider"])
    feed = {"x": x.numpy()}
    return Peer(
        name,
        lambda: session.run(["y"], feed),
        lambda x: torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0]),
    )


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """ONNX Runtime gives its advice through the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def makers(all_backends: bool) -> dict[str, Maker]:
    """Everyone, by the name their peer will have; float first."""
    ours = [""]
    if all_backends:
        # The reference is written to be read, and takes a thousand times longer.
        ours += [name for name, reason in quant.kernels.available().items() if not reason and name != "reference"]
    return {
        "float": torch_float,
        **{f"ao {engine}": torch_ao(engine) for engine in AO_ENGINES},
        **{f"octet {backend}".strip(): octet(backend) for backend in ours},
        "ort": onnxruntime,
    }


def assemble(model: nn.Module, x: Tensor, wanted: dict[str, Maker]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be had, and why the others cannot."""
    found, missing = [], {}
    for name, make in wanted.items():
        try:
            found.append(make(model, x))
        except Missing as reason:
            missing[name] = str(reason)
    return found, missing

"""The peers of `bench_llm.py`: a stack and its input to what calls the peer on that input.

All quantise weights alone, as their users would, and compute on CPUs. A peer that cannot be had is a `Missing` with the
reason.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import Missing
from torch import Tensor, nn

Call = Callable[[], Tensor]
GROUP = 64


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def torch_bf16(model: nn.Module, x: Tensor) -> Call:
    """The float stack in bfloat16."""
    half, y = copy.deepcopy(model).to(torch.bfloat16), x.to(torch.bfloat16)
    return lambda: half(y)  # type: ignore[no-any-return]


def torchao(config: Callable[[Any], Any]) -> Callable[[nn.Module, Tensor], Call]:
    """torchao, eager; `config` takes its module `quantization`."""

    def make(model: nn.Module, x: Tensor) -> Call:
        try:
            from torchao import quantization

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                half = copy.deepcopy(model)
                quantization.quantize_(half, config(quantization))
                half(x)
        except Exception as error:  # versions differ in what CPUs and layouts they take
            raise Missing(_reason(error)) from error
        return lambda: half(x)  # type: ignore[no-any-return]

    return make


def _exported(model: nn.Module, x: Tensor, folder: Path) -> Path:
    """The float stack as an ONNX file."""
    path = folder / "stack.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=17, input_names=["x"])
    return path


def onnxruntime_nbits(model: nn.Module, x: Tensor) -> Call:
    """ONNX Runtime's MatMulNBits: 4 bits in groups, activations in int8 (accuracy level 4)."""
    try:
        import onnx
        import onnxruntime
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits

        with tempfile.TemporaryDirectory() as folder:
            graph = onnx.load(_exported(model, x, Path(folder)))
            quantizer = nbits.MatMulNBitsQuantizer(graph, bits=4, block_size=GROUP, is_symmetric=True, accuracy_level=4)
            quantizer.process()
            path = Path(folder) / "bits.onnx"
            quantizer.model.save_model_to_file(str(path), True)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of either library, or of the exporter
        raise Missing(_reason(error)) from error
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def openvino(mode: str, **options: Any) -> Callable[[nn.Module, Tensor], Call]:
    """OpenVINO with weights that NNCF compressed, its own choice of how activations are computed."""

    def make(model: nn.Module, x: Tensor) -> Call:
        try:
            import nncf
            import openvino as ov

            converted = ov.convert_model(model, example_input=x, input=[list(x.shape)])
            compressed = nncf.compress_weights(converted, mode=getattr(nncf.CompressWeightsMode, mode), **options)
            settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
            request = ov.Core().compile_model(compressed, "CPU", settings).create_infer_request()
        except Exception as error:
            raise Missing(_reason(error)) from error
        array = x.numpy()
        return lambda: torch.from_numpy(next(iter(request.infer([array]).values())))

    return make


PEERS: dict[str, Callable[[nn.Module, Tensor], Call]] = {
    "torch bfloat16": torch_bf16,
    "torchao int8, eager": torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig()),
    "torchao int4 weights, eager": torchao(
        lambda q: q.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=q.granularity.PerGroup(GROUP)
        )
    ),
    "ONNX Runtime MatMulNBits g64": onnxruntime_nbits,
    "OpenVINO int4 g64": openvino("INT4_SYM", group_size=GROUP, ratio=1.0, all_layers=True),
    "OpenVINO int8": openvino("INT8_SYM"),
}
"""llama.cpp has no row: it reads its own files alone, and its Python package is built from source for each CPU."""

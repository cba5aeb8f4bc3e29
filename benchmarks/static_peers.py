"""The contenders of static quantisation: what other libraries make of a float model and calibration batches.

Each maker returns a function from inputs to outputs, and raises `Missing` with the reason where its library is not
here. All get the same model, exported to ONNX, and the same batches. `peers.py` has those of dynamic quantisation.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peers import Missing
from torch import Tensor, nn

Predict = Callable[[Tensor], Tensor]
"""float32 (N, ...) -> float32 (N, ...), one sample at a time inside."""

Maker = Callable[[nn.Module, Sequence[Tensor]], Predict]

OPSET = 17


def onnxruntime(reduce_range: bool) -> Maker:
    """ONNX Runtime's `quantize_static`, one sample at a time; see `onnxruntime_session`."""

    def make(model: nn.Module, batches: Sequence[Tensor]) -> Predict:
        session = onnxruntime_session(model, batches, reduce_range)
        return by_sample(lambda x: session.run(None, {"x": x.numpy()})[0])

    return make


def onnxruntime_session(model: nn.Module, batches: Sequence[Tensor], reduce_range: bool | None) -> Any:
    """ONNX Runtime's `quantize_static`: QDQ, uint8 activations by min-max (its default), int8 weights per channel.

    Without reduce_range it saturates on CPUs that have AVX2 and no VNNI. None leaves the model float.
    """
    try:
        import onnxruntime as ort
        import onnxruntime.quantization
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    with tempfile.TemporaryDirectory() as folder, quiet():
        chosen = exported = Path(folder, "float.onnx")
        export(model, batches[0], exported)
        if reduce_range is not None:
            feeds = [{"x": batch.numpy()} for batch in batches]
            chosen = quantized_by_onnxruntime(exported, feeds, reduce_range=reduce_range)
        return session_of(ort, chosen)


def quantized_by_onnxruntime(exported: Path, feeds: Sequence[Mapping[str, Any]], *, reduce_range: bool) -> Path:
    """What its `quantize_static` makes of an ONNX file, as `int8.onnx` beside it; feeds are arrays by input."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.feeds = iter(feeds)

        def get_next(self) -> Mapping[str, Any] | None:
            return next(self.feeds, None)

    ready, quantized = exported.with_name("ready.onnx"), exported.with_name("int8.onnx")
    try:
        quant_pre_process(exported, ready)
    except AssertionError:  # of its symbolic shapes, which not all reshapes of attention have
        quant_pre_process(exported, ready, skip_symbolic_shape=True)
    quantize_static(
        *(ready, quantized, Reader()),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=reduce_range,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return quantized


def session_of(ort: Any, path: Path) -> Any:
    """Of a file, on torch's number of threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def nncf(model: nn.Module, batches: Sequence[Tensor]) -> Predict:
    """NNCF's `quantize`, one sample at a time; see `openvino_model`."""
    compiled = openvino_model(model, batches, quantized=True)
    return by_sample(lambda x: compiled(x.numpy())[0])


def nncf_smooth(model: nn.Module, batches: Sequence[Tensor]) -> Predict:
    """The same for transformers, with SmoothQuant and full bias correction."""
    compiled = openvino_model(model, batches, quantized=True, transformer=True)
    return by_sample(lambda x: compiled(x.numpy())[0])


def openvino_model(model: nn.Module, batches: Sequence[Tensor], *, quantized: bool, transformer: bool = False) -> Any:
    """A model compiled by OpenVINO, after NNCF's `quantize` with its defaults (fast bias correction) or float.

    For a `transformer` NNCF applies SmoothQuant, and here its full bias correction.
    """
    try:
        import openvino

        if quantized:
            import nncf
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    with tempfile.TemporaryDirectory() as folder, quiet():
        exported = Path(folder, "float.onnx")
        export(model, batches[0], exported)
        made = openvino.convert_model(exported)
        if quantized:
            data = nncf.Dataset([batch.numpy() for batch in batches])
            more = {"model_type": nncf.ModelType.TRANSFORMER, "fast_bias_correction": False} if transformer else {}
            made = nncf.quantize(made, data, subset_size=len(batches), **more)
        return compiled_by_openvino(made)


def compiled_by_openvino(model: Any) -> Any:
    """An OpenVINO model for single calls on torch's number of threads."""
    import openvino

    # Its default is bfloat16 where the CPU has it, which is no int8 error.
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.compile_model(model, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})


def export(model: nn.Module, x: Tensor, path: Path) -> None:
    """The model as ONNX, input "x"."""
    torch.onnx.export(model, (x,), path, input_names=["x"], output_names=["y"], dynamo=False, opset_version=OPSET)


def by_sample(call: Callable[[Tensor], Any]) -> Predict:
    """Run `call`, which takes one sample, over a batch of them."""
    return lambda x: torch.cat([torch.as_tensor(call(one).copy()) for one in x.split(1)])


@contextmanager
def quiet() -> Iterator[None]:
    """These libraries give advice through warnings and the root logger, and print progress bars."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


MAKERS: dict[str, Maker] = {
    "ort": onnxruntime(reduce_range=False),
    "ort reduce_range": onnxruntime(reduce_range=True),
    "openvino nncf": nncf,
}
"""Every peer by its name in tables."""

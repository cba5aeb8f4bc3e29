"""`load_onnx`: an int8 ONNX file as a module."""

from __future__ import annotations

from os import PathLike

import torch
from torch import Tensor, nn

from quant.kernels import dispatch, reference_plan
from quant.onnx.file import read_onnx
from quant.onnx.load_operators import plan_of
from quant.onnx.load_plan import NotTranslated
from quant.runtime import nonfinite


class OnnxModule(nn.Module):
    """An ONNX file with quantised values, computed by this package's kernels.

    Attributes:
        plan: the text of what is computed (`quant.kernels.reference_plan`).
        input_names, output_names: those of the file, in order.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.

    Buffers: constant_0, constant_1, ...: what the plan calls $0, $1, ...
    """

    def __init__(
        self,
        plan: str,
        constants: list[Tensor],
        input_names: tuple[str, ...],
        output_names: tuple[str, ...],
        backend: str | None,
    ) -> None:
        super().__init__()
        self.plan, self.input_names, self.output_names = plan, input_names, output_names
        self.backend = backend
        for index, tensor in enumerate(constants):
            self.register_buffer(f"constant_{index}", tensor)
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """float32 in the file's order -> the file's outputs, float32; one of them alone, several as a tuple.

        Samples that hold NaN or inf give NaN.

        Raises:
            TypeError: another number of inputs, or another dtype.
        """
        if len(inputs) != len(self.input_names):
            names = ", ".join(self.input_names)
            raise TypeError(f"expected {len(self.input_names)} inputs ({names}), got {len(inputs)}")
        for name, one in zip(self.input_names, inputs, strict=True):
            if one.dtype != torch.float32:
                raise TypeError(f"input {name!r}: expected torch.float32, got {one.dtype}")
        backend = dispatch.current(self.backend)
        constants = list(self.buffers())
        if backend.plans:
            outputs = torch.ops.octet.run_plan(list(inputs), constants, self.plan, backend.name)
        else:
            outputs = reference_plan.run_plan(inputs, constants, self.plan, table=backend.operators)
        seen: dict[int, object] = {}
        for one in inputs:
            nonfinite.note(one, seen)
        outputs = [nonfinite.spoiled(one, seen) for one in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def extra_repr(self) -> str:
        lines = self.plan.count("\n") - 2
        return f"inputs={self.input_names}, outputs={self.output_names}, lines={lines}"


def load_onnx(path: str | PathLike[str], *, backend: str | None = None) -> OnnxModule:
    """An int8 ONNX file as a module that computes in this package's kernels.

    The file has its integers as QuantizeLinear and DequantizeLinear (QDQ), as
    `onnxruntime.quantization.quantize_static` and `nncf.quantize` write it. Convolutional networks are read: Conv,
    Gemm, MatMul, sums, products, concatenations, pools, means, clamps and functions of one value, between quantised
    values. Batch and image sizes stay free. What ONNX Runtime computes in integers has its bits, but for floats
    halfway between two steps, since it divides by the scale and this package multiplies by its inverse. A layer that it
    leaves in float, as where NNCF kept the bias in float32, is integers here, with the bias at the scale of the
    products.

    Args:
        path: the file. Reading it takes the package onnx (`pip install 'octet-quant[onnx]'`).
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.

    Returns:
        a module: float32 tensors in the file's order in, the file's outputs out. Its attribute `plan` prints what it
        computes.

    Raises:
        ImportError: onnx is not installed.
        FileNotFoundError: there is no such file.
        ValueError: it is no ONNX model, or a node has no integer form here; with the node's name.

    Source: https://onnx.ai/onnx/operators/ (QuantizeLinear, DequantizeLinear, QLinearConv).
    """
    file = read_onnx(path)
    try:
        plan, constants = plan_of(file)
    except NotTranslated as error:
        raise ValueError(
            f"quant.load_onnx: {path}: {error}. Run the file with ONNX Runtime, or quantise the PyTorch model with "
            "quant.quantize_static"
        ) from error
    return OnnxModule(plan, constants, file.inputs, file.outputs, backend)

"""`load_onnx`: an int8 ONNX file as a module."""

from __future__ import annotations

from os import PathLike

import torch
from torch import Tensor, nn

from quant.kernels import dispatch, reference_plan
from quant.onnx.file import OnnxFile, TensorKind, read_onnx
from quant.onnx.load_operators import plan_of
from quant.onnx.load_plan import FilePlan, NotTranslated
from quant.onnx.load_stages import PlanStage, TorchStep
from quant.runtime import nonfinite


class OnnxModule(nn.Module):
    """An ONNX file with quantised values, computed by this package's kernels.

    Attributes:
        stages: what is computed, in order: texts of plans, and steps of torch between them.
        input_names, output_names: those of the file, in order.
        kinds: dtype and shape of each input, as the file says.
        inputs, outputs: their registers.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.

    Buffers: constant_0, constant_1, ...: what the plans call $0, $1, ...
    """

    def __init__(self, path: str, file: OnnxFile, plan: FilePlan, backend: str | None) -> None:
        super().__init__()
        self.path, self.stages, self.backend = path, plan.stages, backend
        self.input_names, self.output_names = file.inputs, file.outputs
        self.kinds = tuple(file.kinds.get(name, TensorKind(torch.float32, None)) for name in file.inputs)
        self.inputs, self.outputs = plan.inputs, plan.outputs
        for index, tensor in enumerate(plan.constants):
            self.register_buffer(f"constant_{index}", tensor)
        self.eval()

    @property
    def plan(self) -> str:
        """What is computed, as text: of one plan where the file is one."""
        return "\n\n".join([one.text if isinstance(one, PlanStage) else str(one) for one in self.stages])

    @property
    def in_torch(self) -> tuple[str, ...]:
        """The nodes that no plan has, which torch computes."""
        return tuple(one.name for one in self.stages if isinstance(one, TorchStep))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The file's inputs in its order -> the file's outputs; one of them alone, several as a tuple.

        Samples that hold NaN or inf give NaN.

        Raises:
            TypeError: another number of inputs, or another dtype.
            ValueError: another number of dimensions, or sizes that the file's operators do not take.
        """
        if len(inputs) != len(self.input_names):
            names = ", ".join(self.input_names)
            raise TypeError(f"expected {len(self.input_names)} inputs ({names}), got {len(inputs)}")
        for name, kind, one in zip(self.input_names, self.kinds, inputs, strict=True):
            if one.dtype != kind.dtype:
                raise TypeError(f"input {name!r}: expected {kind.dtype}, got {one.dtype}")
            if kind.shape is not None and one.dim() != len(kind.shape):
                raise ValueError(
                    f"input {name!r}: expected {len(kind.shape)} dimensions ({_sizes(kind)}), got {tuple(one.shape)}"
                )
        seen: dict[int, object] = {}
        for one in inputs:
            nonfinite.note(one, seen)
        try:
            outputs = self._run(inputs)
        except (IndexError, ValueError) as error:
            got = ", ".join(f"{name!r} {tuple(one.shape)}" for name, one in zip(self.input_names, inputs, strict=True))
            wanted = ", ".join(
                f"{name!r} ({_sizes(kind)})" for name, kind in zip(self.input_names, self.kinds, strict=True)
            )
            raise ValueError(f"{self.path}: inputs {got} do not fit the file, which says {wanted}: {error}") from error
        outputs = [nonfinite.spoiled(one, seen) for one in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def constants(self) -> list[Tensor]:
        """What the plans call $0, $1, ..., in order."""
        return [one for one in self._buffers.values() if one is not None]

    def _run(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        backend, constants = dispatch.current(self.backend), self.constants()
        registers = dict(zip(self.inputs, inputs, strict=True))
        for stage in self.stages:
            if isinstance(stage, TorchStep):
                stage.run(registers)
                continue
            given = [_for_a_plan(registers[one]) for one in stage.inputs]
            if backend.plans:
                outputs = torch.ops.octet.run_plan(given, constants, stage.text, backend.name)
            else:
                outputs = reference_plan.run_plan(given, constants, stage.text, table=backend.operators)
            registers.update(zip(stage.outputs, outputs, strict=True))
        return [registers[one] for one in self.outputs]

    def extra_repr(self) -> str:
        plans = [one for one in self.stages if isinstance(one, PlanStage)]
        lines = sum(one.text.count("\n") - 2 for one in plans)
        return (
            f"inputs={self.input_names}, outputs={self.output_names}, plans={len(plans)}, lines={lines}, "
            f"in_torch={len(self.in_torch)}"
        )


def _sizes(kind: TensorKind) -> str:
    return "any shape" if kind.shape is None else ", ".join(str(one or "?") for one in kind.shape)


def _for_a_plan(x: Tensor) -> Tensor:
    """A tensor as plans take it: truth values are bytes."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return x if x.dtype in (torch.float32, torch.uint8, torch.int64) else x.to(torch.int64)


def load_onnx(path: str | PathLike[str], *, backend: str | None = None) -> OnnxModule:
    """An int8 ONNX file as a module that computes in this package's kernels.

    The file has its integers as QuantizeLinear and DequantizeLinear (QDQ), as
    `onnxruntime.quantization.quantize_static` and `nncf.quantize` write it, of a convolutional network or a
    transformer. Between quantised values Conv, Gemm, MatMul (also of two activations), sums, products, concatenations,
    pools, means, clamps and functions of one value are integers; norms, softmax and what the quantiser left in float
    are computed in float: in the same native call where plans have the operator, else by torch between two calls
    (`in_torch` names those nodes). Batch, image sizes and lengths stay free where the file computes with shapes.

    What ONNX Runtime computes in integers has its bits, but for floats halfway between two steps, since it divides by
    the scale and this package multiplies by its inverse. Its softmax of integers is a table of its own, which differs
    by a step here and there. A layer that it leaves in float, as where NNCF kept the bias in float32, is integers here,
    with the bias at the scale of the products.

    Args:
        path: the file. Reading it takes the package onnx (`pip install 'octet-quant[onnx]'`).
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.

    Returns:
        a module: the file's inputs in its order in, the file's outputs out. Its attribute `plan` prints what it
        computes.

    Raises:
        ImportError: onnx is not installed.
        FileNotFoundError: there is no such file.
        ValueError: it is no ONNX model, its operators are of a newer version, nothing in it is quantised, or a node has
            no form here; with the node's name.

    Source: https://onnx.ai/onnx/operators/ (QuantizeLinear, DequantizeLinear, QLinearConv).
    """
    file = read_onnx(path)
    try:
        plan = plan_of(file)
    except NotTranslated as error:
        raise ValueError(
            f"quant.load_onnx: {path}: {error}. Run the file with ONNX Runtime, or quantise the PyTorch model with "
            "quant.quantize_static"
        ) from error
    return OnnxModule(str(path), file, plan, backend)

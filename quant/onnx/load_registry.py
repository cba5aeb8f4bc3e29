"""The operators that `load_onnx` reads: functions by their names in ONNX, and the attributes that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from quant.onnx.load_plan import Translate

F = TypeVar("F", bound=Callable[..., Any])

OPERATORS: dict[str, Translate] = {}
"""What becomes integers of plans where its inputs are quantised."""

OF_REALS: dict[str, Translate] = {}
"""What becomes lines of plans where its inputs are reals."""


def translates(*names: str, of_reals: bool = False) -> Callable[[F], F]:
    """Register a function for operators of ONNX.

    Args:
        of_reals: in OF_REALS instead of OPERATORS.
    """

    def add(function: F) -> F:
        (OF_REALS if of_reals else OPERATORS).update(dict.fromkeys(names, function))
        return function

    return add


_WINDOW = "auto_pad dilations kernel_shape pads strides"

ATTRIBUTES: dict[str, frozenset[str]] = {
    name: frozenset(attributes.split())
    for name, attributes in {
        "AveragePool": f"{_WINDOW} ceil_mode count_include_pad",
        "BatchNormalization": "epsilon momentum training_mode spatial",
        "Cast": "to saturate round_mode",
        "Clip": "min max",
        "Concat": "axis",
        "ConstantOfShape": "value",
        "Conv": f"{_WINDOW} group",
        "DepthToSpace": "blocksize mode",
        "DequantizeLinear": "axis block_size output_dtype",
        "Dropout": "ratio seed",
        "Elu": "alpha",
        "Flatten": "axis",
        "Gather": "axis",
        "Gelu": "approximate",
        "Gemm": "alpha beta transA transB",
        "HardSigmoid": "alpha beta",
        "InstanceNormalization": "epsilon",
        "LayerNormalization": "axis epsilon stash_type",
        "LeakyRelu": "alpha",
        "LogSoftmax": "axis",
        "LogSoftmax-11": "axis",
        "MaxPool": f"{_WINDOW} ceil_mode storage_order",
        "Mod": "fmod",
        "Pad": "mode",
        "QuantizeLinear": "axis block_size output_dtype precision saturate",
        "ReduceMax": "axes keepdims noop_with_empty_axes",
        "ReduceMean": "axes keepdims noop_with_empty_axes",
        "ReduceMin": "axes keepdims noop_with_empty_axes",
        "ReduceSum": "axes keepdims noop_with_empty_axes",
        "Reshape": "allowzero",
        "Resize": "antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside extrapolation_value "
        "keep_aspect_ratio_policy mode nearest_mode",
        "Shape": "start end",
        "Softmax": "axis",
        "Softmax-11": "axis",
        "Split": "axis num_outputs split",
        "Squeeze": "axes",
        "Transpose": "perm",
        "Trilu": "upper",
        "Unsqueeze": "axes",
    }.items()
}
"""The attributes of each operator, up to opset `file.OPSETS`; another one may change what is computed."""

"""Which float calls may change a tensor or keep something, so that they keep their place among the others."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from quant.capture.calls import functions
from quant.runtime.callee import Function, Method, Submodule
from quant.runtime.instructions import FloatCall, Guard, Instruction
from quant.runtime.module_calls import is_untouched
from quant.runtime.names import submodule

IN_PLACE = functions(
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
) | {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift,
}  # fmt: skip
"""Functions and methods that change their left side; the others end in an underscore."""


KEEP_SIZES = frozenset({
    "add_", "sub_", "mul_", "div_", "copy_", "fill_", "zero_", "neg_", "abs_", "exp_", "clamp_", "masked_fill_",
    "index_fill_", "index_copy_", "index_add_", "scatter_", "scatter_add_", "relu_", "sigmoid_", "tanh_",
})  # fmt: skip
"""Methods that write values to their tensor and leave its sizes."""


def may_reshape(instruction: Instruction) -> bool:
    """Whether a call may change the shape of its argument, as `transpose_` does."""
    if not isinstance(instruction, FloatCall) or isinstance(instruction.callee, Submodule):
        return False
    return works_in_place(instruction) and instruction.callee.name not in KEEP_SIZES


def works_in_place(instruction: Instruction) -> bool:
    """Whether a call may change its argument, by torch's way to name such."""
    callee = instruction.callee if isinstance(instruction, FloatCall) else None
    return isinstance(callee, (Function, Method)) and callee.name.endswith("_") and not callee.name.endswith("__")


def changes_something(instruction: FloatCall | Guard, root: nn.Module) -> bool:
    """Whether a call may change what others read, or keep something: a module of the user's may do anything."""
    if isinstance(instruction, Guard):
        return False
    callee, (args, kwargs) = instruction.callee, instruction.arguments
    if isinstance(callee, Submodule):
        module = submodule(root, callee.path)
        return not (is_untouched(module) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    flags = kwargs.get("inplace") or "out" in kwargs or any(one is True for one in args)  # relu(x, True)
    return bool(flags or instruction.writes or works_in_place(instruction) or _called(callee) in IN_PLACE)


def _called(callee: Function | Method) -> Any:
    """The function or method, where it has a hash."""
    target = getattr(Tensor, callee.name, None) if isinstance(callee, Method) else callee.target
    return target if isinstance(target, Hashable) else None

"""What torch's functions are called in a graph, and which of them say nothing of values or give none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quant.graph import Kind

METADATA = {
    "dtype", "device", "layout", "is_cuda", "is_sparse", "names", "is_nested",
    "is_quantized", "is_mkldnn", "is_meta", "is_cpu", "is_floating_point", "is_complex", "is_signed",
    "is_contiguous", "element_size", "get_device", "is_inference", "is_conj", "is_neg", "is_pinned", "is_set_to",
    "is_same_size", "storage_offset", "__repr__", "__str__",
    "__format__", "__hash__", "__dir__", "itemsize", "nbytes", "output_nr", "_version", "_is_view", "_base",
    "has_names", "is_shared", "is_tensor", "is_storage", "result_type", "promote_types", "can_cast",
    "get_default_dtype",
}  # fmt: skip
"""Attributes and calls that no values of the same kind change, and texts for people: used as they are."""

OF_GRADIENTS = {"requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "retain_grad", "register_hook",
                "requires_grad_", "register_post_accumulate_grad_hook"}  # fmt: skip
"""Attributes and calls about the gradients of a tensor: captures and converted models have none, training has."""

GIVES_BACK = {
    "contiguous", "to", "float", "double", "half", "bfloat16", "bool", "int", "long", "short", "char", "byte", "type",
    "type_as", "cpu", "flatten", "ravel", "real", "conj", "resolve_conj", "resolve_neg", "positive", "__pos__",
    "atleast_1d", "atleast_2d", "atleast_3d", "as_tensor", "asarray",
}  # fmt: skip
"""Calls that give their tensor itself where it is of the wanted kind, and one of the same values where it is not."""

SIZES = {"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__"}
"""Attributes and calls whose result follows from the sizes of a tensor."""

COUNTED = {"split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes", "__iter__",
           "meshgrid", "broadcast_tensors"}  # fmt: skip
"""Calls whose number of results follows from a size."""

RANDOM = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like",
          "randn_like", "randint_like", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_",
          "cauchy_", "log_normal_", "dropout", "alpha_dropout", "feature_dropout", "rrelu", "empty", "empty_like",
          "new_empty", "empty_strided"}  # fmt: skip
"""Calls whose values follow from nothing that they are given."""

SIZED_BY_VALUES = {
    "nonzero", "argwhere", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "histc", "nms", "repeat_interleave", "combinations", "to_sparse", "coalesce", "indices", "one_hot", "batched_nms",
    "_batched_nms_coordinate_trick", "_batched_nms_vanilla",
}  # fmt: skip
"""Calls whose number of results follows from values."""

OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "matmul": operator.matmul, "neg": operator.neg, "__getitem__": operator.getitem,
    "__radd__": operator.add, "__rsub__": operator.sub, "__rmul__": operator.mul, "__rdiv__": operator.truediv,
    "__rmatmul__": operator.matmul, "__rpow__": operator.pow, "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv, "__rmod__": operator.mod,
}  # fmt: skip
"""Methods behind Python's operators, as the operators; the reflected ones change the order."""


def canonical(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Kind, Any, tuple[Any, ...], dict[str, Any]]:
    """Kind, target, args and kwargs of the node that a call of torch's becomes.

    A function mode is told of the C function or the descriptor of `Tensor`. In a graph an operator is Python's
    (`operator.add`), another method is its name, and an attribute is `getattr`.
    """
    name = getattr(function, "__name__", "")
    if name == "__get__" and not kwargs:
        return Kind.FUNCTION, getattr, (args[0], attribute_name(function)), {}
    if name in OPERATORS and function is getattr(Tensor, name, None) and not kwargs and len(args) <= 2:
        return Kind.FUNCTION, OPERATORS[name], args[::-1] if name.startswith("__r") else args, {}
    if function is getattr(Tensor, name, None) and args:
        return Kind.METHOD, name, args, kwargs
    return Kind.FUNCTION, function, args, kwargs


def attribute_name(getter: Any) -> str:
    """The attribute behind `Tensor.shape.__get__` and its like."""
    return str(getattr(getattr(getter, "__self__", None), "__name__", "")) or str(
        getattr(getattr(getattr(getter, "__self__", None), "fget", None), "__name__", "")
    )


def called_name(target: Any, args: tuple[Any, ...]) -> str:
    """The bare name of what is called or read."""
    if target is getattr:
        return str(args[1])
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def says_it_writes(kind: Kind, target: Any, kwargs: dict[str, Any], module: nn.Module | None = None) -> bool:
    """Whether a call changes its first argument, and gives it back, by its name or its settings."""
    if kind is Kind.MODULE:
        return bool(getattr(module, "inplace", False))
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))


def share_storage(one: Any, other: Any) -> bool:
    """Whether two values are tensors over the same memory."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.layout != other.layout:
        return False
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0)


def inside_autograd_function(frame: Any, until: Any) -> bool:
    """Whether a Python frame was called, below the frame of code `until`, through `torch.autograd.Function.apply`."""
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    while frame is not None and frame.f_code is not until:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False

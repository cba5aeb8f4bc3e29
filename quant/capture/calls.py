"""The node that a call of torch becomes, and tables of torch's functions that return metadata, sizes or random values.

The tables hold the functions, methods and attributes themselves, so a user's function with the name of one of torch's
is not taken for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from quant.graph import Kind, Node

_NAMESPACES = (torch, torch._C._VariableFunctions, Tensor, F, nn.init)


def functions(*names: str) -> frozenset[Any]:
    """The functions of torch, and the methods and attributes of tensors, that have one of these names.

    Names that this version of torch does not have are skipped.
    """
    return frozenset(getattr(place, name) for place in _NAMESPACES for name in names if hasattr(place, name))


METADATA = functions(
    "dtype", "device", "layout", "is_cuda", "is_sparse", "names", "is_nested", "is_quantized", "is_mkldnn", "is_meta",
    "is_cpu", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "element_size", "get_device",
    "is_inference", "is_conj", "is_neg", "is_pinned", "is_set_to", "is_same_size", "storage_offset", "__repr__",
    "__str__", "__format__", "__hash__", "__dir__", "itemsize", "nbytes", "output_nr", "_version", "_is_view", "_base",
    "has_names", "is_shared", "is_tensor", "is_storage", "result_type", "promote_types", "can_cast",
    "get_default_dtype",
)  # fmt: skip
"""Attributes and calls whose result is a constant of the kind of tensor, or a text for people; not recorded."""

OF_MEMORY = functions("storage_offset", "_is_view", "_base")
"""Those of METADATA about a tensor's memory, which may differ between calls where the tensor is an argument."""

OF_GRADIENTS = functions(
    "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "retain_grad", "register_hook", "requires_grad_",
    "register_post_accumulate_grad_hook",
)  # fmt: skip
"""Attributes and calls about a tensor's gradients, which training has and a capture does not."""

GIVES_BACK = functions(
    "contiguous", "to", "float", "double", "half", "bfloat16", "bool", "int", "long", "short", "char", "byte", "type",
    "type_as", "cpu", "flatten", "ravel", "real", "conj", "resolve_conj", "resolve_neg", "positive", "__pos__",
    "atleast_1d", "atleast_2d", "atleast_3d", "as_tensor", "asarray",
)  # fmt: skip
"""Calls that return their tensor itself where it is of the wanted kind already, else a converted copy."""

SIZES = functions("shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__")
"""Attributes and calls whose result depends on the sizes of a tensor."""

RANKS = functions("ndim", "dim", "ndimension")
"""Those of SIZES that give the number of dimensions."""

NORMS = functions("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats")
"""Calls that may update running statistics, which get no new version by that."""

COUNTED = functions(
    "split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes", "__iter__",
    "meshgrid", "broadcast_tensors",
)  # fmt: skip
"""Calls whose number of results depends on a size."""

RANDOM = functions(
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like", "randn_like",
    "randint_like", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "dropout", "alpha_dropout", "feature_dropout", "rrelu", "empty", "empty_like", "new_empty",
    "empty_strided",
)  # fmt: skip
"""Calls whose values do not depend on their arguments."""

SIZED_BY_VALUES = functions(
    "nonzero", "argwhere", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "repeat_interleave", "to_sparse", "coalesce", "indices", "one_hot",
)  # fmt: skip
"""Calls whose number of results depends on values."""

REPEATS, CLASSES = functions("repeat_interleave"), functions("one_hot")
"""Those among them that take a number instead: of repeats, and of classes where it is not -1."""

UNTAGGED = {"torchvision::nms"}
"""Operators whose number of results depends on values, although torch does not tag them so."""

ASKS_DTYPE = functions("dtype", "is_floating_point", "is_complex", "type")
"""Attributes and calls whose result is a dtype or depends on one."""

BRANCHES = functions("__bool__", "is_nonzero", "equal", "allclose")
"""Calls whose result a forward branches on."""

SET_DATA = frozenset({Tensor.data.__set__})  # type: ignore[attr-defined]

LENGTH, WHERE, SET_ITEM = functions("__len__"), functions("where"), functions("__setitem__")

OPERATORS: dict[Any, Callable[..., Any]] = {
    Tensor.add: operator.add, Tensor.sub: operator.sub, Tensor.mul: operator.mul, Tensor.div: operator.truediv,
    Tensor.matmul: operator.matmul, Tensor.neg: operator.neg, Tensor.__getitem__: operator.getitem,
}  # fmt: skip
"""Method of a tensor -> the operator of Python's that it implements."""

REFLECTED: dict[Any, Callable[..., Any]] = {
    Tensor.__radd__: operator.add, Tensor.__rsub__: operator.sub, Tensor.__rmul__: operator.mul,
    Tensor.__rdiv__: operator.truediv, Tensor.__rtruediv__: operator.truediv, Tensor.__rmatmul__: operator.matmul,
    Tensor.__rpow__: operator.pow, Tensor.__rfloordiv__: operator.floordiv, Tensor.__rmod__: operator.mod,
}  # fmt: skip
"""The same for reflected methods, whose operands are swapped."""


NAMES_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Name of an argument in NumPy, which functions of torch in C take too -> torch's own."""


def canonical(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Kind, Any, tuple[Any, ...], dict[str, Any]]:
    """Kind, target, args and kwargs of the node that a call of torch becomes.

    A function mode gets the C function or the descriptor of `Tensor`. In a graph an operator is Python's
    (`operator.add`), another method is its name, and an attribute is a call of `getattr`.
    """
    if isinstance(function, OpOverload):
        function = of_overload(function)
    kwargs = by_torchs_names(function, kwargs)
    if isinstance(function, MethodWrapperType) and function == getattr(function.__self__, "__get__", None):
        return Kind.FUNCTION, getattr, (args[0], attribute_name(function)), {}
    if not kwargs and len(args) <= 2 and isinstance(function, Hashable):
        if function in OPERATORS:
            return Kind.FUNCTION, OPERATORS[function], args, {}
        if function in REFLECTED:
            return Kind.FUNCTION, REFLECTED[function], args[::-1], {}
    name = getattr(function, "__name__", "")
    if function is getattr(Tensor, name, None) and args:
        return Kind.METHOD, name, args, kwargs
    return Kind.FUNCTION, function, args, kwargs


def by_torchs_names(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of torch, those with names of NumPy by torch's own."""
    foreign = NAMES_OF_NUMPY.keys() & kwargs.keys()
    if not foreign or hasattr(function, "__code__"):
        return kwargs
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    schemas = [getattr(packet, name)._schema for name in packet.overloads()] if packet else []
    foreign -= {argument.name for schema in schemas for argument in schema.arguments}
    return {NAMES_OF_NUMPY[name] if name in foreign else name: value for name, value in kwargs.items()}


def of_overload(function: OpOverload) -> Callable[..., Any]:
    """The function of torch's that calls an operator of ATen, as exported modules call them; others as they are.

    It takes the same arguments, of which the proof of a graph makes sure.
    """
    name = function._opname
    if getattr(torch.ops.aten, name, None) is not function.overloadpacket or name.startswith("_"):
        return function
    for space in (torch, F, Tensor):
        public = getattr(space, name, None)
        if public is not None:
            return public  # type: ignore[no-any-return]
    return function


def attribute_name(getter: Any) -> str:
    """The attribute's name of a getter such as `Tensor.shape.__get__`."""
    return str(getattr(getattr(getter, "__self__", None), "__name__", "")) or str(
        getattr(getattr(getattr(getter, "__self__", None), "fget", None), "__name__", "")
    )


def called(node: Node) -> Any:
    """The function, method or attribute that a node calls or reads, as in `functions`; None for a module."""
    return called_at(node.kind, node.target, node.args)


def called_at(kind: Kind, target: Any, args: tuple[Any, ...]) -> Any:
    """The same by the fields of a node."""
    if kind is Kind.METHOD:
        return getattr(Tensor, target, None)
    if target is getattr:
        return getattr(Tensor, args[1], None)
    return target if kind is Kind.FUNCTION and isinstance(target, Hashable) else None


def is_sized_by_values(target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether the sizes of a call's result depend on values, by the tables here or by the tag of an operator.

    Without arguments, whether those of some call of it may.
    """
    if target in REPEATS or target in CLASSES:
        number = args[1] if len(args) > 1 else (kwargs or {}).get("repeats" if target in REPEATS else "num_classes")
        return not isinstance(number, int) or number < 0 or not getattr(number, "static", True)
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        tagged = any(torch.Tag.dynamic_output_shape in overload.tags for overload in overloads)
        return tagged or target._qualified_op_name in UNTAGGED
    return target in SIZED_BY_VALUES


def says_it_writes(kind: Kind, target: Any, kwargs: dict[str, Any], module: nn.Module | None = None) -> bool:
    """Whether a call changes its first argument and returns it, by its name or its settings."""
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

"""The allow-list of a program's text: the functions and tensor methods that it may name.

A text may come from a file. So it names functions that compute, and none that opens files, imports, or leads from a
value to arbitrary code.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import types
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from quant.runtime import calls, forms

_OPERATORS = frozenset(operator.__all__) - {"attrgetter", "call", "itemgetter", "methodcaller"}
_BUILTINS = frozenset(
    ("abs", "bool", "complex", "divmod", "float", "getattr", "int", "len", "list", "max", "min", "pow", "reversed",
     "round", "slice", "sum", "tuple", "zip", "range", "isinstance", "enumerate")
)  # fmt: skip
_OURS = frozenset(
    (one.__module__, one.__name__)
    for one in (calls.with_items, calls.write_items, calls.attend, calls.attention_weights, forms.form_of)
)

_REFUSED = frozenset(
    ("apply_", "map_", "map2_", "from_file", "register_hook", "register_post_accumulate_grad_hook", "__reduce_ex__",
     "__setstate__", "__deepcopy__", "__array__", "__array_wrap__", "__format__", "__dlpack__", "__dlpack_device__")
)  # fmt: skip
"""Tensor methods that take a function or a file, or that turn a tensor into something else."""

_PRIVATE = frozenset({"_weight_norm", "_pack_padded_sequence", "_pad_packed_sequence"})
"""Private functions of torch that its own modules call."""

_OPERATIONS = frozenset({"aten", "torchvision"})
"""Namespaces of torch.ops whose operations a text may name."""


def is_allowed(module: str, name: str, target: Any) -> bool:
    """Whether a text may name the function `target`, which is `name` of `module`: it computes and touches no file."""
    last = name.rpartition(".")[2]
    if last in _REFUSED or (last.startswith("_") and not last.startswith("__") and last not in _PRIVATE):
        return False
    if module == "operator":
        return name in _OPERATORS
    if module == builtins.__name__:
        return name in _BUILTINS
    if module == math.__name__ or (module, name) in _OURS:
        return callable(target)
    if module.startswith("torch.ops."):
        return module.split(".")[2] in _OPERATIONS and isinstance(target, (OpOverload, OpOverloadPacket))
    if module == torch._C._nn.__name__:
        return isinstance(target, types.BuiltinFunctionType)
    return module.partition(".")[0] == "torch" and id(target) in _tensor_functions()


def is_method(name: str) -> bool:
    """Whether a text may call the tensor method `name`."""
    method = getattr(torch.Tensor, name, None)
    if name.startswith("__"):
        return id(method) in _tensor_functions() and name not in _REFUSED
    return callable(method) and not name.startswith("_") and name not in _REFUSED


@functools.lru_cache(maxsize=1)
def _tensor_functions() -> frozenset[int]:
    """The ids of torch's functions that take tensors or create them."""
    known = torch.overrides.get_overridable_functions()
    overridable = {id(one) for functions in known.values() for one in functions}
    makers = (getattr(torch, name, None) for name in dir(torch._C._VariableFunctions))
    return frozenset(overridable | {id(one) for one in makers if isinstance(one, types.BuiltinFunctionType)})

"""Calls that cannot be recorded: forwards that fail under a recorder, and tensors of kinds that a graph cannot take.

Higher-order operators, `torch.compile` and the transforms of `torch.func` inspect torch's stack of modes, so an island
runs without the recorder on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _get_overloaded_args,
    _pop_mode,
    _push_mode,
)

from quant.runtime.arguments import copyable


@contextlib.contextmanager
def out_of_sight(mode: TorchFunctionMode) -> Iterator[None]:
    """Remove a function mode from this thread's stack for the time of the context; other modes stay, in their order."""
    stack = list(_get_current_function_mode_stack())
    if not any(one is mode for one in stack):
        yield
        return
    _show([one for one in stack if one is not mode])
    try:
        yield
    finally:
        _show(stack)


def _show(stack: list[TorchFunctionMode]) -> None:
    """Set torch's stack of function modes, lowest first."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in stack:
        _push_mode(mode)


def foreign(tensors: list[Any]) -> str:
    """The reason that neither a graph nor an int8 layer can take such tensors; '' where they can."""
    for tensor in tensors:
        if is_transformed(tensor):
            return "it is called inside of a transform of torch.func (vmap, grad, ...)"
        if tensor.is_nested:
            return "it is called with a nested tensor"
        if tensor.layout != torch.strided:
            return f"it is called with a tensor of layout {tensor.layout}"
    return ""


def read_once(call: Any) -> str:
    """The class of an argument that can be read only once, such as a generator; '' where there is none."""
    iterators = (one for one in _flat(call) if hasattr(one, "__next__") and not copyable(one))
    return next((type(one).__name__ for one in iterators), "")


def refuse_read_once(model: nn.Module, path: str, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that can be read only once, since a forward is recorded several times."""
    for name, value in arguments.items():
        kind = read_once(value)
        if kind:
            raise TypeError(
                f"{path or type(model).__name__}: argument '{name}' is or has a {kind}, which can be read once, and "
                "capture calls the forward several times; give it a list or a tuple"
            )


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a running transform of `torch.func`, outside of which it is not valid."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def stand_ins(types: Iterable[type], call: Any) -> list[Any]:
    """The arguments of a call that have `__torch_function__` and are not tensors."""
    kinds = tuple(kind for kind in types if not issubclass(kind, Tensor))
    if not kinds:
        return []
    strangers = [leaf for leaf in _flat(call) if isinstance(leaf, kinds)]
    return list(_get_overloaded_args(strangers))


def asked(strangers: list[Any], func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call by the first of the `stand_ins` that implements the function."""
    for one in strangers:
        answer = one.__torch_function__(func, types, args, kwargs)
        if answer is not NotImplemented:
            return answer
    names = ", ".join(type(one).__name__ for one in strangers)
    raise TypeError(f"no implementation of {getattr(func, '__name__', func)} for arguments of the classes {names}")


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _flat(item)
    elif isinstance(tree, dict):
        yield from _flat(tuple(tree.values()))
    else:
        yield tree


def said_of(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__

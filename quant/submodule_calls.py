"""Records of the calls of a model's submodules, by which two forms of a model are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from quant.runtime.arguments import copied


@dataclass(frozen=True)
class Call:
    """One call of a module: copies of its arguments and output, which later calls cannot write into."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextlib.contextmanager
def calls_of(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[Call]]]:
    """Record the calls of the named submodules during the context."""
    calls: dict[str, list[Call]] = {}
    handles = []

    def watch(path: str) -> None:
        begun: list[Any] = []  # a module may call itself

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(copied((args, kwargs)))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            args, kwargs = begun.pop()
            calls.setdefault(path, []).append(Call(args, kwargs, copied(output)))

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    try:
        for path in paths:
            watch(path)
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models in eval mode for the context; afterwards each of their modules has its own mode again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

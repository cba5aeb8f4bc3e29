"""Static quantisation of models in bfloat16 and float16: float32 inside, the model's own types outside.

int8 replaces the half type. Layers that stay float are faster and more precise in float32 on CPUs, and ranges and
training need float32. So the prepared copy, or parts of it (`widening.py`), are float32, and two hooks convert inputs
to float32 and outputs to the dtypes of the user's model.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.copying import copy_model
from quant.report import own_tensors
from quant.runtime.layers.quant_module import HALVES, QuantModule
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import leaves, map_leaves


def half_of(model: nn.Module) -> torch.dtype | None:
    """The half type of the first parameter or buffer that has one, or of an int8 module; None for a model without."""
    for tensor in _of_the_model(model):
        if tensor.dtype in HALVES:
            return tensor.dtype
    own = (module.dtype for module in model.modules() if isinstance(module, QuantModule))
    return next((dtype for dtype in own if dtype in HALVES), None)


def _of_the_model(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, without scales of int8 modules, which are float16 where files are to be small."""
    int8 = (module for module in model.modules() if isinstance(module, QuantModule))
    scales = {id(one) for module in int8 for one in module.own_scales()}
    return (one for one in (*model.parameters(), *model.buffers()) if id(one) not in scales)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names, without uninitialised lazy ones."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return ((name, tensor) for name, tensor in every if not nn.parameter.is_lazy(tensor))


def halves_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Name -> dtype, for parameters and buffers in a half type."""
    known = {id(one) for one in _of_the_model(model)}
    return {name: tensor.dtype for name, tensor in _named(model) if tensor.dtype in HALVES and id(tensor) in known}


def sizes_of(model: nn.Module) -> dict[str, int]:
    """The bytes of parameters and buffers, by name."""
    return {name: tensor.nbytes for name, tensor in _named(model)}


def sizes_before(model: nn.Module) -> dict[str, dict[int, int]]:
    """`own_tensors` of every module by name, with the bytes that the user's tensors had before they were widened."""
    sizes: dict[int, int] = {}
    for part in model.modules():
        for hook in _own_outputs(part):
            sizes.update({id(tensor): hook.sizes[name] for name, tensor in _named(part) if name in hook.sizes})
    return {
        name: {one: sizes.get(one, size) for one, size in own_tensors(module).items()}
        for name, module in model.named_modules(remove_duplicate=False)
    }


def like(model: nn.Module, converted: nn.Module) -> nn.Module:
    """The float model in the dtypes of `converted`: a copy that is float32 where that one is widened."""
    if half_of(model) is None:
        return model
    hooks = {name: _own_outputs(part) for name, part in converted.named_modules() if _own_outputs(part)}
    if not hooks:
        return model
    wide = copy_model(model)
    for name, own in hooks.items():
        part = wide.get_submodule(name).float()
        part.register_forward_pre_hook(WideInputs(), with_kwargs=True)
        if name:  # what is around it wants its own types; the whole is compared in float32
            part.register_forward_hook(own[0])
    return wide


def _own_outputs(module: nn.Module) -> list[OwnOutputs]:
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, OwnOutputs)]


def note_half(model: nn.Module) -> None:
    """Tell the runners of widened modules the type that the user's model has."""
    for part in model.modules():
        for hook in _own_outputs(part):
            for runner in part.modules():
                if isinstance(runner, ProgramRunner):
                    runner.half_type = hook.half


def hooks_of_others(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than those that cast."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return not all(isinstance(hook, (WideInputs, OwnOutputs)) for hook in hooks)


def kinds_of(output: Any) -> list[torch.dtype | None]:
    """The dtypes of an output's leaves, in order; None for one that is not a tensor."""
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves(output)]


def widened(tree: Any) -> Any:
    """Nested values, or arguments that `inspect` bound, with tensors of half types in float32."""
    if isinstance(tree, inspect.BoundArguments):
        return inspect.BoundArguments(tree.signature, OrderedDict(widened(dict(tree.arguments))))
    return map_leaves(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and _dtype(leaf) in HALVES else leaf, tree)


def _dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor, read so that a capture does not record it as a read of the forward."""
    if torch.compiler.is_compiling():
        return tensor.dtype
    with torch._C.DisableTorchFunction():
        return tensor.dtype


def narrowed(tree: Any, half: torch.dtype) -> Any:
    """Nested values with float32 tensors in a half type."""
    return map_leaves(
        lambda leaf: leaf.to(half) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf, tree
    )


def carry(old: nn.Module, new: nn.Module) -> None:
    """Transfer the hooks of a widened model to its replacement."""
    if _own_outputs(new):
        return
    for hook in old._forward_pre_hooks.values():
        if isinstance(hook, WideInputs):
            new.register_forward_pre_hook(hook, with_kwargs=True)
    for other in _own_outputs(old):
        new.register_forward_hook(other)


class WideInputs:
    """A forward pre-hook that converts inputs of half types to float32.

    Parts have it too, since a user may call them by themselves.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, as float32."""
        return widened(args), widened(kwargs)


class OwnOutputs:
    """A forward hook that converts outputs to the dtypes that they have in the user's model.

    Attributes:
        half: the model's type, for float outputs of a call with another number of outputs than the example.
        kinds: dtype of each output of the example, in order; None for one that is not a tensor.
        sizes: name -> bytes of the user's tensor.
    """

    def __init__(self, half: torch.dtype, kinds: list[torch.dtype | None], sizes: dict[str, int]) -> None:
        self.half, self.kinds, self.sizes = half, kinds, sizes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The output, each tensor in its own type."""
        count = sum(1 for _ in leaves(output))
        kinds = iter(self.kinds if count == len(self.kinds) else [self.half] * count)

        def own(leaf: Any) -> Any:
            kind = next(kinds)
            is_wide = isinstance(leaf, Tensor) and leaf.dtype == torch.float32
            return leaf.to(kind) if is_wide and kind in HALVES else leaf

        return map_leaves(own, output)

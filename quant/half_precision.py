"""Static quantisation of models in bfloat16 and float16: float32 inside, the model's own types outside.

int8 takes the place of the half type; what stays float beside it is faster and finer in float32 on CPUs, and ranges and
training want float32. So the copy that is prepared is a float32 one, and two hooks of its own make inputs float32 and
outputs what the user's model gives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.copying import copy_model
from quant.report import own_tensors
from quant.runtime.layers.quant_module import HALVES
from quant.runtime.trees import leaves, map_leaves


def half_of(model: nn.Module) -> torch.dtype | None:
    """The half type that a model's parameters or buffers have, the first one's; None for a model without."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in HALVES:
            return tensor.dtype
    return None


@torch.no_grad()
def widen(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Make a model float32 in place, with its own types in and out, where it is in a half type.

    Args:
        model: a copy of the user's.
        args, kwargs: of an example call, which tells the types of the outputs.

    Returns:
        whether it was. Not where the forward itself goes from one type to another, between layers of both: there the
        layers in the half type stay what they are.
    """
    half = half_of(model)
    if half is None:
        return False
    probe = copy.deepcopy(model).eval()
    try:
        output = type(probe).forward(probe, *args, **kwargs)
    except (RuntimeError, ValueError):  # a saved example is a float32 one
        args, kwargs = _narrowed((args, kwargs), half)
        output = type(probe).forward(probe, *args, **kwargs)
    kinds = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves(output)]
    if not _runs_wide(probe, args, kwargs):
        return False
    sizes = {name: tensor.nbytes for name, tensor in _named(model)}
    model.float()
    model.register_forward_pre_hook(WideInputs(), with_kwargs=True)
    model.register_forward_hook(OwnOutputs(half, kinds, sizes))
    return True


def _runs_wide(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model still runs when all of it, and its inputs, are float32; makes it so."""
    model.float()
    try:
        type(model).forward(model, *widened(args), **widened(kwargs))
    except RuntimeError:  # of other dtypes in one call of torch's
        return False
    return True


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by every name they have, without lazy ones that nothing has initialised."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return ((name, tensor) for name, tensor in every if not nn.parameter.is_lazy(tensor))


def sizes_before(model: nn.Module) -> dict[str, dict[int, int]]:
    """`own_tensors` of every module by name, with the bytes that the user's tensors had before `widen`."""
    own = [hook for hook in model._forward_hooks.values() if isinstance(hook, OwnOutputs)]
    sizes = {id(tensor): hook.sizes[name] for hook in own for name, tensor in _named(model) if name in hook.sizes}
    return {
        name: {one: sizes.get(one, size) for one, size in own_tensors(module).items()}
        for name, module in model.named_modules(remove_duplicate=False)
    }


def like(model: nn.Module, converted: nn.Module) -> nn.Module:
    """The float model in the type that `converted` computes in: a float32 copy of a half one that became static."""
    if half_of(model) is None or not any(isinstance(hook, OwnOutputs) for hook in converted._forward_hooks.values()):
        return model
    wide = copy_model(model).float()
    wide.register_forward_pre_hook(WideInputs(), with_kwargs=True)
    return wide


def widened(tree: Any) -> Any:
    """Nested values with tensors of half types in float32."""
    return map_leaves(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf, tree)


def _narrowed(tree: Any, half: torch.dtype) -> Any:
    return map_leaves(
        lambda leaf: leaf.to(half) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf, tree
    )


def carry(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks of `widen` to what takes the place of the whole model."""
    hooks = list(new._forward_hooks.values())
    for hook in old._forward_pre_hooks.values():
        if isinstance(hook, WideInputs) and not any(isinstance(one, OwnOutputs) for one in hooks):
            new.register_forward_pre_hook(hook, with_kwargs=True)
    for other in old._forward_hooks.values():
        if isinstance(other, OwnOutputs) and not any(isinstance(one, OwnOutputs) for one in hooks):
            new.register_forward_hook(other)


class WideInputs:
    """A forward pre-hook that makes inputs of half types float32."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, as float32."""
        return widened(args), widened(kwargs)


class OwnOutputs:
    """A forward hook that gives outputs the types that the user's model gives them.

    Attributes:
        half: the model's type, for float outputs of a call that gives another number of them than the example did.
        kinds: of each output of the example, in order; None for what is no tensor.
        sizes: bytes of the user's tensors, by name.
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

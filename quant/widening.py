"""Converts a model in a half type to float32, or those parts of it that compute the same in float32.

A forward may branch on dtypes: return another result, scale by another number, refuse a type. A float32 copy would
silently take the other branch. So its calls of torch are recorded in both types (`heard_calls.py`). Where they differ,
the largest parts with the same calls in both become float32, and the modules around them stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.copying import copy_model
from quant.half_precision import OwnOutputs, WideInputs, half_of, narrowed, sizes_of, widened
from quant.heard_calls import Heard, PartCalls, hear, near, same_calls
from quant.leaves import is_leaf
from quant.runtime.arguments import Arguments
from quant.runtime.names import full_name

MOST_CALLS = 4
"""Most calls of one part that are compared."""


@torch.no_grad()
def widen(model: nn.Module, calls: Sequence[Arguments]) -> bool:
    """Make a model float32 in place, with its own types in and out, where it is in a half type.

    Args:
        model: a copy of the user's.
        calls: example calls, which determine the dtypes of the outputs.

        Returns:
            whether the whole model became float32. Where its forward branches on dtypes, or casts between layers of
            different types, only parts do.
    """
    half = half_of(model)
    if half is None:
        return False
    probe = copy.deepcopy(model)
    own, heard = zip(*(_heard_in_own_type(probe, call, half) for call in calls), strict=True)
    if _does_the_same(probe.float(), own, heard):
        _put_hooks(model, half, heard[0].kinds)
        return True
    probe = copy.deepcopy(model)
    parts = dict(_parts(probe, "", _calls_of(hear(probe, call, most_calls=MOST_CALLS) for call in own), half))
    _widen_parts(probe, parts, half)
    if _does_the_same(probe, own, heard, wide=False):
        _widen_parts(model, parts, half)
    return False


@torch.no_grad()
def refuse_another_way(module: nn.Module, path: str, call: Arguments, halves: Mapping[str, torch.dtype]) -> None:
    """Raise ValueError for a call in which a widened module computes something else than the user's.

    Args:
        path: its dotted name, for the error.
        halves: name of a tensor within it -> its half type in the user's model.
    """
    if not halves:
        return
    own, half = copy_model(module), next(iter(halves.values()))
    _narrow(own, halves)
    try:
        _, heard = _heard_in_own_type(own, call, half)
        recorded = hear(module, call)
    except Exception:  # the user's, who will see it; or some of the caller's tensors were not in the half type
        return
    if not _are_the_same(heard, recorded):
        raise ValueError(
            f"{path or type(module).__name__}: a call that came after the examples does something else in {half} than "
            "in float32, in which the model is prepared; give such a call to quant.prepare, or prepare_qat, as one of "
            "examples=[...], and it goes by the model's own types"
        )


def _narrow(model: nn.Module, halves: Mapping[str, torch.dtype]) -> None:
    """Convert a copy of a widened module, or of one within it, back to its own dtypes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in halves:
            tensor.data = tensor.data.to(halves[name])
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, (WideInputs, OwnOutputs))]:
                del hooks[key]


def _heard_in_own_type(module: nn.Module, call: Arguments, half: torch.dtype) -> tuple[Arguments, Heard]:
    try:
        return call, hear(module, call)
    except (RuntimeError, ValueError):  # a saved example is a float32 one
        call = narrowed(call, half)
        return call, hear(module, call)


def _does_the_same(module: nn.Module, calls: Sequence[Arguments], heard: Sequence[Heard], *, wide: bool = True) -> bool:
    """Whether a module makes the calls recorded of the user's; in float32, or else in the dtypes of its inputs."""
    return all(
        _one_the_same(module, widened(call) if wide else call, known) for call, known in zip(calls, heard, strict=True)
    )


def _one_the_same(module: nn.Module, call: Arguments, known: Heard) -> bool:
    try:
        recorded = hear(module, call)
    except Exception:  # torch's, of other dtypes in one call, or the user's, who expects the half type
        return False
    return _are_the_same(known, recorded)


def _are_the_same(own: Heard, wide: Heard) -> bool:
    same = same_calls(own.computed, wide.computed)
    return near(own.output, wide.output) if same is None else same


def _calls_of(heard: Iterable[Heard]) -> PartCalls:
    calls_by_name: PartCalls = {}
    for one in heard:
        for name, calls in one.calls.items():
            calls_by_name.setdefault(name, []).extend(calls)
    return calls_by_name


def _parts(module: nn.Module, path: str, calls: PartCalls, half: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Dotted names of the largest parts that compute the same in float32 -> the dtypes of their outputs."""
    for name, child in module.named_children():
        inner = full_name(path, name)
        own = calls.get(inner, [])[:MOST_CALLS]
        if half_of(child) is None or isinstance(child, torch.jit.ScriptModule):
            continue
        given, kinds = [call for call, _ in own], [dtypes for _, dtypes in own]
        alike = all(dtypes == kinds[0] for dtypes in kinds)
        heard = [hear(child, call) for call in given]
        if own and alike and _does_the_same(copy.deepcopy(child).float(), given, heard):
            yield inner, kinds[0]
        else:
            yield from _parts(child, inner, calls, half)


def _widen_parts(model: nn.Module, parts: dict[str, Any], half: torch.dtype) -> None:
    for path, kinds in parts.items():
        part = model.get_submodule(path)
        if not _is_tied(model, part):
            _put_hooks(part, half, kinds)


def _is_tied(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part shares parameters with modules outside of it, in which they would become float32 too."""
    inside = {id(module) for module in part.modules()}
    tensors = {id(one) for one in (*part.parameters(), *part.buffers())}
    others = (module for module in model.modules() if id(module) not in inside)
    return any(
        id(one) in tensors for module in others for one in (*module._parameters.values(), *module._buffers.values())
    )


def _put_hooks(module: nn.Module, half: torch.dtype, kinds: list[torch.dtype | None]) -> None:
    """Convert a module to float32, with hooks that keep its own dtypes outside."""
    sizes = sizes_of(module)
    module.float()
    for part in module.modules():
        if part is module or not is_leaf(part):  # a user may call a part alone, and layers are called by what is around
            part.register_forward_pre_hook(WideInputs(), with_kwargs=True)
    module.register_forward_hook(OwnOutputs(half, kinds, sizes))

"""Whether a model in a half type does the same in float32, or which parts of it do: those are made float32.

A forward may go by the dtypes that it finds: return another thing, scale by another number, refuse a type. A float32
copy of it would go the other way without a word. So the calls of torch's functions that it makes are heard in both
types (`heard_calls.py`); where they differ, the largest parts that do the same in both are float32, and what is around
them stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quant.half_precision import OwnOutputs, WideInputs, half_of, narrowed, sizes_of, widened
from quant.heard_calls import MOST_CALLS, Heard, PartCalls, hear, near, same_calls
from quant.runtime.arguments import Arguments
from quant.runtime.names import full_name


@torch.no_grad()
def widen(model: nn.Module, calls: Sequence[Arguments]) -> bool:
    """Make a model float32 in place, with its own types in and out, where it is in a half type.

    Args:
        model: a copy of the user's.
        calls: examples, which tell the types of the outputs.

    Returns:
        whether the whole model was. Not where the forward itself goes by dtypes, or from one type to another, between
        layers of both: there the parts are that can be.
    """
    half = half_of(model)
    if half is None:
        return False
    probe = copy.deepcopy(model).eval()
    calls, heard = zip(*(_heard_in_own_type(probe, call, half) for call in calls), strict=True)
    if _same_in_float32(probe, calls, heard):
        _put_hooks(model, half, heard[0].kinds)
        return True
    parts = dict(_parts(probe, "", _calls_of(heard), half))
    trial = copy.deepcopy(probe)
    _widen_parts(trial, parts, half)
    if all(_does_the_same(trial, call, one, wide=False) for call, one in zip(calls, heard, strict=True)):
        _widen_parts(model, parts, half)
    return False


def _heard_in_own_type(module: nn.Module, call: Arguments, half: torch.dtype) -> tuple[Arguments, Heard]:
    try:
        return call, hear(module, call)
    except (RuntimeError, ValueError):  # a saved example is a float32 one
        call = narrowed(call, half)
        return call, hear(module, call)


def _same_in_float32(module: nn.Module, calls: Sequence[Arguments], heard: Sequence[Heard]) -> bool:
    """Whether a module does in float32 what was heard of it."""
    wide = copy.deepcopy(module).float()
    return all(_does_the_same(wide, call, one, wide=True) for call, one in zip(calls, heard, strict=True))


def _does_the_same(module: nn.Module, call: Arguments, known: Heard, *, wide: bool) -> bool:
    try:
        found = hear(module, widened(call) if wide else call)
    except Exception:  # torch's, of other dtypes in one call, or the user's, who expects the half type
        return False
    same = same_calls(known.said, found.said)
    return near(known.output, found.output) if same is None else same


def _calls_of(heard: Sequence[Heard]) -> PartCalls:
    found: PartCalls = {}
    for one in heard:
        for name, calls in one.calls.items():
            found.setdefault(name, []).extend(calls)
    return found


def _parts(module: nn.Module, path: str, calls: PartCalls, half: torch.dtype) -> Iterator[tuple[str, Any]]:
    """The largest parts that do the same in float32, by dotted name, with the types of their outputs."""
    for name, child in module.named_children():
        inner = full_name(path, name)
        own = calls.get(inner, [])[:MOST_CALLS]
        if half_of(child) is None or isinstance(child, torch.jit.ScriptModule):
            continue
        kinds = [found for _, found in own]
        one_form = all(found == kinds[0] for found in kinds)
        if (
            own
            and one_form
            and _same_in_float32(child, [call for call, _ in own], [hear(child, call) for call, _ in own])
        ):
            yield inner, kinds[0]
        else:
            yield from _parts(child, inner, calls, half)


def _widen_parts(model: nn.Module, parts: dict[str, Any], half: torch.dtype) -> None:
    for path, kinds in parts.items():
        part = model.get_submodule(path)
        if not _is_tied(model, part):
            _put_hooks(part, half, kinds)


def _is_tied(model: nn.Module, part: nn.Module) -> bool:
    """Whether a part has parameters that modules outside of it have too, which would be float32 there."""
    inside = {id(module) for module in part.modules()}
    tensors = {id(one) for one in (*part.parameters(), *part.buffers())}
    others = (module for module in model.modules() if id(module) not in inside)
    return any(
        id(one) in tensors for module in others for one in (*module._parameters.values(), *module._buffers.values())
    )


def _put_hooks(module: nn.Module, half: torch.dtype, kinds: list[torch.dtype | None]) -> None:
    """Make a module float32, and give it the hooks that keep its own types outside."""
    sizes = sizes_of(module)
    module.float()
    module.register_forward_pre_hook(WideInputs(), with_kwargs=True)
    module.register_forward_hook(OwnOutputs(half, kinds, sizes))

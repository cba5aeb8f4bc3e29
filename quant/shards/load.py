"""`load_quantized`: a model on the meta device and a float checkpoint to a quantised model, a layer at a time."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.derived_buffers import NoValues, fill_derived
from quant.pretrained import is_pretrained, let_it_save
from quant.recipe import Recipe
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import full_name
from quant.shards.assembly import Assembly, check_holds
from quant.shards.reader import FLOATS, Checkpoint, ShardError, Shards


@torch.inference_mode(False)
def load_quantized(
    model: nn.Module,
    shards: Shards,
    recipe: Recipe | None = None,
    *,
    backend: str | None = None,
    ignore: Sequence[str] = (),
) -> nn.Module:
    """Quantise a float checkpoint while it is read, to what `quantize_dynamic` makes of the whole model.

    Memory at the peak is that of the quantised model and of one float layer, the largest, which is read first.

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        q = quant.load_quantized(model, "folder", quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=64)))

    Args:
        model: a float model whose parameters are on the meta device, without values; it is changed and used up. What
            its parameters' dtype is becomes that of the layers' inputs and outputs, and of what stays float.
        shards: a .safetensors file, several, an index (.json), or a folder with them. Tensors have the names of the
            model's state_dict, and are float32, bfloat16 or float16.
        recipe: as for `quantize_dynamic`.
        backend: as for `quantize_dynamic`.
        ignore: names, with wildcards, of tensors in the shards that the model does not have.

    Returns:
        The quantised model; `quant.summary` of it says what became of each module.

    Raises:
        ShardError: the shards lack a tensor, or have one more, or of another shape or dtype; are quantised already, or
            damaged; or a buffer that is in no checkpoint has no values.
        NothingQuantized, RecipeError, BackendUnavailable, ValueError: as for `quantize_dynamic`.
        OSError: a file cannot be read.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_quantized: expected an nn.Module, got {type(model).__name__}")
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"load_quantized: expected a quant.Recipe, got {type(recipe).__name__}")
    if isinstance(ignore, str):
        raise TypeError(f"load_quantized: ignore is {ignore!r}, expected a list of names: ignore=[{ignore!r}]")
    checkpoint = Checkpoint(shards)
    assembly = Assembly(model, recipe, backend)
    tied = _tied(model)
    _check(model, checkpoint, tied, ignore)
    # The largest first, while the least of the quantised model is there.
    for group in sorted(assembly.groups, key=lambda one: -one.bytes):
        for names in list(group.tensors):
            name, tensor = _one_of(names, checkpoint)
            assembly.supply(name, tensor, checkpoint.where(name))
            del tensor
    result = assembly.finish()
    _load_floats(result, checkpoint, tied)
    try:
        fill_derived(result)
    except NoValues as error:
        raise ShardError(str(error)) from None
    let_it_save(result, recipe)
    return result


def _tied(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names of each tensor of the state_dict -> all names of the same tensor."""
    state = model.state_dict(keep_vars=True)
    same: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            same.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in same.values() for name in names}


def _check(model: nn.Module, checkpoint: Checkpoint, tied: dict[str, tuple[str, ...]], ignore: Sequence[str]) -> None:
    """Raise ShardError unless the checkpoint has the tensors of the model; looks at headers alone."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ShardError(f"{odd[0]!r} of the model's state_dict is not a tensor, and safetensors holds tensors alone")
    kind, entries = type(model).__name__, checkpoint.entries
    extra = [name for name in entries if name not in state and not _matches(name, ignore)]
    for names in dict.fromkeys(tied.values()):
        if not any(name in entries for name in names):
            way = f"they have {extra[0]!r}, which the model lacks: {_renamed(model)}" if extra else "give all of them"
            raise ShardError(
                f"{checkpoint.source}: tensor {' or '.join(map(repr, names))} of {kind} is in none of the shards; {way}"
            )
        for name in (name for name in names if name in entries):
            own, entry = state[name], entries[name]
            if tuple(own.shape) != entry.shape:
                raise ShardError(
                    f"{checkpoint.where(name)} has shape {entry.shape}, the model's {tuple(own.shape)}; make the model "
                    "with the configuration of this checkpoint"
                )
            if own.is_floating_point() and entry.dtype not in FLOATS:
                raise ShardError(
                    f"{checkpoint.where(name)} is {entry.dtype}, expected float32, bfloat16 or float16; convert it"
                )
            if not own.is_floating_point() and entry.dtype in FLOATS:
                raise ShardError(f"{checkpoint.where(name)} is {entry.dtype}, the model's is {own.dtype}; convert it")
    if extra:
        raise ShardError(
            f"{checkpoint.where(extra[0])} is not of {kind}, nor are {len(extra) - 1} others; give their names as "
            "ignore=, with wildcards, if they are to be left out"
        )


def _renamed(model: nn.Module) -> str:
    """The way to a model whose checkpoint has other names; transformers knows those of older ones of its models."""
    if is_pretrained(model):
        return (
            "names of an older form of this model are read by its from_pretrained(..., quantization_config="
            "OctetConfig(...)), of quant.integrations.transformers_quantizer"
        )
    return "are names changed?"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _one_of(names: tuple[str, ...], checkpoint: Checkpoint) -> tuple[str, Tensor]:
    """The tensor of these names; where the shards have it under several, they must be equal."""
    first, *others = [name for name in names if name in checkpoint.entries]
    tensor = checkpoint.read(first)
    for name in others:
        if not torch.equal(tensor, checkpoint.read(name)):
            raise ShardError(
                f"{checkpoint.where(first)} and {name!r} differ, and the model has one parameter for both; untie them "
                "in its configuration"
            )
    return first, tensor


@torch.no_grad()
def _load_floats(model: nn.Module, checkpoint: Checkpoint, tied: dict[str, tuple[str, ...]]) -> None:
    """Load what stays float: parameters and buffers of modules that are not quantised, in the dtype of the model."""
    loaded: dict[tuple[str, ...], Tensor] = {}
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, own in held.items():
                names = tied.get(full_name(path, key), ())
                if own is None or not names or (isinstance(module, QuantModule) and own.device.type != "meta"):
                    continue
                if names not in loaded:
                    name, tensor = _one_of(names, checkpoint)
                    check_holds(checkpoint.where(name), tensor, own.dtype)
                    value = tensor.to(own.dtype)
                    loaded[names] = nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value
                held[key] = loaded[names]

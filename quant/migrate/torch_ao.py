"""`from_torch_ao`: what torch.ao quantised, with the same integers in this package's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quant.capture import as_arguments
from quant.copying import copy_model
from quant.leaves import base_layer
from quant.migrate.dynamic_layers import dynamic_model
from quant.migrate.packed_layers import Layer, Product, Recurrent, Table, Unread, packed_layers
from quant.migrate.pt2e_program import is_pt2e, program_layers, program_run
from quant.migrate.recorded_run import recorded_run
from quant.migrate.remarks import Remarks
from quant.migrate.static_model import static_model
from quant.recurrent_layers import directions_of, is_cell, is_recurrent_layer, tensors_of
from quant.runtime.arguments import copied
from quant.runtime.names import full_name, has_submodule, submodule

VERB = "quant.from_torch_ao"

DOORS = (
    "torch.ao.quantization.quantize_dynamic, convert and convert_fx give such models, and torchao's convert_pt2e. A "
    "prepared model is to be converted first; torchao's quantize_ has its integers elsewhere: quantise its float model "
    "with quant.quantize_dynamic"
)


@torch.inference_mode(False)
def from_torch_ao(
    ao_model: nn.Module | Mapping[str, Any],
    float_model: nn.Module,
    example_inputs: Any = None,
    *,
    backend: str | None = None,
) -> nn.Module:
    """A model that torch.ao quantised, as this package's int8 model with the same integers.

    Weights keep their int8 values and scales, biases are float32 as there, and static activations keep their scales
    and zero points. Dynamic layers quantise each row of their input by its own range, where torch.ao had one range per
    call. What torch.ao computes in float stays float, with its parameters. The report says of each layer where its
    numbers come from and what could not be carried over.

    Args:
        ao_model: from `torch.ao.quantization.quantize_dynamic`, its sibling convert (eager mode) or `convert_fx`, or a
            program from torchao's `convert_pt2e`; left as it is. Of a dynamic model its `state_dict()` will do.
        float_model: the model that torch.ao was given, with the same layers' names; in eager mode with its stubs and
            `FloatFunctional`. Left as it is, and the values of its weights do not matter, but for convolutions that
            a program of PT2E has in float.
        example_inputs: of a static model: a tensor, a tuple of positional arguments, or a dict of keyword arguments, as
            for `quant.prepare`. Both models are called with them. Dynamic models need none.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.

    Returns:
        the int8 model, with float_model's classes and names. `quant.save` keeps it.

    Raises:
        TypeError: an argument of another kind.
        ValueError: nothing in `ao_model` is quantised by torch.ao; a layer of it has another name or shape in
            `float_model`; a static model without example inputs; packed weights that this process cannot unpack.

    Source: the formats of the packed weights are those of torch/ao/nn/quantized (torch 2.13).
    """
    if not isinstance(float_model, nn.Module):
        raise TypeError(f"{VERB}: float_model is a {type(float_model).__name__}, expected an nn.Module")
    if not isinstance(ao_model, (nn.Module, Mapping)):
        raise TypeError(
            f"{VERB}: ao_model is a {type(ao_model).__name__}, expected an nn.Module that torch.ao quantised, or the "
            "state_dict of a dynamic one"
        )
    state = ao_model if isinstance(ao_model, Mapping) else _state_of(ao_model)
    source, remarks = type(ao_model).__name__, Remarks()
    found = program_layers(ao_model, float_model, remarks) if is_pt2e(ao_model) else packed_layers(state)
    layers, theirs = _named_as(float_model, _with_integers(found, source))
    for name, layer in layers.items():
        _check_layer(name, layer, submodule(float_model, name))
    like_theirs = _with_floats(float_model, state, folded=is_pt2e(ao_model))
    if any(isinstance(one, Product) and not one.dynamic for one in layers.values()):
        if isinstance(ao_model, Mapping):
            raise ValueError(
                f"{VERB}: the state_dict is of a static model, whose calls it does not have; load it into the model "
                "that torch.ao's convert or convert_fx gives, and give that"
            )
        if example_inputs is None:
            raise ValueError(f"{VERB}: {source} is a static model: give example_inputs, a call of it")
        example, names = as_arguments(example_inputs), {theirs.get(name, name) for name in layers}
        if is_pt2e(ao_model):
            run = program_run(ao_model, example, float_model, names)
        else:
            run = recorded_run(ao_model, copied(example), names)
        model = static_model(run, layers, theirs, like_theirs, (example_inputs, example), backend, remarks)
    else:
        model = dynamic_model(layers, like_theirs, backend, remarks)
    remarks.attach(model, source)
    return model


def _state_of(model: nn.Module) -> Mapping[str, Any]:
    """A model's state_dict, which unpacks its weights."""
    try:
        return model.state_dict()
    except RuntimeError as error:
        engines = ", ".join(torch.backends.quantized.supported_engines)
        raise ValueError(
            f"{VERB}: {type(model).__name__}: a packed weight cannot be unpacked in this process, which has the "
            f"engines {engines}: {error}. Where another engine packed the model, take its state_dict there and load it "
            "into a model that was converted with torch.backends.quantized.engine set to one of these, and give that"
        ) from error


def _with_integers(layers: Mapping[str, Layer], source: str) -> Mapping[str, Layer]:
    """The layers, if one of them has integers."""
    if any(not isinstance(one, Unread) for one in layers.values()):
        return layers
    if layers:
        name, first = next(iter(layers.items()))
        raise ValueError(f"{VERB}: {source} has no int8 layer; {name}: {getattr(first, 'reason', '')}")
    raise ValueError(f"{VERB}: {source} has no layer that torch.ao quantised; {DOORS}")


def _named_as(float_model: nn.Module, layers: Mapping[str, Layer]) -> tuple[dict[str, Layer], dict[str, str]]:
    """The layers by their names in the float model, and their names in torch.ao's where these differ.

    A layer that torch.ao fused with what follows is a container in a float model that was fused before it was given.
    """
    named: dict[str, Layer] = {}
    theirs: dict[str, str] = {}
    for name, layer in layers.items():
        if not has_submodule(float_model, name):
            own = [one for one, module in float_model.named_modules() if _has_weights(module)]
            raise ValueError(
                f"{VERB}: layer {name!r} of torch.ao's model is not in {type(float_model).__name__}, expected the "
                f"float model that it was made of, with the same names; its layers are {', '.join(own[:12])}"
            )
        inside = [one for one, module in submodule(float_model, name).named_modules() if _fits(layer, module)]
        full = full_name(name, inside[0]) if len(inside) == 1 else name
        named[full] = layer
        if full != name:
            theirs[full] = name
    return named, theirs


def _has_weights(module: nn.Module) -> bool:
    return base_layer(module) is not None and next(module.parameters(recurse=False), None) is not None


def _fits(layer: Layer, module: nn.Module) -> bool:
    """Whether a float module is of the kind of a quantised layer."""
    if isinstance(layer, Table):
        return isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    if isinstance(layer, Recurrent):
        return is_recurrent_layer(module)
    return isinstance(layer, Unread) or isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))


def _check_layer(name: str, layer: Layer, module: nn.Module) -> None:
    """Raise ValueError where the float model's layer is of another kind or shape."""
    if not _fits(layer, module):
        raise _mismatch(name, type(layer).__name__.lower(), type(module).__name__)
    if isinstance(layer, Product):
        _check_shape(name, "weight", tuple(layer.quantized.shape), module.weight)
    if isinstance(layer, Table):
        _check_shape(name, "weight", layer.shape, module.weight)
    if isinstance(layer, Recurrent):
        places = [(0, False)] if is_cell(module) else directions_of(module)
        if len(places) != len(layer.directions):
            raise _mismatch(name, f"{len(layer.directions)} layers and directions", str(len(places)))
        for place, direction in zip(places, layer.directions, strict=True):
            own = tensors_of(module, *place)
            _check_shape(name, "weight_ih", tuple(direction.weight_ih.q_weight.shape), own.weight_ih)
            _check_shape(name, "weight_hh", tuple(direction.weight_hh.q_weight.shape), own.weight_hh)


def _check_shape(name: str, what: str, expected: tuple[int, ...], came: Any) -> None:
    if tuple(came.shape) != expected:
        raise _mismatch(name, f"a {what} of shape {expected}", f"one of {tuple(came.shape)}")


def _mismatch(name: str, expected: str, came: str) -> ValueError:
    return ValueError(
        f"{VERB}: layer {name!r}: expected {expected}, as torch.ao's model has it, and float_model has {came}; give "
        "the float model that torch.ao quantised"
    )


def _with_floats(float_model: nn.Module, state: Mapping[str, Any], *, folded: bool) -> nn.Module:
    """A copy of the float model with the parameters and buffers that torch.ao's model has in float.

    Args:
        folded: whether its convolutions have batch norms in them, which the float model has apart.
    """
    copied = copy_model(float_model)
    own = copied.state_dict()
    same = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name in own and not value.is_quantized and value.shape == own[name].shape
        if not (folded and _is_convolution(copied, name.rpartition(".")[0]))
    }
    copied.load_state_dict(same, strict=False)
    return copied


def _is_convolution(model: nn.Module, name: str) -> bool:
    return has_submodule(model, name) and isinstance(submodule(model, name), nn.modules.conv._ConvNd)

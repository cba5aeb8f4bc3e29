"""Int8 layers without values: built from the description of those that were saved, and the forms of their tensors.

For loaders that bring the tensors afterwards. Layers that share all their tensors with another one, as a tied table
does, have none to load and are built when the other one has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quant.artefact.file import ArtefactError
from quant.artefact.manifest_form import check_setting
from quant.artefact.saving import describe_layer, int8_modules
from quant.nn import Conv1D, Embedding, EmbeddingBag, Experts, Linear, TiedEmbedding
from quant.nn.base import QuantizedWeight, adopt
from quant.recipe import QConfig
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import full_name, put_module

SHARES = "shares"
"""The key, in a layer's description, of the name of the layer whose tensors it reads."""


def describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Class and settings of each int8 layer of a model, by name; JSON-ready.

    Raises:
        ArtefactError: there is a layer of a class that cannot be built without its float weights.
    """
    layers = int8_modules(model)
    described = {name: describe_layer(layer) for name, layer in layers.items()}
    owners: dict[frozenset[int], str] = {}
    for name in sorted(layers, key=lambda one: isinstance(layers[one], TiedEmbedding)):
        if not isinstance(layers[name], (Linear, Embedding, EmbeddingBag, Experts, TiedEmbedding)):
            raise ArtefactError(
                f"layer {name!r} is an int8 {type(layers[name]).__name__}, which only a file of quant.save holds"
            )
        owner = owners.setdefault(frozenset(map(id, layers[name].state_dict(keep_vars=True).values())), name)
        if owner != name:
            described[name][SHARES] = owner
    return described


def own_state(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state_dict without the tensors of layers that share another one's."""
    sharing = tuple(f"{name}." for name, entry in described.items() if SHARES in entry)
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(sharing)}


class EmptyLayers:
    """Puts layers without values into a float model, and those that share tensors when they have values.

    Args:
        model: its layers may be on the meta device. Modules that share are placeholders until `share`.
        described: of `describe_layers`.
        forms: the tensors to come by their names, on the meta device.

    Raises:
        ArtefactError: the model has no such layer, or there is no such tensor.
    """

    def __init__(
        self, model: nn.Module, described: Mapping[str, Mapping[str, Any]], forms: Mapping[str, Tensor]
    ) -> None:
        self._model = model
        self._waiting: dict[str, tuple[nn.Module, Mapping[str, Any]]] = {}
        for name, entry in described.items():
            old = _float_layer(model, name)
            if SHARES in entry:
                self._waiting[name] = old, entry
                put_module(model, name, nn.Identity())
            else:
                put_module(model, name, _layer(name, old, entry, forms))

    def share(self) -> None:
        """Build the layers that read another one's tensors, which are there now."""
        for name, (old, entry) in self._waiting.items():
            owner = self._model.get_submodule(entry[SHARES])
            held = {full_name(name, key): tensor for key, tensor in owner.state_dict(keep_vars=True).items()}
            new = _layer(name, old, entry, held)
            for path, part in new.named_modules():
                own = owner.get_submodule(path)
                part._buffers.update({key: one for key, one in own._buffers.items() if key in part._buffers})
                part._parameters.update({key: one for key, one in own._parameters.items() if key in part._parameters})
            put_module(self._model, name, new)


def _float_layer(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ArtefactError(f"the checkpoint quantises {name!r}, which {type(model).__name__} does not have") from error


def _layer(name: str, old: Any, entry: Mapping[str, Any], forms: Mapping[str, Tensor]) -> QuantModule:
    """The layer of the described class and settings for a float one, with the tensors of `forms` themselves."""
    kind, inner = entry["class"], entry["inner"]
    make = _MAKERS.get(kind)
    if make is None:
        raise ArtefactError(f"layer {name!r} is an int8 {kind}, which this version does not know: upgrade it")
    try:
        new: QuantModule = make(name, old, inner, forms)
    except KeyError as error:
        raise ArtefactError(f"layer {name!r} has no tensor {error} in the checkpoint; load its files again") from error
    except _NO_LAYER as error:
        raise ArtefactError(f"layer {name!r} of the checkpoint is no int8 {kind}: {error}; {_AGAIN}") from error
    adopt(new, old, name)
    for path, settings in inner.items():
        try:
            part: Any = new.get_submodule(path)
            for key, value in settings.items():
                check_setting(key, value, part.kept_in_files)
                setattr(part, key, value)
        except (AttributeError, ValueError) as error:
            raise ArtefactError(f"layer {name!r} of the checkpoint, part {path!r}: {error}; {_AGAIN}") from error
    return new


_NO_LAYER = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What building a layer ends in where its settings, or the shapes and dtypes of its tensors, are those of none."""
_AGAIN = "load its files again"


def _weight(name: str, settings: Mapping[str, Any], forms: Mapping[str, Tensor]) -> QuantizedWeight:
    columns = forms.get(full_name(name, "columns"))
    bits = settings.get("activation_bits", 8)
    return QuantizedWeight(forms[full_name(name, "q_weight")], forms[full_name(name, "scale")], columns, bits)


def _linear(kind: type[Linear]) -> Any:
    def make(name: str, old: Any, inner: Mapping[str, Any], forms: Mapping[str, Tensor]) -> Linear:
        bias = None if old.bias is None else forms[full_name(name, "bias")]
        return kind(_weight(name, inner[""], forms), bias)

    return make


def _table(kind: type[Embedding] | type[EmbeddingBag]) -> Any:
    def make(name: str, old: Any, inner: Mapping[str, Any], forms: Mapping[str, Tensor]) -> Embedding | EmbeddingBag:
        rows: Any = SimpleNamespace(rows=forms[full_name(name, "rows")])
        return kind(old, QConfig(weight_bits=inner[""]["bits"]), tied_to=rows)

    return make


def _tied(name: str, old: Any, inner: Mapping[str, Any], forms: Mapping[str, Tensor]) -> TiedEmbedding:
    return TiedEmbedding(old, _weight(name, inner[""], forms))


def _experts(name: str, old: Any, inner: Mapping[str, Any], forms: Mapping[str, Tensor]) -> Experts:
    def linears(which: str) -> Iterable[Linear]:
        for path in (path for path in inner if path.startswith(f"{which}.")):
            here = full_name(name, path)
            yield Linear(_weight(here, inner[path], forms), forms.get(full_name(here, "bias")))

    return Experts(linears("up"), linears("down"))


_MAKERS: dict[str, Any] = {
    "Linear": _linear(Linear),
    "Conv1D": _linear(Conv1D),
    "Embedding": _table(Embedding),
    "EmbeddingBag": _table(EmbeddingBag),
    "TiedEmbedding": _tied,
    "Experts": _experts,
}


@torch.no_grad()
def freeze(model: nn.Module) -> None:
    """Let no parameter of an int8 layer require a gradient, as none does that `quantize_dynamic` builds."""
    for module in model.modules():
        if isinstance(module, QuantModule):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)

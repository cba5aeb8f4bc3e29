"""`OctetConfig`: `from_pretrained` of transformers quantises while it loads, and `save_pretrained` writes what it made.

    from quant.integrations.transformers_quantizer import OctetConfig

    config = OctetConfig(bits=4, group_size=64)
    model = AutoModelForCausalLM.from_pretrained("folder", quantization_config=config)
    model.save_pretrained("folder-int4")
    again = AutoModelForCausalLM.from_pretrained("folder-int4")  # the same bits

Importing this file registers the method "octet" with transformers, by its own `register_quantizer`. A float checkpoint
is quantised a layer at a time as its tensors are read (`quant/shards/assembly.py`). What was saved has the settings of
each int8 layer in the header of its files, and its layers are built by them before the tensors come.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quant.artefact import manifest_form
from quant.artefact.layer_forms import SHARES, EmptyLayers, describe_layers, freeze, own_state
from quant.nn.attention import leave_fast_paths
from quant.recipe import QConfig, Recipe, RecipeError
from quant.report import Report, ReportEntry, attach_report, summary
from quant.runtime.layers.quant_module import HALVES, QuantModule
from quant.runtime.names import dtype_name, full_name
from quant.shards.assembly import Assembly
from quant.shards.reader import ShardError

METHOD = "octet"

_DTYPES = tuple(dtype_name(one) for one in (torch.float32, *HALVES))
_FIELDS = ("bits", "group_size", "symmetric", "rules", "recipe", "dtype", "quant_method")
"""Of an OctetConfig."""


@register_quantization_config(METHOD)
class OctetConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of `from_pretrained`.

    Args:
        bits, group_size, symmetric: `weight_bits`, `group_size` and `weight_symmetric` of a `quant.QConfig`, for what
            no rule matches.
        rules: by names of modules, with wildcards, a `quant.QConfig`, or None for what stays float; the first that
            matches decides.
        recipe: a whole `quant.Recipe`, or its `to_dict()`, in place of the arguments above.
        dtype: of a saved model, which `save_pretrained` writes; `from_pretrained` takes it where none is asked for.

    Raises:
        RecipeError: there are no such settings, or they stand beside a recipe.
    """

    def __init__(
        self,
        bits: int = 8,
        group_size: int | None = None,
        symmetric: bool = True,
        rules: Mapping[str, QConfig | None] | None = None,
        recipe: Recipe | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = METHOD
        if recipe is not None and (bits != 8 or group_size is not None or not symmetric or rules):
            raise RecipeError("OctetConfig: a recipe has its own bits, group_size, symmetric and rules; give it alone")
        if recipe is None:
            default = QConfig(weight_bits=bits, group_size=group_size, weight_symmetric=symmetric)
            recipe = Recipe(rules or {}, default=default)
        self._recipe: Recipe | str = recipe if isinstance(recipe, Recipe) else Recipe.from_dict(recipe)
        if dtype is not None and dtype not in _DTYPES:
            raise RecipeError(f"OctetConfig: dtype is {dtype!r}, expected None or one of {', '.join(_DTYPES)}")
        self.dtype = dtype

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As transformers reads it from config.json; RecipeError for fields that there are none of."""
        unknown = sorted(set(map(str, config_dict)) - set(_FIELDS))
        if unknown:
            raise RecipeError(f"OctetConfig: unknown fields {unknown}, expected some of {sorted(_FIELDS)}")
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    def to_recipe(self) -> Recipe:
        """The recipe that it stands for.

        Raises:
            RecipeError: the config was pickled, and its recipe has rules that are no names.
        """
        if isinstance(self._recipe, str):
            raise RecipeError(self._recipe)
        return self._recipe

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it; RecipeError where the recipe has rules that are no names."""
        return {"quant_method": METHOD, "recipe": self.to_recipe().to_dict(), "dtype": self.dtype}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which takes no lambda: of a recipe that has no form in JSON the error that says so is kept."""
        state = dict(self.__dict__)
        try:
            self.to_dict()
        except RecipeError as error:
            state["_recipe"] = str(error)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> OctetConfig:
        """A copy with the recipe itself, which nothing writes to."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Gives a tensor that transformers has read to the layer that it belongs to."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str = "",
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Takes the tensor; returns it under the names of layers that stay float."""
        floats: dict[str, Tensor] = {}
        assembly = self._assembly
        for key, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            name = key if assembly.names(key) else full_layer_name
            if not assembly.is_built(name):  # else a second name of a tied tensor: the configuration says they are one
                assembly.supply(name, tensor, f"tensor {name!r}")
            for one in assembly.names(name):
                if not assembly.is_taken(one):
                    floats[one] = tensor
                    continue
                if missing_keys is not None:
                    missing_keys.discard(one)
                if assembly.is_built(one):
                    _initialized(assembly.model, _layer_of(one))
        return floats


@register_quantizer(METHOD)
class OctetQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls while it loads a model with an `OctetConfig`."""

    quantization_config: OctetConfig
    requires_calibration = False

    def __init__(self, quantization_config: OctetConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._assembly: Assembly | None = None
        self._empty: EmptyLayers | None = None
        self._saved: _Saved | None = None

    def validate_environment(self, *args: Any, **options: Any) -> None:
        """Raise ValueError for devices that int8 layers do not run on."""
        devices = options.get("device_map")
        places = set(devices.values()) if isinstance(devices, Mapping) else {devices} - {None}
        other = [place for place in places if str(place) not in ("cpu", "auto")]
        if other:
            raise ValueError(f"device_map puts the model on {other[0]}, and int8 layers run on the CPU: leave it out")

    def _with_saved_dtype(self, config: Any) -> Any:
        """The configuration with the dtype that a model was saved in, which is taken where no other one is asked for.

        The dtype of config.json may be that of the first bias of an int8 layer.
        """
        if self.pre_quantized and self.quantization_config.dtype is not None:
            config.dtype = self.quantization_config.dtype
        return config

    # The two that are given the configuration before its dtype is read: in transformers 5.0, and since 5.20.
    update_tp_plan = update_attn_implementation = _with_saved_dtype

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Notes the dtype of the model."""
        self.quantization_config.dtype = dtype_name(dtype)
        return dtype

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        if self.pre_quantized:
            self._saved = saved = _saved(options.get("checkpoint_files") or ())
            layers = list(saved.layers)
            held = {name for pair in model.all_tied_weights_keys.items() for name in pair if _layer_of(name) in layers}
            self._empty = EmptyLayers(model, saved.layers, saved.forms)
        else:
            _tie(model)
            self._assembly = assembly = Assembly(model, self.quantization_config.to_recipe(), None)
            layers = [_layer_of(name) for name, _ in model.named_parameters() if assembly.is_taken(name)]
            held = {name for pair in model.all_tied_weights_keys.items() for name in pair if assembly.names(name)}
        # What int8 layers share they share already.
        ties = model.all_tied_weights_keys.items()
        model.all_tied_weights_keys = {target: source for target, source in ties if not {target, source} & held}
        for name in layers:
            _initialized(model, name)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Whether a parameter is of a layer that becomes int8."""
        return self._assembly is not None and bool(self._assembly.names(param_name))

    def get_quantize_ops(self) -> ConversionOps:
        """What is done with such a parameter."""
        assert self._assembly is not None
        return _Quantize(self._assembly)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Tensors of int8 layers keep the dtype that they were saved in; others have the model's."""
        assert self._saved is not None
        return None if set(converter.target_patterns) & self._saved.forms.keys() else dtype

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        if self._assembly is not None:
            self._assembly.finish()
        if self._empty is not None:
            self._empty.share()
            freeze(model)
            leave_fast_paths(model)
        if self._saved is not None:
            attach_report(model, self._saved.report)
        self._assembly = self._empty = self._saved = None
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """What `save_pretrained` writes: each tensor once, and in the header the settings of layers and the report.

        config.json gets the quantization_config, which a model of `quant.quantize_dynamic` does not have so far.
        """
        described = describe_layers(model)
        dtypes = {layer.dtype for layer in model.modules() if isinstance(layer, QuantModule)}
        self.quantization_config.dtype = dtype_name(
            min(dtypes, key=(*HALVES, torch.float32).index, default=model.dtype)
        )
        self.quantization_config.to_dict()  # a recipe that no file holds is an error before anything is written
        model.config.quantization_config = self.quantization_config
        state = own_state(model, described)
        forms = {
            name: (dtype_name(state[name].dtype), list(state[name].shape))
            for layer in described
            for name in (full_name(layer, key) for key in model.get_submodule(layer).state_dict())
            if name in state
        }
        header = {"layers": described, "tensors": forms, "report": summary(model).to_dict()["modules"]}
        return state, {METHOD: json.dumps(header)}

    def is_serializable(self, **_: Any) -> bool:
        """`save_pretrained` writes the int8 model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No gradient goes through int8 layers."""
        return False


def _tie(model: Any) -> None:
    """Make tied parameters one object, which transformers does only when they have values."""
    for target, source in model.all_tied_weights_keys.items():
        path, _, key = target.rpartition(".")
        model.get_submodule(path)._parameters[key] = model.get_parameter(source)


def _layer_of(name: str) -> str:
    """The layer of a parameter."""
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _initialized(model: Any, layer: str) -> None:
    """Mark a layer, and the module that it is in, as initialised: transformers then draws no random weights for them,
    which it would write into a copy of an int8 layer's.
    """
    for part in model.get_submodule(layer).modules():
        part._is_hf_initialized = not part._non_persistent_buffers_set
    parent = model.get_submodule(_layer_of(layer))
    if not parent._parameters and not parent._buffers:
        parent._is_hf_initialized = True


@dataclass(frozen=True)
class _Saved:
    """What the header of a saved model says.

    Attributes:
        layers: of `describe_layers`.
        forms: the tensors of these layers, on the meta device.
        report: of the model.
    """

    layers: dict[str, dict[str, Any]]
    forms: dict[str, Tensor]
    report: Report

    @classmethod
    def read(cls, text: str) -> _Saved:
        """From the header's text; one that is not of this form ends in some error of `_DAMAGED`."""
        header = json.loads(text)
        layers = header["layers"]
        manifest_form.check({"modules": layers, "report": header["report"]})
        for name, one in layers.items():
            if SHARES in one and SHARES in layers.get(one[SHARES], {SHARES: None}):
                raise ValueError(f"layer {name!r} shares the tensors of {one[SHARES]!r}, which has none of its own")
        for name, (_, shape) in header["tensors"].items():
            if math.prod(shape) > MOST_VALUES:
                raise ValueError(f"tensor {name!r} of shape {tuple(shape)} is larger than any memory")
        forms = {
            name: torch.empty(shape, dtype=getattr(torch, of), device="meta")
            for name, (of, shape) in header["tensors"].items()
        }
        return cls(layers, forms, Report(tuple(ReportEntry(**entry) for entry in header["report"])))


MOST_VALUES = 2**47
"""Of a tensor: what x86-64 can address, a byte each."""

_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def _saved(files: Iterable[str]) -> _Saved:
    """The header of a saved model.

    Raises:
        ValueError: the files are not of one, lack a tensor of an int8 layer, or have a damaged header.
    """
    found, names = None, list[str]()
    for file in files:
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                text = (opened.metadata() or {}).get(METHOD)
                names += opened.keys()
        except safetensors.SafetensorError as error:
            raise ShardError(f"{file} is not a whole safetensors file: {error}; load the file again") from error
        try:
            found = _Saved.read(text) if found is None and text is not None else found
        except _DAMAGED as error:
            raise ShardError(
                f"{file} has a damaged header {METHOD!r} ({type(error).__name__}: {error}); load the file again, or "
                "quantise and save the model again"
            ) from error
    if found is None:
        raise ValueError(
            "config.json has a quantization_config of octet, and the files beside it are not of an int8 model that "
            "save_pretrained wrote; take it out, and give quantization_config=OctetConfig(...) to from_pretrained"
        )
    # By their last parts: transformers writes modules under the names of old checkpoints.
    absent = Counter(map(_last, found.forms)) - Counter(map(_last, names))
    if absent:
        raise ShardError(
            f"the files lack {absent.total()} tensors of int8 layers, of {', '.join(absent)}; save the model again"
        )
    return found

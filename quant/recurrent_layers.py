"""The registry of recurrent float layers, torch's and third parties', and access to their kinds, sizes and parameters.

A class is registered by `quant.nn.recurrent.register_recurrent`. Its modules need what torch.nn.LSTM and
torch.nn.LSTMCell have:

- a sequence: called with (input, hx), it returns (y, h), or (y, (h, c)) for a kind with a cell state, in torch's
layouts;
  parameters `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, and with `_reverse` for the second direction;
- a cell: called with (input, hx), it returns h, or (h, c); parameters `weight_ih`, `weight_hh`, `bias_ih`, `bias_hh`;
- both: attributes `input_size` and `hidden_size`; of a sequence those of `Sizes`, where they are not the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from quant.kernels.recurrent.kind import RecurrentKind
from quant.kernels.registry import ClassRegistry, described, full_name_of
from quant.runtime.layers.recurrent_walk import Sizes


@dataclass(frozen=True)
class RecurrentClass:
    """A class of float layers that are recurrent.

    Attributes:
        float_class: the class itself.
        is_cell: whether a module of it is one step, and not a sequence.
        kind: module -> its kind.
        stand_in: (module, qconfig) -> the dynamic int8 layer.
    """

    float_class: type[nn.Module]
    is_cell: bool
    kind: Callable[[nn.Module], RecurrentKind]
    stand_in: Callable[..., Any]


@dataclass(frozen=True)
class Tensors:
    """The parameters of one layer and direction, named as torch names them; differentiable."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None = None


_OPTIONS = [one.name for one in fields(Sizes) if one.default is not MISSING]


def _as_recurrent(float_class: type, value: Any) -> RecurrentClass:
    """A registered value as the description of its class."""
    if not isinstance(value, RecurrentClass) or value.float_class is not float_class:
        name = full_name_of(float_class)
        raise TypeError(f"recurrent layer {name}: expected a RecurrentClass of that class, got {described(value)}")
    return value


_CLASSES: ClassRegistry[RecurrentClass] = ClassRegistry("recurrent layer", "octet.recurrent", {}, _as_recurrent)


def add_class(one: RecurrentClass) -> None:
    """Register a class of recurrent layers.

    An installed package needs no call: it provides an entry point of the group "octet.recurrent", with the float
    class's full name, that names the `RecurrentClass`.

    Raises:
        ValueError: the class is registered as something else.
    """
    _CLASSES.add(one.float_class, one)


def recurrent_class(one: type) -> RecurrentClass | None:
    """The entry of exactly this class; None where it has none."""
    return _CLASSES.get(one)


def recurrent_classes() -> list[type[nn.Module]]:
    """All registered float classes."""
    return list(_CLASSES)


def is_recurrent_class(one: type) -> bool:
    """Whether exactly this class is registered, not only a base class."""
    return _CLASSES.get(one) is not None


def is_recurrent_layer(module: nn.Module) -> bool:
    """Whether a float module is a recurrent layer; its own forward may be a runner's, or a subclass's."""
    return _class_of(module) is not None


def is_cell(module: nn.Module) -> bool:
    """Whether a float recurrent layer is one step and not a sequence."""
    return _known_class(module).is_cell


def kind_of(module: nn.Module) -> RecurrentKind:
    """The kind of a float recurrent layer."""
    return _known_class(module).kind(module)


def _class_of(module: nn.Module) -> RecurrentClass | None:
    return next((known for one in type(module).__mro__ if (known := _CLASSES.get(one))), None)


def _known_class(module: nn.Module) -> RecurrentClass:
    known = _class_of(module)
    if known is None:
        names = ", ".join(one.__name__ for one in _CLASSES)
        raise TypeError(f"{type(module).__name__}: expected a recurrent layer, one of {names}")
    return known


def sizes_of(module: nn.Module) -> Sizes:
    """The sizes of a float recurrent layer.

    Raises:
        ValueError: it has no input_size or hidden_size.
    """
    layer: Any = module
    missing = [name for name in ("input_size", "hidden_size") if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"{type(module).__name__} is registered as a recurrent layer and has no {missing[0]}; expected what the "
            "documentation of quant.recurrent_layers lists"
        )
    sizes = Sizes(layer.input_size, layer.hidden_size)
    if is_cell(module):
        return sizes
    return replace(sizes, **{name: getattr(module, name) for name in _OPTIONS if hasattr(module, name)})


def directions_of(module: nn.Module) -> list[tuple[int, bool]]:
    """(layer, reverse) of each layer and direction of a float recurrent layer, in torch's order."""
    sizes = sizes_of(module)
    return [(layer, reverse) for layer in range(sizes.num_layers) for reverse in sizes.directions]


def tensors_of(module: nn.Module, layer: int, reverse: bool) -> Tensors:
    """The parameters of one layer and direction of a float recurrent layer."""
    suffix = _suffix(module, layer, reverse)
    named: dict[str, Any] = {one.name: getattr(module, one.name + suffix, None) for one in fields(Tensors)}
    return Tensors(**named)


def parameter_names(module: nn.Module) -> list[str]:
    """The parameters' names of a float recurrent layer."""
    names = [one.name for one in fields(Tensors)]
    return [name + _suffix(module, *place) for place in directions_of(module) for name in names]


def _suffix(module: nn.Module, layer: int, reverse: bool) -> str:
    return "" if is_cell(module) else f"_l{layer}" + ("_reverse" if reverse else "")

"""`to_qdq`: a converted model as a plain torch program of float calls between roundings (quantise, dequantise)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quant.export.qdq_layers import QDQAlone, QDQLinear
from quant.export.qdq_runner import NO_FORM, TWO_BYTES, QDQRunner
from quant.export.rounding import Decomposed, Plain, Rounding
from quant.export.whole_plan import ExportError
from quant.nn.attention import MultiheadAttention
from quant.nn.embedding import Embedding, EmbeddingBag, TiedEmbedding
from quant.nn.linear import Linear
from quant.runtime.as_forward import as_forward
from quant.runtime.instructions import LayerCall
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import child_of, replace_modules
from quant.runtime.part import Part
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED, Programs

Operators = Literal["torch", "quantized_decomposed"]


def to_qdq(model: nn.Module, *, operators: Operators = "torch") -> nn.Module:
    """A copy of a quantised model in which every step is torch's own float call between roundings to 8 bits.

    It calls no operator of this library, so that `torch.export`, `torch.onnx` and what reads their programs take it
    anywhere. It is no faster than the float model where nobody reads the roundings as integers.

    Each rounded value is the converted model's, or one step of its scale away, where the same values come in: sums are
    of float32 here, and of integers there. NaN and infinity are not carried through as in the converted model.
    Embedding tables are float tables of the rounded values.

    Args:
        model: from `quant.quantize_static`, `quant.convert`, `quant.quantize_dynamic` or `quant.load`.
        operators: "torch" rounds to uint8 by plain arithmetic. "quantized_decomposed" rounds to int8 by the operators
            of this name, for readers that look for them; they must be defined already.

    Raises:
        ExportError: the model is not quantised, or is a prepared one; a step has no such form, as a recurrent layer; or
            a module was replaced or hooked after conversion. The message names it.
        ImportError: nobody has defined the operators.
    """
    rounding = _rounding(operators)
    _check(model)
    program = copy.deepcopy(model)
    called = _called_by_programs(program)
    program = _with_plain_layers(program, called, rounding)
    for module in list(program.modules()):
        runner = child_of(module, RESERVED)
        if isinstance(runner, ProgramRunner):
            _replace_runner(module, runner, rounding)
    return program.eval()


ROUNDINGS: dict[str, Callable[[], Rounding]] = {"torch": Plain, "quantized_decomposed": Decomposed}


def _rounding(operators: str) -> Rounding:
    rounding = ROUNDINGS.get(operators)
    if rounding is None:
        raise ValueError(f"to_qdq: operators is {operators!r}, expected {' or '.join(map(repr, ROUNDINGS))}")
    return rounding()


def _check(model: nn.Module) -> None:
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"to_qdq: expected a quantised model, got a {kind}")
    prepared = [name for name, one in model.named_modules() if isinstance(one, Programs) and not _converted(one)]
    if prepared:
        raise ExportError(f"{kind} is prepared, not converted: call quant.convert first")
    if not any(isinstance(one, (QuantModule, StaticLayer, ProgramRunner)) for one in model.modules()):
        raise ExportError(f"{kind} has no int8 layer: only what quant.quantize_static, quant.convert, "
                          "quant.quantize_dynamic or quant.load returns can be written so")  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, ProgramRunner):
            _check_unchanged(name.rpartition(".")[0] or kind, module)


def _converted(runner: Programs) -> bool:
    return isinstance(runner, ProgramRunner)


def _check_unchanged(name: str, runner: ProgramRunner) -> None:
    """Raise for a module that the user has put in the place of a converted one, which no program stands for."""
    for instruction in runner.program.instructions:
        changed = [] if runner.origin is None else runner.origin.changed(instruction)
        if changed:
            raise ExportError(
                f"{name}: layer {changed[0].path!r} was replaced after quant.convert; replace it in the float model "
                "and convert that"
            )


def _called_by_programs(model: nn.Module) -> set[nn.Module]:
    """The static layers that programs call, whose numbers `QDQRunner` takes over."""
    called: set[nn.Module] = set()
    for runner in [one for one in model.modules() if isinstance(one, ProgramRunner)]:
        keys = {one.layer for one in runner.program.instructions if isinstance(one, LayerCall)}
        called |= {layer for key in keys if isinstance(layer := runner.layer(key), nn.Module)}
    return called


def _with_plain_layers(model: nn.Module, called: set[nn.Module], rounding: Rounding) -> nn.Module:
    """The model with plain layers in the places of int8 ones, a layer with several names under all of them."""
    plain: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules()):
        form = None if module in called else _plain_layer(module, name, rounding)
        if form is not None:
            plain[module] = form
    return replace_modules(model, plain)


def _plain_layer(layer: nn.Module, name: str, rounding: Rounding) -> nn.Module | None:
    """The plain form of an int8 layer; None of one that calls plain functions and layers already."""
    if isinstance(layer, StaticLayer):
        if layer.activation_bits == 16:
            raise ExportError(f"layer {name!r} is {TWO_BYTES}, {NO_FORM}")
        return QDQAlone(layer, rounding)
    if not isinstance(layer, QuantModule):
        return None
    if isinstance(layer, Linear):
        return QDQLinear(layer, rounding)
    if isinstance(layer, (Embedding, EmbeddingBag)):
        return _float_table(layer)
    if isinstance(layer, (MultiheadAttention, TiedEmbedding)):
        return None
    raise ExportError(f"layer {name!r} is a {type(layer).__name__}, {NO_FORM}")


def _float_table(layer: Embedding | EmbeddingBag) -> nn.Module:
    weight: Tensor = layer.weight.detach()
    settings: dict[str, Any] = {"padding_idx": layer.padding_idx}
    if isinstance(layer, EmbeddingBag):
        settings.update(mode=layer.mode, include_last_offset=layer.include_last_offset)
    kind: Any = nn.Embedding if isinstance(layer, Embedding) else nn.EmbeddingBag
    with torch.no_grad():
        table: nn.Module = kind.from_pretrained(weight, **settings)
    return table


def _replace_runner(module: nn.Module, runner: ProgramRunner, rounding: Rounding) -> None:
    plain = QDQRunner(runner, rounding)
    module._modules[RESERVED] = plain
    module.__dict__["forward"] = as_forward(plain.run, module, plain.own_forward)
    for part in module.modules():
        # A part that is called by itself would answer with int8 kernels.
        own = getattr(part.__dict__.get("forward"), "__self__", None)
        if isinstance(own, Part) and own.runner is runner:
            own.program = "a QDQ program is called as a whole"

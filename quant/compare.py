"""Comparison of a model's int8 form with float, step by step: where the error arises, and why.

A step's error has two parts: the error of its inputs, and its own. The whole is measured against the float model's
values, its own part against float arithmetic on the step's integer inputs. To find the layer to change a user needs the
step's own error, so the list is sorted by it. `error_parts.py` takes it apart, and `diagnosis.py` names the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import Caller, check_batches
from quant.copying import copy_model, hooks_of
from quant.diagnosis import StepSums
from quant.error_parts import Range, StepError, percent
from quant.graph import Graph, Kind, Node, evaluate, expected_call
from quant.half_precision import like
from quant.recipe import QConfig
from quant.runtime.arguments import copied
from quant.runtime.binding import bound_values
from quant.runtime.instructions import (
    Dequantize,
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    LayerCall,
    Quantize,
    RecurrentCall,
)
from quant.runtime.keys import module_of
from quant.runtime.layers.products import LinearProduct
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.scaled_linear import columns_of, scale_inputs
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.names import child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.trees import leaves, map_leaves
from quant.runtime.values import Held
from quant.static.description import DESCRIPTION
from quant.static.kept_graph import graph_of
from quant.submodule_calls import Call, calls_of, evaluating

UNCOMPARED = (Dequantize, IntegerMove, FloatCall, Guard, RecurrentCall)
"""Instructions without an error of their own, except for concatenations that rescale an input."""

Sums = dict[str, StepSums]


@dataclass(frozen=True)
class Comparison:
    """Every step, the one with the largest own error first. Printable, iterable, and JSON through `to_dict`.

    Attributes:
        steps: sorted by `own_sqnr`.
        unreached: int8 layers that no batch reached.
        order: the steps' names as the model runs them.
        outside: modules with calls that no captured program stands for. They are not compared: the user's forward runs
            them, with a range per call.
    """

    steps: tuple[StepError, ...]
    unreached: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[StepError]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> StepError:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r} in the comparison; it has {[step.name for step in self.steps]}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; numbers that are not finite (no error at all) are None."""
        steps = [{key: _finite_or_none(value) for key, value in asdict(step).items()} for step in self.steps]
        return {"steps": steps, "unreached": list(self.unreached), "order": list(self.order),
                "outside": list(self.outside)}  # fmt: skip

    def __str__(self) -> str:
        head = ("step", "kind", "own dB", "SQNR dB", "cosine", "clipped", "likely cause; what to try")
        rows = [_cells(step) for step in self.steps]
        widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head) - 1)]

        def line(row: tuple[str, ...]) -> str:
            cells = [cell.ljust(width) if place < 2 else cell.rjust(width)
                     for place, (cell, width) in enumerate(zip(row, widths, strict=False))]  # fmt: skip
            return "  ".join([*cells, row[-1]]).rstrip()

        lines = [line(head), line(tuple("-" * width for width in [*widths, len(head[-1])])), *map(line, rows)]
        lines.append("own: what the step itself adds; SQNR: with all error that came down to it")
        if self.unreached:
            lines.append(f"no batch reached {', '.join(self.unreached)}: never calibrated, or not called by this data")
        if self.outside:
            lines.append(f"not compared: calls of {', '.join(self.outside)} that no captured program stands for")
        return "\n".join(lines)


def _cells(step: StepError) -> tuple[str, ...]:
    why = "; ".join(part for part in (step.cause, step.advice) if part)
    numbers = (f"{step.own_sqnr:.1f}", f"{step.sqnr:.1f}", f"{step.cosine:.5f}", percent(step.clipped))
    return (step.name, step.kind, *numbers, why)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(model: nn.Module, converted: nn.Module, batches: Iterable[Any]) -> Comparison:
    """The error of each step of the int8 model against float, the worst first, with the likely cause.

    Args:
        model: the float model of `converted`; it is run in eval mode, and left as it was.
        converted: from `convert`, `quantize_static`, `quantize_dynamic` or `load`.
        batches: as for `quant.calibrate.run`: tensors, tuples or dicts; of an (input, label) pair the input is used.

    Raises:
        ValueError: `converted` has no int8 layers, or `batches` is empty; or `model` is not the model that it was made
            from, with the first module that it does not have.
        TypeError: `batches` is a single batch, or `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quant.compare: model is a {type(model).__name__}, expected the float nn.Module")
    units = units_of(converted)
    if not units:
        raise ValueError("quant.compare: expected a model from quant.convert, with integer layers in it")
    _check_parts(model, converted, units)
    check_batches(batches, "quant.compare")
    model = _as_captured(like(model, converted), converted)
    settings = _settings(converted)
    sums: Sums = {}
    outside: set[str] = set()
    caller = Caller(model)
    with (
        torch.no_grad(),
        evaluating(model, converted),
        calls_of(model, units) as of_float,
        calls_of(converted, units) as of_int8,
    ):
        for batch in batches:
            arguments = caller.arguments(batch)
            of_float.clear()
            of_int8.clear()
            for form in (model, converted):  # copies for each, as a forward may write into its arguments
                args, kwargs = copied(arguments)
                form(*args, **kwargs)
            for path, unit in units.items():
                for one, other in zip(of_float.get(path, ()), of_int8.get(path, ()), strict=False):
                    if not _add_unit(path, model.get_submodule(path), unit, one, other, sums, settings):
                        outside.add(path or "(root)")
    if not sums:
        raise ValueError("quant.compare: no batch came, or no integer step ran; give at least one batch")
    errors = sorted((total.error(name) for name, total in sums.items()), key=lambda error: error.own_sqnr)
    return Comparison(tuple(errors), _unreached(units, sums), tuple(sums), tuple(sorted(outside)))


def _check_parts(model: nn.Module, converted: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for the first captured module, or int8 layer, that the float model does not have."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for name in (*units, *_int8_layers(converted)):
        if name not in known:
            raise ValueError(
                f"quant.compare: the int8 model has {name!r}, which {type(model).__name__} does not have; give the "
                "float model that it was made from"
            )


def _int8_layers(module: nn.Module, path: str = "") -> Iterator[str]:
    """The dotted names of the int8 layers that stand for float ones, and not those that they consist of."""
    if isinstance(module, (StaticLayer, QuantModule)):
        yield path
        return
    runner = child_of(module, RESERVED)
    for name, child in module.named_children():
        if child is not runner:
            yield from _int8_layers(child, full_name(path, name))


def _as_captured(model: nn.Module, converted: nn.Module) -> nn.Module:
    """The model with the calls that the programs stand for: itself, or a copy.

    A copy has the inputs scaled that `converted` scales, and parametrizations for the weights that hooks compute.
    """
    columns = columns_of(converted)
    if not columns and not any(map(hooks_of, model.modules())):
        return model
    return scale_inputs(copy_model(model), columns)


def units_of(converted: nn.Module) -> dict[str, nn.Module]:
    """Captured modules and int8 layers by dotted name; layers that a captured module's program computes are not called,
    and so are never seen by a hook."""
    units: dict[str, nn.Module] = {}
    parts: set[nn.Module] = set()
    for path, module in converted.named_modules():
        if isinstance(child_of(module, RESERVED), ProgramRunner):
            units[path] = module
            parts.update(module._modules[RESERVED].modules())
        elif isinstance(module, (StaticLayer, QuantModule)) and module not in parts:
            units[path] = module
            parts.update(module.modules())
    return units


def _settings(converted: nn.Module) -> dict[str, QConfig]:
    layers = converted.__dict__.get(DESCRIPTION, {}).get("layers", {})
    return {name: QConfig.from_dict(data) for name, data in layers.items()}


def _unreached(units: dict[str, nn.Module], sums: Sums) -> tuple[str, ...]:
    layers = [path or "(root)" for path, unit in units.items() if isinstance(unit, (StaticLayer, QuantModule))]
    reached = {module_of(name, layers) for name in sums}
    return tuple(path for path in layers if path not in reached)


def _add_unit(
    path: str, model: nn.Module, unit: nn.Module, one: Call, other: Call, sums: Sums, settings: dict[str, QConfig]
) -> bool:
    """Add one call of a captured module, or of a layer, in float and in int8, to the sums of its steps.

    Returns:
        whether a program stands for the call.
    """
    runner = child_of(unit, RESERVED)
    if isinstance(runner, ProgramRunner):
        known = runner.held_by(other.args, other.kwargs)
        if known is None:
            return False
        _add_program(path, model, *known, one, sums, settings)
        return True
    _add_layer(path, model, unit, one, other, sums, settings)
    return True


def _add_layer(
    path: str, model: nn.Module, unit: nn.Module, one: Call, other: Call, sums: Sums, settings: dict[str, QConfig]
) -> None:
    kind = unit.product.name if isinstance(unit, StaticLayer) else type(unit).__name__
    # The int8 call's own inputs; of PackedSequences and tuples the first tensor is compared.
    args, kwargs = copied((other.args, other.kwargs))
    own = _first(model.forward(*args, **kwargs))
    known, expected, output = None, _first(one.output), _first(other.output)
    if expected is None or own is None or output is None or expected.shape != output.shape:
        return
    total = sums.setdefault(path or "(root)", StepSums(kind, path, settings.get(path), _is_linear(unit)))
    total.add(expected, own, output, known)


def _first(tree: Any) -> Tensor | None:
    return next((leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _add_program(
    path: str,
    model: nn.Module,
    runner: ProgramRunner,
    held: Held,
    one: Call,
    sums: Sums,
    settings: dict[str, QConfig],
) -> None:
    """Add a call of a captured module whose program is known."""
    graph = graph_of(runner)
    values = _float_values(graph, model, one)
    for instruction in runner.program.instructions:
        rescales = isinstance(instruction, IntegerMove) and instruction.rescaled
        if isinstance(instruction, UNCOMPARED) and not rescales:
            continue
        value = runner.program.values[instruction.out]
        known = None if value.qparams is None else Range(*value.qparams)
        output = held.of(value) if known is None else known.real(held.of(value))
        kind, weighted = _kind(instruction, runner)
        node = graph.nodes[value.node]
        rounds = isinstance(instruction, Quantize)
        unrounded = isinstance(instruction, LayerCall) and runner.program.values[instruction.source].qparams is None
        own = held.reals[value.node] if rounds else _own(node, graph, runner, model, held, unrounded=unrounded)
        step = node.label if rounds else instruction.step
        name = full_name(path, step)
        module = _module_of(name, settings) if weighted else ""
        linear = isinstance(instruction, LayerCall) and _is_linear(runner.layer(instruction.layer))
        total = sums.setdefault(name, StepSums(kind, module, settings.get(module), linear))
        total.add(values[value.node], own, output, known)


def _is_linear(layer: object) -> bool:
    return isinstance(layer, StaticLayer) and isinstance(layer.product, LinearProduct)


def _module_of(step: str, settings: dict[str, QConfig]) -> str:
    """The module of a step: its name without the number of the call, or the owner of a functional call."""
    return module_of(step, settings) or step.partition("@")[0].rpartition(".")[0]


def _kind(instruction: Instruction, runner: ProgramRunner) -> tuple[str, bool]:
    """The kind of a call, for reports, and whether it has an int8 weight."""
    if not isinstance(instruction, LayerCall):
        return instruction.kind, False
    layer: object = runner.layer(instruction.layer)
    return (layer.product.name, True) if isinstance(layer, StaticLayer) else (type(layer).__name__, False)


def _float_values(graph: Graph, model: nn.Module, call: Call) -> dict[int, Any]:
    """Copies of all float values: a later call may write into a value, as `ReLU(inplace=True)` does."""
    values = bound_values(expected_call(graph), model, *copied((call.args, call.kwargs)))
    seen = {index: copied(value) for index, value in values.items()}
    for node in graph.nodes:
        if node.kind is not Kind.INPUT:
            values[node.index] = evaluate(node, model, values.__getitem__)
            seen[node.index] = copied(values[node.index])
    return seen


def _own(node: Node, graph: Graph, runner: ProgramRunner, model: nn.Module, held: Held, *, unrounded: bool) -> Tensor:
    """The value of a step in float, on the int8 step's inputs; `unrounded`: on those in float, of both forms.

    Values between calls that were folded into one step (conv, batch norm, ReLU) are not in the program: they are
    computed from the nearest values that are.
    """

    def value(index: int) -> Any:
        if index in held.integers and not (unrounded and index in held.reals):
            known = Range(*runner.ranges[index])
            return map_leaves(lambda q: known.real(q) if isinstance(q, Tensor) else q, held.integers[index])
        if index in held.reals:
            return copied(held.reals[index])  # the call may change it in place
        return evaluate(graph.nodes[index], model, value)

    own: Tensor = evaluate(node, model, value)
    return own

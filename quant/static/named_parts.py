"""Checks that a parsed program names layers, modules, parameters and buffers that its model has."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator

from torch import nn

from quant.kernels.reference_ops import OPS
from quant.runtime.callee import Submodule
from quant.runtime.instructions import FloatCall, Guard, IntegerMove, KernelCall, LayerCall, RecurrentCall
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.static_module import StaticQuantModule
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.module_call import ModuleCall
from quant.runtime.names import has_submodule, submodule
from quant.runtime.objects import Given, Write, walk
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region
from quant.runtime.text_scanner import TextError
from quant.runtime.trees import Attr
from quant.runtime.values import Value

BYTES = range(256)


def check_names(program: Program, runner: ProgramRunner) -> None:
    """Refuse a program that names what is not there, or more of a module than its tensors.

    Args:
        runner: in whose module the program is to run.

    Raises:
        TextError: with the name.
    """
    root = runner.root
    for value in program.values:
        _check_numbers(value)
    for one in program.instructions:
        if isinstance(one, LayerCall):
            _check_layer(one, runner)
        elif isinstance(one, RecurrentCall) and not isinstance(_module(root, one.path), QuantModule):
            raise TextError(f"{one.path!r} is no int8 recurrent layer")
        elif isinstance(one, KernelCall) and not _is_operator(one.kernel):
            raise TextError(f"there is no operator {one.kernel!r}")
    for path in _modules(program):
        _module(root, path)
    for path in _attributes(program):
        _check_attribute(path, root)


def check_paths(program: Program) -> None:
    """Refuse a program that names private attributes; whether the others are there shows when it runs.

    Raises:
        TextError: with the name.
    """
    for path in (*_modules(program), *_attributes(program)):
        _check_path(path)


def _modules(program: Program) -> Iterator[str]:
    """The modules that calls name, and lines of its native regions."""
    for one in program.instructions:
        if isinstance(one, (FloatCall, Guard)):
            yield one.owner
        if isinstance(one, (FloatCall, IntegerMove)) and isinstance(one.callee, Submodule):
            yield one.callee.path
    schedule = program.schedule
    steps = [] if schedule is None else [*schedule.steps, *schedule.singles.values()]
    for step in steps:
        if isinstance(step, Region):
            yield from (piece.path for piece in step.pieces if isinstance(piece, ModuleCall))


def _attributes(program: Program) -> Iterator[str]:
    """The attributes of modules that are read or written; those of the caller's objects are checked on the way."""
    call = [] if program.call is None else [program.call.arguments, program.call.written]
    for tree in (*(one.arguments for one in program.instructions), program.output, *call):
        for part in walk(tree):
            kind = type(part)
            if kind is Attr:
                yield part.path
            elif kind is Write and isinstance(part.target, str):
                yield part.target
            elif kind is Given:
                for _, key in part.path:
                    _check_path(str(key))


def _check_path(path: str) -> None:
    if "__" in path and any(part.startswith("__") for part in path.split(".")):
        raise TextError(f"{path!r} leads through a private attribute")


def _is_operator(name: str) -> bool:
    if name not in OPS:
        importlib.import_module("quant.ops")  # where an operator may have its arithmetic beside its class
    return name in OPS


def _check_numbers(value: Value) -> None:
    if value.qparams is None:
        return
    scale, zero_point = value.qparams
    if type(scale) is not float or not 0 < scale < math.inf or type(zero_point) is not int or zero_point not in BYTES:
        raise TextError(f"%{value.id}: {scale} and {zero_point} are not a scale and zero point of uint8")


def _check_layer(call: LayerCall, runner: ProgramRunner) -> None:
    key = call.layer
    known = key.name in runner.layers if key.functional else has_submodule(runner.root, key.name)
    layer: object = runner.layer(key) if known else None
    if not isinstance(layer, (StaticLayer, StaticQuantModule)) or not 0 <= call.site < len(layer.input_scale):
        raise TextError(f"{str(key)!r} is no int8 layer with a place {call.site}")


def _module(root: nn.Module, path: str) -> nn.Module:
    if not has_submodule(root, path):
        raise TextError(f"there is no module {path!r}")
    return submodule(root, path)


def _check_attribute(path: str, root: nn.Module) -> None:
    """A parameter, a buffer, or an attribute of the user's that a forward reads or writes."""
    _check_path(path)
    owner, _, name = path.rpartition(".")
    module = _module(root, owner)
    if name in module._parameters or name in module._buffers:
        return
    held = vars(module).get(name, getattr(type(module), name, None))
    if name in _OF_EVERY_MODULE or name.startswith("__") or isinstance(held, nn.Module) or callable(held):
        raise TextError(f"{path!r} is no parameter, buffer or attribute of the user's")


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

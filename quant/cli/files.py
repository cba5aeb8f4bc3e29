"""Where the command line's models come from and go to: factories by name, weights from files that hold only tensors."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import quant
from quant import artefact
from quant.artefact.file import MANIFEST
from quant.cli.errors import UserError, with_type
from quant.report import Report

PICKLED = (".pt", ".pth", ".bin")
SHOWN = 5
"""How many names a message lists before it counts the rest."""


def load_model(name: str, weights: str | None) -> nn.Module:
    """The model that the factory `name` ("package.module:factory") returns, with the weights of the file, if any.

    Raises:
        UserError: the factory is not there, fails or returns no module; the file cannot be read or does not fit.
    """
    model = _make(name)
    if weights is not None:
        path = Path(weights)
        _fit(model, read_weights(path), path)
    return model


def _make(name: str) -> nn.Module:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"--model is {name!r}, expected package.module:factory, as in 'mymodels.asr:make_encoder'")
    model = _attribute(_module(module_name), module_name, attribute)
    if callable(model) and not isinstance(model, nn.Module):
        try:
            model = model()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"--model {name!r} failed with {with_type(error)}; it is called without arguments and returns the model"
            ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"--model {name!r}: what it names or returns is of type {type(model).__name__}, expected a torch.nn.Module"
        )
    return model


def load_function(name: str, option: str) -> Callable[..., Any]:
    """The function that `name` ("package.module:function") is.

    Raises:
        UserError: there is none.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"{option} is {name!r}, expected package.module:function, as in 'mymodels.asr:accuracy'")
    found = _attribute(_module(module_name, option), module_name, attribute, option)
    if not callable(found):
        raise UserError(f"{option} {name!r}: it is of type {type(found).__name__}, expected a function")
    return cast("Callable[..., Any]", found)


def _module(name: str, option: str = "--model") -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(
                f"{option}: there is no module {error.name!r} in the current folder or among the installed packages"
            ) from error
        raise UserError(f"{option}: importing {name!r} failed with {with_type(error)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{option}: importing {name!r} failed with {with_type(error)}") from error


def _attribute(module: Any, module_name: str, dotted: str, option: str = "--model") -> Any:
    target = module
    for part in dotted.split("."):
        if not hasattr(target, part):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise UserError(f"{option}: {module_name!r} has no {dotted!r}; it has {_listed(names) or 'no callables'}")
        target = getattr(target, part)
    return target


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Raises:
        UserError: no such file, another kind of file, or one that holds more than tensors.
    """
    if not path.is_file():
        raise UserError(f"--weights: there is no file {path}")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"--weights: {path} is not a safetensors file: {_one_line(error)}") from error
    if path.suffix in PICKLED:
        return _read_pickled(path)
    raise UserError(f"--weights: {path.name} ends in {path.suffix!r}, expected .safetensors, {', '.join(PICKLED)}")


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Only with weights_only: a pickle that may hold code is never run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"--weights: {path} holds more than tensors and is not opened, because it could run code; "
            "save the weights alone: torch.save(model.state_dict(), path)"
        ) from error
    except (
        Exception
    ) as error:  # torch's reader ends in errors of many kinds: IndexError and UnicodeDecodeError among them
        raise UserError(f"--weights: {path} is not a file that torch.save wrote: {_one_line(error)}") from error
    if not isinstance(state, Mapping):
        raise UserError(f"--weights: {path} holds a {type(state).__name__}, expected a state dict: tensors by name")
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        inner = [name for name in others if isinstance(state[name], Mapping)]
        hint = f"; save the state dict alone, perhaps the one under {inner[0]!r}" if inner else ""
        raise UserError(f"--weights: {path} holds {_listed(others)}, which are no tensors{hint}")
    return dict(state)


def read_quantized(path: Path) -> dict[str, Any]:
    """The state dict of a model that torch.ao quantised: tensors, pairs of them, and settings; no objects with code.

    Raises:
        UserError: another kind of file, or one that holds more.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # of torch's own reader
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors and is not opened, because it could run code. Recurrent layers of torch.ao"
            " do: call quant.from_torch_ao(model, float_model) in the process that has the model, and quant.save"
        ) from error
    except Exception as error:  # of many kinds, as in _read_pickled
        raise UserError(f"{path} is not a file that torch.save wrote: {_one_line(error)}") from error
    if not isinstance(state, Mapping):
        raise UserError(
            f"{path} holds a {type(state).__name__}, expected a state dict: torch.save(q.state_dict(), path)"
        )
    return dict(state)


def _fit(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """load_state_dict(strict=True), with every misfit in one line."""
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    # A file may hold one name of tied weights: the others are the same tensor and come with it.
    held = {_identity(wanted[name]) for name in state if name in wanted}
    missing = [name for name in wanted if name not in state and _identity(wanted[name]) not in held]
    unexpected = [name for name in state if name not in wanted]
    shapes = [
        f"{name} is {list(state[name].shape)}, in the model {list(value.shape)}"
        for name, value in wanted.items()
        if name in state and state[name].shape != value.shape
    ]
    problems = [
        f"{what} {_listed(names)}"
        for what, names in (("it lacks", missing), ("it also has", unexpected), ("of another shape:", shapes))
        if names
    ]
    if problems:
        hint = ""
        if unexpected and not shapes and all(name.startswith("module.") for name in unexpected):
            hint = " (saved from DataParallel: strip 'module.' from its names)"
        raise UserError(f"--weights: {path} does not fit the model: {'; '.join(problems)}{hint}")
    try:
        model.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        raise UserError(f"--weights: {path} does not fit the model: {_one_line(error)}") from error


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    """The same for two names of one tensor, else different; an empty tensor is like no other."""
    return (tensor.data_ptr() or id(tensor), tensor.shape)


def writable(path: Path, suffix: str | None = ".safetensors", option: str = "--out") -> Path:
    """The path, if a file can be written there: known before the work rather than after.

    Raises:
        UserError: it cannot, or it has another suffix; None takes any.
    """
    if suffix is not None and path.suffix != suffix:
        raise UserError(f"{option}: {path.name} ends in {path.suffix!r}, expected {suffix}")
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise UserError(f"{option}: cannot write in {path.parent}: {error.strerror or error}") from error


def writable_outputs(options: argparse.Namespace, **suffixes: str | None) -> dict[str, Path]:
    """The files that were asked for, by option; known before the work that they can be written."""
    paths = {name: getattr(options, name) for name in suffixes}
    return {name: writable(Path(path), suffixes[name], f"--{name}") for name, path in paths.items() if path is not None}


def say_written(options: argparse.Namespace, outputs: Mapping[str, Path]) -> int:
    """Print which files were written, but not with --json; returns the exit status."""
    for path in () if options.json else outputs.values():
        print(f"wrote {path} ({path.stat().st_size / 1024:.1f} KiB)")
    return 0


def read_array(name: str, option: str) -> Tensor:
    """The tensor of a .npy file that an option names.

    Raises:
        UserError: it cannot be read, or holds no numbers.
    """
    try:
        with open(name, "rb") as file:
            array = numpy.lib.format.read_array(file, allow_pickle=False)
        return torch.from_numpy(numpy.ascontiguousarray(array))
    except Exception as error:  # numpy's reader ends in errors of many kinds: tokenize's and MemoryError among them
        raise UserError(f"{option}: {name} is no .npy file of numbers: {_one_line(error)}") from error


def save(model: nn.Module, path: Path) -> None:
    """`quant.save`, with errors for people."""
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise UserError(f"--out: the model's state dict holds {_listed(odd)}, and safetensors holds tensors alone")
    try:
        quant.save(model, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--out: {path} could not be written: {_one_line(error)}") from error


def read_report(path: Path) -> Report:
    """The report in a file that `save` wrote, whose tensors are those that it wrote.

    Raises:
        UserError: no such file, none that `save` wrote, or a damaged one.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {_one_line(error)}") from error
    if MANIFEST not in metadata:
        raise UserError(
            f"{path} holds no report; files of `quant dynamic --out`, `quant calibrate --out` and `quant.save` do"
        )
    try:
        return artefact.read_report(path)
    except quant.ArtefactError as error:
        raise UserError(_one_line(error)) from error


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

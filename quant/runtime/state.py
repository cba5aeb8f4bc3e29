"""The state_dict of a converted model: beside weights and scales it holds the ranges of the model's programs.

The scales of a program's steps are not tensors, so loading a state_dict of another calibration would change the layers
and not the steps between them. It is refused before anything is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.runtime.names import child_of, full_name
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED

RANGES = "ranges"
"""The entry that a program's runner adds to the state_dict: float32 (values, 2), scale and zero point."""


def keep_ranges(model: nn.Module) -> None:
    """Add the ranges of a model's programs to its state_dict, and check them when one is loaded."""
    units = [module for module in model.modules() if isinstance(child_of(module, RESERVED), ProgramRunner)]
    for unit in units:
        unit.register_state_dict_post_hook(_add)
    for module in {id(one): one for one in (model, *units)}.values() if units else ():
        module.register_load_state_dict_pre_hook(_check)


def without_ranges(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict without the ranges, which a file of `quant.save` has in its manifest."""
    return {name: value for name, value in state.items() if not is_ranges(name)}


def is_ranges(name: str) -> bool:
    """Whether an entry of this name holds a program's ranges."""
    return f".{name}".endswith(f".{RESERVED}.{RANGES}")


def _tensor(runner: ProgramRunner) -> Tensor:
    """The ranges of all programs of a module, one after the other."""
    ranges = [one.ranges for one in runner.programs()]
    numbers = [own[value] for own in ranges for value in sorted(own)]
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, 2)


def _add(unit: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    runner = unit._modules[RESERVED]
    assert isinstance(runner, ProgramRunner)
    state[f"{prefix}{RESERVED}.{RANGES}"] = _tensor(runner)


def _check(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Refuse ranges other than the module's own, and remove them from `state`, which is torch's copy."""
    for path, unit in module.named_modules():
        runner = child_of(unit, RESERVED)
        if not isinstance(runner, ProgramRunner):
            continue
        ranges = state.get(f"{prefix}{full_name(path, RESERVED, RANGES)}")
        if ranges is not None:
            _compare(type(module).__name__, path, runner, ranges.to("cpu", torch.float32))
    for name in [name for name in state if name.startswith(prefix) and is_ranges(name)]:
        del state[name]


def _compare(model: str, path: str, runner: ProgramRunner, loaded: Tensor) -> None:
    own = _tensor(runner)
    if loaded.shape == own.shape and torch.equal(loaded, own):
        return
    way_out = (
        "a program's scales are not part of a state_dict; keep a converted model by quant.save and quant.load, or load "
        "into one of the same conversion"
    )
    if loaded.shape != own.shape:
        raise RuntimeError(
            f"{model}: the state_dict is of another conversion, with {len(loaded)} ranges in {path or '(root)'!r}; "
            f"this one has {len(own)}: {way_out}"
        )
    others = (loaded != own).any(dim=1).nonzero().flatten().tolist()
    more = f", and {len(others) - 1} more differ" if len(others) > 1 else ""
    names = [_name(value, one) for one in runner.programs() for value in sorted(one.ranges)]
    name = full_name(path, names[others[0]])
    raise RuntimeError(
        f"{model}: the state_dict is of another calibration: values of {name!r} are in "
        f"{_ends(loaded[others[0]])} there and in {_ends(own[others[0]])} here{more}: {way_out}"
    )


def _name(node: int, runner: ProgramRunner) -> str:
    """The name of a value in the user's model; its number in the graph where the program does not hold it."""
    return next((value.name for value in runner.program.values if value.node == node), f"#{node}")


def _ends(numbers: Tensor) -> str:
    scale, zero_point = numbers.tolist()
    return f"[{-zero_point * scale:.4g}, {(255 - zero_point) * scale:.4g}]"

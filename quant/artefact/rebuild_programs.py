"""Captures the programs of a loaded model again, and puts them in the order of its description."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch import nn

from quant.static.examples import CannotRebuild, decode
from quant.static.runner import GraphRunner, keep_programs, runners
from quant.static.signature import guards, same_call, signature
from quant.waiting_forwards import waiting


def match_programs(prepared: nn.Module, description: Mapping[str, Any]) -> None:
    """Give each captured module the programs of the description, by their calls, and no others.

    Args:
        prepared: has the programs of the example inputs and of the examples given by the user.
        description: that of a conversion; calls for which it has an example are captured here.

    Raises:
        CannotRebuild: neither the file nor the user has an example for the calls of a program.
    """
    wanted: dict[str, list[str]] = {}
    for name in (*description["calls"], *description.get("further", {})):
        own = wanted.setdefault(name.partition("@")[0], [])
        if name not in own:
            own.append(name)
    _add_parts(prepared, description.get("alone", {}))
    known = runners(prepared)
    for path, names in wanted.items():
        if path in known:  # else another error names it
            keep_programs(known[path], _programs(known[path], sorted(names, key=_place), description))


def _add_parts(prepared: nn.Module, examples: Mapping[str, Any]) -> None:
    """Add the programs of parts that were called by themselves, from examples of their calls."""
    for path, example in examples.items():
        forward = waiting(prepared.get_submodule(path))
        if forward is None:
            continue
        if example is None:
            raise CannotRebuild(f"{path} was called by itself with objects that a file cannot hold")
        forward.add_program(*decode(example))


def _place(name: str) -> int:
    return int(name.partition("@")[2] or 1)


def _programs(first: GraphRunner, names: list[str], description: Mapping[str, Any]) -> list[GraphRunner]:
    """The programs of one module in their order."""
    known = first.programs()
    chosen: list[GraphRunner] = []
    for name in names:
        alike = [one for one in known if one not in chosen and _has_calls(one, name, description)]
        expected = description.get("guards", {}).get(name)
        same = [one for one in alike if expected is None or expected == guards(one.graph)]
        if not same and description.get("further", {}).get(name) is not None:
            alike = []  # the same calls for another size; its own example gives its own guards
        chosen.append((same or alike or [_captured(first, name, description)])[0])
    return chosen


def _has_calls(runner: GraphRunner, name: str, description: Mapping[str, Any]) -> bool:
    lines = zip_longest(description["calls"].get(name, ()), signature(runner.graph, runner.root), fillvalue="")
    return all(same_call(*pair) for pair in lines)


def _captured(first: GraphRunner, name: str, description: Mapping[str, Any]) -> GraphRunner:
    """The program of a call for which the description has an example."""
    unit, further = name.partition("@")[0] or "(root)", description.get("further", {})
    example = further.get(name)
    if example is None and name not in further:
        return first  # whose calls another error compares one by one
    if example is None:
        like = description.get("said", {}).get(name)
        raise CannotRebuild(
            f"program {_place(name)} of {unit} is for calls with objects, which a file does not hold"
            f"{f' ({like})' if like else ''}; give examples=[...], a call of that kind for each such program, as to "
            "quant.prepare: quant.load(path, model=..., examples=[{'name': value, ...}])"
        )
    args, kwargs = decode(example)
    added = None if first.extend is None else first.extend(first, args, kwargs)
    if added is None:
        raise CannotRebuild(f"program {_place(name)} of {unit}: its calls cannot be captured any more")
    return added

"""Captures the programs of a loaded model again, and puts them in the order of its description."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, zip_longest
from typing import Any

from torch import nn

from quant.runtime.keys import ProgramKey
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
    keys = {ProgramKey.read(text) for text in (*description["calls"], *description.get("further", {}))}
    _add_parts(prepared, description.get("alone", {}))
    known = runners(prepared)
    for path, own in groupby(sorted(keys), key=lambda key: key.path):
        if path in known:  # else another error names it
            keep_programs(known[path], _programs(known[path], list(own), description))


def _add_parts(prepared: nn.Module, examples: Mapping[str, Any]) -> None:
    """Add the programs of parts that were called by themselves, from examples of their calls."""
    for path, example in ((ProgramKey.read(text).path, example) for text, example in examples.items()):
        forward = waiting(prepared.get_submodule(path))
        if forward is None:
            continue
        if example is None:
            raise CannotRebuild(f"{path} was called by itself with objects that a file cannot hold")
        forward.add_program(*decode(example))


def _programs(first: GraphRunner, keys: list[ProgramKey], description: Mapping[str, Any]) -> list[GraphRunner]:
    """The programs of one module in their order."""
    known = first.programs()
    chosen: list[GraphRunner] = []
    for key in keys:
        name = str(key)
        alike = [one for one in known if one not in chosen and _has_calls(one, name, description)]
        expected = description.get("guards", {}).get(name)
        same = [one for one in alike if expected is None or expected == guards(one.graph)]
        if not same and description.get("further", {}).get(name) is not None:
            alike = []  # the same calls for another size; its own example gives its own guards
        chosen.append((same or alike or [_captured(first, key, description)])[0])
    return chosen


def _has_calls(runner: GraphRunner, name: str, description: Mapping[str, Any]) -> bool:
    lines = zip_longest(description["calls"].get(name, ()), signature(runner.graph, runner.root), fillvalue="")
    return all(same_call(*pair) for pair in lines)


def _captured(first: GraphRunner, key: ProgramKey, description: Mapping[str, Any]) -> GraphRunner:
    """The program of a call for which the description has an example."""
    name, unit, further = str(key), key.path or "(root)", description.get("further", {})
    example = further.get(name)
    if example is None and name not in further:
        return first  # whose calls another error compares one by one
    if example is None:
        like = description.get("said", {}).get(name)
        raise CannotRebuild(
            f"program {key.place} of {unit} is for calls with objects, which a file does not hold"
            f"{f' ({like})' if like else ''}; give examples=[...], a call of that kind for each such program, as to "
            "quant.prepare: quant.load(path, model=..., examples=[{'name': value, ...}])"
        )
    args, kwargs = decode(example)
    added = None if first.extend is None else first.extend(first, len(first.others), args, kwargs)[0]
    if added is None:
        raise CannotRebuild(f"program {key.place} of {unit}: its calls cannot be captured any more")
    return added

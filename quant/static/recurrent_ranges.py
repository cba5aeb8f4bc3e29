"""One range for a recurrent layer's input, and one for the states of each of its layers, in all programs that call it.

An int8 recurrent layer has these numbers itself (`runtime/layers/recurrent.py`), whoever calls it. Within a program its
calls share them (`fusion/slots.py`); here those of several programs do, as of a forward with an optional input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from quant.fusion.concat_ranges import Groups
from quant.kernels import QParams, choose_qparams
from quant.observers import NoDataSeen
from quant.ops.step import is_recurrent
from quant.runtime.names import attribute
from quant.static.ranges import Ranges

Place = tuple[int, str]
"""A slot of one of several programs."""

INPUT = "input"


def agree_on_recurrent(programs: Iterable[Ranges]) -> None:
    """Let the programs know a common range of each slot that is one of a recurrent layer's numbers in several of them.

    Args:
        programs: calibrated, whose `known` ranges are kept; those that saw no data are left alone.
    """
    runners = list(programs)
    for group in _groups(runners):
        known = {(place, slot): own for place, slot in group if (own := _own(runners[place], slot)) is not None}
        if len(known) < 2:
            continue
        common = _union(list(known.values()))
        for place, slot in known:
            ranges = runners[place].known
            assert ranges is not None, "convert and the simulation keep ranges while they read them"
            ranges[slot] = common


def _groups(runners: list[Ranges]) -> list[list[Place]]:
    """Slots of different programs that hold the same numbers of recurrent layers."""
    places: dict[Place, int] = {}
    uses: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, runner in enumerate(runners):
        fused = runner.fused
        for step in filter(is_recurrent, fused.steps):
            module = attribute(runner.root, fused.graph.nodes[step.nodes[0]].target)
            slots = {INPUT: fused.slot_of[step.inputs[0]], **fused.inner_slots(step)}
            for name, slot in slots.items():
                uses[id(module), name].append(places.setdefault((place, slot), len(places)))
    groups, known = Groups(range(len(places))), list(places)
    for first, *others in uses.values():
        for other in others:
            groups.join(first, other)
    return [[known[one] for one in group] for group in groups.all().values() if len(group) > 1]


def _own(runner: Ranges, slot: str) -> QParams | None:
    try:
        return runner.qparams(slot)
    except NoDataSeen:
        return None


def _union(ranges: list[QParams]) -> QParams:
    """The smallest range that contains all of these; the first where they are one."""
    first = ranges[0]
    if all(bool(one.scale == first.scale) and bool(one.zero_point == first.zero_point) for one in ranges):
        return first
    low = min((one.scheme.quant_min - one.zero_point) * one.scale for one in ranges)
    high = max((one.scheme.quant_max - one.zero_point) * one.scale for one in ranges)
    return choose_qparams(low, high, first.scheme)

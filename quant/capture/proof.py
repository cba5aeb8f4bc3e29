"""The proof of a recording: a second recording, and a run of the graph, must agree with it.

The module is recorded again on other values and other sizes. Whatever is not a value of the graph (numbers, tensors
made outside of torch, the calls themselves) must be the same in both; what differs by values makes the innermost module
an island, what differs by a size holds that size fixed. Then the graph is run on the second inputs, and must give what
the module gave, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quant.capture.differences import decides_otherwise, difference, problem_of
from quant.capture.random_draws import put_back_draws, seed
from quant.capture.range_steps import FARTHEST, largest_step_elsewhere
from quant.capture.recorded_modules import Watched
from quant.capture.recorder import Recorder
from quant.capture.scalars import NUMBER, ROUNDED, Limit
from quant.capture.snapshot import Snapshot
from quant.capture.unmoved_numbers import Unmoved, unmoved_numbers
from quant.capture.unrecordable import said_of
from quant.capture.variations import (
    UNCOVER,
    VARY,
    NoOther,
    Variation,
    affordable,
    groups_of,
    is_width,
    other_floats,
    other_values,
    parts_of,
    same_values,
    varied,
)
from quant.graph import Kind, evaluate
from quant.runtime.arguments import Arguments, copied, copied_together, tensors_in
from quant.runtime.matching import CaptureMismatch
from quant.runtime.names import full_name
from quant.runtime.trees import Ref, leaves, map_leaves

MOST_PAIRS = 6
"""How many pairs of sizes are tried together: each costs two recordings where it is no pair."""


class Proof:
    """One attempt to show that a recording stands for other calls too.

    Attributes:
        problems: by dotted name, why modules have to run as they are.
        limits: sizes and numbers that have to be held.
    """

    def __init__(self, watched: Watched, recorder: Recorder, call: Arguments) -> None:
        self.watched, self.recorder, self.call = watched, recorder, call
        self.problems: dict[str, str] = {}
        self.limits: tuple[Limit, ...] = ()
        self._seed = (torch.initial_seed() + 1) % 2**63  # for all that follows: no remainder is the first recording's
        self._unmoved = Unmoved()
        self._decided = self._moves_alike = False
        held = {(limit.place, limit.dim) for limit in recorder.limits}
        groups = [[one for one in group if (one.place, one.dim) not in held] for group in groups_of(recorder)]
        groups = [group for group in groups if group]
        every = [limit for group in groups for limit in group]
        if recorder.is_threaded:
            # A size that a layer refuses is an error of its thread, and the forward may wait for what that thread
            # would give without end.
            self._first_taken()
            self.limits = tuple(every)
            return
        if every and recorder.sizes and self._steps_elsewhere() > FARTHEST:
            self.limits = tuple(every)
            return
        agrees = self._holds(other_values, every, VARY[:1])
        if agrees or (self.problems and not every):
            return
        for together in _likely(groups, recorder, refused=agrees is None):
            agrees = self._holds(other_values, [limit for group in together for limit in group], VARY[:1])
            if agrees:
                self._hold_where_unlike(other_values, [group for group in groups if group not in together])
                return
        # What differs by values is a module's own; what differs by one size alone is that size's.
        self.problems = {}
        change, agrees = self._first_taken()
        if agrees is not False:
            self._hold_where_unlike(change, groups)

    def _steps_elsewhere(self) -> float:
        """The largest step of functions that ran, which recordings of other sizes have to go beyond."""
        recorder = self.recorder
        modules = [part.module for part in recorder.parts.values()]
        step = largest_step_elsewhere(recorder.lines.codes, modules)
        recorder.largest_step = max(recorder.largest_step, min(step, FARTHEST))
        return step

    def _first_taken(self) -> tuple[Variation, bool | None]:
        """The first change of values alone that the module takes, and whether its recording agrees (`_agrees`)."""
        for change in (other_values, other_floats):
            agrees = self._agrees(change, [])
            if agrees is not None:
                return change, agrees
        return same_values, self._agrees(same_values, [])

    def _hold_where_unlike(self, values: Variation, groups: list[list[Limit]]) -> None:
        """Hold the sizes that change what is recorded."""
        self.problems = {}
        left, decided, free = groups[::-1], list[list[Limit]](), set[Limit]()
        while left:
            group = left.pop()
            agrees = self._holds(values, group, VARY)
            if agrees is None:  # a length may only happen to equal the width of a layer, or another length
                left += parts_of(group)[::-1]
            # A size that no other takes the place of is the module's own; a number may be taken unseen, and so may a
            # size of which every other one decides otherwise: those that decide alike were not tried.
            if agrees is False or (agrees is None and group[0].dim == NUMBER):
                self.limits += tuple(group)
            elif agrees is None and self._decided:
                decided.append(group)
            free.update(group if agrees else ())
            self.problems = {}
        decided = [[limit for limit in group if limit not in free] for group in decided]
        free |= self._free_together(values, [group for group in decided if group])
        self.limits += tuple(dict.fromkeys(limit for group in decided for limit in group if limit not in free))

    def _free_together(self, values: Variation, decided: list[list[Limit]]) -> set[Limit]:
        """Of sizes each of which decides otherwise by itself, those that do not when two change by the same.

        A decoder's cache and its mask: the mask is as much longer as there are new tokens.
        """
        free = set[Limit]()
        self._moves_alike = True
        for one, other in itertools.islice(itertools.combinations(decided, 2), MOST_PAIRS):
            if not free & {*one, *other} and not {*one} & {*other} and self._holds(values, [*one, *other], VARY):
                free.update(one, other)
            self.problems = {}
        self._moves_alike = False
        return free

    def _holds(self, values: Variation, limits: list[Limit], steps: tuple[str, ...]) -> bool | None:
        """As `_agrees`, by the first of several steps that the module takes, and others where that one shows little.

        Where rounded numbers have never changed, they are held.
        """
        self._decided, verdict = False, None
        for step in steps:
            verdict = self._agrees(values, limits, step)
            if verdict is not None:
                break
        if verdict is False or (verdict is None and (not self._decided or self._moves_alike)):
            return verdict
        return self._uncovered(values, limits, self._unmoved if verdict else None, alone=steps == VARY)

    def _uncovered(
        self, values: Variation, limits: list[Limit], unmoved: Unmoved | None, *, alone: bool
    ) -> bool | None:
        """As `_agrees`, by further steps while some numbers are as they were.

        Args:
            unmoved: what earlier steps leave to be shown; None where the module took none of them.
            alone: whether the limits are one group, and not all that may be varied.
        """
        taken: list[str] = []
        for step in UNCOVER:
            if unmoved is not None and not unmoved.may_be_shown_by(step):
                continue
            further = self._agrees_apart(values, _worth_varying(limits, unmoved, taken), step)
            if further is False:
                return False
            if further:
                unmoved = self._unmoved if unmoved is None else unmoved & self._unmoved
                taken.append(step)
        if unmoved is None or ((unmoved.sizes or unmoved.stepped) and not taken and not alone):
            return None  # each by itself may take what all refuse
        if unmoved.stepped or (unmoved.sizes and not taken):
            return False
        self.limits += tuple(Limit(place, ROUNDED) for place in sorted(unmoved.rounded))
        return True

    def _agrees_apart(self, values: Variation, limits: list[Limit], step: str) -> bool | None:
        """As `_agrees`, by one call, or by one for each group of sizes, all of which the module has to take."""
        unmoved = Unmoved()
        apart = [limits] if self._moves_alike else affordable(self.recorder, limits, step)
        for group in apart:
            agrees = self._agrees(values, group, step)
            if not agrees:
                return agrees
            unmoved |= self._unmoved
        self._unmoved = unmoved
        return True if apart else None

    def _agrees(self, values: Variation, limits: list[Limit], step: str = VARY[0]) -> bool | None:
        """Whether another call has the same recording, and the graph its output; None where the module refuses it."""
        try:
            call = varied(self.recorder, self.call, values, limits, step, alike=self._moves_alike)
        except NoOther:
            return None
        seed(self._seed)
        before = self.watched.snapshot()
        other = self.recorder.again(before, training=self.recorder.training)
        try:
            return self._is_like(other, before, call, step if limits else None)
        finally:
            other.forget_values()

    def _is_like(self, other: Recorder, before: Snapshot, call: Arguments, step: str | None) -> bool | None:
        """As `_agrees`, of a call and the recorder that is to record it on a model that holds `before`.

        Args:
            step: what made the call's sizes; None where they are the first call's.
        """
        other.tries = step is not None
        try:
            run(self.watched, other, call)
        except Exception:  # the module's own, or torch's: it does not take such a call
            before.put_back()
            return None
        after = self.watched.snapshot()
        if decides_otherwise(self.recorder, other, sizes_differ=step is not None):
            self._decided = True
            return None
        fault = difference(self.recorder, other) or problem_of(self.recorder, other)
        if fault is None and step is not None and self.recorder.lines.differ_from(other.lines):
            fault = "", "counts by a size unseen"
        if fault is None:
            before.put_back()
            fault = _replayed(self.recorder, other, call)
            if fault is None:
                after.put_back()
                for node, counterpart in zip(self.recorder.nodes, other.nodes, strict=True):
                    node.note_other_shape(counterpart)
                self._unmoved = unmoved_numbers(self.recorder, other, step) if step else Unmoved()
                return True
        after.put_back()
        self.problems = {full_name(self.recorder.path, fault[0]): f"its forward {fault[1]}"}
        return False


def _likely(groups: list[list[Limit]], recorder: Recorder, *, refused: bool) -> list[list[list[Limit]]]:
    """Groups that a module may take others of where it does not take others of all.

    Most models hold the width of a layer to what it is, and refuse another before they compute much; where all were
    `refused`, many hold the size of an image or the length of a table too, but not the batch.
    """
    others = [group for group in groups if not any(is_width(one, recorder) for one in group)]
    tried = [others, groups[:1]] if refused and len(others) > 1 else [others]
    return [together for together in tried if 0 < len(together) < len(groups)]


def _worth_varying(limits: list[Limit], unmoved: Unmoved | None, taken: list[str]) -> list[Limit]:
    """The sizes to vary in a further step: a larger batch costs much, and has shown what it can by a smaller one."""
    if unmoved is None or unmoved.rounded or unmoved.stepped or unmoved.few or not taken:
        return limits
    return [limit for limit in limits if limit.dim] or limits


def run(watched: Watched, recorder: Recorder, call: Arguments) -> None:
    """Record a call, on copies of its tensors."""
    is_island = recorder.path in recorder.islands
    args, kwargs = copied_together(call) if is_island else copied(call)
    recorder.tensors = tensors_in((args, kwargs))
    recorder.holds_flags = watched.called_by_user and recorder.root is watched.model
    with watched.telling(recorder):
        if is_island:
            forward: Any = recorder.root.__dict__["forward"]
            recorder.run_inside(recorder.path, recorder.root, args, kwargs, forward)
        else:
            recorder.run(args, kwargs)


def _replayed(one: Recorder, other: Recorder, call: Arguments) -> tuple[str, str] | None:
    """The module at fault, and what it does, where the calls of the first recording, made with the second's inputs, do
    not give what the second call gave; None where they do.
    """
    again = other.again(other.before, training=False)
    inputs = again.take_inputs(copied(call[0]), copied(call[1]))
    last = {ref: node.index for node in one.nodes for ref in (node.index, *node.refs)}
    last.update((leaf.index, len(one.nodes)) for leaf in leaves(one.output) if isinstance(leaf, Ref))
    values: dict[int, Any] = {}
    with put_back_draws():
        try:
            for node in one.nodes:
                values[node.index] = (
                    inputs[node.index] if node.kind is Kind.INPUT else evaluate(node, one.root, values.__getitem__)
                )
                for index in {node.index, *node.refs}:
                    if last[index] == node.index:
                        del values[index]
        except CaptureMismatch:
            return None  # a guard says that this call is another one
        except Exception as error:  # of a call that needs what is around it, as a level of differentiation
            return node.owner, f"makes calls that fail by themselves ({said_of(error)})"
    real = map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, one.output)
    expected = map_leaves(lambda leaf: other.value(leaf.index) if isinstance(leaf, Ref) else leaf, other.output)
    same = all(_same_bits(a, b) for a, b in zip(_tensors(real), _tensors(expected), strict=True))
    return None if same else ("", "gives other numbers than its captured calls")


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_nested:
        return True
    return bool(torch.equal(one, other)) or bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))

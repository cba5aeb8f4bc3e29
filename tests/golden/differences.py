"""Differences between versions that were decided, each with the decision's heading in docs/decisions.md.

A difference is expected where one side alone has that decision. Against a side that has it too, the numbers are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Difference:
    """Numbers that a decision changed.

    Attributes:
        decision: its heading in docs/decisions.md.
        reason: how it changes these.
        names: tests (as file::function, for all its parameters and models) or random networks, each of which differs.
        calls: functions of torch; a random network whose forward calls one of them may differ.
        ratio: dB, the least ratio of signal to difference that such a network's outputs may have.
    """

    decision: str
    reason: str
    names: tuple[str, ...] = ()
    calls: frozenset[str] = frozenset()
    ratio: float = math.inf


JOINS = "tests/quant/test_static_joins.py"

RATIO_OF_A_BYTE = 25.0
"""dB: of a small network whose numbers differ in their last bits, by which a few bytes round to a neighbour."""

DIFFERENCES = (
    Difference(
        "Arithmetic with a number that changes nothing is no step",
        "the forward multiplies by 1.0 or adds 0, which had a range and a table of its own up to rules 3",
        (
            f"{JOINS}::test_a_comparison_shows_what_rescaling_costs",
            f"{JOINS}::test_ranges_that_nearly_agree_are_one_and_copied",
            f"{JOINS}::test_a_dense_block_has_a_range_for_each_part_that_differs",
            f"{JOINS}::test_a_range_that_is_given_to_a_joined_value_is_taken_as_it_is",
            "tests/quant/test_capture_numbers.py::test_a_default_is_a_constant_and_another_number_is_another_program",
            "operators-1009",
        ),
    ),
    Difference(
        "A float function in a plan rounds as its kernel does",
        "a group norm, or a SiLU behind a norm, was computed by torch and is native",
        calls=frozenset({"group_norm", "silu"}),
        ratio=RATIO_OF_A_BYTE,
    ),
    Difference(
        "Functions, means and sums of reals round as their kernels do",
        "a sigmoid, a tangent, an exponential, a mean or a sum that stays float32 was computed by torch and is native",
        calls=frozenset({"sigmoid", "tanh", "exp", "sqrt", "cos", "sin", "mean", "sum", "group_norm", "instance_norm"}),
        ratio=RATIO_OF_A_BYTE,
    ),
)


@dataclass
class Verdict:
    """Places of differing numbers.

    Attributes:
        documented: place -> its difference.
        unexplained: the others.
        not_met: names of expected differences that were compared, and are equal or were not there.
    """

    documented: dict[str, Difference] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)
    not_met: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.unexplained or self.not_met)

    def summary(self) -> str:
        return f"{len(self.documented)} differ for documented reasons, {len(self.unexplained)} unexplained"

    def show(self) -> None:
        for difference in dict.fromkeys(self.documented.values()):
            places = [place for place, reason in self.documented.items() if reason is difference]
            print(f"documented: {difference.reason} ({difference.decision})", *places, sep="\n    ")
        if self.unexplained:
            print("unexplained:", *self.unexplained, sep="\n    ")
        if self.not_met:
            print("documented, and no difference was met:", *self.not_met, sep="\n    ")


def judge(
    differing: Iterable[str],
    here: Iterable[str],
    there: Iterable[str],
    compared: Callable[[str], bool],
    follows: Callable[[str, Difference], bool] = lambda network, difference: False,
) -> Verdict:
    """Which differences have a reason.

    Args:
        differing: places, as "tests/a.py::test_b[c] #0 outputs", or names of networks.
        here, there: the decisions of each side, by their headings.
        compared: whether a name of `DIFFERENCES` was among what was compared.
        follows: whether a random network differs as the `calls` and `ratio` of a difference say.
    """
    of_one = set(here) ^ set(there)
    possible = [one for one in DIFFERENCES if one.decision in of_one]
    expected = {name: one for one in possible for name in one.names}
    verdict, met = Verdict(), set[str]()
    for place in differing:
        name = name_of(place)
        met.add(name)
        reason = expected.get(name) or next((one for one in possible if one.calls and follows(name, one)), None)
        if reason is None:
            verdict.unexplained.append(place)
        else:
            verdict.documented[place] = reason
    verdict.not_met = [name for name in expected if name not in met and compared(name)]
    return verdict


def headings(checkout: Path) -> list[str]:
    """Of the decisions of a checkout; none where it has no such file."""
    path = checkout / "docs/decisions.md"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix("## ") for line in lines if line.startswith("## ")]


def name_of(place: str) -> str:
    """tests/a.py::test_b[c] load #0 outputs -> tests/a.py::test_b; a network's name is itself."""
    return place.partition("[")[0].partition(" ")[0]

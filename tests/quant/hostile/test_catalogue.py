"""Every case of the catalogue, static and in training: right numbers, or a clear error where the case allows one."""

from __future__ import annotations

import os

import pytest

from . import child
from .cases import Case
from .harness import CHECKS, Outcome

LISTED = child.checks()
WANTED = LISTED if os.environ.get("OCTET_HOSTILE_NESTED") == "1" else LISTED[: len(LISTED) // 2]
"""`make test-hostile` takes each case as a child of another model too."""

HERE = [number for number, (case, _) in enumerate(WANTED) if not case.child]
APART = [number for number, (case, _) in enumerate(WANTED) if case.child]


def name_of(number: int) -> str:
    case, kind = LISTED[number]
    return f"{kind}: {case.title}"


@pytest.fixture(autouse=True)
def _one_thread(seeded_on_one_thread: None) -> None:
    """As every test of small tensors."""


@pytest.fixture(scope="module")
def apart() -> dict[int, Outcome]:
    """The outcomes of those checks that could end the process."""
    return child.outcomes(APART)


def hold(outcome: Outcome, case: Case) -> None:
    assert outcome.passes(case), f"{outcome.status}: {outcome.reason}"


@pytest.mark.parametrize("number", HERE, ids=name_of)
def test_right_numbers_or_a_clear_error(number: int) -> None:
    case, kind = LISTED[number]
    hold(CHECKS[kind](case), case)


@pytest.mark.parametrize("number", APART, ids=name_of)
def test_right_numbers_and_the_process_lives(number: int, apart: dict[int, Outcome]) -> None:
    hold(apart[number], LISTED[number][0])

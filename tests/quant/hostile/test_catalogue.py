"""Every case of the catalogue, static and in training: right numbers, or a clear error where the case allows one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from . import child
from .cases import Case
from .harness import CHECKS, Outcome
from .not_yet import NOT_YET

LISTED = child.checks()
WANTED = LISTED if os.environ.get("OCTET_HOSTILE_NESTED") == "1" else LISTED[: len(LISTED) // 2]
"""`make test-hostile` takes each case as a child of another model too."""

KINDS = {"static"} if os.environ.get("QUANT_EXTENSION") == "none" else set(CHECKS)
"""Training has no kernel but fake quantisation (tests/observers/test_fake_quantize.py), and what it converts to is a
program as in static quantisation: without the compiled kernels it goes the same way as with them."""


def numbers(*, apart: bool) -> list[Any]:
    """The numbers of the checks that run here or apart, as parameters of a test."""
    found = []
    for number, (case, kind) in enumerate(WANTED):
        if case.child == apart and kind in KINDS:
            not_yet = kind in NOT_YET.get(case.title, "").split()
            marks = [pytest.mark.xfail(strict=True, reason="fails so far")] if not_yet else []
            found.append(pytest.param(number, id=f"{kind}: {case.title}", marks=marks))
    return found


@pytest.fixture(autouse=True)
def _one_thread(seeded_on_one_thread: None) -> None:
    """As every test of small tensors."""


@pytest.fixture(scope="module")
def apart() -> dict[int, Outcome]:
    """The outcomes of those checks that could end the process."""
    return child.outcomes(number for number, (case, kind) in enumerate(WANTED) if case.child and kind in KINDS)


def hold(outcome: Outcome, case: Case) -> None:
    assert outcome.passes(case), f"{outcome.status}: {outcome.reason}"


@pytest.mark.parametrize("number", numbers(apart=False))
def test_right_numbers_or_a_clear_error(number: int) -> None:
    case, kind = LISTED[number]
    hold(CHECKS[kind](case), case)


@pytest.mark.parametrize("number", numbers(apart=True))
def test_right_numbers_and_the_process_lives(number: int, apart: dict[int, Outcome]) -> None:
    hold(apart[number], LISTED[number][0])

"""What the verdicts of `make bench` say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize(
    ("seconds", "errors", "exact", "text"),
    [
        ({"octet": 1.0, "ort": 1.3, "float": 4.0}, {"octet": 0.01, "ort": 0.02}, True, "reached"),
        ({"octet": 1.0, "ort": 1.1, "float": 4.0}, {"octet": 0.01, "ort": 0.02}, True, "1.10 of 1.25 against ort"),
        ({"octet": 1.0, "ort": 1.3}, {"octet": 0.02, "ort": 0.01}, True, "error 0.0200 above 0.0100 of ort"),
        ({"octet": 1.0, "ort": 1.5, "float": 1.1}, {"octet": 0.01, "ort": 0.02}, True, "1.10 of 1.25 against float"),
        ({"octet": 1.0, "ort": 1.5, "ort full": 1.0}, {"octet": 0.01, "ort": 0.02, "ort full": 0.2}, False, "reached"),
        ({"octet": 1.0, "ort": 1.5, "ort full": 1.0}, {"octet": 0.01, "ort": 0.02, "ort full": 0.01}, True, "ort full"),
        ({"octet": 2.0, "octet static": 1.0, "ort": 1.3}, {"octet": 0.01, "octet static": 0.01, "ort": 0.02}, True,
         "reached"),
    ],
    ids=["reached", "slow", "inaccurate", "float is a peer", "saturates", "does not saturate", "our second form"],
)  # fmt: skip
def test_a_goal_needs_both_time_and_error(
    seconds: dict[str, float], errors: dict[str, float], exact: bool, text: str, load: Callable[[str], ModuleType]
) -> None:
    bench, suite, harness = load("bench"), load("suite"), load("harness")
    case = suite.Case("s", "c", {}, lambda: None, lambda task: {}, goal=1.25)
    race = harness.Race("c", {}, {name: [one] * 3 for name, one in seconds.items()}, {}, {"float": None, **errors})
    assert text in bench.judge(case, race, exact).text


def test_a_limit_of_time(load: Callable[[str], ModuleType]) -> None:
    bench, suite, harness = load("bench"), load("suite"), load("harness")
    case = suite.Case("s", "c", {}, lambda: None, lambda task: {}, limit=3e-6)
    race = harness.Race("c", {}, {"float": [9e-6], "octet": [3.5e-6]}, {}, {"float": None, "octet": 0.0})
    assert bench.judge(case, race, True).text == "NOT reached: 3.5 us of 3 us"
    assert bench.judge(dataclasses.replace(case, limit=4e-6), race, True).text == "reached"


def test_a_peer_that_fails_is_absent_with_what_it_said(load: Callable[[str], ModuleType]) -> None:
    graph_peers, peers = load("graph_peers"), load("peers")

    def broken(model: nn.Module, x: torch.Tensor) -> None:
        raise KeyError("operator 7")

    wanted = {"float": peers.torch_float, "broken": graph_peers.foreign(broken)}
    found, missing = peers.assemble(nn.Linear(2, 2), torch.randn(1, 2), wanted)
    assert [peer.name for peer in found] == ["float"]
    assert missing == {"broken": "it raises KeyError in broken: 'operator 7'"}


def test_a_peer_that_writes_into_its_input_leaves_the_others_theirs(load: Callable[[str], ModuleType]) -> None:
    graph_peers, peers = load("graph_peers"), load("peers")

    def writes(model: nn.Module, x: torch.Tensor) -> Any:
        return peers.Peer("writes", lambda: x.add_(1), lambda given: given.add_(1))

    x = torch.zeros(2)
    peer = graph_peers.foreign(writes)(nn.Identity(), x)
    peer.call()
    assert torch.equal(peer.predict(x), torch.ones(2))
    assert torch.equal(x, torch.zeros(2))


def test_every_case_has_a_name_of_its_own(load: Callable[[str], ModuleType]) -> None:
    cases = [case for section in load("suite").SECTIONS.values() for case in section()]
    assert len({case.name for case in cases}) == len(cases)
    assert any(case.quick for case in cases)


def test_what_made_the_contenders_wait_comes_first(load: Callable[[str], ModuleType]) -> None:
    buildings = {"one": {"octet": 1.0, "pt2e": 40.0}, "other": {"octet": 2.0, "compiled": 30.0}}
    assert load("bench").built(buildings) == ("making the contenders took 73 s: pt2e 40 s, compiled 30 s, octet 3 s")

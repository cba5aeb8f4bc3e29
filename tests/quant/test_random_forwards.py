"""A slice of `make fuzz-networks`: a few modules with random forwards, and what the campaign relies on."""

from __future__ import annotations

import os

import pytest
import torch

from .fuzz_networks import CHECKS, Wrong, check
from .random_forwards import drawn

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")

COUNT = int(os.environ.get("OCTET_RANDOM_NETWORKS", "6"))


@pytest.mark.parametrize("kind", CHECKS)
def test_random_forwards_are_held_to_float(kind: str) -> None:
    outcomes = [check(seed, kind) for seed in range(COUNT)]
    assert sum(outcome in ("ok", "explained") for outcome in outcomes) > COUNT / 2, outcomes


def test_a_module_is_drawn_from_its_seed_alone() -> None:
    one, other = drawn(3), drawn(3)
    assert one.text == other.text != drawn(4).text
    args, kwargs = one.inputs((2, 5), 1)
    with torch.no_grad():
        one.build()(*args, **kwargs)


def test_a_wrong_number_is_told_with_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prepared model with another weight than the float model's."""
    import quant

    prepare = quant.prepare

    def worse(*args: object, **kwargs: object) -> torch.nn.Module:
        prepared = prepare(*args, **kwargs)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in prepared.parameters():
                parameter.mul_(0.9)
        return prepared

    monkeypatch.setattr(quant, "prepare", worse)
    with pytest.raises(Wrong, match=r"--seed 0 --kind static: prepared, sizes .*expected 70\n(.|\n)*class Model"):
        check(0, "static")

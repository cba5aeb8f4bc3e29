"""Hugging Face's `generate()` of static int8 models: the tokens of the simulation. A slice of `generate.py`."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.static.simulation import simulating

from .decoding import (
    LENGTHS,
    SUBJECTS,
    Inputs,
    Row,
    Subject,
    build,
    counting,
    generate,
    note_programs,
    quiet,
    static,
    together,
)

TOKENS = 6


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'octet-quant[zoo]'")
        quiet()
    found: Subject = request.param
    return found


def scores(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The logits of each token that `generate` adds, (size, words)."""
    how = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "return_dict_in_generate": True}
    steps: list[Tensor] = model.generate(**copy.deepcopy(inputs), **how, output_scores=True).scores  # type: ignore[operator]
    return steps


def assert_ties(found: Tensor, expected: Tensor, simulated: list[Tensor]) -> None:
    """The first token of a row that is not the simulation's is as good there: nearer than two logits that are each a
    step of 8 bits off.

    Float steps between integers are the kernels' here and torch's there, so now and then a value on the edge of two
    integers falls to the other side. Random weights have such ties; behind one, the rows are of other texts.
    """
    for row, wrong in enumerate(found != expected):
        if bool(wrong.any()):
            step = int(wrong.nonzero()[0])
            logits = simulated[step][row]
            finite = logits[torch.isfinite(logits)]
            gap = float(logits[expected[row, step]] - logits[found[row, step]])
            assert gap <= 2 / 255 * float(finite.max() - finite.min())


def test_a_token_that_is_no_tie_is_noticed() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.99, -5.0, -torch.inf]])
    assert_ties(torch.tensor([[2]]), torch.tensor([[1]]), [logits])
    for other in (0, 4):
        with pytest.raises(AssertionError):
            assert_ties(torch.tensor([[other]]), torch.tensor([[1]]), [logits])


def test_tokens_are_those_of_the_simulation(subject: Subject) -> None:
    model = build(subject, 0, trained=False)
    prepared = static(subject, model, TOKENS)
    q, row = quant.convert(prepared), Row(subject.name)
    for length in (LENGTHS[0], LENGTHS[0] + 12):  # longer, too, than calibration had
        inputs = subject.draw(2, length)
        found = generate(q, inputs, TOKENS)
        with simulating(prepared, exact=True):
            expected = generate(prepared, inputs, TOKENS)
            if not torch.equal(found, expected):
                assert_ties(found, expected, scores(prepared, inputs))
    ran = {}
    with counting(q) as ran["prefill"]:
        generate(q, inputs, 1)
    with counting(q) as ran["step"]:
        generate(q, inputs, 3)
    ran["step"] -= ran["prefill"]
    note_programs(row, q, ran)
    assert row.native["prefill"]
    assert row.native["step"]
    assert not [line for line in row.calls.values() if "int8" in line], "int8 steps outside of native calls"
    layers = [entry for entry in quant.summary(q) if entry.type in ("Linear", "Conv1d", "Embedding")]
    assert [entry.name for entry in layers if entry.outcome == "float" and "not called" not in entry.detail] == []


def test_beams_and_samples_are_those_of_the_simulation() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'octet-quant[zoo]'")
    quiet()
    subject = SUBJECTS[0]
    prepared = static(subject, build(subject, 1, trained=False), TOKENS)
    q, inputs = quant.convert(prepared), subject.draw(2, 9)
    for how in ({"num_beams": 2}, {"do_sample": True}):
        torch.manual_seed(0)
        found = generate(q, inputs, TOKENS, **how)
        torch.manual_seed(0)
        with simulating(prepared, exact=True):
            assert torch.equal(found, generate(prepared, inputs, TOKENS, **how))


def test_seeds_make_one_row() -> None:
    rows = [Row("m", tokens=4, simulated=4, times=[(1.0, 2.0)]), Row("m", tokens=4, simulated=3, times=[(1.0, 3.0)])]
    row = together(rows)
    assert (row.tokens, row.simulated, len(row.times)) == (8, 7, 2)
    assert not row.holds

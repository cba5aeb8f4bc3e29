"""The demo: its table, its claims, and the whole of it on few words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def results(demo: ModuleType) -> list[Any]:
    spoken = (demo.Measure("words right, of 5,000", 0.6878, 0.6860, True),)
    heard = (
        demo.Measure("decided as float, of 7,161 frames", 1.0, 0.9996, True),
        demo.Measure("largest change of a probability", 0.0, 0.0344, False),
    )
    return [
        demo.Result("g2p-en", 3_340_000, 870_000, 3_340_000, 870_000, 0.6e-3, 0.3e-3, spoken),
        demo.Result("silero-vad", 1_240_000, 850_000, 530_000, 140_000, 0.2e-3, 0.16e-3, heard),
    ]


def test_table(demo: ModuleType, results: list[Any]) -> None:
    lines = demo.table(results).splitlines()
    assert max(map(len, lines)) <= 130
    head, first, second, third = lines[2], lines[4], lines[5], lines[6]
    for cell in ("3.34", "0.87", "0.26", "0.260", "0.600", "0.300", "2.00 x", "68.78 %", "68.60 %"):
        assert cell in first
    assert second.split()[0] == "silero-vad"
    assert third.split()[0] == "largest"
    # Columns stand under their heads: words to the left, numbers to the right.
    assert head.index("measure") == third.index("largest")
    assert len(head) == len(first) == len(second) == len(third)


def test_the_claims_hold_for_good_results(demo: ModuleType, results: list[Any]) -> None:
    demo.check(results, 5_000)


@pytest.mark.parametrize("claim", ["bytes", "words", "frames"])
def test_a_claim_that_does_not_hold_fails(demo: ModuleType, results: list[Any], claim: str) -> None:
    spoken, heard = results
    if claim == "bytes":
        heard = dataclasses.replace(heard, layer_bytes_int8=144_000)
    elif claim == "words":
        spoken = dataclasses.replace(spoken, measures=(demo.Measure("words right", 0.6878, 0.6820, True),))
    else:
        heard = dataclasses.replace(heard, measures=(demo.Measure("decided as float", 1.0, 0.98, True),))
    with pytest.raises(AssertionError, match=r"float|changed"):
        demo.check([spoken, heard], 5_000)
    if claim == "words":
        demo.check([spoken, heard], 1_000)  # too few words to tell 0.58 points from chance


def test_interleaved_takes_turns(demo: ModuleType) -> None:
    order: list[str] = []
    medians = demo.interleaved([lambda i: order.append("a"), lambda i: order.append("b")], 5, "test")
    assert len(medians) == 2
    assert order == ["a", "b"] * 25  # 20 to warm up


def test_demo_end_to_end(
    demo: ModuleType,
    g2p_data: None,
    silero_data: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = torch.get_num_threads()
    demo.main(["--quick", "--words", "300", "--json", str(tmp_path / "demo.json")])
    assert torch.get_num_threads() == threads
    out, err = capsys.readouterr()
    assert "g2p-en" in out
    assert "silero-vad" in out
    assert "g2p-en int8" in err  # progress stays off stdout
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["words"] == 300
    for model in figures["models"]:
        assert model["layer_bytes_int8"] < model["layer_bytes_float"] <= model["bytes_float"]
    changed = figures["models"][1]["measures"][1]["of_int8"]
    assert 0 < changed < 0.5  # 0 would say that nothing was quantised


def test_missing_data_ends_in_one_line(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise demo.DataUnavailable("g2p-en 2.1.0 could not be fetched")

    monkeypatch.setattr(demo.g2p, "load", load)
    with pytest.raises(SystemExit, match=r"demo: g2p-en 2\.1\.0 could not be fetched"):
        demo.main([])


@pytest.mark.parametrize("words", ["0", "49", "126053"])
def test_word_count_out_of_range(demo: ModuleType, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--words", words])
    assert "expected 50 to 126052" in capsys.readouterr().err

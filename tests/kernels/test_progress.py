"""Progress: two lines where standard error is no terminal, a bar on one, nothing where it is not wanted."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
from quant.kernels.progress import progress_of


def test_without_a_terminal_there_is_a_line_at_the_start_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("calibrating", unit="batch", total=3, shown=True, initial=1) as bar:
        assert capsys.readouterr().err == "calibrating: 3 batches, 1 of them done before\n"
        for _ in range(2):
            bar.update()
            bar.unpause()
            bar.set_postfix_str("a word")
            assert capsys.readouterr() == ("", "")
    said = capsys.readouterr().err
    assert said.startswith("calibrating: done, 3 of 3 batches in ")
    assert said.endswith(" s; a word\n")


def test_one_of_them_is_not_several(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("calibrating", unit="batch", total=1, shown=True) as bar:
        bar.update()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "calibrating: 1 batch"
    assert last.startswith("calibrating: done, 1 of 1 batch in ")


def test_a_run_of_unknown_length_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("rounding", unit="layer", total=None, shown=True) as bar:
        bar.update(5)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "rounding"
    assert last.startswith("rounding: done, 5 layers in ")


def test_a_run_that_fails_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress_of("rounding", unit="layer", total=4, shown=True)
    with contextlib.suppress(KeyError), bar:
        bar.update()
        raise KeyError
    assert capsys.readouterr().err.splitlines()[-1].startswith("rounding: stopped, 1 of 4 layers in ")


def test_a_terminal_has_a_bar(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_of("calibrating", unit="batch", total=2, shown=True) as bar:
        bar.update(2)
    said = terminal.getvalue()
    assert "calibrating: 100%" in said
    assert "2/2" in said
    assert "\x1b[3" not in said  # no colour


@pytest.mark.parametrize(
    ("what", "shown", "silenced"), [("calibrating", False, False), (None, True, False), ("calibrating", True, True)]
)
def test_nothing_is_said_where_nobody_wants_or_can_read_it(
    what: str | None, shown: bool, silenced: bool, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None if silenced else terminal)
    with progress_of(what, unit="batch", total=2, shown=shown) as bar:
        bar.update()
        bar.unpause()
        bar.set_postfix_str("word")
    assert terminal.getvalue() == ""

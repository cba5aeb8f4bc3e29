"""Files are old or new, whenever their writer is killed or refused, and nothing stays beside them."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from quant.calibrate import whole_files
from quant.calibrate.whole_files import replace_file, replacing

from quant.autoquant.records import Records
from quant.rounding.checkpoint import Checkpoint

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing")
locks = pytest.mark.skipif(whole_files.fcntl is None, reason="fcntl.flock is missing")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model[1].q8"  # a name that is a pattern too
    path.write_text("old", encoding="utf-8")
    return path


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


def killed_while_writing(path: Path) -> None:
    """A writer in another process, killed when half of the file is written."""
    pid = os.fork()
    if pid == 0:
        with replacing(path, "a test") as partial:
            partial.write_text("ne", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@forks
@locks
def test_what_killed_writers_left_is_removed_by_the_next(file: Path) -> None:
    for _ in range(2):
        killed_while_writing(file)
        assert file.read_text(encoding="utf-8") == "old"
        [left] = [name for name in names(file) if name != file.name]
        assert left.startswith(f".{file.name}.")
        assert left.endswith(".partial")
    replace_file(file, "new", "a test")
    assert file.read_text(encoding="utf-8") == "new"
    assert names(file) == [file.name]


@forks
@locks
@pytest.mark.parametrize("read", [Checkpoint, Records])
def test_what_a_killed_writer_left_is_removed_by_who_reads_and_has_nothing_to_write(
    file: Path, read: type[Checkpoint] | type[Records]
) -> None:
    file.unlink()
    read(file, {"of": "a test"})
    whole = file.read_bytes()
    killed_while_writing(file)
    assert len(names(file)) == 2
    link = file.with_name("link")
    link.symlink_to(file)
    read(link, {"of": "a test"})
    assert file.read_bytes() == whole
    assert names(file) == sorted([file.name, link.name])


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="os.symlink is missing")
def test_a_link_stays_and_the_file_that_it_names_is_written(file: Path) -> None:
    folder = file.parent / "elsewhere"
    folder.mkdir()
    link, dangling = folder / "latest.q8", folder / "next.q8"
    link.symlink_to("../model[1].q8")
    dangling.symlink_to("../made.q8")
    for place in (link, dangling):
        replace_file(place, "new", "a test")
        assert place.is_symlink()
    assert file.read_text(encoding="utf-8") == (file.parent / "made.q8").read_text(encoding="utf-8") == "new"
    assert names(link) == ["latest.q8", "next.q8"]
    dangling.unlink()
    dangling.symlink_to("nowhere/made.q8")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere' to write 'made.q8' in"):
        replace_file(dangling, "new", "a test")


@locks
def test_who_is_still_writing_is_let_be(file: Path) -> None:
    with replacing(file, "the first") as partial:
        partial.write_text("first", encoding="utf-8")
        replace_file(file, "second", "the second")
        assert file.read_text(encoding="utf-8") == "second"
    assert file.read_text(encoding="utf-8") == "first"
    assert names(file) == [file.name]


@locks
def test_a_folder_that_another_removes_before_it_is_locked_is_made_anew(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, seen = whole_files._lock, []

    def late(folder: Path) -> int:
        seen.append(folder)
        if len(seen) == 1:
            folder.rmdir()
            return -1
        return lock(folder)

    monkeypatch.setattr(whole_files, "_lock", late)
    replace_file(file, "new", "a test")
    assert (file.read_text(encoding="utf-8"), len(seen), names(file)) == ("new", 2, [file.name])


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "way"),
    [(errno.ENOSPC, "make room"), (errno.EROFS, "a folder that you may write in"), (errno.EIO, "in another place")],
    ids=errno.errorcode.get,
)
def test_an_error_names_the_file_and_the_way_out(
    file: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, way: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match=r"a test: .*; nothing that was there is changed: '.*model\[1\]\.q8'") as raised:
        replace_file(file, b"new", "a test")
    assert raised.value.errno == number
    assert os.strerror(number) in str(raised.value)
    assert way in str(raised.value)
    assert file.read_text(encoding="utf-8") == "old"
    assert names(file) == [file.name]


def test_a_folder_or_no_folder_is_said(tmp_path: Path, file: Path) -> None:
    with pytest.raises(IsADirectoryError, match="a test: expected the name of a file, this is a folder"):
        replace_file(tmp_path, "new", "a test")
    with pytest.raises(FileNotFoundError, match=r"a test: there is no folder '.*none' to write 'x' in; make it first"):
        replace_file(tmp_path / "none" / "x", "new", "a test")
    with pytest.raises(NotADirectoryError, match=r"a test: '.*q8' is a file, expected a folder to write 'x' in"):
        replace_file(file / "x", "new", "a test")


def test_a_long_name(tmp_path: Path) -> None:
    path = tmp_path / ("\N{GREEK SMALL LETTER ALPHA}" * 120)
    replace_file(path, "new", "a test")
    assert names(path) == [path.name]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_is_written_as_it_is() -> None:
    with pytest.raises(OSError, match="No space left"):
        replace_file("/dev/full", "new", "a test")
    assert not Path("/dev/full").is_file()


@pytest.mark.skipif(os.name == "nt", reason="there is no umask")
def test_others_may_read_it_as_the_umask_says(file: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(file, "new", "a test")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640

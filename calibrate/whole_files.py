"""Files that are written whole or not at all, whenever the writer is killed or the disk is full.

A file is written in a folder beside its place, `.NAME.*.partial`, flushed to the disk and renamed, so a reader finds
the old file or the new one. A folder that a killed writer left is removed by the next one that writes the same file: a
writer holds a lock on its folder, which ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # Windows, where no file is removed that somebody has open
    fcntl = None

SUFFIX = ".partial"

LONGEST = 40
"""Characters of a file's name that the folder's name has too: most systems take 255 bytes, a character has up to 4."""

REMEDIES = {
    errno.ENOSPC: "make room, or name a file on another disk",
    errno.EDQUOT: "make room, or name a file on another disk",
    errno.EACCES: "name a file in a folder that you may write in",
    errno.EPERM: "name a file in a folder that you may write in",
    errno.EROFS: "name a file in a folder that you may write in",
}
REMEDY = "name a file in another place"


def replace_file(path: str | os.PathLike[str], content: bytes | str, who: str) -> None:
    """Write a file, which others see with its old content until it has all of the new.

    Args:
        path: of the file; what is written to a pipe or a device goes there as it is.
        content: bytes, or text to write as UTF-8.
        who: whose error it is.

    Raises:
        OSError: as `replacing`.
    """
    data = content.encode() if isinstance(content, str) else content
    where = Path(path)
    if where.exists() and not where.is_file() and not where.is_dir():
        where.write_bytes(data)
        return
    with replacing(where, who) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path, who: str) -> Iterator[Path]:
    """A place to write a file at, which takes the place of `path` when the block ends without an error.

    A symbolic link stays one: the file that it names is written.

    Args:
        who: whose error it is.

    Raises:
        OSError: of the kind of what happened, with the file's name and what to do; `path` is as it was.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, f"{who}: expected the name of a file, this is a folder", str(path))
    place = _place(path)
    check_folder(place, who)
    try:
        remove_left(place)
        with _folder_beside(place) as folder:
            partial = folder / place.name
            yield partial
            _flush(partial, os.O_RDONLY)
            os.replace(partial, place)
            if hasattr(os, "O_DIRECTORY"):  # the rename is on the disk only with the folder; not of Windows
                with contextlib.suppress(OSError):  # of file systems that have no such call; the file is whole
                    _flush(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        what, way = error.strerror or str(error), REMEDIES.get(error.errno or 0, REMEDY)
        text = f"{who}: {what}; {way}; nothing that was there is changed"
        raise OSError(error.errno or errno.EIO, text, str(path)) from error


def check_folder(path: Path, who: str) -> None:
    """Raise FileNotFoundError or NotADirectoryError for a file in a folder that does not exist."""
    folder, name = str(path.parent), path.name
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(f"{who}: {folder!r} is a file, expected a folder to write {name!r} in")
    if not path.parent.exists():
        raise FileNotFoundError(f"{who}: there is no folder {folder!r} to write {name!r} in; make it first")


def _place(path: Path) -> Path:
    """The file that a symbolic link names."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _prefix(path: Path) -> str:
    return f".{path.name[:LONGEST]}."


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A new folder, with a lock, that is gone afterwards."""
    while True:
        folder = Path(tempfile.mkdtemp(SUFFIX, _prefix(path), path.parent))
        lock = _lock(folder)
        if folder.exists():  # else another writer came before the lock, and took it for one that was left
            break
        if lock >= 0:
            os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def remove_left(path: Path) -> None:
    """Remove the folders of writers of this file that were killed: also for a reader, who may have nothing to write."""
    path = _place(path)
    for folder in path.parent.glob(f"{glob.escape(_prefix(path))}*{SUFFIX}"):
        lock = _lock(folder)
        if lock >= 0 or fcntl is None:
            shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _lock(folder: Path) -> int:
    """The descriptor that holds the lock on a folder, or -1 where another has it or there are none."""
    if fcntl is None:
        return -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

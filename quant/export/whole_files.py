"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, who: str) -> None:
    """Write a file, which others see with its old content until it has all of the new.

    Args:
        who: whose error it is where there is no folder to write in.
    """
    if path.exists() and not path.is_file():  # a pipe or a device; opening a folder raises
        path.write_bytes(content)
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{who}: there is no folder {str(path.parent)!r} to write {path.name!r} in")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

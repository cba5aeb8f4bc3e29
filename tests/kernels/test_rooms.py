"""kernels/csrc/README.md: every file stands in the map, and rooms include what it says."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "kernels" / "csrc"
README = (CSRC / "README.md").read_text()
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".inc"})
MAP = {
    room: set(re.findall(r"^\|(.*?)\|", body, re.MULTILINE))
    for room, body in re.findall(r"^### (\S+)\n(.*?)(?=^###|\Z)", README, re.MULTILINE | re.DOTALL)
}


def room_of(path: Path) -> str:
    return path.parent.relative_to(CSRC).as_posix()


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def test_every_file_stands_in_the_map_of_its_room() -> None:
    listed = {
        f"{room}/{name}" for room, cells in MAP.items() for cell in cells for name in re.findall(r"`([^`]+)`", cell)
    }
    files = {path.relative_to(CSRC).as_posix() for path in FILES}
    assert [file for file in files if not any(fnmatch(file, name) for name in listed)] == []
    assert [name for name in listed if not any(fnmatch(file, name) for file in files)] == []


def test_no_two_files_have_one_name() -> None:
    stems = [path.stem for path in FILES if path.suffix == ".cpp"]
    assert len(stems) == len(set(stems))


def test_rooms_include_what_the_map_says() -> None:
    rows = re.findall(r"^\| `((?:core|torch)\S*)` \|[^|]*\|([^|]*)\|$", README, re.MULTILINE)
    assert {room for room, _ in rows} == {room_of(path) for path in FILES}
    rooms = {room for room, _ in rows if room.startswith("core/")}
    allowed = {room: {f"core/{name}" for name in re.findall(r"`(\w+)`", cell)} | {room} for room, cell in rows}
    allowed["core"] |= rooms
    allowed["torch"] |= rooms
    for path in FILES:
        for name in includes(path):
            assert (CSRC / name).is_file(), f"{path.name}: {name}"
            assert Path(name).parent.as_posix() in allowed[room_of(path)], f"{path.name} includes {name}"


def test_the_core_includes_no_header_of_torch_or_python() -> None:
    for path in (CSRC / "core").rglob("*"):
        if path.is_file():
            foreign = re.findall(
                r"^#include <((?:ATen|c10|torch|fbgemm|pybind11)/[^>]*|Python\.h)>", path.read_text(), re.MULTILINE
            )
            assert not foreign, f"{path.name}: {foreign}"
            assert not re.search(r"\b(at|c10|torch)::", path.read_text()), path.name

"""What `make coverage-kernels` makes of gcov's counts: instances of a template are one line, and throws no branches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from quant.kernels import build

from . import cpp_coverage
from .cpp_coverage import Lines, ranges, table

TEMPLATE = """\
template <bool kLarge> int halved(int x) {
    if (x > 9) {
        return kLarge ? x / 2 : 0;
    }
    return x;
}
int never(int x) { return x + 1; }
int main(int count, char**) { return halved<true>(count) + halved<false>(count + 20) - 1; }
"""


def line(number: int, count: int, *branches: tuple[int, bool]) -> dict[str, Any]:
    """A line of gcov's JSON; a branch is how often it was taken, and whether it is that of an exception."""
    listed = [{"count": taken, "throw": throws} for taken, throws in branches]
    return {"line_number": number, "count": count, "branches": listed}


def test_a_line_ran_where_one_instance_ran() -> None:
    lines = Lines()
    for one in (line(3, 0), line(3, 2), line(4, 0)):
        lines.add(one)
    assert lines.executed == (1, 2)
    assert lines.missing == [4]


def test_branches_of_instances_are_counted_together() -> None:
    lines = Lines()
    lines.add(line(3, 1, (1, False), (0, False)))
    lines.add(line(3, 1, (0, False), (1, False)))
    lines.add(line(4, 1, (1, False), (0, False)))
    assert lines.taken == (3, 4)


def test_branches_of_an_unrolled_line_are_those_of_the_line() -> None:
    lines = Lines()
    lines.add(line(3, 1, (1, False), (0, False)))
    lines.add(line(3, 1, (0, False), (0, False), (0, False), (7, False)))
    assert lines.taken == (2, 2)


def test_what_a_call_may_throw_is_no_branch() -> None:
    lines = Lines()
    lines.add(line(3, 1, (1, False), (0, True)))
    lines.add(line(4, 1, (1, False), (0, False), (0, True)))
    assert lines.taken == (1, 2)


def test_neighbouring_lines_are_one_range() -> None:
    assert ranges([]) == ""
    assert ranges([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"


def test_the_table_has_files_folders_and_the_sum() -> None:
    one, other = Lines(), Lines()
    one.add(line(1, 1, (1, False), (0, False)))
    other.add(line(1, 1))
    other.add(line(2, 0))
    rows = table({"csrc/core/one.cpp": one, "csrc/core/other.cpp": other}, missing=True).splitlines()
    assert [row.split() for row in rows if row] == [
        ["file", "lines", "executed", "branches", "taken"],
        ["csrc/core/one.cpp", "1", "100.0", "%", "2", "50.0", "%"],
        ["csrc/core/other.cpp", "2", "50.0", "%", "0", "-", "2"],
        ["csrc/core/", "3", "66.7", "%", "2", "50.0", "%"],
        ["all", "3", "66.7", "%", "2", "50.0", "%"],
    ]


def test_a_program_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cxx = build.find_compiler()
    if cxx is None or shutil.which("gcov") is None or "clang" in cxx:
        pytest.skip("no GCC, or none with gcov")
    source = tmp_path / "halved.cpp"
    source.write_text(TEMPLATE)
    program = tmp_path / "out" / "halved"
    program.parent.mkdir()
    subprocess.run([cxx, "--coverage", "-O0", source, "-o", program], check=True, cwd=program.parent)
    assert subprocess.run([program], check=False, cwd=program.parent).returncode == 0
    monkeypatch.setattr(cpp_coverage, "OUT", program.parent)
    monkeypatch.setattr(cpp_coverage, "SOURCES", tmp_path)
    [lines] = cpp_coverage.gather().values()
    assert lines.missing == [7]
    assert 6 not in lines.counts  # which closes the template
    assert lines.taken == (2, 2)

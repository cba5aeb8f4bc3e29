"""kernels/README.md: the numbers that the code cites exist there, and the ones it states are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from quant.kernels import reference
from quant.kernels.backends import onednn
from quant.kernels.scheme import SCALE_MIN

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
README = (KERNELS / "README.md").read_text()


def test_every_equation_that_is_cited_is_derived() -> None:
    derived = {int(number) for number in re.findall(r"\*\*\((\d)\)\*\*", README)}
    assert derived == set(range(1, 10))
    for path in [*KERNELS.rglob("*.py"), *(path for path in (KERNELS / "csrc").rglob("*") if path.is_file())]:
        for cited in re.findall(r"[Ee]quations? (\d)(?:(?: and |, )(\d))*", path.read_text()):
            assert {int(number) for number in cited if number} <= derived, path.name


def test_the_constants_are_those_of_the_code() -> None:
    assert f"K <= {reference.MAX_K}" in README
    assert (
        "kMaxK = (2147483647LL - (1LL << 30)) / (255 * 127)" in (KERNELS / "csrc/core/gemm/packed_gemm.h").read_text()
    )
    assert f"= {onednn.PANEL} and" in " ".join(README.split())
    assert SCALE_MIN == 2.0**-126
    assert 255 * 128 <= 2**15 - 1 < 255 * 129

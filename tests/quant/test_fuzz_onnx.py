"""A slice of `fuzz_onnx.py`: damaged files end in clear errors, or give the reference's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import fuzz_onnx

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    pytest.importorskip("onnx", reason="onnx is not installed")
    return fuzz_onnx.seeds(tmp_path_factory.mktemp("seeds"))  # type: ignore[return-value]


@pytest.mark.parametrize("first", range(0, 80, 8))
def test_damaged_files(first: int, files: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    for seed in range(first, first + 8):
        data, x = fuzz_onnx.case(seed, files)
        assert fuzz_onnx.outcome(data, x, tmp_path / "damaged.onnx") in ("refused", "no such call", "numbers"), seed


def test_an_operator_with_other_operands(files: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """A number of operands that its operator has not."""
    data, x = fuzz_onnx.case(3316, files)
    assert fuzz_onnx.outcome(data, x, tmp_path / "damaged.onnx") in ("refused", "numbers")

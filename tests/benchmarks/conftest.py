"""What the tests of several benchmarks share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a benchmark's module the way its scripts do: from their own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module

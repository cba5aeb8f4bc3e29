"""What a type checker sees of the public names: uses that must pass under mypy strict, and misuses that must not."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

USES = """
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_type

import quant
from quant.kernels import QParams, QScheme

model: nn.Module = nn.Linear(2, 2)

q = quant.quantize_dynamic(model)
assert_type(q, nn.Module)
assert_type(quant.quantize_dynamic(model, None, backend="native", inplace=True), nn.Module)

by_name = quant.Recipe({"head": None, "encoder.*": quant.QConfig(weight_bits=4)})
by_both = quant.Recipe({"head": None, nn.LSTM: quant.QConfig(weight_bits=4)})
by_type = quant.Recipe([(nn.LSTM, quant.QConfig(activation_bits=16)), ("head", None)])
by_predicate = quant.Recipe([(lambda name, module: name == "head", None)], default=None, backend="fbgemm")
assert_type(by_name.resolve("head", model), tuple[quant.QConfig | None, int])
quant.quantize_dynamic(model, by_predicate)
assert_type(quant.QConfig.from_dict({}).to_dict(), dict[str, Any])

report = quant.summary(q)
assert_type(report, quant.Report)
assert_type([entry.outcome for entry in report], list[str])
assert_type(report["head"].bytes_after, int)
assert_type(report.to_dict(), dict[str, Any])

assert_type(report["head"], quant.types.ReportEntry)
assert_type(quant.compare(model, q, []), quant.types.Comparison)
assert_type(quant.parity(model, q, []).holds, bool)
assert_type(quant.__version__, str)


def worst(comparison: quant.types.Comparison) -> quant.types.StepError:
    return comparison.steps[0]


assert_type(quant.kernels.available(), dict[str, str])
assert_type(quant.kernels.autotune(q, torch.zeros(1, 2)), quant.types.Tuning)
assert_type([entry.backend for entry in quant.kernels.autotune(q, torch.zeros(1, 2))], list[str])
with quant.kernels.use("reference"):
    q(torch.zeros(1, 2))

scheme = QScheme(torch.uint8, 0, 255, symmetric=False)
params = QParams(torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), scheme)
assert_type(params.quantize(torch.zeros(2)), torch.Tensor)
"""

MISUSES = {
    "a module type for the model": "quant.quantize_dynamic(nn.Linear)",
    "a dict for the recipe": "quant.quantize_dynamic(model, {'head': None})",
    "bits as a string": "quant.QConfig(weight_bits='8')",
    "a third number of activation bits": "quant.QConfig(activation_bits='all')",
    "settings that are no QConfig": "quant.Recipe({'head': 4})",
    "the backend by position": "quant.Recipe({}, None, 'native')",
    "a report's entries by index": "quant.summary(model)[0]",
    "a changed setting": "quant.QConfig().weight_bits = 4",
}


def check(code: str, folder: Path) -> str:
    """What mypy says of a program, from a folder where the checkout's `quant/` is not in its way."""
    (folder / "program.py").write_text(code)
    # With the settings of `make types`, and so from its cache: anew it takes 13 s.
    command = [sys.executable, "-m", "mypy", "--config-file", str(CHECKOUT / "pyproject.toml")]
    command += ["--cache-dir", str(CHECKOUT / ".mypy_cache"), "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def _typed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where mypy is not there, or sees no types in the way the package is installed."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    if "import-" in check("import quant, quant.kernels\n", tmp_path_factory.mktemp("probe")):
        pytest.skip("mypy cannot read this editable install; editable_mode=strict makes one that it can (make install)")


@pytest.mark.usefixtures("_typed")
def test_uses_pass(tmp_path: Path) -> None:
    assert "Success" in check(USES, tmp_path), check(USES, tmp_path)


@pytest.mark.usefixtures("_typed")
def test_misuses_are_found(tmp_path: Path) -> None:
    head = "from torch import nn\nimport quant\nmodel: nn.Module = nn.Linear(2, 2)\n"
    found = check(head + "\n".join(MISUSES.values()) + "\n", tmp_path)
    lines = {int(number) for number in re.findall(r"^program\.py:(\d+): error", found, flags=re.MULTILINE)}
    first = head.count("\n") + 1
    assert [name for number, name in enumerate(MISUSES, first) if number not in lines] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (CHECKOUT / "quant" / "py.typed").exists()

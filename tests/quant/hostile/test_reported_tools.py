"""What reports and tools said less than the truth about."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")

ROUTES = r"vnni|tiles|pairwise|signed|wide|split|neon|dot|reference"


def static(model: nn.Module, batches: list[Tensor], recipe: quant.Recipe | None = None) -> nn.Module:
    return quant.quantize_static(model.eval(), batches, recipe, progress=False)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_share_of_float_counts_what_stays_float(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(16, 64)
    recipe = quant.Recipe({"0": None})
    q = static(model, [x] * 2, recipe) if kind == "static" else quant.quantize_dynamic(model, recipe)
    line = next(line for line in str(quant.summary(q)).splitlines() if "of float" in line)
    shares = [float(text) for text in re.findall(r"(\d\.\d+) of float", line)]
    assert any(0.5 < share < 0.75 for share in shares), line


def test_static_reports_name_the_route_as_dynamic_ones_do() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(16, 64)
    dynamic = re.findall(ROUTES, quant.summary(quant.quantize_dynamic(model))["0"].detail)
    assert dynamic
    assert set(dynamic) & set(re.findall(ROUTES, quant.summary(static(model, [x] * 2))["0"].detail))


class ThroughFunction(nn.Module):
    """As Swin's shifted windows: the layer is a child, and its weight goes through F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.qkv.weight, self.qkv.bias).relu())


def test_a_layer_called_through_a_function_is_not_said_to_be_uncalled() -> None:
    q = static(ThroughFunction(), [torch.randn(8, 16)] * 2)
    detail = quant.summary(q)["qkv"].detail
    assert "not called" not in detail, detail


@pytest.mark.parametrize("act", [nn.Hardswish, nn.ReLU6, nn.SiLU])
def test_compare_looks_at_values_before_an_activation_in_place(act: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), act(inplace=True), nn.Conv2d(8, 4, 1)).eval()  # type: ignore[call-arg]
    images = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    comparison = quant.compare(model, static(model, images), images)
    assert min(step.sqnr for step in comparison.steps) > 25, comparison


def test_parity_of_a_model_that_is_still_in_training_mode() -> None:
    batches = [torch.randn(64, 8) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    p = quant.prepare_qat(model, batches[0]).train()
    for batch in batches:
        p(batch).sum().backward()
    q = quant.convert(p)
    p.train()
    assert quant.parity(p, q, batches).holds
    assert p.training
    assert p[1].training
    assert quant.parity(p.eval(), q, batches).holds


def test_the_version_is_the_distributions() -> None:
    assert quant.__version__ == importlib.metadata.version("octet-quant")


@pytest.mark.parametrize("name", ["ReportEntry", "Comparison", "Parity", "CaptureMismatch"])
def test_types_of_results_have_public_names(name: str) -> None:
    assert isinstance(getattr(quant.types, name), type)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quant", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_tells_its_version() -> None:
    assert quant.__version__ in command("--version").stdout


def test_doctor_speaks_of_an_instruction_set_that_is_none() -> None:
    run = command("doctor", QUANT_ISA="foo")
    assert "Traceback" not in run.stderr
    assert "QUANT_ISA" in run.stdout + run.stderr


def test_summary_refuses_a_file_with_damaged_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    quant.save(quant.quantize_dynamic(nn.Sequential(nn.Linear(64, 64))), file)
    data = bytearray(file.read_bytes())
    data[-100] ^= 255
    file.write_bytes(data)
    run = command("summary", str(file))
    assert run.returncode == 2, run.stdout
    assert "Traceback" not in run.stderr


def test_the_line_of_a_users_own_error_is_shown(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make():\n    return undefined_name\n", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    out = str(tmp_path / "out.safetensors")
    run = command("dynamic", "--model", "broken:make", "--out", out, PYTHONPATH=path)
    assert "undefined_name" in run.stderr
    assert re.search(r"broken\.py\D+2\b|line 2\b", run.stderr), run.stderr

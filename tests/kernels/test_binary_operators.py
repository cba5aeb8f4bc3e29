"""An elementwise operator of two values is one Python file and one of C++: that of docs/extending.md is
added to a copy of the sources."""

from __future__ import annotations

import filecmp
import re
import runpy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from quant.kernels import build, plan_check, reference_ops, reference_plan
from torch import Tensor, nn

import quant
from quant.ops import registry
from quant.runtime.program_runner import ProgramRunner

from .test_core import RUN_PLAN, generator, in_memory, link, run
from .test_instruction_sets import build_of, compiled

PYTHON = Path(__file__).with_name("added_hypot.py")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
STRUCTURE, ROW = re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL)
LINE = "hypot q_a=%2 a_zero_point=9 a_multiplier=0.7 q_b=%3 b_zero_point=99 b_multiplier=-0.4 output_zero_point=3"
TEXT = "\n".join([
    reference_plan.HEADER,
    "inputs %0 %1",
    "%2 = quantize x=%0 scale=0.02 zero_point=9",
    "%3 = quantize x=%1 scale=0.03 zero_point=99",
    f"%4 = {LINE}",
    f"%5 = {LINE.replace('%2', '%4')}",
    "outputs %4 %5",
])  # fmt: skip


@dataclass(frozen=True)
class Added:
    """A copy of `kernels/` that has the operator.

    Attributes:
        kernels: the copy.
        program: the plan's C++ program with what is compiled of it.
    """

    kernels: Path
    program: Path


@pytest.fixture(scope="module")
def added(core_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Added:
    folder = tmp_path_factory.mktemp("hypot")
    kernels = folder / "kernels"
    shutil.copytree(build.SOURCES, kernels / "csrc")
    shutil.copy(build.__file__, kernels)
    operators = kernels / "csrc" / "core" / "rows" / "binary.inc"
    text = operators.read_text()
    for before, new in (
        ("template <class Operator, int a_step", f"{STRUCTURE}\n"),
        ("    {nullptr, nullptr, nullptr},", ROW),
    ):
        assert text.count(before) == 1
        text = text.replace(before, new + before)
    operators.write_text(text)
    building = build_of(kernels)
    # Everything else is in the library as it was.
    readers = [path for path in building.core_sources(build.host_arch()) if path.stem.startswith("elementwise_")]
    objects = [compiled(building, source, folder) for source in readers]
    assert objects
    return Added(kernels, link(RUN_PLAN, [*objects, core_library], folder / "run_plan"))


@pytest.fixture
def known(added: Added) -> Iterator[None]:
    """Python with the operator's file, and the copy's table of settings."""
    with (
        mock.patch.object(plan_check, "CORE", added.kernels / "csrc" / "core"),
        mock.patch.dict(registry._FUNCTIONS),
        mock.patch.dict(reference_ops.OPS),
    ):
        plan_check.table.cache_clear()
        runpy.run_path(str(PYTHON))
        yield
    plan_check.table.cache_clear()
    reference_plan.parse.cache_clear()


def changed(before: Path, after: Path) -> list[str]:
    """The files that differ, new ones among them."""
    files = [path.relative_to(after) for path in after.rglob("*") if path.is_file()]
    _, other, missing = filecmp.cmpfiles(before, after, files, shallow=False)
    return [str(path) for path in (*other, *missing)]


def test_a_native_elementwise_operator_is_two_files(added: Added) -> None:
    """The one of quant/ops/, which stands beside this test, and this one."""
    assert changed(build.SOURCES, added.kernels / "csrc") == ["core/rows/binary.inc"]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("isa", ["", *(one.name for one in build.instruction_sets(build.host_arch()))])
@pytest.mark.parametrize(
    "shapes",
    [[(2, 5, 9, 7)] * 2, [(2, 5, 9, 7), (2, 5, 1, 1)], [(5, 1), (3, 5, 33)], [(2, 70), (1,)], [(1, 3), (0, 3)]],
    ids=str,
)
def test_plans_compute_it(added: Added, shapes: list[tuple[int, ...]], isa: str, tmp_path: Path) -> None:
    """By its kernel for every instruction set, with the reference's bits: plain and broadcast, images and rows."""
    chance = generator()
    inputs = tuple(torch.randn(shape, generator=chance) * 3 for shape in shapes)
    results = reference_plan.run_plan(inputs, [], TEXT)
    assert run(added.program, tmp_path, TEXT, [], [inputs], isa) == b"".join(map(in_memory, results))


class Norms(nn.Module):
    """The length of pairs of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.hypot(self.one(x), self.two(x)))


@pytest.mark.usefixtures("known")
def test_a_converted_model_plans_it() -> None:
    """As a line between those of its convolutions, in one region."""
    torch.manual_seed(0)
    model, x = Norms().eval(), torch.randn(4, 3, 8, 8)
    with quant.kernels.use("reference"), torch.no_grad():
        q = quant.quantize_static(model, [x], progress=False)
        error = (q(x) - model(x)).square().sum() / model(x).square().sum()
    assert error < 1e-3
    [runner] = [module for module in q.modules() if isinstance(module, ProgramRunner)]
    [region] = runner.program.schedule.regions
    assert not runner.program.schedule.reasons
    assert [str(piece).split(" ")[2] for piece in region.pieces if isinstance(piece, str)] == ["quantize", "hypot"]


def test_settings_are_two_values_and_numbers() -> None:
    """Which is what plans read of such an operator."""
    assert plan_check.binary_rows()
    for row in plan_check.binary_rows():
        kinds = [setting.kind for setting in plan_check.table()[row.split(" ")[0]].values()]
        assert kinds.count("u8") == 2
        assert {kind for kind in kinds if kind != "u8"} <= {"byte", "integer", "real", "positive", "number"}
        assert not any(one.optional or one.nothing for one in plan_check.table()[row.split(" ")[0]].values())

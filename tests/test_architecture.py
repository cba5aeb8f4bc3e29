"""The order of the packages: no import against it but those that order.py lists, whose list only shrinks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import quant

from .architecture.order import CLIMBING, ORDER, climbing
from .architecture.sources import Arrow, File, arrows, cycles, files, imports
from .architecture.strings import Comparison, comparisons, unlisted, unused

ROOT = Path(__file__).resolve().parent.parent
HOW = "`python tests/architecture/run.py` shows all arrows; the order and the list stand in tests/architecture/order.py"

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
WHY = "OCTET_FAST_TESTS=1: a process that imports torch is slow"


@pytest.fixture(scope="module")
def sources() -> list[File]:
    return files(ROOT)


@pytest.fixture(scope="module")
def found(sources: list[File]) -> list[Arrow]:
    return arrows(sources)


def test_every_unit_has_a_place(sources: list[File]) -> None:
    units = {one.unit for one in sources}
    assert not units - set(ORDER), f"give these a place; {HOW}"
    assert not set(ORDER) - units, f"these are gone; {HOW}"
    assert len(set(ORDER)) == len(ORDER)


def test_no_new_import_against_the_order(found: list[Arrow]) -> None:
    new = [str(one) for one in climbing(found) if one.module not in CLIMBING.get(one.file, ())]
    assert not new, f"{HOW}:\n" + "\n".join(new)


def test_the_list_of_imports_against_the_order_only_shrinks(found: list[Arrow]) -> None:
    there = {(one.file, one.module) for one in climbing(found)}
    listed = {(file, module) for file, modules in CLIMBING.items() for module in modules}
    assert not listed - there, "these are gone from the code; take them out of CLIMBING in tests/architecture/order.py"


def test_without_the_listed_imports_there_is_no_cycle(found: list[Arrow]) -> None:
    assert not cycles(one for one in found if one not in climbing(found))


def test_imports_in_functions_and_for_types_count() -> None:
    tree = ast.parse(
        "import a\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from b import c\n"
        "def f():\n    import d\n"
        "class G:\n    import e\n"
    )
    assert sorted(imports(tree)) == [
        (1, "a", "top"),
        (2, "typing.TYPE_CHECKING", "top"),
        (4, "b.c", "typing"),
        (6, "d", "function"),
        (8, "e", "top"),
    ]


def test_units_and_cycles(tmp_path: Path) -> None:
    written = {
        "quant/__init__.py": "from quant.graph import Graph\n",
        "quant/graph.py": "Graph = 1\n",
        "quant/static/__init__.py": "",
        "quant/static/a.py": "from quant.graph import Graph\nimport quant.kernels.scheme\nfrom quant.static import b\n",
        "quant/static/b.py": "def f():\n    from quant.prepare import g\n",
        "quant/prepare.py": "from quant.static.b import f\nimport torch\n",
        "kernels/__init__.py": "",
        "kernels/scheme.py": "import quant\n",
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = arrows(files(tmp_path))
    assert [(one.source, one.module) for one in found] == [
        ("kernels", "quant"),
        ("quant", "quant.graph"),
        ("quant.prepare", "quant.static.b"),
        ("quant.static", "quant.kernels.scheme"),
        ("quant.static", "quant.graph"),
        ("quant.static", "quant.prepare"),
    ]
    assert cycles(found) == [{"quant.prepare", "quant.static"}]
    assert [(one.source, one.target) for one in climbing(found)] == [
        ("kernels", "quant"),
        ("quant.static", "quant.prepare"),
    ]


def test_the_command() -> None:
    command = [sys.executable, str(ROOT / "tests/architecture/run.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(unit in shown for unit in ORDER)
    listed = subprocess.run([*command, "--climbing"], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval("{" + listed + "}") == CLIMBING


def test_what_runs_a_converted_model_needs_the_kernels_alone(found: list[Arrow]) -> None:
    needed = {str(one) for one in found if one.source == "quant.runtime" and one.target != "kernels"}
    assert not needed, "in functions and for types too:\n" + "\n".join(sorted(needed))


PICKLED = "q = torch.load(sys.argv[1], weights_only=False)"
SAVED = """
import quant
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.LSTM(36, 8, batch_first=True)
q = quant.load(sys.argv[1], model=nn.Sequential(*layers))
"""
RUNS = """
import sys, torch
from torch import nn
{}
x, y = torch.load(sys.argv[2])
assert torch.equal(q(x)[0], y)
q[0] = nn.Conv2d(3, 8, 3)  # a step in float around a module of the user's
q(x)
print(*(name for name in sys.modules if name.startswith("quant.")))
"""
CAPTURE_AND_CONVERSION = ("capture", "fusion", "prepare", "convert", "qat", "static.assembly", "static.native")


@pytest.mark.skipif(FAST, reason=WHY)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_process_that_loads_and_runs_a_converted_model_imports_no_capture(
    tmp_path: Path, backend: str | None
) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.LSTM(36, 8, batch_first=True)
    x = torch.randn(2, 3, 8, 8)
    q = quant.quantize_static(nn.Sequential(*layers).eval(), [x], quant.Recipe(backend=backend), progress=False)
    torch.save(q, tmp_path / "pickled")
    torch.save((x, q(x)[0]), tmp_path / "xy")
    quant.save(q, tmp_path / "saved")
    imported = {}
    for file, load in (("pickled", PICKLED), ("saved", SAVED)):
        command = [sys.executable, "-W", "error", "-c", RUNS.format(load), tmp_path / file, tmp_path / "xy"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        imported[file] = set(done.stdout.split())
        assert not [name for name in imported[file] if name.removeprefix("quant.").startswith(CAPTURE_AND_CONVERSION)]
    # Beside what runs it the model holds its report, its recipe, and the graph that `compare` looks into.
    beside = {"quant.graph", "quant.recipe", "quant.report", "quant.static", "quant.static.prepared"}
    runs_it = ("quant.kernels", "quant.runtime", "quant.observers")
    assert {name for name in imported["pickled"] if not name.startswith(runs_it)} <= beside


NAMES = """
import importlib, sys, types
for name in ("prepare", "convert", "compare", "parity", "equalize"):
    importlib.import_module(f"quant.{name}")
import quant
assert not any(name.startswith("quant.integrations") for name in sys.modules)
for name in quant.__all__:
    assert name in dir(quant)
    assert isinstance(getattr(quant, name), types.ModuleType) == (name in sys.argv[1:]), name
assert quant.nn.register_int8 and quant.qat and quant.ops
"""


@pytest.mark.skipif(FAST, reason=WHY)
def test_a_public_name_is_imported_when_asked_for_and_no_module_hides_a_verb() -> None:
    command = [sys.executable, "-W", "error", "-c", NAMES, "calibrate", "kernels", "observers", "types"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'quant' has no attribute 'quantise'"):
        quant.quantise  # noqa: B018


@pytest.fixture(scope="module")
def with_texts(sources: list[File]) -> list[Comparison]:
    return comparisons(one for one in sources if one.path.startswith("quant/"))


def test_no_text_decides_what_something_is(with_texts: list[Comparison]) -> None:
    new = "\n".join(map(str, unlisted(with_texts)))
    assert not new, (
        f"compare types, members of an enum or identities, or give a reason in architecture/strings.py:\n{new}"
    )


def test_the_list_of_texts_that_decide_only_shrinks(with_texts: list[Comparison]) -> None:
    assert not unused(with_texts), "these are gone from the code; take them out of ALLOWED in architecture/strings.py"


def test_comparisons_with_texts_are_found() -> None:
    written = {
        "quant/a.py": "KINDS = frozenset({'one', 'two'})\nNAME = 'x'\n",
        "quant/b.py": "from quant.a import KINDS\n"
        "def f(a, b, things):\n"
        "    a.kind == 'a' or a.name == 'three' or a.device.type == 'cpu' or 'four' != b\n"
        "    a in ('five', 'six') or a not in KINDS\n"
        "    'key' in things or '@' in a or a == ''\n"
        "    match a:\n"
        "        case 'seven' | 'eight': pass\n"
        "        case 9: pass\n",
        "quant/c.py": "def f(a):\n    return a in KINDS or a == 'ten'\n",
    }
    sources = [File(path[:-3].replace("/", "."), "quant", path, text) for path, text in written.items()]
    found = comparisons(sources)
    assert {(one.file, one.line, one.text) for one in found} == {
        ("quant/b.py", 3, "a"),
        ("quant/b.py", 3, "three"),
        ("quant/b.py", 3, "four"),
        ("quant/b.py", 4, "five"),
        ("quant/b.py", 4, "six"),
        ("quant/b.py", 4, "one"),
        ("quant/b.py", 4, "two"),
        ("quant/b.py", 5, "@"),
        ("quant/b.py", 7, "seven"),
        ("quant/b.py", 7, "eight"),
        ("quant/c.py", 2, "ten"),
    }
    assert unlisted(found) == found

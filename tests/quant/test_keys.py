"""Keys of programs and int8 layers: what they are as texts, and modules whose names look like other keys' texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import quant
from quant.runtime.keys import LayerKey, ProgramKey, module_of
from quant.static.description import describe

NAMES = st.text("a/@.2", max_size=6)


def test_texts_are_those_of_files() -> None:
    keys = [ProgramKey(""), ProgramKey("", 2), ProgramKey("encoder"), ProgramKey("encoder.a", 3)]
    assert list(map(str, keys)) == ["", "@2", "encoder", "encoder.a@3"]
    assert str(ProgramKey("y@2")) == "y@2@1"
    assert list(map(str, [LayerKey("a.fc"), LayerKey("a/linear", functional=True)])) == ["a.fc", "/a/linear"]
    assert str(LayerKey("/x")) == ".//x"


@given(NAMES, st.integers(1, 12))
def test_a_program_is_read_from_its_text(path: str, place: int) -> None:
    key = ProgramKey(path, place)
    assert ProgramKey.read(str(key)) == key


@given(st.from_regex(r"[a/@2]*(\.[a/@2]+)*", fullmatch=True), st.booleans())
def test_a_layer_is_read_from_its_text(name: str, functional: bool) -> None:
    if name.startswith("."):
        return  # no module has an empty name
    key = LayerKey(name, functional)
    assert LayerKey.read(str(key)) == key


class Named(nn.Module):
    """Layers under names of one's own, and a product without a module; whole, or in parts where a value decides."""

    def __init__(self, names: list[str], *, branches: bool) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Linear(8, 8)))
        self.weight, self.branches = nn.Parameter(torch.randn(8, 8) / 3), branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and not bool(x.isfinite().all()):
            x = torch.zeros_like(x)
        for part in list(self._modules.values()):
            x = part(x)
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("names", [["/x"], ["y", "y@2"], ["y@2", "@"], ["/linear", "@3"]], ids=" ".join)
@pytest.mark.parametrize("branches", [False, True], ids=["one program", "a program a part"])
def test_names_that_look_like_keys(
    tmp_path: Path, without_programs: Callable[[Path], None], names: list[str], branches: bool
) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Named(names, branches=branches).eval()

    model, x = made(0), torch.randn(32, 8)
    q = quant.quantize_static(model, [x], progress=False)
    with torch.no_grad():
        assert (q(x) - model(x)).norm() < 0.1 * model(x).norm()
    for name in names:
        assert quant.summary(q)[f"{name}.2"].outcome == "int8"
        assert type(q.get_submodule(name)[0]) is not nn.Linear  # type: ignore[index]
    assert set(describe(q)["calls"]) == ({str(ProgramKey(name)) for name in names} if branches else {""})
    quant.save(q, tmp_path / "model.q8")
    assert torch.equal(quant.load(tmp_path / "model.q8", model=made(1))(x), q(x))
    without_programs(tmp_path / "model.q8")
    assert torch.equal(quant.load(tmp_path / "model.q8", model=made(1))(x), q(x))


class Again(nn.Module):
    """Calls a layer whose name looks like a third call of another, twice."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("y", "y@2"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self._modules["y@2"](self._modules["y"](x).relu())  # type: ignore[misc]
        return x


def test_a_comparison_reaches_such_modules() -> None:
    torch.manual_seed(0)
    model, x = Again().eval(), torch.randn(32, 8)
    comparison = quant.compare(model, quant.quantize_static(model, [x], progress=False), [x])
    assert comparison.unreached == ()
    known = {"", "y", "y@2", "part.fc"}
    steps = ["y", "y@1", "y@2", "y@2@3", "part.fc@1", "part.linear", "z@1"]
    assert [module_of(step, known) for step in steps] == ["y", "y", "y@2", "y@2", "part.fc", None, None]

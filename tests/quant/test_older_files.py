"""Files of every version of the rules that graphs are fused by: each loads as it was, to the bits that it gave.

`python tests/quant/test_older_files.py` writes the file of the version that it imports, and what it computed; run it
before `fused_graph.RULES` is raised, and keep the files of the others as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quant
from quant.artefact import file
from quant.artefact.file import SCHEMA, read
from quant.fusion.fused_graph import RULES
from quant.static.description import describe

KEPT = Path(__file__).parent / "artefacts"
MANIFEST = ("static", "modules", "report", "float_bytes")


class Ruled(nn.Module):
    """A convolution, an LSTM and linear layers, around one case for each of the rules 2 to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen, self.rnn = nn.Conv1d(4, 8, 3, padding=1), nn.Identity(), nn.LSTM(8, 6, batch_first=True)
        self.narrow, self.wide, self.joined = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 4)
        self.beside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.seen(self.conv(x)).relu()  # 3: an identity is no step
        y, _ = self.rnn(y.transpose(1, 2))
        small, wide = torch.tanh(self.narrow(y)), (self.wide(y) / 1).relu()  # 4: nor is a neutral number
        z = self.joined(torch.cat([small, 20 * wide], 2))  # 2: what others read has a range of its own
        return self.beside(small) + z


class Masked(nn.Module):
    """A layer that reads infinities; by rules 5 it is float. The second program is a further one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 4, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        y = self.first(x) if more is None else self.first(x) + more
        return self.last(y.masked_fill(x < -0.999, torch.inf))


class Finer(nn.Module):
    """A layer with 16-bit activations: float by rules 5, static by rules 6."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.finer = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.finer(self.first(x).relu())
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {"ruled": Ruled, "masked": Masked, "finer": Finer}
FILES = [("ruled", rules) for rules in range(1, 6)] + [("masked", 4), ("masked", 5), ("finer", 5), ("finer", 6)]
assert FILES[-1][1] == RULES


def built(model: nn.Module) -> nn.Module:
    """All its weights from a formula, so that no generator of random numbers has to be the same."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).mul(0.7 + index).sin().reshape(parameter.shape) * 0.6)
    return model.eval()


def signals(step: float) -> Tensor:
    return torch.arange(3 * 4 * 5).mul(step).sin().reshape(3, 4, 5)


def calls(case: str, step: float) -> list[tuple[Tensor, ...]]:
    x = signals(step)
    return [(x,), (x, x)] if case == "masked" else [(x,)]


def outputs(q: nn.Module, case: str) -> dict[str, Tensor]:
    return {f"{step}/{place}": q(*call) for step in (0.3, 1.1, 2.0) for place, call in enumerate(calls(case, step))}


def recorded(case: str, rules: int) -> dict[str, Tensor]:
    return load_file(KEPT / f"{case}_{rules}.expected")


@pytest.mark.parametrize(("case", "rules"), FILES)
def test_a_file_gives_what_it_gave_when_it_was_written(case: str, rules: int, tmp_path: Path) -> None:
    loaded = quant.load(KEPT / f"{case}_{rules}.q8", model=MODELS[case]())
    check(loaded, case, rules)
    quant.save(loaded, tmp_path / "again.q8")
    check(quant.load(tmp_path / "again.q8", model=MODELS[case]()), case, rules)


def check(loaded: nn.Module, case: str, rules: int) -> None:
    got = outputs(loaded, case)
    outcomes = {entry.name: entry.outcome for entry in quant.summary(loaded)}
    floats = {name for name, module in loaded.named_modules() if outcomes.get(name, "int8") != "int8"}
    assert floats == {("masked", 5): {"last"}, ("finer", 5): {"finer"}}.get((case, rules), set())
    # A float layer is torch's, which adds in an order of the CPU's; one that is int8 has the same bits on all.
    within = {"rtol": 1e-5, "atol": 1e-5} if floats else {"rtol": 0.0, "atol": 0.0}
    for name, expected in recorded(case, rules).items():
        torch.testing.assert_close(got[name], expected, **within, equal_nan=True)
    assert describe(loaded).get("rules", 1) == rules


@pytest.mark.parametrize("case", MODELS)
def test_the_recorded_numbers_are_of_their_rules_alone(case: str) -> None:
    """Else a file would not show that its rules are followed. Rules 5 are 4 where there are no infinities."""
    of_case = [recorded(case, rules) for name, rules in FILES if (name, rules) != ("ruled", 5) and name == case]
    assert all(bool(one["0.3/0"].isfinite().all()) for one in of_case)
    for one, other in combinations(of_case, 2):
        assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("change", [{"static": {"": {"version": 1, "rules": RULES + 1}}}, {"schema": 99}], ids=str)
def test_a_file_of_a_newer_version_is_refused_with_the_version_that_wrote_it(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, tensors = read(KEPT / "ruled_4.q8")
    monkeypatch.setattr(file, "SCHEMA", change.get("schema", SCHEMA))
    monkeypatch.setattr(file, "_version", lambda package: "7.8.9")
    file.write(tmp_path / "newer.q8", tensors, {name: manifest[name] for name in MANIFEST} | change)
    monkeypatch.undo()
    with pytest.raises(quant.ArtefactError, match=r"octet-quant 7\.8\.9") as caught:
        quant.load(tmp_path / "newer.q8", model=Ruled())
    assert "upgrade it" in str(caught.value) or "use the version of octet-quant that wrote it" in str(caught.value)


def keep(rules: str) -> None:
    """Write the files of the version that is imported."""
    minmax = quant.QConfig(activation_observer="minmax")
    recipe = quant.Recipe({"finer": quant.QConfig(activation_bits=16)}, default=minmax)
    for case in [case for case, number in FILES if str(number) == rules]:
        its = recipe if case == "finer" else quant.Recipe(default=minmax)
        prepared = quant.prepare(built(MODELS[case]()), signals(0.3), its)
        with torch.no_grad():
            for call in [*calls(case, 0.3), *calls(case, 1.1)]:
                prepared(*call)
        q = quant.convert(prepared)
        quant.save(q, KEPT / f"{case}_{rules}.q8")
        save_file(outputs(q, case), KEPT / f"{case}_{rules}.expected")


if __name__ == "__main__":
    keep(sys.argv[1])

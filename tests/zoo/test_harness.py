"""The zoo's own parts: outputs of any type compared, 8 bits simulated, a child that dies kept as a row."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import measure as measuring
from . import reasons
from .entry import Entry, calibrate_norms, wake
from .recurrent import stepwise
from .simulation import all_integers_rounded, layers_rounded, round_rows, round_values, round_weight, rounded_weights
from .torchvision_ops import nms
from .trees import EXACT, Likeness, difference, likeness, matched_boxes, sqnr, tensors_of

RUN = Path(__file__).with_name("run.py")


@dataclass
class Held:
    """An output type of a user's own."""

    first: Tensor
    rest: dict[str, Any]


def held(value: float = 1.0, length: int = 2) -> Held:
    return Held(torch.full((length,), value), {"cache": [(torch.ones(2), None)], "count": 3})


def test_equal_trees_have_no_difference() -> None:
    assert difference(held(), held()) == ""
    assert set(tensors_of(held())) == {".first", ".rest['cache'][0][0]"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (held(length=3), "output.first: shape (3,) where float has (2,)"),
        (Held(torch.ones(2).long(), held().rest), "torch.int64"),
        (Held(torch.ones(2), {**held().rest, "count": 4}), "4 where float has 3"),
        (Held(torch.ones(2), {"cache": [], "count": 3}), "list of 0"),
        (Held(torch.tensor([1.0, float("nan")]), held().rest), "1 values are NaN"),
        ({"first": torch.ones(2)}, "dict of 1"),
    ],
    ids=["shape", "dtype", "constant", "list", "nan", "class"],
)
def test_a_difference_is_named(other: Any, said: str) -> None:
    assert said in difference(held(), other)


def test_sqnr() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr(x, x) == EXACT
    assert sqnr(x, x + torch.tensor([0.5, 0.0])) == pytest.approx(20.0)
    assert likeness([x, torch.tensor([1, 2])], [x, torch.tensor([1, 3])]).equal == {"[1]": 0.5}


def test_batches_of_one_size_count_as_one_output() -> None:
    x = torch.tensor([3.0, 4.0])
    error = torch.tensor([0.5, 0.0])
    found = likeness([x, x, x, x], [x + error, x, x, x], kinds=2).decibels
    assert found == {"[0]": pytest.approx(20.0 + 10 * math.log10(2)), "[1]": EXACT}
    assert likeness([x, x], [x, x * math.nan], kinds=1).decibels == {"[0]": -EXACT}


def test_boxes_are_found_in_any_order() -> None:
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [4.0, 4.0, 8.0, 8.0]])
    assert matched_boxes([{"boxes": boxes}], [{"boxes": boxes.flip(0)}]) == 1
    assert matched_boxes([{"boxes": boxes}], [{"boxes": boxes[:1]}]) == 0.5


def test_rounding_keeps_zero_and_errs_by_half_a_step() -> None:
    x = torch.linspace(-1, 3, 101)
    assert (round_values(x, -1.0, 3.0) - x).abs().max() <= 0.5 * 4 / 255 + 1e-6
    assert round_values(torch.zeros(1), -1.0, 3.0) == 0
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert ((round_weight(weight, 0) - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 + 1e-7).all()


def test_simulation_rounds_and_restores() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(64, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        exact = model(x)
        with layers_rounded(model, lambda: None):
            weights_alone = sqnr(exact, model(x))
        with layers_rounded(model, lambda: model(x)):
            layers = sqnr(exact, model(x))
        with all_integers_rounded(model, lambda: model(x)):
            everything = sqnr(exact, model(x))
        assert torch.equal(model(x), exact)
    assert 25 < everything < layers < weights_alone < 60
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_float_steps_are_float_in_the_simulation_of_all_integers() -> None:
    """A norm, a sum of what it gives, and a function of the input: between layers, and no integers."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.norm(self.one(torch.relu(x)))) + x)

    torch.manual_seed(0)
    model, x = Between().eval(), torch.randn(64, 8)
    with torch.no_grad():
        with layers_rounded(model, lambda: model(x)):
            layers = model(x)
        with all_integers_rounded(model, lambda: model(x)):
            assert torch.equal(model(x), layers)


@pytest.mark.parametrize("layer", [nn.GRU(4, 6), nn.LSTMCell(4, 6), nn.MultiheadAttention(4, 2), nn.Embedding(9, 4)])
def test_all_weights_are_rounded(layer: nn.Module) -> None:
    before = {name: value.clone() for name, value in layer.named_parameters()}
    with rounded_weights(layer):
        for name, weight in layer.named_parameters():
            if "weight" in name:
                assert not torch.equal(weight, before[name])
                assert (weight - before[name]).abs().max() <= before[name].abs().amax() / 127
    assert all(torch.equal(value, before[name]) for name, value in layer.named_parameters())
    assert round_rows(torch.ones(2, 3)).eq(1).all()


RECURRENT = {
    "lstm": nn.LSTM(4, 6, num_layers=2, bidirectional=True),
    "projected": nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3),
    "gru": nn.GRU(4, 6, num_layers=2, batch_first=True),
    "rnn": nn.RNN(4, 6, nonlinearity="relu", bias=False),
    "lstm_cell": nn.LSTMCell(4, 6),
    "gru_cell": nn.GRUCell(4, 6),
    "rnn_cell": nn.RNNCell(4, 6),
}


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 4)], ids=["batch", "one"])
@pytest.mark.parametrize("layer", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layers_step_by_step_are_torchs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape[1:] if isinstance(layer, nn.RNNCellBase) else shape)
    read = set()

    def note(_: nn.Module, name: str, value: Tensor) -> Tensor:
        read.add(name)
        return value

    with torch.no_grad():
        first = layer(x)
        state = first if isinstance(layer, nn.RNNCellBase) else first[1]
        expected = first, layer(x, state)
        with stepwise(layer, note):
            found = layer(x), layer(x, state)
    for path, one in tensors_of(expected).items():
        torch.testing.assert_close(tensors_of(found)[path], one)
    assert {"input"} < read
    assert "forward" not in vars(layer)


def test_states_are_rounded_in_the_simulation() -> None:
    torch.manual_seed(0)
    layer, x = nn.GRU(8, 8), torch.randn(20, 4, 8)
    with torch.no_grad(), layers_rounded(layer, lambda: layer(x)):
        rounded = layer(x)[0]
        with rounded_weights(layer):
            assert not torch.equal(layer(x)[0], nn.GRU.forward(layer, x)[0])
    with torch.no_grad():
        assert 25 < sqnr(layer(x)[0], rounded) < 60


def test_luck_is_what_the_simulation_itself_varies_by() -> None:
    assert "from 7.8 to 10.6 dB" in reasons.luck(6.7, [8.7, 7.8, 10.6])
    assert reasons.luck(6.2, [8.7, 7.8, 10.6]) == ""
    assert reasons.luck(6.2, [8.7, 5.8, 10.6]) == ""  # a simulation that says nothing excuses nothing
    assert reasons.luck(23.1, [26.3, 26.4, 26.8]) == ""


def test_new_values_are_those_that_calibration_did_not_bring() -> None:
    """The int8 model is as good as it can be on what it was calibrated with, the new batches too where they were."""
    assert "31.8 of 32.1 on these" in reasons.new_values((32.7, 33.0), (31.8, 32.1))
    assert reasons.new_values((31.0, 33.0), (31.8, 32.1)) == ""
    assert reasons.new_values((32.7, 33.0), (30.0, 32.1)) == ""


def test_what_is_attainable_rounds_between_layers_too() -> None:
    def at(decibels: float) -> Likeness:
        return Likeness({".x": decibels}, {})

    assert reasons.attainable(at(28.0), at(26.0), ".x") == 26.0
    assert reasons.attainable(at(28.0), at(-20.0), ".x") == 28.0  # which says nothing
    assert reasons.attainable(at(60.0), at(50.0), ".x") == reasons.CLEAR


class OwnForward(nn.Linear):
    """A linear layer of another library's, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("last", [nn.Conv1d(4, 4, 3), OwnForward(7, 2)], ids=["convolution", "forward of its own"])
def test_a_model_without_dynamic_layers_is_named(last: nn.Module) -> None:
    make = lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), last)  # noqa: E731
    row = measuring.measure(Entry("own_test", make, lambda n: torch.randn(n, 3, 9)), "dynamic")
    assert row["verdict"] == "ok"
    assert "no layer has a dynamic form" in row["reason"]


def test_a_dynamic_form_that_is_not_found_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*args: Any) -> nn.Module:
        raise measuring.quant.NothingQuantized("no module was quantised")

    monkeypatch.setattr(measuring.quant, "quantize_dynamic", nothing)
    row = measuring.measure(Entry("own_test", lambda: nn.Linear(8, 4), lambda n: torch.randn(n, 8)), "dynamic")
    assert row["verdict"] == "fails: NothingQuantized: no module was quantised"


def test_wider_ranges_round_otherwise_and_no_worse() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(64, 8)
    with torch.no_grad():
        exact, found = model(x), []
        for wider in (1.0, *reasons.OTHER_RANGES):
            with layers_rounded(model, lambda: model(x), wider):
                found.append(sqnr(exact, model(x)))
    assert len(set(found)) == len(found)
    assert max(found) - min(found) < 3


def test_wake_and_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LayerNorm(64)).eval()
    nn.init.normal_(model[0].weight, std=1e-3)
    nn.init.zeros_(model[2].weight)
    wake(model)
    assert model[0].weight.std() > 0.1
    assert model[2].weight.min() > 0.1
    batch = 5 + torch.randn(256, 64)
    calibrate_norms(model, [batch], lambda m, b: m(b))
    assert not model[1].training
    assert model[1](model[0](batch)).mean(0).abs().max() < 0.11  # its bias, which was zero, and no more


def test_nms_keeps_the_best_of_what_overlaps() -> None:
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9], [5.0, 5.0, 6.0, 6.0]])
    assert nms(boxes, torch.tensor([0.1, 0.9, 0.5]), 0.5).tolist() == [1, 2]


def test_a_wrong_model_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int8 model whose outputs are another input's."""

    class Stale(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.model(torch.ones_like(x))
            return out

    entry = Entry(
        "own_test", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), lambda n: torch.randn(n, 8)
    )
    assert measuring.measure(entry, "static")["verdict"] == "ok"
    quantise = measuring.quant.quantize_static

    def stale(*args: Any, **options: Any) -> nn.Module:
        q = quantise(*args, **options)
        wrapped = Stale(q)
        wrapped._quant_report = q._quant_report
        return wrapped

    monkeypatch.setattr(measuring.quant, "quantize_static", stale)
    assert "below the simulation" in measuring.measure(entry, "static")["verdict"]


def test_a_model_that_is_a_little_worse_everywhere_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.5 dB, on the batches of its calibration as on others."""

    class Worse(nn.Module):
        def __init__(self, model: nn.Module, q: nn.Module) -> None:
            super().__init__()
            self.model, self.q, self._quant_report = model, q, q._quant_report

        def forward(self, x: Tensor) -> Tensor:
            exact: Tensor = self.model(x)
            return exact + 1.5 * (self.q(x) - exact)

    entry = Entry(
        "own_test",
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        lambda n: torch.randn(n, 8),
        size=64,
    )
    quantise = measuring.quant.quantize_static
    monkeypatch.setattr(measuring.quant, "quantize_static", lambda m, *rest, **how: Worse(m, quantise(m, *rest, **how)))
    row = measuring.measure(entry, "static")
    assert row["verdict"].startswith("wrong:"), row
    assert {"all_db", "luck_db", "informed_db"} < row.keys()


ENDINGS = {
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process ended by SIGSEGV"),
    "exit": ("import os; os._exit(3)", "the process ended with 3"),
    "stuck": ("import time; time.sleep(60)", "no end after 6 s |"),
    "busy": ("while True: pass", "no end after 1 s of CPU time"),
    "hang": ("import time; time.sleep(60)", "no end after 9 s"),
    "error": ("raise KeyError('x')", "fails: Broken: the float model: KeyError"),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the zoo forks a process for each model, which this system cannot")
def test_every_ending_is_a_row_and_kept(tmp_path: Path) -> None:
    """And what an earlier run has kept is not done again."""
    script = tmp_path / "run_two.py"
    parts = "\n".join(f"def make_{name}():\n    {code}" for name, (code, _) in ENDINGS.items())
    script.write_text(
        f"import runpy, sys\nsys.path.append({str(RUN.parents[1])!r})\nimport torch\n{parts}\n"
        "from zoo import catalogue\nfrom zoo.entry import Entry\ncatalogue.CATALOGUE.clear()\n"
        f"for name in {list(ENDINGS)}:\n"
        "    catalogue.CATALOGUE['own_' + name] = Entry('own_' + name, globals()['make_' + name], lambda n: None)\n"
        f"runpy.run_path({str(RUN)!r}, run_name='__main__')\n"
    )
    out = tmp_path / "rows.jsonl"
    earlier = {"name": "own_hang", "mode": "static", "verdict": "fails: no end after 9 s"}
    out.write_text(json.dumps(earlier) + '\n{"name": "own_cr')  # and a line that was cut off
    command = [sys.executable, str(script), "--mode", "static", "--time-limit", "1", "--jobs", "4", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stderr
    table = out.with_suffix(".md").read_text()
    for name, (_, said) in ENDINGS.items():
        assert f"own_{name} " in table
        assert said in table, ran.stderr
    assert "no end after 9 s" in table
    assert "6 fail" in ran.stdout

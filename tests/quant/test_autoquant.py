"""`quant.autoquant`: the budget holds, float is a candidate, and a search goes on where it was killed."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quant.calibrate import CheckpointError, DataError
from quant.calibrate.whole_files import replace_file
from torch import Tensor, nn

import quant
from quant.autoquant import records
from quant.autoquant import trials as trying
from quant.autoquant.candidates import CANDIDATES, DYNAMIC, NARROW, WIDE, Candidate, Form, Plan
from quant.autoquant.costs import Cost
from quant.autoquant.run import _times_the_samples
from quant.autoquant.search import Search
from quant.autoquant.trials import Trial, _rare, _spread, beyond_normal
from quant.metric import MetricError, MetricWarning, Score

from . import autoquant_run
from .autoquant_run import COARSE, DROP, Ticks, digest, problem, search

EIGHT = quant.Recipe()


def agreement(x: Tensor, classes: Tensor) -> Callable[[nn.Module], float]:
    return lambda model: float((model(x).argmax(1) == classes).double().mean())


def test_the_result_keeps_the_budget_and_says_how() -> None:
    _, batches, x, classes = problem()
    result = search(None)
    assert result.form == "static"
    assert result.drop <= DROP
    assert agreement(x, classes)(result.model) == result.metric == pytest.approx(1.0 - result.drop)
    assert result.trials[0].plan == Plan(Form.FLOAT)
    assert all(result.chosen.cost.bytes <= one.cost.bytes for one in result.trials if one.drop <= DROP)
    assert set(result.reasons) == {name for name, _ in result.chosen.plan.choices} != set()
    choices = dict(result.chosen.plan.choices)
    said = {"4-bit weights": "smaller, and the budget holds"}
    for name, why in result.reasons.items():
        assert why.startswith(choices[name])
        assert said.get(choices[name], "of the error of all layers") in why
    assert len(set(choices.values())) > 1
    text = str(result)
    assert all(name in text for name in result.reasons)
    assert f"{result.evaluations} models scored" in text
    assert result.recipe is not None
    again = quant.quantize_static(
        problem()[0], batches, quant.Recipe.from_dict(json.loads(result.to_json())["recipe"]), progress=False
    )
    assert torch.equal(again(x), result.model(x))


def test_a_larger_budget_is_never_dearer(tmp_path: Path) -> None:
    sizes, calls = [], []
    for drop in (0.0, 0.01, 0.05, 0.9, 0.9):
        result = search(str(tmp_path / "search.json"), max_drop=drop)
        assert result.drop <= drop
        sizes.append(result.chosen.cost.bytes)
        calls.append(result.metric_calls)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    assert calls[-1] == 0  # all is in the checkpoint


def test_a_search_that_was_killed_gives_the_same_model_to_the_bit(tmp_path: Path) -> None:
    expected = digest(search(None))
    checkpoint = tmp_path / "search.json"
    command = [sys.executable, autoquant_run.__file__, str(checkpoint), "150", str(torch.get_num_threads())]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert json.loads(checkpoint.read_text())["measured"]
    assert digest(search(str(checkpoint))) == expected


class Killed(BaseException):
    """Ends a search at a certain evaluation."""


@pytest.mark.parametrize("evaluation", [1, 2, 3, 4, 5, 6])
def test_a_search_goes_on_from_any_evaluation(tmp_path: Path, evaluation: int) -> None:
    expected = digest(search(None))
    model, batches, x, classes = problem()
    calls = 0

    def evaluate(one: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == evaluation:
            raise Killed
        return agreement(x, classes)(one)

    settings: dict[str, Any] = {
        "max_drop": DROP, "objective": "size", "recipe": COARSE,
        "checkpoint": tmp_path / "search.json", "progress": False,
    }  # fmt: skip
    with pytest.raises(Killed):
        quant.autoquant(model, batches, evaluate, clock=Ticks(), **settings)
    assert digest(quant.autoquant(model, batches, evaluate, clock=Ticks(), **settings)) == expected


def test_the_float_models_score_is_in_what_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are three, and would be made again after a kill between the first file and the next."""
    model, batches, x, classes = problem()
    calls = 0

    def evaluate(one: nn.Module) -> float:
        nonlocal calls
        calls += 1
        return agreement(x, classes)(one)

    def then_killed(*arguments: Any) -> None:
        replace_file(*arguments)
        raise Killed

    settings: dict[str, Any] = {
        "max_drop": DROP, "objective": "size", "recipe": COARSE,
        "checkpoint": tmp_path / "search.json", "progress": False,
    }  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(records, "replace_file", then_killed)
        with pytest.raises(Killed):
            quant.autoquant(model, batches, evaluate, clock=Ticks(), **settings)
    assert calls == 3
    result = quant.autoquant(model, batches, evaluate, clock=Ticks(), **settings)
    assert digest(result) == digest(search(None))
    in_two, calls = calls, 0
    quant.autoquant(model, batches, evaluate, clock=Ticks(), **{**settings, "checkpoint": None})
    assert in_two == calls


def test_from_the_keyboard_the_best_so_far_is_given() -> None:
    model, batches, x, classes = problem()
    calls = 0

    def evaluate(one: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return agreement(x, classes)(one)

    result = quant.autoquant(model, batches, evaluate, max_drop=0.1, objective="size", progress=False, clock=Ticks())
    assert result.interrupted
    assert result.evaluations == 1
    assert result.form == "static"
    assert "ended from the keyboard" in str(result)


class Interrupted(Ticks):
    """A clock in which Ctrl-C is pressed at a certain reading."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def __call__(self) -> float:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().__call__()


def test_from_the_keyboard_in_the_last_tuning_nothing_is_lost() -> None:
    whole = Interrupted(0)
    expected = search(None, clock=whole)
    readings = -whole.left
    for last in (readings - 3, readings - 40):  # the tuned model's timing, and the autotuner's
        result = search(None, clock=Interrupted(last))
        assert result.interrupted
        assert result.chosen == expected.chosen
        assert torch.equal(result.model(problem()[2]), expected.model(problem()[2]))
    with pytest.raises(KeyboardInterrupt):  # before float is measured, there is nothing to give
        search(None, clock=Interrupted(2))


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(torch.relu(self.first(x)))


def test_buffers_that_forwards_write_stay_as_they_were() -> None:
    torch.manual_seed(0)
    model, batches, x = Counting().eval(), [torch.randn(8, 6) for _ in range(3)], torch.randn(50, 6)
    classes = model(x).argmax(1)
    model.calls.zero_()
    own = 0

    def evaluate(one: nn.Module) -> float:
        nonlocal own
        own += one.get_buffer("calls").data_ptr() == model.calls.data_ptr()
        return agreement(x, classes)(one)

    result = quant.autoquant(
        model, batches, evaluate, max_drop=1.0, objective="size", progress=False, clock=Ticks(), max_evaluations=1
    )
    assert model.calls == own  # of the metric alone
    assert result.form == "static"
    assert result.model.get_buffer("calls") == own
    own = 0
    model.calls.zero_()
    quant.sensitivity(model, batches, evaluate, progress=False)
    assert model.calls == own


def test_evaluations_are_bounded() -> None:
    model, batches, x, classes = problem()
    scored: list[nn.Module] = []

    def evaluate(one: nn.Module) -> float:
        scored.append(one)
        return agreement(x, classes)(one)

    result = quant.autoquant(
        model, batches, evaluate, max_drop=DROP, recipe=COARSE, max_evaluations=4, objective="size", progress=False,
        clock=Ticks(),
    )  # fmt: skip
    assert result.evaluations == 4
    assert len(scored) == 4 + 3  # float twice, and with outputs of zeros


def test_float_comes_back_where_nothing_keeps_the_budget() -> None:
    model, batches, x, classes = problem()
    result = quant.autoquant(
        model, batches, agreement(x, classes), max_drop=0.0, recipe=quant.Recipe(default=quant.QConfig(weight_bits=2)),
        max_evaluations=3, progress=False,
    )  # fmt: skip
    assert result.form == "float"
    assert result.model is model
    assert result.recipe is None
    assert result.missed > 0
    assert list(result.held_back.values()) == sorted(result.held_back.values(), reverse=True)
    assert f"misses it by {result.missed:.3g}; held back by {next(iter(result.held_back))}" in str(result)


def test_what_is_slower_than_float_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Cost(seconds=2.0, float_seconds=1.0, ratio=2.0, faster=False, slower=True, bytes=10)
    monkeypatch.setattr(trying, "cost_of", lambda *_: slow)
    model, batches, x, classes = problem()
    for objective in ("latency", "size"):
        result = quant.autoquant(
            model, batches, agreement(x, classes), max_drop=1.0, objective=objective, progress=False  # type: ignore[arg-type]
        )  # fmt: skip
        assert result.form == "float"
        assert "int8 keeps the budget and is no better" in str(result)


def test_the_time_is_measured_beside_float() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
    batches = [torch.randn(2, 8, 16, 16) for _ in range(3)]
    target = model(batches[0]).detach()
    result = quant.autoquant(
        model, batches, lambda one: -float((one(batches[0]) - target).square().mean()), max_drop=1.0, progress=False
    )
    cost = result.trials[1].cost
    assert cost.seconds > 0
    assert cost.ratio == pytest.approx(cost.seconds / cost.float_seconds)
    assert result.form == "float" or result.chosen.cost.ratio < 1


@pytest.mark.parametrize(("events", "upper"), [(0, 2.996), (1, 4.744), (2, 6.296), (5, 10.513), (20, 29.062)])
def test_the_bound_of_rare_differences_is_that_of_a_poisson_count(events: int, upper: float) -> None:
    """The means of the Poisson distributions that give so few events or fewer in 5 % of all draws."""
    assert events + 1.645 * math.sqrt(events) + beyond_normal(events) == pytest.approx(upper, rel=0.01)
    probability = sum(math.exp(-upper) * upper**k / math.factorial(k) for k in range(events + 1))
    assert probability == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("score", [1.0, 100.0, 0.0], ids=["right", "percent", "minus the errors"])
def test_samples_that_do_not_differ_show_no_smaller_drop_than_three_in_their_number(score: float) -> None:
    same = Score(score, (score,) * 150)
    assert _spread(same, same) == 0.0
    assert _rare(same, same) == pytest.approx(2.996 / 150 * (score or 1.0), rel=0.01)


def test_many_small_differences_are_bounded_by_their_spread() -> None:
    torch.manual_seed(0)
    lost = 1e-3 * torch.rand(1000, dtype=torch.float64)
    other = Score(float((1.0 - lost).mean()), tuple((1.0 - lost).tolist()))
    of_float = Score(1.0, (1.0,) * 1000)
    assert _spread(of_float, other) == pytest.approx(float(1.645 * lost.std() / math.sqrt(1000)))
    assert _rare(of_float, other) < 0.01 * float(lost.mean())


@pytest.mark.parametrize(
    ("budget", "advice"), [(0.001, "score some 2969, or"), (0, "no number of samples can: allow more, or")], ids=str
)
def test_too_few_samples_for_a_budget_are_said(budget: float, advice: str) -> None:
    model, batches = nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(16, 8) for _ in range(2)]
    x = torch.randn(150, 8)
    expected = model(x).argmax(1)
    with pytest.warns(
        MetricWarning, match=rf"loses 0 over 150 samples, .* 0\.02 .*max_drop={budget} .*{advice} return"
    ):
        result = quant.autoquant(
            model, batches, lambda one: one(x).argmax(1) == expected, max_drop=budget, progress=False, clock=Ticks()
        )
    assert result.trials[0].sure_drop == 0.0  # the float model loses nothing of its own


@pytest.mark.parametrize(("spread", "rare"), [(0.03, 0.0), (0.0, 0.02), (0.03, 0.02), (1e-9, 0.5)])
def test_the_number_of_samples_that_would_do_brings_the_doubt_to_the_room(spread: float, rare: float) -> None:
    times = _times_the_samples(0.01, spread + rare, rare)
    assert times is not None
    assert times > 1
    assert spread / math.sqrt(times) + rare / times == pytest.approx(0.01)
    assert _times_the_samples(0.0, spread + rare, rare) is None


def test_a_budget_that_only_the_spread_of_the_samples_misses_is_said() -> None:
    """Half of the samples gain and half lose: the mean is held, and few samples cannot show it."""
    model, batches = nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(16, 8) for _ in range(2)]
    x, swing = torch.randn(4, 8), torch.tensor([0.1, -0.1]).repeat(200)

    def scores(one: nn.Module) -> Tensor:
        if not one(x).any():  # a model of zeros scores less, as in any metric
            return torch.zeros(400)
        return torch.ones(400) + (0 if one is model else swing)

    # 1.645 * 0.1 / 20 is 0.0082, what few differences hide is 0.0004, and 1149 samples bring the two to 0.005
    with pytest.warns(MetricWarning, match=r"over 400 samples, .* 0\.0086 .*max_drop=0\.005 .*score some 11\d\d, or"):
        quant.autoquant(model, batches, scores, max_drop=0.005, progress=False, clock=Ticks())


def test_few_samples_are_no_reason_where_a_model_keeps_the_budget() -> None:
    """Float is taken for its time here: a dynamic model holds what the static one misses."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(16, 8) for _ in range(2)]
    x = torch.randn(150, 8)
    with torch.no_grad():
        expected = model(x)
    result = quant.autoquant(  # warnings are errors
        model,
        batches,
        lambda one: nn.functional.cosine_similarity(one(x), expected),
        max_drop=0.0001,
        progress=False,
        clock=Ticks(),
    )
    assert (result.form, result.missed) == ("float", 0.0)
    assert any(trial.sure_drop - trial.rare < 0.0001 < trial.sure_drop for trial in result.trials[1:])


def test_samples_bound_the_drop() -> None:
    model, batches, x, classes = problem()
    few = slice(0, 200)

    def samples(one: nn.Module) -> Tensor:
        return one(x[few]).argmax(1) == classes[few]

    recipe = quant.Recipe(default=quant.QConfig(weight_bits=5))
    result = quant.autoquant(
        model, batches, samples, max_drop=0.04, objective="size", recipe=recipe, progress=False, clock=Ticks()
    )
    for trial in result.trials[1:]:
        assert trial.sure_drop > trial.drop
    assert result.form != "float"
    assert result.chosen.sure_drop <= 0.04


def test_the_drawing_has_every_trial(tmp_path: Path) -> None:
    result = search(None)
    result.plot(tmp_path / "trials.svg")
    drawn = (tmp_path / "trials.svg").read_text()
    assert drawn.count("<circle") == len(result.trials)
    front = result.pareto()
    assert [one.cost.bytes for one in front] == sorted(one.cost.bytes for one in front)
    assert [one.metric for one in front] == sorted(one.metric for one in front)


def test_the_advice_of_the_autotuner_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying.Bench, "advice", lambda self, plan: ["head"])
    model, batches, x, classes = problem()
    result = quant.autoquant(model, batches, agreement(x, classes), max_drop=1.0, progress=False)
    tried = [one.plan for one in result.trials]
    assert Plan(Form.STATIC, (("head", "float"),)) in tried
    assert Plan(Form.DYNAMIC, (("head", "float"),)) in tried


def test_the_backends_of_the_autotuner_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(model: nn.Module, *_: Any, **__: Any) -> Any:
        for module in model.modules():
            if hasattr(module, "backend"):
                module.backend = "reference"
        return quant.kernels.tuning.Tuning((), (), 1, "")

    monkeypatch.setattr(trying, "autotune", tuned)
    result = search(None)
    chosen = {module.backend for module in result.model.modules() if hasattr(module, "backend")}
    assert chosen == {"reference"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_drop": -0.1}, "max_drop is -0.1, expected a number from 0 up"),
        ({"max_drop": float("nan")}, "max_drop is nan"),
        ({"objective": "speed"}, "objective is 'speed', expected 'latency' or 'size'"),
        ({"max_evaluations": 0}, "max_evaluations is 0"),
        ({"max_evaluations": 2.5}, "max_evaluations is 2.5, expected a whole number"),
        ({"limit": -1}, "limit is -1, expected at least 1 batch"),
    ],
    ids=["below 0", "NaN", "another objective", "no evaluation", "half an evaluation", "no batch"],
)
def test_arguments_are_checked_first(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(None, **settings)


def test_bad_metrics_and_data() -> None:
    model, batches, x, classes = problem()
    good = agreement(x, classes)
    with pytest.raises(MetricError, match="returned a str"):
        quant.autoquant(model, batches, lambda one: "good", max_drop=0.1, progress=False)
    with pytest.raises(TypeError, match="Module, got function"):
        quant.autoquant(good, batches, good, max_drop=0.1, progress=False)  # type: ignore[arg-type]
    with pytest.raises(MetricError, match="return its negative"):
        quant.autoquant(model, batches, lambda one: 1.0 - good(one), max_drop=0.1, progress=False)
    with pytest.raises(DataError, match="data is empty"):
        quant.autoquant(model, [], good, max_drop=0.1, progress=False)
    with pytest.raises(DataError, match="not labels alone"):
        quant.autoquant(model, [torch.arange(4), torch.arange(4)], good, max_drop=0.1, progress=False)
    chance = iter(range(1000))
    with pytest.warns(MetricWarning, match="seed it") as caught:
        result = quant.autoquant(
            model, batches, lambda one: good(one) + 1e-4 * (next(chance) % 2), max_drop=0.1, progress=False
        )
    assert len(caught) == 1
    assert result.noise == pytest.approx(1e-4)


def test_a_model_whose_metric_is_nan_is_refused() -> None:
    model, batches, x, classes = problem()
    good = agreement(x, classes)
    result = quant.autoquant(
        model, batches, lambda one: good(one) if one is model else float("nan"), max_drop=0.1, progress=False,
        max_evaluations=2, clock=Ticks(),
    )  # fmt: skip
    assert result.form == "float"
    written = json.loads(result.to_json(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert written["trials"][1]["metric"] is None


def test_a_checkpoint_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    search(str(path))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="was measured with another recipe"):
        search(str(path), recipe=EIGHT)
    for text, why in (
        ("", "is no checkpoint"),
        ("{}", "is no checkpoint"),
        ("[1]", "is no checkpoint"),
        ('{"identity": {}, "measured": {"scores": 3}}', "is no checkpoint"),
        ('{"identity": {}, "measured": {"scores": {"a": 3}}}', "is no checkpoint"),
        ('{"identity": {"version of the file": "0"}, "measured": {}}', "with another version of the file"),
    ):
        other = tmp_path / "other.json"
        other.write_text(text)
        with pytest.raises(CheckpointError, match=why):
            search(str(other))
        assert other.read_text() == text
    assert path.read_bytes() == before


def test_measurements_of_other_data_and_other_classes_are_refused(tmp_path: Path) -> None:
    model, batches, x, classes = problem()
    more = [*batches, 9 * batches[0]]
    settings: dict[str, Any] = {
        "max_drop": 1.0, "objective": "size", "max_evaluations": 1, "checkpoint": tmp_path / "search.json",
        "progress": False, "clock": Ticks(),
    }  # fmt: skip

    class Other(autoquant_run.Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layers(x)))

    quant.autoquant(model, more, agreement(x, classes), limit=4, **settings)
    with pytest.raises(CheckpointError, match="was measured with another data"):
        quant.autoquant(model, more, agreement(x, classes), **settings)
    other = Other().eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match="was measured with another weights"):
        quant.autoquant(other, more, agreement(x, classes), limit=4, **settings)


def test_the_model_is_left_as_it_was() -> None:
    model, batches, x, classes = problem()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quant.autoquant(model, batches, agreement(x, classes), max_drop=0.1, progress=False, max_evaluations=2)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Additive:
    """A bench in which layers' errors add up, and each costs a second in float and none in int8."""

    def __init__(self, harm: dict[str, float]) -> None:
        self.harm, self.scored = harm, 0
        self.calibrated = self
        self.layers: dict[str, Any] = dict.fromkeys(harm)
        self.records = self

    def get(self, kind: str, name: str, measure: Callable[[], Any]) -> Any:
        return self.harm if name == "harm" else measure()

    def has_dynamic_form(self) -> bool:
        return False

    def possible(self, choice: str) -> set[str]:
        return set()

    def advice(self, plan: Plan) -> list[str]:
        return []

    def earlier(self) -> list[Trial]:
        return []

    def layer_seconds(self, names: list[str]) -> dict[str, float]:
        return dict.fromkeys(names, 1.0)

    def trial(self, plan: Plan) -> Trial:
        lifted = {name for name, _ in plan.choices} if plan.form is not Form.FLOAT else set(self.harm)
        self.scored += plan.form is not Form.FLOAT
        drop = sum(harm for name, harm in self.harm.items() if name not in lifted)
        ratio = (1 + len(lifted)) / (2 + len(self.harm))
        return Trial(plan, 1 - drop, drop, drop, Cost(ratio, 1.0, ratio, True, False, len(lifted)))


@pytest.mark.parametrize("layers", [2, 3, 10, 50])
@pytest.mark.parametrize("budget", [0.5, 0.1, 0.01, 0.001])
def test_few_evaluations_find_the_fewest_layers(layers: int, budget: float) -> None:
    chance = random.Random(layers)
    harm = {f"layer{place}": 10 ** chance.uniform(-6, -0.5) for place in range(layers)}
    bench: Any = Additive(harm)
    found = Search(bench, budget, False, 200, lambda *_: None, dict)
    found.begin()
    found.run()
    worst_first = sorted(harm.values(), reverse=True)
    fewest = next(count for count in range(layers + 1) if sum(worst_first[count:]) <= budget)
    assert found.best.plan.form is (Form.STATIC if fewest < layers else Form.FLOAT)
    assert fewest == layers or len(found.best.plan.choices) == fewest
    assert bench.scored <= 2 + layers.bit_length() + fewest


@pytest.mark.parametrize("layers", [1, 2, 50])
def test_a_budget_that_only_float_keeps_costs_one_evaluation_more(layers: int) -> None:
    bench: Any = Additive({f"layer{place}": 0.5**place for place in range(layers)})
    found = Search(bench, 0.0, False, 50, lambda *_: None, lambda _: {})
    found.begin()
    found.run()
    assert found.best.plan.form is Form.FLOAT
    assert bench.scored == (1 if layers == 1 else 2)  # all layers int8, and one


@pytest.mark.parametrize("candidate", [DYNAMIC, WIDE], ids=lambda one: one.name)
def test_a_dearer_candidate_that_suffices_comes_before_float(candidate: Candidate) -> None:
    bench: Any = Additive({"one": 0.3, "two": 0.2, "three": 0.001})
    bench.possible = lambda choice: {"one", "two", "three"} if choice == candidate.name else set()
    found = Search(bench, 0.01, False, 50, lambda *_: None, lambda _: {})
    found.begin()
    found.run()
    assert {choice for _, choice in found.best.plan.choices} == {candidate.name}


class Narrowing(Additive):
    """A bench in which every layer may have 4-bit weights, which harm it as given and save half of its bytes."""

    def __init__(self, harm: dict[str, float]) -> None:
        super().__init__(harm)
        self.layers = {name: SimpleNamespace(weight_bytes=8) for name in harm}

    def get(self, kind: str, name: str, measure: Callable[[], Any]) -> Any:
        return self.harm if name == "harm of 4 bits" else super().get(kind, name, measure)

    def narrow_settings(self) -> dict[str, Any]:
        return dict.fromkeys(self.harm, None)

    def trial(self, plan: Plan) -> Trial:
        self.scored += plan.form is not Form.FLOAT
        narrow = [name for name, choice in plan.choices if choice == NARROW.name]
        drop = sum(self.harm[name] for name in narrow)
        size = 8 * len(self.harm) if plan.form is Form.FLOAT else 2 * len(self.harm) - len(narrow)
        return Trial(plan, 1 - drop, drop, drop, Cost(0.5, 1.0, 0.5, True, False, size))


@pytest.mark.parametrize("budget", [1e-9, 1e-3, 0.05, 100.0])
def test_as_many_layers_get_4_bits_as_the_budget_holds(budget: float) -> None:
    chance = random.Random(3)
    bench: Any = Narrowing({f"layer{place}": 10 ** chance.uniform(-6, -0.5) for place in range(50)})
    found = Search(bench, budget, True, 50, lambda *_: None, lambda _: {})
    found.begin()
    found.run()
    least_first = sorted(bench.harm.values())
    most = max(count for count in range(51) if sum(least_first[:count]) <= budget)
    assert len(found.best.plan.choices) == most
    assert bench.scored <= 1 + 1 + 6  # all int8, all narrow, and a bisection of 50


def test_layers_get_4_bits_for_size_and_not_for_time() -> None:
    bench: Any = Narrowing({"one": 1e-9})
    found = Search(bench, 0.1, False, 50, lambda *_: None, lambda _: {})
    found.begin()
    found.run()
    assert found.best.plan == Plan(Form.STATIC)


def test_batches_of_any_form_are_taken_with_forward() -> None:
    model, batches, x, classes = problem()
    evaluate = agreement(x, classes)
    named = [{"of": {"x": one}} for one in batches]

    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch["of"]["x"])

    settings: dict[str, Any] = {"max_drop": DROP, "objective": "size", "progress": False, "recipe": COARSE}
    plain = quant.autoquant(model, batches, evaluate, clock=Ticks(), **settings)
    found = quant.autoquant(model, named, evaluate, forward=forward, clock=Ticks(), **settings)
    assert digest(found) == digest(plain)
    with pytest.raises(DataError, match=r"autoquant: forward\(model, batch\) did not call model"):
        quant.autoquant(model, named, evaluate, forward=lambda model, batch: None, **settings)


def test_a_plan_goes_through_its_key() -> None:
    plan = Plan.of(Form.STATIC, {"b": "float", "a": "int8", "c.[0]": "int16 activations"})
    assert plan.choices == (("b", "float"), ("c.[0]", "int16 activations"))
    assert Plan.read(plan.key) == plan
    assert all(isinstance(one, Candidate) for one in CANDIDATES.values())

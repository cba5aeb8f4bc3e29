"""Whether `quant.autoquant` keeps its promises on trained models (`make bench-autoquant`).

    python benchmarks/bench_autoquant.py [--only WORDS] [--seeds N ...] [--peers]

For each case, seed and budget: what the chosen model loses on the data that the search scored, and on other data that
it never saw; its time and bytes beside float's; models scored, and minutes. A seed draws the calibration data and both
sets. The budgets of a case and seed share a checkpoint. Then what `quant.sensitivity` costs beside evaluations of the
float model. Exit status 1 when a budget is exceeded on unseen data by more than chance, when a larger budget gives a
dearer model, when something is slower than float, or when sensitivity costs more than LIMIT evaluations a layer.

With --peers, for cases whose inputs are one tensor, the same by NNCF's `quantize_with_accuracy_control`, where it and
OpenVINO are installed. It holds a budget where the mean of the scored samples does; `quant.autoquant` does so too with
a metric that returns the mean, which is the second search there. Without VNNI OpenVINO's int8 saturates.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy_control
import display
import networks
import sentences
import torch
from peers import Missing
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn

import quant
from quant.autoquant.costs import Cost

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from train_fashion import trained
from zoo import efficientnet, fashion, g2p, minilm, silero
from zoo.fetch import DataUnavailable

BUDGETS = (0.001, 0.005, 0.02)
SEEDS = (0, 1, 2)

LIMIT = 3.0
"""Most time of `quant.sensitivity`, in evaluations of the float model for each layer."""

SURE = 2.4
"""Standard errors on unseen data within which a larger drop than the budget is chance: one-sided 99 %."""

Score = Callable[[Any], Tensor]
"""Model, or function of its inputs -> a score for each sample, float64."""

LEGEND = """
seen, unseen: what the metric loses on the samples that the search scored, and on others; +-: its standard error
time: of float, measured beside it; KiB: of parameters and buffers; scored: models, with those of the checkpoint"""


@dataclass(frozen=True)
class Problem:
    """One draw of a case.

    Attributes:
        data: to calibrate with.
        seen, unseen: score a model on the search's samples, and on others.
        example: of the timings.
    """

    model: nn.Module
    data: Sequence[Any]
    seen: Score
    unseen: Score
    example: Any


@dataclass(frozen=True)
class Row:
    """One search."""

    case: str
    seed: int
    budget: float
    result: quant.types.Autoquantized
    seen: float
    unseen: float
    error: float
    peer: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Whether the budget holds on unseen data, as far as these can tell."""
        return is_held(self.unseen, self.error, self.budget)


def is_held(loss: float, error: float, budget: float) -> bool:
    """Whether a budget holds for a mean loss with a standard error."""
    return loss <= budget + SURE * error


def loss_of(problem: Problem, unseen: Tensor, model: Any) -> tuple[float, float]:
    """What a model loses on unseen data of the float model's scores, and its standard error."""
    with torch.inference_mode():
        lost = unseen - problem.unseen(model)
    return float(lost.mean()), statistics.stdev(lost.tolist()) / math.sqrt(len(lost))


def fashion_cnn(network: str) -> Callable[[int], Problem]:
    """A network of the tutorials: share of images whose class is right; 4,000 test images seen, 6,000 unseen."""

    def draw(seed: int) -> Problem:
        images, classes = fashion.load("test")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        train = fashion.load("train")[0]
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:512]

        def score(places: Tensor) -> Score:
            x, y = images[places].split(500), classes[places].split(500)
            return lambda model: torch.cat([model(a).argmax(1) == b for a, b in zip(x, y, strict=True)]).double()

        data = list(train[chosen].split(64))
        return Problem(trained(network), data, score(order[:4000]), score(order[4000:]), images[:1])

    return draw


def efficientnet_lite0(seed: int) -> Problem:
    """Probability of the class that the float model names, of photos' crops; 204 crops seen, 258 of other draws not.

    So few crops could not show a budget by right and wrong alone.
    """
    model = efficientnet.load()
    data = list(efficientnet.calibration(2, seed=seed).split(8))

    def score(crops: Tensor) -> Score:
        with torch.inference_mode():
            expected = torch.cat([model(one).argmax(1) for one in crops.split(8)])

        def given(other: nn.Module) -> Tensor:
            logits = torch.cat([other(one) for one in crops.split(8)]).double()
            return logits.softmax(1).gather(1, expected[:, None])[:, 0]

        return given

    seen = efficientnet.calibration(13, seed=1000 + seed)[17:]
    unseen = torch.cat([efficientnet.labelled()[0], efficientnet.calibration(15, seed=2000 + seed)[17:]])
    return Problem(model, data, score(seen), score(unseen), data[0][:1])


def silero_vad(seed: int) -> Problem:
    """Share of 32 ms in which speech is heard as by the float model, of recordings' parts that a seed draws."""
    model = silero.load()
    audio = torch.cat([silero.recording(name) for name in silero.RECORDINGS])
    frames = 16000 * 8
    parts = list(audio.split(frames))[:-1]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()

    def score(places: Sequence[int]) -> Score:
        expected = [silero.speech_probabilities(model, parts[place]) > silero.THRESHOLD for place in places]

        def same(other: nn.Module) -> Tensor:
            heard = (silero.speech_probabilities(other, parts[place]) > silero.THRESHOLD for place in places)
            return torch.cat([one == two for one, two in zip(heard, expected, strict=True)]).double()

        return same

    calibration, half = order[:3], 3 + (len(order) - 3) // 2
    data = [batch for place in calibration for batch in _spoken(model, parts[place])]
    return Problem(model, data, score(order[3:half]), score(order[half:]), data[1])


def _spoken(model: nn.Module, audio: Tensor) -> Iterator[dict[str, Any]]:
    """Every eighth call of the detector, with the state of the calls before."""
    state: Any = None
    with torch.no_grad():
        for place, frame in enumerate(silero.frames(audio)):
            call = {"audio": frame[None]} if state is None else {"audio": frame[None], "state": state}
            if place % 8 == 0:
                yield call
            state = model(**call)[1]


def g2p_words(seed: int) -> Problem:
    """Share of words that are said right: 1,500 seen, 3,000 not."""
    model = g2p.load()
    calibration, seen, unseen = g2p.split(256, 1500, 3000, seed=seed)
    dictionary = g2p.pronunciations()

    def score(words: Sequence[str]) -> Score:
        def right(other: nn.Module) -> Tensor:
            said = g2p.predict(other, words)
            return torch.tensor([one in dictionary[word] for one, word in zip(said, words, strict=True)]).double()

        return right

    data = [g2p.encode_words(calibration[place : place + 32]) for place in range(0, 256, 32)]
    return Problem(model, data, score(seen), score(unseen), g2p.encode_words(calibration[:1]))


def minilm_sentences(seed: int) -> Problem:
    """Cosine of a sentence's vector and the float model's: 150 sentences seen, some 200 not."""
    model, pieces = minilm.load(), sentences.read()
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    calibration, seen, unseen = ([pieces[place] for place in some] for some in (order[:64], order[64:214], order[214:]))

    def vectors(one: nn.Module, some: Sequence[Tensor]) -> Tensor:
        return torch.cat([one(words) for words in some]).double()

    def score(some: Sequence[Tensor]) -> Score:
        with torch.inference_mode():
            expected = vectors(model, some)
        return lambda other: torch.nn.functional.cosine_similarity(vectors(other, some), expected)

    example = max(calibration, key=lambda words: words.shape[1])
    return Problem(model, calibration, score(seen), score(unseen), example)


CASES: dict[str, Callable[[int], Problem]] = {
    "fashion residual CNN": fashion_cnn("residual"),
    "fashion depthwise CNN": fashion_cnn("depthwise"),
    "silero-vad": silero_vad,
    "g2p-en": g2p_words,
    "efficientnet-lite0": efficientnet_lite0,
    "minilm-l6": minilm_sentences,
}


def mobilenet_v2(seed: int) -> Problem:
    """53 layers with random weights, for what sensitivity costs: share of pictures of noise with the float model's
    class."""
    torch.manual_seed(seed)
    data = [torch.randn(16, 3, 64, 64) for _ in range(2)]
    model = networks.settle_norms(networks.MobileNetV2(), data).eval()

    def score(pictures: Sequence[Tensor]) -> Score:
        with torch.inference_mode():
            expected = [model(one).argmax(1) for one in pictures]
        return lambda other: torch.cat(
            [other(one).argmax(1) == two for one, two in zip(pictures, expected, strict=True)]
        ).double()

    seen, unseen = ([torch.randn(16, 3, 64, 64) for _ in range(16)] for _ in range(2))
    return Problem(model, data, score(seen), score(unseen), data[0][:1])


COST_CASES: dict[str, Callable[[int], Problem]] = {"mobilenet-v2, 53 layers": mobilenet_v2}
"""Of which the cost of sensitivity is measured alone."""


def searched(case: str, seed: int, objective: str, folder: Path, *, peers: bool) -> Iterator[Row]:
    """One search for each budget, the smallest first; with `peers` also by NNCF."""
    problem = CASES[case](seed)
    with torch.inference_mode():
        unseen = problem.unseen(problem.model)
    for budget in BUDGETS:
        result = quant.autoquant(
            problem.model,
            problem.data,
            problem.seen,
            max_drop=budget,
            objective=objective,  # type: ignore[arg-type]
            example_inputs=problem.example,
            checkpoint=folder / f"{seed}.json",
        )
        loss, error = loss_of(problem, unseen, result.model)
        peer = beside(problem, unseen, budget, objective, result.model) if peers else ()
        yield Row(case, seed, budget, result, result.drop, loss, error, peer)


def beside(problem: Problem, unseen: Tensor, budget: float, objective: str, ours: nn.Module) -> tuple[str, ...]:
    """The cells of PEERS: what NNCF's accuracy control makes of a problem, and the time of a call over ours."""
    try:
        found = accuracy_control.controlled(problem.model, problem.data, problem.seen, budget)
    except Missing as reason:
        return (str(reason), *["-"] * (len(PEERS) - 1))
    by_mean = quant.autoquant(
        problem.model,
        problem.data,
        lambda model: float(problem.seen(model).mean()),
        max_drop=budget,
        objective=objective,  # type: ignore[arg-type]
        example_inputs=problem.example,
    )
    loss, error = loss_of(problem, unseen, found.predict)
    held = is_held(loss, error, budget)
    times = [f"{accuracy_control.times_ours(one, found.predict, problem.example):.2f}" for one in (ours, by_mean.model)]
    loss_by_mean, _ = loss_of(problem, unseen, by_mean.model)
    return (
        f"{loss:+.4f}", "yes" if held else "NO", times[0], str(found.evaluations), f"{found.minutes:.2f}",
        f"{loss_by_mean:+.4f}", times[1], by_mean.chosen.plan.says,
    )  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row of the table."""
    result = row.result
    return [
        row.case, str(row.seed), f"{row.budget:g}", result.chosen.plan.says, f"{row.seen:+.4f}", f"{row.unseen:+.4f}",
        f"{row.error:.4f}", "yes" if row.held else "NO", f"{result.chosen.cost.ratio:.3f}",
        f"{result.chosen.cost.bytes / 1024:.0f}", str(result.evaluations), f"{result.minutes:.2f}", *row.peer,
    ]  # fmt: skip


HEADER = ("case", "seed", "budget", "chosen", "seen", "unseen", "+-", "held", "time", "KiB", "scored", "minutes")
PEERS = (
    *("nncf unseen", "held", "time over ours", "scored", "minutes"),
    *("ours by the mean: unseen", "nncf's time over it", "chosen"),
)


def faults(rows: Sequence[Row], objective: str) -> list[str]:
    """What is not as promised."""
    found = [f"{one.case}, seed {one.seed}: budget {one.budget} is exceeded" for one in rows if not one.held]
    found += [f"{one.case}: slower than float" for one in rows if one.result.chosen.cost.ratio > 1]
    for before, after in itertools.pairwise(rows):
        same = (before.case, before.seed) == (after.case, after.seed)
        costs = [_cost(one.result.chosen.cost, objective) for one in (before, after)]
        if same and costs[1] > costs[0]:
            found.append(f"{after.case}, seed {after.seed}: budget {after.budget} is dearer than {before.budget}")
    return found


def _cost(cost: Cost, objective: str) -> float:
    return {"size": float(cost.bytes), "latency": cost.ratio}[objective]


def sensitivity_cost(case: str) -> tuple[list[str], bool]:
    """What `quant.sensitivity` takes with the case's metric, in evaluations of the float model for each layer.

    By the CPU's time of this process. With few layers the calibration and the checks of the metric are a large part.
    """
    problem = {**CASES, **COST_CASES}[case](SEEDS[0])

    def evaluate() -> float:
        began = time.process_time()
        with torch.inference_mode():
            problem.seen(problem.model)
        return time.process_time() - began

    evaluations = [evaluate() for _ in range(3)][1:]
    began = time.process_time()
    found = quant.sensitivity(problem.model, problem.data, problem.seen, progress=False)
    seconds = time.process_time() - began
    evaluation = statistics.median([*evaluations, *(evaluate() for _ in range(2))])
    each = seconds / evaluation / len(found)
    row = [case, str(len(found)), display.duration(evaluation), display.duration(seconds), f"{each:.2f}"]
    return [*row, "yes" if each <= LIMIT else "NO"], each <= LIMIT


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", help="cases whose names have these words")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="which draws (default: 0 1 2)")
    parser.add_argument("--objective", choices=("latency", "size"), default="latency")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", action="store_true", help="NNCF's accuracy control too, where it is installed")
    parser.add_argument("--sensitivity", action="store_true", help="the cost of sensitivity alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", CalibrationWarning)
    wanted = [case for case in (*CASES, *COST_CASES) if options.only is None or options.only in case]
    rows: list[Row] = []
    problems, costs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(wanted):
            try:
                for seed in () if options.sensitivity or case in COST_CASES else options.seeds:
                    at = Path(folder) / str(number)
                    at.mkdir(exist_ok=True)
                    for row in searched(case, seed, options.objective, at, peers=options.peers):
                        rows.append(row)
                        print("  ".join(cells(row)), flush=True)
                cost, cheap = sensitivity_cost(case)
            except DataUnavailable as error:
                print(f"absent: {case}, because {error}")
                continue
            costs.append(cost)
            print("  ".join(cost), flush=True)
            problems += [] if cheap else [f"{case}: sensitivity costs more than {LIMIT:g} evaluations a layer"]
    header = (*HEADER, *PEERS) if options.peers else HEADER
    if rows:
        print("", display.table(header, list(map(cells, rows))), LEGEND, sep="\n")
    head = ("case", "layers", "an evaluation", "sensitivity", "evaluations a layer", f"at most {LIMIT:g}")
    print("", display.table(head, costs), sep="\n")
    problems += faults(rows, options.objective)
    print("", *problems or ["all as promised"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

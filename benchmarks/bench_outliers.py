"""How static int8 stands outliers of activations: planted ones, and those of trained models.

    python benchmarks/bench_outliers.py [layer_norm vit swin minilm silero lite0] [--search] [--peers] [--seeds N]

For each model the signal to noise in dB of its outputs, on data that calibration did not see: dynamic, static without
smoothing, static as it is by default, static with 16-bit activations in all layers; with --peers also ONNX Runtime's
`quantize_static` and NNCF's `quantize` with SmoothQuant (model type "transformer") and full bias correction, where
they are installed and take the model. Beside it the layers that were scaled, took 16 bits, or stayed float; the time
of a call on one CPU, relative to static without smoothing; and what smoothing adds to the time of calibration.

With --search also what `quant.autoquant` finds where outputs may have WITHIN dB more noise than dynamic int8's, by a
metric on other data than it is scored on here: signal to noise, what the model is, the time of a call relative to
static's, and the models that were tried. For planted cases alone, whose data can be drawn anew. Exit status 1 where
one is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import display
import outlier_networks
import sentences
import static_peers
import torch
from peers import Missing
from torch import Tensor, nn

import quant
from quant.smoothing.smooth import smoothed_model, some_batches

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from zoo import efficientnet, minilm, silero
from zoo.fetch import DataUnavailable

FINE = quant.Recipe(default=quant.QConfig(activation_bits=16))
HEADER = ["model", "dynamic", "plain", "static", "16 bits", "scaled, 16, float", "time", "calibration"]
WITHIN, MISSED = 3.0, "MISSED"
SEARCHED = [f"within {WITHIN:.0f} dB of dynamic", "found", "time", "models"]
PEERS = {"ort": static_peers.onnxruntime(reduce_range=False), "nncf smooth": static_peers.nncf_smooth}


@dataclass
class Case:
    """A model with data.

    Attributes:
        batches: to calibrate with.
        run: the outputs of a model for data that is not among them.
        call: one call, for its time.
        tensors: whether batches are single float32 tensors of one shape, which peers take.
        seen: the outputs for data that is neither to calibrate nor to score with; None where there is none.
    """

    model: nn.Module
    batches: list[Any]
    run: Callable[[Any], Tensor]
    call: Callable[[Any], Any]
    tensors: bool
    seen: Callable[[Any], Tensor] | None = None


def planted(name: str, seed: int) -> Case:
    make, shape = outlier_networks.NETWORKS[name]
    torch.manual_seed(seed)
    model = make().eval()
    batches, test = [torch.randn(shape) for _ in range(32)], torch.randn(64, *shape[1:])
    seen = torch.randn(64, *shape[1:])
    return Case(model, batches, lambda q: q(test), lambda q: q(test[:1]), tensors=True, seen=lambda q: q(seen))


def minilm_case(seed: int) -> Case:
    """Sentences of the documentation, some to calibrate with and some to score."""
    pieces = sentences.read()
    places = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    train, test = ([pieces[place] for place in some] for some in (places[:64], places[64:128]))
    longest = max(test, key=lambda one: one.shape[1])
    return Case(
        minilm.load(), train, lambda q: torch.cat([q(one) for one in test]), lambda q: q(longest), tensors=False
    )


def silero_case(seed: int) -> Case:
    """One recording to calibrate with, the logits of another one."""
    model, states, batches = silero.load(), None, []
    for frame in silero.frames(silero.recording("test")[: 20 * silero.SAMPLE_RATE]):
        frame = frame.reshape(1, -1)
        if states is not None:
            batches.append({"audio": frame, "state": states})
        with torch.no_grad():
            _, states = model(frame, states)
    audio = silero.recording("aepyx")[: 30 * silero.SAMPLE_RATE]

    def run(q: Any) -> Tensor:
        return torch.logit(silero.speech_probabilities(q, audio).clamp(1e-6, 1 - 1e-6))

    return Case(model, batches[seed : seed + 400], run, lambda q: q(**batches[40]), tensors=False)


def lite0_case(seed: int) -> Case:
    """Crops of photos to calibrate with, other photos to score."""
    photos, _ = efficientnet.labelled()
    batches = list(efficientnet.calibration(2, seed=seed).split(4))
    return Case(efficientnet.load(), batches, lambda q: q(photos), lambda q: q(photos[:1]), tensors=True)


CASES: dict[str, Callable[[int], Case]] = {
    "layer_norm": lambda seed: planted("layer norm", seed),
    "vit": lambda seed: planted("ViT-like", seed),
    "swin": lambda seed: planted("Swin-like", seed),
    "minilm": minilm_case,
    "silero": silero_case,
    "lite0": lite0_case,
}


def sqnr(expected: Tensor, given: Tensor) -> float:
    """Signal to noise in dB."""
    return float(10 * torch.log10(expected.square().sum() / (given - expected).square().sum()))


def row(name: str, seed: int, *, search: bool, peers: bool) -> list[str]:
    """The row of a model."""
    case = CASES[name](seed)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = case.run(case.model)
        plain, plain_seconds = built(case, smooth=False)
        static, _ = built(case)
        fine, _ = built(case, recipe=FINE)
        models = [quant.quantize_dynamic(case.model), plain, static, fine]
        cells = [f"{sqnr(expected, case.run(one)):.1f}" for one in models]
        cells += [counts(static), f"{relative_time(case, static, plain):.2f}", f"{added(case) / plain_seconds:+.0%}"]
        if search:
            cells += searched(case, static, expected, dynamic=sqnr(expected, case.run(models[0])))
        for maker in PEERS.values() if peers else ():
            cells.append(peer(maker, case, expected))
    return [f"{name} {seed}" if seed else name, *cells]


def searched(case: Case, static: nn.Module, expected: Tensor, *, dynamic: float) -> list[str]:
    """The cells of SEARCHED."""
    if case.seen is None:
        return ["-"] * len(SEARCHED)
    real = case.seen(case.model)

    def signal(q: nn.Module) -> float:
        """Minus the noise over the signal: more is better, and float has 0."""
        assert case.seen is not None
        return -float((case.seen(q) - real).square().sum() / real.square().sum())

    budget = -signal(quant.quantize_dynamic(case.model)) * 10 ** (WITHIN / 10)
    result = quant.autoquant(case.model, case.batches, signal, max_drop=budget, progress=False)
    decibels = sqnr(expected, case.run(result.model))
    verdict = "reached" if decibels >= dynamic - WITHIN else MISSED
    times = f"{relative_time(case, result.model, static):.2f}"
    return [f"{decibels:.1f}, {verdict}", result.chosen.plan.says, times, str(len(result.trials))]


def built(case: Case, **options: Any) -> tuple[nn.Module, float]:
    """A static model, and the CPU seconds of it."""
    began = time.process_time()
    return quant.quantize_static(case.model, case.batches, progress=False, **options), time.process_time() - began


def counts(static: nn.Module) -> str:
    """How many layers were scaled, took 16 bits, and stayed float."""
    entries = [entry for entry in quant.summary(static) if entry.type in ("Linear", "Conv1d", "Conv2d")]
    kinds = ["scaled by channel" in one.detail for one in entries], ["16-bit" in one.detail for one in entries]
    return f"{sum(kinds[0])}, {sum(kinds[1])}, {sum(one.outcome == 'float' for one in entries)} of {len(entries)}"


def added(case: Case) -> float:
    """The CPU seconds that smoothing takes by itself."""
    began = time.process_time()
    smoothed_model(case.model, some_batches(case.batches, None)[0], quant.Recipe())
    return time.process_time() - began


def relative_time(case: Case, one: nn.Module, other: nn.Module, repeats: int = 30) -> float:
    """The CPU time of a call of one model relative to another's, called in turns."""
    ratios = []
    for _ in range(repeats):
        seconds = []
        for model in (one, other):
            began = time.thread_time()
            case.call(model)
            seconds.append(time.thread_time() - began)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[3:])


def peer(maker: static_peers.Maker, case: Case, expected: Tensor) -> str:
    """A peer's signal to noise; '-' where it does not take the model."""
    if not case.tensors:
        return "-"
    try:
        # One sample a call, as their graphs are exported.
        batches = [one for batch in case.batches for one in batch.split(1)][:128]
        return f"{sqnr(expected, case.run(maker(case.model, batches))):.1f}"
    except Missing:
        return "absent"
    except Exception as error:  # of the peer's, which does not take every model
        return f"fails ({type(error).__name__})"


def rows(names: Sequence[str], seeds: int, *, search: bool, peers: bool) -> Iterator[list[str]]:
    for name in names:
        for seed in range(seeds):
            try:
                yield row(name, seed, search=search, peers=peers)
            except DataUnavailable as error:
                print(f"{name}: {error}", file=sys.stderr)
                break


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)} (default all)")
    parser.add_argument("--search", action="store_true", help="what quant.autoquant finds near dynamic int8, too")
    parser.add_argument("--peers", action="store_true", help="ONNX Runtime and NNCF too, where they are installed")
    parser.add_argument("--seeds", type=int, default=1, help="draws of weights, or of data of trained models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    header = [*HEADER, *(SEARCHED if options.search else ()), *(PEERS if options.peers else ())]
    lines = list(rows(options.models, options.seeds, search=options.search, peers=options.peers))
    print(display.table(header, lines))
    return int(any(cell.endswith(MISSED) for line in lines for cell in line))


if __name__ == "__main__":
    sys.exit(main())

"""Two trained networks, each made int8 in one call: how small, how fast and how good it comes out.

    python tutorials/demo.py [--quick] [--words N] [--json FILE]

g2p-en (a GRU encoder-decoder: spelling to pronunciation) and silero-vad (convolutions and an LSTM cell: is somebody
speaking) are fetched as pinned packages, run in float32, quantised by `quant.quantize_dynamic` and run again. One table
goes to stdout, progress to stderr. The demo ends in asserts: it fails where its claims do not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from quant.kernels.progress import progress_of
from torch import nn
from zoo import g2p, silero
from zoo.fetch import DataUnavailable

import quant

CLAIMED_WORDS = 5_000  # a net change of 0.5 points needs 25 words here; on fewer words chance alone makes it


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure of merit, of the float model and of the int8 one; a share of 1 where `percent`."""

    what: str
    of_float: float
    of_int8: float
    percent: bool

    def cells(self) -> list[str]:
        if self.percent:
            return [self.what, f"{100 * self.of_float:.2f} %", f"{100 * self.of_int8:.2f} %"]
        return [self.what, f"{self.of_float:.4f}", f"{self.of_int8:.4f}"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One model. Bytes: `bytes_float` of all parameters and buffers, `bytes_int8` of the same after quantisation;
    `layer_bytes_*` of the weights of the layers that became int8 alone. Latencies in seconds.
    """

    model: str
    bytes_float: int
    bytes_int8: int
    layer_bytes_float: int
    layer_bytes_int8: int
    latency_float: float
    latency_int8: float
    measures: tuple[Measure, ...]

    @property
    def layer_ratio(self) -> float:
        return self.layer_bytes_int8 / self.layer_bytes_float


def demo_g2p(count: int, repeats: int) -> Result:
    """Pronounce `count` words of the CMU dictionary; latency of one word."""
    model = g2p.load()
    quantized = quant.quantize_dynamic(model)
    words = g2p.words(count)
    before = g2p.word_accuracy(model, words, progress="g2p-en float")
    after = g2p.word_accuracy(quantized, words, progress="g2p-en int8")
    inputs = [g2p.encode_words([word]) for word in words[:50]]
    measures = (
        Measure(f"words right, of {count:,}", before.word_accuracy, after.word_accuracy, True),
        Measure("phoneme errors", before.phoneme_error, after.phoneme_error, True),
    )
    latencies = interleaved([lambda i: model(inputs[i % 50]), lambda i: quantized(inputs[i % 50])], repeats, "g2p-en")
    return result("g2p-en, a word", quantized, latencies, measures)


def demo_silero(recordings: Sequence[str], repeats: int) -> Result:
    """Detect speech in recordings; latency of one frame of 32 ms."""
    model = silero.load()
    quantized = quant.quantize_dynamic(model)
    before, after = [], []
    for name in recordings:
        audio = silero.recording(name)
        before.append(silero.speech_probabilities(model, audio, progress=f"silero-vad float, {name!r}"))
        after.append(silero.speech_probabilities(quantized, audio, progress=f"silero-vad int8, {name!r}"))
    found = silero.agreement(torch.cat(before), torch.cat(after))
    measures = (
        Measure(f"decided as float, of {found.frames:,} frames", 1.0, found.same, True),
        Measure("largest change of a probability", 0.0, found.largest, False),
    )
    inputs = silero.frames(audio)[100:150, None]
    with torch.inference_mode():
        _, state = model(inputs[0])
    calls = [lambda i: model(inputs[i % 50], state), lambda i: quantized(inputs[i % 50], state)]
    return result("silero-vad, 32 ms", quantized, interleaved(calls, repeats, "silero-vad"), measures)


def interleaved(calls: Sequence[Callable[[int], object]], repeats: int, label: str) -> list[float]:
    """Median seconds of each call(i), i = 0, 1, ..., taken in turns so that a busy machine slows all alike."""
    seconds: list[list[float]] = [[] for _ in calls]
    bar = progress_of(f"{label} latency", unit="run", total=repeats, shown=True)
    with torch.inference_mode(), bar:
        for i in range(20):
            for call in calls:
                call(i)
        for i in range(repeats):
            for call, times in zip(calls, seconds, strict=True):
                start = time.perf_counter()
                call(i)
                times.append(time.perf_counter() - start)
            bar.update()
    return [statistics.median(times) for times in seconds]


def result(name: str, quantized: nn.Module, latencies: Sequence[float], measures: tuple[Measure, ...]) -> Result:
    report = quant.summary(quantized)
    whole, after = report.model_bytes_before, report.model_bytes_after
    return Result(name, whole, after, report.bytes_before, report.bytes_after, latencies[0], latencies[1], measures)


def table(results: Sequence[Result]) -> str:
    """The results side by side, one model after the other."""
    rows = [
        ["", "size, MB", "", "", "int8 layers", "batch 1, ms", "", "", "", "", ""],
        ["model", "float", "int8", "ratio", "ratio", "float", "int8", "faster", "measure", "float", "int8"],
    ]
    for r in results:
        numbers = [f"{r.bytes_float / 1e6:.2f}", f"{r.bytes_int8 / 1e6:.2f}", f"{r.bytes_int8 / r.bytes_float:.2f}"]
        numbers += [f"{r.layer_ratio:.3f}", f"{1e3 * r.latency_float:.3f}", f"{1e3 * r.latency_int8:.3f}"]
        numbers += [f"{r.latency_float / r.latency_int8:.2f} x"]
        for i, measure in enumerate(r.measures):
            rows.append([*([r.model, *numbers] if i == 0 else [""] * 8), *measure.cells()])
    groups, body = rows[0], rows[1:]
    widths = [max(len(row[column]) for row in body) for column in range(len(groups))]
    widths[4] = max(widths[4], len(groups[4]))  # the other group names stand over several columns
    text = []
    for row in body:
        cells = [c.ljust(w) if i in (0, 8) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        text.append("  ".join(cells).rstrip())
    head = ""
    for column, group in enumerate(groups):
        if group:
            head = head.ljust(sum(widths[:column]) + 2 * column) + group
    rule = "-" * max(map(len, text))
    notes = "size: all parameters and buffers; int8 layers: bytes of the layers that became int8, against float"
    return "\n".join([rule, head, text[0], rule, *text[1:], rule, notes])


def check(results: Sequence[Result], count: int) -> None:
    """What the README promises of this demo."""
    for r in results:
        assert r.layer_ratio <= 0.27, f"{r.model}: int8 layers take {r.layer_ratio:.3f} of their float bytes"
    spoken, heard = (r.measures for r in results)
    change = abs(spoken[0].of_int8 - spoken[0].of_float)
    assert change <= 0.005 + 1e-9 or count < CLAIMED_WORDS, f"word accuracy changed by {100 * change:.2f} points"
    assert heard[0].of_int8 >= 0.99, f"silero-vad decides {100 * heard[0].of_int8:.2f} % of the frames as float does"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--words", type=int, metavar="N", help=f"CMUdict words to pronounce (default {CLAIMED_WORDS})")
    parser.add_argument("--quick", action="store_true", help="1,000 words, one recording, fewer timed runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    count = options.words if options.words is not None else 1_000 if options.quick else CLAIMED_WORDS
    if not 50 <= count <= 126_052:
        parser.error(f"--words: expected 50 to 126052, got {count}")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        repeats = 200 if options.quick else 1_000
        results = [demo_g2p(count, repeats), demo_silero(list(silero.RECORDINGS)[: 1 if options.quick else 2], repeats)]
    except DataUnavailable as error:
        sys.exit(f"demo: {error}")
    finally:
        torch.set_num_threads(threads)

    setting = f"torch {torch.__version__}, {platform.machine()}, one thread, medians of {repeats} interleaved runs"
    print(table(results), setting, sep="\n")
    if options.json is not None:
        figures = {"setting": setting, "words": count, "models": [dataclasses.asdict(r) for r in results]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    check(results, count)


if __name__ == "__main__":
    main()

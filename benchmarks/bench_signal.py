"""How near to float the outputs of int8 models are, beside every peer: trained models and data that nobody calibrated.

    python benchmarks/bench_signal.py [lite0 minilm silero g2p residual depthwise]

For each model the signal to noise in dB of its outputs: static as it is by default, *plain* without scaled channels
and 16-bit activations (as it was before there were any), *equalised* by `quant.equalize(ranges="activations")` first
where it has depthwise convolutions for that, and dynamic; then ONNX Runtime's `quantize_static`, NNCF's
`quantize` with its defaults (fast bias correction) and with SmoothQuant and full bias correction, torchao's export
quantisation for x86, and of the dynamic ones ONNX Runtime's and torchao's. In brackets the share of the values of
weights that are int8, where some are not; tables of embeddings are not counted. All get the same float model and the
same calls to calibrate with. A verdict takes the better of static and equalised,
as the better of NNCF's two, and counts peers that quantise no less of the weights.

Exit status 1 where static or dynamic is behind the best peer by more than CHANCE, or static behind plain.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import display
import sentences
import signal_peers
import torch
from peers import Missing
from signal_peers import Inputs, Quantized, Subject
from torch import Tensor, nn

import quant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from train_fashion import trained
from zoo import efficientnet, fashion, g2p, minilm, silero
from zoo.fetch import DataUnavailable

CHANCE = 0.5
"""dB that a draw of the data is worth: by less than this nobody is behind."""

ENOUGH = 0.98
"""Of our share of int8 weights, which a peer has at least whose dB are compared."""

GAIN = 3.0
"""dB over plain and the best peer that count as a gain."""

Call = Callable[[Inputs], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        run: the outputs of a model, given as a function of a call, for data that is not among the subject's.
    """

    subject: Subject
    run: Callable[[Call], Tensor]


def lite0() -> Case:
    """Crops of photos to calibrate with, other photos to score."""
    photos, _ = efficientnet.labelled()
    calls = [{"x": one} for one in efficientnet.calibration(2).split(1)]
    return Case(_subject(efficientnet.load(), calls), lambda call: _each(call, photos))


def fashion_cnn(name: str) -> Callable[[], Case]:
    """512 training images to calibrate with, 1,000 test images to score."""

    def make() -> Case:
        images = fashion.load("test")[0][:1000]
        calls = [{"x": one} for one in fashion.load("train")[0][:512].split(1)]
        return Case(_subject(trained(name), calls), lambda call: _each(call, images))

    return make


def minilm_sentences() -> Case:
    """Sentences of the documentation, 64 to calibrate with and 64 to score."""
    pieces = sentences.read()
    places = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist()
    train, test = ([pieces[place] for place in some] for some in (places[:64], places[64:128]))
    calls = [{"x": one} for one in train]
    return Case(
        _subject(minilm.load(), calls, {"x": [1]}), lambda call: torch.cat([call({"x": one})[0] for one in test])
    )


class SpeechStep(nn.Module):
    """The voice detector with tensors for inputs and outputs, and an LSTM for its cell, which has no export to ONNX."""

    def __init__(self, model: silero.SileroVAD) -> None:
        super().__init__()
        self.spectrum, self.encoder, self.decoder = model.spectrum, model.encoder, model.decoder
        self.cell = nn.LSTM(128, 128)
        self.cell.load_state_dict({f"{name}_l0": value for name, value in model.cell.state_dict().items()})

    def forward(self, audio: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 (1, 576), two states (1, 1, 128) -> the probability of speech (1,) and the states."""
        features = self.encoder(self.spectrum(audio)).reshape(1, 1, 128)
        hidden, memory = self.cell(features, (hidden, memory))[1]
        return self.decoder(hidden.reshape(1, 128, 1)).reshape(1), hidden, memory


def silero_speech() -> Case:
    """Calls of one recording to calibrate with, logits of another one."""
    step = SpeechStep(silero.load()).eval()
    calls: list[dict[str, Tensor]] = []

    def note(inputs: Inputs) -> tuple[Tensor, ...]:
        calls.append(dict(inputs))
        found: tuple[Tensor, ...] = step(*inputs.values())
        return found

    with torch.no_grad():
        _heard(note, silero.recording("test")[: 13 * silero.SAMPLE_RATE])
    audio = silero.recording("aepyx")[: 30 * silero.SAMPLE_RATE]
    return Case(_subject(step, calls), lambda call: _heard(call, audio))


def _heard(call: Call, audio: Tensor) -> Tensor:
    """Logits of speech for each frame, from the state of the frame before."""
    hidden = memory = torch.zeros(1, 1, 128)
    found = []
    for frame in silero.frames(audio):
        probability, hidden, memory = call({"audio": frame[None], "hidden": hidden, "memory": memory})
        found.append(torch.logit(probability.clamp(1e-6, 1 - 1e-6)))
    return torch.cat(found)


class Spelling(nn.Module):
    """g2p-en without its loop: what it says next, given what it should have said before. The same weights."""

    def __init__(self, model: g2p.G2P) -> None:
        super().__init__()
        self.letters, self.encoder = model.grapheme_embedding, model.encoder
        self.sounds, self.decoder = model.phoneme_embedding, nn.GRU(256, 256, batch_first=True)
        self.decoder.load_state_dict({f"{name}_l0": value for name, value in model.decoder.state_dict().items()})
        self.output = model.output

    def forward(self, word: Tensor, said: Tensor) -> Tensor:
        """int64 (1, letters), int64 (1, T) -> logits (1, T, 74)."""
        state = self.encoder(self.letters(word))[1]
        logits: Tensor = self.output(self.decoder(self.sounds(said), state)[0])
        return logits


def g2p_words() -> Case:
    """Words with the phonemes that the float model says: 64 to calibrate with, 200 to score."""
    model = g2p.load()
    calibration, seen = g2p.split(64, 200)
    calls, test = ([_spelled(model, word) for word in some] for some in (calibration, seen))
    subject = _subject(Spelling(model).eval(), calls, {"word": [1], "said": [1]})
    return Case(subject, lambda call: torch.cat([call(one)[0].flatten(0, 1) for one in test]))


def _spelled(model: g2p.G2P, word: str) -> dict[str, Tensor]:
    letters = g2p.encode_words([word])
    with torch.no_grad():
        said = model(letters)
    return {"word": letters, "said": torch.cat([torch.full((1, 1), g2p.START_PHONEME), said], 1)}


def _subject(
    model: nn.Module, calls: Sequence[dict[str, Tensor]], free: Mapping[str, Sequence[int]] | None = None
) -> Subject:
    return Subject(model, calls, free or {})


def _each(call: Call, images: Tensor) -> Tensor:
    return torch.cat([call({"x": one})[0] for one in images.split(1)])


CASES: dict[str, Callable[[], Case]] = {
    "lite0": lite0,
    "minilm": minilm_sentences,
    "silero": silero_speech,
    "g2p": g2p_words,
    "residual": fashion_cnn("residual"),
    "depthwise": fashion_cnn("depthwise"),
}


@dataclass(frozen=True)
class Found:
    """What a contender reaches; `share` of the weights' values are int8."""

    db: float
    share: float = 1.0
    absent: str = ""

    def __str__(self) -> str:
        if self.absent:
            return "-"
        return f"{self.db:.1f}" + ("" if self.share >= ENOUGH else f" ({self.share:.0%})")


def ours_static(subject: Subject) -> Quantized:
    """`quantize_static` with the defaults."""
    return _ours(subject, quant.quantize_static(subject.model, _batches(subject), progress=False))


def ours_plain(subject: Subject) -> Quantized:
    """Without what outliers made necessary."""
    return _ours(subject, quant.quantize_static(subject.model, _batches(subject), smooth=False, progress=False))


def ours_equalized(subject: Subject) -> Quantized:
    """After `quant.equalize` of the values that depthwise convolutions read."""
    try:
        model = quant.equalize(subject.model, _batches(subject)[0], ranges="activations")
    except ValueError as reason:
        raise Missing(str(reason)) from reason
    return _ours(subject, quant.quantize_static(model, _batches(subject), progress=False))


def ours_dynamic(subject: Subject) -> Quantized:
    """`quantize_dynamic` with the defaults."""
    return _ours(subject, quant.quantize_dynamic(subject.model))


def _batches(subject: Subject) -> list[Tensor | dict[str, Tensor]]:
    """Single tensors as such: networks call their only input by names of their own."""
    return [dict(one) if len(one) > 1 else next(iter(one.values())) for one in subject.calls]


def _ours(subject: Subject, made: nn.Module) -> Quantized:
    int8 = {entry.name for entry in quant.summary(made) if entry.outcome != "float"}
    values = sum(one.numel() for name, weights in _layers(subject.model) if name in int8 for one in weights)

    return Quantized(lambda inputs: signal_peers.as_tuple(made(*inputs.values())), values)


def _layers(model: nn.Module) -> list[tuple[str, list[Tensor]]]:
    """The layers with weights, tables left out."""
    layers = []
    for name, module in model.named_modules():
        weights = [one for one in module.parameters(recurse=False) if one.dim() > 1]
        if weights and not isinstance(module, nn.Embedding):
            layers.append((name, weights))
    return layers


OURS = {"static": ours_static, "plain": ours_plain, "equalised": ours_equalized, "dynamic": ours_dynamic}


def measured(case: Case, maker: signal_peers.Maker, expected: Tensor) -> Found:
    """One contender; a peer that fails is absent, with what it said."""
    whole = sum(one.numel() for _, weights in _layers(case.subject.model) for one in weights)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = maker(case.subject)
            if not made.values:
                return Found(-math.inf, absent="it leaves all weights float")
            return Found(sqnr(expected, case.run(made.call)), made.values / whole)
    except Missing as reason:
        return Found(-math.inf, absent=str(reason))
    except Exception as error:  # of the peer's, which does not take every model
        if maker in OURS.values():
            raise
        said = " ".join(str(error).split())[:120]
        return Found(-math.inf, absent=f"it raises {type(error).__name__}: {said}")


def sqnr(expected: Tensor, given: Tensor) -> float:
    """Signal to noise in dB."""
    return float(10 * torch.log10(expected.square().sum() / (given - expected).square().sum()))


def verdict(ours: Mapping[str, Found], static: Mapping[str, Found], dynamic: Mapping[str, Found]) -> tuple[str, bool]:
    """What a row shows, and whether it is as promised.

    Args:
        ours: by the names of OURS.
        static, dynamic: peers.
    """
    own = max(ours["static"], ours["equalised"], key=lambda one: one.db)
    best = _best(own, static)
    says = []
    if own.db < max(best, ours["plain"].db) - CHANCE:
        says.append("static BEHIND")
    if ours["dynamic"].db < _best(ours["dynamic"], dynamic) - CHANCE:
        says.append("dynamic BEHIND")
    gain = own.db - max(best, ours["plain"].db)
    return ", ".join(says) or ("ok, gains" if gain >= GAIN else "ok"), not says


def _best(ours: Found, peers: Mapping[str, Found]) -> float:
    """The most dB of the peers that quantise as much."""
    return max((one.db for one in peers.values() if one.share >= ENOUGH * ours.share), default=-math.inf)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)} (default all)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows, absences, good = [], {}, True
    for name in options.models:
        try:
            case = CASES[name]()
        except DataUnavailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        with torch.no_grad():
            expected = case.run(lambda inputs, model=case.subject.model: signal_peers.as_tuple(model(*inputs.values())))
        found = [
            {who: measured(case, maker, expected) for who, maker in makers.items()}
            for makers in (OURS, signal_peers.STATIC, signal_peers.DYNAMIC)
        ]
        says, fine = verdict(*found)
        good &= fine
        rows.append([name, *(str(one) for some in found for one in some.values()), says])
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)  # a row may take minutes
        for some, kind in zip(found[1:], ("static", "dynamic"), strict=True):
            for who, one in some.items():
                if one.absent:
                    absences.setdefault(name, {})[f"{who} {kind}"] = one.absent
    header = ["model", *OURS, *signal_peers.STATIC, *(f"{who} dynamic" for who in signal_peers.DYNAMIC), "verdict"]
    print(display.table(header, rows), *display.absent_lines(absences), sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

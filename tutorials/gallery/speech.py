"""Speech in noise, heard as it comes: convolutions, GLU and an LSTM with a state, in float, dynamic and static int8.

    python tutorials/gallery/speech.py [--steps N] [--out FILE.svg]

A small causal network says of each 32 ms whether somebody speaks. It learns in a minute from silero-vad, a trained
detector that hears a recording without noise, to decide the same with noise upon it. Another recording is scored: how
often a form errs, and whether it says the same of a stream, one call for each 32 ms with the state carried over, as of
the whole recording in one call. It ends in asserts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, glu, pad
from tqdm import tqdm

import quant

sys.path.append(str(Path(__file__).parents[1]))  # the tutorials, where the teacher and the recordings are
from zoo import silero
from zoo.fetch import DataUnavailable

OUT = Path(__file__).parents[1] / "out" / "speech.svg"
HOP = silero.FRAME // 2
"""Samples from one spectrum to the next: two spectra for each decision of the teacher, 32 ms."""
BANDS, CHANNELS, HIDDEN = 32, 32, 64
LOUDNESS = 0.05
"""Root mean square of the recordings as they are mixed, of full scale."""

State: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""The last two spectra (N, BANDS, 2) and convolved frames (N, CHANNELS, 2), and the LSTM's states, (1, N, HIDDEN)."""


class Listener(nn.Module):
    """Spectra (N, BANDS, 2 T) and a state -> scores of speech (N, T), positive for speech, and the next state.

    Nothing looks ahead: what a convolution needs of before is part of the state, as the LSTM's is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, 2 * CHANNELS, 4, stride=2)
        self.second = nn.Conv1d(CHANNELS, 2 * CHANNELS, 3)
        self.memory = nn.LSTM(CHANNELS, HIDDEN, batch_first=True)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, spectra: Tensor, state: State) -> tuple[Tensor, State]:
        spectra = torch.cat((state[0], spectra), 2)
        frames = torch.cat((state[1], glu(self.first(spectra), 1)), 2)
        features, memory = self.memory(glu(self.second(frames), 1).transpose(1, 2), (state[2], state[3]))
        return self.score(features).squeeze(2), (spectra[:, :, -2:], frames[:, :, -2:], *memory)


def silence(count: int) -> State:
    """The state before anything is heard."""
    memory = torch.zeros(2, 1, count, HIDDEN)
    return torch.zeros(count, BANDS, 2), torch.zeros(count, CHANNELS, 2), memory[0], memory[1]


def spectra_of(audio: Tensor) -> Tensor:
    """Audio (N, samples), multiples of HOP, -> logarithms of the energy in bands, (N, BANDS, samples / HOP).

    A spectrum is of the 2 HOP samples that end with its own; bands are wider the higher they are.
    """
    windows = pad(audio, (HOP, 0)).unfold(1, 2 * HOP, HOP) * torch.hann_window(2 * HOP)
    energy = torch.fft.rfft(windows).abs().square()
    edges = (1 + HOP * torch.linspace(0, 1, BANDS + 1) ** 1.5).round().long().tolist()
    bands = [energy[..., low:high].mean(-1) for low, high in pairwise(edges)]
    return (torch.stack(bands, 1) + 1e-4).log() / 4


@dataclass(frozen=True)
class Recording:
    """Audio (samples,) of LOUDNESS, a multiple of silero.FRAME, and whether its frames are speech to the teacher."""

    audio: Tensor
    speech: Tensor


def taught(audio: Tensor, teacher: nn.Module) -> Recording:
    """What the teacher hears in audio without noise."""
    audio = audio[: len(audio) // silero.FRAME * silero.FRAME]
    audio = audio * (LOUDNESS / audio.square().mean().sqrt())
    return Recording(audio, silero.speech_probabilities(teacher, audio) > silero.THRESHOLD)


def mixed(recording: Recording, frames: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Excerpts of so many frames with noise: their spectra (count, BANDS, 2 frames), and truth, float (count, frames).

    Recordings are speech for the most part, so stretches of half a second are made silent. Noise is white or pink, 0
    to 15 dB below the recording.
    """
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(recording.speech) - frames + 1, (count,), generator=draws)
    places = starts[:, None] + torch.arange(frames)
    audio = recording.audio.reshape(-1, silero.FRAME)[places]
    stretches = torch.rand(count, -(-frames // 16), generator=draws) < 0.6
    heard = stretches.repeat_interleave(16, 1)[:, :frames]
    clean = (audio * heard[..., None]).flatten(1)

    noise = torch.fft.rfft(torch.randn(clean.shape, generator=draws))
    falling = torch.arange(1, noise.shape[1] + 1) ** -0.5
    noise = torch.where(torch.rand(count, 1, generator=draws) < 0.5, noise, noise * falling)
    noise = torch.fft.irfft(noise, clean.shape[1])
    level = LOUDNESS * 10 ** (-15 / 20 * torch.rand(count, 1, generator=draws))
    noise = noise * level / noise.square().mean(1, keepdim=True).sqrt()
    return spectra_of(clean + noise), (recording.speech[places] & heard).float()


def trained(recording: Recording, steps: int, *, frames: int = 96, batch: int = 16) -> Listener:
    """The float network."""
    torch.manual_seed(0)
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=steps)
    for step in tqdm(range(steps), desc="listener", unit="batch", disable=None):
        spectra, truth = mixed(recording, frames, batch, seed=step)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(spectra, silence(batch))[0], truth).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def whole(model: nn.Module, spectra: Tensor) -> Tensor:
    """The scores (N, T) of one call."""
    with torch.inference_mode():
        scores: Tensor = model(spectra, silence(len(spectra)))[0]
    return scores


def streamed(model: nn.Module, spectra: Tensor, *, frames: int = 1) -> Tensor:
    """The scores (N, T) of a call for each `frames` of them, each with the state of the one before."""
    state, scores = silence(len(spectra)), []
    with torch.no_grad():
        for part in spectra.split(2 * frames, 2):
            score, state = model(part, state)
            scores.append(score)
    return torch.cat(scores, 1)


def static(model: nn.Module, spectra: Tensor, recipe: quant.Recipe | None = None) -> nn.Module:
    """Static int8, calibrated as it will be called: whole, and by a stream, whose states are no silence."""
    prepared = quant.prepare(model, (spectra, silence(len(spectra))), recipe)
    whole(prepared, spectra)
    streamed(prepared, spectra[:8])
    return quant.convert(prepared)


@dataclass(frozen=True)
class Outcome:
    """One form on a recording that it has not heard.

    Attributes:
        scores: of the stream, (N, T).
        errors: share of decisions that are wrong, of the stream.
        as_float: share of decisions that are those of float.
        as_whole: the largest difference of a score to that of one call for all.
        kib: of its parameters.
    """

    scores: Tensor
    errors: float
    as_float: float
    as_whole: float
    kib: float


def run(model: Listener, seen: Recording, spectra: Tensor, truth: Tensor) -> Mapping[str, Outcome]:
    """The outcomes by form."""
    calibration, _ = mixed(seen, 64, 32, seed=1_000_000)
    narrow = quant.Recipe(default=quant.QConfig(weight_bits=4))
    forms = {
        "float": model,
        "dynamic int8": quant.quantize_dynamic(model),
        "static int8": static(model, calibration),
        "static, 4-bit weights": static(model, calibration, narrow),
    }
    outcomes: dict[str, Outcome] = {}
    for name, one in forms.items():
        scores = streamed(one, spectra)
        by_float = outcomes["float"].scores if outcomes else scores
        outcome = outcomes[name] = Outcome(
            scores,
            float(((scores > 0) != (truth > 0)).double().mean()),
            float(((scores > 0) == (by_float > 0)).double().mean()),
            float((whole(one, spectra) - scores).abs().max()),
            (quant.summary(one).model_bytes_after if one is not model else bytes_of(model)) / 1024,
        )
        print(
            f"{name:22} errs in {100 * outcome.errors:.2f} % of {scores.numel():,} frames, decides as float in "
            f"{100 * outcome.as_float:.2f} %, {outcome.kib:.1f} KiB; stream and one call differ by "
            f"{outcome.as_whole:.1e}"
        )
    print(quant.summary(forms["static int8"]))
    return outcomes


def bytes_of(model: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())


def draw(path: Path, spectra: Tensor, truth: Tensor, outcomes: Mapping[str, Outcome], shown: int = 180) -> None:
    """The start of the first excerpt: what comes in, what float says of the stream, and what int8 changes of it."""
    from matplotlib.figure import Figure

    shown = min(shown, truth.shape[1])
    seconds = torch.arange(shown) * silero.FRAME / silero.SAMPLE_RATE
    end = shown * silero.FRAME / silero.SAMPLE_RATE
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(2, 3, 2))
    above.imshow(spectra[0, :, : 2 * shown].numpy(), origin="lower", aspect="auto", cmap="magma", extent=(0, end, 0, 1))
    above.set(yticks=[], ylabel="spectrum")
    middle.fill_between(seconds, 0, 1, where=truth[0, :shown] > 0, color="#dfe8d8", step="post", label="speech")
    middle.axhline(0.5, color="#999999", linewidth=0.8, linestyle=":")
    middle.set(ylabel="probability\nof speech", ylim=(-0.02, 1.02))
    below.set(xlabel="seconds", ylabel="change", xlim=(0, end))
    colours = ("#444444", "#1f6f8b", "#c1440e", "#e0a030")
    by_float = outcomes["float"].scores[0, :shown].sigmoid()
    for (name, one), colour in zip(outcomes.items(), colours, strict=True):
        probabilities = one.scores[0, :shown].sigmoid()
        if name == "float":
            middle.plot(seconds, probabilities, color=colour, linewidth=1.6, label=name)
        else:
            below.plot(seconds, probabilities - by_float, color=colour, linewidth=1.2, label=name)
    for axes in (middle, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of training, 16 excerpts each (default 500)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    try:
        teacher = silero.load()
        seen, unseen = (taught(silero.recording(name), teacher) for name in ("aepyx", "test"))
    except DataUnavailable as error:
        sys.exit(f"speech: {error}")
    spectra, truth = mixed(unseen, 600, 16, seed=2_000_000)
    print(f"always the same: {100 * min(truth.mean(), 1 - truth.mean()):.1f} % wrong")
    outcomes = run(trained(seen, options.steps), seen, spectra, truth)
    assert outcomes["float"].errors < 0.1, "the network has not learned to hear"
    for name in ("dynamic int8", "static int8"):
        assert outcomes[name].errors < outcomes["float"].errors + 0.005
        assert outcomes[name].as_float > 0.99
    assert max(outcome.as_whole for outcome in outcomes.values()) < 0.05
    draw(options.out, spectra, truth, outcomes)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

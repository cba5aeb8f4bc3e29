"""Is somebody speaking? The trained 16 kHz voice activity detector of silero-vad, and recorded speech to run it on.

The network (Silero Team, silero-vad 6.2.3, MIT) hears 32 ms of audio at a time and says how probable speech is in it:
a short-time Fourier transform written as a convolution, four convolutions, one step of an LSTM cell, one convolution.
Here it is plain torch; the package's own code is not used. The weights are those of the package's TorchScript file
(its safetensors file holds others, and answers differently). No labels come with the recordings, so what can be scored
is how well a quantised copy agrees with the float one.
"""

from __future__ import annotations

import math
import warnings
import wave
from typing import NamedTuple

import numpy as np
import torch
from quant.kernels.progress import progress_of
from torch import Tensor, nn

from .fetch import SILERO_VAD, fetch

SAMPLE_RATE = 16_000
FRAME = 512  # samples, 32 ms: one answer each
CONTEXT = 64  # samples of the frame before, put in front of each frame
THRESHOLD = 0.5  # above which a frame counts as speech, as in silero-vad

State = tuple[Tensor, Tensor]
"""Hidden and cell state of the LSTM cell, each float32 (N, 128)."""

RECORDINGS = {"test": "tests/data/test.wav", "aepyx": "examples/c++/aepyx.wav"}
"""Speech in the silero-vad sdist, 16 kHz mono: 60 s, of which 77 % are speech to the float model, and 169 s (83 %)."""


class Spectrum(nn.Module):
    """Magnitude spectrum: Hann windows of 256 samples every 128, as one convolution with cosines and sines.

    float32 (N, 576) -> (N, 129, 4). The end is padded by reflection; the weights are fixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad1d((0, 64))
        self.basis = nn.Conv1d(1, 258, kernel_size=256, stride=128, bias=False)

    def forward(self, audio: Tensor) -> Tensor:
        real, imaginary = self.basis(self.pad(audio).unsqueeze(1)).chunk(2, dim=1)
        return torch.sqrt(real**2 + imaginary**2)


class SileroVAD(nn.Module):
    """One step of the detector, 0.31 M parameters with the 66,048 of the spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = Spectrum()
        self.encoder = nn.Sequential(
            nn.Conv1d(129, 128, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv1d(128, 64, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(64, 64, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(64, 128, kernel_size=3, padding=1),
            nn.ReLU(),
        )
        self.cell = nn.LSTMCell(128, 128)
        self.decoder = nn.Sequential(nn.ReLU(), nn.Conv1d(128, 1, kernel_size=1), nn.Sigmoid())

    def forward(self, audio: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hear the next frame.

        Args:
            audio: float32 in [-1, 1], (N, 64 + 512): the end of the frame before (zeros at the start), then the frame.
            state: what the call before returned; None at the start.

        Returns:
            The probability of speech, float32 (N,), and the next state.
        """
        features = self.encoder(self.spectrum(audio)).squeeze(-1)
        hidden, memory = self.cell(features, state)
        return self.decoder(hidden.unsqueeze(-1)).flatten(), (hidden, memory)


def load() -> SileroVAD:
    """The trained 16 kHz model in float32 and eval mode.

    Raises:
        DataUnavailable: the package silero-vad is not cached and cannot be fetched.
    """
    theirs = torchscript().state_dict()
    names = {"spectrum.basis.weight": "stft.forward_basis_buffer"}
    for kind in ("weight", "bias"):
        names |= {f"encoder.{2 * i}.{kind}": f"encoder.{i}.reparam_conv.{kind}" for i in range(4)}
        names |= {f"cell.{kind}_{side}": f"decoder.rnn.{kind}_{side}" for side in ("ih", "hh")}
        names[f"decoder.1.{kind}"] = f"decoder.decoder.2.{kind}"
    model = SileroVAD()
    model.load_state_dict({ours: theirs[f"_model.{name}"] for ours, name in names.items()})
    return model.eval()


def torchscript() -> torch.jit.ScriptModule:
    """The package's own model, which `load` takes its weights from and the tests compare with.

    Raises:
        DataUnavailable: the package silero-vad is not cached and cannot be fetched.
    """
    path = fetch(SILERO_VAD) / "src" / "silero_vad" / "data" / "silero_vad.jit"
    with warnings.catch_warnings():
        # torch points to torch.export, which cannot read the one format in which these weights are published.
        warnings.filterwarnings("ignore", message=".*torch.jit.load.*", category=DeprecationWarning)
        model: torch.jit.ScriptModule = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    return model


def recording(name: str = "test") -> Tensor:
    """One of `RECORDINGS`: float32 in [-1, 1), (samples,), 16 kHz.

    Raises:
        DataUnavailable: the package silero-vad is not cached and cannot be fetched.
    """
    if name not in RECORDINGS:
        raise ValueError(f"recording {name!r}: there are {sorted(RECORDINGS)}")
    with wave.open(str(fetch(SILERO_VAD) / RECORDINGS[name])) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLE_RATE, 1, 2):
            raise ValueError(f"recording {name!r}: expected 16 kHz, mono, 16 bit, got {file.getparams()}")
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return torch.from_numpy(samples.astype(np.float32) / 32768)


def synthetic(seconds: float = 8.0, *, seed: int = 0) -> Tensor:
    """A signal made here, for tests without recordings: float32 in [-1, 1], (samples,), 16 kHz.

    One second of a buzz with gliding formants and four syllables, one second of faint noise, and so on. The float model
    takes about half of it for speech.
    """
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(seconds * SAMPLE_RATE), dtype=torch.float64) / SAMPLE_RATE

    def wave_of(hertz: float) -> Tensor:
        return torch.sin(2 * math.pi * hertz * time)

    pitch = 120 + 15 * wave_of(0.7)
    phase = 2 * math.pi * torch.cumsum(pitch, dim=0) / SAMPLE_RATE
    formants = ((600 + 250 * wave_of(2.3), 90), (1500 + 500 * wave_of(1.5), 120), (2600 + 200 * wave_of(1.1), 180))
    voice = torch.zeros_like(time)
    for harmonic in range(1, 30):
        for centre, width in formants:
            gain = width**2 / ((harmonic * pitch - centre) ** 2 + width**2)
            voice += gain * torch.sin(harmonic * phase)
    loudness = (time % 2 < 1) * (0.6 + 0.4 * wave_of(4))
    noise = 0.01 * torch.randn(len(time), generator=generator, dtype=torch.float64)
    return (0.15 * loudness * voice + noise).clamp(-1, 1).float()


def speech_probabilities(model: nn.Module, audio: Tensor, *, progress: str | None = None) -> Tensor:
    """Probability of speech in each 32 ms of a recording.

    Args:
        model: `SileroVAD`, or a quantised copy.
        audio: float32, (samples,). The last frame is filled up with zeros.
        progress: label of a progress bar on stderr; None for none.

    Returns:
        float32, (ceil(samples / 512),).
    """
    inputs = frames(audio)
    state: State | None = None
    found = []
    bar = progress_of(progress, unit="frame", total=len(inputs))
    with torch.inference_mode(), bar:
        for frame in inputs:
            probability, state = model(frame.unsqueeze(0), state)
            found.append(probability)
            bar.update()
    return torch.cat(found)


def frames(audio: Tensor) -> Tensor:
    """float32 (samples,) -> (ceil(samples / 512), 576): what `SileroVAD` hears, one row a call."""
    behind = -len(audio) % FRAME
    return nn.functional.pad(audio, (CONTEXT, behind)).unfold(0, CONTEXT + FRAME, FRAME)


class Agreement(NamedTuple):
    """How two runs over one recording agree."""

    same: float
    """Share of frames with the same decision at `THRESHOLD`."""
    largest: float
    """Largest difference between the two probabilities."""
    speech: float
    """Share of frames in which the first run hears speech."""
    frames: int


def agreement(expected: Tensor, got: Tensor) -> Agreement:
    """Compare two results of `speech_probabilities`, (frames,) each."""
    if expected.shape != got.shape or not expected.numel():
        raise ValueError(f"agreement: expected two results of one recording, got {expected.shape} and {got.shape}")
    same = (expected > THRESHOLD) == (got > THRESHOLD)
    largest = (expected - got).abs().max().item()
    return Agreement(
        same.double().mean().item(), largest, (expected > THRESHOLD).double().mean().item(), expected.numel()
    )

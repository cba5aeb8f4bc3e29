"""Small forms of published networks, for the torch-free runner: the same layers, few channels, random weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Lite(nn.Module):
    """As EfficientNet-Lite0: padding by a module, more on one side, batch norms, ReLU6, residual adds."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8)
        self.expand, self.depthwise = nn.Conv2d(8, 48, 1, bias=False), nn.Conv2d(48, 48, 5, 1, 2, groups=48, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(48), nn.BatchNorm2d(48), nn.BatchNorm2d(8)])
        self.project, self.head = nn.Conv2d(48, 8, 1, bias=False), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem_norm(self.stem(self.pad(x))))
        y = F.relu6(self.norms[0](self.expand(x)))
        y = self.norms[2](self.project(F.relu6(self.norms[1](self.depthwise(y)))))
        return self.head(F.adaptive_avg_pool2d(x + y, 1).flatten(1))


class Detector(nn.Module):
    """A backbone of three levels, a feature pyramid, and heads that all levels share (Lin et al. 2017)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.levels = nn.ModuleList([nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 24, 3, 2, 1)])
        self.across = nn.ModuleList(nn.Conv2d(inputs, width, 1) for inputs in (8, 16, 24))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.scores, self.boxes = nn.Conv2d(width, 6, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x, found = torch.relu(self.stem(image)), []
        for level, across in zip(self.levels, self.across, strict=True):
            x = torch.relu(level(x))
            found.append(across(x))
        for place in (1, 0):
            found[place] = found[place] + F.interpolate(found[place + 1], size=found[place].shape[-2:], mode="nearest")
        smooth = [layer(x) for layer, x in zip(self.smooth, found, strict=True)]
        flat = [[head(x).flatten(2).transpose(1, 2) for x in smooth] for head in (self.scores, self.boxes)]
        return {"scores": torch.cat(flat[0], 1), "boxes": torch.cat(flat[1], 1)}


class VoiceDetector(nn.Module):
    """As silero-vad: a spectrum by one convolution, an encoder, and an LSTM cell that hands on its states."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.basis = nn.ReflectionPad1d((0, 8)), nn.Conv1d(1, 18, 16, 8, bias=False)
        self.encoder = nn.Sequential(nn.Conv1d(9, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 12, 3, 2, 1), nn.ReLU())
        self.cell, self.last = nn.LSTMCell(12, 12), nn.Conv1d(12, 1, 1)

    def forward(self, audio: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        real, imaginary = self.basis(self.pad(audio).unsqueeze(1)).chunk(2, dim=1)
        features = self.encoder(torch.sqrt(real**2 + imaginary**2))[..., -1]
        hidden, memory = self.cell(features, (hidden, memory))
        return torch.sigmoid(self.last(torch.relu(hidden).unsqueeze(-1))).flatten(), hidden, memory


class Speller(nn.Module):
    """As the first half of g2p: letters to states by a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.encoder = nn.Embedding(29, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, letters: Tensor) -> Tensor:
        return self.encoder(self.letters(letters))[0]


class SpellerStep(nn.Module):
    """As a step of g2p's second half: a phoneme and a state to scores and the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.phonemes, self.decoder, self.scores = nn.Embedding(20, 16), nn.GRUCell(16, 16), nn.Linear(16, 20)

    def forward(self, phoneme: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.decoder(self.phonemes(phoneme), state)
        return self.scores(state), state


class Bert(nn.Module):
    """As MiniLM: words and places, blocks of attention normalised after each sum, and the mean over a sentence."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places, self.heads = nn.Embedding(40, width), nn.Embedding(24, width), heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, 1e-12) for _ in range(3))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norms[0](self.words(words) + self.places(torch.arange(words.shape[1])))
        parts = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = self.norms[1](x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)))
        return self.norms[2](x + self.narrow(F.gelu(self.wide(x)))).mean(dim=1)


def reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def indices(most: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


Call = tuple[Tensor, ...]


def frame(batch: int, seed: int = 0) -> Call:
    return reals(batch, 64, seed=seed), reals(batch, 12, seed=seed + 1) / 4, reals(batch, 12, seed=seed + 2) / 4


def step(batch: int, seed: int = 0) -> Call:
    return indices(20, batch, seed=seed), reals(batch, 16, seed=seed) / 4


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Call, Call]] = {
    "lite": (Lite, (reals(2, 3, 24, 24),), (reals(3, 3, 32, 20, seed=1),)),
    "detector": (Detector, (reals(2, 3, 32, 32),), (reals(1, 3, 48, 32, seed=1),)),
    "voice": (VoiceDetector, frame(2), frame(5, seed=3)),
    "speller": (Speller, (indices(29, 2, 7),), (indices(29, 5, 12, seed=1),)),
    "speller step": (SpellerStep, step(2), step(7, seed=1)),
    "bert": (Bert, (indices(40, 2, 9),), (indices(40, 3, 17, seed=1),)),
}
"""Name -> the class, a call to calibrate and to capture with, and one of other sizes."""

"""The models of `make bench-runner`: trained ones from the tutorials' packages, and others with random weights."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networks
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))


@dataclass(frozen=True)
class Task:
    """A model that is quantised, and a call of it.

    Attributes:
        original: the float model.
        model: int8.
        inputs: positional arguments; all are tensors.
        is_dynamic: whether the export needs the inputs to capture the model with.
    """

    original: nn.Module
    model: nn.Module
    inputs: tuple[Tensor, ...]
    is_dynamic: bool = False


def static(model: nn.Module, *batches: Tensor | tuple[Tensor, ...]) -> Task:
    """Calibrated on all batches, of which the first is run."""
    first = batches[0]
    q = quant.quantize_static(model.eval(), list(batches), progress=False)
    return Task(model, q, first if isinstance(first, tuple) else (first,))


def dynamic(model: nn.Module, *inputs: Tensor) -> Task:
    return Task(model, quant.quantize_dynamic(model.eval()), inputs, is_dynamic=True)


class Tagger(nn.Module):
    """Words to tags by an LSTM of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 128)
        self.states = nn.LSTM(128, 256, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(512, 45)

    def forward(self, words: Tensor) -> Tensor:
        return self.tags(self.states(self.words(words))[0])


class G2PEncoder(nn.Module):
    """The first half of g2p: letters to states. The second is `G2PStep`; what is its next input is decided between."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.embedding, self.encoder = whole.grapheme_embedding, whole.encoder

    def forward(self, graphemes: Tensor) -> Tensor:
        return self.encoder(self.embedding(graphemes))[0]


class G2PStep(nn.Module):
    """A phoneme and a state to the scores of the next phoneme and the next state."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.embedding, self.decoder, self.output = whole.phoneme_embedding, whole.decoder, whole.output

    def forward(self, phoneme: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.decoder(self.embedding(phoneme), state)
        return self.output(state), state


class OneFrame(nn.Module):
    """silero-vad with its states as tensors."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, audio: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probability, (hidden, memory) = self.detector(audio, (hidden, memory))
        return probability, hidden, memory


class UNet(nn.Module):
    """Ronneberger et al. 2015 with transposed convolutions on the way up, 16 channels wide at the top."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = self.twice(3, widths[0])
        self.down = nn.ModuleList(self.twice(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(pairs))
        self.joined = nn.ModuleList(self.twice(2 * narrow, narrow) for narrow, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def twice(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            networks.conv_norm(inputs, outputs, 3, act=nn.ReLU()),
            networks.conv_norm(outputs, outputs, 3, act=nn.ReLU()),
        )

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.first(image)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([levels.pop(), up(x)], 1))
        return self.last(x)


class FeaturePyramid(nn.Module):
    """A detector's backbone: ResNet-18's levels, each with what is above it (Lin et al. 2017), 128 channels wide."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        backbone = networks.ResNet18()
        self.stem = backbone.stem
        self.levels = nn.ModuleList(backbone.blocks[place : place + 2] for place in (0, 2, 4, 6))
        self.across = nn.ModuleList(nn.Conv2d(inputs, width, 1) for inputs in (64, 128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x, found = self.stem(image), []
        for level, across in zip(self.levels, self.across, strict=True):
            x = level(x)
            found.append(across(x))
        for place in (2, 1, 0):
            found[place] = found[place] + F.interpolate(found[place + 1], scale_factor=2, mode="nearest")
        return {f"level{place}": smooth(x) for place, (smooth, x) in enumerate(zip(self.smooth, found, strict=True))}


def photos(count: int, side: int = 224) -> list[Tensor]:
    """Stand-ins for images, whose values no time depends on."""
    return [torch.randn(1, 3, side, side) for _ in range(count)]


def random_network(make: Callable[[], nn.Module], side: int = 224) -> Callable[[], Task]:
    def build() -> Task:
        batches = photos(2, side)
        return static(networks.settle_norms(make(), batches), *batches)

    return build


def efficientnet() -> Task:
    from zoo import efficientnet

    pictures = efficientnet.calibration()
    return static(efficientnet.load(), pictures[:1], pictures)


def tagger() -> Task:
    return static(Tagger(), *(torch.randint(10_000, (1, 30)) for _ in range(4)))


def g2p_encoder() -> Task:
    from zoo import g2p

    return dynamic(G2PEncoder(g2p.load()), g2p.encode_words(["quantisation"]))


def g2p_step() -> Task:
    from zoo import g2p

    return dynamic(G2PStep(g2p.load()), torch.tensor([g2p.START_PHONEME]), torch.randn(1, 256) / 4)


def silero() -> Task:
    from zoo import silero

    model, state, calls = silero.load(), (torch.zeros(1, 128), torch.zeros(1, 128)), []
    with torch.inference_mode():
        for frame in silero.frames(silero.recording()[: 8 * silero.SAMPLE_RATE]):
            calls.append((frame[None], *state))
            _, state = model(frame[None], state)
    return static(OneFrame(model), *calls[20:], *calls[:20])


def minilm(quantize: Callable[..., Task]) -> Callable[[], Task]:
    def build() -> Task:
        from zoo import minilm

        sentences = [torch.randint(1000, minilm.WORDS, (1, 64)) for _ in range(4)]
        return quantize(minilm.load(), *sentences[: 1 if quantize is dynamic else 4])

    return build


CASES: dict[str, Callable[[], Task]] = {
    "ResNet-18": random_network(networks.ResNet18),
    "MobileNetV2": random_network(networks.MobileNetV2),
    "EfficientNet-Lite0, trained": efficientnet,
    "U-Net, 128 x 128": random_network(UNet, 128),
    "ResNet-18 with FPN": random_network(FeaturePyramid),
    "LSTM tagger, 30 words": tagger,
    "g2p encoder, trained, dynamic": g2p_encoder,
    "g2p step, trained, dynamic": g2p_step,
    "silero-vad, trained": silero,
    "MiniLM, 64 tokens, trained": minilm(static),
    "MiniLM, dynamic": minilm(dynamic),
}
"""Name -> what builds it; DataUnavailable is raised where a trained model can be neither found nor fetched."""

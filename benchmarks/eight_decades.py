"""Does int8 keep features that span eight decades? Mel power before the log, into a random and into a trained LSTM.

A band of mel power can be a hundred million times another. One range for a whole activation tensor rounds the small
bands to zero, which shows as soon as the weights compensate for it, as those of a network trained on such input do.
There are no normalisation layers here: the network itself takes the raw power.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness import cosine
from peers import Maker, assemble
from torch import Tensor, nn

BANDS, HIDDEN, LAYERS, STEPS, DECADES = 64, 128, 2, 35, 8

COSINE_LIMIT = 0.995


@dataclass(frozen=True)
class Kept:
    """What one network keeps: by peer, the cosine of its outputs to the float model's; and who is missing, and why."""

    network: str
    cosines: dict[str, float]
    missing: dict[str, str]


def band_scales() -> Tensor:
    """(BANDS,): the typical power of each band, from 10**4 down to 10**-4."""
    return torch.logspace(DECADES / 2, -DECADES / 2, BANDS)


def mel_power(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Synthetic power (STEPS, batch, BANDS) of four slow sources, each in every band; and the sources' loudness.

    Each band's power is log-normal around its own scale, as the power of speech is.
    """
    noise = torch.randn(STEPS, batch, 4, generator=generator)
    loudness = torch.zeros_like(noise)
    for step in range(STEPS):
        loudness[step] = noise[step] if step == 0 else 0.9 * loudness[step - 1] + 0.44 * noise[step]
    mixing = torch.randn(4, BANDS, generator=torch.Generator().manual_seed(7)) / 2
    flutter = 0.3 * torch.randn(STEPS, batch, BANDS, generator=generator)
    return band_scales() * torch.exp(loudness @ mixing + flutter), loudness


def random_lstm() -> nn.LSTM:
    """As torch initialises it: the loud bands drown the others, in float too."""
    torch.manual_seed(1)
    return nn.LSTM(BANDS, HIDDEN, LAYERS).eval()


def trained_lstm(steps: int = 80) -> tuple[nn.LSTM, float]:
    """An LSTM that tracks the sources' loudness from raw power, and the share of their variance that it explains.

    Its first layer is trained in the variables weight * scale, where gradients have one size, and holds the plain
    product afterwards: raw power in, no normalisation anywhere.
    """
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(3)
    lstm, head = nn.LSTM(BANDS, HIDDEN, LAYERS), nn.Linear(HIDDEN, 4)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=4e-3)
    for _ in range(steps):
        power, loudness = mel_power(16, generator)
        y, _ = lstm(power / band_scales())
        loss = nn.functional.mse_loss(head(y), loudness)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        lstm.get_parameter("weight_ih_l0").div_(band_scales())
        power, loudness = mel_power(64, generator)
        explained = 1 - nn.functional.mse_loss(head(lstm(power)[0]), loudness) / loudness.var()
    return lstm.eval(), float(explained)


def measure(makers: dict[str, Maker]) -> list[Kept]:
    """Both networks, on power they have not seen."""
    power, _ = mel_power(16, torch.Generator().manual_seed(5))
    with torch.inference_mode(False), torch.enable_grad():
        trained, explained = trained_lstm()
    networks = {
        "random LSTM": random_lstm(),
        f"trained LSTM (explains {explained:.0%})": trained,
    }
    kept = []
    for network, lstm in networks.items():
        found, missing = assemble(lstm, power, makers)
        with torch.no_grad():
            outputs = {peer.name: peer.predict(power) for peer in found}
        expected = outputs.pop(found[0].name)
        kept.append(Kept(network, {name: cosine(y, expected) for name, y in outputs.items()}, missing))
    return kept

"""Networks so small that a call costs more than its arithmetic: what a converted model adds to every call shows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 64


class Heads(nn.Module):
    """Two outputs, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., WIDTH) -> the logits and the hidden values."""
        hidden = self.body(x).relu()
        return self.head(hidden), hidden


class FloatSteps(nn.Module):
    """Layers between operators that stay float and have no plan, so that the steps run one by one."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(..., WIDTH) -> the same."""
        for layer in self.layers:
            x = torch.sin(torch.cos(layer(x))) * 0.5 + 0.1 * x.exp().clamp(max=3.0)
        return x


class Sequence(nn.Module):
    """An LSTM and a layer on its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, steps, WIDTH) -> (batch, steps, 8)."""
        found: Tensor = self.head(self.lstm(x)[0])
        return found


def linear() -> nn.Module:
    """One layer and its activation."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def two_linears() -> nn.Module:
    """The smallest program of more than one layer."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 32))


def convolutions() -> nn.Module:
    """Two convolutions with batch norms, on images of 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip

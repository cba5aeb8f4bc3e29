"""Translation by beam search with a cache: an encoder-decoder in float, dynamic and static int8, its outputs counted.

    python tutorials/gallery/translation.py [--steps N] [--words N] [--out FILE.svg]

A small transformer learns to translate numbers from English words to German ones ("forty three" is "drei und vierzig",
so the order changes), in a minute and without data. The decoder computes one word a call and keeps keys and values of
those before. A trained network, g2p-en of zoo/g2p.py, is searched by the same beams from spelling to pronunciation. A
search decides between near scores again and again, so what counts is how many outputs stay the same. Asserts end it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

import quant

sys.path.append(str(Path(__file__).parents[1]))  # the tutorials, where the trained network is
from zoo import g2p
from zoo.fetch import DataUnavailable

OUT = Path(__file__).parents[1] / "out" / "translation.svg"
PAD, START, END = 0, 1, 2
WIDTH, HEADS, LAYERS, LONGEST = 96, 4, 2, 24
LARGEST = 1_000_000
BEAMS = 4

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_EINER = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn"
)
_ZEHNER = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"
ONES, TENS = [*_ONES.split(), "eighteen", "nineteen"], _TENS.split()
EINER, ZEHNER = [*_EINER.split(), "achtzehn", "neunzehn"], _ZEHNER.split()
ENGLISH = ["<pad>", "<start>", "<end>", *ONES, *TENS, "hundred", "thousand"]
GERMAN = ["<pad>", "<start>", "<end>", *EINER, *ZEHNER, "eins", "und", "hundert", "tausend"]


def english(number: int) -> list[str]:
    """The words of a number below a million."""
    if number >= 1000:
        return [*english(number // 1000), "thousand", *(english(number % 1000) if number % 1000 else [])]
    if number >= 100:
        return [ONES[number // 100], "hundred", *(english(number % 100) if number % 100 else [])]
    if number >= 20:
        return [TENS[number // 10 - 2], *([ONES[number % 10]] if number % 10 else [])]
    return [ONES[number]]


def german(number: int, *, last: bool = True) -> list[str]:
    """The parts of the German word; a one is "eins" only at its `last` place."""
    if number >= 1000:
        return [*german(number // 1000, last=False), "tausend", *(german(number % 1000) if number % 1000 else [])]
    if number >= 100:
        return [EINER[number // 100], "hundert", *(german(number % 100, last=last) if number % 100 else [])]
    if number >= 20:
        return [*([EINER[number % 10], "und"] if number % 10 else []), ZEHNER[number // 10 - 2]]
    return ["eins"] if number == 1 and last else [EINER[number]]


def encoded(sentences: Sequence[Sequence[str]], words: Sequence[str]) -> Tensor:
    """int64 (N, longest + 1): the words' numbers, END, then PAD."""
    number = {word: index for index, word in enumerate(words)}
    rows = [torch.tensor([*(number[word] for word in sentence), END]) for sentence in sentences]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def numbers(count: int, seed: int, *, unseen: bool) -> list[int]:
    """Numbers of one to six digits, each as often; of those from 1,000 on one of 16 is `unseen`: kept from training."""
    draws = torch.Generator().manual_seed(seed)
    found: list[int] = []
    while len(found) < count:
        digits = int(torch.randint(1, 7, (), generator=draws))
        number = int(torch.randint(10**digits, (), generator=draws))
        if (number >= 1000 and number * 2_654_435_761 % 2**32 < 2**28) == unseen:
            found.append(number)
    return found


class Attention(nn.Module):
    """Attention to keys and values (N, HEADS, T, WIDTH / HEADS) that somebody else has read."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        seen = scaled_dot_product_attention(heads(self.query(x)), key, value, attn_mask=mask, is_causal=causal)
        attended: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return attended


class SelfAttention(Attention):
    """The same, with its own keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of x, (N, T, WIDTH)."""
        return heads(self.key(x)), heads(self.value(x))


def heads(x: Tensor) -> Tensor:
    """(N, T, WIDTH) -> (N, HEADS, T, WIDTH / HEADS)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Inner(nn.Sequential):
    """The two linear layers behind an attention."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


class Encoder(nn.Module):
    """Sources (N, S) -> a mask (N, 1, 1, S), and the keys and values that each layer of the decoder reads of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(ENGLISH), WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.attentions = nn.ModuleList(SelfAttention() for _ in range(LAYERS))
        self.inners = nn.ModuleList(Inner() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.keys = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.values = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, source: Tensor) -> tuple[Tensor, ...]:
        mask = (source != PAD)[:, None, None]
        x = self.words(source) + self.places(torch.arange(source.shape[1]))
        for norm, attention, inner in zip(self.norms, self.attentions, self.inners, strict=True):
            y = norm(x)
            x = x + attention(y, *attention.read(y), mask)
            x = x + inner(x)
        x = self.last(x)
        return mask, *(heads(layer(x)) for pair in zip(self.keys, self.values, strict=True) for layer in pair)


class Decoder(nn.Module):
    """The next words' scores, and the cache for the call after."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(GERMAN), WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.attentions = nn.ModuleList(SelfAttention() for _ in range(LAYERS))
        self.crossed = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.inners = nn.ModuleList(Inner() for _ in range(LAYERS))
        self.last, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(GERMAN))

    def forward(
        self, words: Tensor, source: tuple[Tensor, ...], past: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Go on from `past`.

        Args:
            words: int64 (N, T): T is 1 where `past` is not empty.
            source: what the encoder gave.
            past: keys and values of each layer, (N, HEADS, t, WIDTH / HEADS); empty at the start.

        Returns:
            Scores (N, T, words), and the keys and values with those of these words.
        """
        mask, *read = source
        begin = past[0].shape[2] if past else 0
        x = self.words(words) + self.places(torch.arange(begin, begin + words.shape[1]))
        cache: list[Tensor] = []
        for layer in range(LAYERS):
            y = self.norms[2 * layer](x)
            key, value = self.attentions[layer].read(y)
            if past:
                key = torch.cat((past[2 * layer], key), 2)
                value = torch.cat((past[2 * layer + 1], value), 2)
            cache += [key, value]
            x = x + self.attentions[layer](y, key, value, None, causal=not past)
            y = self.norms[2 * layer + 1](x)
            x = x + self.crossed[layer](y, read[2 * layer], read[2 * layer + 1], mask)
            x = x + self.inners[layer](x)
        return self.scores(self.last(x)), tuple(cache)


class Translator(nn.Module):
    """Both; called as a whole in training alone."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, source: Tensor, words: Tensor) -> Tensor:
        scores: Tensor = self.decoder(words, self.encoder(source))[0]
        return scores


def trained(steps: int) -> Translator:
    """The float model."""
    torch.manual_seed(0)
    model = Translator(Encoder(), Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        chosen = numbers(64, seed=step, unseen=False)
        source, target = encoded([english(n) for n in chosen], ENGLISH), encoded([german(n) for n in chosen], GERMAN)
        shown = torch.cat((torch.full((len(target), 1), START), target[:, :-1]), 1)
        optimizer.zero_grad()
        cross_entropy(model(source, shown).flatten(0, 1), target.flatten(), ignore_index=PAD).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


State: TypeAlias = tuple[Tensor, ...]
"""Tensors whose first dimension is that of the beams of all inputs."""


def beam_search(
    step: Callable[[Tensor, State], tuple[Tensor, State]], state: State, beams: int, start: int, end: int, longest: int
) -> list[list[int]]:
    """For each input the words, END left out, whose log-probabilities add up to the most, as far as beams see.

    Args:
        step: the last words (rows,) and the state -> scores (rows, words) and the next state.
        state: of each input, a row each.
        longest: words at most.
    """
    count = len(state[0])
    state = tuple(one.repeat_interleave(beams, 0) for one in state)
    total = torch.full((count, beams), -torch.inf)
    total[:, 0] = 0  # at the start all beams are the same one
    words = torch.full((count * beams, 1), start)
    for _ in range(longest):
        scores, state = step(words[:, -1], state)
        gains = log_softmax(scores, -1)
        ended = words[:, -1] == end
        gains[ended] = -torch.inf
        gains[ended, end] = 0  # what has ended stays as it is
        total, best = (total.reshape(-1, 1) + gains).reshape(count, -1).topk(beams)
        rows = (best // gains.shape[1] + beams * torch.arange(count)[:, None]).flatten()
        words = torch.cat((words[rows], (best % gains.shape[1]).reshape(-1, 1)), 1)
        state = tuple(one[rows] for one in state)
        if (words[:, -1] == end).all():
            break
    first = words.reshape(count, beams, -1)[:, 0, 1:].tolist()
    return [row[: row.index(end)] if end in row else row for row in first]


def translated(model: Translator, batch: Sequence[int], beams: int = BEAMS) -> list[str]:
    """German words of numbers."""

    def step(words: Tensor, state: State) -> tuple[Tensor, State]:
        source, past = state[: 1 + 2 * LAYERS], state[1 + 2 * LAYERS :]
        scores, cache = model.decoder(words[:, None], source, past)
        return scores[:, -1], (*source, *cache)

    found = []
    with torch.inference_mode():
        for begin in range(0, len(batch), 100):
            source = model.encoder(encoded([english(n) for n in batch[begin : begin + 100]], ENGLISH))
            found += beam_search(step, source, beams, START, END, LONGEST - 1)
    return [" ".join(GERMAN[word] for word in row) for row in found]


def static(model: Translator, seen: Sequence[int]) -> Translator:
    """Encoder and decoder each calibrated by the search itself, so that the decoder sees caches as it will."""
    source = encoded([english(n) for n in seen[:4]], ENGLISH)
    with torch.no_grad():
        read = model.encoder(source)
        first = torch.full((4, 1), START)
        _, past = model.decoder(first, read)
    prepared = Translator(
        quant.prepare(model.encoder, source),
        quant.prepare(model.decoder, (first, read), examples=[(first, read, past)]),
    )
    translated(prepared, seen)
    return Translator(quant.convert(prepared.encoder), quant.convert(prepared.decoder))


def pronounced(model: g2p.G2P, words: Sequence[str], beams: int = BEAMS) -> list[g2p.Pronunciation]:
    """Pronunciations by g2p-en; its state is the cache."""

    def step(phonemes: Tensor, state: State) -> tuple[Tensor, State]:
        hidden = model.decoder(model.phoneme_embedding(phonemes), state[0])
        return model.output(hidden), (hidden,)

    found = []
    with torch.inference_mode():
        for begin in range(0, len(words), 100):
            state = (model.encode(g2p.encode_words(words[begin : begin + 100])),)
            found += beam_search(step, state, beams, g2p.START_PHONEME, g2p.END_PHONEME, g2p.MAX_PHONEMES)
    return [tuple(g2p.PHONEMES[phoneme] for phoneme in row) for row in found]


@dataclass(frozen=True)
class Outcome:
    """Shares of outputs, in [0, 1]: those that are right, and those that are the float model's."""

    right: float
    same: float


def run(steps: int = 700, count: int = 1000) -> dict[str, Outcome]:
    """How the numbers that training has not seen are translated, by form of the model."""
    model = trained(steps)
    narrow = quant.Recipe({"*": quant.QConfig(weight_bits=4)})
    made = {
        "float": model,
        "dynamic int8": quant.quantize_dynamic(model),
        "static int8": static(model, numbers(100, seed=1_000_000, unseen=False)),
        "dynamic, 4-bit weights": quant.quantize_dynamic(model, narrow),
    }
    for name, one in made.items():
        assert any(type(layer) is nn.Linear for layer in one.modules()) == (name == "float")
    batch = numbers(count, seed=2_000_000, unseen=True)
    said = {name: translated(one, batch) for name, one in made.items()}
    wanted = [" ".join(german(n)) for n in batch]
    outcomes = {name: Outcome(share(one, wanted), share(one, said["float"])) for name, one in said.items()}
    tell("numbers", outcomes)
    return outcomes


def run_g2p(count: int = 500) -> dict[str, Outcome]:
    """How words of the dictionary are pronounced by the trained network, by form of the model.

    Raises:
        DataUnavailable: its weights or the dictionary are not cached and cannot be fetched.
    """
    model, words = g2p.load(), g2p.words(count)
    narrow = quant.Recipe({"*": quant.QConfig(weight_bits=4)})
    made = {
        "float": model,
        "dynamic int8": quant.quantize_dynamic(model),
        "dynamic, 4-bit weights": quant.quantize_dynamic(model, narrow),
    }
    said = {name: pronounced(one, words) for name, one in made.items()}
    wanted = [g2p.pronunciations()[word] for word in words]
    outcomes = {
        name: Outcome(g2p.score(one, wanted).word_accuracy, share(one, said["float"])) for name, one in said.items()
    }
    tell("words", outcomes)
    return outcomes


def share(found: Sequence[object], wanted: Sequence[object]) -> float:
    """Of outputs that are as wanted."""
    return sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted)


def tell(what: str, outcomes: Mapping[str, Outcome]) -> None:
    for name, one in outcomes.items():
        print(f"{what}: {name:22} {100 * one.right:.1f} % right, {100 * one.same:.1f} % as float")


def draw(path: Path, by_task: Mapping[str, Mapping[str, Outcome]]) -> None:
    """Outputs that are right, and those that are the float model's, of each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    panels = figure.subplots(1, len(by_task), squeeze=False)[0]
    for axes, (task, outcomes) in zip(panels, by_task.items(), strict=True):
        places = range(len(outcomes))
        axes.barh(places, [100 * one.right for one in outcomes.values()], 0.6, color="#1f6f8b", label="right")
        axes.plot([100 * one.same for one in outcomes.values()], places, "|", color="#c1440e", ms=16, mew=3)
        axes.plot([], [], "|", color="#c1440e", ms=10, mew=3, label="as float")
        axes.set(title=task, xlabel="% of outputs", xlim=(0, 102), yticks=places, yticklabels=list(outcomes))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=700, help="of training (default 700)")
    parser.add_argument("--words", type=int, default=500, help="that g2p-en pronounces (default 500)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    translations = run(options.steps)
    assert translations["float"].right > 0.95, "the float model has not learned to translate"
    for form in ("dynamic int8", "static int8"):
        assert translations[form].right >= translations["float"].right - 0.01
    try:
        pronunciations = run_g2p(options.words)
    except DataUnavailable as error:
        sys.exit(f"translation: {error}")
    assert pronunciations["dynamic int8"].right >= pronunciations["float"].right - 0.01
    draw(options.out, {"numbers, transformer": translations, "words, g2p-en": pronunciations})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

"""A recommender: embedding bags of a history, in float, int8 and int4: the hit rate and the bytes.

    python tutorials/gallery/recommender.py [--steps N] [--out FILE.svg]

Users like items of three topics, and the next item of a history is any of these: whoever knew the topics would have it
among 50 guesses in a third of the cases. A bag of the history's embeddings is a user, the score of an item a product.
The tables are nearly all of such a model, and quantize_dynamic stores a row in 8 or 4 bits a value with a scale of its
own. It ends in asserts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant

OUT = Path(__file__).parents[1] / "out" / "recommender.svg"
ITEMS, TOPICS, HISTORY, WIDTH, BEST = 2000, 40, 12, 32, 50


class Recommender(nn.Module):
    """Histories (N, HISTORY) of items -> a score for each item (N, ITEMS)."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean")
        self.user = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.items = nn.Linear(WIDTH, ITEMS)

    def forward(self, histories: Tensor) -> Tensor:
        scores: Tensor = self.items(self.user(self.history(histories)))
        return scores


@dataclass(frozen=True)
class Outcome:
    """What a form of the model gives: the share of histories whose next item is among the BEST, and its bytes."""

    hit_rate: float
    bytes: int


def histories(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Histories of three topics each, and the items that come next; item i is of topic i % TOPICS."""
    draws = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (count, 3), generator=draws)
    chosen = topics.gather(1, torch.randint(3, (count, HISTORY + 1), generator=draws))
    each = torch.randint(ITEMS // TOPICS, chosen.shape, generator=draws)
    items = each * TOPICS + chosen
    return items[:, :-1], items[:, -1]


def trained(steps: int) -> Recommender:
    """The float model."""
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        x, following = histories(512, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), following).backward()
        optimizer.step()
    return model.eval()


def hit_rate(model: nn.Module) -> float:
    """Over 5,000 histories that training has not seen."""
    x, following = histories(5000, seed=1_000_000)
    with torch.inference_mode():
        best = model(x).topk(BEST).indices
    return float((best == following[:, None]).any(1).double().mean())


def run(steps: int = 300) -> Mapping[str, Outcome]:
    """The outcomes by form of the model."""
    model = trained(steps)
    recipes = {
        "int8": quant.Recipe(),
        "int4 tables": quant.Recipe({nn.EmbeddingBag: quant.QConfig(weight_bits=4)}),
        "int4": quant.Recipe({"*": quant.QConfig(weight_bits=4)}),
    }
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    outcomes = {"float": Outcome(hit_rate(model), size)}
    for name, recipe in recipes.items():
        q = quant.quantize_dynamic(model, recipe)
        outcomes[name] = Outcome(hit_rate(q), quant.summary(q).model_bytes_after)
    for name, one in outcomes.items():
        print(f"{name:12} next item among {BEST}: {100 * one.hit_rate:.1f} %, {one.bytes / 1024:.0f} KiB")
    assert abs(outcomes["int8"].hit_rate - outcomes["float"].hit_rate) <= 0.01
    assert outcomes["int8"].bytes < 0.35 * size
    assert outcomes["int4"].bytes < 0.65 * outcomes["int8"].bytes
    return outcomes


def draw(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """The hit rate over the bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, (name, one) in enumerate(outcomes.items()):
        axes.plot(one.bytes / 1024, 100 * one.hit_rate, "o", color="#444444" if name == "float" else "#1f6f8b")
        beside = (6, -14 if place % 2 else 6)  # neighbours above and below, as they are near
        axes.annotate(name, (one.bytes / 1024, 100 * one.hit_rate), beside, textcoords="offset points")
    top = 100 * max(one.hit_rate for one in outcomes.values())
    axes.set(xlabel="KiB of the model", ylabel=f"next item among {BEST}, %", xlim=(0, None), ylim=(0, 1.25 * top))
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training (default 300)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    outcomes = run(options.steps)
    assert outcomes["float"].hit_rate > 0.25, "a guess is right in 2.5 %, knowledge of the history's topics in 33 %"
    draw(options.out, outcomes)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

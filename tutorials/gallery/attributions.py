"""Attributions: which pixels speak for a class, in float, calibrated, simulated and real int8.

    python tutorials/gallery/attributions.py [--network NAME] [--train N] [--images N] [--out FILE.png]

A CNN for Fashion-MNIST, trained in a minute, is explained in two ways. Integrated gradients
(Sundararajan, Taly and Yan 2017) need a gradient, so they explain the float model, the prepared one, and the simulation
that training rounds with, whose gradient passes straight through each rounding. Occlusion needs outputs alone, and
explains the integers themselves. Both are a few lines of torch here; Captum's give the same. It ends in asserts.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import quant

sys.path.append(str(Path(__file__).parents[1]))  # the tutorials, where the network and its data are
from models import MODELS
from train_fashion import accuracy, fit
from zoo import fashion
from zoo.fetch import DataUnavailable

OUT = Path(__file__).parents[1] / "out" / "attributions.png"
BLACK = -fashion.MEAN / fashion.DEVIATION
"""A pixel without light: what integrated gradients start from, and what occlusion puts."""
STEPS, PATCH = 64, 4

Explain: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A model, images (N, 1, 28, 28) and classes (N,) -> what each pixel adds to the score of the class, (N, 1, 28, 28)."""


def scores(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The logit of each image's class, (N,)."""
    logits: Tensor = model(images)
    return logits.gather(1, classes[:, None]).squeeze(1)


def integrated_gradients(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Gradients along the way from black to the image, their mean times the way (equation 1, by the midpoint rule)."""
    total, way = torch.zeros_like(images), images - BLACK
    for step in range(STEPS):
        point = (BLACK + (step + 0.5) / STEPS * way).requires_grad_()
        total += torch.autograd.grad(scores(model, point, classes).sum(), point)[0]
    return way * total / STEPS


def occlusion(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """What the score loses with a patch of the image black, at each pixel of that patch."""
    lost = torch.zeros_like(images)
    with torch.inference_mode():
        whole = scores(model, images, classes)
        for top in range(0, images.shape[2], PATCH):
            for left in range(0, images.shape[3], PATCH):
                patch = (..., slice(top, top + PATCH), slice(left, left + PATCH))
                hidden = images.clone()
                hidden[patch] = BLACK
                lost[patch] = (whole - scores(model, hidden, classes))[:, None, None, None]
    return lost


@dataclass(frozen=True)
class Outcome:
    """How one form of the model is explained.

    Attributes:
        maps: (N, 1, 28, 28).
        like_float: the median over images of the cosine to the float model's map by the same method.
        lowest: the lowest such cosine.
        missing: the median of |sum of the map - what it should add up to| over the latter's size: integrated gradients
            add up to the score less that of a black image. NaN for occlusion, which adds up to nothing.
    """

    maps: Tensor
    like_float: float
    lowest: float
    missing: float


def explained(model: nn.Module, method: Explain, images: Tensor, classes: Tensor, by_float: Tensor | None) -> Outcome:
    """The outcome for a model; `by_float` are the float model's maps, None for that model itself."""
    maps = method(model, images, classes)
    like = cosine_similarity(maps.flatten(1), (maps if by_float is None else by_float).flatten(1))
    missing = math.nan
    if method is integrated_gradients:
        with torch.no_grad():
            due = scores(model, images, classes) - scores(model, torch.full_like(images, BLACK), classes)
        missing = float(((maps.sum((1, 2, 3)) - due).abs() / due.abs()).median())
    return Outcome(maps, float(like.median()), float(like.min()), missing)


def forms(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, nn.Module]:
    """The float model, the calibrated one, the simulations for 8 and 4 bits of weights, and the integers of the first.

    A prepared model observes whatever runs through it, so that the images of an explanation would widen its ranges: it
    is converted first, and a copy of it is explained.
    """
    made: dict[str, nn.Module] = {"float": model}
    for bits in (8, 4):
        prepared = quant.prepare(model, batches[0], quant.Recipe(default=quant.QConfig(weight_bits=bits)))
        quant.calibrate.run(prepared, batches, progress=False)
        if bits == 8:
            made |= {"prepared": copy.deepcopy(prepared), "int8": quant.convert(prepared)}
        made[f"simulated, {bits}-bit weights"] = quant.prepare_qat(prepared).eval()
    return made


def run(model: nn.Module, batches: Sequence[Tensor], images: Tensor) -> Mapping[tuple[str, str], Outcome]:
    """The outcomes by method and form, for the class that the float model names."""
    made = forms(model, batches)
    with torch.no_grad():
        logits = {name: one(images) for name, one in made.items()}
    classes = logits["float"].argmax(1)
    assert torch.equal(logits["prepared"], logits["float"])
    simulated, int8 = logits["simulated, 8-bit weights"], logits["int8"]
    assert (simulated - int8).norm() < 0.01 * int8.norm()

    outcomes: dict[tuple[str, str], Outcome] = {}
    for method, name in ((integrated_gradients, "integrated gradients"), (occlusion, "occlusion")):
        for form, one in made.items():
            if form == "int8" and method is integrated_gradients:
                continue  # integers have no gradient
            first = outcomes.get((name, "float"))
            outcome = explained(one, method, images, classes, None if first is None else first.maps)
            outcomes[name, form] = outcome
            missing = "" if math.isnan(outcome.missing) else f", {100 * outcome.missing:.1f} % missing"
            print(f"{name:20} {form:24} cosine {outcome.like_float:.4f}, lowest {outcome.lowest:.3f}{missing}")
    assert torch.equal(
        outcomes["integrated gradients", "prepared"].maps, outcomes["integrated gradients", "float"].maps
    )
    return outcomes


def draw(path: Path, images: Tensor, outcomes: Mapping[tuple[str, str], Outcome], shown: int = 4) -> None:
    """The first images, and their maps in each form: red speaks for the class, blue against it."""
    from matplotlib.figure import Figure

    shown = min(shown, len(images))
    forms_by_method = {
        "integrated gradients": ("float", "simulated, 8-bit weights", "simulated, 4-bit weights"),
        "occlusion": ("float", "int8"),
    }
    wanted = [(method, form) for method, forms_ in forms_by_method.items() for form in forms_]
    figure = Figure(figsize=(1.25 * (1 + len(wanted)), 1.15 * shown + 0.5), dpi=120, layout="constrained")
    panels = figure.subplots(shown, 1 + len(wanted), squeeze=False)
    for row in range(shown):
        panels[row, 0].imshow(images[row, 0].numpy(), cmap="gray")
        for column, key in enumerate(wanted, 1):
            map_ = outcomes[key].maps[row, 0]
            most = float(outcomes[key[0], "float"].maps[row].abs().max())
            panels[row, column].imshow(map_.numpy(), cmap="RdBu_r", vmin=-most, vmax=most)
    panels[0, 0].set_title("image", fontsize=8)
    for column, (method, form) in enumerate(wanted, 1):
        panels[0, column].set_title("\n".join([method, *form.split(", ")]), fontsize=7)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", choices=[*MODELS], default="residual", help="of models.py (default residual)")
    parser.add_argument("--train", type=int, default=8192, help="images that it learns from, twice each (default 8192)")
    parser.add_argument("--images", type=int, default=100, help="to explain (default 100)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    try:
        seen, labels = (data[: options.train] for data in fashion.load("train"))
        unseen, right = fashion.load("test")
    except DataUnavailable as error:
        sys.exit(f"attributions: {error}")
    torch.manual_seed(0)
    model = MODELS[options.network]()
    fit(model, seen, labels, epochs=2, progress=options.network)
    for one in model.parameters():
        one.requires_grad_(False)
    print(f"{options.network}: {100 * accuracy(model, unseen[:2000], right[:2000]):.1f} % of 2,000 test images right")
    images = unseen[: options.images]
    outcomes = run(model, list(seen[:512].split(64)), images)
    assert outcomes["integrated gradients", "simulated, 8-bit weights"].like_float > 0.9
    assert outcomes["occlusion", "int8"].like_float > 0.99
    draw(options.out, images, outcomes)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

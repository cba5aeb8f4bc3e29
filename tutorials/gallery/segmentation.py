"""Segmentation by a U-Net: the class of each pixel in float, int8 and with 4-bit weights, and their overlap with truth.

    python tutorials/gallery/segmentation.py [--steps N] [--scenes N] [--out FILE.png]

Clothes of Fashion-MNIST lie on photos, some upon others, and a U-Net (Ronneberger, Fischer and Brox 2015) says of each
pixel what it belongs to. It is trained in the script, for three minutes on one core. Skip connections concatenate the
features of the way down with those of the way up, which transposed convolutions enlarge. Garments and photos that are
scored are in no training and no calibration. It ends in asserts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d
from tqdm import tqdm

import quant

sys.path.append(str(Path(__file__).parents[1]))  # the tutorials, where the data is
from zoo import fashion
from zoo.fetch import SCIKIT_IMAGE, DataUnavailable, fetch

OUT = Path(__file__).parents[1] / "out" / "segmentation.png"
SIDE = 64
GARMENTS = 3
"""In a scene."""

CLASSES = ("background", "top", "trousers", "shoe", "bag")
OF_FASHION = torch.tensor([1, 2, 1, 1, 1, 3, 1, 3, 4, 3])
"""The class of each class of Fashion-MNIST: T-shirts, pullovers, dresses, coats and shirts are tops."""

COLOURS = ("#20242b", "#c1440e", "#1f6f8b", "#e0a030", "#7fb069")


LINES = {"int8, 4-bit weights": "int8,\n4-bit weights", "int8 not as float": "int8 not\nas float"}
"""How the plot writes what is long."""


class UNet(nn.Module):
    """Images (N, 1, H, W), H and W multiples of 4 -> scores (N, 5, H, W)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList([twice(1, width), twice(width, 2 * width)])
        self.bottom = twice(2 * width, 4 * width)
        self.enlarge = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)]
        )
        self.up = nn.ModuleList([twice(4 * width, 2 * width), twice(2 * width, width)])
        self.scores = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(block(x))
            x = max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat((skips.pop(), enlarge(x)), 1))
        scores: Tensor = self.scores(x)
        return scores


def twice(channels: int, out: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with its norm and ReLU."""
    layers: list[nn.Module] = []
    for inputs in (channels, out):
        layers += [nn.Conv2d(inputs, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Material:
    """What scenes are made of.

    Attributes:
        photos: grey, (N, 1, h, w) with h and w of SIDE at least, in [0, 1].
        garments: (N, 1, 28, 28) in [0, 1], black where there is no cloth.
        classes: of the garments, (N,), indices of CLASSES.
    """

    photos: Tensor
    garments: Tensor
    classes: Tensor


def scenes(material: Material, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 1, SIDE, SIDE), about in [-1, 1], and the class of each pixel, int64 (count, SIDE, SIDE).

    A part of a photo, and garments, as many of each class, at random places, which may leave the image by a third.
    """
    draws = torch.Generator().manual_seed(seed)

    def below(end: int) -> int:
        return int(torch.randint(end, (), generator=draws))

    of_class = [(material.classes == kind).nonzero().flatten() for kind in material.classes.unique()]
    size = material.garments.shape[-1]
    over = size // 3
    images, truth = torch.empty(count, 1, SIDE, SIDE), torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for image, pixels in zip(images, truth, strict=True):
        photo = material.photos[below(len(material.photos))]
        top, left = below(photo.shape[1] - SIDE + 1), below(photo.shape[2] - SIDE + 1)
        image.copy_(photo[:, top : top + SIDE, left : left + SIDE])
        for _ in range(GARMENTS):
            kind = of_class[below(len(of_class))]
            which = int(kind[below(len(kind))])
            garment = material.garments[which, 0]
            garment = garment.flip(1) if below(2) else garment
            y, x = below(SIDE - size + 2 * over + 1) - over, below(SIDE - size + 2 * over + 1) - over
            inside = garment[max(-y, 0) : SIDE - y, max(-x, 0) : SIDE - x]
            place = (slice(max(y, 0), y + size), slice(max(x, 0), x + size))
            cloth = inside > 0.1
            image[0][place][cloth] = inside[cloth]
            pixels[place][cloth] = material.classes[which]
    return 2 * images - 1, truth


def load(train: bool) -> Material:
    """Garments and photos to train on, or the others.

    Raises:
        DataUnavailable: a package is not cached and cannot be fetched.
        quant.calibrate.DataError: Pillow, which reads the photos, is not installed.
    """
    garments, classes = fashion.load("train" if train else "test")
    folder = fetch(SCIKIT_IMAGE) / "skimage" / "data"
    photos = torch.cat(list(quant.calibrate.read(str(folder), batch_size=8, image_size=192, channels=1)))
    half = len(photos) // 2  # in the order of their names, in which photos of one thing are neighbours
    return Material(
        photos[:half] if train else photos[half:], garments * fashion.DEVIATION + fashion.MEAN, OF_FASHION[classes]
    )


def trained(material: Material, steps: int, *, batch: int = 16) -> UNet:
    """The float network."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=steps)
    for step in tqdm(range(steps), desc="U-Net", unit="batch", disable=None):
        images, truth = scenes(material, batch, seed=step)
        optimizer.zero_grad()
        cross_entropy(model(images), truth).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def overlaps(found: Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of each class, over all pixels; NaN of a class that is in neither."""
    pairs = torch.bincount((truth * len(CLASSES) + found).flatten(), minlength=len(CLASSES) ** 2)
    counts = pairs.reshape(len(CLASSES), len(CLASSES)).double()
    both = counts.diagonal()
    return both / (counts.sum(0) + counts.sum(1) - both)


def at_borders(truth: Tensor) -> Tensor:
    """Which pixels have one of another class among their eight neighbours, bool as truth (N, H, W)."""
    classes = truth.float()[:, None]
    return (max_pool2d(classes, 3, 1, 1) != -max_pool2d(-classes, 3, 1, 1)).squeeze(1)


@dataclass(frozen=True)
class Outcome:
    """One form of the network on scenes that it has not seen.

    Attributes:
        masks: the class of each pixel, int64 (N, SIDE, SIDE).
        each: intersection over union of each class.
        changed: share of pixels of which float says another class.
        changed_inside: share of these that lie at no border of the truth.
    """

    masks: Tensor
    each: Tensor
    changed: float
    changed_inside: float

    @property
    def mean(self) -> float:
        return float(self.each.nanmean())


def predicted(model: nn.Module, images: Tensor) -> Tensor:
    """The class of each pixel, int64 (N, SIDE, SIDE)."""
    with torch.inference_mode():
        return torch.cat([model(batch).argmax(1) for batch in images.split(50)])


def run(
    model: nn.Module, seen: Material, images: Tensor, truth: Tensor, *, calibrated_on: int = 256
) -> Mapping[str, Outcome]:
    """The outcomes by form; calibration sees so many scenes made of `seen`."""
    batches = list(scenes(seen, calibrated_on, seed=1_000_000)[0].split(16))
    forms = {
        "float": model,
        "int8": quant.quantize_static(model, batches, progress=False),
        "int8, 4-bit weights": quant.quantize_static(
            model, batches, quant.Recipe(default=quant.QConfig(weight_bits=4)), progress=False
        ),
    }
    outcomes: dict[str, Outcome] = {}
    inside = ~at_borders(truth)
    for name, one in forms.items():
        masks = predicted(one, images)
        other = masks != (outcomes["float"].masks if outcomes else masks)
        share = float(inside[other].double().mean()) if other.any() else 0.0
        outcome = outcomes[name] = Outcome(masks, overlaps(masks, truth), float(other.double().mean()), share)
        each = ", ".join(f"{kind} {value:.3f}" for kind, value in zip(CLASSES, outcome.each.tolist(), strict=True))
        print(
            f"{name:20} mean overlap {outcome.mean:.4f} ({each}); {100 * outcome.changed:.2f} % of the pixels are not "
            f"as in float, {100 * outcome.changed_inside:.0f} % of these at no border"
        )
    report = {entry.name: entry for entry in quant.summary(forms["int8"])}
    assert {entry.outcome for entry in report.values() if entry.bytes_before} == {"int8"}
    assert sum("folded into" in entry.detail for entry in report.values() if "BatchNorm" in entry.type) == 10
    return outcomes


def draw(path: Path, images: Tensor, truth: Tensor, outcomes: Mapping[str, Outcome], shown: int = 8) -> None:
    """The first scenes, what is in them, and the masks of each form; below, where int8 differs from float."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = {"scene": images[:, 0], "truth": truth, **{name: one.masks for name, one in outcomes.items()}}
    rows["int8 not as float"] = (outcomes["int8"].masks != outcomes["float"].masks).long()
    shown = min(shown, len(images))
    figure = Figure(figsize=(7.6, 0.85 * len(rows) + 0.4), dpi=120, layout="constrained")
    for axes, (name, values) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        strip = torch.cat([*nn.functional.pad(values[:shown].float(), (0, 2), value=torch.nan)], dim=1).numpy()
        colours = {"scene": "gray", "int8 not as float": ListedColormap(["#eeeeee", "#c1440e"])}
        top = {"scene": 1, "int8 not as float": 1}.get(name, len(CLASSES) - 1)
        axes.imshow(strip, cmap=colours.get(name, ListedColormap(COLOURS)), vmin=-1 if name == "scene" else 0, vmax=top)
        axes.set_ylabel(LINES.get(name, name), rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    key = [Patch(color=colour, label=name) for name, colour in zip(CLASSES, COLOURS, strict=True)]
    figure.legend(handles=key, loc="outside lower center", ncols=len(key), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800, help="of training, 16 scenes each (default 800)")
    parser.add_argument("--scenes", type=int, default=500, help="to score (default 500)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    try:
        seen, unseen = load(train=True), load(train=False)
    except (DataUnavailable, quant.calibrate.DataError) as error:
        sys.exit(f"segmentation: {error}")
    images, truth = scenes(unseen, options.scenes, seed=2_000_000)
    outcomes = run(trained(seen, options.steps), seen, images, truth)
    assert outcomes["float"].mean > 0.7, "the network has not learned to see"
    assert outcomes["int8"].mean > outcomes["float"].mean - 0.005
    assert outcomes["int8"].changed < 0.02
    draw(options.out, images, truth, outcomes)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

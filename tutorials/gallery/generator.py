"""A generator of images as a DCGAN has it, transposed convolutions and a tanh: its images in float, int8 and int4.

    python tutorials/gallery/generator.py [--steps N] [--out FILE.png]

The network is that of Radford, Metz and Chintala (2015), small: latent numbers become 4x4 features, and each transposed
convolution doubles the size. It learns to draw scenes of a disc before a sky from the numbers that describe them, which
takes a minute and needs no data and no discriminator; what int8 costs a generator is the same. Transposed convolutions
run as ordinary ones on more channels, tanh is a look-up in the last layer's integers. It ends in asserts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import quant

OUT = Path(__file__).parents[1] / "out" / "generator.png"
LATENT, SIZE = 8, 32


class Generator(nn.Module):
    """Latents (N, LATENT) in [-1, 1] -> images (N, 3, SIZE, SIZE) in [-1, 1]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(LATENT, 64 * width), nn.ReLU(), nn.Unflatten(1, (4 * width, 4, 4)))
        self.grow = nn.Sequential(
            *doubled(4 * width, 4 * width),
            *doubled(4 * width, 2 * width),
            nn.ConvTranspose2d(2 * width, 3, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, latents: Tensor) -> Tensor:
        images: Tensor = self.grow(self.first(latents))
        return images


def doubled(channels: int, out: int) -> list[nn.Module]:
    """Twice the size."""
    return [nn.ConvTranspose2d(channels, out, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


def scenes(latents: Tensor) -> Tensor:
    """The images that latents describe: a disc's place, radius and colour, and the sky's slope and shade."""
    ends = torch.linspace(-1, 1, SIZE)
    y, x = ends[:, None], ends[None, :]
    row, column, radius, *colour, slope, shade = (one[:, None, None] for one in latents.unbind(1))
    distance = ((x - 0.5 * column) ** 2 + (y - 0.5 * row) ** 2).sqrt()
    disc = torch.sigmoid(20 * (0.35 + 0.15 * radius - distance))[:, None]
    sky = (0.5 * shade + 0.4 * slope * y).expand(-1, SIZE, SIZE)[:, None] * torch.tensor([0.4, 0.7, 1.0])[:, None, None]
    return disc * torch.stack(colour, 1) + (1 - disc) * sky


def latents_of(count: int, seed: int) -> Tensor:
    """Uniform in [-1, 1]."""
    return 2 * torch.rand(count, LATENT, generator=torch.Generator().manual_seed(seed)) - 1


def trained(steps: int) -> Generator:
    """The float generator."""
    torch.manual_seed(0)
    model = Generator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        latents = latents_of(64, seed=step)
        optimizer.zero_grad()
        (model(latents) - scenes(latents)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@dataclass(frozen=True)
class Outcome:
    """Images of a form of the generator, and their peak signal to noise ratio in dB: to the scenes, and to float's."""

    images: Tensor
    to_scenes: float
    to_float: float


def psnr(images: Tensor, expected: Tensor) -> float:
    """In dB; the range of values is 2."""
    return float(10 * torch.log10(4 / (images - expected).square().mean()))


def run(steps: int = 500) -> Mapping[str, Outcome]:
    """The outcomes by form of the generator, for latents that it has not seen."""
    model = trained(steps)
    batches = [latents_of(32, seed=1_000_000 + one) for one in range(8)]
    forms = {
        "float": model,
        "int8": quant.quantize_static(model, batches, progress=False),
        "int4 weights": quant.quantize_static(
            model, batches, quant.Recipe({"grow*": quant.QConfig(weight_bits=4)}), progress=False
        ),
    }
    latents = latents_of(64, seed=2_000_000)
    with torch.inference_mode():
        images = {name: one(latents) for name, one in forms.items()}
    expected = scenes(latents)
    outcomes = {name: Outcome(one, psnr(one, expected), psnr(one, images["float"])) for name, one in images.items()}
    for name, one in outcomes.items():
        to_float = "" if name == "float" else f", {one.to_float:.1f} dB to float's images"
        print(f"{name:12} {one.to_scenes:.1f} dB to the scenes{to_float}")
    outcomes_of_layers = {entry.name: entry.outcome for entry in quant.summary(forms["int8"]) if entry.bytes_before}
    assert set(outcomes_of_layers.values()) == {"int8"}, outcomes_of_layers
    assert outcomes["int8"].to_float > 35
    assert outcomes["int8"].to_scenes > outcomes["float"].to_scenes - 0.5
    return outcomes


def draw(path: Path, outcomes: Mapping[str, Outcome], shown: int = 10) -> None:
    """The first images of each form below each other, and what int8 changed, ten times as strong."""
    from matplotlib.figure import Figure

    rows = {name: one.images[:shown] for name, one in outcomes.items()}
    rows["10 x (int8 - float)"] = (10 * (rows["int8"] - rows["float"])).clamp(-1, 1)
    figure = Figure(figsize=(7.2, 0.8 * len(rows)), dpi=120, layout="constrained")
    panels = figure.subplots(len(rows), 1)
    for axes, (name, images) in zip(panels, rows.items(), strict=True):
        axes.imshow(torch.cat([*images], dim=2).permute(1, 2, 0).numpy() / 2 + 0.5, interpolation="nearest")
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of training (default 500)")
    parser.add_argument("--out", type=Path, default=OUT, help="the images (default tutorials/out)")
    options = parser.parse_args(arguments)
    outcomes = run(options.steps)
    assert outcomes["float"].to_scenes > 20, "the generator has not learned to draw"
    draw(options.out, outcomes)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

"""Train the networks of models.py on Fashion-MNIST, once: their weights are kept for tutorials, tests and benchmarks.

    python tutorials/train_fashion.py [residual|depthwise|lstm|bilstm ...] [--seed N] [--epochs N]

A network takes a few minutes on one core. Its weights go to the cache folder beside the data, under a name that holds
the seed and a hash of the code that trains it: code that changes never meets weights that it would not make.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from models import MODELS
from quant.kernels.progress import progress_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from zoo import fashion
from zoo.fetch import DataUnavailable, cache_root

EPOCHS = 5
BATCH = 128


def trained(name: str, *, seed: int = 0, epochs: int = EPOCHS, progress: bool = True) -> nn.Module:
    """The network of that name in eval mode, trained now where no earlier run has left its weights.

    Raises:
        DataUnavailable: it has to be trained, and Fashion-MNIST is not cached and cannot be fetched.
    """
    torch.manual_seed(seed)
    model = MODELS[name]()
    path = weights_path(name, seed, epochs)
    if path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    fit(model, *fashion.load("train"), epochs=epochs, seed=seed, progress=name if progress else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, made)
        os.replace(made, path)
    return model.eval()


def weights_path(name: str, seed: int, epochs: int) -> Path:
    """Where `trained` keeps a network's weights."""
    here = Path(__file__).parent
    code = b"".join((here / file).read_bytes() for file in ("models.py", "train_fashion.py", "zoo/fashion.py"))
    made_by = hashlib.sha256(code).hexdigest()[:12]
    return cache_root().parent / "trained" / f"fashion-{name}-seed{seed}-{epochs}epochs-{made_by}.safetensors"


def fit(
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    *,
    epochs: int = EPOCHS,
    learning_rate: float = 0.005,
    seed: int = 0,
    progress: str | None = "training",
) -> None:
    """Train in place by AdamW with one cycle of the learning rate (Smith & Topin, arXiv:1708.07120).

    Args:
        learning_rate: the highest of the cycle.
        seed: of the order of the images, and of which are mirrored.
        progress: label of a progress bar on stderr; None for none.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    steps = epochs * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    model.train()
    with progress_of(progress, unit="batch", total=steps) as bar:
        for _ in range(epochs):
            for batch in torch.randperm(len(images), generator=generator).split(BATCH):
                mirrored = torch.rand(len(batch), generator=generator) < 0.5
                x = torch.where(mirrored.reshape(-1, 1, 1, 1), images[batch].flip(-1), images[batch])
                loss = nn.functional.cross_entropy(model(x), classes[batch], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                bar.update()
                bar.set_postfix_str(f"loss={loss.item():.3f}", refresh=False)
    model.eval()


def logits(model: nn.Module, images: Tensor, *, progress: str | None = None) -> Tensor:
    """What the model answers in eval mode, float32 (N, 10), computed 250 images at a time."""
    model.eval()
    batches, found = images.split(250), []
    bar = progress_of(progress, unit="batch", total=len(batches))
    with torch.inference_mode(), bar:
        for batch in batches:
            found.append(model(batch))
            bar.update()
    return torch.cat(found)


def accuracy(model: nn.Module, images: Tensor, classes: Tensor, *, progress: str | None = None) -> float:
    """Share of images whose class the model names first, in [0, 1]."""
    return (logits(model, images, progress=progress).argmax(1) == classes).double().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=f"of {', '.join(MODELS)} (default all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default 0)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default {EPOCHS}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(MODELS))
    if unknown:
        parser.error(f"no network {', '.join(unknown)}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    try:
        images, classes = fashion.load("test")
        for name in options.names or MODELS:
            model = trained(name, seed=options.seed, epochs=options.epochs)
            right = accuracy(model, images, classes)
            size = sum(p.numel() for p in model.parameters())
            print(f"{name:10} {size:7,} parameters  {100 * right:.2f} % of {len(images):,} test images right")
            print(f"{'':10} {weights_path(name, options.seed, options.epochs)}")
    except DataUnavailable as error:
        sys.exit(f"train_fashion: {error}")


if __name__ == "__main__":
    main()

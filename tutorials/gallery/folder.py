"""Image classification from folders: calibrate, score, report, save, load and run, in Python and from a shell.

    python tutorials/gallery/folder.py [--train N] [--test N] [--work FOLDER] [--out FILE.png]

The images lie as most do, `train/CLASS/IMAGE` and `test/CLASS/IMAGE`: here some of Fashion-MNIST, which the script
writes as .pgm files, so that nothing needs Pillow. A small residual CNN learns from the one folder in a minute, becomes
int8, and is scored on the other. `quant calibrate` makes the same model to the bit, and `quant run` gives its numbers.
It ends in asserts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quant
from quant.cli import main as quant_command

sys.path.append(str(Path(__file__).parents[1]))  # the tutorials, where the network and its data are
from models import ResidualCNN
from train_fashion import fit
from zoo import fashion
from zoo.fetch import DataUnavailable

OUT = Path(__file__).parents[1] / "out" / "folder.png"
READING = {"channels": 1, "mean": fashion.MEAN, "std": fashion.DEVIATION}
"""How files become inputs: grey, in [0, 1] by default, then (value - mean) / std. It is part of the model."""
CALIBRATED_ON = 256


def write_images(folder: Path, images: Tensor, classes: Tensor) -> None:
    """`folder/CLASS/00000.pgm` and so on; images as `fashion.load` gives them."""
    pixels = ((images[:, 0] * fashion.DEVIATION + fashion.MEAN) * 255).round().to(torch.uint8).numpy()
    for name in fashion.CLASSES:
        (folder / name).mkdir(parents=True)
    for index, (image, kind) in enumerate(zip(pixels, classes.tolist(), strict=True)):
        height, width = image.shape
        header = f"P5 {width} {height} 255\n".encode()
        (folder / fashion.CLASSES[kind] / f"{index:05}.pgm").write_bytes(header + image.tobytes())


def labels(folder: Path) -> tuple[list[str], Tensor]:
    """The classes, which are the names of the folders in order, and each image's, (N,), in the order of `read`."""
    names = sorted(path.name for path in folder.iterdir())
    return names, torch.tensor([names.index(path.parent.name) for path in sorted(folder.rglob("*.pgm"))])


def scores(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """The logits of all images, (N, classes)."""
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in batches])


def command(*words: object) -> None:
    """Run `quant` with these words, as a shell would."""
    line = [str(word) for word in words]
    print(f"$ quant {shlex.join(line)}")
    status = quant_command(line)
    assert status == 0, f"quant ended with status {status}"


@dataclass(frozen=True)
class Outcome:
    """Both forms on the test folder.

    Attributes:
        images: (N, 1, 28, 28), as the network takes them.
        names, classes: of the folders, and of the images, (N,).
        float, int8: logits, (N, len(names)).
    """

    images: Tensor
    names: list[str]
    classes: Tensor
    float: Tensor
    int8: Tensor

    def right(self, logits: Tensor) -> Tensor:
        """Which images are named right, bool (N,)."""
        return logits.argmax(1) == self.classes


def run(work: Path) -> Outcome:
    """All steps on `work/train` and `work/test`; what they write goes to `work` too."""
    names, classes = labels(work / "train")
    train = torch.cat(list(quant.calibrate.read(work / "train", **READING)))
    torch.manual_seed(0)
    model = ResidualCNN()
    fit(model, train, classes, epochs=2)
    save_file(model.state_dict(), work / "float.safetensors")

    # Some images of the training folder, in a random order: the first ones would be of one class.
    some = quant.calibrate.read(work / "train", limit=CALIBRATED_ON, shuffle=True, **READING)
    q = quant.quantize_static(model, some, progress=False)

    test_names, classes = labels(work / "test")
    assert test_names == names, f"test/ has {test_names}, and train/ has {names}"
    unseen = list(quant.calibrate.read(work / "test", **READING))
    outcome = Outcome(torch.cat(unseen), names, classes, scores(model, unseen), scores(q, unseen))
    before, after = outcome.right(outcome.float), outcome.right(outcome.int8)
    print(
        f"right of {len(classes):,} images: float {100 * before.double().mean():.2f} %, int8 "
        f"{100 * after.double().mean():.2f} %; {int((before & ~after).sum())} lost, {int((after & ~before).sum())} won"
    )
    report = quant.summary(q)
    print(f"{report.bytes_before / 1024:.0f} KiB of parameters became {report.bytes_after / 1024:.0f} KiB")

    comparison = quant.compare(model, q, unseen[:2])
    worst = comparison.steps[0]
    print(f"{worst.name} adds most error, {worst.own_sqnr:.1f} dB below its signal")
    (work / "report.html").write_text(quant.report_html(q, comparison, title="ResidualCNN"), encoding="utf-8")

    quant.save(q, work / "model.q8", runner=True)
    restored = quant.load(work / "model.q8", model=ResidualCNN())
    assert torch.equal(scores(restored, unseen), outcome.int8)

    in_shell(work, outcome)
    return outcome


def in_shell(work: Path, outcome: Outcome) -> None:
    """The same by `quant calibrate` and `quant run`, which give the same bits."""
    reading = [word for name, value in READING.items() for word in (f"--{name}", value)]
    # models:ResidualCNN is the class of tutorials/models.py, where a shell would be.
    where = ("--model", "models:ResidualCNN", "--weights", work / "float.safetensors", "--data", work / "train")
    some = ("--limit", CALIBRATED_ON, "--shuffle", "--quiet")
    command("calibrate", *where, *reading, *some, "--out", work / "by-shell.q8")
    by_shell = quant.load(work / "by-shell.q8", model=ResidualCNN())
    assert torch.equal(scores(by_shell, outcome.images.split(32)), outcome.int8)

    numpy.save(work / "images.npy", outcome.images[:32].numpy())
    command("run", work / "model.q8", "--input", work / "images.npy", "--output", work / "scores.npy")
    assert numpy.array_equal(numpy.load(work / "scores.npy"), outcome.int8[:32].numpy())


def draw(path: Path, outcome: Outcome, shown: int = 6) -> None:
    """The share named right of each class, and the images whose probabilities int8 changes most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 5.0), dpi=120, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    axes = above.subplots()
    places = numpy.arange(len(outcome.names))
    for name, logits, colour, shift in (
        ("float", outcome.float, "#888888", -0.2),
        ("int8", outcome.int8, "#1f6f8b", 0.2),
    ):
        right = outcome.right(logits)
        shares = [100 * float(right[outcome.classes == kind].double().mean()) for kind in range(len(places))]
        axes.bar(
            places + shift, shares, 0.38, color=colour, label=f"{name}, {100 * right.double().mean():.2f} % of all"
        )
    axes.set(ylabel="named right, %", ylim=(0, 100))
    axes.set_xticks(places, outcome.names, rotation=25, ha="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2)

    chances = {"float": outcome.float.softmax(1), "int8": outcome.int8.softmax(1)}
    changes = (chances["int8"] - chances["float"]).abs().amax(1)
    most = changes.argsort(descending=True)[:shown].tolist()
    below.suptitle("Where int8 changes the probabilities most", fontsize=10)
    for axes, index in zip(below.subplots(1, len(most), squeeze=False)[0], most, strict=True):
        axes.imshow(outcome.images[index, 0].numpy(), cmap="gray")
        truth = outcome.names[int(outcome.classes[index])]
        best = {form: one[index].max(0) for form, one in chances.items()}
        said = [f"{form}: {outcome.names[int(one.indices)]}, {one.values:.2f}" for form, one in best.items()]
        axes.set_title("\n".join([f"is: {truth}", *said]), fontsize=7, loc="left")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", type=int, default=8192, help="images to learn from, twice each (default 8192)")
    parser.add_argument("--test", type=int, default=2000, help="images to score (default 2000)")
    parser.add_argument("--work", type=Path, help="an empty folder for images, models and the report, which stays")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) if options.work is None else options.work
        try:
            for split, count in (("train", options.train), ("test", options.test)):
                images, classes = fashion.load(split)
                write_images(work / split, images[:count], classes[:count])
        except DataUnavailable as error:
            sys.exit(f"folder: {error}")
        outcome = run(work)
    before, after = (float(outcome.right(one).double().mean()) for one in (outcome.float, outcome.int8))
    assert before > 0.75, "the network has not learned"
    assert after > before - 0.01
    draw(options.out, outcome)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

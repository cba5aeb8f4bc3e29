"""What training for int8 reaches on Fashion-MNIST, by the loops of the tutorials: float, PTQ and QAT on 10,000 images.

Trained weights are kept in the cache outside the repository, under a hash of the code that made them. Settings were
chosen on training images held out; test images are scored once, after the last epoch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import display
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

import quant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

import qat_4bit
import qat_cnn
import qat_lstm
from train_fashion import EPOCHS as FLOAT_EPOCHS
from train_fashion import accuracy, logits, trained
from zoo import fashion
from zoo.fetch import cache_root

TUTORIALS = Path(qat_cnn.__file__).parent
CALIBRATION = 512
SAME = 0.999
"""Share of the images for which the int8 model names the trained model's class, at least."""


@dataclass(frozen=True)
class Study:
    """A network and how it is rounded.

    Attributes:
        network: of tutorials/models.py.
        recipe: of PTQ.
        epochs: of QAT.
        points: by which QAT may be below float, in per cent of the test images.
        prepare: (float model, images) -> the model to train.
        train: `train` of a tutorial.
        taught: the float model is its teacher.
        recovers: PTQ is to lose more than those points.
        start: (float model, images) -> the float model that PTQ rounds; None for the same.
    """

    title: str
    network: str
    recipe: quant.Recipe
    epochs: int
    points: float
    prepare: Callable[[nn.Module, Tensor], nn.Module]
    train: Callable[..., None]
    taught: bool = False
    recovers: bool = False
    start: Callable[[nn.Module, Tensor], nn.Module] | None = None


INT8 = quant.Recipe()

STUDIES = {
    "cnn": Study("depthwise CNN, int8", "depthwise", INT8, 1, 0.1, qat_cnn.prepare, qat_cnn.train),
    "lstm": Study("LSTM classifier, int8", "lstm", INT8, 2, 0.2, qat_cnn.prepare, qat_lstm.train),
    "4bit": Study("depthwise CNN, 4-bit weights, a scale a layer", "depthwise", qat_4bit.PTQ, 3, 1.0,
                  qat_4bit.prepare, qat_4bit.train, True, True, qat_4bit.equalized),
}  # fmt: skip


LEGEND = f"""
float, PTQ, QAT: per cent of the 10,000 test images right by the converted models, the mean of the seeds
PTQ of 4 bits: of the equalised model, which QAT begins with
epochs: what QAT trains after the float model's {FLOAT_EPOCHS}, from its weights
points: QAT minus float; limit, on the mean; worst: of a single seed
whole: largest where recurrent layers are simulated over whole sequences; one step off is fed back and grows: no limit
same: per cent of the images to which int8 and the trained model give one class, least of the seeds; limit {100 * SAME}
unequal: per cent of the uint8 values, over all steps, that differ from the trained model's; largest: by how many steps
ok: points within the limit, same, and no step more than one off; for 4 bits also that PTQ breaks the limit"""


@dataclass(frozen=True)
class Run:
    """One study with one seed: accuracies in [0, 1], parity, the seconds that QAT took (None: from the cache).

    `largest` is of a recurrent layer at one time step; `whole` over whole sequences, None where none is recurrent.
    """

    study: str
    seed: int
    before: float
    ptq: float
    qat: float
    same: float
    unequal: float
    largest: float
    holds: bool
    seconds: float | None
    whole: float | None = None


def run(key: str, seed: int, *, fresh: bool) -> Run:
    """Train or load, convert, and score."""
    study = STUDIES[key]
    x, classes = fashion.load("train")
    test, test_classes = fashion.load("test")
    model = trained(study.network, seed=seed)
    start = study.start(model, x) if study.start else model
    ptq = quant.quantize_static(start, x[:CALIBRATION].split(64), study.recipe, progress=False)
    p, seconds = _trained(key, model, x, classes, seed, fresh=fresh)
    q = quant.convert(p)
    answers = logits(q, test)
    same = (answers.argmax(1) == logits(p, test).argmax(1)).double().mean().item()
    agreement = quant.parity(
        p, q, tqdm(test.split(250), desc=f"{key}, seed {seed}, parity", unit="batch", disable=None)
    )
    return Run(
        key,
        seed,
        accuracy(model, test, test_classes),
        accuracy(ptq, test, test_classes),
        (answers.argmax(1) == test_classes).double().mean().item(),
        same,
        agreement.unequal,
        max(step.worst for step in agreement if step.integer),
        agreement.holds,
        seconds,
        max((step.whole for step in agreement if step.whole is not None), default=None),
    )


def _trained(
    key: str, model: nn.Module, x: Tensor, classes: Tensor, seed: int, *, fresh: bool
) -> tuple[nn.Module, float | None]:
    study, path = STUDIES[key], _weights_path(key, seed)
    torch.manual_seed(seed)
    p = study.prepare(model, x)
    if path.is_file() and not fresh:
        p.load_state_dict(load_file(path))
        return p.eval(), None
    start = time.perf_counter()
    options = {"teacher": model} if study.taught else {}
    study.train(p, x, classes, epochs=study.epochs, seed=seed, **options)
    seconds = time.perf_counter() - start
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        save_file({name: tensor.contiguous().clone() for name, tensor in p.state_dict().items()}, made)
        os.replace(made, path)
    return p.eval(), seconds


def _weights_path(key: str, seed: int) -> Path:
    code = [TUTORIALS / name for name in ("models.py", "train_fashion.py", "zoo/fashion.py", "qat_cnn.py")]
    code += [TUTORIALS / "qat_lstm.py"] * (key == "lstm") + [TUTORIALS / "qat_4bit.py"] * (key == "4bit")
    code += [Path(quant.__file__).with_name("equalize.py")] * (key == "4bit")
    for package in (quant.observers, quant.qat):
        assert package.__file__ is not None
        code += sorted(Path(package.__file__).parent.glob("*.py"))
    study = STUDIES[key]
    settings = f"{study.network} {study.recipe} {study.epochs}".encode()
    made_by = hashlib.sha256(settings + b"".join(file.read_bytes() for file in code)).hexdigest()[:12]
    return cache_root().parent / "trained" / f"qat-{key}-seed{seed}-{made_by}.safetensors"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(study: Study, runs: Sequence[Run]) -> str:
    """ "ok", or what is wrong, of the runs of one study."""
    wrong = []
    points = 100 * mean([one.qat - one.before for one in runs])
    if points < -study.points - 1e-6:
        wrong.append("WORSE than float")
    if study.recovers and 100 * mean([one.ptq - one.before for one in runs]) >= -study.points:
        wrong.append("PTQ keeps the limit TOO")
    if min(one.same for one in runs) < SAME:
        wrong.append("CLASSES not those trained")
    if not all(one.holds for one in runs):
        wrong.append("values MORE than one step off")
    return "; ".join(wrong) or "ok"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _study_row(study: Study, runs: Sequence[Run]) -> list[str]:
    shares = [mean(values) for values in zip(*((r.before, r.ptq, r.qat) for r in runs), strict=True)]
    apart = [100 * (one.qat - one.before) for one in runs]
    points = [f"{mean(apart):+.2f}", f"-{study.points}", f"{min(apart):+.2f}"]
    agreement = [_percent(min(one.same for one in runs)), f"{100 * max(one.unequal for one in runs):.4f}"]
    largest = f"{max(one.largest for one in runs):.0f}"
    return [study.title, *map(_percent, shares), str(study.epochs), *points, *agreement, largest, verdict(study, runs)]


def _run_row(one: Run) -> list[str]:
    shares = map(_percent, (one.before, one.ptq, one.qat))
    whole = "" if one.whole is None else f"{one.whole:.0f}"
    took = "kept" if one.seconds is None else f"{one.seconds:.0f} s"
    points = f"{100 * (one.qat - one.before):+.2f}"
    return [f"{one.study}, seed {one.seed}", *shares, points, _percent(one.same), whole, took]


def table(runs: Sequence[Run]) -> str:
    """A line a study, then a line a run."""
    by_study = {key: [one for one in runs if one.study == key] for key in STUDIES}
    measured = ["points", "limit", "worst", "same", "unequal", "largest", "verdict"]
    header = ["Fashion-MNIST", "float", "PTQ", "QAT", "epochs", *measured]
    studies = display.table(header, [_study_row(STUDIES[key], found) for key, found in by_study.items() if found])
    header = ["each seed", "float", "PTQ", "QAT", "points", "same", "whole", "training"]
    return f"{studies}\n{LEGEND}\n\n{display.table(header, [_run_row(one) for one in runs])}"


def float_models(keys: Sequence[str], seeds: Sequence[int]) -> None:
    """Train the float networks that are not kept yet."""
    for network in dict.fromkeys(STUDIES[key].network for key in keys):
        for seed in seeds:
            trained(network, seed=seed, epochs=FLOAT_EPOCHS)

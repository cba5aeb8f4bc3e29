"""The tutorials on training for int8: each runs to its asserts on few images, and their page shows lines they have."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quant

TUTORIALS = Path(__file__).parents[2] / "tutorials"
SCRIPTS = ("qat_cnn", "qat_lstm", "qat_4bit")
PAGE = TUTORIALS / "qat.md"
IMAGES = 512


@pytest.fixture
def quickly(train_fashion: ModuleType, monkeypatch: pytest.MonkeyPatch, fashion_data: None) -> ModuleType:
    """Lets the tutorials begin with networks that were trained for seconds."""

    def trained(name: str) -> torch.nn.Module:
        torch.manual_seed(0)
        model: torch.nn.Module = train_fashion.MODELS[name]()
        images, classes = (data[:2048] for data in train_fashion.fashion.load("train"))
        train_fashion.fit(model, images, classes, epochs=2, learning_rate=0.01, progress=None)
        return model

    monkeypatch.setattr(train_fashion, "trained", trained)
    return train_fashion


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_to_its_asserts(
    name: str,
    quickly: ModuleType,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tutorial = request.getfixturevalue(name)
    monkeypatch.setattr(tutorial, "trained", quickly.trained)
    picture = tmp_path / "out" / "curve.png"
    before, ptq, qat = tutorial.tutorial(1, IMAGES, picture)
    assert len(qat) == 1
    rounded = ptq.values() if isinstance(ptq, dict) else [ptq]
    assert all(0.0 <= value <= 1.0 for value in (before, *rounded, *qat))
    assert before > 0.3  # chance is 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"of {IMAGES} images right" in capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_missing_data_is_said_in_a_line(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tutorial = request.getfixturevalue(name)

    def absent(split: str) -> None:
        raise tutorial.DataUnavailable("fashion-mnist: not here")

    monkeypatch.setattr(tutorial.fashion, "load", absent)
    with pytest.raises(SystemExit, match=f"{name}: fashion-mnist: not here"):
        tutorial.main([])


def test_a_full_run_that_misses_its_bar_fails(qat_cnn: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qat_cnn, "tutorial", lambda *arguments: (0.91, 0.9, [0.90, 0.908]))
    with pytest.raises(AssertionError, match=r"more than 0\.1 points lost"):
        qat_cnn.main([])
    qat_cnn.main(["--images", "512"])  # too few to hold it to that


@pytest.mark.parametrize(("ptq", "panels"), [(0.9, 1), (0.3, 2)], ids=["near", "fallen"])
def test_the_picture_shows_every_level(
    ptq: float, panels: int, qat_cnn: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    qat_cnn.draw(tmp_path / "curve.png", "title", 0.91, {"PTQ": ptq}, {"QAT": [0.89, 0.905]})
    limits = [axes.get_ylim() for axes in drawn[0].axes]
    assert len(limits) == panels
    for value in (91.0, 100 * ptq, 89.0, 90.5):
        assert sum(low < value < high for low, high in limits) == 1
    assert all(high - low >= 2.0 for low, high in limits)


def test_learned_scales_do_not_decay(qat_4bit: ModuleType, train_fashion: ModuleType) -> None:
    p = qat_4bit.prepare(train_fashion.MODELS["depthwise"](), torch.randn(128, 1, 28, 28))
    weights, scales = qat_4bit.optimizer_of(p).param_groups
    assert len(scales["params"]) == 10  # the stem, four blocks of two, the head
    assert all(one.shape == (1,) for one in scales["params"])
    assert scales["weight_decay"] == 0.0 < weights["weight_decay"]
    assert quant.check_optimizer(p, qat_4bit.optimizer_of(p)) == []


def test_training_repeats(qat_cnn: ModuleType, train_fashion: ModuleType) -> None:
    images, classes = torch.randn(64, 1, 28, 28), torch.arange(64) % 10

    def once() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        p = qat_cnn.prepare(train_fashion.MODELS["depthwise"](), images)
        qat_cnn.train(p, images, classes, epochs=5, progress=None)
        state: dict[str, torch.Tensor] = p.state_dict()
        return state

    first, second = once(), once()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_page_shows_the_scripts() -> None:
    lines = {line.strip() for name in SCRIPTS for line in (TUTORIALS / f"{name}.py").read_text().splitlines()}
    shown = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    assert [line for block in shown for line in block.splitlines() if line.strip() not in lines] == []

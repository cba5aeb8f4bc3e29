"""The gallery: each script with little training, its asserts included; and that its page shows what it draws."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from torch import nn

import quant

from ..zoo.torchvision_ops import import_torchvision
from .conftest import TUTORIALS, load

GALLERY = TUTORIALS / "gallery"
PAGES = TUTORIALS.parent / "docs" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py"))


def script(name: str) -> ModuleType:
    return load(f"octet_gallery_{name}", GALLERY / f"{name}.py")


@pytest.mark.parametrize("name", NAMES)
def test_every_script_has_a_page_with_its_picture(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert f"python tutorials/gallery/{name}.py" in page
    [suffix] = {path.suffix for path in (PAGES.parent / "pictures").glob(f"{name}.*")}
    assert f"../pictures/{name}{suffix}" in page


def drawn(path: Path) -> None:
    assert path.stat().st_size > 1000


def test_int8_and_int4_tables_recommend_as_float_does(tmp_path: Path) -> None:
    module = script("recommender")
    outcomes = module.run(steps=40)
    assert set(outcomes) == {"float", "int8", "int4 tables", "int4"}
    assert outcomes["float"].hit_rate > 0.03  # a guess has 0.025
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    module.draw(tmp_path / "out" / "plot.svg", outcomes)
    drawn(tmp_path / "out" / "plot.svg")


def test_the_carts_fall_where_nobody_pushes_well() -> None:
    module = script("policy")
    always_right, _ = module.returns(lambda state: numpy.ones(state.shape[:-1], bool), module.starts(20, seed=0))
    assert 5 <= always_right.mean() <= 12  # known of the environment: 8 to 10 steps
    upright = numpy.zeros(4)
    pushed = module.stepped(upright, numpy.array(True))
    assert (pushed[1] > 0, pushed[3] < 0) == (True, True)
    assert numpy.allclose(module.stepped(upright, numpy.array(False)), -pushed)


def test_an_int8_policy_has_the_return_of_float(tmp_path: Path) -> None:
    module = script("policy")
    found, curve = module.run(rounds=8, carts=20)
    assert len(curve) == 8
    assert curve[-1] > 50
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    module.draw(tmp_path / "plot.svg", found, curve)
    drawn(tmp_path / "plot.svg")


def test_a_batch_of_policies_acts_as_each_of_them() -> None:
    module = script("policy")
    weights = numpy.random.default_rng(0).normal(size=(3, 7 * module.HIDDEN + 2))
    states = numpy.random.default_rng(1).normal(size=(3, 50, 4))
    together = module.of_many(weights)(states)
    for index in range(3):
        alone = module.of_module(module.network(weights[index]))(states[index])
        assert (alone == together[index]).mean() > 0.97  # float32 against float64


def test_int8_images_are_those_of_float(tmp_path: Path) -> None:
    module = script("generator")
    outcomes = module.run(steps=30)
    assert outcomes["int8"].images.shape == (64, 3, 32, 32)
    assert outcomes["int4 weights"].to_float < outcomes["int8"].to_float
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    module.draw(tmp_path / "images.png", outcomes)
    drawn(tmp_path / "images.png")


def test_scenes_are_what_latents_say() -> None:
    module = script("generator")
    latents = torch.zeros(1, module.LATENT)
    latents[0, 3:6] = 1  # a white disc
    [image] = module.scenes(latents)
    assert image[:, 16, 16].min() > 0.9
    assert image[:, 0, 0].abs().max() < 0.1


def test_shares_are_random_and_add_up() -> None:
    module = script("secret_shares")
    secret = numpy.arange(-1000, 1000)
    shares = module.shared(secret, numpy.random.default_rng(0))
    assert numpy.array_equal(module.together(shares), secret)
    assert all(2**31 * 0.9 < share.mean() < 2**31 * 1.1 for share in shares)


def test_a_layer_on_shares_is_exact(tmp_path: Path) -> None:
    module = script("secret_shares")
    shares, secret = module.run(rows=8, inputs=64, outputs=16)
    assert numpy.array_equal(module.together(shares), secret)
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    module.draw(tmp_path / "plot.svg", shares, secret)
    drawn(tmp_path / "plot.svg")


@pytest.fixture
def attributions(train_fashion: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("attributions")


def test_attributions_of_a_linear_model_are_its_weights_times_what_is_seen(attributions: ModuleType) -> None:
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), torch.randn(3, 1, 28, 28)
    classes = torch.tensor([1, 7, 1])
    expected = model[1].weight[classes].reshape(3, 1, 28, 28).detach() * (images - attributions.BLACK)
    torch.testing.assert_close(attributions.integrated_gradients(model, images, classes), expected)
    patches = nn.functional.avg_pool2d(expected, attributions.PATCH, divisor_override=1)
    hidden = nn.functional.interpolate(patches, scale_factor=attributions.PATCH)
    torch.testing.assert_close(attributions.occlusion(model, images, classes), hidden, atol=1e-5, rtol=1e-4)


def test_int8_is_explained_as_float_is(
    attributions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attributions, "STEPS", 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
    images = torch.rand(64, 1, 28, 28)
    outcomes = attributions.run(model, [images], images)
    assert outcomes["occlusion", "int8"].like_float > 0.9
    assert ("integrated gradients", "int8") not in outcomes
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    attributions.draw(tmp_path / "maps.png", images[:1], outcomes)
    drawn(tmp_path / "maps.png")


@pytest.fixture
def translation(zoo: ModuleType, g2p: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("translation")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "null"),
        (1, "eins"),
        (21, "ein und zwanzig"),
        (101, "ein hundert eins"),
        (1000, "ein tausend"),
        (243_517, "zwei hundert drei und vierzig tausend fünf hundert siebzehn"),
        (101_001, "ein hundert ein tausend eins"),
    ],
)
def test_german_numbers(number: int, words: str, translation: ModuleType) -> None:
    assert " ".join(translation.german(number)) == words


def test_beams_find_what_one_word_at_a_time_misses(translation: ModuleType) -> None:
    """After the likelier first word, 1, everything is unlikely; 0 is the end, 3 the start."""
    after = torch.tensor([[1.0, 0, 0, 0], [0.4, 0.3, 0.3, 0], [0.9, 0.05, 0.05, 0], [0, 0.6, 0.4, 0]]).log()

    def following(words: torch.Tensor, state: tuple[torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        return after[words], (words,)

    starts = (torch.zeros(3, dtype=torch.int64),)
    assert translation.beam_search(following, starts, 1, start=3, end=0, longest=4) == [[1]] * 3
    assert translation.beam_search(following, starts, 2, start=3, end=0, longest=4) == [[2]] * 3


def test_the_cache_changes_nothing(translation: ModuleType) -> None:
    torch.manual_seed(0)
    model = translation.Translator(translation.Encoder(), translation.Decoder()).eval()
    source = translation.encoded([translation.english(n) for n in (7, 40_321)], translation.ENGLISH)
    words = torch.randint(3, len(translation.GERMAN), (2, 6))
    with torch.inference_mode():
        read, past, scores = model.encoder(source), (), []
        for place in range(6):
            one, past = model.decoder(words[:, place : place + 1], read, past)
            scores.append(one)
        torch.testing.assert_close(torch.cat(scores, 1), model(source, words), atol=1e-5, rtol=1e-4)


def test_int8_translates_as_float_does(translation: ModuleType, tmp_path: Path) -> None:
    outcomes = translation.run(steps=40, count=30)
    assert outcomes["float"].same == 1
    assert min(outcomes["dynamic int8"].same, outcomes["static int8"].same) > 0.5
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    translation.draw(tmp_path / "plot.svg", {"numbers": outcomes})
    drawn(tmp_path / "plot.svg")


def test_beams_pronounce_as_well_in_int8(translation: ModuleType, g2p_data: None) -> None:
    outcomes = translation.run_g2p(100)
    assert outcomes["float"].right > 0.6
    assert outcomes["dynamic int8"].same > 0.9


@pytest.fixture
def folder(train_fashion: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("folder")


def test_files_hold_the_images_under_their_classes(folder: ModuleType, tmp_path: Path) -> None:
    pixels = torch.randint(256, (12, 1, 28, 28)) / 255
    images = (pixels - folder.fashion.MEAN) / folder.fashion.DEVIATION
    classes = torch.arange(12) % 10
    folder.write_images(tmp_path / "train", images, classes)
    names, found = folder.labels(tmp_path / "train")
    assert names == sorted(folder.fashion.CLASSES)
    [read] = quant.calibrate.read(tmp_path / "train", **folder.READING)
    order = [index for name in names for index in range(12) if folder.fashion.CLASSES[index % 10] == name]
    assert [names[kind] for kind in found.tolist()] == [folder.fashion.CLASSES[index % 10] for index in order]
    torch.testing.assert_close(read, images[order])


def test_folders_become_an_int8_model_in_python_and_in_a_shell(
    folder: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = quant.kernels.available()["native"]
    if missing:
        pytest.skip(f"`quant run` needs the native backend: {missing}")
    torch.manual_seed(0)
    classes = torch.arange(200) % 10
    images = torch.randn(10, 1, 28, 28)[classes] + 0.3 * torch.randn(200, 1, 28, 28)
    folder.write_images(tmp_path / "train", images[:160], classes[:160])
    folder.write_images(tmp_path / "test", images[160:], classes[160:])
    outcome = folder.run(tmp_path)
    assert outcome.int8.shape == (40, 10)
    assert (outcome.int8 - outcome.float).norm() < 0.2 * outcome.float.norm()
    assert "$ quant run" in capsys.readouterr().out
    assert "ResidualCNN" in (tmp_path / "report.html").read_text()
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    folder.draw(tmp_path / "plot.png", outcome)
    drawn(tmp_path / "plot.png")


@pytest.fixture
def segmentation(fashion: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("segmentation")


def test_overlap_and_borders_of_masks(segmentation: ModuleType) -> None:
    truth = torch.zeros(1, 4, 6, dtype=torch.int64)
    truth[:, :, 3:] = 2
    found = truth.clone()
    found[:, :, 3] = 0
    overlaps = segmentation.overlaps(found, truth)
    assert overlaps[[0, 2]].tolist() == [12 / 16, 8 / 12]
    assert overlaps[[1, 3, 4]].isnan().all()
    assert segmentation.at_borders(truth)[0, 0].tolist() == [False, False, True, True, False, False]


def test_scenes_show_what_their_masks_say(segmentation: ModuleType) -> None:
    photos, garments = torch.zeros(2, 1, 80, 80), torch.ones(3, 1, 28, 28)
    material = segmentation.Material(photos, garments, torch.tensor([1, 2, 4]))
    images, truth = segmentation.scenes(material, 20, seed=0)
    assert torch.equal(images[:, 0] == 1, truth > 0)
    assert set(truth.unique().tolist()) == {0, 1, 2, 4}
    assert truth.bool().double().mean() < 3 * 28 * 28 / 64**2
    assert all(torch.equal(*pair) for pair in zip(segmentation.scenes(material, 20, 0), (images, truth), strict=True))


def test_int8_masks_are_those_of_float(segmentation: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = torch.zeros(4, 1, 28, 28)
    for kind, shape in enumerate(shapes[:, 0]):
        shape[2 + 4 * kind :, 4:20] = 0.4 + 0.15 * kind
    material = segmentation.Material(0.1 * torch.rand(3, 1, 80, 80), shapes, torch.tensor([1, 2, 3, 4]))
    model = segmentation.trained(material, steps=15, batch=4)
    images, truth = segmentation.scenes(material, 8, seed=2)
    outcomes = segmentation.run(model, material, images, truth, calibrated_on=32)
    assert outcomes["float"].changed == 0
    assert outcomes["int8"].changed < 0.05
    assert outcomes["int8"].changed < outcomes["int8, 4-bit weights"].changed
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    segmentation.draw(tmp_path / "masks.png", images[:3], truth[:3], outcomes)
    drawn(tmp_path / "masks.png")


@pytest.fixture
def speech(silero: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("speech")


def synthetic(speech: ModuleType) -> object:
    """What there is without silero's weights: a second of a buzz, a second of faint noise, and so on."""
    audio = speech.silero.synthetic(8.0)
    frames = torch.arange(len(audio) // speech.silero.FRAME)
    audio = audio[: len(frames) * speech.silero.FRAME]
    return speech.Recording(audio, frames * speech.silero.FRAME % 32_000 < 16_000)


def test_a_listener_looks_at_nothing_that_is_to_come(speech: ModuleType) -> None:
    torch.manual_seed(0)
    model, spectra = speech.Listener().eval(), torch.randn(2, speech.BANDS, 40)
    scores = speech.whole(model, spectra)
    assert scores.shape == (2, 20)
    for frames in (1, 3, 7):
        torch.testing.assert_close(speech.streamed(model, spectra, frames=frames), scores)
    later = spectra.clone()
    later[:, :, 20:] = 0
    torch.testing.assert_close(speech.whole(model, later)[:, :10], scores[:, :10])
    assert not torch.allclose(speech.whole(model, later)[:, 10:], scores[:, 10:])
    audio = torch.randn(1, 20 * speech.HOP)
    assert torch.equal(speech.spectra_of(audio)[..., :7], speech.spectra_of(audio[:, : 7 * speech.HOP]))


def test_noise_hides_no_truth(speech: ModuleType) -> None:
    recording = synthetic(speech)
    spectra, truth = speech.mixed(recording, 64, 50, seed=0)
    assert spectra.shape == (50, speech.BANDS, 128)
    assert 0.1 < truth.mean() < recording.speech.float().mean()  # stretches of it are silent
    loud = spectra.mean(1).reshape(50, 64, 2).mean(2)
    assert loud[truth > 0].mean() > loud[truth == 0].mean() + 0.1


def test_int8_hears_a_stream_as_float_does(speech: ModuleType, tmp_path: Path) -> None:
    recording = synthetic(speech)
    model = speech.trained(recording, 20, frames=32, batch=8)
    spectra, truth = speech.mixed(recording, 48, 4, seed=1)
    outcomes = speech.run(model, recording, spectra, truth)
    assert set(outcomes) == {"float", "dynamic int8", "static int8", "static, 4-bit weights"}
    assert outcomes["float"].as_float == 1
    for name in ("dynamic int8", "static int8"):
        assert outcomes[name].as_float > 0.9
        assert outcomes[name].as_whole < 0.05
        assert outcomes[name].kib < outcomes["float"].kib
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    speech.draw(tmp_path / "plot.svg", spectra, truth, outcomes)
    drawn(tmp_path / "plot.svg")


@pytest.fixture
def detector() -> ModuleType:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("the detectors are torchvision's: pip install torchvision")
    import_torchvision()
    return script("detector")


def test_a_convolution_class_of_ones_own_needs_no_registration(detector: ModuleType) -> None:
    detector.run_wrapped()


def test_boxes_are_found_again_with_their_label(detector: ModuleType) -> None:
    box = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]])
    wanted = [{"boxes": box, "labels": torch.tensor([1, 2])}]
    shifted = [{"boxes": box[[1, 0]] + torch.tensor([0.0, 0.0, 0.0, 10.0]), "labels": torch.tensor([1, 1])}]
    assert detector.overlaps(shifted, wanted) == [0.5, 0.0]
    nothing = [{"boxes": torch.empty(0, 4), "labels": torch.empty(0, dtype=torch.int64)}]
    assert detector.overlaps(nothing, wanted) == [0.0, 0.0]


def test_int8_detects_what_float_does(detector: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outcome = detector.run("Faster R-CNN", detector.faster_rcnn(), 3)  # fewer than the picture has room for
    assert outcome.again > outcome.chance
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    detector.draw(tmp_path / "boxes.png", {"Faster R-CNN": outcome})
    drawn(tmp_path / "boxes.png")

"""EfficientNet-Lite0 and its photos: the published class with the published weights answers as it was scored."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch


def test_names_the_labelled_photos(efficientnet: ModuleType, efficientnet_data: None) -> None:
    model = efficientnet.load()
    photos, classes = efficientnet.labelled()
    assert photos.shape == (20, 3, 224, 224)
    assert photos.min() >= -127 / 128
    assert photos.max() <= 1
    with torch.inference_mode():
        right = (model(photos).argmax(1) == classes).sum().item()
    assert right == 18


def test_the_class_is_the_publisher_s(efficientnet: ModuleType, efficientnet_data: None) -> None:
    before = list(sys.path)
    kinds = {type(module).__qualname__ for module in efficientnet.load().modules()}
    assert "Conv2dStaticSamePadding" in kinds  # the subclass with a forward of its own
    assert sys.path == before


def test_calibration_photos_are_others_and_repeatable(efficientnet: ModuleType, efficientnet_data: None) -> None:
    photos = efficientnet.calibration(2)
    assert photos.shape == (34, 3, 224, 224)
    assert torch.equal(photos, efficientnet.calibration(2))
    assert not torch.equal(photos[17:], efficientnet.calibration(2, seed=1)[17:])
    assert torch.equal(photos[:17], efficientnet.calibration())
    scored, _ = efficientnet.labelled()
    nearest = torch.cdist(photos.flatten(1), scored.flatten(1)).min() / scored[0].numel() ** 0.5
    assert nearest > 0.2  # root mean square per pixel: no two are one photo


@pytest.mark.parametrize("size", [(512, 512), (300, 900), (901, 300)])
def test_parts_lie_inside_the_photo(efficientnet: ModuleType, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    boxes = [efficientnet._middle(*size), *(efficientnet._part(*size, generator) for _ in range(200))]
    for left, upper, right, lower in boxes:
        assert 0 <= left < right <= size[0] + 1e-9
        assert 0 <= upper < lower <= size[1] + 1e-9
    assert len(set(boxes)) == 201


def test_says_that_pillow_is_missing(
    efficientnet: ModuleType, fetch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(fetch.DataUnavailable, match=r"a\.png: reading photos needs Pillow"):
        efficientnet.photo(efficientnet.Path("a.png"))

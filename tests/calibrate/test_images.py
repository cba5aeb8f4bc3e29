"""Images as tensors: netpbm in its four kinds, resizing, and Pillow where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from quant.calibrate import DataError
from quant.calibrate.images import fit, read_image, read_netpbm

needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is missing")

RGB = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10  # 2 high, 4 wide
GREY = np.arange(8, dtype=np.uint8).reshape(2, 4) * 30

FILES = {
    "P6": (b"P6\n4 2\n255\n" + RGB.tobytes(), RGB),
    "P6 with comments": (b"P6 # made by hand\n#\n4\n# height\n2 255\n" + RGB.tobytes(), RGB),
    "P5": (b"P5 4 2 255\n" + GREY.tobytes(), GREY[..., None]),
    "P5 that begins like space": (b"P5 4 2 255\n" + bytes([32, 10, 35, 9, 0, 1, 2, 3]), None),
    "P5 of 16 bits": (
        b"P5 4 2 65535\n" + (GREY.astype(">u2") * 250).astype(">u2").tobytes(),
        GREY[..., None] * (250 / 257),
    ),
    "P5 of 1 bit": (b"P5 4 2 1\n" + (GREY > 60).astype(np.uint8).tobytes(), (GREY > 60)[..., None] * 255),
    "P2": (b"P2\n4 2\n255\n" + " ".join(map(str, GREY.flatten())).encode(), GREY[..., None]),
    "P3": (b"P3\n4 2\n255\n" + "\n".join(map(str, RGB.flatten())).encode(), RGB),
}


@pytest.mark.parametrize(("content", "pixels"), FILES.values(), ids=FILES.keys())
def test_netpbm(content: bytes, pixels: np.ndarray | None, tmp_path: Path) -> None:
    path = tmp_path / "image.ppm"
    path.write_bytes(content)
    found = read_netpbm(path)
    expected = np.frombuffer(content[-8:], np.uint8).reshape(2, 4, 1) if pixels is None else pixels
    torch.testing.assert_close(found, torch.from_numpy(expected.astype(np.float32)).permute(2, 0, 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a netpbm file"),
        (b"P4\n8 1\n\x00", "not a netpbm file"),
        (b"P6\n4 2\n255", "not a netpbm file"),
        (b"P6\n0 2\n255\n", "image of 0 x 2 with values up to 255 cannot be"),
        (b"P6\n4 2\n70000\n", "values up to 70000 cannot be"),
        (b"P6\n4 2\n255\n" + RGB.tobytes()[:-1], "truncated: it has 23 of 24 values"),
        (b"P2\n2 1\n255\n7", "truncated: it has 1 of 2 values"),
        (b"P2\n2 1\n255\n7 x", "damaged"),
    ],
    ids=["empty", "a bitmap", "no body", "no pixels", "17 bits", "truncated", "truncated text", "letters"],
)
def test_a_damaged_netpbm_says_how(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "image.ppm"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"image\.ppm: .*{message}"):
        read_netpbm(path)


def test_channels(tmp_path: Path) -> None:
    (tmp_path / "rgb.ppm").write_bytes(FILES["P6"][0])
    (tmp_path / "grey.pgm").write_bytes(FILES["P5"][0])
    assert read_image(tmp_path / "rgb.ppm", 3, None).shape == (3, 2, 4)
    grey = read_image(tmp_path / "rgb.ppm", 1, None)
    assert grey[0, 0, 1].item() == pytest.approx(0.299 * 30 + 0.587 * 40 + 0.114 * 50)
    three = read_image(tmp_path / "grey.pgm", 3, None)
    assert three.shape == (3, 2, 4)
    assert torch.equal(three[0], three[2])


def test_fit_keeps_proportions_and_the_middle() -> None:
    ramp = torch.arange(8.0).expand(3, 4, 8)
    assert torch.equal(fit(ramp, 4), ramp[:, :, 2:6])  # nothing to resize, only to crop
    assert torch.equal(fit(ramp, (2, 8)), ramp[:, 1:3])
    halved = fit(ramp, 2)
    assert halved.shape == (3, 2, 2)
    assert halved[0, 0].tolist() == pytest.approx([2.5, 4.5], abs=0.1)
    stripes = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(8).expand(1, 32, 32)
    torch.testing.assert_close(fit(stripes, 8)[:, 2:6, 2:6], torch.full((1, 4, 4), 0.25), atol=0.05, rtol=0)
    assert fit(ramp, (16, 8)).shape == (3, 16, 8)
    assert fit(torch.zeros(1, 1, 1000), 1).shape == (1, 1, 1)
    with pytest.raises(DataError, match="at least 1 pixel"):
        fit(ramp, 0)


def test_without_pillow_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"photo\.jpg: reading \.jpg needs Pillow, .* pip install pillow"):
        read_image(tmp_path / "photo.jpg", 3, None)


@needs_pillow
def test_pillow_reads_what_netpbm_holds(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(RGB).save(tmp_path / "rgb.png")
    Image.fromarray(RGB).save(tmp_path / "rgb.bmp")
    Image.fromarray(GREY).save(tmp_path / "grey.png")
    Image.fromarray(RGB).quantize().save(tmp_path / "palette.png")
    expected = torch.from_numpy(RGB.astype(np.float32)).permute(2, 0, 1)
    for name in ("rgb.png", "rgb.bmp", "palette.png"):
        assert torch.equal(read_image(tmp_path / name, 3, None), expected)
    assert torch.equal(read_image(tmp_path / "grey.png", 1, None)[0], torch.from_numpy(GREY.astype(np.float32)))
    assert read_image(tmp_path / "grey.png", 3, None).shape == (3, 2, 4)
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(tmp_path / "flat.jpg")
    torch.testing.assert_close(
        read_image(tmp_path / "flat.jpg", 3, 4), torch.full((3, 4, 4), 200.0), atol=2.0, rtol=0.0
    )


@needs_pillow
def test_what_pillow_cannot_give_is_an_error(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png: pixels of mode 'I;16' have more than 8 bits"):
        read_image(tmp_path / "deep.png", 3, None)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"text\.png: Pillow cannot read it"):
        read_image(tmp_path / "text.png", 3, None)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:900])
    with pytest.raises(DataError, match=r"cut\.jpg: Pillow cannot read it: .*truncated"):
        read_image(tmp_path / "cut.jpg", 3, None)

"""The silero-vad model in plain torch against the package's own TorchScript, frame by frame."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
import torch
from torch import Tensor


def torchscript_probabilities(silero: ModuleType, audio: Tensor) -> Tensor:
    model = silero.torchscript()
    model.reset_states()
    padded = torch.nn.functional.pad(audio, (0, -len(audio) % silero.FRAME))
    with torch.no_grad():
        answers = [model(frame, silero.SAMPLE_RATE) for frame in padded.reshape(-1, 1, silero.FRAME)]
    return torch.cat(answers).flatten()


@pytest.mark.parametrize("source", ["synthetic", "recording"])
def test_equals_the_torchscript_model(silero: ModuleType, silero_data: None, source: str) -> None:
    audio = silero.synthetic(4.0) if source == "synthetic" else silero.recording("test")
    audio = audio[:-100]  # so that the last frame is not full
    expected = torchscript_probabilities(silero, audio)
    got = silero.speech_probabilities(silero.load(), audio)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert expected.min() < 0.05  # both kinds of frames are among them
    assert expected.max() > 0.95


def test_a_batch_hears_as_each_alone(silero: ModuleType) -> None:
    torch.manual_seed(0)
    model = silero.SileroVAD().eval()
    first, second = silero.frames(silero.synthetic(0.5)).split(8)
    with torch.no_grad():
        together, (hidden, memory) = model(torch.stack([first[0], second[0]]))
        together, _ = model(torch.stack([first[1], second[1]]), (hidden, memory))
        _, state = model(second[:1])
        alone, _ = model(second[1:2], state)
    assert together.shape == (2,)
    assert hidden.shape == memory.shape == (2, 128)
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=1e-6)


def test_frames_carry_the_end_of_the_one_before(silero: ModuleType) -> None:
    audio = torch.arange(1.0, 1101.0)
    frames = silero.frames(audio)
    assert frames.shape == (3, 576)
    assert not frames[0, :64].any()
    assert torch.equal(frames[0, 64:], audio[:512])
    assert torch.equal(frames[1], audio[512 - 64 : 1024])
    assert not frames[2, 64 + 1100 - 1024 :].any()


def test_synthetic_is_deterministic_and_in_range(silero: ModuleType) -> None:
    audio = silero.synthetic(2.0)
    assert torch.equal(audio, silero.synthetic(2.0))
    assert (audio.shape, audio.dtype) == ((32_000,), torch.float32)
    assert audio.abs().max() <= 1


def test_recordings(silero: ModuleType, silero_data: None) -> None:
    for name, seconds in (("test", 60.0), ("aepyx", 169.152)):
        audio = silero.recording(name)
        assert (audio.dtype, len(audio)) == (torch.float32, int(seconds * 16_000))
        assert 0.1 < audio.abs().max() <= 1
    with pytest.raises(ValueError, match="there are"):
        silero.recording("song")


def test_loading_warns_of_nothing_and_hides_nothing(silero: ModuleType, silero_data: None) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silero.load()
        warnings.warn("still heard", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["still heard"]


def test_agreement(silero: ModuleType) -> None:
    found = silero.agreement(torch.tensor([0.1, 0.6, 0.9, 0.4]), torch.tensor([0.2, 0.4, 0.9, 0.4]))
    assert (found.same, found.speech, found.frames) == (0.75, 0.5, 4)
    assert found.largest == pytest.approx(0.2)
    for other in (torch.zeros(3), torch.zeros(0)):
        with pytest.raises(ValueError, match="one recording"):
            silero.agreement(torch.zeros(4) if len(other) else torch.zeros(0), other)

"""The accuracy that is promised: recurrent networks of random weights, and inputs that span eight decades."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from quant.kernels import ops
from torch import Tensor, nn

from quant import quantize_dynamic, summary

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
SLOW = pytest.mark.skipif(FAST, reason="OCTET_FAST_TESTS=1: minutes under emulation")
KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["LSTM", "GRU"])

RELATIVE_ERROR = 0.015
COSINE = 0.995


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(y: Tensor, real: Tensor) -> float:
    return float((y - real).norm() / real.norm())


def cosine(y: Tensor, real: Tensor) -> float:
    return float(nn.functional.cosine_similarity(y.double().flatten(), real.double().flatten(), dim=0))


# --- random weights -------------------------------------------------------------------------------------------------


@SLOW
@KINDS
@pytest.mark.parametrize("hidden", [512, 1024])
@pytest.mark.parametrize("batch", [1, 16])
def test_random_network_of_two_layers(kind: type[nn.RNNBase], hidden: int, batch: int) -> None:
    # The reference multiplies in float64, sixty times as slow: fewer steps there, which the error does not grow with.
    steps = 35 if not ops.extension_problem() else 8
    network = kind(hidden, hidden, 2).eval()
    quantized, x = quantize_dynamic(network), torch.randn(steps, batch, hidden)
    with torch.no_grad():
        y, real = quantized(x)[0], network(x)[0]
    assert relative_error(y, real) <= RELATIVE_ERROR
    assert relative_error(y[-1], real[-1]) <= 1.2 * RELATIVE_ERROR


@KINDS
def test_random_small_network(kind: type[nn.RNNBase]) -> None:
    network, x = kind(160, 64, 2).eval(), torch.randn(10, 4, 160)
    with torch.no_grad():
        assert relative_error(quantize_dynamic(network)(x)[0], network(x)[0]) <= RELATIVE_ERROR


# --- eight decades --------------------------------------------------------------------------------------------------


def mel_power(samples: int, steps: int, bands: int, seed: int = 0) -> Tensor:
    """Like mel power before the log: (steps, samples, bands), log-normal around means that fall over eight decades."""
    generator = torch.Generator().manual_seed(seed)
    level = 10 ** torch.linspace(8, 0, bands)
    return torch.randn(steps, samples, bands, generator=generator).exp() * level


class Compared(NamedTuple):
    cosine: float
    detail: str


def compared(network: nn.RNNBase, x: Tensor) -> Compared:
    network.eval()
    quantized = quantize_dynamic(network)
    with torch.no_grad():
        return Compared(cosine(quantized(x)[0], network(x)[0]), summary(quantized)[""].detail)


SIZES = [(16, 24), (40, 64)] if FAST else [(9, 64), (40, 64), (80, 64), (80, 128), (128, 128), (40, 512), (80, 512)]


@KINDS
@pytest.mark.parametrize(("bands", "hidden"), SIZES)
def test_eight_decades_into_a_random_network(kind: type[nn.RNNBase], bands: int, hidden: int) -> None:
    # Gates are driven from end to end by the loudest band, so rounding its weights flips whole units.
    got = compared(kind(bands, hidden), mel_power(8, 20, bands))
    assert got.cosine >= COSINE
    assert "input projection with 16-bit activations and weights in two int8 terms" in got.detail


@KINDS
@pytest.mark.parametrize(("bands", "hidden"), SIZES)
def test_eight_decades_into_weights_that_make_up_for_it(kind: type[nn.RNNBase], bands: int, hidden: int) -> None:
    network = kind(bands, hidden)
    with torch.no_grad():
        network.weight_ih_l0 *= 3 * 10 ** -torch.linspace(8, 0, bands)
    got = compared(network, mel_power(8, 20, bands))
    assert got.cosine >= COSINE
    assert "input projection with 16-bit activations" in got.detail


@KINDS
def test_a_wide_input_of_eight_decades_scales_its_columns_by_their_norms(kind: type[nn.RNNBase]) -> None:
    network = kind(200, 64)
    with torch.no_grad():
        network.weight_ih_l0 *= 3 * 10 ** -torch.linspace(8, 0, 200)
    got = compared(network, mel_power(4, 12, 200))
    assert got.cosine >= COSINE
    assert "columns scaled by their norms, which span a factor of 1.0e+08" in got.detail


def test_what_one_scale_per_row_alone_would_do_is_noise() -> None:
    """That the bar can fail: the same network with 8-bit activations and unscaled columns."""
    network = nn.LSTM(40, 64).eval()
    with torch.no_grad():
        network.weight_ih_l0 *= 3 * 10 ** -torch.linspace(8, 0, 40)
    rounded = nn.LSTM(40, 64).eval()
    rounded.load_state_dict(network.state_dict())
    x = mel_power(8, 20, 40)
    with torch.no_grad():
        step = network.weight_ih_l0.abs().amax(dim=1, keepdim=True) / 127
        rounded.weight_ih_l0.copy_(torch.round(network.weight_ih_l0 / step) * step)
        assert cosine(rounded(x)[0], network(x)[0]) < 0.9


# --- a trained network ----------------------------------------------------------------------------------------------

CLASSES, BANDS = 4, 40


class Listener(nn.Module):
    """Mel power in, class of the sound out: every class has its pattern in bands of every level."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(BANDS, 48, batch_first=True)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, power: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(power)[0][:, -1])
        return y


def sounds(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Power (count, 15, BANDS) over eight decades, and the class whose pattern of loud and quiet bands it has."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, BANDS, generator=torch.Generator().manual_seed(99)) * 3
    label = torch.randint(0, CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 15, BANDS, generator=generator)
    return (noise + patterns[label].unsqueeze(1)).exp() * 10 ** torch.linspace(8, 0, BANDS), label


@pytest.fixture(scope="module", params=[nn.LSTM, nn.GRU], ids=["LSTM", "GRU"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """Trained on the power itself, for a second or two."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Listener(request.param)
    with torch.no_grad():  # each band starts at its own level, as a network that was normalised and folded would
        model.rnn.weight_ih_l0 *= 10 ** -torch.linspace(8, 0, BANDS)
    # Steps in proportion to each band's level: what Adam's own steps lack is scale.
    level = 10 ** -torch.linspace(8, 0, BANDS)
    optimizer = torch.optim.Adam(
        [parameter for name, parameter in model.named_parameters() if "ih_l0" not in name], 5e-3
    )
    for step in range(120):
        power, label = sounds(64, step)
        loss = nn.functional.cross_entropy(model(power), label)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            weight = model.rnn.weight_ih_l0
            slope = weight.grad / level
            weight -= level * 0.05 * slope / slope.norm().clamp(min=1e-6)
    yield model.eval()
    torch.set_num_threads(threads)


@SLOW
def test_a_network_that_was_trained_on_eight_decades(listener: Listener) -> None:
    power, label = sounds(400, 10_000)
    quantized = quantize_dynamic(listener)
    with torch.no_grad():
        real, y = listener(power), quantized(power)
        states, real_states = quantized.rnn(power)[0], listener.rnn(power)[0]
    accuracy = float((real.argmax(1) == label).float().mean())
    assert accuracy > 0.9, f"the float network has learned nothing: {accuracy}"
    assert cosine(states, real_states) >= COSINE
    assert cosine(y, real) >= COSINE
    assert float((y.argmax(1) == real.argmax(1)).float().mean()) >= 0.995
    assert "input projection with 16-bit activations" in summary(quantized)["rnn"].detail

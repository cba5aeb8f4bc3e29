"""rnn_layer_static: one step against the reference, a sequence against its steps, and both forms of the output.

As in test_rnn_layer.py: two implementations of tanh differ in the last bits, which can move an integer by one step, so
sequences are pinned down through their steps. The product sums are exact everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from quant.kernels import quantize_weight, reference, reference_rnn
from quant.kernels.backend import Backend
from torch import Tensor

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
modes = pytest.mark.parametrize("mode", list(GATES))
ONE_STEP = 8 * 2.0**-22
"""What two exp functions of 1 ulp make of one cell (test_rnn_layer.py)."""


@dataclass(frozen=True)
class Layer:
    """The operands of one layer, in the operator's order."""

    q_x: Tensor
    x_scale: float
    x_zero_point: int
    batch_sizes: Tensor | None
    h: Tensor
    c: Tensor | None
    q_weight_ih: Tensor
    scale_ih: Tensor
    q_weight_hh: Tensor
    scale_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    h_scale: float
    h_zero_point: int
    q_weight_hr: Tensor | None
    scale_hr: Tensor | None
    m_scale: float
    m_zero_point: int
    mode: str
    reverse: bool
    quantized: bool

    def run(self, backend: Backend | Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = backend.rnn_layer_static(
            *(getattr(self, name) for name in self.__annotations__)
        )
        return result


def layer(
    mode: str,
    *,
    steps: int = 5,
    batch: int = 3,
    features: int = 11,
    hidden: int = 17,
    projection: int = 0,
    bias: bool = True,
    reverse: bool = False,
    sizes: list[int] | None = None,
    quantized: bool = False,
) -> Layer:
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width, state = GATES[mode] * hidden, projection or hidden
    ih, hh = quantize_weight(randn(width, features) / 3), quantize_weight(randn(width, state) / hidden**0.5)
    hr = quantize_weight(randn(projection, hidden) / hidden**0.5) if projection else (None, None)
    batch = sizes[0] if sizes else batch
    shape = (sum(sizes), features) if sizes else (steps, batch, features)
    return Layer(
        q_x=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        x_scale=0.02,
        x_zero_point=117,
        batch_sizes=torch.tensor(sizes) if sizes else None,
        h=randn(batch, state).tanh(),
        c=randn(batch, hidden) if mode == "lstm" else None,
        q_weight_ih=ih[0],
        scale_ih=ih[1],
        q_weight_hh=hh[0],
        scale_hh=hh[1],
        bias_ih=randn(width) if bias else None,
        bias_hh=randn(width) if bias else None,
        h_scale=4 / 255 if mode == "rnn_relu" else 1.9 / 255,
        h_zero_point=3 if mode == "rnn_relu" else 131,
        q_weight_hr=hr[0],
        scale_hr=hr[1],
        m_scale=1.8 / 255,
        m_zero_point=125,
        mode=mode,
        reverse=reverse,
        quantized=quantized,
    )


def one_at_a_time(backend: Backend, given: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence as calls of one step each: the state that comes back is that which went on."""
    sizes = [given.q_x.shape[1]] * given.q_x.shape[0] if given.batch_sizes is None else given.batch_sizes.tolist()
    rows = given.q_x.reshape(sum(sizes), -1).split(sizes)
    h, c = given.h.clone(), None if given.c is None else given.c.clone()
    outputs = [torch.empty(0)] * len(sizes)
    for t in reversed(range(len(sizes))) if given.reverse else range(len(sizes)):
        n = sizes[t]
        step = replace(given, q_x=rows[t][None], batch_sizes=None, h=h[:n], c=None if c is None else c[:n])
        y, h_after, c_after = step.run(backend)
        outputs[t], h[:n] = y[0], h_after
        if c is not None:
            c[:n] = c_after
    y = torch.cat(outputs).reshape(*given.q_x.shape[:-1], h.shape[1])
    return y, h, torch.empty(0) if c is None else c


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "one-sample": {"batch": 1},
    "hidden-65": {"hidden": 65},
    "one-feature": {"features": 1, "hidden": 1},
    "projection": {"projection": 5},
    "projection-wide-batch": {"projection": 16, "hidden": 33, "batch": 9},
}
CASES = [
    pytest.param(mode, options, id=f"{mode}-{name}")
    for mode in GATES
    for name, options in VARIANTS.items()
    if mode == "lstm" or "projection" not in name
]
CASES = CASES[:: 3 if FAST else 1]


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_one_step_is_the_reference_to_the_last_bits(backend: Backend, mode: str, options: dict[str, Any]) -> None:
    given = layer(mode, steps=1, **options)
    actual, expected = given.run(backend), given.run(reference_rnn)
    flip = 0.0  # of one integer that a projection reads, on the edge between two: a step times the largest weight
    if given.scale_hr is not None:
        flip = given.m_scale * 127 * float(given.scale_hr.max())
    for a, b, tolerance in zip(actual, expected, (ONE_STEP + flip, ONE_STEP + flip, ONE_STEP), strict=True):
        assert a.shape == b.shape
        assert a.dtype == torch.float32
        assert bool(((a - b).abs() <= tolerance).all())


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_integers_out_are_those_of_the_reference_within_one_step(
    backend: Backend, mode: str, options: dict[str, Any]
) -> None:
    given = layer(mode, steps=1, quantized=True, **options)
    actual, expected = given.run(backend)[0], given.run(reference_rnn)[0]
    assert actual.dtype == torch.uint8
    assert int((actual.int() - expected.int()).abs().max()) <= 1


@pytest.mark.parametrize(("mode", "options"), CASES)
@pytest.mark.parametrize("quantized", [False, True], ids=["reals", "integers"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("sizes", [None, [4, 2, 2, 1]], ids=["padded", "packed"])
def test_a_sequence_is_its_steps_to_the_bit(
    compiled: Backend, mode: str, options: dict[str, Any], quantized: bool, reverse: bool, sizes: list[int] | None
) -> None:
    given = layer(mode, reverse=reverse, quantized=quantized, sizes=sizes, **options)
    for a, b in zip(given.run(compiled), one_at_a_time(compiled, given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_integers_out_are_the_reals_rounded(backend: Backend, mode: str, options: dict[str, Any]) -> None:
    given = layer(mode, **options)
    y, h, _ = given.run(backend)
    q_y, q_h, _ = replace(given, quantized=True).run(backend)
    assert torch.equal(q_y, reference.quantize(y, given.h_scale, given.h_zero_point))
    assert torch.equal(h, q_h)  # the state that goes on is not rounded


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_the_reference_around_another_product_is_the_reference(
    interpreted: Backend, mode: str, options: dict[str, Any]
) -> None:
    given = layer(mode, reverse=True, sizes=[4, 2, 1], **options)
    for a, b in zip(given.run(interpreted), given.run(reference_rnn), strict=True):
        assert torch.equal(a, b)


@modes
def test_the_layer_is_close_to_the_float_layer(backend: Backend, mode: str) -> None:
    given = layer(mode, steps=12, hidden=40, features=20)
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)(
        20, 40, **({"nonlinearity": mode[4:]} if mode.startswith("rnn") else {})
    )
    # A range that holds the states, and inputs that leave the gates in their slopes: a ReLU network grows otherwise.
    given = replace(given, x_scale=0.004, h_scale=0.02 if mode == "rnn_relu" else 2 / 255, h_zero_point=0)
    given = given if mode == "rnn_relu" else replace(given, h_zero_point=128)
    if mode == "rnn_relu":
        given = replace(given, scale_hh=given.scale_hh / 3)
    with torch.no_grad():
        module.weight_ih_l0.copy_(given.q_weight_ih.float() * given.scale_ih[:, None])
        module.weight_hh_l0.copy_(given.q_weight_hh.float() * given.scale_hh[:, None])
        module.bias_ih_l0.copy_(given.bias_ih)
        module.bias_hh_l0.copy_(given.bias_hh)
        h = given.h.abs() if mode == "rnn_relu" else given.h
        given = replace(given, h=h)
        x = reference.dequantize(given.q_x, given.x_scale, given.x_zero_point)
        expected, _ = module(x, (h[None], given.c[None]) if given.c is not None else h[None])
    y, _, _ = given.run(backend)
    # The weights and inputs are the same; states are rounded to 1/128 of their range at every step.
    assert float((y - expected).norm() / expected.norm()) < 0.03


@modes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", [1, 16], ids=["few-rows", "many-rows"])
def test_bits_do_not_depend_on_the_number_of_threads(compiled: Backend, mode: str, threads: int, batch: int) -> None:
    if FAST:
        pytest.skip("OCTET_FAST_TESTS=1: layers large enough for threads are slow under emulation")
    given = layer(mode, batch=batch, hidden=400, steps=3, projection=100 if mode == "lstm" else 0, quantized=True)
    torch.set_num_threads(1)
    expected = given.run(compiled)
    torch.set_num_threads(threads)
    for a, b in zip(given.run(compiled), expected, strict=True):
        assert torch.equal(a, b)


@modes
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_threads_that_share_the_units_leave_the_same_bits(
    compiled: Backend, mode: str, threads: int, reverse: bool
) -> None:
    """Two threads have whole groups of each gate's outputs, three have not; samples end or begin at several steps."""
    if FAST:
        pytest.skip("OCTET_FAST_TESTS=1: layers large enough for threads are slow under emulation")
    given = layer(mode, sizes=[4, 4, 3, 3, 1, 1, 1], hidden=512, reverse=reverse, quantized=True)
    torch.set_num_threads(1)
    expected = given.run(compiled)
    torch.set_num_threads(threads)
    for a, b in zip(given.run(compiled), expected, strict=True):
        assert torch.equal(a, b)


@modes
@pytest.mark.parametrize(("steps", "batch"), [(0, 3), (5, 0)], ids=["no-steps", "no-samples"])
def test_an_empty_sequence_returns_the_initial_state(backend: Backend, mode: str, steps: int, batch: int) -> None:
    given = layer(mode, steps=steps, batch=batch, quantized=True)
    y, h, _ = given.run(backend)
    assert y.shape == (steps, batch, 17)
    assert torch.equal(h, given.h)


@modes
def test_the_initial_state_is_left_as_it_was(backend: Backend, mode: str) -> None:
    given = layer(mode)
    before = given.h.clone()
    given.run(backend)
    assert torch.equal(given.h, before)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown mode": ({"mode": "mgu"}, "mode is 'mgu', expected one of .*lstm"),
    "a state of another batch": ({"h": torch.zeros(2, 17)}, "h has shape"),
    "a flat input": ({"q_x": torch.zeros(3, 11, dtype=torch.uint8)}, r"expected \(time, batch, features\)"),
    "too many features": ({"q_x": torch.zeros(2, 3, 12, dtype=torch.uint8)}, "in_features"),
    "no cell state": ({"c": None}, "mode 'lstm' needs c"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_operands_that_do_not_fit_are_refused(backend: Backend, name: str) -> None:
    change, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        replace(layer("lstm"), **change).run(backend)


def test_an_input_in_float_is_refused(backend: Backend) -> None:
    with pytest.raises(TypeError):
        replace(layer("gru"), q_x=torch.zeros(5, 3, 11)).run(backend)

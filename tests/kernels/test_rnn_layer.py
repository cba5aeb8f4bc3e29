"""rnn_layer: one step against the reference within what two exp functions differ by, a sequence against its steps.

A difference of one ulp in a state can move one of its integers by one step at the next, so whole sequences of two
implementations cannot be compared within a tight bound. But a sequence is its steps, to the bit, and one step from the
same state differs only in the last bits of tanh and sigmoid. Together the two pin down every sequence.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from quant.kernels import quantize_weight, reference_rnn
from quant.kernels.backend import Backend
from quant.kernels.recurrent.kind import kinds
from torch import Tensor

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
modes = pytest.mark.parametrize("mode", list(GATES))
# Both sides compute sigmoid and tanh from an exp of about 1 ulp in float32: within 2**-22 for values in [-1, 1], and a
# cell is a sum of two such products. A wrong gate is off by 1e-2 at least.
ONE_STEP = 8 * 2.0**-22


@dataclass(frozen=True)
class Layer:
    """The operands of one layer, in the operator's order."""

    x: Tensor
    batch_sizes: Tensor | None
    h: Tensor
    c: Tensor | None
    q_weight_ih: Tensor
    scale_ih: Tensor
    columns_ih: Tensor | None
    activation_bits: int
    per_row: bool
    q_weight_hh: Tensor
    scale_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    q_weight_hr: Tensor | None
    scale_hr: Tensor | None
    mode: str
    reverse: bool

    def run(self, backend: Backend | Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = backend.rnn_layer(
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
    columns: bool = False,
    bits: int = 8,
    reverse: bool = False,
    sizes: list[int] | None = None,
) -> Layer:
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width, state = GATES[mode] * hidden, projection or hidden
    weight_ih, weight_hh = (
        quantize_weight(randn(width, features) / 3),
        quantize_weight(randn(width, state) / hidden**0.5),
    )
    weight_hr = quantize_weight(randn(projection, hidden) / hidden**0.5) if projection else (None, None)
    if sizes:
        batch = sizes[0]
    return Layer(
        x=randn(sum(sizes), features) if sizes else randn(steps, batch, features),
        batch_sizes=torch.tensor(sizes) if sizes else None,
        h=randn(batch, state).tanh(),
        c=randn(batch, hidden) if mode == "lstm" else None,
        q_weight_ih=weight_ih[0],
        scale_ih=weight_ih[1],
        columns_ih=torch.logspace(-1, 1, features) if columns else None,
        activation_bits=bits,
        per_row=True,
        q_weight_hh=weight_hh[0],
        scale_hh=weight_hh[1],
        bias_ih=randn(width) if bias else None,
        bias_hh=randn(width) if bias else None,
        q_weight_hr=weight_hr[0],
        scale_hr=weight_hr[1],
        mode=mode,
        reverse=reverse,
    )


def close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for name, a, b in zip(("y", "h", "c"), actual, expected, strict=False):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype == torch.float32
        if a.numel():
            assert float((a - b).abs().max()) <= tolerance, name


def one_at_a_time(backend: Backend | Any, given: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence as calls of one step each, with the bookkeeping of torch's PackedSequence written out here."""
    sizes = [given.x.shape[1]] * given.x.shape[0] if given.batch_sizes is None else given.batch_sizes.tolist()
    rows = given.x.reshape(sum(sizes), -1).split(sizes)
    h, c = given.h.clone(), None if given.c is None else given.c.clone()
    outputs = [torch.empty(0)] * len(sizes)
    for t in reversed(range(len(sizes))) if given.reverse else range(len(sizes)):
        n = sizes[t]
        step = replace(given, x=rows[t][None], batch_sizes=None, h=h[:n], c=None if c is None else c[:n])
        y, h_after, c_after = step.run(backend)
        outputs[t], h[:n] = y[0], h_after
        if c is not None:
            c[:n] = c_after
    y = torch.cat(outputs).reshape(*given.x.shape[:-1], h.shape[1])
    return y, h, torch.empty(0) if c is None else c


VARIANTS = {
    "plain": {},
    "no-bias": {"bias": False},
    "one-sample": {"batch": 1},
    "hidden-65": {"hidden": 65},
    "one-feature": {"features": 1, "hidden": 1},
    "columns-16bit": {"columns": True, "bits": 16},
    "projection": {"projection": 5},
    "projection-wide-batch": {"projection": 16, "hidden": 33, "batch": 9},
}


def variants_of(mode: str) -> list[str]:
    return [name for name in VARIANTS if mode == "lstm" or "projection" not in name]


CASES = [pytest.param(mode, VARIANTS[name], id=f"{mode}-{name}") for mode in GATES for name in variants_of(mode)]
CASES = CASES[:: 3 if FAST else 1]


@pytest.mark.parametrize(("mode", "options"), CASES)
def test_one_step_is_the_reference_to_the_last_bits(backend: Backend, mode: str, options: dict[str, Any]) -> None:
    given = layer(mode, steps=1, **options)
    actual, expected = given.run(backend), given.run(reference_rnn)
    # The state to project is quantised, where one integer may fall to the other side of a tie: one step of it (the
    # range is within [-1, 1], so 2 / 255) times the largest weight.
    flip = 0.0
    if given.q_weight_hr is not None and given.scale_hr is not None:
        flip = 2 / 255 * 127 * float(given.scale_hr.max())
    close(actual[:2], expected[:2], ONE_STEP + flip)
    assert actual[2].shape == expected[2].shape
    assert bool(((actual[2] - expected[2]).abs() <= ONE_STEP).all())


@pytest.mark.parametrize(("mode", "options"), CASES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_sequence_is_its_steps_to_the_bit(
    compiled: Backend, mode: str, options: dict[str, Any], reverse: bool
) -> None:
    given = layer(mode, reverse=reverse, **options)
    close(given.run(compiled), one_at_a_time(compiled, given), 0.0)


@modes
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    "sizes",
    [[4, 4, 2, 1], [3, 1, 1], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5, 5]],
    ids=lambda sizes: f"{len(sizes)}-steps",
)
def test_a_packed_sequence_is_its_steps_to_the_bit(
    compiled: Backend, mode: str, reverse: bool, sizes: list[int]
) -> None:
    given = layer(mode, reverse=reverse, sizes=sizes)
    close(given.run(compiled), one_at_a_time(compiled, given), 0.0)


@pytest.mark.parametrize(("mode", "options"), CASES)
@pytest.mark.parametrize("sizes", [None, [4, 2, 2, 1]], ids=["padded", "packed"])
def test_the_reference_around_another_product_is_the_reference(
    interpreted: Backend, mode: str, options: dict[str, Any], sizes: list[int] | None
) -> None:
    for reverse in (False, True):
        given = layer(mode, reverse=reverse, sizes=sizes, **options)
        close(given.run(interpreted), given.run(reference_rnn), 0.0)


@modes
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_packed_sequence_is_each_sample_alone(backend: Backend, mode: str, reverse: bool) -> None:
    sizes = [4, 3, 3, 1]
    given = layer(mode, reverse=reverse, sizes=sizes)
    y, h, _ = given.run(backend)
    starts = [sum(sizes[:t]) for t in range(len(sizes))]
    for sample in range(sizes[0]):
        rows = [start + sample for start, size in zip(starts, sizes, strict=True) if size > sample]
        alone = replace(
            given,
            x=given.x[rows][:, None],
            batch_sizes=None,
            h=given.h[sample : sample + 1],
            c=None if given.c is None else given.c[sample : sample + 1],
        )
        y_alone, h_alone, _ = alone.run(backend)
        # Not to the bit for torch's own tanh and sigmoid, whose vector and scalar forms may differ; ours have one form.
        tolerance = 0.0 if backend.name not in ("onednn", "reference") else 0.02
        assert float((y[rows] - y_alone[:, 0]).abs().max()) <= tolerance
        assert float((h[sample] - h_alone[0]).abs().max()) <= tolerance


@modes
def test_the_layer_is_close_to_the_float_layer(backend: Backend, mode: str) -> None:
    given = layer(mode, steps=12, hidden=40, features=20)
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)(
        20, 40, **({"nonlinearity": mode[4:]} if mode.startswith("rnn") else {})
    )
    with torch.no_grad():
        module.weight_ih_l0.copy_(given.q_weight_ih.float() * given.scale_ih[:, None])
        module.weight_hh_l0.copy_(given.q_weight_hh.float() * given.scale_hh[:, None])
        module.bias_ih_l0.copy_(given.bias_ih)
        module.bias_hh_l0.copy_(given.bias_hh)
        state = (given.h[None], given.c[None]) if given.c is not None else given.h[None]
        expected, _ = module(given.x, state)
    y, _, _ = given.run(backend)
    # The weights are the same, so only activations are rounded: 8 bits are 0.002 of the range; states feed back.
    assert float((y - expected).norm() / expected.norm()) < 0.02


@modes
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_sample_that_is_not_finite_is_nan_from_there_on_and_no_other(backend: Backend, mode: str, bad: float) -> None:
    given = layer(mode)
    clean, _, _ = given.run(backend)
    x = given.x.clone()
    x[2, 1, 4] = bad
    y, h, _ = replace(given, x=x).run(backend)
    assert torch.equal(y[:2], clean[:2])
    assert bool(torch.isnan(y[2:, 1]).all())
    assert bool(torch.isnan(h[1]).all())
    assert torch.equal(y[:, [0, 2]], clean[:, [0, 2]])


@modes
def test_gates_at_their_limits_saturate_and_stay_finite(backend: Backend, mode: str) -> None:
    given = layer(mode)
    for sign in (1e4, -1e4):
        y, h, c = replace(given, bias_ih=torch.full_like(given.scale_ih, sign)).run(backend)
        assert all(bool(torch.isfinite(t).all()) for t in (y, h, c))
        if mode != "rnn_relu":
            assert float(y.abs().max()) <= 1.0


@modes
@pytest.mark.parametrize(("steps", "batch"), [(0, 3), (5, 0), (0, 0)], ids=["no-steps", "no-samples", "neither"])
def test_an_empty_sequence_returns_the_initial_state(backend: Backend, mode: str, steps: int, batch: int) -> None:
    given = layer(mode, steps=steps, batch=batch)
    y, h, c = given.run(backend)
    assert y.shape == (steps, batch, 17)
    assert torch.equal(h, given.h)
    assert h.data_ptr() != given.h.data_ptr() or h.numel() == 0
    if given.c is not None:
        assert torch.equal(c, given.c)


@modes
def test_the_initial_state_is_left_as_it_was(backend: Backend, mode: str) -> None:
    given = layer(mode)
    before = given.h.clone(), None if given.c is None else given.c.clone()
    y, h, _ = given.run(backend)
    assert torch.equal(given.h, before[0])
    if given.c is not None and before[1] is not None:
        assert torch.equal(given.c, before[1])
    h.fill_(9)
    assert not bool((y == 9).any()), "the last output and the final state share memory"


@modes
def test_an_expanded_state_and_a_transposed_input_are_read_right(backend: Backend, mode: str) -> None:
    given = layer(mode)
    same = given.h[:1].expand(3, -1)
    odd = replace(given, h=same, x=given.x.transpose(0, 1).contiguous().transpose(0, 1))
    plain = replace(given, h=same.contiguous())
    close(odd.run(backend), plain.run(backend), 0.0)


@modes
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", [1, 16], ids=["few-rows", "many-rows"])
def test_bits_do_not_depend_on_the_number_of_threads(compiled: Backend, mode: str, threads: int, batch: int) -> None:
    if FAST:
        pytest.skip("OCTET_FAST_TESTS=1: layers large enough for threads are slow under emulation")
    projection = 100 if mode == "lstm" else 0
    given = layer(mode, batch=batch, hidden=400, steps=3, projection=projection)
    torch.set_num_threads(1)
    expected = given.run(compiled)
    torch.set_num_threads(threads)
    close(given.run(compiled), expected, 0.0)


@modes
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_threads_that_share_the_units_leave_the_same_bits(
    compiled: Backend, mode: str, threads: int, reverse: bool
) -> None:
    """Two threads have whole groups of each gate's outputs, three have not; samples end or begin at several steps."""
    if FAST:
        pytest.skip("OCTET_FAST_TESTS=1: layers large enough for threads are slow under emulation")
    given = layer(mode, sizes=[4, 4, 3, 3, 1, 1, 1], hidden=512, reverse=reverse)
    torch.set_num_threads(1)
    expected = given.run(compiled)
    torch.set_num_threads(threads)
    for a, b in zip(given.run(compiled), expected, strict=True):
        assert torch.equal(a, b)


@modes
def test_one_range_for_the_whole_input_is_that_of_the_reference(backend: Backend, mode: str) -> None:
    given = replace(layer(mode, steps=1, batch=4), per_row=False)
    close(given.run(backend), given.run(reference_rnn), ONE_STEP)


def test_an_unknown_mode_is_refused_with_the_kinds_there_are(backend: Backend) -> None:
    with pytest.raises(ValueError, match="mode is 'mgu', expected one of") as raised:
        replace(layer("gru"), mode="mgu").run(backend)
    for name in GATES:
        assert re.search(rf"\b{name}\b", str(raised.value))


def test_the_kernels_have_the_kinds_that_say_so(compiled: Backend) -> None:
    with pytest.raises(ValueError, match="mode is") as raised:
        replace(layer("gru"), mode="mgu").run(compiled)
    names = str(raised.value).splitlines()[0].partition("expected one of ")[2].split(", ")
    assert {kind.name: kind.gates for kind in kinds() if kind.native} == GATES
    assert set(names) == set(GATES)


def test_a_state_of_another_batch_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="h has shape"):
        replace(layer("gru"), h=torch.zeros(2, 17)).run(backend)


def test_a_flat_input_without_batch_sizes_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"expected \(time, batch, features\)"):
        replace(layer("gru"), x=torch.zeros(3, 11)).run(backend)


BAD = {
    "sizes that grow": ({"batch_sizes": torch.tensor([1, 2]), "x": torch.zeros(3, 11)}, "never grow"),
    "a size of zero": ({"batch_sizes": torch.tensor([3, 0]), "x": torch.zeros(3, 11)}, "must be positive"),
    "sizes that add up to more": (
        {"batch_sizes": torch.tensor([3, 3]), "x": torch.zeros(5, 11)},
        "more than the 5 rows",
    ),
    "no cell state": ({"c": None}, "mode 'lstm' needs c"),
    "a cell state too narrow": ({"c": torch.zeros(3, 5)}, "mode 'lstm' needs c"),
    "a projection without its scale": ({"scale_hr": None}, "without scale_hr"),
    "gates that do not divide": ({"q_weight_ih": torch.zeros(66, 11, dtype=torch.int8)}, "the same multiple of 4"),
    "a state without projection": ({"q_weight_hr": None, "scale_hr": None}, "with no projection"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_operands_that_do_not_fit_are_refused(compiled: Backend, name: str) -> None:
    change, words = BAD[name]
    given = layer("lstm", projection=5)
    with pytest.raises(ValueError, match=words):
        replace(given, **change).run(compiled)


def test_a_projection_outside_an_lstm_is_refused(backend: Backend) -> None:
    # A GRU's gates would read the wide state that a projection has made narrow.
    with pytest.raises(ValueError, match="mode 'gru' has no projection"):
        replace(layer("gru"), q_weight_hr=torch.zeros(17, 17, dtype=torch.int8), scale_hr=torch.ones(17)).run(backend)

"""Recurrent layers in static quantisation: every kind, in every form of torch's call, from calibration to the file."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.calibrate import CalibrationWarning
from quant.kernels import dispatch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant import Recipe, convert, load, prepare, save, summary
from quant.ops.recurrent import range_names
from quant.parity import parity
from quant.recipe import QConfig
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.trees import leaves
from quant.static.recurrent_float import observe, run_float
from quant.static.runner import runners
from quant.static.simulation import simulating

from .recurrent_kinds import KINDS, every_kind

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-ways": {"bidirectional": True, "batch_first": True},
    "three-layers": {"num_layers": 3, "bias": False},
    "two-layers-two-ways": {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Net(nn.Module):
    """Linear, recurrent, Linear: what is between stays uint8."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(7, 10)
        self.rnn = KINDS[kind](10, 16, **options)
        width = (self.rnn.proj_size or 16) * (2 if self.rnn.bidirectional else 1)
        self.after = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(self.before(x))
        out: Tensor = self.after(y)
        return out


def error(expected: Any, found: Any) -> float:
    """Norm of the difference over that of the expected, of all tensors together."""
    pairs = zip(leaves(expected), leaves(found), strict=True)
    ends = [
        (a.detach().float(), b.detach().float()) for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()
    ]
    noise = sum(float((a - b).square().sum()) for a, b in ends)
    return (noise / sum(float(a.square().sum()) for a, _ in ends)) ** 0.5


def made(model: nn.Module, *args: Any, recipe: Recipe = RECIPE, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """Prepared and calibrated on one call, and converted."""
    model.eval()
    prepared = prepare(model, args or kwargs, recipe)
    with torch.no_grad():
        prepared(*args, **kwargs)
    return prepared, convert(prepared)


@pytest.mark.parametrize("form", list(FORMS))
@every_kind
def test_integers_stay_between_layers_and_equal_their_simulation(kind: str, form: str) -> None:
    model, x = Net(kind, **FORMS[form]).eval(), torch.randn(8, 3, 7)
    prepared, converted = made(model, x)
    with torch.no_grad():
        assert torch.equal(prepared(x), model(x))
        assert error(model(x), converted(x)) < 0.04
        with simulating(prepared):
            assert error(prepared(x), converted(x)) < 0.01
    assert parity(prepared, converted, [x]).holds
    entry = summary(converted)["rnn"]
    assert entry.outcome == "int8"
    assert entry.detail.startswith("static sequence, input [")
    assert ", uint8 output, " in entry.detail
    assert 0 < entry.bytes_after < 0.6 * entry.bytes_before
    assert isinstance(converted.rnn, StaticRecurrent)


@every_kind
def test_a_layer_alone_in_every_form_of_call(kind: str) -> None:
    torch.manual_seed(1)
    layer = KINDS[kind](6, 8, num_layers=2, bidirectional=True).eval()
    state_size = layer.proj_size or 8
    h, c = torch.rand(4, 3, state_size) - 0.5, torch.randn(4, 3, 8)
    state = (h, c) if layer.mode == "LSTM" else h
    x = torch.randn(9, 3, 6)
    prepared = prepare(layer, {"input": x, "hx": state}, RECIPE)
    with torch.no_grad():
        expected = prepared(x, state)
        converted = convert(prepared)
        assert isinstance(converted, StaticRecurrent)
        assert error(expected, converted(x, state)) < 0.05
        assert error(layer(x), converted(x)) < 0.05
        alone = (h[:, 0], c[:, 0]) if layer.mode == "LSTM" else h[:, 0]
        assert error(layer(x[:, 0], alone), converted(x[:, 0], alone)) < 0.05
        for ordered in (True, False):
            lengths = torch.tensor([9, 7, 4]) if ordered else torch.tensor([4, 9, 6])
            packed = pack_padded_sequence(x, lengths, enforce_sorted=ordered)
            assert error(layer(packed, state), converted(packed, state)) < 0.05


class Cells(nn.Module):
    """A recurrent layer behind a Linear, called in an unusual way."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.rnn, self.after = nn.Linear(7, 8), layer, nn.Linear(8, 5)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        result = self.call(self.rnn, torch.relu(self.before(x)))
        out: Tensor = self.after(result[0] if isinstance(result, tuple) else result)
        return out


def one_value_in_a_loop(cell: nn.Module, h: Tensor) -> Tensor:
    for _ in range(3):
        h = cell(h, h)
    return h


def state_that_is_read(cell: nn.Module, x: Tensor) -> Tensor:
    """Every state is a state of the next step, and read by the layer behind."""
    state, states = None, []
    for _ in range(3):
        state = cell(x, state)
        states.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(states)


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any], tuple[int, ...]]] = {
    "gru-cell-of-one-value": (lambda: nn.GRUCell(8, 8), lambda cell, h: cell(h, h), (3, 7)),
    "rnn-cell-of-one-value": (lambda: nn.RNNCell(8, 8), lambda cell, h: cell(h, h), (7,)),
    "lstm-cell-of-one-value": (lambda: nn.LSTMCell(8, 8), lambda cell, h: cell(h, (h, h)), (3, 7)),
    "gru-of-one-value": (lambda: nn.GRU(8, 8), lambda layer, h: layer(h, h), (1, 3, 7)),
    "gru-cell-by-names": (lambda: nn.GRUCell(8, 8), lambda cell, h: cell(hx=h * 0.5, input=h), (3, 7)),
    "gru-by-names": (lambda: nn.GRU(8, 8), lambda layer, h: layer(input=h, hx=h[:1] * 0.5), (4, 3, 7)),
    "gru-cell-of-one-value-by-names": (lambda: nn.GRUCell(8, 8), lambda cell, h: cell(input=h, hx=h), (3, 7)),
    "gru-cell-of-one-value-in-a-loop": (lambda: nn.GRUCell(8, 8), one_value_in_a_loop, (3, 7)),
    "rnn-cell-of-one-value-in-a-loop": (lambda: nn.RNNCell(8, 8), one_value_in_a_loop, (3, 7)),
    "gru-cell-whose-states-are-read": (lambda: nn.GRUCell(8, 8), state_that_is_read, (3, 7)),
    "rnn-cell-whose-states-are-read": (lambda: nn.RNNCell(8, 8), state_that_is_read, (3, 7)),
    "lstm-cell-whose-states-are-read": (lambda: nn.LSTMCell(8, 8), state_that_is_read, (3, 7)),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_input_may_be_the_state_too_and_have_a_name(case: str) -> None:
    make, call, shape = CALLS[case]
    model, x = Cells(make(), call), torch.randn(shape)
    prepared, converted = made(model, x)
    with torch.no_grad():
        assert error(model(x), converted(x)) < 0.04
        with simulating(prepared, exact=True):
            assert error(prepared(x), converted(x)) < 1e-5


@every_kind
def test_a_sequence_in_two_calls_is_the_sequence(kind: str) -> None:
    torch.manual_seed(2)
    layer, x = KINDS[kind](6, 8, num_layers=2).eval(), torch.randn(10, 2, 6)
    converted = made(layer, x)[1]
    whole, last = converted(x)
    first, state = converted(x[:4])
    second, end = converted(x[4:], state)
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(leaves(last), leaves(end), strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@every_kind
def test_observers_see_the_states_that_the_loop_has(kind: str, packed: bool) -> None:
    torch.manual_seed(3)
    layer, x = KINDS[kind](6, 8, num_layers=3, bidirectional=True).eval(), torch.randn(7, 3, 6)
    state = torch.rand(6, 3, layer.proj_size or 8) * 3
    hx = (state, torch.randn(6, 3, 8)) if layer.mode == "LSTM" else state
    input = pack_padded_sequence(x, torch.tensor([7, 5, 2])) if packed else x
    seen: dict[str, tuple[float, float]] = dict.fromkeys(range_names(layer), (0.0, 0.0))
    walked = dict(seen)

    def into(store: dict[str, tuple[float, float]]) -> Callable[[str, Tensor], Tensor]:
        def show(name: str, values: Tensor) -> Tensor:
            store[name] = min(store[name][0], float(values.min())), max(store[name][1], float(values.max()))
            return values

        return show

    with torch.no_grad():
        output = layer(input, hx)
        observe(layer, (input, hx), {}, output, into(seen))
        again = run_float(layer, input, hx, into(walked))
    assert error(output, again) < 1e-5
    last = again[0].data if packed else again[0]
    into(walked)(range_names(layer)[-1], last)  # what the caller of run_float rounds
    for name in seen:
        assert seen[name] == pytest.approx(walked[name], rel=1e-4, abs=1e-5), name


class Loop(nn.Module):
    """Two cells in a loop of the user's own, and a classifier on the last state."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.one, self.two = kind(6, 8), kind(8, 8)  # type: ignore[call-arg, arg-type]
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = b = None
        outputs = []
        for step in x.unbind(1):
            a = self.one(step, a)
            b = self.two(a[0] if isinstance(a, tuple) else a, b)
            outputs.append(b[0] if isinstance(b, tuple) else b)
        return self.out(outputs[-1]), torch.stack(outputs, 1)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_has_one_range_wherever_it_is_called(kind: type[nn.RNNCellBase]) -> None:
    model, x = Loop(kind).eval(), torch.randn(5, 4, 6)
    prepared, converted = made(model, x)
    names = set(runners(prepared)[""].fused.slots)
    assert {"one.h_l0", "two.h_l0"} <= names
    assert not any("@" in name and name.startswith("one") for name in names)
    with torch.no_grad():
        assert error(model(x), converted(x)) < 0.06
    assert parity(prepared, converted, [x]).holds
    cell: Any = converted.one
    assert isinstance(cell, StaticCell)
    assert cell.weight_ih.shape == model.one.weight_ih.shape  # type: ignore[union-attr]
    assert summary(converted)["one"].detail.startswith("static cell, input [")
    single = cell(x[0, 0])
    assert (single[0] if isinstance(single, tuple) else single).shape == (8,)


class PackedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rnn = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        out: Tensor = self.out(padded)
        return out


def test_a_packed_sequence_inside_of_a_model() -> None:
    model, x = PackedNet().eval(), torch.randn(4, 6, 6)
    converted = made(model, x, torch.tensor([3, 6, 1, 4]))[1]
    assert summary(converted)["rnn"].detail.startswith("static sequence")
    other = torch.tensor([6, 2, 2, 5])
    with torch.no_grad():
        assert error(model(x, other), converted(x, other)) < 0.05


def test_weights_and_sizes_read_as_the_users() -> None:
    model = Net("lstm", num_layers=2, bidirectional=True)
    converted = made(model, torch.randn(5, 2, 7))[1]
    rnn: Any = converted.rnn
    assert (rnn.hidden_size, rnn.num_layers, rnn.mode) == (16, 2, "LSTM")
    for name, weight in model.rnn.named_parameters():
        assert error(weight, getattr(rnn, name)) < 0.01
    with pytest.raises(AttributeError, match="weight_ih_l2"):
        _ = rnn.weight_ih_l2


@every_kind
def test_copies_pickles_and_files_give_the_same_numbers(kind: str, tmp_path: Path) -> None:
    model, x = Net(kind, num_layers=2).eval(), torch.randn(6, 2, 7)
    converted = made(model, x)[1]
    expected = converted(x)
    assert torch.equal(copy.deepcopy(converted)(x), expected)
    between = torch.randn(6, 2, 10)
    again = pickle.loads(pickle.dumps(converted.rnn))
    assert torch.equal(again(between)[0], converted.rnn(between)[0])  # type: ignore[operator]
    save(converted, tmp_path / "model.q8")
    loaded = load(tmp_path / "model.q8", model=Net(kind, num_layers=2))
    assert torch.equal(loaded(x), expected)
    assert set(loaded.state_dict()) == set(converted.state_dict())


def test_another_layers_state_replaces_ranges_too() -> None:
    x, between = torch.randn(6, 2, 7), torch.ones(2, 2, 10)
    one, other = made(Net("gru"), x)[1], made(Net("gru"), 3 * x)[1]
    assert not torch.equal(one.rnn(between)[0], other.rnn(between)[0])  # type: ignore[operator]
    one.rnn.load_state_dict(other.rnn.state_dict())  # type: ignore[union-attr]
    assert torch.equal(one.rnn(between)[0], other.rnn(between)[0])  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="of another calibration"):  # the steps around it have numbers of their own
        one.load_state_dict(other.state_dict())


def test_what_a_fixed_range_cannot_hold_stays_dynamic_and_says_so(tmp_path: Path) -> None:
    torch.manual_seed(6)
    layer = nn.LSTM(8, 8).eval()
    mel = 10 ** (8 * torch.rand(50, 4, 8) - 8)
    with pytest.warns(CalibrationWarning, match="layer '0' becomes dynamic"):
        converted = made(nn.Sequential(layer), mel, recipe=Recipe())[1]
    entry = summary(converted)["0"]
    assert entry.outcome == "int8"
    assert "would round to zero in one fixed range, so dynamic" in entry.detail
    loaded = made(nn.Sequential(nn.LSTM(8, 8)), torch.randn(50, 4, 8))[1]
    assert summary(loaded)["0"].detail.startswith("static")
    save(converted, tmp_path / "model.q8")
    again = load(tmp_path / "model.q8", model=nn.Sequential(nn.LSTM(8, 8)))
    assert torch.equal(again(mel)[0], converted(mel)[0])


def test_weights_that_lose_columns_stay_dynamic_and_say_so() -> None:
    torch.manual_seed(7)
    layer = nn.GRU(8, 8).eval()
    with torch.no_grad():
        layer.weight_ih_l0.mul_(torch.logspace(-8, 0, 8))
    with pytest.warns(CalibrationWarning, match="layer '0' becomes dynamic"):
        converted = made(nn.Sequential(layer), torch.randn(20, 4, 8))[1]
    assert "by column" in summary(converted)["0"].detail
    assert ", so dynamic" in summary(converted)["0"].detail


def test_the_recipe_keeps_a_layer_float_or_in_four_bits() -> None:
    x = torch.randn(6, 2, 7)
    model = Net("gru").eval()
    for setting, outcome in ((None, "float"), (QConfig(weight_bits=4, weight_observer="mse"), "int4")):
        prepared = prepare(model, x, Recipe({"rnn": setting}))
        prepared(x)
        assert summary(convert(prepared))["rnn"].outcome == outcome


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "features": (lambda rnn: rnn(torch.zeros(4, 2, 9)), r"layer 'rnn'.*input has shape \[4, 2, 9\], expected"),
    "state": (
        lambda rnn: rnn(torch.zeros(4, 2, 10), torch.zeros(1, 3, 16)),
        r"layer 'rnn'.*h_0 has shape \[1, 3, 16\]",
    ),
    "dtype": (lambda rnn: rnn(torch.zeros(4, 2, 10).double()), "layer 'rnn'.*float64, expected torch.float32"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_wrong_call_is_refused_by_the_layers_name(name: str) -> None:
    converted = made(Net("gru"), torch.randn(5, 2, 7))[1]
    call, words = BAD[name]
    with pytest.raises((ValueError, TypeError), match=words):
        call(converted.rnn)


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model, x = Net("lstm").eval(), torch.randn(5, 2, 7)
    prepared = prepare(model, x, RECIPE)
    prepared(x)
    with torch.no_grad():
        prepared.rnn.weight_hh_l0[0, 0] = float("nan")  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"layer 'rnn'.*NaN"):
        convert(prepared)


@pytest.mark.parametrize("name", [name for name, reason in dispatch.available().items() if not reason])
def test_every_backend_gives_nearly_the_same(name: str) -> None:
    model, x = Net("lstm", num_layers=2).eval(), torch.randn(5, 2, 7)
    prepared, converted = made(model, x)
    with torch.no_grad():
        assert error(converted(x), convert(prepared, name)(x)) < 0.01


def test_a_converted_model_exports() -> None:
    model, x = Net("lstm", num_layers=2).eval(), torch.randn(5, 2, 7)
    converted = made(model, x)[1]
    expected = converted(x)
    exported = torch.export.export(converted, (x,)).module()
    assert torch.equal(exported(x), expected)


class Shifted(nn.Module):
    """Two programs, whose recurrent layer, or cell, sees other ranges."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn: Any = {"gru": nn.GRU, "lstm": nn.LSTM, "cell": nn.GRUCell}[kind](16, 16)
        self.after = nn.Linear(16, 16)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = self.rnn(x if other is None else x + other)
        result: Tensor = self.after(y if isinstance(y, Tensor) else y[0])
        return result


@pytest.mark.parametrize("kind", ["gru", "lstm", "cell"])
@pytest.mark.parametrize("wider_first", [False, True])
def test_programs_that_call_one_layer_agree_on_its_ranges(kind: str, wider_first: bool) -> None:
    model, generator = Shifted(kind).eval(), torch.Generator().manual_seed(1)

    def values() -> Tensor:
        return torch.randn(*((9,) if kind == "cell" else (7, 9)), 16, generator=generator) * 0.3

    def call(wider: bool) -> tuple[Tensor, ...]:
        return (values(), 3 * values()) if wider else (values(),)

    with torch.no_grad():
        prepared = prepare(model, call(wider_first), RECIPE)
        for turn in range(6):
            prepared(*call(turn % 2 == 0))
        converted = convert(copy.deepcopy(prepared))
        for wider in (False, True):
            given = call(wider)
            found = converted(*given)
            assert error(model(*given), found) < 0.05
            with simulating(prepared, exact=True):
                assert error(prepared(*given), found) < 1e-3

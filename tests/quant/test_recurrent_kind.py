"""A recurrent kind of somebody else's: what is registered in this one file goes every way that an LSTM goes."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import dispatch
from quant.kernels.recurrent.kind import RecurrentKind, find, register
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from quant import Recipe, convert, load, parity, prepare, prepare_qat, quantize_dynamic, save, summary
from quant.nn.recurrent import OneStateSequence, register_recurrent
from quant.recipe import QConfig
from quant.recurrent_layers import kind_of
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.static.simulation import simulating

from .test_static_rnn import error

RECIPE = Recipe(default=QConfig(activation_observer="minmax"))


# --- all that a new kind is: its step, its float classes, one call --------------------------------------------------


def minimal_step(a: Tensor, r: Tensor, bias_hh: Tensor | None, h: Tensor, c: Tensor | None) -> tuple[Tensor, None]:
    """The minimal gated unit (Zhou et al., 2016), its gate on the product as torch's GRU has it."""
    forget_in, new_in = a.chunk(2, dim=1)
    forget_h, new_h = r.chunk(2, dim=1)
    bias_forget, bias_new = (0.0, 0.0) if bias_hh is None else bias_hh.chunk(2)
    forget = torch.sigmoid(forget_in + forget_h + bias_forget)
    new = torch.tanh(new_in + forget * (new_h + bias_new))
    return (1.0 - forget) * h + forget * new, None


MINIMAL = RecurrentKind("minimal_gated_unit", gates=2, step=minimal_step, sums_biases=False)


class MinimalCell(nn.Module):
    """One step, written by itself."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        for name, shape in (("ih", (2 * hidden_size, input_size)), ("hh", (2 * hidden_size, hidden_size))):
            self.register_parameter(f"weight_{name}", nn.Parameter(torch.empty(shape).uniform_(-0.4, 0.4)))
            self.register_parameter(f"bias_{name}", nn.Parameter(torch.empty(shape[0]).uniform_(-0.4, 0.4)))

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        h = input.new_zeros(len(input), self.hidden_size) if hx is None else hx
        return _own_step(input, h, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)


class MinimalSequence(nn.Module):
    """Layers over a sequence, one or two directions."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bidirectional: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.bidirectional = num_layers, bidirectional
        self.ways = ("", "_reverse") if bidirectional else ("",)
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * len(self.ways)
            for way in self.ways:
                for name, size in (("ih", width), ("hh", hidden_size)):
                    weight = torch.empty(2 * hidden_size, size).uniform_(-0.4, 0.4)
                    self.register_parameter(f"weight_{name}_l{layer}{way}", nn.Parameter(weight))
                    if bias:
                        rows = torch.empty(2 * hidden_size).uniform_(-0.4, 0.4)
                        self.register_parameter(f"bias_{name}_l{layer}{way}", nn.Parameter(rows))

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        if isinstance(input, PackedSequence):
            return self._packed(input)
        x, ends = input, []
        for layer in range(self.num_layers):
            outputs = []
            for way in self.ways:
                own = [getattr(self, f"{name}_l{layer}{way}", None) for name in NAMES]
                h = x.new_zeros(x.shape[1], self.hidden_size) if hx is None else hx[len(ends)]
                states = []
                for step in reversed(x.unbind(0)) if way else x.unbind(0):
                    h = _own_step(step, h, *own)
                    states.append(h)
                outputs.append(torch.stack(states[::-1] if way else states))
                ends.append(h)
            x = torch.cat(outputs, dim=-1)
        return x, torch.stack(ends)

    def _packed(self, input: PackedSequence) -> tuple[PackedSequence, Tensor]:
        """Each sample alone."""
        padded, lengths = nn.utils.rnn.pad_packed_sequence(input)
        alone = [self(padded[:length, [sample]]) for sample, length in enumerate(lengths.tolist())]
        ys = [y[:, 0] for y, _ in alone]
        packed = nn.utils.rnn.pack_sequence(ys, enforce_sorted=input.sorted_indices is None)
        return packed, torch.cat([h for _, h in alone], dim=1)


NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _own_step(x: Tensor, h: Tensor, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Tensor:
    a, r = nn.functional.linear(x, w_ih, b_ih).chunk(2, 1), nn.functional.linear(h, w_hh, b_hh).chunk(2, 1)
    forget = torch.sigmoid(a[0] + r[0])
    return h + forget * (torch.tanh(a[1] + forget * r[1]) - h)


@pytest.fixture(autouse=True)
def added(own_registries: None) -> None:
    register(MINIMAL)
    register_recurrent(MINIMAL, sequence=MinimalSequence, cell=MinimalCell)


# --- what goes its ways ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Linear, recurrent, Linear: what is between stays uint8 in a static model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(7, 10)
        self.rnn = MinimalSequence(10, 16, **options)
        self.after = nn.Linear(16 * len(self.rnn.ways), 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.rnn(self.before(x))[0])
        return out


class Loop(nn.Module):
    """Cells in a loop of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.out = MinimalCell(6, 8), MinimalCell(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = b = None
        for step in x.unbind(1):
            a = self.one(step, a)
            b = self.two(a, b)
        out: Tensor = self.out(b)
        return out


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (lambda: Net(), (8, 3, 7)),
    "two-layers-two-ways": (lambda: Net(num_layers=2, bidirectional=True), (8, 3, 7)),
    "no-bias": (lambda: Net(num_layers=2, bias=False), (8, 3, 7)),
    "cells": (Loop, (5, 4, 6)),
}
each = pytest.mark.parametrize("name", list(MODELS))


def made(name: str) -> tuple[nn.Module, Tensor]:
    model, shape = MODELS[name]
    return model().eval(), torch.randn(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("backend", [name for name, reason in dispatch.available().items() if not reason])
@each
def test_it_is_quantised_dynamically(name: str, backend: str, tmp_path: Path) -> None:
    model, x = made(name)
    q = quantize_dynamic(model, backend=backend)
    layer = "one" if name == "cells" else "rnn"
    with torch.no_grad():
        assert error(model(x), q(x)) < 0.03
        assert torch.equal(q(x), quantize_dynamic(model, backend="reference")(x))  # products are exact on each
    assert summary(q)[layer].outcome == "int8"
    assert "steps of minimal_gated_unit in torch arithmetic" in summary(q)[layer].detail
    save(q, tmp_path / "model.q8")
    assert torch.equal(load(tmp_path / "model.q8", model=made(name)[0])(x), q(x))
    assert torch.equal(copy.deepcopy(q)(x), q(x))
    assert torch.equal(pickle.loads(pickle.dumps(q))(x), q(x))


@each
def test_it_is_quantised_statically(name: str, tmp_path: Path) -> None:
    model, x = made(name)
    prepared = prepare(model, x, RECIPE)
    with torch.no_grad():
        assert torch.equal(prepared(x), model(x))
        q = convert(prepared)
        assert error(model(x), q(x)) < 0.05
        with simulating(prepared, exact=True):
            assert error(prepared(x), q(x)) < 0.01
        assert torch.equal(q(x), convert(prepared, "reference")(x))
    agreement = parity(prepared, q, [x, 0.7 * x])
    assert agreement.holds, agreement
    layers = [module for module in q.modules() if isinstance(module, (StaticRecurrent, StaticCell))]
    assert len(layers) == (2 if name == "cells" else 1)
    assert {summary(q)[path].outcome for path, _ in model.named_children()} == {"int8"}
    save(q, tmp_path / "model.q8")
    assert torch.equal(load(tmp_path / "model.q8", model=made(name)[0])(x), q(x))
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(layers[0]))).input_scale, layers[0].input_scale)


@each
def test_it_is_trained_and_converted_to_what_eval_showed(name: str) -> None:
    model, x = made(name)
    with torch.no_grad():
        target = model(x) + 0.3 * torch.randn(model(x).shape, generator=torch.Generator().manual_seed(3))
    prepared = prepare_qat(model, x).train()
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        loss = (prepared(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is not None for weight in prepared.parameters())
    prepared.eval()
    with torch.no_grad():
        expected = prepared(x)
        with simulating(prepared):
            assert torch.equal(prepared(x), expected)
        q = convert(prepared)
        assert error(expected, q(x)) < 0.01
    agreement = parity(prepared, q, [x])
    assert agreement.holds, agreement


@pytest.mark.parametrize("sorted_already", [True, False], ids=["sorted", "any-order"])
def test_packed_sequences_and_states_go_in_and_out(sorted_already: bool) -> None:
    torch.manual_seed(4)
    layer, x = MinimalSequence(6, 8, num_layers=2, bidirectional=True).eval(), torch.randn(9, 3, 6)
    lengths = torch.tensor([9, 7, 4] if sorted_already else [4, 9, 6])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=sorted_already)
    state = torch.rand(4, 3, 8) - 0.5
    prepared = prepare(layer, {"input": x, "hx": state}, RECIPE)
    with torch.no_grad():
        prepared(x, state)
        for q in (quantize_dynamic(layer), convert(prepared)):
            assert error(layer(x, state), q(x, state)) < 0.05
            assert error(layer(x), q(x)) < 0.05
            assert error(layer(packed), q(packed)) < 0.05


def test_it_is_exported_and_goes_in_half_types() -> None:
    model, x = made("plain")[0], torch.randn(2, 3, 7)
    q = quantize_dynamic(model)
    exported = torch.export.export(q, (x,)).module()
    assert torch.equal(exported(x), q(x))
    half = quantize_dynamic(model.to(torch.bfloat16))
    assert half(x.to(torch.bfloat16)).dtype == torch.bfloat16


def test_an_int8_class_of_its_own_is_what_the_layer_becomes() -> None:
    class Own(MinimalSequence):
        pass

    class OwnInt8(OneStateSequence):
        pass

    register_recurrent(MINIMAL, sequence=Own, int8_sequence=OwnInt8)
    assert isinstance(quantize_dynamic(Own(6, 8)), OwnInt8)


def test_a_class_of_somebody_elses_may_be_an_lstm_with_its_kernel() -> None:
    class Renamed(nn.LSTM):
        def forward(self, input: Any, hx: Any = None) -> Any:
            return super().forward(input, hx)

    class RenamedCell(nn.LSTMCell):
        def forward(self, input: Any, hx: Any = None) -> Any:
            return super().forward(input, hx)

    register_recurrent(find("lstm"), sequence=Renamed, cell=RenamedCell)
    for theirs, torchs, shape in ((Renamed, nn.LSTM, (5, 3, 6)), (RenamedCell, nn.LSTMCell, (3, 6))):
        torch.manual_seed(5)
        layer, x = theirs(6, 8).eval(), torch.randn(shape)
        same = torchs(6, 8).eval()
        same.load_state_dict(layer.state_dict())
        q, expected = quantize_dynamic(layer), quantize_dynamic(same)
        assert type(q) is not type(expected)
        assert error(expected(x), q(x)) == 0.0
        assert "torch arithmetic" not in summary(q)[""].detail
        static = [convert(_calibrated(one, x)) for one in (layer, same)]
        assert error(static[0](x), static[1](x)) == 0.0


def _calibrated(layer: nn.Module, x: Tensor) -> nn.Module:
    prepared = prepare(layer, x, RECIPE)
    prepared(x)
    return prepared


def test_a_subclass_that_computes_something_else_stays_float() -> None:
    class Other(MinimalSequence):
        def forward(self, input: Any, hx: Any = None) -> Any:
            y, h = super().forward(input, hx)
            return 2 * y, h

    model = nn.ModuleDict({"a": Other(6, 8), "b": nn.Linear(2, 2)})
    detail = summary(quantize_dynamic(model))["a"].detail
    assert detail == "Other overrides MinimalSequence's forward, which int8 would skip"


def test_what_is_registered_twice_or_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recurrent kind 'lstm': .* is registered, and .* was before"):
        register(RecurrentKind("lstm", gates=4, step=minimal_step))
    with pytest.raises(ValueError, match=r"recurrent layer of .*LSTM: .* is registered, and .* was before"):
        register_recurrent(find("lstm"), sequence=nn.LSTM)
    with pytest.raises(ValueError, match="expected a sequence, a cell or both"):
        register_recurrent(MINIMAL)
    assert kind_of(nn.LSTM(2, 2)) is find("lstm")


def test_a_module_without_its_sizes_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_ih = nn.Parameter(torch.randn(4, 2))

    register_recurrent(MINIMAL, cell=Bare)
    with pytest.raises(ValueError, match="Bare is registered as a recurrent layer and has no input_size"):
        quantize_dynamic(nn.ModuleDict({"a": Bare()}))


PACKAGE = """
import torch
from quant.kernels.recurrent.kind import RecurrentKind
from quant.nn.recurrent.register import shared_cell
from quant.recurrent_layers import RecurrentClass
from torch import nn

def light_step(a, r, bias_hh, h, c):
    return torch.tanh(a + r) + h / 2, None

LIGHT = RecurrentKind("light", gates=1, step=light_step)

class LightCell(nn.RNNCell):
    def forward(self, input, hx=None):
        h = input.new_zeros(len(input), self.hidden_size) if hx is None else hx
        return super().forward(input, h) + h / 2

CELL = RecurrentClass(LightCell, True, lambda module: LIGHT, shared_cell)
WRONG = LIGHT
"""


def test_an_installed_package_needs_no_call(install: Callable[..., None]) -> None:
    install(PACKAGE, "octet.recurrent", **{"toy_module.LightCell": "toy_module:CELL"})
    toy_module = importlib.import_module("toy_module")
    cell, x = toy_module.LightCell(6, 8), torch.randn(3, 6)
    assert kind_of(cell) is toy_module.LIGHT
    register(toy_module.LIGHT)  # which an entry point of the other group does
    assert error(cell(x), quantize_dynamic(cell)(x)) < 0.03
    assert error(cell(x), convert(_calibrated(cell, x))(x)) < 0.05


def test_a_package_offers_a_kind_by_its_name(install: Callable[..., None]) -> None:
    install(PACKAGE, "octet.recurrent_kinds", light="toy_module:LIGHT")
    assert find("light").gates == 1


def test_what_a_package_offers_must_be_a_kind_of_that_name(install: Callable[..., None]) -> None:
    install(PACKAGE, "octet.recurrent_kinds", heavy="toy_module:LIGHT")
    with pytest.raises(ValueError, match=r"recurrent kind 'heavy': expected a RecurrentKind of that name.*toy 1\.0"):
        find("heavy")

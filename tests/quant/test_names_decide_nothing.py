"""A layer or function is recognised by what it is: names of torch's on something else change nothing."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import prepare, quantize_dynamic, quantize_static, register_leaf, summary
from quant.capture import calls
from quant.leaves import base_layer
from quant.parity import parity
from quant.static.runner import runners

from .test_convert import check, signal_to_noise

MOVES: dict[str, Any] = {
    "Flatten": lambda kind: kind(2),
    "Dropout": lambda kind: kind(0.5),
    "Identity": lambda kind: kind(),
    "PixelShuffle": lambda kind: kind(2),
    "ChannelShuffle": lambda kind: kind(2),
    "ReLU": lambda kind: kind(),
    "ReLU6": lambda kind: kind(),
    "Hardtanh": lambda kind: kind(-0.5, 0.25),
    "Sigmoid": lambda kind: kind(),
}
"""Layers between two convolutions, which need no channels in particular."""

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


class Between(nn.Module):
    """A layer of 8 channels between two convolutions, read by a convolution or a product whatever its shape."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.one, self.layer = nn.Conv2d(4, 8, 3, padding=1), layer
        width = int(self.layer(torch.zeros(1, 8, 8, 8)).shape[-1])
        self.two = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.layer(self.one(x)))


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("borrowed", MOVES)
def test_a_subclass_may_have_the_name_of_any_layer(name: str, borrowed: str) -> None:
    torch.manual_seed(0)
    kind = type(borrowed, (getattr(nn, name),), {})
    assert base_layer(MOVES[name](kind)) is getattr(nn, name)
    check(Between(MOVES[name](kind).eval()), X, sqnr=28.0)


@pytest.mark.parametrize("name", [*MOVES, "GELU", "LayerNorm", "Linear", "Conv2d", "LSTM", "BatchNorm2d", "MaxPool2d"])
@pytest.mark.parametrize("how", ["own", "subclass", "leaf", "object"])
def test_a_forward_of_its_own_is_what_counts(name: str, how: str) -> None:
    torch.manual_seed(0)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.roll(x, 1, -1) + 0.5 * x

    if how == "object":
        layer: nn.Module = nn.ReLU()
        layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    else:
        parent = nn.ReLU if how == "subclass" else nn.Module
        kind = type(name, (parent,), {"forward": forward})
        layer = (register_leaf(kind) if how == "leaf" else kind)()
    model = Between(layer).eval()
    q = quantize_static(model, [X], progress=False)
    with torch.no_grad():
        assert signal_to_noise(model(X), q(X)) > 28.0
        other = 2.0 * X.flip(0)
        assert signal_to_noise(model(other), q(other)) > 8.0


@torch.library.custom_op("octettest::relu", mutates_args=())
def _relu(x: Tensor) -> Tensor:
    return x.roll(1, -1) * 2.0


@torch.library.custom_op("octettest::flatten", mutates_args=())
def _flatten(x: Tensor) -> Tensor:
    return x + 1.0


@torch.library.custom_op("octettest::dropout", mutates_args=())
def _dropout(x: Tensor) -> Tensor:
    return x.flip(-1)


@torch.library.custom_op("octettest::size", mutates_args=())
def _size(x: Tensor) -> Tensor:
    return x * 0.5


@torch.library.custom_op("octettest::log", mutates_args=())
def _log(x: Tensor) -> Tensor:
    return x * -1.0


def relu(x: Tensor) -> Tensor:
    return F.hardtanh(x, -1.0, 0.5)


def cat(x: Tensor) -> Tensor:
    return torch.flip(x, (-1,))


def add(x: Tensor) -> Tensor:
    return x * 3.0


@pytest.mark.parametrize(
    "function",
    [
        *(torch.ops.octettest.__getattr__(name) for name in ("relu", "flatten", "dropout", "size", "log")),
        relu,
        cat,
        add,
    ],
    ids=lambda function: getattr(function, "__name__", str(function)),
)
def test_a_function_may_have_the_name_of_torchs(function: Any) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(function(self.one(x)))

    torch.manual_seed(0)
    model, x = Calls().eval(), torch.randn(6, 8)
    with torch.no_grad():
        q = quantize_static(model, [x], progress=False)
        assert signal_to_noise(model(x), q(x)) > 28.0
        assert signal_to_noise(model(x * 0.5), q(x * 0.5)) > 22.0


def test_methods_with_names_of_tensors_methods_are_seen_through() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

        def relu(self, x: Tensor) -> Tensor:
            return x.flip(-1) * 2.0

        def view(self, x: Tensor, *shape: int) -> Tensor:
            return -x

        size = view

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.size(self.view(self.relu(self.one(x)), 3)))

    torch.manual_seed(0)
    check(Named(), torch.randn(6, 8), sqnr=28.0)


def test_a_method_replaced_on_the_object_is_not_skipped() -> None:
    class Standardised(nn.Conv2d):
        pass

    torch.manual_seed(0)
    conv = Standardised(4, 8, 3)
    plain = conv._conv_forward
    conv._conv_forward = lambda x, weight, bias: plain(x, weight * 3.0, bias)  # type: ignore[method-assign]
    model = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    assert base_layer(conv) is None
    prepared = prepare(model, X)
    with torch.no_grad():
        assert torch.allclose(prepared(X), model(X), atol=1e-5)
    assert len(runners(prepared)) == 1
    q = quantize_static(model, [X], progress=False)
    with torch.no_grad():
        assert signal_to_noise(model(X), q(X)) > 25.0


@pytest.mark.parametrize("name", ["Linear", "LSTM", "Embedding"])
def test_dynamic_takes_layers_by_class_not_by_name(name: str) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.0)

    kind = type(name, (nn.Linear,), {"forward": forward})
    renamed = type("Whatever", (nn.Linear,), {})
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 8), renamed(8, 8)).eval()
    q = quantize_dynamic(model)
    x = torch.randn(4, 8)
    assert type(q[0]) is kind
    assert type(q[1]).__name__ != "Whatever" or hasattr(q[1], "q_weight")
    with torch.no_grad():
        assert signal_to_noise(model(x), q(x)) > 30.0


def test_parity_holds_under_borrowed_names() -> None:
    kind = type("Identity", (nn.Flatten,), {})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), kind(), nn.Linear(144, 3)).eval()
    prepared = prepare(model, X)
    prepared(X)
    from quant.convert import convert

    assert parity(prepared, convert(prepared), [X]).holds


@pytest.mark.parametrize("name", ["grad", "device", "nonzero", "__len__", "size"])
def test_capture_knows_torchs_functions_from_others_of_their_names(name: str) -> None:
    def other(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(x):
            result: Tensor = torch.overrides.handle_torch_function(other, (x,), x)
            return result
        return x.roll(1, -1) * 2.0

    other.__name__ = name

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = other(self.one(x))
            return self.two(y.view(len(y), -1))

    torch.manual_seed(0)
    model, x = Calls().eval(), torch.randn(6, 8)
    runner = runners(prepare(model, (x,)))[""]
    assert sum(node.target is other for node in runner.graph.nodes) == 1
    with torch.no_grad():
        assert torch.equal(runner(torch.ones(3, 8)), model(torch.ones(3, 8)))


def test_submodules_may_have_the_names_of_methods() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split, self.two = nn.LSTM(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.split(x)
            return self.two(y)

    graph = runners(prepare(Calls().eval(), (torch.randn(5, 2, 8),)))[""].graph
    assert not any(node.target is len for node in graph.nodes)


def test_layers_may_have_the_names_of_calls_and_programs() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in {
                "(root)": nn.Conv2d(3, 8, 3),
                "pool@2": nn.MaxPool2d(2),
                "conv@1": nn.Conv2d(8, 4, 3),
            }.items():
                self.add_module(name, layer)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    q = quantize_static(Odd().eval(), [torch.randn(2, 3, 12, 12)], progress=False)
    outcomes = {entry.name: entry.outcome for entry in summary(q)}
    assert outcomes == {"(root)": "int8", "pool@2": "int8", "conv@1": "int8", "(planned run)": "int8"}


def test_this_torch_has_what_capture_lists() -> None:
    """One entry or more for every name: a misspelt one would be an empty table's."""
    absent = {"names", "has_names"}  # gone with named tensors in torch 2.13
    source = ast.parse(inspect.getsource(calls))
    tables = [one for one in ast.walk(source) if isinstance(one, ast.Call) and ast.unparse(one.func) == "functions"]
    names = [ast.literal_eval(name) for table in tables for name in table.args]
    assert len(names) > 100
    assert {name for name in names if not calls.functions(name)} <= absent

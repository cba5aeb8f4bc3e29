"""Capture records on real tensors: what leaves torch is seen, state is written, objects keep their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quant
from quant.capture import capture
from quant.static.prepared import record_of


def decibels(expected: Tensor, got: Tensor) -> float:
    """Signal over error."""
    return float(10 * torch.log10(expected.pow(2).sum() / (expected - got).pow(2).sum().clamp_min(1e-30)))


class Model(nn.Module):
    """A layer, something, and a layer."""

    def __init__(self, between: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, 3.0)


LEAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda y: torch.from_numpy(np.tanh(y.numpy())),
    "an array of it": lambda y: torch.as_tensor(np.asarray(y) * 2),
    "a numpy function": lambda y: torch.as_tensor(np.tanh(y)),
    "a list": lambda y: torch.tensor(y.tolist()),
    "dlpack": lambda y: torch.from_dlpack(y) * 2,
    "storage": lambda y: torch.empty(0).set_(y.contiguous().untyped_storage(), 0, y.shape),
    "vmap": torch.func.vmap(lambda row: row * 2),
    "a loop until": lambda y: y / 2 if float(y.abs().max()) > 0 else y,
}


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context")
@pytest.mark.parametrize("between", LEAVING.values(), ids=list(LEAVING))
def test_what_leaves_torch_is_an_island_and_right(between: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Model(between).eval()
    batches = [torch.randn(8, 16) for _ in range(3)]
    q = quant.quantize_static(model, batches, progress=False)
    x = torch.randn(5, 16)
    with torch.no_grad():
        assert decibels(model(x), q(x)) > 25
    assert "island" in quant.summary(q)[""].detail


def test_a_layer_under_vmap_stays_float_and_says_why() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.func.vmap(self.first)(x).relu())
            return out

    model, x = Mapped().eval(), torch.randn(8, 16)
    q = quant.quantize_static(model, [x], progress=False)
    why = "an island: it is called inside of a transform of torch.func (vmap, grad, ...)"
    assert (quant.summary(q)["first"].outcome, quant.summary(q)["first"].detail) == ("float", why)
    assert quant.summary(q)["last"].outcome == "int8"
    with torch.no_grad():
        assert decibels(model(x), q(x)) > 25


def test_a_function_with_its_own_backward_is_seen_through_and_in_training_an_island() -> None:
    model, x = Model(Swish.apply).eval(), torch.randn(4, 16)
    assert not capture(model, x).islands
    assert "torch.autograd.Function" in capture(model, x, training=True).islands[""]
    p = quant.prepare_qat(model, x)
    p.train()
    p(x).sum().backward()
    assert p.first.weight.grad is not None


class Streaming(nn.Module):
    """A causal convolution that keeps the end of its last input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv1d(4, 8, 3), None
        self.register_buffer("context", torch.zeros(1, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.context, x], 2)
        self.context = x[:, :, -2:]
        return self.conv(x)


def test_state_is_written_and_calibration_leaves_none() -> None:
    torch.manual_seed(0)
    model, parts = Streaming().eval(), [torch.randn(1, 4, 16) for _ in range(4)]
    q = quant.quantize_static(model, parts, progress=False)
    assert torch.equal(model.context, torch.zeros(1, 4, 2))
    assert torch.equal(q.context, torch.zeros(1, 4, 2))
    with torch.no_grad():
        assert all(decibels(model(x), q(x)) > 30 for x in parts)
    assert not [entry for entry in quant.summary(q) if "island" in entry.detail]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.seen = nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.fc(x) * self.seen


def test_a_count_in_python_is_an_island() -> None:
    model, x = Counting().eval(), torch.randn(4, 16)
    q = quant.quantize_static(model, [x, x], progress=False)
    assert q.seen == 0
    with torch.no_grad():
        assert all(decibels(model(x), q(x)) > 25 for _ in range(3))


class Notes(nn.Module):
    """Holds what its parent's forward writes, and is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.length: int | None = None
        self.started: bool | None = None
        self.calls = 0


class Noting(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.notes, self.fc, self.counts = Notes(), nn.Linear(16, 16), counts

    def forward(self, x: Tensor) -> Tensor:
        self.notes.started = True
        self.notes.length = x.shape[0]
        self.notes.calls += self.counts
        return self.fc(x) / self.notes.length


def test_a_constant_and_a_size_that_are_written_again_are_no_state_of_a_graph() -> None:
    """The second recording finds the constant written already, and the size where the batch is held."""
    torch.manual_seed(0)
    model = Noting(counts=False).eval()
    q = quant.quantize_static(model, [torch.randn(64, 16)], progress=False)
    assert not [entry for entry in quant.summary(q) if "island" in entry.detail]
    for rows in (3, 3, 5):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            assert decibels(model(x), q(x)) > 25
        assert (q.notes.length, q.notes.started) == (rows, True)


def test_a_size_is_written_though_the_batch_is_held() -> None:
    class OneBatch(Noting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(4, -1, 16)[:, 0])

    found = capture(OneBatch(counts=False).eval(), torch.randn(4, 16))
    assert not found.islands


@pytest.mark.parametrize("prepare", [quant.prepare, quant.prepare_qat])
def test_where_a_module_that_is_never_called_holds_the_state_its_caller_is_the_island(prepare: Any) -> None:
    """The holder was made an island again and again, which changed nothing."""
    prepared = prepare(nn.Sequential(Noting(counts=True)).eval(), torch.randn(4, 16))
    assert list(record_of(prepared).islands) == ["0"]


class Told(nn.Module):
    """Leaves torch, with a number that its caller set on it."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy())) * self.factor


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.told = nn.Linear(16, 16), Told()

    def forward(self, x: Tensor) -> Tensor:
        self.told.factor = 3.0
        return self.told(self.fc(x))


def test_what_is_written_on_an_island_before_it_runs_reaches_it() -> None:
    torch.manual_seed(0)
    model = Telling().eval()
    q = quant.quantize_static(model, [torch.rand(8, 16) for _ in range(4)], progress=False)
    x = torch.rand(8, 16) / 2
    with torch.no_grad():
        assert decibels(model(x), q(x)) > 25


class Box:
    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name, self.more = tensor, name, [tensor.shape[0], None]


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Box:
        return Box(self.fc(x), "y")


def test_an_object_of_the_users_own_comes_back_with_this_calls_tensors() -> None:
    torch.manual_seed(0)
    model, x = Boxed().eval(), torch.randn(6, 16)
    q = quant.quantize_static(model, [torch.randn(64, 16)], progress=False)
    with torch.no_grad():
        got, expected = q(x), model(x)
    assert (type(got), got.name, got.more) == (Box, "y", [6, None])
    assert decibels(expected.tensor, got.tensor) > 25


class Cache:
    """Keys of all calls so far."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, k: Tensor) -> Tensor:
        self.keys[:] = [torch.cat([*self.keys, k], 1)]
        return self.keys[0]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        k = cache.update(self.k(x))
        return self.o((self.q(x) @ k.transpose(1, 2)).softmax(-1) @ k), cache


def test_what_a_caller_gave_is_written_to_and_given_back() -> None:
    torch.manual_seed(0)
    model, x, past = Decoder().eval(), torch.randn(2, 3, 16), torch.randn(2, 5, 16)

    def filled() -> Cache:
        cache = Cache()
        cache.keys = [past]
        return cache

    prepared = quant.prepare(model, (x, filled()))
    with torch.no_grad():
        prepared(x, filled())
        q, cache, other = quant.convert(prepared), filled(), filled()
        y, given = q(x, cache)
        expected, _ = model(x, other)
    assert given is cache
    assert cache.keys[0].shape == (2, 8, 16)
    assert decibels(expected, y) > 25
    assert decibels(other.keys[0], cache.keys[0]) > 25

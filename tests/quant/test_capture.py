"""What capture sees: graphs, islands, branches on sizes, changes in place, and calls that a graph does not fit."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.capture import capture
from quant.capture.outer_objects import Outside
from quant.capture.snapshot import Snapshot, storages_of
from quant.graph import Graph, Kind, evaluate, expected_call
from quant.leaves import is_leaf, register_leaf
from quant.runtime.binding import bound_values
from quant.runtime.matching import CaptureMismatch
from quant.runtime.trees import Ref, leaves, map_leaves
from quant.static.runner import finished, output_of

WRITTEN = "its forward reads a tensor after a view of it, or a call that got it, changed it in place"


def replay(graph: Graph, root: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The output of a captured graph."""
    values = bound_values(expected_call(graph), root, args, kwargs)
    for node in graph.nodes:
        if node.kind is not Kind.INPUT:
            values[node.index] = evaluate(node, root, values.__getitem__)
    return finished(output_of(graph, values), root, args, kwargs)


def equal(one: Any, other: Any) -> bool:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def whole(model: nn.Module, inputs: Any) -> Graph:
    """The graph of a model that is captured without an island."""
    found = capture(model.eval(), inputs)
    assert found.islands == {}
    return found.graphs[""]


class Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, *others: Tensor, scale: float = 2.0, extra: dict[str, Tensor] | None = None) -> Any:
        y = self.fc(x) * scale
        for other in others:
            y = y + other
        return {"y": y, "pair": (y, None), "extra": [] if extra is None else [extra["z"] + y]}


def test_arguments_of_every_kind() -> None:
    model, x = Inputs(), torch.randn(2, 4)
    graph = whole(model, (x, x, x))
    assert equal(replay(graph, model, x, 2 * x, x), model(x, 2 * x, x))
    named = whole(model, {"x": x, "extra": {"z": x}, "scale": 3.0})
    assert equal(replay(named, model, x=x, extra={"z": 2 * x}, scale=3.0), model(x, extra={"z": 2 * x}, scale=3.0))
    other = replay(named, model, x=x, extra={"z": x}, scale=4.0)
    assert equal(other, model(x, extra={"z": x}, scale=4.0)), "a number that the caller gives is free"
    with pytest.raises(CaptureMismatch, match="argument 'scale' was of type float in example_inputs and is 4 now"):
        replay(named, model, x=x, extra={"z": x}, scale=4)
    with pytest.raises(CaptureMismatch, match=r"argument 'scale': expected 2\.0, as in example_inputs, got 3\.0"):
        replay(graph, model, x, x, x, scale=3.0)  # what nobody gave is the default
    with pytest.raises(CaptureMismatch, match="argument 'extra': expected keys"):
        replay(named, model, x=x, extra={}, scale=3.0)
    with pytest.raises(CaptureMismatch, match="argument 'others': expected tuple of 2"):
        replay(graph, model, x)


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


Named = collections.namedtuple("Named", ["first", "second"])


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return Output(y, (x, y)), Named(y, 3), {"shape": y.shape[0]}


def test_outputs_of_every_kind() -> None:
    model, x = Outputs(), torch.randn(2, 4)
    got = replay(whole(model, x), model, torch.cat([x, x]))
    assert isinstance(got[0], Output)
    assert isinstance(got[1], Named)
    assert got[2] == {"shape": 4}
    assert equal(got, model(torch.cat([x, x])))


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError("three dimensions")
        batch, time, _ = x.shape
        position = torch.arange(time).unsqueeze(0).expand(batch, time)
        y = self.fc(x) + position.unsqueeze(-1) / max(time, 2)
        if batch > 100:
            y = y * 2
        return torch.stack([part.sum(1) for part in y.split(2, dim=-1)], 1).view(batch, -1)


def test_sizes_stay_free_and_branches_on_them_are_guarded() -> None:
    model = Sizes()
    graph = whole(model, torch.randn(2, 5, 4))
    x = torch.randn(7, 9, 4)
    assert equal(replay(graph, model, x), model(x))
    with pytest.raises(CaptureMismatch, match=r"decides by a condition: it was False .* and is True now"):
        replay(graph, model, torch.randn(101, 5, 4))
    with pytest.raises(CaptureMismatch, match="was of 3 dimensions in example_inputs and is of 2 now"):
        replay(graph, model, torch.randn(5, 4))


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x[0]
        for row in x[1:]:
            total = total + row
        return total


def test_a_loop_over_rows_is_guarded() -> None:
    model = Loop()
    graph = whole(model, torch.randn(3, 4))
    x = torch.randn(3, 4)
    assert torch.allclose(replay(graph, model, x), x.sum(0))
    with pytest.raises(CaptureMismatch, match="decides by a size"):
        replay(graph, model, torch.randn(4, 4))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :2] = self.fc(x)[:, :2]
        return y


class Numbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.max())


ISLANDS = {
    "branches on values": (Branches, "its forward branches on a tensor's values"),
    "reads a number": (Numbers, "its forward computes in Python with a tensor's values"),
}


def test_writes_into_parts_of_new_tensors_are_kept() -> None:
    model, x = Writes(), torch.randn(3, 4)
    graph = whole(model, x)
    assert equal(replay(graph, model, 2 * x), model(2 * x))


@pytest.mark.parametrize(("kind", "reason"), ISLANDS.values(), ids=list(ISLANDS))
def test_a_part_that_cannot_be_captured_is_an_island(kind: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))
    found = capture(model.eval(), torch.rand(3, 4) + 1)
    assert found.islands == {"1": reason}
    assert set(found.graphs) <= {"", "1.fc"}
    assert [node.target for node in found.graphs[""].nodes if node.kind is Kind.MODULE] == ["0", "1", "2"]


def test_the_model_itself_can_be_an_island() -> None:
    class Model(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.body(x)) if x.sum() > 0 else self.body(x)

    found = capture(Model().eval(), torch.ones(1, 4))
    assert "" in found.islands
    assert "body" in found.graphs


def test_an_error_of_the_users_own_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3)), torch.randn(2, 4))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if bool(x.isfinite().all()) else x


class Outer(nn.Module):
    """An island that is found out after the island inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.inner(x))
        return y if float(y.sum()) < 1e9 else x


@pytest.mark.parametrize("path", ["", "0."], ids=["root", "part"])
def test_the_layers_of_an_island_inside_an_island_are_captured(path: str) -> None:
    model = nn.Sequential(Outer(), nn.ReLU()) if path else Outer()
    found = capture(model, torch.ones(2, 4))
    assert set(found.islands) == {path.rstrip("."), f"{path}inner"}
    assert set(found.graphs) - {""} == {f"{path}inner.fc", f"{path}fc"}


class Notes(nn.Module):
    """Notes what it saw, as code that shows attention maps does, and looks up by the number of dimensions."""

    seen: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x * 2
        self.last = self.seen
        return self.seen + {2: 1.0, 3: 2.0}[x.dim()]


def test_what_a_forward_notes_on_the_module_is_not_left_there() -> None:
    model = Notes()
    graph = whole(model, torch.ones(2, 4))
    assert model.seen is None
    assert torch.equal(model.last, torch.zeros(2, 4))
    assert torch.equal(replay(graph, model, torch.full((2, 4), 3.0)), torch.full((2, 4), 7.0))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        y = self.relu(x)
        z = self.fc(y)
        z += x
        z.mul_(2)
        return z + x


def test_what_was_changed_in_place_is_read_changed() -> None:
    model, x = InPlace(), torch.randn(3, 4)
    graph = whole(model, x)
    assert equal(replay(graph, model, x), model(x))
    inner = [node for node in graph.nodes if node.kind is Kind.MODULE]
    last = graph.nodes[-1]
    assert inner[0].index in last.refs, "the last sum reads what the ReLU left, not what it was given"


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        x[:, :2].mul_(2)
        return x + 1


def test_a_view_changed_in_place_is_an_island() -> None:
    found = capture(nn.Sequential(View()).eval(), torch.randn(2, 4))
    assert found.islands == {"0": WRITTEN}


class Batched(nn.Module):
    """Gives out what it wrote by way of views, as torchvision's detectors make a batch of their images."""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.new_zeros(x.shape)
        for place, row in enumerate(x):
            batch[place].copy_(row * 2)
        return batch


class Reads(nn.Module):
    """Hands what it got from one child to others."""

    def __init__(self) -> None:
        super().__init__()
        self.batched, self.body, self.last = Batched(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batched(x)
        out: Tensor = self.last(self.body(x)) + x
        return out


def test_who_reads_what_an_island_will_give_is_no_island_too() -> None:
    found = capture(Reads().eval(), torch.randn(2, 4))
    assert found.islands == {"batched": WRITTEN}
    assert set(found.graphs) == {""}


class Writer(nn.Module):
    """An island that changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(10.0) if float(x.sum()) < 1e9 else x


class Written(nn.Module):
    """`kind`: what changes a value where the call does not say so."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.writer, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), Writer(), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        v = h.view(-1, 2, 4)
        if self.kind == "out":
            torch.add(h, 10.0, out=h)
        else:
            self.writer(h if self.kind == "value" else v)
        return self.last(h) + v.flatten(1)


@pytest.mark.parametrize("kind", ["value", "view", "out"])
def test_what_an_island_or_out_writes_to_is_not_read_from_the_graph(kind: str) -> None:
    model, x = Written(kind).eval(), torch.randn(16, 8)
    assert capture(model, x).islands[""] == WRITTEN
    with torch.no_grad():
        error = quant.quantize_static(model, [x], progress=False)(x) - model(x)
    assert error.abs().max() < 0.5


def test_an_island_may_write_to_what_nobody_reads_again() -> None:
    found = capture(nn.Sequential(nn.Linear(8, 8), Writer(), nn.Linear(8, 8)).eval(), torch.randn(2, 8))
    assert list(found.islands) == ["1"]


def test_example_inputs_are_not_changed() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    capture(nn.Sequential(nn.ReLU(inplace=True)).eval(), x)
    assert torch.equal(x, before)


def test_a_module_called_twice_has_two_sites_and_regions() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(shared, nn.Tanh(), shared)
    graph = whole(model, torch.randn(2, 4))
    assert [node.label for node in graph.nodes if node.kind is Kind.MODULE] == ["0.0", "0.1", "1", "0.0@1", "0.1@1"]
    assert [span.path for span in graph.spans] == ["0", "0"]


class Overridden(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=-1))


class Documented(nn.Linear):
    """Only says more about itself."""

    def count(self) -> int:
        return self.out_features


class Reached(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * 2, bias)


def test_subclasses_are_taken_for_their_class_only_where_they_compute_the_same() -> None:
    assert is_leaf(Documented(4, 4))
    assert not is_leaf(Overridden(4, 4))
    assert not is_leaf(Reached(4, 4, 1))
    assert not is_leaf(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert not is_leaf(replaced)


def test_a_registered_layer_is_one_call() -> None:
    @register_leaf
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    found = capture(nn.Sequential(nn.Linear(4, 4), Own()).eval(), torch.randn(2, 4))
    assert found.islands == {}


def test_modes_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    model[1].eval()
    capture(model, torch.randn(2, 4))
    assert model.training
    assert not model[1].training
    assert nn.Module.__call__ is nn.Module.__call__
    assert torch.zeros(2).sum() == 0


def test_map_leaves_keeps_containers() -> None:
    tree = (1, [2, {"a": 3}], Named(4, slice(5, None)), Output(torch.ones(1), ()))
    moved = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf, tree)
    assert moved[:2] == (2, [3, {"a": 4}])
    assert moved[2] == Named(5, slice(6, None))
    assert list(leaves(Ref(3))) == [Ref(3)]


class Talks(nn.Module):
    """Calls somebody else in the middle of its forward."""

    def __init__(self, says: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.says = nn.Linear(4, 4), says

    def forward(self, x: Tensor) -> Tensor:
        self.says()
        return self.linear(x)


def test_what_other_threads_call_meanwhile_is_not_captured() -> None:
    other, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    answers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # a list would be what the forward itself changes

    def ask() -> None:
        thread = threading.Thread(target=lambda: answers.put(other(x)))
        thread.start()
        thread.join()

    assert not capture(Talks(ask), x).islands
    torch.testing.assert_close(answers.get_nowait(), other(x))


def test_two_threads_capture_one_after_the_other() -> None:
    untouched, x = nn.Module.__call__, torch.randn(2, 4)
    inside, first_done = threading.Event(), threading.Event()
    second = threading.Thread(target=lambda: capture(Talks(lambda: (inside.set(), first_done.wait(5))), x))

    def start_second() -> None:
        if second.ident is None:
            second.start()
        inside.wait(0.3)  # passes only where the second does not wait for the first

    capture(Talks(start_second), x)
    first_done.set()
    second.join()
    assert inside.is_set()
    assert nn.Module.__call__ is untouched


class Powers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.0) + torch.pow(x, 3.0) + torch.remainder(x, 2)


def test_powers_and_choices_with_numbers() -> None:
    x = torch.randn(3, 4)
    assert equal(replay(whole(Powers(), x), Powers(), x), Powers()(x))


@functools.cache
def table() -> Tensor:
    return torch.linspace(0, 1, 4)


class Cached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * table()


def test_a_cache_that_the_first_call_fills_is_no_reason_for_an_island() -> None:
    x = torch.randn(3, 4)
    table.cache_clear()
    first = whole(Cached(), x)
    again = whole(Cached(), x)
    assert [node.target for node in first.nodes] == [node.target for node in again.nodes]
    assert equal(replay(first, Cached(), x), Cached()(x))


class ReadsIterator(nn.Module):
    def forward(self, x: Tensor, gains: Iterator[float]) -> Tensor:
        return x * next(gains)


def test_an_iterator_that_is_given_is_read_by_no_recording() -> None:
    gains = iter([2.0, 3.0])
    capture(ReadsIterator(), (torch.randn(3, 4), gains))
    assert next(gains) == 2.0


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("nothing to see")


def test_an_error_of_the_model_s_own_is_raised_as_it_is() -> None:
    with pytest.raises(LookupError, match="nothing to see"):
        capture(nn.Sequential(nn.Linear(4, 4), Broken()), torch.randn(3, 4))


class RefusesToBeRecorded(nn.Module):
    """Fails wherever it is looked at, as operators of torch's do that are traced."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.overrides._len_torch_function_stack():
            raise RuntimeError("not under a mode")
        return x * 2


def test_a_forward_that_fails_because_it_is_recorded_is_an_island() -> None:
    found = capture(nn.Sequential(nn.Linear(4, 4), RefusesToBeRecorded()), torch.randn(3, 4))
    assert list(found.islands) == ["1"]
    assert "not under a mode" in found.islands["1"]


class CallsElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.first(x)))
        thread.start()
        thread.join()
        return self.last(found[0])


def test_layers_called_in_another_thread_are_captured_by_themselves() -> None:
    found = capture(CallsElsewhere(), torch.randn(3, 4))
    assert found.islands == {"": "its forward calls modules in another thread"}
    assert set(found.graphs) == {"first", "last"}


def test_the_memory_of_all_tensors_that_modules_hold_is_known() -> None:
    """Of whatever class, and in whatever place; some tensors have none."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Identity())
    model[1].cache = torch.zeros(2)
    model[1].own = nn.Parameter(torch.zeros(2))
    expected = [*model.parameters(), *model.buffers(), model[1].cache]
    model[1].empty, model[1].sparse = torch.zeros(0), torch.zeros(2, 2).to_sparse()
    model[1].lazy = nn.UninitializedParameter()
    assert set(storages_of(Snapshot(model, Outside()).parts.values())) == {
        one.untyped_storage().data_ptr() for one in expected
    }


def test_what_a_forward_sets_and_then_changes_is_a_value_like_others() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.cache = nn.Linear(4, 4), torch.zeros(2, 4)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = self.fc(x)
            self.total = self.total + self.cache.mean(0)
            self.total.mul_(0.5)
            self.cache.add_(1)
            self.cache[0] = 3.0
            return self.cache * self.total

    torch.manual_seed(0)
    model, x = Sets(), torch.randn(2, 4)
    found = capture(model, torch.randn(2, 4))
    assert found.islands == {}
    copied = copy.deepcopy(model)
    for _ in range(2):
        assert equal(replay(found.graphs[""], model, x), copied(x))
        assert equal([model.cache, model.total], [copied.cache, copied.total])


last = torch.ones(3, requires_grad=True) * 2
"""A tensor of the script's own, by a name that `Plain` has too."""


def test_a_tensor_of_the_script_by_the_name_of_an_attribute_is_no_part_of_the_graph() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).relu())
            return out

    graph = capture(nn.Sequential(Plain()), torch.randn(2, 4)).graphs[""]
    assert [node.target for node in graph.nodes] == ["input", "0.first", "relu", "0.last"]

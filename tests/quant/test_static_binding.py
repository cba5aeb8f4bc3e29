"""Calls of a converted model: the quick way that arguments are bound says what the thorough one says."""

from __future__ import annotations

import copy
import inspect
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.arguments import bind
from quant.runtime.binding import QuickBinding, bound_values
from quant.runtime.filling import filler
from quant.runtime.matching import CaptureMismatch
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import Ref

X = torch.linspace(-1.0, 1.0, 16).reshape(2, 8)
MASK = torch.ones(2, 8)


class Layer(nn.Module):
    """What both forwards below compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def compute(self, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        y: Tensor = self.layer(x) * scale
        return y if mask is None else y * mask


class Plain(Layer):
    """A tensor, a tensor or None, and a number, each by place or by name."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        return self.compute(x, mask, scale)


class Net(Layer):
    """The same with a setting that can only be named, and nested outputs."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0, *, end: str = "sum") -> Any:
        y = self.compute(x, mask, scale)
        return y if end == "sum" else {"y": y, "pair": [x, (y, end)]}


def converted(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    model.eval()
    prepared = quant.prepare(model, {**dict(zip(("x", "mask", "scale"), args, strict=False)), **kwargs})
    with torch.no_grad():
        prepared(*args, **kwargs)
    return quant.convert(prepared)


def runner_of(model: nn.Module) -> ProgramRunner:
    runner = model._modules["_quant"]
    assert isinstance(runner, ProgramRunner)
    return runner


def both(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """What the quick and the thorough way give: by registers; None where one does not bind the call."""
    runner = runner_of(model)
    quick = QuickBinding(runner.expected).registers(model, args, kwargs)
    try:
        values = bound_values(runner.expected, model, args, kwargs)
    except (CaptureMismatch, TypeError):
        return quick, None
    return quick, values


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("positional", (X, MASK), {}),
    ("named", (), {"mask": MASK, "x": X}),
    ("mixed", (X,), {"mask": MASK}),
    ("the default said", (X, MASK, 2.0), {}),
    ("an equal number", (X, MASK), {"scale": float("2")}),
]


@pytest.mark.parametrize(("args", "kwargs"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS])
def test_calls_like_the_captured_one_are_bound_quickly(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    quick, thorough = both(converted(Plain(), X, MASK), *args, **kwargs)
    assert quick is not None
    assert thorough is not None
    assert quick.keys() == thorough.keys()
    assert all(quick[register] is thorough[register] for register in quick)


OTHERS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("no mask", (X,), {}),
    ("another number", (X, MASK, 3.0), {}),
    ("an int for a float", (X, MASK, 2), {}),
    ("doubles", (X.double(), MASK), {}),
    ("a list", ([X], MASK), {}),
    ("twice", (X, MASK), {"x": X}),
    ("unknown", (X, MASK), {"other": X}),
    ("too many", (X, MASK, 2.0, 1), {}),
    ("too few", (), {"mask": MASK}),
]


@pytest.mark.parametrize(("args", "kwargs"), [call[1:] for call in OTHERS], ids=[call[0] for call in OTHERS])
def test_other_calls_are_left_to_the_thorough_way(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert both(converted(Plain(), X, MASK), *args, **kwargs) == (None, None)


def test_a_tensor_of_a_class_of_its_own_is_left_to_the_thorough_way() -> None:
    quick, thorough = both(converted(Plain(), X, MASK), nn.Parameter(X), MASK)
    assert quick is None
    assert thorough is not None


def test_a_signature_with_more_than_plain_arguments_is_left_to_the_thorough_way() -> None:
    quick, thorough = both(converted(Net(), X, MASK), X, MASK)
    assert quick is None
    assert thorough is not None


def test_the_forms_of_calls_follow_the_forward_of_the_class() -> None:
    class Other(Plain):
        def forward(self, mask: Any, x: Any, scale: float = 2.0) -> Any:  # type: ignore[override]
            return self.compute(x, mask, scale)

    model = converted(Plain(), X, MASK)
    runner = runner_of(model)
    binding = QuickBinding(runner.expected)
    first = binding.registers(model, (X, MASK), {})
    model.__class__ = Other
    second = binding.registers(model, (MASK, X), {})
    assert first is not None
    assert second is not None
    assert all(first[register] is second[register] for register in first)


def test_a_nested_output_is_filled_anew_at_every_call() -> None:
    model = converted(Net(), X, MASK, end="all")
    first, second = model(X, MASK, end="all"), model(X + 1, MASK, end="all")
    assert first["pair"][1][1] == "all"
    assert first["pair"] is not second["pair"]
    assert first["pair"][0] is X
    assert torch.equal(first["y"], first["pair"][1][0])
    assert not torch.equal(first["y"], second["y"])


def test_a_model_that_has_run_is_copied_and_kept_as_one_that_has_not() -> None:
    model = converted(Net(), X, MASK, end="all")
    expected = model(X, MASK, end="all")["y"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(X, MASK, end="all")["y"], expected)
        assert runner_of(twin)._steps_known is not runner_of(model)._steps_known


TREES: list[Any] = [Ref(3), (Ref(3),), (Ref(3), Ref(4)), (Ref(3), 1), [Ref(4)], [], (), {}, {"a": [Ref(3), None]}, 5,
                    slice(Ref(3), None), (1, "a"), (slice(0, Ref(4)), [1, 2]), (..., slice(None, Ref(3))),
                    slice(1, None, 2), (slice(None), ...), torch.float32, (Ref(3), torch.float32),
                    slice((Ref(3),), None)]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_filler_gives_the_tree_with_registers_in_it(tree: Any) -> None:
    def by_hand(part: Any) -> Any:
        if isinstance(part, Ref):
            return {3: "three", 4: "four"}[part.index]
        if isinstance(part, (tuple, list)):
            return type(part)(by_hand(item) for item in part)
        if isinstance(part, dict):
            return {key: by_hand(item) for key, item in part.items()}
        return slice(*map(by_hand, (part.start, part.stop, part.step))) if isinstance(part, slice) else part

    found = filler(tree)({3: "three", 4: "four"})
    assert found == by_hand(tree)
    assert type(found) is type(by_hand(tree))
    assert not isinstance(found, (list, dict)) or found is not tree


def test_a_dropout_that_is_off_in_training_too_stays_off_in_a_converted_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(torch.sin(self.layer(x)), 0.5, False)

    prepared = quant.prepare_qat(Net(), (X,))
    prepared.train()(X)
    model = quant.convert(prepared.eval())
    expected = model(X)
    assert torch.equal(model.train()(X), expected)


class Forwards:
    """Forwards with parameters of every kind."""

    def plain(self, x: Any, y: Any = 2) -> None: ...
    def keywords(self, x: Any, *, y: Any, z: Any = 3) -> None: ...
    def extra(self, x: Any, y: Any = None, **kwargs: Any) -> None: ...
    def both(self, x: Any = 1, *, z: Any = 3, **more: Any) -> None: ...
    def any_number(self, x: Any, *others: Any, y: Any = 2) -> None: ...
    def by_place(self, x: Any, /, y: Any = 2, **kwargs: Any) -> None: ...


CALL_FORMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}), ((5,), {}), ((5, 6), {}), ((5, 6, 7), {}), ((), {"x": 5}), ((5,), {"x": 6}), ((5,), {"y": 6}),
    ((), {"y": 6, "x": 5}), ((5,), {"z": 7, "y": 6}), ((5,), {"other": 1, "y": 2}), ((5,), {"kwargs": 1}),
    ((5,), {"more": 1}),
]  # fmt: skip


@pytest.mark.parametrize("call", CALL_FORMS, ids=str)
@pytest.mark.parametrize("name", [name for name in vars(Forwards) if not name.startswith("_")])
def test_a_call_is_bound_as_python_binds_it(name: str, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    forward = getattr(Forwards, name)
    module = type("One", (nn.Module,), {"forward": forward})()
    args, kwargs = call
    try:
        bound = inspect.signature(forward).bind(module, *args, **kwargs)
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            bind(module, args, kwargs)
        return
    bound.apply_defaults()
    assert list(bind(module, args, kwargs).items()) == list(bound.arguments.items())[1:]


def test_a_forward_that_takes_itself_among_its_arguments_keeps_the_others() -> None:
    class Star(Layer):
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return args[0].compute(args[1], None, kwargs.get("scale", 1.0))  # type: ignore[no-any-return]

    assert bind(Star(), (X, 2), {"scale": 3.0}) == {"args": (X, 2), "kwargs": {"scale": 3.0}}
    q = quant.quantize_static(Star().eval(), [(X,)], progress=False)
    with torch.no_grad():
        assert any(isinstance(one, ProgramRunner) for one in q.modules())
        torch.testing.assert_close(q(X), q.get_submodule("layer")(X), rtol=0.05, atol=0.05)


def test_a_static_forward_is_refused_by_name() -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match=r"Static: its forward is a static method, expected a method; declare"):
        bind(Static(), (X,), {})


def test_a_part_that_takes_itself_among_its_arguments_shows_them_while_it_waits_for_calls() -> None:
    class Star(Layer):
        def forward(*args: Any) -> Tensor:
            return args[0].compute(args[1], None, 1.0)  # type: ignore[no-any-return]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.star, self.last = Star(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.star(x))  # type: ignore[no-any-return]

    waits = quant.prepare(Whole().eval(), X).get_submodule("star")
    assert str(inspect.signature(waits.forward)) == "(*args: 'Any') -> 'Tensor'"


@pytest.mark.parametrize("make", [quant.prepare, quant.prepare_qat], ids=["prepared", "in training"])
def test_a_transform_of_torch_func_is_refused_by_name(make: Any) -> None:
    prepared = make(Plain().eval(), X).train()
    words = r"Plain: it is called inside of torch\.func\.vmap, expected a plain call.*; call it with the whole batch"
    with torch.no_grad():
        prepared(X)
        for model in (prepared, quant.convert(prepared)):
            with pytest.raises(TypeError, match=words):
                torch.vmap(model)(X)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "jvp": lambda model: torch.func.jvp(model, (X,), (X,)),
    "vjp": lambda model: torch.func.vjp(model, X)[1](X),
    "jacrev": lambda model: torch.func.jacrev(model)(X),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's jvp compiles
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_integers_are_refused_by_name_and_not_zeros(transform: str) -> None:
    prepared = quant.prepare(Plain().eval(), X)
    with torch.no_grad():
        prepared(X)
    static, dynamic = quant.convert(prepared), quant.quantize_dynamic(Plain().eval())
    for model in (static, dynamic):
        with pytest.raises(TypeError, match=r"layer '.*that differentiates .*no derivatives: differentiate the float"):
            TRANSFORMS[transform](model)
        ones = torch.ones(2, 8)
        assert torch.equal(torch.func.grad(lambda y, model=model: (y * model(X)).sum())(ones), model(X))
    assert torch.allclose(torch.vmap(dynamic)(X), dynamic(X))

"""A file for the runner loaded without the float model, and `quant.export.to_plan`: one native call as a module."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.export import ExportError, PlannedModel, to_plan
from quant.export.naming import named_leaves
from quant.export.output_text import filled, form_of
from quant.runtime.objects import Instance, Result
from quant.runtime.trees import Ref

from .runner_models import AS_THEY_COME, EXAMPLES, converted, image
from .runner_networks import NETWORKS

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Found:
    scores: Tensor
    more: Any


class Nested(nn.Module):
    """Returns nested containers, an output twice, numbers and None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, wide: Tensor, narrow: Tensor) -> dict[str, Any]:
        x = torch.relu(self.first(wide))
        y = self.second(x) + narrow
        return {"pair": (y, [y, x]), "scale": 2.5, "nothing": None, "inner": {"y": y}}


def nested() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = image(4, 6, seed=1), image(4, 3, seed=2)
    return quant.quantize_static(Nested().eval(), [inputs], progress=False), inputs


def assert_same(one: Any, other: Any) -> None:
    """Nested containers of equal types with equal tensors."""
    if isinstance(other, Tensor):
        assert torch.equal(one, other)
        return
    assert type(one) is type(other)
    if isinstance(other, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(other, (tuple, list)):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_file_loads_without_the_float_model(name: str, tmp_path: Path) -> None:
    model, inputs = converted(name), EXAMPLES[name][1][0]
    quant.save(model, tmp_path / "model.q8", runner=True)
    restored = quant.load(tmp_path / "model.q8")
    with torch.inference_mode():
        assert_same(restored(*inputs), model(*inputs))
        assert_same(to_plan(model)(*inputs), model(*inputs))
    assert quant.summary(restored).to_dict()["modules"] == quant.summary(model).to_dict()["modules"]


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("name", list(AS_THEY_COME))
def test_recurrent_layers_without_data(name: str, backend: str | None, tmp_path: Path) -> None:
    make, example = AS_THEY_COME[name]
    model = quant.quantize_dynamic(make().eval())
    quant.save(model, tmp_path / "model.q8", runner=True, example_inputs=example)
    restored = quant.load(tmp_path / "model.q8", backend=backend)
    words, states = torch.arange(10).reshape(5, 2), torch.zeros(2, 2, 8)
    with torch.inference_mode():
        for one, two in zip(restored(words, states), model(words, states), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5 if backend else 0)


def test_attention_of_a_dynamic_model_is_in_the_call() -> None:
    """The model leaves it to torch: another order of sums, as near to float."""
    make, example, other = NETWORKS["bert"]
    torch.manual_seed(5)
    model = make().eval()
    q = quant.quantize_dynamic(model)
    plan = to_plan(q, example)
    with torch.inference_mode():
        wanted, own, planned = (next(named_leaves(one(*other)))[1] for one in (model, q, plan))
    assert float((planned - own).abs().max()) < 2e-5
    assert float((planned - wanted).norm()) < 1.5 * float((own - wanted).norm()) + 1e-6


@pytest.mark.parametrize("settings", [{"weight_bits": 4}, {"weight_bits": 3, "group_size": 32}], ids=["rows", "groups"])
def test_a_plan_has_narrow_weights_as_they_are(settings: dict[str, int], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 8)).eval()
    q, x = quant.quantize_dynamic(model, quant.Recipe(default=quant.QConfig(**settings))), image(5, 64, seed=1)
    plan = to_plan(q, x)
    held = list(plan.buffers())
    for name, weight in q.named_buffers():
        if name.endswith(".q_weight"):
            assert any(one.dtype == torch.uint8 and torch.equal(one, weight) for one in held)
    with torch.no_grad():
        torch.testing.assert_close(plan(x), q(x), rtol=1e-2, atol=1e-2)
    if "group_size" in settings:
        with pytest.raises(
            quant.types.ArtefactError, match=r"layer '0' \(Linear\): q_weight is of 3 bits with groups of 32"
        ):
            quant.save(q, tmp_path / "model.q8", runner=True, example_inputs=x)


def test_outputs_stand_as_the_model_returns_them() -> None:
    model, inputs = nested()
    plan = to_plan(model)
    assert_same(plan(*inputs), model(*inputs))
    assert "inputs=(wide, narrow)" in repr(plan)


def test_objects_of_classes_are_plain_containers_in_a_file() -> None:
    tensors = {name: torch.full((1,), float(place)) for place, name in enumerate("abcd")}
    returned = Result(Instance(Found, {"scores": Ref(0), "more": Pair(Ref(1), [Ref(2), None])}))
    form = form_of(returned)
    named = dict(zip(["scores", "more.left", "more.right.0"], tensors.values(), strict=False))
    assert_same(filled(form, named), {"scores": tensors["a"], "more": (tensors["b"], [tensors["c"], None])})
    assert form_of((Ref(0), Ref(1))) == {"tuple": ["0", "1"]}
    assert form_of(Instance(list, {}, [Ref(0)])) == {"dict": [[0, "0"]]}


def test_inputs_by_name() -> None:
    model, (wide, narrow) = nested()
    plan = to_plan(model)
    assert_same(plan(narrow=narrow, wide=wide), model(wide, narrow))
    assert_same(plan(wide, narrow=narrow), model(wide, narrow))


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((image(4, 6),), {}, r"the model has 2 inputs \(wide, narrow\), got 1 by place"),
        ((image(4, 6),) * 3, {}, r"has 2 inputs \(wide, narrow\), got 3 by place"),
        ((image(4, 6),), {"wide": image(4, 6)}, r"got 1 by place, 'wide'"),
        ((image(4, 6), image(4, 3)), {"other": 1}, r"got 2 by place, 'other'"),
        ((image(4, 6), [1.0]), {}, r"input 'narrow' is a list, expected a tensor of float32"),
        ((image(4, 6), image(4, 3).double()), {}, r"input 'narrow' is float64, expected float32"),
    ],
    ids=["too few", "too many", "twice", "unknown", "a list", "a dtype"],
)
def test_a_call_that_does_not_fit(args: Any, kwargs: Any, words: str) -> None:
    plan = to_plan(nested()[0])
    with pytest.raises(TypeError, match=words):
        plan(*args, **kwargs)


def test_sizes_that_do_not_fit_name_the_layer() -> None:
    plan = to_plan(nested()[0])
    with pytest.raises(ValueError, match=r"layer 'first': .*; input 'wide' is \(4, 7\), at export it was \(any, 6\)"):
        plan(image(4, 7), image(4, 3))


def test_what_is_not_finite_is_an_error() -> None:
    plan = to_plan(nested()[0])
    with pytest.raises(ValueError, match="NaN or inf came to where a value is rounded to an integer"):
        plan(image(4, 6) * math.nan, image(4, 3))


def test_a_plan_is_copied_and_pickled() -> None:
    model, inputs = nested()
    plan = to_plan(model)
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert_same(other(*inputs), model(*inputs))
        assert other.plan == plan.plan


def test_a_plan_is_no_part_of_a_graph() -> None:
    model, inputs = nested()
    with pytest.raises(RuntimeError, match="compile or export the model that it was made of"):
        torch.export.export(to_plan(model), inputs)


def test_a_plan_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(quant.ArtefactError, match="save the model that it was made of with runner=True"):
        quant.save(to_plan(nested()[0]), tmp_path / "model.q8")


class OneNameForTwo(nn.Module):
    """Returns two values whose keys make one name."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.first, self.second, self.same = nn.Linear(6, 8), nn.Linear(8, 3), same

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.relu(self.first(x))
        y = self.second(x)
        return {"a": {"b": y}, "a.b": y if self.same else x}


def test_outputs_of_one_name_are_one_value() -> None:
    def one(*, same: bool) -> nn.Module:
        return quant.quantize_static(OneNameForTwo(same=same).eval(), [image(4, 6)], progress=False)

    with pytest.raises(
        ExportError, match=r"returns two values that a plan would both name 'a\.b'; give them other keys"
    ):
        to_plan(one(same=False))
    model = one(same=True)
    assert_same(to_plan(model)(image(4, 6)), model(image(4, 6)))


class TakesContainers(nn.Module):
    """Its arguments hold two tensors, and one has the name that the second of these would get."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: list[Tensor], x_2: Tensor) -> Tensor:
        return self.first(x[0]) + torch.relu(self.second(x[1])) - self.third(x_2)


def test_tensors_of_one_argument_are_inputs_of_their_own(tmp_path: Path) -> None:
    one, two, three = image(4, 6, seed=1), image(4, 6, seed=2), image(4, 6, seed=3)
    model = quant.quantize_static(TakesContainers().eval(), [([one, two], three)], progress=False)
    quant.save(model, tmp_path / "model.q8", runner=True)
    plan = quant.load(tmp_path / "model.q8")
    assert "inputs=(x, x_3, x_2)" in repr(plan)
    expected = model([one, two], three)
    assert_same(plan(one, two, three), expected)
    assert_same(plan(one, x_2=three, x_3=two), expected)
    with pytest.raises(TypeError, match=r"has 3 inputs \(x, x_3, x_2\), got 0 by place, 'x', 'x_2'"):
        plan(x=one, x_2=three)


def test_inputs_of_one_name_go_by_place() -> None:
    """As files of before may have them."""
    model, inputs = nested()
    plan = to_plan(model).plan
    constants = tuple(to_plan(model).buffers())
    alike = tuple(dataclasses.replace(one, name="x") for one in plan.inputs)
    planned = PlannedModel(dataclasses.replace(plan, inputs=alike, constants=constants))
    assert_same(planned(*inputs), model(*inputs))
    for args, kwargs in (((), {"x": inputs[0]}), ((inputs[0],), {"x": inputs[1]})):
        with pytest.raises(TypeError, match=r"has 2 inputs \(x, x\), got \d by place, 'x'"):
            planned(*args, **kwargs)


def test_constants_keep_their_dtypes() -> None:
    model, inputs = nested()
    plan = to_plan(model)
    for convert in (nn.Module.half, nn.Module.double, lambda one: one.to(torch.bfloat16)):
        with pytest.raises(TypeError, match=r"float32 constants cannot become another dtype: .* convert inputs"):
            convert(nn.Sequential(plan))
    assert_same(plan.to("cpu").float()(*inputs), model(*inputs))


def test_a_backend_that_is_not_here_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="no backend is called 'nope'"):
        to_plan(nested()[0], backend="nope")


def test_a_model_of_several_calls_is_no_plan() -> None:
    with pytest.raises(ExportError, match="holds no int8 module; quantise it first"):
        to_plan(Nested())


def test_a_file_without_a_plan_wants_the_float_model(tmp_path: Path) -> None:
    quant.save(nested()[0], tmp_path / "model.q8")
    with pytest.raises(quant.ArtefactError, match=r"runner=True\).*; quant.load\(path, model=...\) reads it"):
        quant.load(tmp_path / "model.q8")


def test_examples_go_with_the_float_model(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="example_inputs and examples go with model"):
        quant.load(tmp_path / "model.q8", example_inputs=torch.ones(1))


def test_a_file_of_before_has_a_tuple_of_outputs(tmp_path: Path) -> None:
    model, inputs = nested()
    plan = to_plan(model)
    names = [one.name for one in plan.plan.outputs]
    again = PlannedModel(
        dataclasses.replace(plan.plan, constants=tuple(plan.buffers()), returns={"tuple": list(names)})
    )
    assert len(again(*inputs)) == len(names)

"""A converted model made again from its float model, a JSON description and its state_dict."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.artefact.rebuild import rebuild
from quant.capture.called import AloneReason
from quant.convert import convert
from quant.prepare import prepare
from quant.recipe import QConfig, Recipe
from quant.static.description import describe, tables
from quant.static.examples import CannotRebuild, decode, encode


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Parameter(torch.randn(4, 8))
        self.keep = nn.Linear(4, 4)
        self.branch = Branch()

    def forward(self, ids: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        y = F.relu(self.norm(self.conv(self.embed(ids).transpose(1, 2)))) * scale
        return {"y": self.branch(self.keep(F.linear(y.mean(2), self.head)))}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if bool(x.isfinite().all()) else x


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Model().eval()


def test_the_same_integers_come_back() -> None:
    inputs = {"ids": torch.randint(0, 10, (4, 6)), "scale": 2.0}
    recipe = Recipe({"keep": None}, default=QConfig(activation_observer="minmax", weight_bits=8))
    prepared = prepare(made(0), inputs, recipe)
    prepared(**inputs)
    converted = convert(prepared)
    description = json.loads(json.dumps(describe(converted)))
    again = rebuild(made(1), description, tables(converted))
    again.load_state_dict(converted.state_dict())
    assert torch.equal(again(**inputs)["y"], converted(**inputs)["y"])
    assert describe(again) == describe(converted)


class Borrows(nn.Module):
    """Calls its table with other parameters, where the ids are large."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.other = nn.Parameter(torch.randn(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        if bool(ids.sum() > 40):
            return self.last(torch.func.functional_call(self.table, {"weight": self.other}, (ids,)))
        return self.last(self.table(ids))


def test_a_table_that_is_called_with_other_parameters_stays_float_where_the_example_does_not_show_it() -> None:
    """A table read from int8 weights has none for others to take the place of; the file has the reason as a text."""
    model, ids = Borrows().eval(), torch.full((16,), 7)
    prepared = prepare(model, ids)
    prepared(ids)
    converted = convert(prepared)
    assert type(converted.table) is nn.Embedding
    description = json.loads(json.dumps(describe(converted)))
    why = description["islands"]["table"]
    assert why == "it is called with parameters that are not its own"
    assert AloneReason.read(why) is AloneReason.OTHER_PARAMETERS
    assert AloneReason.read(description["islands"][""]) == description["islands"][""]
    assert all(type(why) is str for why in describe(converted)["islands"].values())
    again = rebuild(model, description, tables(converted))  # on ids that are 1
    again.load_state_dict(converted.state_dict())
    assert type(again.table) is nn.Embedding
    assert torch.equal(again(ids), converted(ids))


LAYERS = [nn.Linear(4, 4), nn.LeakyReLU(0.2), nn.Linear(4, 2)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (LAYERS[:2], r"has the layers 2, which Sequential does not have; its children are 0, 1\."),
        ([*LAYERS, nn.Linear(2, 2)], r"Sequential: call 4 is 3: Linear.*, expected nothing more"),
        (
            [LAYERS[0], nn.Tanh(), LAYERS[2]],
            r"call 2 is 1: Tanh\(%1\), expected 1: LeakyReLU\[negative_slope=0\.2\]\(%1\)",
        ),
        ([LAYERS[0], nn.LeakyReLU(0.3), LAYERS[2]], r"call 2 is 1: LeakyReLU\[negative_slope=0\.3\]"),
        (
            [nn.Linear(4, 6), nn.LeakyReLU(0.2), nn.Linear(6, 2)],
            r"call 1 is 0: Linear\[in_features=4, out_features=6\]",
        ),
        ([nn.Linear(5, 4), *LAYERS[1:]], r"does not fit the description: mat1 and mat2 shapes"),
    ],
    ids=["fewer layers", "more layers", "another activation", "another slope", "another width", "another input"],
)
def test_another_model_is_refused(layers: list[nn.Module], message: str) -> None:
    model = nn.Sequential(*LAYERS)
    x = torch.randn(3, 4)
    prepared = prepare(model, x, Recipe(default=QConfig(activation_observer="minmax")))
    prepared(x)
    converted = convert(prepared)
    with pytest.raises(CannotRebuild, match=message):
        rebuild(nn.Sequential(*layers), describe(converted), tables(converted))


def test_another_version_is_refused() -> None:
    with pytest.raises(CannotRebuild, match="version 2, expected 1"):
        rebuild(nn.Linear(2, 2), {"version": 2}, {})


def test_a_float_model_has_no_description() -> None:
    with pytest.raises(ValueError, match=r"expected a model from quant\.convert"):
        describe(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "tree",
    [(1, "a", None, True), [torch.ones(2, 3)], {"x": torch.ones(2, dtype=torch.int64), "y": (2.5,)}],
    ids=["constants", "tensors", "named"],
)
def test_example_inputs_in_json(tree: Any) -> None:
    back = decode(json.loads(json.dumps(encode(tree))))
    assert str(back) == str(tree)


def test_example_inputs_without_a_json_form() -> None:
    assert encode({"x": object()}) is None
    with pytest.raises(CannotRebuild, match="give example_inputs"):
        decode(None)

"""Recipes: plain data, the first rule that matches decides, and what cannot mean anything is an error at once."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
from torch import nn

from quant import QConfig, Recipe, RecipeError
from quant.recipe import NO_RULE, Rule

FOUR = QConfig(weight_bits=4)


@pytest.fixture
def model() -> nn.Module:
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)), "head": nn.Linear(2, 2)})


def test_qconfig_is_plain_frozen_data() -> None:
    assert QConfig() == QConfig()
    assert len({QConfig(), QConfig(), FOUR}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        QConfig().weight_bits = 4  # type: ignore[misc]


PERCENTILE = QConfig(activation_observer="percentile", activation_options={"percentile": 99.9})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_bits": 4, "per_row": False},
        {"activation_bits": 16},
        {"activation_observer": "percentile", "activation_options": {"percentile": 99.9, "bins": 1024}},
        {"activation_observer": "fixed", "activation_options": {"low": -1, "high": 6.5}},
        {"weight_observer": "mse", "weight_options": {"bins": 512}},
    ],
    ids=str,
)
def test_qconfig_survives_json(settings: dict[str, Any]) -> None:
    qconfig = QConfig(**settings)
    assert QConfig.from_dict(json.loads(json.dumps(qconfig.to_dict()))) == qconfig
    assert set(qconfig.to_dict()) == {field.name for field in dataclasses.fields(QConfig)}


def test_options_are_frozen_with_the_settings() -> None:
    given = {"percentile": 99.9}
    qconfig = QConfig(activation_observer="percentile", activation_options=given)
    given["percentile"] = 50.5
    assert qconfig == PERCENTILE == copy.deepcopy(PERCENTILE) == pickle.loads(pickle.dumps(PERCENTILE))
    assert qconfig.activation_options == {"percentile": 99.9}
    assert len({qconfig, PERCENTILE, QConfig(activation_observer="percentile")}) == 2
    with pytest.raises(TypeError, match="does not support item assignment"):
        qconfig.activation_options["percentile"] = 50.5  # type: ignore[index]


def test_options_of_numpy_become_json() -> None:
    options = {"percentile": np.float32(99.5), "bins": np.int64(1024)}
    qconfig = QConfig(activation_observer="percentile", activation_options=options)
    assert json.dumps(qconfig.to_dict()["activation_options"]) == '{"percentile": 99.5, "bins": 1024}'


def test_settings_print_as_they_are_written() -> None:
    assert repr(QConfig()) == "QConfig()"
    assert repr(PERCENTILE) == "QConfig(activation_observer='percentile', activation_options={'percentile': 99.9})"
    assert eval(repr(PERCENTILE)) == PERCENTILE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"activation_observer": "kl"},
            r"activation_observer is 'kl', expected one of auto, dynamic, minmax, .*, lsq\+, pact;",
        ),
        ({"activation_observer": ["minmax"]}, r"activation_observer is \['minmax'\], expected one of auto"),
        ({"weight_observer": "auto"}, "weight_observer is 'auto', expected one of minmax, histogram"),
        ({"weight_observer": "moving_average"}, "a weight is observed once; 'minmax' is what it would be"),
        ({"activation_observer": "fixed"}, "'fixed' needs the options 'low', 'high', as in activation_options={'low'"),
        ({"activation_observer": "fixed", "activation_options": {"low": 0}}, "needs the options 'high'"),
        ({"activation_observer": "fixed", "activation_options": {"low": 1, "high": 0}}, r"range is \[1, 0\]"),
        ({"activation_observer": "percentile", "activation_options": {"percentil": 9}},
         "'percentile' has no option 'percentil'; its options: percentile, bins"),
        ({"activation_observer": "percentile", "activation_options": {"percentile": 101}}, r"number in \(50, 100\]"),
        ({"activation_observer": "percentile", "activation_options": {"percentile": "99"}}, "expected a number"),
        ({"activation_observer": "percentile", "activation_options": {"percentile": True}}, "expected a number"),
        ({"activation_observer": "percentile", "activation_options": 99.9}, "is 99.9, expected a dict such as"),
        ({"activation_observer": "minmax", "activation_options": {"bins": 64}}, "no option 'bins'; its options: none"),
        ({"activation_observer": "moving_average", "activation_options": {"distributed": 1}}, "options: momentum$"),
        ({"activation_options": {"percentile": 99.9}}, "without an activation_observer to take them; name one: .*"
         "'percentile' takes percentile, bins"),
        ({"weight_options": {"bins": 64}}, "observer 'minmax' has no option 'bins'"),
        ({"weight_observer": "mse", "weight_options": {"bins": 100}}, "expected a power of two"),
        ({"activation_observer": "pact", "activation_options": {"alpha": -1.0}}, "expected positive and finite"),
        ({"per_row": 1}, "per_row is 1, expected True, False or 'auto'"),
        ({"per_channel": "no"}, "per_channel is 'no', expected True or False"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_where_they_are_written(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        QConfig(**settings)


def test_an_unknown_field_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"unknown fields \['bits'\], expected some of \['activation_bits', "):
        QConfig.from_dict({"bits": 8})


@pytest.mark.parametrize("bits", [1, 9, 0, -8, 8.0, "8", True, None], ids=repr)
def test_weight_bits_that_do_not_exist(bits: Any) -> None:
    with pytest.raises(RecipeError, match=r"weight_bits is .*, expected a whole number from 2 to 8"):
        QConfig(weight_bits=bits)


@pytest.mark.parametrize("bits", [4, 32, 16.0, "8", True, None], ids=repr)
def test_activation_bits_that_do_not_exist(bits: Any) -> None:
    with pytest.raises(RecipeError, match=r"activation_bits is .*, expected 8, 16 or 'auto'"):
        QConfig(activation_bits=bits)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head", ["head"]),
        ("encoder.*", ["encoder.0", "encoder.1"]),
        ("*", ["", "encoder", "encoder.0", "encoder.1", "head"]),
        ("", [""]),
        ("encoder.[1-9]", ["encoder.1"]),
        ("HEAD", []),
        (nn.Linear, ["encoder.0", "head"]),
        (nn.RNNBase, ["encoder.1"]),
        (lambda name, module: name.endswith("0") and isinstance(module, nn.Linear), ["encoder.0"]),
    ],
    ids=["name", "wildcard", "everything", "root", "class_of_names", "case", "type", "base_type", "predicate"],
)
def test_what_a_pattern_matches(model: nn.Module, pattern: Any, names: list[str]) -> None:
    rule = Rule(pattern, None)
    assert [name for name, module in model.named_modules() if rule.matches(name, module)] == names


def test_the_first_rule_that_matches_decides(model: nn.Module) -> None:
    recipe = Recipe({"encoder.0": None, nn.Linear: FOUR, "head": None})
    resolved = {name: recipe.resolve(name, module) for name, module in model.named_modules()}
    assert resolved["encoder.0"] == (None, 0)
    assert resolved["head"] == (FOUR, 1)
    assert resolved["encoder.1"] == (QConfig(), NO_RULE)
    assert Recipe(default=None).resolve("head", model["head"]) == (None, NO_RULE)  # type: ignore[index]


def test_rules_may_be_a_mapping_pairs_or_rules() -> None:
    made = [
        Recipe({"a": None, "b": FOUR}),
        Recipe([("a", None), ("b", FOUR)]),
        Recipe([Rule("a", None), Rule("b", FOUR)]),
    ]
    assert made[0] == made[1] == made[2]
    assert list(made[0]) == [Rule("a", None), Rule("b", FOUR)]


def test_unmatched_names_the_rules_that_hit_nothing_but_not_the_shadowed(model: nn.Module) -> None:
    recipe = Recipe({"*": None, "head": FOUR, "tail": FOUR, nn.Conv2d: FOUR})
    assert [rule.pattern for rule in recipe.unmatched(model.named_modules())] == ["tail", nn.Conv2d]


def test_a_rule_prints_as_it_was_written() -> None:
    def small(name: str, module: nn.Module) -> bool:
        return True

    assert [str(Rule(pattern, None)) for pattern in ("a.*", nn.Linear, small)] == [
        "'a.*' -> float",
        "Linear -> float",
        "small -> float",
    ]
    assert str(Rule("a", FOUR)).startswith("'a' -> QConfig(weight_bits=4")


@pytest.mark.parametrize("settings", [8, "int8", {"weight_bits": 4}, True], ids=repr)
def test_settings_that_are_no_qconfig(settings: Any) -> None:
    with pytest.raises(RecipeError, match="rule 'a': expected a QConfig or None, got"):
        Recipe({"a": settings})
    with pytest.raises(RecipeError, match=r"Recipe: default is .*, expected a QConfig or None"):
        Recipe(default=settings)


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(RecipeError, match="rule 3: expected a name pattern, a module type or a function"):
        Recipe([(3, None)])  # type: ignore[list-item]


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().backend = "fbgemm"  # type: ignore[misc]


def test_a_recipe_goes_through_json() -> None:
    config = QConfig(weight_bits=4, activation_observer="percentile", activation_options={"percentile": 99.0})
    for recipe in (
        Recipe({"a.*": None, "b": config}, default=None, backend="reference"),
        Recipe(),
        Recipe({"[[]x]": config}, default=config),
    ):
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_dict({}) == Recipe()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rule": []}, "unknown fields"),
        (None, "expected a dict with 'rules'"),
        ({"rules": [["a"]]}, "expected 'rules' as a list"),
        ({"rules": {"ab": None}}, "expected 'rules' as a list"),
        ({"rules": [3]}, "expected 'rules' as a list"),
        ({"rules": [["a", 3]]}, "expected 'rules' as a list"),
        ({"rules": [[["a"], None]]}, "expected 'rules' as a list"),
        ({"rules": [["a", {"bits": 4}]]}, "unknown fields"),
    ],
    ids=["a field", "nothing", "half a pair", "a dict", "no pair", "no settings", "no name", "a setting"],
)
def test_another_dictionary_is_no_recipe(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(data)


def test_a_class_has_no_name_in_json() -> None:
    with pytest.raises(RecipeError, match="only names have a form in JSON"):
        Recipe({nn.Linear: None}).to_dict()

"""Recipes: the settings of a layer, the rules that assign them to modules, and errors of rules that match nothing.

Rules are plain data and are tried in order; the first that matches a module decides. Weights and activations are not
looked at here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from quant.kernels.narrow import GROUP_SIZES, NARROW_BITS
from quant.kernels.registry import NotLoaded
from quant.observers import (
    AUTO,
    LEARNED,
    OBSERVERS,
    PER_CALL,
    by_hand,
    check_options,
    follows_batches,
    names,
    option_names,
)

Pattern: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool]"
"""A module name with shell wildcards (``encoder.*``), a module type (subclasses match), or a predicate of both."""

NO_RULE = -1
"""The rule index of a module that no rule matched, so that the recipe's default decided."""


STATIC_SETTINGS = (
    "weight_observer", "weight_options", "activation_observer", "activation_options", "activation_symmetric",
)  # fmt: skip
"""Fields of a QConfig that layers with static ranges use; layers of a static model that become dynamic do not."""

RANGES_OF_DATA = ("activation_observer", "activation_options", "activation_symmetric")
"""Fields of a QConfig that only calibration or training has data for."""

DYNAMIC_SETTINGS = {
    "per_row": "has static ranges, which are one per tensor",
    "group_size": "is static, and multiplies integers with a weight scale per output",
    "weight_symmetric": "is static, and its weight has no zero points",
}
"""Fields of a QConfig that dynamic layers use, and why static ones do not have them."""


class RecipeError(ValueError):
    """A recipe cannot be applied: a rule matches nothing, or asks for something that does not exist."""


class UnmatchedRules(RecipeError):
    """Rules that match no module of a model, by their patterns."""

    def __init__(self, message: str, patterns: Sequence[Pattern] = ()) -> None:
        super().__init__(message)
        self.patterns = patterns


class Options(Mapping[str, float]):
    """The options of an observer by name: an immutable mapping, so that settings can be hashed."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


NO_OPTIONS = Options()


@dataclass(frozen=True, repr=False)
class QConfig:
    """The settings of one layer. Plain data: comparable, and JSON through `to_dict` / `from_dict`.

    "auto" leaves a choice to the phase. A phase that cannot do what any other value asks for raises RecipeError.

    Attributes:
        weight_bits: 2 to 8. Dynamic layers store 4 and fewer in as many bits, others as int8 with a narrower range
            (embeddings: 8, 4, 3 or 2, packed per row); so do static linear and recurrent layers.
        group_size: 32, 64 or 128 neighbouring inputs of an output that share a weight scale, which has to divide their
            number (dynamic layers with 2 to 4 bits; of an embedding, columns of a row); None for a scale per output.
        weight_symmetric: False gives each group a zero point too, so that its integers span the group's minimum to its
            maximum.
        per_channel: a weight scale per output channel (per gate row in recurrent layers), or one per tensor.
        weight_observer: how the weight's range is chosen, a name in `quant.observers`: "mse" clips where that makes the
            weight's error smaller. Training also learns it: "lsq", "lsq+", "pact". Groups of inputs take "mse" alone
            beside that, and with `rounding=` ranges by their outputs, whatever it says. Tables, and layers of a static
            model that become dynamic, have the range of their values.
        weight_options: of that observer, by name, as in {"percentile": 99.9}.
        activation_bits: of the layer's input: 8; 16 multiplies a high and a low byte in two passes, for inputs whose
            range 8 bits cannot hold (linear layers, in static quantisation convolutions too); "auto" takes 8, and 16
            where dynamic quantisation sees by the weights that 8 would lose input features.
        activation_observer: how the range of what the layer puts out (and of inputs that no other layer makes) is
            chosen. "auto" is "histogram" in calibration and "moving_average" in training. Calibration takes every name
            in `quant.observers.OBSERVERS`; training those that need no search ("moving_average", "minmax", "fixed") and
            those that learn ("lsq", "lsq+", "pact"). "fixed" is a range by hand, for what the layer puts out alone.
            "dynamic" makes a linear or recurrent layer of a static model dynamic: its ranges are those of each call,
            and it has the settings of dynamic layers.
        activation_options: of that observer, by name: {"percentile": 99.9}, {"momentum": 0.1}, or the ends that "fixed"
            must have, {"low": 0.0, "high": 6.0}.
        activation_symmetric: fix the zero point of activations at 128.
        bias_correction: static quantisation takes the mean error that rounding a weight makes on the calibration data
            into the layer's bias (Nagel et al., arXiv:1906.04721, section 4.2). A layer without a bias gets none, so
            that zeros, as of padding, stay zeros.
        per_row: dynamic quantisation takes a range per row (sample, time step), which "auto" is too, or one for the
            whole tensor. Static ranges are always per tensor, so there it is refused.
    """

    weight_bits: int = 8
    per_channel: bool = True
    weight_observer: str = "minmax"
    weight_options: Mapping[str, float] = NO_OPTIONS
    activation_bits: int | Literal["auto"] = "auto"
    activation_observer: str = "auto"
    activation_options: Mapping[str, float] = NO_OPTIONS
    activation_symmetric: bool = False
    bias_correction: bool = True
    per_row: bool | Literal["auto"] = "auto"
    group_size: int | None = None
    weight_symmetric: bool = True

    def __post_init__(self) -> None:
        if type(self.weight_bits) is not int or not 2 <= self.weight_bits <= 8:
            raise RecipeError(f"QConfig: weight_bits is {self.weight_bits!r}, expected a whole number from 2 to 8")
        if type(self.activation_bits) not in (int, str) or self.activation_bits not in (8, 16, "auto"):
            raise RecipeError(f"QConfig: activation_bits is {self.activation_bits!r}, expected 8, 16 or 'auto'")
        for name in ("per_channel", "activation_symmetric", "bias_correction", "weight_symmetric"):
            if type(getattr(self, name)) is not bool:
                raise RecipeError(f"QConfig: {name} is {getattr(self, name)!r}, expected True or False")
        self._check_groups()
        if type(self.per_row) is not bool and self.per_row != "auto":
            raise RecipeError(f"QConfig: per_row is {self.per_row!r}, expected True, False or 'auto'")
        for kind in ("weight", "activation"):
            checked = _checked_options(kind, getattr(self, f"{kind}_observer"), getattr(self, f"{kind}_options"))
            object.__setattr__(self, f"{kind}_options", checked)

    def _check_groups(self) -> None:
        size = self.group_size
        if size is None:
            if not self.weight_symmetric:
                raise RecipeError(
                    "QConfig: weight_symmetric=False without a group_size, and scales per output have no zero points; "
                    "give group_size=32, 64 or 128"
                )
            return
        if type(size) is not int or size not in GROUP_SIZES:
            raise RecipeError(f"QConfig: group_size is {size!r}, expected 32, 64, 128 or None")
        if self.weight_bits not in NARROW_BITS:
            raise RecipeError(
                f"QConfig: group_size is {size} with weight_bits {self.weight_bits}, expected 2, 3 or 4 bits; more are "
                "stored as bytes with a scale per output: leave group_size out"
            )
        if not self.per_channel:
            raise RecipeError(f"QConfig: group_size is {size} with per_channel=False; leave one of them out")

    @property
    def by_hand(self) -> bool:
        """Whether `activation_options` are the range of what the layer puts out, as those of "fixed" are."""
        return by_hand(self.activation_observer)

    @property
    def per_call(self) -> bool:
        """Whether the layer's ranges are those of each call, in a static model too."""
        return self.activation_observer == PER_CALL

    @property
    def ranges_per_row(self) -> bool:
        """`per_row` as dynamic quantisation takes it."""
        return self.per_row is not False

    @property
    def clips_weights(self) -> bool:
        """Whether a weight may lie outside its range, as every `weight_observer` but "minmax" may choose."""
        return self.weight_observer != "minmax"

    def for_inputs(self) -> QConfig:
        """The settings of the values that the layer reads: a range by hand is that of what it puts out."""
        if not self.by_hand:
            return self
        return dataclasses.replace(self, activation_observer=AUTO, activation_options=NO_OPTIONS)

    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, in the order of the fields."""
        fields = dataclasses.fields(self)
        return {one.name: getattr(self, one.name) for one in fields if getattr(self, one.name) != one.default}

    def __repr__(self) -> str:
        return f"QConfig({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every field."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dict(value) if isinstance(value, Options) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QConfig:
        """The inverse of `to_dict`; an unknown field is an error that lists the known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise RecipeError(f"QConfig: unknown fields {unknown}, expected some of {sorted(known)}")
        return cls(**data)


def _checked_options(kind: str, observer: Any, options: Any) -> Options:
    """The options of an observer, each an int or a float; RecipeError where the observer does not know or take them."""
    where = f"QConfig: {kind}_observer"
    if kind == "weight" or observer not in (AUTO, PER_CALL):
        _check_observer(where, observer, of_weight=kind == "weight")
    if not isinstance(options, Mapping):
        raise RecipeError(f"QConfig: {kind}_options is {options!r}, expected a dict such as {{'percentile': 99.9}}")
    checked = Options({str(name): _number(kind, name, value) for name, value in options.items()})
    if observer == PER_CALL:  # of a weight it was refused
        if checked:
            raise RecipeError(f"{where} is {observer!r}, which has no options, and {kind}_options are {checked}")
        return checked
    if observer == AUTO:
        if checked:
            known = [name for name in (*OBSERVERS, *LEARNED) if option_names(name)]
            takers = [f"{name!r} takes {', '.join(option_names(name))}" for name in known]
            raise RecipeError(
                f"QConfig: {kind}_options are {checked} without an {kind}_observer to take them; name one: "
                f"{'; '.join(takers)}"
            )
        return checked
    try:
        check_options(observer, checked)
    except ValueError as error:
        hint = f", as in {kind}_options={{'low': 0.0, 'high': 6.0}}" if by_hand(observer) else ""
        raise RecipeError(f"{where}: {error}{hint}") from error
    return checked


def _check_observer(where: str, observer: Any, *, of_weight: bool) -> None:
    """Raise RecipeError where there is no observer of that name, or it is none for a weight."""
    try:
        exists = isinstance(observer, str) and (observer in OBSERVERS or observer in LEARNED)
    except NotLoaded as error:
        raise RecipeError(f"{where}: {error}") from error
    if not exists:
        known = names() if of_weight else [AUTO, PER_CALL, *names()]
        unfit = [name for name, one in OBSERVERS.items() if of_weight and one.follows_batches]
        raise RecipeError(
            f"{where} is {observer!r}, expected one of {', '.join(name for name in known if name not in unfit)}; that "
            "of another package is there when the package is installed, or has called quant.observers.register"
        )
    if of_weight and follows_batches(observer):
        raise RecipeError(
            f"{where} is {observer!r}, whose range follows the batches one after another, and a weight is observed "
            "once; 'minmax' is what it would be"
        )


def _number(kind: str, name: Any, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RecipeError(f"QConfig: {kind}_options has {name!r}: {value!r}, expected a number")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


@dataclass(frozen=True)
class Rule:
    """`pattern` decides which modules, `qconfig` what becomes of them (None: they stay float)."""

    pattern: Pattern
    qconfig: QConfig | None

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the module called `name` (dotted, '' for the root) is meant."""
        if isinstance(self.pattern, str):
            return fnmatch.fnmatchcase(name, self.pattern)
        if isinstance(self.pattern, type):
            return isinstance(module, self.pattern)
        return bool(self.pattern(name, module))

    def __str__(self) -> str:
        if isinstance(self.pattern, str):
            what = repr(self.pattern)
        else:
            what = getattr(self.pattern, "__name__", repr(self.pattern))
        return f"{what} -> {'float' if self.qconfig is None else self.qconfig}"


@dataclass(frozen=True)
class Recipe:
    """Ordered rules, the default for what no rule matches, and the backend.

    ``Recipe({"decoder.*": None, nn.Linear: QConfig(weight_bits=4)})`` leaves the decoder float, gives every other
    Linear 4-bit weights, and everything else the default.

    Attributes:
        rules: tried in order, the first match decides. A mapping or pairs of (pattern, QConfig or None) also do.
        default: for modules that no rule matches; None leaves them float, so that only named layers are quantised.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact on this machine.
    """

    rules: tuple[Rule, ...] = ()
    default: QConfig | None = QConfig()
    backend: str | None = None

    def __init__(
        self,
        # Any, because a Mapping is invariant in its keys: a dict of names alone would not be one of Pattern.
        rules: Mapping[Any, QConfig | None] | Iterable[Rule | tuple[Pattern, QConfig | None]] = (),
        *,
        default: QConfig | None = QConfig(),
        backend: str | None = None,
    ) -> None:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        parsed = tuple(rule if isinstance(rule, Rule) else Rule(*rule) for rule in pairs)
        for rule in parsed:
            if rule.qconfig is not None and not isinstance(rule.qconfig, QConfig):
                raise RecipeError(f"rule {rule.pattern!r}: expected a QConfig or None, got {rule.qconfig!r}")
            if not isinstance(rule.pattern, str) and not callable(rule.pattern):
                raise RecipeError(
                    f"rule {rule.pattern!r}: expected a name pattern, a module type or a function of name and module"
                )
        if default is not None and not isinstance(default, QConfig):
            raise RecipeError(f"Recipe: default is {default!r}, expected a QConfig or None")
        if backend is not None and not isinstance(backend, str):
            raise RecipeError(f"Recipe: backend is {backend!r:.80}, expected a name or None")
        object.__setattr__(self, "rules", parsed)
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "backend", backend)

    def resolve(self, name: str, module: nn.Module) -> tuple[QConfig | None, int]:
        """The settings of one module and the index of the rule that gave them (NO_RULE: the default)."""
        for index, rule in enumerate(self.rules):
            if rule.matches(name, module):
                return rule.qconfig, index
        return self.default, NO_RULE

    def rule_text(self, rule: int) -> str:
        """A rule by its index, or the default, as errors name it."""
        return "the recipe's default" if rule == NO_RULE else f"rule {self.rules[rule]}"

    def unmatched(self, modules: Iterable[tuple[str, nn.Module]]) -> list[Rule]:
        """The rules that match none of `modules` (as `named_modules()` yields them), shadowed ones not included."""
        named = list(modules)
        return [rule for rule in self.rules if not any(rule.matches(name, module) for name, module in named)]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary.

        Raises:
            RecipeError: a rule's pattern is a class or a function, which no file can name.
        """
        for rule in self.rules:
            if not isinstance(rule.pattern, str):
                raise RecipeError(f"rule {rule}: only names have a form in JSON; name the layers, with wildcards")
        rules = [[rule.pattern, None if rule.qconfig is None else rule.qconfig.to_dict()] for rule in self.rules]
        default = None if self.default is None else self.default.to_dict()
        return {"rules": rules, "default": default, "backend": self.backend}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_dict`; an unknown field is an error that lists the known ones."""
        if not isinstance(data, Mapping):
            raise RecipeError(
                f"Recipe: expected a dict with 'rules', 'default' and 'backend', got {type(data).__name__}"
            )
        unknown = sorted(set(data) - {"rules", "default", "backend"})
        if unknown:
            raise RecipeError(f"Recipe: unknown fields {unknown}, expected some of ['backend', 'default', 'rules']")
        try:
            rules = data.get("rules", ())
            if not all(isinstance(one, (list, tuple)) and len(one) == 2 and isinstance(one[0], str) for one in rules):
                raise TypeError
            pairs = [(pattern, _config(qconfig)) for pattern, qconfig in rules]
            default = _config(data["default"]) if "default" in data else QConfig()
        except (TypeError, AttributeError) as error:
            raise RecipeError(
                "Recipe: expected 'rules' as a list of [pattern, settings or null], and 'default' as settings or null"
            ) from error
        return cls(pairs, default=default, backend=data.get("backend"))

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)


def _config(data: Mapping[str, Any] | None) -> QConfig | None:
    return None if data is None else QConfig.from_dict(data)

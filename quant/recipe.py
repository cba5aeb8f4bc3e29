"""Who gets quantised how: settings of one layer, rules that hand them out, and the errors of rules that miss.

Rules are plain data and are tried in order; the first that matches a module decides. Nothing here looks at weights
or activations.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

Pattern: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool]"
"""A module name with shell wildcards (``encoder.*``), a module type (subclasses match), or a predicate of both."""

NO_RULE = -1
"""The rule index of a module that no rule matched, so that the recipe's default decided."""


class RecipeError(ValueError):
    """A recipe that cannot mean what it says: a rule that hits nothing, or asks for what does not exist."""


@dataclass(frozen=True)
class QConfig:
    """How one layer is quantised. Plain data: comparable, and JSON through `to_dict` / `from_dict`.

    Attributes:
        weight_bits: 2 to 8; stored as int8 with a narrower range (embeddings: 8 or 4, packed per row).
        per_channel: a weight scale per output channel (per gate row in recurrent layers), or one per tensor.
        weight_observer: how the weight's range is chosen, a name in `quant.observers`.
        activation_bits: 8; 16 multiplies a high and a low byte in two passes, for inputs whose range 8 bits cannot
            hold; "auto" (dynamic quantisation) takes 16 where the weights show that 8 would lose input features.
        activation_observer: how a calibrated range is chosen, a name in `quant.observers`.
        activation_symmetric: fix the zero point of activations at 128.
        bias_correction: static quantisation takes the mean error that rounding a weight makes on the calibration data
            into the layer's bias (Nagel et al., arXiv:1906.04721, section 4.2).
        per_row: dynamic quantisation takes a range per row (sample, time step) instead of one for the whole tensor.
    """

    weight_bits: int = 8
    per_channel: bool = True
    weight_observer: str = "minmax"
    activation_bits: int | Literal["auto"] = "auto"
    activation_observer: str = "histogram"
    activation_symmetric: bool = False
    bias_correction: bool = True
    per_row: bool = True

    def __post_init__(self) -> None:
        if type(self.weight_bits) is not int or not 2 <= self.weight_bits <= 8:
            raise RecipeError(f"QConfig: weight_bits is {self.weight_bits!r}, expected a whole number from 2 to 8")
        if type(self.activation_bits) not in (int, str) or self.activation_bits not in (8, 16, "auto"):
            raise RecipeError(f"QConfig: activation_bits is {self.activation_bits!r}, expected 8, 16 or 'auto'")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QConfig:
        """The inverse of `to_dict`; an unknown field is an error that lists the known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise RecipeError(f"QConfig: unknown fields {unknown}, expected some of {sorted(known)}")
        return cls(**data)


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
        made = tuple(rule if isinstance(rule, Rule) else Rule(*rule) for rule in pairs)
        for rule in made:
            if rule.qconfig is not None and not isinstance(rule.qconfig, QConfig):
                raise RecipeError(f"rule {rule.pattern!r}: expected a QConfig or None, got {rule.qconfig!r}")
            if not isinstance(rule.pattern, str) and not callable(rule.pattern):
                raise RecipeError(
                    f"rule {rule.pattern!r}: expected a name pattern, a module type or a function of name and module"
                )
        if default is not None and not isinstance(default, QConfig):
            raise RecipeError(f"Recipe: default is {default!r}, expected a QConfig or None")
        object.__setattr__(self, "rules", made)
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "backend", backend)

    def resolve(self, name: str, module: nn.Module) -> tuple[QConfig | None, int]:
        """The settings of one module and the index of the rule that gave them (NO_RULE: the default)."""
        for index, rule in enumerate(self.rules):
            if rule.matches(name, module):
                return rule.qconfig, index
        return self.default, NO_RULE

    def unmatched(self, modules: Iterable[tuple[str, nn.Module]]) -> list[Rule]:
        """The rules that match none of `modules` (as `named_modules()` yields them), shadowed ones not included."""
        named = list(modules)
        return [rule for rule in self.rules if not any(rule.matches(name, module) for name, module in named)]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

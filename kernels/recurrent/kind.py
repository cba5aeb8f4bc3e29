"""The description of a kind of recurrent layer, and the registry of kinds by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quant.kernels.registry import Registry, described
from torch import Tensor

StepFunction = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(a, r, bias_hh, h, c) -> (h, c): see `RecurrentKind`."""


@dataclass(frozen=True, eq=False)
class RecurrentKind:
    """What a recurrent layer computes at one time step, from two products that all kinds have:

        a = W_ih x_t + b_ih            of every time step at once, outside of the loop
        r = W_hh h_{t-1}
        h_t, c_t = step(a, r, b_hh, h_{t-1}, c_{t-1})

    Integers take the place of reals in the products alone: x, h and both weights are rounded, a, r, c and `step` are
    float32. So one `step` is the float layer, its simulation, its training and the reference of its kernel.

    Attributes:
        name: lower case; operators and files call the kind so.
        gates: the rows of each weight are this many blocks of H, the hidden size.
        step: of float32 a and r (rows, gates * H), b_hh (gates * H,) or None, h (rows, H) and c (rows, H) or None; it
            gives h and c. Differentiable, each row by itself. With a projection h_{t-1} is (rows, S), its result.
        has_cell: there is a second state c, which no product reads. Without one c is None in and out.
        sums_biases: b_hh is added where b_ih is, so it is a part of a, and `step` is given None.
        projects: h_t may be multiplied by a third weight (S, H) at the end of a step (`proj_size`).
        native: csrc/core/rows/cells.inc has a kernel of this name; else `step` is computed around the products of a
            backend.
        whole_sequence: torch's own kernel over whole sequences, called as `torch._VF.lstm` is; None where it has none.
    """

    name: str
    gates: int
    step: StepFunction
    has_cell: bool = False
    sums_biases: bool = True
    projects: bool = False
    native: bool = False
    whole_sequence: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentKind:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self.name,)

    def input_bias(self, bias_ih: Tensor | None, bias_hh: Tensor | None) -> Tensor | None:
        """The bias to add to the input projection."""
        if not self.sums_biases or bias_hh is None:
            return bias_ih
        return bias_hh if bias_ih is None else bias_ih + bias_hh


def _as_kind(name: str, value: Any) -> RecurrentKind:
    """A registered value as a kind of that name."""
    if not isinstance(value, RecurrentKind) or value.name != name:
        raise TypeError(f"recurrent kind {name!r}: expected a RecurrentKind of that name, got {described(value)}")
    return value


_KINDS: Registry[RecurrentKind] = Registry("recurrent kind", "octet.recurrent_kinds", {}, _as_kind)


def register(kind: RecurrentKind) -> RecurrentKind:
    """Add a kind, for as long as the process runs.

    A package that is installed needs no call: an entry point of the group "octet.recurrent_kinds", of the kind's name,
    is the kind.

    Raises:
        ValueError: another kind has its name.
    """
    return _KINDS.add(kind.name, kind)


def find(name: str) -> RecurrentKind:
    """The kind with this name.

    Raises:
        ValueError: there is no such kind; the message lists the names.
    """
    try:
        return _KINDS[name]
    except KeyError:
        raise ValueError(
            f"mode is {name!r}, expected one of {', '.join(_KINDS.names())}; a kind of your own is there once the "
            "module that registers it is imported"
        ) from None


def kinds() -> tuple[RecurrentKind, ...]:
    """All registered kinds."""
    return tuple(_KINDS.values())

"""Which calls a graph or a program stands for: the argument expected in each place, and the tensors it writes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quant.runtime.trees import Attr, Ref, map_leaves


@dataclass(frozen=True)
class ExpectedInput:
    """The requirements for a tensor or number in a call's arguments.

    Attributes:
        name: its name in errors.
        kind: Tensor; int or float, exactly, not a subclass; or object for a value of any class.
        dtype: the required dtype; None for any.
        rank: the required number of dimensions; None for any.
        contiguous: whether it must be contiguous, because writes to it are shared with other tensors only then.
    """

    name: str
    kind: type = Tensor
    dtype: torch.dtype | None = None
    rank: int | None = None
    contiguous: bool = False


@dataclass(frozen=True)
class ExpectedCall:
    """The arguments of a module's call, bound to its forward's signature.

    Attributes:
        path: dotted name of the module in the user's model, '' for the model itself.
        arguments: name -> nested value, with a Ref in the place of each tensor and number, and constants elsewhere.
        inputs: value id -> its requirements, for the values that `arguments` refers to.
        writes: whether a run changes tensors that outlive it: arguments, or buffers of the module.
        written: the buffers and inputs that may be written to before the last guard is checked.
    """

    path: str
    arguments: Mapping[str, Any]
    inputs: Mapping[int, ExpectedInput] = field(default_factory=dict)
    writes: bool = False
    written: tuple[Attr | Ref, ...] = ()

    def renumbered(self, ids: Mapping[int, int]) -> ExpectedCall:
        """The same call with other value ids, `ids[old]` for each."""

        def other(leaf: Any) -> Any:
            return Ref(ids[leaf.index]) if isinstance(leaf, Ref) else leaf

        return replace(
            self,
            arguments=map_leaves(other, self.arguments),
            inputs={ids[value]: expected for value, expected in self.inputs.items()},
            written=tuple(other(one) for one in self.written),
        )

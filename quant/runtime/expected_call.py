"""The calls that a graph or a program stands for: what is expected of each argument, and what a run writes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quant.runtime.trees import Attr, Ref, map_leaves


@dataclass(frozen=True)
class ExpectedInput:
    """What is expected where a tensor or a number goes in.

    Attributes:
        name: how errors call it.
        kind: Tensor; int or float, which no subclass stands for; or object, where anything may come.
        dtype: that a tensor has to have; None where any will do.
        rank: the number of its dimensions; None where any will do.
        contiguous: whether it has to be contiguous, because what is written to it is shared then.
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
        arguments: by name; nested, with Ref to a value where a tensor or a number goes in, else the constant.
        inputs: by the values that arguments refer to.
        writes: whether a run changes tensors that outlive it: arguments, or buffers of the module.
        written: the buffers and inputs that may be written to before the last guard has held.
    """

    path: str
    arguments: Mapping[str, Any]
    inputs: Mapping[int, ExpectedInput] = field(default_factory=dict)
    writes: bool = False
    written: tuple[Attr | Ref, ...] = ()

    def renumbered(self, ids: Mapping[int, int]) -> ExpectedCall:
        """The same where values have other ids."""

        def other(leaf: Any) -> Any:
            return Ref(ids[leaf.index]) if isinstance(leaf, Ref) else leaf

        return replace(
            self,
            arguments=map_leaves(other, self.arguments),
            inputs={ids[value]: expected for value, expected in self.inputs.items()},
            written=tuple(other(one) for one in self.written),
        )

"""Calls that return their argument itself: `x.contiguous()` is x where x is contiguous already.

The forward gets torch's result, so that `is` and `id` answer as in the float model. The call is noted nevertheless,
because other inputs may need it. From then on the tensor is known by the call, and by its older place again when the
submodule that made the call has ended without returning it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from quant.runtime.trees import Ref


class GivenBack:
    """The tensors of one recording that a call returned as they were, with their places.

    Attributes:
        places: id of a tensor -> the place by which the tape knows it.
    """

    def __init__(self, places: dict[int, Any]) -> None:
        self.places = places
        self._calls: list[tuple[Tensor, Any, Ref]] = []

    def note(self, tensor: Tensor, older: Any, newer: Ref) -> None:
        self._calls.append((tensor, older, newer))

    def holds(self, tensor: Any) -> bool:
        """Whether some call returned a tensor as it was."""
        return any(one is tensor for one, _, _ in self._calls)

    def mark(self) -> Callable[[Iterable[Any]], None]:
        """A function to call with the returned leaves when the submodule's call that starts now has ended."""
        start = len(self._calls)

        def end(returned: Iterable[Any]) -> None:
            kept = {leaf.index for leaf in returned if isinstance(leaf, Ref)}
            for tensor, older, newer in reversed(self._calls[start:]):
                if self.places.get(id(tensor)) == newer and newer.index not in kept:
                    self.places[id(tensor)] = older
            # Later writes of the caller still show that the tensor is shared.

        return end

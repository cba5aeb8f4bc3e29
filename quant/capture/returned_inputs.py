"""Calls that give their own tensor back: `x.contiguous()` is x where x lies so already.

The forward gets what torch gave, so that `is` and `id` say what they say in the float model. The call is noted all the
same, because other inputs may need it, and the tensor is known by the call from then on; by its older place again where
the submodule that made the call has ended and did not return it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from quant.runtime.trees import Ref


class GivenBack:
    """The tensors of one recording that a call gave back, with their places.

    Attributes:
        places: by identity of the tensor, the place by which the recorder knows it.
    """

    def __init__(self, places: dict[int, Any]) -> None:
        self.places = places
        self._calls: list[tuple[Tensor, Any, Ref]] = []

    def note(self, tensor: Tensor, older: Any, newer: Ref) -> None:
        self._calls.append((tensor, older, newer))

    def holds(self, tensor: Any) -> bool:
        """Whether some call gave a tensor back."""
        return any(one is tensor for one, _, _ in self._calls)

    def mark(self) -> Callable[[Iterable[Any]], None]:
        """What ends a submodule's call that starts now, and takes the leaves that it returned."""
        start = len(self._calls)

        def end(returned: Iterable[Any]) -> None:
            kept = {leaf.index for leaf in returned if isinstance(leaf, Ref)}
            for tensor, older, newer in reversed(self._calls[start:]):
                if self.places.get(id(tensor)) == newer and newer.index not in kept:
                    self.places[id(tensor)] = older
            # What the caller writes to later is still known to be shared.

        return end

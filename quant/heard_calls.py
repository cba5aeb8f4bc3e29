"""Records the calls of torch that a module makes, and compares them in a half type and in float32."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.capture.calls import (
    BRANCHES,
    GIVES_BACK,
    METADATA,
    OF_GRADIENTS,
    called_at,
    canonical,
    functions,
    is_sized_by_values,
)
from quant.capture.outer_objects import Outside
from quant.capture.recorded_modules import watching
from quant.half_precision import kinds_of
from quant.runtime.arguments import Arguments, copied
from quant.runtime.layers.quant_module import HALVES
from quant.runtime.trees import leaves

SILENT = METADATA | OF_GRADIENTS | GIVES_BACK | functions("data", "detach")
"""Calls that compute nothing: queries and casts."""
READS = BRANCHES | functions(
    "item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__", "__contains__"
)
"""Calls by which a forward may branch on values, which the half type rounds."""
GUARDS = functions(
    "isinf", "isnan", "isfinite", "any", "all", "__bool__", "where", "neg", "clamp", "clip", "nan_to_num"
) | {operator.neg}  # fmt: skip
"""Calls that keep values from overflowing a half type."""
END: tuple[Any, tuple[Any, ...]] = (None, ())
"""Marks the end of the calls."""
NEAR = 0.3
"""Largest relative error of outputs where a forward branches on values: a token may be routed to another expert."""

TorchCall = tuple[Any, tuple[Any, ...]]
"""A call of torch: the function, and the constants among its arguments."""
PartCalls = dict[str, list[tuple[Arguments, list[torch.dtype | None]]]]
"""Dotted name of a module -> its calls: the arguments, and the dtypes of its outputs."""


@dataclass
class Heard:
    """The record of one call of a module.

    Attributes:
        computed: the calls of torch that compute something, in order.
        output: the module's output.
        calls: those of modules within it, where these were asked for.
    """

    computed: list[TorchCall] = field(default_factory=list)
    output: Any = None
    calls: PartCalls = field(default_factory=dict)

    @property
    def kinds(self) -> list[torch.dtype | None]:
        """The dtypes of the outputs; None for one that is not a tensor."""
        return kinds_of(self.output)


class Hearing(TorchFunctionMode):
    """A function mode that notes the functions of torch that are called, and gets the calls of watched modules."""

    def __init__(self, root: nn.Module, most_calls: int) -> None:
        super().__init__()
        self.outside = Outside()
        self.heard = Heard()
        self._most_calls = most_calls
        self._names = {id(module): name for name, module in root.named_modules()}

    def on_copy(self, module: nn.Module) -> None:
        """Nothing to do: a recorder will note it."""

    def on_call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's forward, and note the call."""
        known = self.heard.calls.setdefault(self._names.get(id(module), ""), [])
        if len(known) >= self._most_calls:
            return forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # our own copies are not calls of the model
            call: Arguments = copied((args, kwargs))
        output = forward(*args, **kwargs)
        known.append((call, kinds_of(output)))
        return output

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind, target, given, settings = canonical(func, args, kwargs)
        function = called_at(kind, target, given) or type(target)
        if function not in SILENT:
            settings = {key: value for key, value in settings.items() if key != "dtype"}
            self.heard.computed.append((function, tuple(map(_constant, leaves((given, settings))))))
        return func(*args, **kwargs)


def _constant(leaf: Any) -> Any:
    """The part of an argument that no cast changes: a constant itself, the class of anything else."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    return Tensor if isinstance(leaf, Tensor) else type(leaf)


def hear(module: nn.Module, call: Arguments, *, most_calls: int = 0) -> Heard:
    """Record a call of a module, in eval mode and without the user's hooks; the module's state is restored.

    Args:
        most_calls: number of calls to keep for each module within it.
    """
    args, kwargs = copied(call)
    hearing = Hearing(module, most_calls)
    with watching(module) as watched, watched.telling(hearing), hearing:  # type: ignore[arg-type]
        hearing.heard.output = module.forward(*args, **kwargs)
    return hearing.heard


def same_calls(halves: Sequence[TorchCall], wide: Sequence[TorchCall]) -> bool | None:
    """Whether a call in a half type and one in float32 are the same; None where they may differ by rounded values."""
    place, reads = 0, False
    for call in [*wide, END]:
        place += _overflow_guard(halves, place, call)
        own = _at(halves, place)
        reads = reads or _reads(call[0]) or _reads(own[0])
        if not _same_call(own, call):
            return None if reads else False
        place += 1
    return True


def _reads(function: Any) -> bool:
    return function in READS or is_sized_by_values(function)


def _at(computed: Sequence[TorchCall], place: int) -> TorchCall:
    return computed[place] if place < len(computed) else END


def _same_call(one: TorchCall, other: TorchCall) -> bool:
    return one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(_same_constant, one[1], other[1]))


def _overflow_guard(computed: Sequence[TorchCall], place: int, until: TorchCall) -> int:
    """The number of calls from `place` to `until` that only clamp values to the range of a half type.

    transformers clamps hidden states in float16 (T5, Whisper), which float32 does not need.
    """
    numbers: list[float] = []
    for count, call in enumerate(itertools.islice(computed, place, None)):
        if _same_call(call, until):
            return count if numbers or not count else 0
        numbers += [one for one in call[1] if isinstance(one, (int, float))]
        if call[0] not in GUARDS or not all(map(_is_limit, numbers)):
            return 0
    return len(computed) - place if until is END and numbers else 0


def _is_limit(number: float) -> bool:
    """Whether a number is the largest of a half type, or slightly less."""
    return any(0.9 * torch.finfo(one).max <= abs(number) <= torch.finfo(one).max for one in HALVES)


def _same_constant(one: Any, other: Any) -> bool:
    """Whether two constants are equal, or the same limit of their dtypes (`torch.finfo(x.dtype).min`)."""
    if type(one) is not type(other) or type(one) is not float:
        return bool(one == other)
    return one == other or (one != one and other != other) or any(_of_a_limit(one, other))


def _of_a_limit(one: float, other: float) -> Iterator[bool]:
    wide = torch.finfo(torch.float32)
    for own in map(torch.finfo, HALVES):
        for a, b in ((own.max, wide.max), (own.eps, wide.eps), (own.tiny, wide.tiny)):
            yield abs(one / a - other / b) < 1e-6 * abs(one / a)


def near(one: Any, other: Any) -> bool:
    """Whether two outputs have tensors of the same shapes and nearly the same values."""
    pairs = [[leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)] for tree in (one, other)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_near_tensors, *pairs))


def _near_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or one.layout != torch.strided:
        return True  # integers may differ by near ties
    a, b = one.double().nan_to_num(), other.double().nan_to_num()
    return bool((a - b).norm() <= NEAR * a.norm())

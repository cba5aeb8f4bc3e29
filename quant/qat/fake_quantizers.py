"""The fake quantiser of a value, of several values that share a range, and of a weight whose scale is learned."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.fusion.fused_graph import FusedGraph, Slot
from quant.kernels import QScheme, weight_scheme
from quant.observers import (
    AUTO,
    LEARNED,
    FakeQuantize,
    follows_batches,
    make_learned,
    make_observer,
    takes,
    trains,
)
from quant.observers.base import Observer, RangeObserver
from quant.observers.fake_quantize import NO_CLAMP, FakeQuantizeBase
from quant.ops.step import Step
from quant.prepare import scheme_of
from quant.recipe import RecipeError
from quant.runtime.names import child_name


def activation_quantizer(slot: Slot, name: str) -> FakeQuantizeBase:
    """The fake quantiser that a slot's QConfig asks for.

    "auto" is a moving average. An observer that searches for its range, which only a calibrated model may have, becomes
    one too: training starts from its range.

    Args:
        name: of the layer, for messages.
    """
    scheme, kind, options = scheme_of(slot), slot.qconfig.activation_observer, slot.qconfig.activation_options
    if kind == AUTO or not trains(kind):
        kind, options = "moving_average", {}
    result: FakeQuantizeBase
    if kind in LEARNED:
        result = _learned(kind, scheme, None, options, name)
    elif values_of(slot) > 1 and follows_batches(kind):
        result = SharedFakeQuantize([make_observer(kind, scheme, **options) for _ in range(values_of(slot))])
    else:
        result = FakeQuantize(make_observer(kind, scheme, **options))
    return named(result, name)


def weight_quantizer(step: Step, channels: int, name: str) -> FakeQuantizeBase | None:
    """The fake quantiser that learns a weight's scale; None where the scale follows from the weight."""
    assert step.qconfig is not None
    kind, options = step.qconfig.weight_observer, step.qconfig.weight_options
    if kind not in LEARNED:
        return None
    per_channel = step.qconfig.per_channel
    scheme = weight_scheme(step.qconfig.weight_bits, 0 if per_channel else None)
    return named(_learned(kind, scheme, channels if per_channel else None, options, name), name)


def _learned(
    kind: str, scheme: QScheme, channels: int | None, options: Mapping[str, float], name: str
) -> FakeQuantizeBase:
    settings: dict[str, Any] = {"channels": channels} if takes(kind, "channels") else {}
    if takes(kind, "per_sample") and channels is None and scheme.dtype == torch.int8:
        settings["per_sample"] = False
    try:
        return make_learned(kind, scheme, **settings, **options)
    except ValueError as error:
        raise RecipeError(f"layer '{name}': {error}") from error


def named(fake_quantizer: FakeQuantizeBase, name: str) -> FakeQuantizeBase:
    """The fake quantiser, with the layer's name in its messages."""
    for module in fake_quantizer.modules():
        if isinstance(module, (FakeQuantizeBase, Observer)):
            module.name = name
    return fake_quantizer


def values_of(slot: Slot) -> int:
    """How many values a program shows to a slot's fake quantiser, each at its own time."""
    return len(slot.observed) + len(slot.inner)


class JoinedObserver(RangeObserver):
    """The union of several moving ranges, one for each value of a slot, in each of a module's programs.

    A single average would be wrong: for two values with ends at 1 and 10 it would alternate between them and clamp the
    second to about 5.5.

    Args:
        members: observers of one kind, one per value.
    """

    members: Any
    """An nn.ModuleList of observers, one per value."""

    def __init__(self, members: Sequence[Observer]) -> None:
        super().__init__(members[0].scheme)
        self.members = nn.ModuleList(members)
        self.turn = 0

    def grow(self, values: int) -> None:
        """Add members that saw nothing."""
        for _ in range(values):
            member = copy.deepcopy(self.members[0])
            member.reset()
            self.members.append(member)

    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor of the member whose turn it is."""
        self._check(x)
        with torch.no_grad():
            self.members[self.turn](x)
            self.join()
        return x

    def start(self, low: Tensor, high: Tensor) -> None:
        for member in self.members:
            member.start(low, high)
        self.join()

    def join(self) -> None:
        """Update the range to the union of the members' ranges."""
        self.low.copy_(torch.stack([member.low for member in self.members]).amin(dim=0))
        self.high.copy_(torch.stack([member.high for member in self.members]).amax(dim=0))
        self.nan_count.copy_(torch.stack([member.nan_count for member in self.members]).sum())
        self.inf_count.copy_(torch.stack([member.inf_count for member in self.members]).sum())

    def reset(self) -> None:
        super().reset()
        for member in self.members:
            member.reset()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also load states of versions whose programs had one average together: it is where each begins."""
        for place, member in enumerate(self.members):
            start = f"{prefix}members.{place}."
            if f"{prefix}low" in state_dict and not any(key.startswith(start) for key in state_dict):
                whole = {name: state_dict[prefix + name] for name in ("low", "high")}
                state_dict.update({start + name: whole.get(name, own) for name, own in member.named_buffers()})
        state_dict.pop(f"{prefix}batches", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _update(self, rows: Tensor, seen: object) -> None:
        raise AssertionError("its members observe")

    def _merge(self, other: Observer) -> None:
        assert isinstance(other, JoinedObserver)
        for mine, theirs in zip(self.members, other.members, strict=True):
            mine.merge(theirs)
        self.join()


class SharedFakeQuantize(FakeQuantize):
    """A fake quantiser of several values with one range, such as the inputs of a concatenation, or a layer's input in
    several programs.

    Args:
        members: as for `JoinedObserver`.
    """

    def __init__(self, members: Sequence[Observer]) -> None:
        super().__init__(JoinedObserver(members))

    @classmethod
    def begun_as(cls, one: FakeQuantize) -> SharedFakeQuantize:
        """The same with `one`, which has a single value so far, as the first of several."""
        shared = cls([one.observer]).to(one.scale.device)
        assert isinstance(shared.observer, JoinedObserver)
        shared.observer.join()
        shared.observer.given = one.observer.given
        shared.train(one.training)
        shared.load_state_dict(dict(one.named_buffers(recurse=False)), strict=False)
        shared.name = shared.observer.name = one.name
        return shared

    @property
    def values(self) -> int:
        """How many values it has."""
        assert isinstance(self.observer, JoinedObserver)
        return len(self.observer.members)

    def grow(self, values: int) -> None:
        """Add values, whose numbers follow those of the others."""
        assert isinstance(self.observer, JoinedObserver)
        self.observer.grow(values)

    def at(self, member: int, x: Tensor, clamp: tuple[float, float] = NO_CLAMP) -> Tensor:
        """Observe and round the value number `member`."""
        assert isinstance(self.observer, JoinedObserver)
        self.observer.turn = member
        out: Tensor = self(x, clamp)
        return out


def weight_key(step: Step, fused: FusedGraph) -> str:
    """The key of a step's learned weight scale; steps that share an int8 weight share it."""
    first = fused.calls_of_layer(step)[0]
    return child_name(first.name or "weight")

"""What is known about a fused graph's values: an observer per range, and per-channel observers for some layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from quant.folding import parameter
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Graph
from quant.kernels import QParams
from quant.observers import ChannelMean, Observer
from quant.ops.linear import Linear
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.static.shared_ranges import Agreement


class Ranges(nn.Module):
    """The observers of one fused graph. The runner shows them the values.

    Attributes:
        fused: steps and ranges.
        root: the captured module.
        observers: an observer per slot, and those of `watch_columns`; keys are names with '/' for '.'.
        known: ranges that were asked for, while they cannot change; None where they can.
        means: of the inputs of `corrected` steps, by the steps' names likewise.
    """

    fused: FusedGraph
    root: nn.Module

    def __init__(self, root: nn.Module, fused: FusedGraph, observers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.fused = fused
        self.observers = nn.ModuleDict({key_of(name): observer for name, observer in observers.items()})
        # Not a child: root holds this module, and a module that holds itself has no end.
        object.__setattr__(self, "root", root)
        self.means = nn.ModuleDict({key_of(step.name): _make_mean(step, self) for step in self.corrected()})
        self.known: dict[str, QParams] | None = None
        self._columns: dict[int, str] = {}
        self._agreement = Agreement(fused.joined)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load state_dicts written when the observers were called `points`, too."""
        old = f"{prefix}points."
        for key in [key for key in state_dict if key.startswith(old)]:
            state_dict[f"{prefix}observers.{key.removeprefix(old)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self.fused.graph

    def observer(self, slot: str) -> nn.Module:
        """The observer of a slot."""
        return self.observers[key_of(slot)]

    def set_observer(self, slot: str, observer: nn.Module) -> None:
        """Put another observer, or anything with `qparams()` that passes its input on, in a slot."""
        self.observers[key_of(slot)] = observer

    def use(self, fused: FusedGraph, observers: Mapping[str, nn.Module]) -> None:
        """Take another fusion of the same graph, with an observer for each of its slots."""
        self.fused = fused
        self.observers = nn.ModuleDict({key_of(name): observer for name, observer in observers.items()})
        self._columns = {}
        self._agreement = Agreement(fused.joined)

    def watch_columns(self, value: int, observer: nn.Module) -> None:
        """Let an observer per channel see a value as well, for `input_peaks`."""
        self._columns[value] = key_of(f"{self.graph.nodes[value].label} by channel")
        self.observers[self._columns[value]] = observer

    def input_peaks(self, step: Step) -> Tensor | None:
        """The largest magnitude seen of each channel of a step's input; None where nobody looked, or saw anything."""
        key = self._columns.get(step.inputs[0])
        observer = None if key is None else self.observers[key]
        if not isinstance(observer, Observer) or not observer.low.numel() or bool((observer.low > observer.high).all()):
            return None
        return torch.maximum(-observer.low, observer.high).clamp(min=0.0)

    def qparams(self, slot: str) -> QParams:
        """The range that calibration chose for a slot, or for several that are joined (`shared_ranges.py`)."""
        if self.known is not None and slot in self.known:
            return self.known[slot]
        chosen: QParams = self._agreement.of(slot, self.observer) or self.observer(slot).qparams()  # type: ignore[operator]
        if self.known is not None:
            self.known[slot] = chosen
        return chosen

    def agreed_ends(self) -> dict[int, tuple[Tensor, Tensor]]:
        """(low, high) of the values that took one range together, by their observers' ids."""
        return {id(self.observer(slot)): ends for slot, ends in self._agreement.ends(self.observer).items()}

    def settled(self) -> AbstractContextManager[None]:
        """While many ranges are asked for, and nothing is observed."""
        return self._agreement.settled()

    def mean(self, step: Step) -> Tensor | None:
        """Of the input of a weighted step, per channel; None where its bias is not to be corrected."""
        key = key_of(step.name)
        mean: Tensor | None = self.means[key].mean() if key in self.means else None  # type: ignore[operator]
        return mean

    def corrected(self) -> list[Step]:
        """The weighted steps whose bias is to be corrected.

        A layer that is called at several places has one bias, and their inputs different means: what is right at one
        place would be wrong at another.
        """
        return [
            step
            for step in self.fused.steps
            if isinstance(step.operator, Weighted) and step.qconfig is not None and step.qconfig.bias_correction
            if len(self.fused.calls_of_layer(step)) == 1
            and self.graph.nodes[step.nodes[0]].target not in self.fused.shared
        ]

    def input_scales(self, step: Step) -> tuple[Tensor, Tensor] | tuple[()]:
        """Of a weighted step: its input's scale, and the smallest that the same layer is called with."""
        if not isinstance(step.operator, Weighted):
            return ()
        scales = [self.qparams(self.fused.slot_of[call.inputs[0]]).scale for call in self.fused.calls_of_layer(step)]
        return self.qparams(self.fused.slot_of[step.inputs[0]]).scale, torch.stack(scales).amin()

    def learned(self, step: Step) -> Tensor | None:
        """The scale that training learned for a step's weight, float32 (out,); None where it follows the weight."""
        return None


def _make_mean(step: Step, ranges: Ranges) -> ChannelMean:
    weight = parameter(step.weighted.weight, ranges.graph, ranges.root)
    assert weight is not None
    mean = ChannelMean(axis=-1 if isinstance(step.operator, Linear) else 1 - weight.dim())
    mean.name = step.name
    return mean


def key_of(slot: str) -> str:
    """A slot's name as a child's name, which must have no dot and be none of ModuleDict's own (`update`, `keys`)."""
    key = slot.replace(".", "/")
    return f"{key}/" if hasattr(nn.ModuleDict, key) else key

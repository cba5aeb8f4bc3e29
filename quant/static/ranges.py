"""What is known about a fused graph's values: an observer per range, and per-channel observers for some layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from quant.folding import parameter
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Graph
from quant.kernels import QParams
from quant.kernels.scheme import SCALE_MIN
from quant.observers import ChannelMean, Observer
from quant.ops.linear import Linear
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.names import child_name
from quant.static.shared_ranges import Agreement


class Ranges(nn.Module):
    """The observers of one fused graph. The runner shows them the values.

    Attributes:
        fused: steps and ranges.
        root: the captured module.
        observers: an observer per slot, and those of `watch_columns`; keys are names with '/' for '.'.
        known: a cache of ranges, while they cannot change; None where they can.
        columns: the keys in `observers` of the per-channel observers of `watch_columns`, by the value they see.
        means: of the inputs of `corrected` steps, with keys of the same form.
    """

    fused: FusedGraph
    root: nn.Module

    def __init__(self, root: nn.Module, fused: FusedGraph, observers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.fused = fused
        self.observers = nn.ModuleDict({key_of(name): observer for name, observer in observers.items()})
        # Not a child: root holds this module, and a module that holds itself recurses without end.
        object.__setattr__(self, "root", root)
        self.means = nn.ModuleDict({key_of(step.name): _make_mean(step, self) for step in self.corrected()})
        self.known: dict[str, QParams] | None = None
        self.columns: dict[int, str] = {}
        self._agreement = Agreement(fused.joined)
        self._other_calls: dict[str, set[str]] | None = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Also load state_dicts of versions that called the observers `points`."""
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
        """Replace a slot's observer by another one, or by any module with `qparams()` that returns its input."""
        self.observers[key_of(slot)] = observer

    def use(self, fused: FusedGraph, observers: Mapping[str, nn.Module]) -> None:
        """Take another fusion of the same graph, with an observer for each of its slots."""
        self.fused = fused
        self.observers = nn.ModuleDict({key_of(name): observer for name, observer in observers.items()})
        self.known = None if self.known is None else {}
        self.columns = {}
        self._agreement, self._other_calls = Agreement(fused.joined), None

    def watch_columns(self, value: int, observer: nn.Module) -> None:
        """Also observe a value per channel, for `input_peaks`."""
        self.columns[value] = key_of(f"{self.graph.nodes[value].label} by channel")
        self.observers[self.columns[value]] = observer

    def input_peaks(self, step: Step) -> Tensor | None:
        """The largest magnitude of each channel of a step's input; None where it was not observed."""
        key = self.columns.get(step.inputs[0])
        observer = None if key is None else self.observers[key]
        if not isinstance(observer, Observer) or not observer.low.numel() or bool((observer.low > observer.high).all()):
            return None
        return torch.maximum(-observer.low, observer.high).clamp(min=0.0)

    def qparams(self, slot: str) -> QParams:
        """The range of a slot, or of several joined slots, as calibration chose it (`shared_ranges.py`).

        Of an input that was always zero, as the first state of a loop is, it is the range that the same layer is called
        with elsewhere: in its own, the layer's bias would fit int32 only beside a weight of zeros.
        """
        if self.known is not None and slot in self.known:
            return self.known[slot]
        chosen = self._own_qparams(slot)
        if self._other_calls is None:
            self._other_calls = self.fused.slots_of_other_calls()
        others = self._other_calls.get(slot)
        if others and float(chosen.scale) <= SCALE_MIN:
            known = [one for one in map(self._own_qparams, sorted(others)) if float(one.scale) > SCALE_MIN]
            chosen = min(known, key=lambda one: float(one.scale), default=chosen)
        if self.known is not None:
            self.known[slot] = chosen
        return chosen

    def _own_qparams(self, slot: str) -> QParams:
        chosen: QParams = self._agreement.of(slot, self.observer) or self.observer(slot).qparams()  # type: ignore[operator]
        return chosen

    def agreed_ends(self) -> dict[int, tuple[Tensor, Tensor]]:
        """(low, high) of the slots that agreed on a common range, by their observers' ids."""
        return {id(self.observer(slot)): ends for slot, ends in self._agreement.ends(self.observer).items()}

    def settled(self) -> AbstractContextManager[None]:
        """A context for reading many ranges, in which nothing is observed."""
        return self._agreement.settled()

    def mean_keys(self) -> dict[Hashable, str]:
        """The keys in `means`, by the layer whose input it is."""
        weighted = (step for step in self.fused.steps if isinstance(step.operator, Weighted))
        return {self.fused.layer_of(step): key_of(step.name) for step in weighted if key_of(step.name) in self.means}

    def mean(self, step: Step) -> Tensor | None:
        """The mean per channel of a weighted step's input; None where its bias is not corrected."""
        key = key_of(step.name)
        mean: Tensor | None = self.means[key].mean() if key in self.means else None  # type: ignore[operator]
        return mean

    def corrected(self) -> list[Step]:
        """The weighted steps whose bias is corrected.

        A layer that is called at several places is not among them: it has one bias, and inputs with different means.
        """
        return [
            step
            for step in self.fused.steps
            if isinstance(step.operator, Weighted) and step.qconfig is not None and step.qconfig.bias_correction
            if len(self.fused.calls_of_layer(step)) == 1
            and self.graph.nodes[step.nodes[0]].target not in self.fused.shared
        ]

    def input_scales(self, step: Step) -> tuple[Tensor, Tensor] | tuple[()]:
        """The scale of a weighted step's input, and the smallest one among all calls of the layer."""
        if not isinstance(step.operator, Weighted):
            return ()
        scales = [self.qparams(self.fused.slot_of[call.inputs[0]]).scale for call in self.fused.calls_of_layer(step)]
        return self.qparams(self.fused.slot_of[step.inputs[0]]).scale, torch.stack(scales).amin()

    def learned(self, step: Step) -> Tensor | None:
        """The learned scale of a step's weight, float32 (out,); None where the scale follows from the weight."""
        return None


def _make_mean(step: Step, ranges: Ranges) -> ChannelMean:
    weight = parameter(step.weighted.weight, ranges.graph, ranges.root)
    assert weight is not None
    mean = ChannelMean(axis=-1 if isinstance(step.operator, Linear) else 1 - weight.dim())
    mean.name = step.name
    return mean


def key_of(slot: str) -> str:
    """A slot's name as a child's: without dots, and different from ModuleDict's methods (`update`, `keys`)."""
    key = child_name(slot)
    return f"{key}/" if hasattr(nn.ModuleDict, key) else key

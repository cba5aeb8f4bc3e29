"""One run of a static torch.ao model: which functions and layers it called on which values, and the values' ranges.

Scales and zero points are those of the quantised tensors themselves, so nothing has to be known about how a layer keeps
its own, or which functions give their output the range of their input. A value and its quantised form are one value
here: what only quantises or dequantises is no event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.runtime.arguments import Arguments
from quant.runtime.trees import leaves

INT8_SHIFT = 128
"""What makes an int8 integer, and its zero point, uint8."""


@dataclass(frozen=True)
class Range:
    """Scale and zero point of a uint8 value, and the smallest and largest of its integers in this run."""

    scale: float
    zero_point: int
    low: int
    high: int

    @property
    def numbers(self) -> tuple[float, int]:
        """Scale and zero point."""
        return self.scale, self.zero_point


@dataclass(frozen=True)
class Event:
    """One call.

    Attributes:
        name: dotted, of a module; of a function its own.
        is_module: which of the two.
        inputs: the values that it reads, in order.
        outputs: the values that it gives.
    """

    name: str
    is_module: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def computes(self) -> bool:
        """Whether it gives another value than it reads; what torch.ao fused away leaves an identity."""
        return self.inputs != self.outputs


@dataclass
class RecordedRun:
    """What one run called.

    Attributes:
        events: in order.
        ranges: by value; of those that are integers somewhere.
        calls: the arguments of the calls of each module, by its name.
    """

    events: list[Event] = field(default_factory=list)
    ranges: dict[int, Range] = field(default_factory=dict)
    calls: dict[str, list[Arguments]] = field(default_factory=dict)
    _values: dict[int, int] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)

    def value(self, tensor: Tensor) -> int:
        """The number of a tensor's value; a new one where it was not met before."""
        if id(tensor) not in self._values:
            self.name_value(tensor, len(self._kept))
        return self._values[id(tensor)]

    def name_value(self, tensor: Tensor, value: int) -> None:
        """Say which value a tensor holds."""
        self._values[id(tensor)] = value
        self._kept.append(tensor)  # or another tensor may get its id
        if tensor.is_quantized:
            self.ranges.setdefault(value, _range_of(tensor))

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is an argument of the model or of a layer, or what a call gave."""
        return id(tensor) in self._values

    def note(self, name: str, is_module: bool, args: Any, output: Any) -> None:
        """Add an event, if tensors went in and came out."""
        given = [one for one in leaves(args) if isinstance(one, Tensor) and self.knows(one)]
        results = [one for one in leaves(output) if isinstance(one, Tensor)]
        if not given or not results:
            return
        if len(given) == len(results) == 1 and given[0].is_quantized is not results[0].is_quantized:
            self.name_value(results[0], self.value(given[0]))
            return
        inputs = tuple(map(self.value, given))
        self.events.append(Event(name, is_module, inputs, tuple(map(self.value, results))))


def _range_of(tensor: Tensor) -> Range:
    integers = tensor.int_repr()
    shift = INT8_SHIFT if integers.dtype == torch.int8 else 0
    low, high = (int(integers.min()), int(integers.max())) if integers.numel() else (0, 0)
    return Range(tensor.q_scale(), tensor.q_zero_point() + shift, low + shift, high + shift)


class _Recorder(TorchFunctionMode):
    """Notes functions, and the calls of leaves as a whole."""

    def __init__(self, run: RecordedRun, names: dict[nn.Module, str], leaf_names: Collection[str]) -> None:
        super().__init__()
        self.run, self.names, self.leaf_names = run, names, leaf_names
        self.depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.depth:
            self.run.note(getattr(func, "__name__", str(func)), False, (args, kwargs or {}), output)
        return output

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the arguments of a module's call."""
        self.depth += 1  # what is asked of tensors here is no call of the model's
        if self.depth == 1:
            for tensor in leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.run.value(tensor)
            self.run.calls.setdefault(self.names[module], []).append((args, kwargs))
        self.depth -= not self._is_leaf(module)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a leaf's call."""
        self.depth += not self._is_leaf(module)
        if self.depth == 1 and self._is_leaf(module):
            self.run.note(self.names[module], True, (args, kwargs), output)
        self.depth -= 1

    def _is_leaf(self, module: nn.Module) -> bool:
        return self.names[module] in self.leaf_names or not module._modules


def recorded_run(model: nn.Module, arguments: Arguments, leaf_names: Collection[str]) -> RecordedRun:
    """Run `model` once and note its calls.

    Args:
        model: has hooks for the time of the run.
        arguments: of the call.
        leaf_names: the modules whose calls are one event; so are those without children.
    """
    recorder = _Recorder(RecordedRun(), {module: name for name, module in model.named_modules()}, leaf_names)
    args, kwargs = arguments
    with _hooked(model, recorder), torch.no_grad(), recorder:
        model(*args, **kwargs)
    return recorder.run


@contextlib.contextmanager
def _hooked(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(recorder.before, with_kwargs=True))
            handles.append(module.register_forward_hook(recorder.after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()

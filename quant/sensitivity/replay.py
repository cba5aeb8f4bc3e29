"""The user's metric of many forms of a model, from one run of the model itself.

The first evaluation runs on a model that keeps, for each of its calls, what every form would give: values are computed
once and again only behind the layers that a form changes (`sweep.py`). Each further evaluation gets these outputs in
the same order, and costs what the metric costs without the model. Calls that are not the recorded ones, as where a
metric's next input depends on an output, are noticed, and the form is then built and evaluated itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import fingerprint
from quant.runtime.arguments import copied
from quant.runtime.trees import leaves
from quant.sensitivity.sweep import Form, Sweep, Values

MOST_BYTES = 1 << 30
"""Outputs that are kept at most; beyond that each form is built and evaluated itself."""


class Unlike(Exception):
    """An evaluation called the model otherwise than the recorded one, or gave more outputs than are kept."""


class Replay:
    """The recorded calls of one evaluation.

    Attributes:
        forms: name -> the form, and whether it is nearer to the float model than to that with all layers in int8.
    """

    def __init__(self, model: nn.Module, sweep: Sweep, forms: Mapping[str, tuple[Form, bool]]) -> None:
        self.model, self.sweep, self.forms = model, sweep, forms
        self._outputs: dict[str, list[Any]] = {name: [] for name in forms}
        self._calls: list[bytes] = []
        self._bytes = 0

    def record(self, evaluate: Callable[[nn.Module], Any]) -> Any:
        """What `evaluate` gives for the float model, whose calls are kept.

        Raises:
            Unlike: the calls cannot be kept; `CaptureMismatch` where the graph stands for none of them.
        """
        with self._calling(self._recorded):
            result = evaluate(self.model)
        if not self._calls:
            raise Unlike("the metric did not call the model itself")
        return result

    def evaluated(self, name: str, evaluate: Callable[[nn.Module], Any]) -> Any:
        """What `evaluate` gives for a form.

        Raises:
            Unlike: it made other calls.
        """
        place = 0

        def replayed(*args: Any, **kwargs: Any) -> Any:
            nonlocal place
            if place >= len(self._calls) or fingerprint((args, kwargs)) != self._calls[place]:
                raise Unlike("the metric's calls depend on the model's outputs")
            place += 1
            return copied(self._outputs[name][place - 1])

        with self._calling(replayed):
            result = evaluate(self.model)
        if place != len(self._calls):
            raise Unlike("the metric made fewer calls than with the float model")
        return result

    def outputs(self, name: str) -> list[Any]:
        """What a form gives, call by call."""
        return self._outputs[name]

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(fingerprint((args, kwargs)))
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = copied((args, kwargs))
            floats, outputs = outputs_of(self.sweep, self.forms, self.sweep.begin(args, kwargs))
            for name, output in outputs:
                self._keep(name, self.sweep.finished(output, args, kwargs))
            return self.sweep.finished(self.sweep.output(floats), args, kwargs)

    def _keep(self, name: str, output: Any) -> None:
        kept = copied(output)
        self._bytes += sum(one.numel() * one.element_size() for one in leaves(kept) if isinstance(one, Tensor))
        if self._bytes > MOST_BYTES:
            raise Unlike(f"the outputs of all forms take more than {MOST_BYTES >> 20} MiB")
        self._outputs[name].append(kept)

    @contextlib.contextmanager
    def _calling(self, forward: Callable[..., Any]) -> Iterator[None]:
        own = self.model.__dict__.get("forward")
        self.model.__dict__["forward"] = forward
        try:
            yield
        finally:
            del self.model.__dict__["forward"]
            if own is not None:
                self.model.__dict__["forward"] = own


def outputs_of(
    sweep: Sweep, forms: Mapping[str, tuple[Form, bool]], inputs: Values
) -> tuple[Values, Iterator[tuple[str, Any]]]:
    """The values of a call in float, and by name the output of each form."""
    floats = sweep.values(inputs, sweep.floats)
    near_integers = any(not near_float for _, near_float in forms.values())
    integers = sweep.values(inputs, sweep.integers) if near_integers else {}

    def outputs() -> Iterator[tuple[str, Any]]:
        for name, (form, near_float) in forms.items():
            base = (floats, sweep.floats) if near_float else (integers, sweep.integers)
            yield name, sweep.again(*base, form)

    return floats, outputs()

"""The user's metric of many forms of a model, from one run of the model itself.

The first evaluation runs on a model that keeps, for each of its calls, what every form would give: values are computed
once and again only behind the layers that a form changes (`sweep.py`). Each further evaluation gets these outputs in
the same order, and costs what the metric costs without the model. A metric that does otherwise is noticed, and forms
are then built and evaluated themselves: its calls differ, as where the next input depends on an output or threads call
the model in any order, or it looks at the layers inside the model, which a replayed call does not run.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.batches import fingerprint
from quant.runtime.arguments import copied
from quant.runtime.matching import CaptureMismatch
from quant.runtime.own_forward import computing
from quant.runtime.trees import leaves
from quant.sensitivity.sweep import Form, Sweep, Values

MOST_BYTES = 1 << 30
"""Outputs that are kept at most; beyond that each form is built and evaluated itself."""


class Unlike(Exception):
    """An evaluation did what the recorded calls do not stand for, or gave more outputs than are kept."""


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
        self._lock, self._inside, self._hooks = threading.Lock(), 0, 0
        self._unlike = ""  # said inside of a metric, which may pass over an exception

    def record(self, evaluate: Callable[[nn.Module], Any]) -> Any:
        """What `evaluate` gives for the float model, whose calls are kept.

        Raises:
            Unlike: the calls cannot be kept, or the graph does not stand for them.
        """
        with computing(self.model, self._recorded), self._watching_layers():
            result = self._evaluated(evaluate)
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
            with self._lock:
                if place >= len(self._calls) or _key(args, kwargs) != self._calls[place]:
                    raise self._noted("the metric's calls depend on the model's outputs, or come in any order")
                place += 1
                return copied(self._outputs[name][place - 1])

        with computing(self.model, replayed):
            result = self._evaluated(evaluate)
        if place != len(self._calls):
            raise Unlike("the metric made fewer calls than with the float model")
        return result

    def outputs(self, name: str) -> list[Any]:
        """What a form gives, call by call."""
        return self._outputs[name]

    def _evaluated(self, evaluate: Callable[[nn.Module], Any]) -> Any:
        """What a metric gives; Unlike also where it passed over that, or failed for it."""
        try:
            result = evaluate(self.model)
        except Exception as error:
            if self._unlike:
                raise Unlike(self._unlike) from error
            raise
        if self._unlike:
            raise Unlike(self._unlike)
        return result

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._inside = threading.get_ident()
            try:
                return self._outputs_kept(args, kwargs)
            except CaptureMismatch as error:
                raise self._noted(str(error)) from error
            finally:
                self._inside = 0

    def _outputs_kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._count_hooks() != self._hooks:
            raise self._noted("the metric hooks layers inside the model")
        if torch.is_autocast_enabled("cpu"):
            raise self._noted("the metric calls the model under autocast, in which simulated integers are no integers")
        self._calls.append(_key(args, kwargs))
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
            raise self._noted(f"the outputs of all forms take more than {MOST_BYTES >> 20} MiB")
        self._outputs[name].append(kept)

    def _noted(self, why: str) -> Unlike:
        self._unlike = why
        return Unlike(why)

    def _layers(self) -> list[nn.Module]:
        return [one for one in self.model.modules() if one is not self.model]

    def _count_hooks(self) -> int:
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in self._layers())

    @contextlib.contextmanager
    def _watching_layers(self) -> Iterator[None]:
        """Note calls of layers that the metric makes itself."""

        def before(module: nn.Module, _: Any) -> None:
            if self._inside != threading.get_ident():
                self._noted(f"the metric calls a {type(module).__name__} inside the model itself")

        with contextlib.ExitStack() as handles:
            for one in self._layers():
                handles.callback(one.register_forward_pre_hook(before).remove)
            self._hooks = self._count_hooks()
            yield


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Of all values of a call: inputs of which a metric changed a single one are others."""
    check = 0
    for one in leaves((args, kwargs)):
        if isinstance(one, Tensor) and one.layout is torch.strided and not one.is_meta:
            values = one.detach().cpu().contiguous().view(-1)
            content: Any = values.view(torch.uint8).numpy() if len(values) else b""
            check = zlib.crc32(content, check)
    return fingerprint((args, kwargs)) + check.to_bytes(4, "little")


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

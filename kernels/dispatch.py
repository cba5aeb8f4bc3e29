"""The dispatch: chooses the backend that computes an operator.

The first of these decides: the name in the call (a layer's own choice), the enclosing `with use(...)` in this thread,
QUANT_BACKEND, the fastest backend that is exact on this machine. There is no switch for the whole process. Third
parties add backends by `register_backend`, or by an entry point of the group "octet.backends".
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from quant.kernels import in_graphs, ops, reference_activation, reference_histogram, trial
from quant.kernels.backend import Backend
from quant.kernels.backends.compiled import CompiledBackend
from quant.kernels.backends.onednn import OneDnnBackend
from quant.kernels.backends.reference import ReferenceBackend
from quant.kernels.registry import NotLoaded, Registry, described
from torch import Tensor


def _as_backend(name: str, value: Any) -> Backend:
    """A registered value as a backend; an entry point may name its class."""
    if isinstance(value, type) and issubclass(value, Backend):
        value = value()
    if not isinstance(value, Backend):
        raise TypeError(f"backend {name!r}: expected a quant.kernels.Backend, got {described(value)}")
    if not name or value.name != name:
        raise ValueError(
            f"backend {name!r}: {described(value)} has the name {value.name!r}, expected the same, not empty"
        )
    if getattr(value.product, "__func__", None) is Backend.product:
        raise ValueError(
            f"backend {name!r}: {described(value)} has no product(q_x, q_weight), the exact int32 sums that all else "
            "is made of"
        )
    return value


_OWN = {
    backend.name: backend for backend in (*map(CompiledBackend, ops.LIBRARIES), OneDnnBackend(), ReferenceBackend())
}
_BACKENDS: Registry[Backend] = Registry("backend", "octet.backends", _OWN, _as_backend)

_IN_GRAPH = CompiledBackend("")
_is_compiling = torch.compiler.is_compiling
_FROM_ENVIRONMENT = os.environ.get("QUANT_BACKEND", "")
_HAS_EXTENSION = not (ops.extension_problem() or ops.isa_problem())

_usable: dict[str, Backend] = {}
"""Name -> backend that `find` has checked; '' is the default. A CPU's features do not change."""


class _Scoped(threading.local):
    """The name that the innermost `use` of a thread gave, or ''."""

    name = ""


_scoped = _Scoped()


class BackendUnavailable(ValueError):
    """A backend does not exist or cannot be used on this machine; the message says why and names those that can."""


def register_backend(backend: Backend) -> Backend:
    """Register a backend under its name, in this process.

    Its product is compared with the exact one when it is first used. An installed package needs no call: it provides an
    entry point of the group "octet.backends", with the backend's name, that names the class.

    Raises:
        ValueError, TypeError: it is not a backend, has no product, or another backend has its name.
    """
    return _BACKENDS.add(getattr(backend, "name", ""), backend)


def available() -> dict[str, str]:
    """Name of each backend -> '' where it can be used here, else the reason. Imports those of installed packages."""
    problems = _BACKENDS.load_all()
    return {**{name: _reason(backend) for name, backend in _BACKENDS.items()}, **problems}


def find(name: str) -> Backend:
    """The backend of this name.

    Raises:
        BackendUnavailable: there is no such backend, or it cannot be used on this machine.
    """
    try:
        backend = _BACKENDS[name]
    except KeyError:
        known = ", ".join(_BACKENDS.names())
        raise BackendUnavailable(f"no backend is called {name!r}; there are {known}") from None
    except NotLoaded as error:
        raise BackendUnavailable(str(error)) from error
    reason = _reason(backend)
    if reason:
        usable = [name for name, other in _BACKENDS.items() if not _reason(other)]
        raise BackendUnavailable(f"backend {name!r} cannot be used here: {reason}; usable are {', '.join(usable)}")
    _usable[name] = backend
    return backend


@functools.cache
def _reason(backend: Backend) -> str:
    """The reason that a backend cannot be used here, or ''; third parties' products must also be exact."""
    reason = backend.why_not()
    return reason if reason or backend.name in _OWN else trial.problem(backend.product)


def current(name: str | None = "") -> Backend:
    """The backend that a call with this `name` ('' or None for no choice of its own) uses in this thread.

    While a graph is traced (torch.compile, torch.export, torch.jit.trace) a layer without a choice of its own stays so:
    the machine that runs the graph decides.
    """
    if not name:
        if torch.compiler.is_compiling() or torch._C._is_tracing():  # torch.jit.is_tracing, less a call
            return _IN_GRAPH
        name = _scoped.name or _FROM_ENVIRONMENT
    backend = _usable.get(name)
    if backend is None:
        backend = _usable[name] = find(name or default_name())
    return backend


def is_direct(name: str | None = "") -> bool:
    """Whether a layer with this choice may hand its call straight to the extension, as `direct` operators do, and leave
    the choice out: there is none, and the default here is a library of the extension.

    For layers so small that looking up a backend would cost as much as their arithmetic.
    """
    return _HAS_EXTENSION and not (name or _scoped.name or _FROM_ENVIRONMENT or _is_compiling())


@functools.cache
def default_name() -> str:
    """The fastest backend that is exact here; warns once with the reason where that is the reference.

    Raises:
        BackendUnavailable: QUANT_ISA names no instruction set of this architecture.
    """
    if ops.isa_problem():
        raise BackendUnavailable(ops.isa_problem())
    problem = ops.extension_problem()
    if not problem:
        return str(torch.ops.octet_native.default_backend())
    if os.environ.get("QUANT_EXTENSION") != "none":
        warnings.warn(f"int8 layers run on the slow reference backend: {problem}", stacklevel=3)
    return "reference"


@contextmanager
def use(name: str) -> Iterator[Backend]:
    """Compute with the backend `name` inside the `with` block, in this thread, where a layer has no choice of its own.

    A compiled, exported or traced graph does not see the scope: there a layer without a choice of its own is computed
    by the default of the machine that runs the graph.
    """
    backend = find(name)
    before = _scoped.name
    _scoped.name = name
    try:
        yield backend
    finally:
        _scoped.name = before


in_graphs.define(find)


def quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """`reference.quantize`."""
    q: Tensor = torch.ops.octet.quantize(x, scale, zero_point)
    return q


def dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    """`reference.dequantize`."""
    x: Tensor = torch.ops.octet.dequantize(q, scale, zero_point)
    return x


def requantize(sums: Tensor, multiplier: Tensor, zero_point: int, quant_min: int = 0, quant_max: int = 255) -> Tensor:
    """`reference.requantize`."""
    q: Tensor = torch.ops.octet.requantize(sums, multiplier, zero_point, quant_min, quant_max)
    return q


def histogram(x: Tensor, width: float, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference_histogram.histogram`, on the device of x."""
    counted: tuple[Tensor, Tensor, Tensor]
    counted = (torch.ops.octet if x.is_cpu else reference_histogram).histogram(x, width, bins)
    return counted


def observe_histogram(
    x: Tensor, low: Tensor, high: Tensor, nan_count: Tensor, inf_count: Tensor, counts: Tensor
) -> None:
    """`reference_histogram.observe_histogram`, on the device of x."""
    where = torch.ops.octet if x.is_cpu else reference_histogram
    where.observe_histogram(x, low, high, nan_count, inf_count, counts)


def channel_sums(x: Tensor, axis: int) -> Tensor:
    """`reference_activation.channel_sums`, on the device of x."""
    sums: Tensor = (torch.ops.octet if x.is_cpu else reference_activation).channel_sums(x, axis)
    return sums


def observe_activation(
    x: Tensor, axis: int, low: Tensor, high: Tensor, nan_count: Tensor, inf_count: Tensor, counts: Tensor,
    means: list[Tensor],
) -> None:  # fmt: skip
    """`reference_activation.observe_activation`, on the device of x."""
    where = torch.ops.octet if x.is_cpu else reference_activation
    where.observe_activation(x, axis, low, high, nan_count, inf_count, counts, means)
